"""The tests that the table of frameworks names are there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
NAMED = sorted(set(re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_it_is_there(file: str, name: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert name in names if name else any(one.startswith("test_") for one in names)


def test_every_letter_has_a_test() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("| ")]
    cells = [cell for row in rows[1:] for cell in row.split("|")[2:]]
    used = {letter for cell in cells for letter in re.findall(r"\b[a-zA-Z]\b", cell)}
    explained = set(re.findall(r"^- ([a-zA-Z]): `tests/", PAGE, re.MULTILINE))
    assert used == explained
    assert len(used) > 10
