"""Products, inverses, roots, spectra, sample gradients and scores, of every kind of layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from benchmarks.influence import CONTENDERS, Result, Task
from benchmarks.layer_kinds import DAMPING, Library, of_operator, of_scores, products_of, verdict
from soframe.registry import KINDS as REGISTRIES
from tests.curvature import randn
from tests.products.kinds import KINDS, Batch, Kind, loss, rows_of
from tests.products.table import COLUMNS, errors, taken

# -- other methods ---------------------------------------------------------------------------------

CALLED_OFTEN = {"LSTMCell", "GRUCell", "RNNCell", "a layer called twice"}
"""Kinds with several calls for a sample, of one row each; products between calls are left out."""
WITHOUT_SAMPLES = {"experts.0", "experts.1", "experts.2"}
"""Parts that cannot tell the samples of their rows: each row is one."""
TABLES = {"Embedding", "Embedding, padding", "EmbeddingBag"}
"""Kinds whose A is a diagonal."""


def gradients_of(name: str, kind: Kind, data: list[Batch]) -> list[Tensor]:
    """Return the gradients ``[samples, groups, out, in]`` of each part, of samples or of calls."""
    each = zip(*(taken(kind, kind.gradients(batch)) for batch in data), strict=True)
    found = []
    for part, flat in zip(kind.parts, each, strict=True):
        inputs, outputs = rows_of(kind, part, data)
        if name in CALLED_OFTEN or part.module in WITHOUT_SAMPLES:
            found.append(torch.einsum("gro,gri->rgoi", outputs, inputs))
        else:
            found.append(torch.cat(flat).unflatten(2, (outputs.shape[2], inputs.shape[2])))
    return found


def diagonal(name: str, kind: Kind, data: list[Batch]) -> list[Tensor]:
    """Return the mean squares of gradients."""
    samples = sum(len(targets) for _, targets in data)
    found = []
    for gradients in gradients_of(name, kind, data):
        squares = gradients.square().sum(0) / samples
        found.append(torch.diag_embed(squares.flatten(1)))
    return found


def ekfac(name: str, kind: Kind, data: list[Batch]) -> list[Tensor]:
    """Return ``(Q_G ⊗ Q_A) diag(S) (Q_G ⊗ Q_A)^T`` with S from rotated gradients."""
    samples = sum(len(targets) for _, targets in data)
    found = []
    for part, gradients in zip(kind.parts, gradients_of(name, kind, data), strict=True):
        inputs, outputs = rows_of(kind, part, data)
        left = torch.linalg.eigh(outputs.mT @ outputs).eigenvectors
        right = torch.linalg.eigh(inputs.mT @ inputs).eigenvectors
        if name in TABLES:
            right = torch.eye(inputs.shape[2], dtype=inputs.dtype).unsqueeze(0)
        scale = (left.mT @ gradients @ right).square().sum(0) / samples
        pairs = zip(left.contiguous(), right.contiguous(), strict=True)  # as kron needs
        basis = torch.stack([torch.kron(g, a) for g, a in pairs])
        found.append(basis @ torch.diag_embed(scale.flatten(1)) @ basis.mT)
    return found


def foof(name: str, kind: Kind, data: list[Batch]) -> list[Tensor]:
    """Return ``I ⊗ A``."""
    samples = sum(len(targets) for _, targets in data)
    found = []
    for part in kind.parts:
        inputs, outputs = rows_of(kind, part, data)
        moment = inputs.mT @ inputs / samples
        if name in TABLES:
            moment = torch.diag_embed(moment.diagonal(dim1=1, dim2=2))
        unit = torch.eye(outputs.shape[2], dtype=outputs.dtype)
        found.append(torch.stack([torch.kron(unit, a) for a in moment]))
    return found


def kfac_reduce(name: str, kind: Kind, data: list[Batch]) -> list[Tensor]:
    """Return ``G ⊗ A`` of mean inputs and summed gradients over the positions of a sample."""
    samples = sum(len(targets) for _, targets in data)
    found = []
    for part in kind.parts:
        inputs, outputs = rows_of(kind, part, data)
        mean = inputs.unflatten(1, (samples, -1)).mean(2)
        total = outputs.unflatten(1, (samples, -1)).sum(2)
        moments = zip(total.mT @ total, mean.mT @ mean, strict=True)
        found.append(torch.stack([torch.kron(g, a) for g, a in moments]) / samples**2)
    return found


TIED = "table and head tied"  # served by K-FAC alone; the others have no block for it
METHODS: dict[str, tuple[Callable[..., list[Tensor]], set[str]]] = {
    # Three eigenvalues of the transposed convolution's A are the same, so any basis of theirs is.
    "ekfac": (ekfac, {TIED, "ConvTranspose2d"}),
    # Fifteen rows of a first batch of five samples are taken for three of each, in one pass.
    "diagonal": (diagonal, {TIED, "experts as layers"}),
    "foof": (foof, {TIED}),
    "kfac-reduce": (
        kfac_reduce,
        # Their samples have no rows, or some positions or calls alone; the summed gradients of the
        # keys of attention are zero.
        {TIED, "experts", "experts as layers", "MultiheadAttention", *TABLES, *CALLED_OFTEN},
    ),
}
"""The dense matrices of methods, and the kinds that they do not serve or have no simple ones."""
QUICK = {("ekfac", "Conv2d, grouped"), ("diagonal", "MultiheadAttention"), ("foof", "Linear")}


def cases() -> list[Any]:
    found = [pytest.param("kfac", name) for name in KINDS]
    for method, (_, without) in METHODS.items():
        for name in KINDS:
            marks = () if (method, name) in QUICK else pytest.mark.thorough
            if name not in without:
                found.append(pytest.param(method, name, marks=marks))
    return found


@pytest.mark.parametrize("method", METHODS)
def test_other_methods_have_no_block_for_a_tied_table(method: str) -> None:
    model = KINDS[TIED]().model
    with pytest.raises(ValueError, match="shared with a layer of another geometry"):
        soframe.Curvature(model, method, layers="all")


@pytest.mark.parametrize(("method", "name"), cases())
def test_operations_are_dense_products(method: str, name: str) -> None:
    kind = KINDS[name]()
    data = kind.data()
    curvature = soframe.Curvature(kind.model, method, layers=kind.layers).fit(data, loss)
    dense, most = None, 1e-12
    if method in METHODS:
        dense, most = METHODS[method][0](name, kind, data), 1e-9
    found = errors(curvature, kind, data, dense)
    assert set(found) == set(COLUMNS)
    assert max(found.values()) < most, found


# -- kinds and helpers -----------------------------------------------------------------------------

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


# -- other libraries -------------------------------------------------------------------------------


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
