"""Figures that a page takes from a benchmark stand on the page of that benchmark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.test_pages import PAGES, ROOT

NUMBER = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?:\.\d+)?(?![\w]|\.\d)")
LINK = re.compile(r"\[[^\]]*\]\(([^):#]+\.md)(?:#[\w-]+)?\)")
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
PASSAGE = re.compile(r"\n\s*\n|\n(?=[-|] ?)")
SENTENCE = re.compile(r"(?<=[.:;?])\s")
BENCHMARKS = ROOT / "docs" / "benchmarks"
INDEX = BENCHMARKS / "index.md"
# Benchmarks have figures of their own beside their links, and decisions are of the past.
READ = [INDEX, *(page for page in PAGES if page.parent.name not in ("benchmarks", "decisions"))]


def figures(text: str) -> set[float]:
    """Return the numbers of a text; those with letters beside them are names."""
    return {float(number.replace(",", "")) for number in NUMBER.findall(text)}


def sources(page: Path, text: str) -> list[Path]:
    """Return the pages of benchmarks to which a text of a page has links."""
    linked = [(page.parent / path).resolve() for path in LINK.findall(text)]
    return [target for target in linked if target.parent == BENCHMARKS and target != INDEX]


def quotations(page: Path) -> list[str]:
    """Return the sentences with a link to a benchmark, and such rows of the index."""
    found = []
    for passage in PASSAGE.split(FENCE.sub("", page.read_text(encoding="utf-8"))):
        is_row = page == INDEX and passage.startswith("|")
        texts = [passage] if is_row else SENTENCE.split(passage)
        found += [text for text in texts if sources(page, text)]
    return found


@pytest.mark.parametrize("page", READ, ids=[str(page.relative_to(ROOT)) for page in READ])
def test_figures_of_a_benchmark_stand_on_its_page(page: Path) -> None:
    unknown = {}
    for text in quotations(page):
        known: set[float] = set()
        for target in sources(page, text):
            known |= figures(target.read_text(encoding="utf-8"))
        if missing := figures(text) - known:
            unknown[text] = missing
    assert not unknown


def test_every_benchmark_has_a_row_in_the_index() -> None:
    rows = [text for text in quotations(INDEX) if text.startswith("|")]
    pages = {page for row in rows for page in sources(INDEX, row)}
    assert pages == {page for page in BENCHMARKS.glob("*.md") if page != INDEX}
