"""References are complete, well-formed, and those that the documentation names."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

import pytest

import soframe
from soframe.citations import PAPERS, cite, entries, fields

ROOT = Path(__file__).resolve().parents[1]
TEXT = (ROOT / "soframe" / "references.bib").read_text(encoding="utf-8")
VENUES = {"booktitle", "journal", "publisher", "howpublished", "eprint"}


def surname(entry: str) -> str:
    """The surname of the first author."""
    return fields(entry)["author"].partition(",")[0]


@pytest.mark.parametrize("kind", ["method", "solver", "strategy", "loss", "damping"])
def test_every_component_has_its_references(kind: str) -> None:
    own = {
        name for name, of in soframe.available(kind).items() if of.__module__.startswith("soframe.")
    }
    assert set(PAPERS[kind]) == own
    # Without a paper: combinations of others, textbook formulas, likelihoods.
    none = {name for name, keys in PAPERS[kind].items() if not keys}
    assert none == {"solver": {"root"}, "loss": own, "damping": {"constant"}}.get(kind, set())


def test_a_name_is_of_one_kind() -> None:
    names = list(chain.from_iterable(PAPERS.values()))
    assert len(set(names)) == len(names)


def test_every_key_has_an_entry_and_every_entry_a_name() -> None:
    keys = {key for of_kind in PAPERS.values() for group in of_kind.values() for key in group}
    assert keys == set(entries())


def test_entries_are_read_whole() -> None:
    assert "\n\n".join(entries().values()) + "\n" == TEXT
    for entry in entries().values():
        assert len(fields(entry)) == len(entry.splitlines()) - 1  # its type, and a field to a line
        assert entry.count("{") == entry.count("}")


def test_entries_have_what_a_bibliography_needs() -> None:
    for key, entry in entries().items():
        if key == "soframe":
            continue
        read = fields(entry)
        assert {"author", "title", "year"} <= set(read), key
        assert set(read) & VENUES, key
        assert key.startswith(f"{surname(entry).lower()}{read['year']}"), key
        if "eprint" in read:
            assert read["archiveprefix"] == "arXiv"
            assert re.fullmatch(r"\d{4}\.\d{4,5}", read["eprint"]), key
            # The year is that of the publication, which follows the preprint.
            assert 2000 + int(read["eprint"][:2]) <= int(read["year"]), key


def test_soframe_is_cited_as_its_citation_file_says() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    (title,) = re.findall(r'^title: "(.*)"$', citation, re.MULTILINE)
    (version,) = re.findall(r"^version: (.*)$", citation, re.MULTILINE)
    authors = re.findall(r"^  - name: (.*)$", citation, re.MULTILINE)
    (entry,) = cite().values()
    read = fields(entry)
    assert read["title"].replace("{", "").replace("}", "") == title
    assert read["version"] == version
    assert read["author"] == " and ".join(f"{{{author}}}" for author in authors)


def test_the_sources_of_the_methods_page_are_cited() -> None:
    page = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)` \|[^|]*\|([^|]*)\|", page, re.MULTILINE)
    named = re.compile(r"([A-Z]\w+)(?: and [A-Z]\w+| et al\.)?, (\d{4})")
    sources = {
        name: set(named.findall(source)) for name, source in rows if name in PAPERS["method"]
    }
    assert set(sources) == set(PAPERS["method"])
    assert sources["tnt"] == {("Ren", "2021")}
    for name in PAPERS["method"]:
        cited = {(surname(entry), fields(entry).get("year")) for entry in cite(name).values()}
        assert sources[name] <= cited, name
