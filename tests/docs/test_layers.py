"""The table of layers has every layer that there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from soframe.registry import KINDS

PAGE = Path(__file__).resolve().parents[2] / "docs" / "layers.md"
LAYERS = KINDS["layer"]


def listed() -> set[str]:
    """The names in the first column of the table."""
    names: set[str] = set()
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| "):
            first, last = "", line.split("|")[1]
            for name in re.findall(r"`([^`]+)`", last):
                # "`nn.BatchNorm1d`, `2d`" is two of them.
                first = first[:-2] + name if re.fullmatch(r"[1-3]d", name) else name
                names.add(first.removeprefix("nn."))
    return names


@pytest.mark.parametrize(
    "key", [*LAYERS.available(), *LAYERS._optional], ids=lambda key: getattr(key, "__name__", key)
)
def test_every_layer_is_in_the_table(key: type | str) -> None:
    name = key.rpartition(".")[2] if isinstance(key, str) else key.__name__
    assert name in listed()
