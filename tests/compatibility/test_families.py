"""One step of each method on each family of models: see `tests.compatibility.families`."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest

from tests.compatibility.families import FAMILIES, METHODS, PAGE, first_step


@pytest.mark.filterwarnings("ignore")  # theirs, about kernels that are not there
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_has_a_block_and_moves(family: str, method: str) -> None:
    package, _, _ = family.partition(" ")
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    shares, _ = first_step(family, method)
    assert set(shares) <= {method, "adamw"}
    assert sum(shares.values()) == pytest.approx(1)


def test_the_page_has_every_family() -> None:
    _, *sections = PAGE.read_text(encoding="utf-8").split("\n## ")
    rows = [
        f"{section.splitlines()[0]} {name}"
        for section in sections
        for name in re.findall(r"^\| ([\w.]+) \| \d", section, re.MULTILINE)
    ]
    assert rows == list(FAMILIES)
