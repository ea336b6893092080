"""The planned table of the page that chooses is what comes out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.recommended import rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "choose.md"


@pytest.mark.slow
def test_the_page_has_the_planned_figures() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    for name, moments, *planned in rows():
        (line,) = (line for line in lines if line.startswith(f"| {name} |"))
        line = line.replace("the same", " ".join(planned[:2]))
        shown = [float(number) for number in re.findall(r"\d+\.\d+", line)]
        one, eight = planned[:3], planned[3:]
        exact = [float(x) for x in (moments, *one[:2], *eight[:2], one[2], eight[2])]
        assert shown == pytest.approx(exact, abs=0.0051), name
