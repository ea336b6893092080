"""Products, inverses, roots, spectra, sample gradients and scores, of every kind of layers."""

from __future__ import annotations

import pytest

import soframe
from tests.products.kinds import KINDS, loss
from tests.products.table import COLUMNS, errors


@pytest.mark.parametrize("name", KINDS)
def test_operations_are_dense_products(name: str) -> None:
    kind = KINDS[name]()
    data = kind.data()
    curvature = soframe.Curvature(kind.model, layers=kind.layers).fit(data, loss)
    found = errors(curvature, kind, data)
    assert set(found) == set(COLUMNS if kind.apart else COLUMNS[:-2])
    assert max(found.values()) < 1e-12, found
