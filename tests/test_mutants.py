"""The mutants: what is generated, which verdict it gets, and whether the table fits the project."""

import functools
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import mutants

TABLE, ACCEPTED = mutants.load()
TEXT = """\
def half(x: int = 4) -> float:
    scale = 2  # ÷
    if not x > 0:
        raise ValueError(f"{x + 1}")
    return x / scale
"""


def test_generated() -> None:
    found = list(mutants.candidates("half.py", TEXT))
    assert [(m.line, m.change) for m in found] == [
        (1, "4 -> 5"),
        (2, "2 -> 3"),
        (3, "not x > 0 -> (x > 0)"),
        (3, "> -> <="),
        (3, "0 -> 1"),
        (5, "/ -> *"),
    ]
    assert found[-1].broken == TEXT.replace("x / scale", "x * scale")
    assert found[1].source == "scale = 2  # ÷"


@pytest.mark.parametrize(
    ("text", "changes"),
    [
        ("a @ b", ["a @ b -> ((b) @ (a))"]),
        ("(a) % (b)", ["% -> //"]),
        ("a -= 1", ["-= -> +=", "1 -> 2"]),
        ("a and b is not c", ["and -> or", "is not -> is"]),
        ("call(True)", ["call(True) -> pass", "True -> False"]),
        ("def f(): return [a for a in b]", ["[a for a in b] -> []"]),
        ("x = -a.mT", ["-a.mT -> (a.mT)", "a.mT -> a"]),
        ("x = a.sum()", ["a.sum -> a.mean"]),
        ("x: int | None", []),
        ("x = zip(a, b, strict=True)", []),
        ("x = load(a, strict=True)", ["True -> False"]),
    ],
)
def test_operators(text: str, changes: list[str]) -> None:
    assert [m.change for m in mutants.candidates("one.py", text)] == changes


def test_files_are_chosen_by_folder() -> None:
    files = ["soframe/a/one.py", "soframe/a/two.py", "soframe/b.py"]
    assert mutants.chosen(files, ["soframe"]) == files
    assert mutants.chosen(files, ["soframe/b.py", "soframe/a", "soframe/a/one.py"]) == [
        "soframe/b.py",
        *files[:2],
    ]
    with pytest.raises(SystemExit, match="no tests for soframe/c"):
        mutants.chosen(files, ["soframe/b.py", "soframe/c"])


HALF = """
def half(x):
    return x / 2 + 0 * x


def twice(x):
    return x + x


FOUR = twice(2)
"""
TESTS = """
from half import FOUR, half


def test_half():
    assert half(6) == 3


def test_four():
    assert FOUR == 4
"""
TABLE_OF_HALF = """
[tests]
"half.py" = ["test_half.py"]
[[accepted]]
file = "half.py"
source = "return x / 2 + 0 * x"
change = "+ -> -"
reason = "Adds 0."
"""


class Item:
    """A collected test."""

    def __init__(self, nodeid: str, *, distributed: bool = False) -> None:
        self.nodeid, self.distributed = nodeid, distributed

    def get_closest_marker(self, name: str) -> object:
        return name if self.distributed else None


def test_tests_of_ranks_run_last_and_where_they_are_named() -> None:
    ranks = [Item(f"tests/a/test_one.py::test_ranks[{i}]", distributed=True) for i in range(2)]
    items: list[Any] = [*ranks, Item("tests/a/test_one.py::test_plain"), Item("tests/b.py::test_b")]
    chosen = functools.partial(mutants.chosen_items, items, broken="soframe/a.py")
    assert chosen(tests=["tests/a"]) == [items[2]]
    assert chosen(tests=["tests/a", "tests/a/test_one.py::test_ranks"]) == [items[2], *ranks]
    assert chosen(tests=["tests/a", "tests/distributed"]) == [items[2], *ranks]


@pytest.mark.slow
def test_verdicts(tmp_path: Path) -> None:
    """A mutant that a test notices dies, also of a function that runs before the tests."""
    (tmp_path / "half.py").write_text(HALF)
    (tmp_path / "test_half.py").write_text(TESTS)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/mutants.toml").write_text(TABLE_OF_HALF)
    command = [sys.executable, "-P", mutants.__file__, "--file", "half.py", "--sample", "0"]
    tried = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    found = re.findall(r"^(\w+) +\d+ s  half.py:\d+  (.*)$", tried.stdout, re.MULTILINE)
    assert found == [
        ("killed", "/ -> *"),
        ("killed", "2 -> 3"),
        ("killed", "0 -> 1"),
        ("SURVIVED", "* -> /"),
        ("killed", "+ -> -"),  # of twice
        ("killed", "2 -> 3"),
    ], tried.stdout + tried.stderr
    assert tried.stdout.endswith("6 of 7 killed or accepted (1): 86%\n")
    assert tried.returncode == 1
    (tmp_path / "test_half.py").write_text("def test_half():\n    assert False\n")
    tried = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "tests fail without a mutant: ['test_half.py::test_half']" in tried.stderr
    assert tried.returncode == 1


def test_the_table_fits_the_project() -> None:
    for file, tests in TABLE.items():
        assert Path(file).is_file(), file
        assert all(Path(test.partition("::")[0]).exists() for test in tests), file


def test_accepted_survivors_are_still_generated() -> None:
    candidates: dict[str, list[mutants.Mutant]] = {}
    for entry in ACCEPTED:
        file = entry["file"]
        if file not in candidates:
            text = Path(file).read_text(encoding="utf-8")
            candidates[file] = list(mutants.candidates(file, text))
        assert any(mutants.matches(entry, mutant) for mutant in candidates[file]), entry
        assert entry["reason"]
