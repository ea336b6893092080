"""The tables of methods have every method that there is, once."""

from __future__ import annotations

import re
from pathlib import Path

import soframe

PAGE = Path(__file__).resolve().parents[2] / "docs" / "methods.md"


def test_every_method_is_in_a_table() -> None:
    listed = re.findall(r"^\| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert sorted(listed) == sorted(soframe.available("method"))
