"""The code in the documentation runs."""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.harness import run_ranks
from tests.docs.page import Block, blocks, main

ROOT = Path(__file__).resolve().parents[2]
RUNNER = Path(__file__).with_name("page.py")
BUILT = {"_build", "generated"}
PAGES = [ROOT / "README.md"] + [
    path
    for path in sorted((ROOT / "docs").rglob("*.md"))
    if not BUILT & set(path.relative_to(ROOT).parts)
]


def run(page: Path, where: Path) -> subprocess.CompletedProcess[str]:
    """Run a page as a reader may, by a new interpreter."""
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(RUNNER), str(page)]
    return subprocess.run(
        command, cwd=where, env=environment, capture_output=True, text=True, check=False
    )


def run_here(rank: int, ranks: int, page: Path, where: Path) -> tuple[int, str]:
    """Run a page in this process; return its status, and what it says in the end."""
    os.environ |= {"MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    os.chdir(where)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        status = main(page)
    return status, said.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        # Four checks of strategies take ten seconds.
        pytest.param(page, marks=[pytest.mark.thorough] * (page.name == "custom-strategy.md"))
        for page in PAGES
    ],
    ids=[str(page.relative_to(ROOT)) for page in PAGES],
)
def test_page(page: Path, tmp_path: Path) -> None:
    """In a process of its own, so that what a page registers and starts ends with it."""
    if blocks(page.read_text(encoding="utf-8")):
        [(status, said)] = run_ranks(run_here, 1, page, tmp_path, backend=None, fresh=True)
        if status != 0:
            message = said.splitlines()[-1].removeprefix(f"{ROOT}/")  # page, line and error
            pytest.fail(f"{message}\n{said}", pytrace=False)


NESTED = """\
1. In a list:
   ```python
   if True:
       x = 1
   ```

````{note}
```python
y = 2
```
````

```python notest
never()
```

```text
```

~~~python
z = 3
~~~

```python raises=KeyError
{}[z]
```
"""


def test_blocks_are_found_wherever_they_stand() -> None:
    assert blocks(NESTED) == [
        Block("if True:\n    x = 1", 3),
        Block("y = 2", 9),
        Block("z = 3", 21),
        Block("{}[z]", 25, "KeyError"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a\n```python\nx = 1\n", "line 2: this fence is never closed"),
        ("```python no-test\nx = 1\n```\n", "line 1: after ```python only 'notest'"),
        ("```python raises\nx = 1\n```\n", "line 1: after ```python only 'notest' or 'raises="),
        ("```py\nx = 1\n```\n", "line 1: write ```python"),
        ("```{code-block} python\nx = 1\n```\n", "line 1: write ```python"),
    ],
)
def test_code_that_would_not_run_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        blocks(text)


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("assert x == 2", "page.md:6: AssertionError"),
        ("x = = 2", "page.md:6: SyntaxError"),
        ("\ndef f():\n    raise KeyError(x)\n\nf()", "page.md:10: KeyError: 1"),
    ],
)
def test_a_failure_names_page_and_line(tmp_path: Path, code: str, failure: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```python\nx = 1\n```\n\n```python\n{code}\n```\n")
    done = run(page, tmp_path)
    assert done.returncode == 1
    assert failure in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("raise KeyError(x)", None),
        ("raise LookupError(x)", "page.md:6: LookupError: 1"),
        ("x = 2", "page.md:6: AssertionError: this code raised no KeyError"),
    ],
)
def test_a_promised_error_has_to_come(tmp_path: Path, code: str, failure: str | None) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```python\nx = 1\n```\n\n```python raises=KeyError\n{code}\n```\n")
    done = run(page, tmp_path)
    assert (done.returncode == 0) == (failure is None), done.stderr
    assert failure is None or failure in done.stderr.splitlines()[-1]


def test_a_page_is_a_module(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```python\nimport pickle\n\n\nclass Helper:\n    pass\n```\n\n"
        "```python\nrun = main = traceback = None\npickle.loads(pickle.dumps(Helper()))\n```\n"
    )
    done = run(page, tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_gallery_has_every_figure_behind_a_command() -> None:
    docs, figures, commands = ROOT / "docs", set[Path](), False
    for paragraph in (docs / "gallery.md").read_text(encoding="utf-8").split("\n\n"):
        if figure := re.fullmatch(r"!\[.+\]\((.+)\)\n?", paragraph):
            assert commands, paragraph
            figures.add(docs / figure[1])
        else:
            commands = "`" in paragraph
    assert figures == {p for p in docs.rglob("*.png") if not BUILT & {*p.relative_to(ROOT).parts}}
