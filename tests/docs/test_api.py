"""The pages of the API have every public name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import soframe

PAGES = Path(__file__).resolve().parents[2] / "docs" / "api"
LISTED = re.findall(
    r"^\.\. auto(?:class|function|module):: (\S+)",
    "\n".join(page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md"))),
    flags=re.MULTILINE,
)


def test_every_public_name_is_listed_once() -> None:
    names = {f"soframe.{name}" for name in soframe.__all__}
    assert names <= set(LISTED)
    assert len(LISTED) == len(set(LISTED))


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_every_page_is_in_the_index(page: Path) -> None:
    if page.stem != "index":
        assert f"]({page.name})" in (PAGES / "index.md").read_text(encoding="utf-8")
