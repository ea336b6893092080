"""Products, inverses, roots, spectra, sample gradients and scores, of every kind of layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import soframe
from benchmarks.influence import CONTENDERS, Result, Task
from benchmarks.layer_kinds import DAMPING, Library, of_operator, of_scores, products_of, verdict
from soframe.registry import KINDS as REGISTRIES
from tests.curvature import randn
from tests.products.kinds import KINDS, loss
from tests.products.table import COLUMNS, errors


@pytest.mark.parametrize("name", KINDS)
def test_operations_are_dense_products(name: str) -> None:
    kind = KINDS[name]()
    data = kind.data()
    curvature = soframe.Curvature(kind.model, layers=kind.layers).fit(data, loss)
    found = errors(curvature, kind, data)
    assert set(found) == set(COLUMNS)
    assert max(found.values()) < 1e-12, found


LIKE_OTHERS = {
    "BatchNorm3d": "BatchNorm2d, of another number of dimensions",
    "InstanceNorm3d": "InstanceNorm2d, of another number of dimensions",
}
"""Types of torch with a helper that are in no kind, and why."""


def test_every_helper_has_a_kind() -> None:
    registry = REGISTRIES["layer"]
    types, helpers = set(), set()
    for build in KINDS.values():
        kind = build()
        types |= {type(module) for module in kind.model.modules()}
        if isinstance(kind.layers, dict):
            helpers |= set(kind.layers.values())
    helpers |= {registry.lookup(module, optional=True) for module in types}
    # Types of other packages have a kind by their helper.
    keys = registry._components | registry._optional
    lack = {key.__name__ for key in keys if isinstance(key, type) and key not in types}
    assert lack == set(LIKE_OTHERS)
    assert set(keys.values()) <= helpers


@pytest.mark.parametrize(
    ("share", "word"), [(1.0, "served"), (0.0, "left out"), (2.0, "wrong"), (None, "refused")]
)
def test_a_library_of_scores_is_asked_for_the_products_of_gradients(
    share: float | None, word: str
) -> None:
    def run(task: Task) -> Result:
        if share is None:
            raise NotImplementedError
        products = products_of(task.model, task.train)
        products["0.0.weight"] *= share
        return Result(0.0, 0.0, torch.stack([*products.values()]).sum(0) / DAMPING)

    library = Library("of_this_test", of_scores(run))
    assert verdict(library, nn.Linear(3, 2), randn(6, 3, seed=0).float()) == word


def test_soframe_s_own_scores_are_such_products() -> None:
    library = Library("soframe", of_scores(CONTENDERS["soframe"].run))
    assert verdict(library, nn.LayerNorm(4), randn(6, 3, 4, seed=0).float()) == "served"


@pytest.mark.parametrize(("first", "word"), [(1.0, "served"), (0.0, "left out")])
def test_an_operator_is_asked_for_a_product_of_each_parameter(first: float, word: str) -> None:
    def times(vector: torch.Tensor) -> torch.Tensor:
        return torch.cat([first * vector[:6], vector[6:]])

    library = Library("of_this_test", lambda model, data: of_operator(model, times))
    assert verdict(library, nn.Linear(3, 2), randn(6, 3, seed=0).float()) == word
