"""Each passage of the documentation that promises an error names a test that sees an error.

The test, or a function of its file that it names, expects one by a name of `SEEN`, or catches one
and returns its words, which are compared. The names stand in a comment under the paragraph or list
item, or in the row of a table: `<!-- error: tests/robustness/test_ending.py::test_name -->`,
several with spaces between them, or `none` where the passage promises no error of soframe's. A
passage needs no comment before a fence that says `python raises=ValueError`: that code is run.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.docs.page import FENCE, RAISES
from tests.docs.test_pages import PAGES, ROOT

WORDS = re.compile(
    r"\ban error\b|\bare errors\b|^\W*Errors\b|\b\w+Error\b"
    r"|\braises?\b|\brefuse[sd]?\b|\brejects?\b(?!=)"
)
# What expects an error: in this process, on ranks, or as the end of a command.
SEEN = {
    *("raises", "warns", "RankError", "RankFailure", "require_refused", "assert_refused"),
    *("exit_code", "returncode", "status"),
}
COMMENT = re.compile(r"<!-- error: (.+?) -->")
# Decisions are of the past; the other two have tests of their own, which try what they say.
ELSEWHERE = {"compatibility.md", "combinations.md"}
READ = [page for page in PAGES if page.name not in ELSEWHERE and page.parent.name != "decisions"]


def passages(text: str) -> dict[int, str]:
    """Return paragraphs, list items and rows by their first lines, from 1.

    A passage before a fence that has to raise an error ends with the fence's info string.
    """
    found: dict[int, str] = {}
    start, fence = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        mark = FENCE.match(line)
        if fence:
            fence = "" if line.strip() == fence else fence
        elif mark and not mark["info"].startswith("{"):
            fence = mark["marks"]
            if RAISES.fullmatch(mark["info"].strip()) and found:
                found[max(found)] += "\n" + mark["info"]
            start = 0
        elif not line.strip() or line.startswith("#"):
            start = 0
        elif not start or re.match(r"\s*([-*] |\d+\. |\|)", line):
            start = number
            found[start] = line
        else:
            found[start] += "\n" + line
    return found


def promises(text: str) -> dict[int, str]:
    """Return the passages that promise an error, by their first lines."""
    return {
        line: passage
        for line, passage in passages(text).items()
        if WORDS.search(COMMENT.sub("", passage)) and not RAISES.search(passage)
    }


@cache
def functions(file: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a file by their names."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}


def sees_an_error(name: str, of_file: dict[str, ast.FunctionDef]) -> bool:
    """Return whether a function, or one of its file that it names, expects or catches an error."""
    reached: set[str] = set()
    left = {name}
    while left:
        function = left.pop()
        reached.add(function)
        for node in ast.walk(of_file[function]):
            word = getattr(node, "id", getattr(node, "attr", ""))
            if word in SEEN or (isinstance(node, ast.ExceptHandler) and node.name):
                return True
            if word in of_file and word not in reached:
                left.add(word)
    return False


@pytest.mark.parametrize("page", READ, ids=[str(page.relative_to(ROOT)) for page in READ])
def test_every_promise_names_its_test(page: Path) -> None:
    for line, passage in promises(page.read_text(encoding="utf-8")).items():
        comment = COMMENT.search(passage)
        where = f"{page.relative_to(ROOT)}:{line}"
        assert comment, f"{where}: name the test of this error, <!-- error: FILE::TEST -->"
        for test in comment[1].split() if comment[1] != "none" else []:
            file, _, name = test.partition("::")
            assert name in functions(file), f"{where}: there is no {test}"
            assert sees_an_error(name, functions(file)), f"{where}: {test} expects no error"


def test_no_comment_is_left_where_there_is_no_promise() -> None:
    for page in READ:
        text = page.read_text(encoding="utf-8")
        named = sum(bool(COMMENT.search(passage)) for passage in promises(text).values())
        assert len(COMMENT.findall(text)) == named, page


PAGE = """\
# It raises

First `f(0)` is an error,
and says so.
<!-- error: tests/a.py::test_a -->

- A list raises.
- A list does not.

| a | ValueError <!-- error: none --> |
|---|---|

It raises what stands here:

```python raises=ValueError
raise ValueError
```
"""


def test_passages_that_promise_are_found() -> None:
    assert sorted(promises(PAGE)) == [3, 7, 10]
    assert COMMENT.search(promises(PAGE)[3])
    assert COMMENT.search(promises(PAGE)[7]) is None


FILE = """\
def caught():
    try:
        f(0)
    except ValueError as error:
        return str(error)

def test_of_another():
    assert "no 0" in caught()

def test_here():
    with pytest.raises(ValueError):
        f(0)

def test_none():
    assert test_none and f(1) == 1
"""


def test_a_test_that_expects_no_error_is_found() -> None:
    of_file = {
        node.name: node for node in ast.parse(FILE).body if isinstance(node, ast.FunctionDef)
    }
    seen = {name for name in of_file if sees_an_error(name, of_file)}
    assert seen == {"caught", "test_of_another", "test_here"}
