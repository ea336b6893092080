"""Figures that a page takes from a benchmark stand on the page of that benchmark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_pages import PAGES, ROOT

NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?![\w]|\.\d)")
LINK = re.compile(r"\[([^\]]*)\]\(([^)#]*benchmarks/|)([\w-]+\.md)(?:#[\w-]+)?\)")
BENCHMARKS = ROOT / "docs" / "benchmarks"


def figures(text: str) -> set[float]:
    """Return the numbers of a text; those with letters beside them are names."""
    return {float(number.replace(",", "")) for number in NUMBER.findall(text)}


def quotations(page: Path) -> list[tuple[str, Path]]:
    """Return each text with a link to a benchmark: in the index a row, elsewhere the link's."""
    text = page.read_text(encoding="utf-8")
    if page == BENCHMARKS / "index.md":
        rows = [(line, LINK.search(line)) for line in text.splitlines() if line.startswith("|")]
        return [(row, BENCHMARKS / link[3]) for row, link in rows if link]
    return [(link[1], BENCHMARKS / link[3]) for link in LINK.finditer(text) if link[2]]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_figures_of_a_benchmark_stand_on_its_page(page: Path) -> None:
    unknown = {}
    for text, target in quotations(page):
        if missing := figures(text) - figures(target.read_text(encoding="utf-8")):
            unknown[text] = (target.name, missing)
    assert not unknown


def test_every_row_of_the_index_is_read() -> None:
    pages = {target.name for _, target in quotations(BENCHMARKS / "index.md")}
    assert pages >= {page.name for page in BENCHMARKS.glob("*.md")} - {"index.md"}
