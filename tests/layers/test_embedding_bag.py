"""Bags of rows of a table: sums of one-hot rows, in every form in which torch takes bags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.testing import check_layer_helper, compare, dense_fisher
from tests.curvature import (
    blocks,
    closing,
    factors,
    fill,
    half_square,
    log_cosh,
    preconditioner,
    randn,
)

FLAT = torch.tensor([0, 3, 3, 1, 2, 5, 0, 2, 2])
OFFSETS = torch.tensor([0, 3, 3, 4, 9])  # the second bag is empty, and so is the last
MATRIX = torch.tensor([[0, 3, 3], [1, 2, 0], [2, 2, 2]])


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding", [None, 2])
@pytest.mark.parametrize("form", ["matrix", "offsets", "with the last offset"])
@pytest.mark.covering(together=2)
def test_rows_are_those_of_autograd(mode: str, padding: int | None, form: str) -> None:
    settings = {"mode": mode, "padding_idx": padding}
    settings["include_last_offset"] = form == "with the last offset"
    bag = nn.EmbeddingBag(6, 3, **settings)
    check_layer_helper(bag, *((MATRIX,) if form == "matrix" else (FLAT, OFFSETS)))


@pytest.mark.parametrize("form", ["matrix", "offsets"])
def test_rows_with_weights_are_those_of_autograd(form: str) -> None:
    inputs = (MATRIX,) if form == "matrix" else (FLAT, OFFSETS)
    weights = randn(*inputs[0].shape)
    settings = {"per_sample_weights": weights}
    check_layer_helper(fill(nn.EmbeddingBag(6, 3, mode="sum")), *inputs, settings=settings)


def test_bags_of_one_index_are_an_embedding() -> None:
    indices = torch.tensor([[0], [3], [3], [1]])
    found = []
    for table in (nn.Embedding(5, 2), nn.EmbeddingBag(5, 2, mode="sum")):
        model = fill(nn.Sequential(table, nn.Flatten(), nn.Linear(2, 2)))
        with closing(preconditioner(model, layers="all")) as own:
            log_cosh(model(indices), randn(4, 2)).backward()
            own.step()
            found.append((*factors(own, "0"), model[0].weight.grad))
    for one, other in zip(*found, strict=True):
        compare(one, other, "factors and direction")


def test_the_diagonal_is_that_of_the_dense_fisher() -> None:
    """With a square loss the block is a Kronecker product: of it the diagonal is taken."""
    model = fill(nn.Sequential(nn.EmbeddingBag(6, 2, mode="mean")))
    with closing(preconditioner(model, layers="all", fisher="type-2", loss="mse")) as own:
        output = model(MATRIX)
        own.observe(output)
        half_square(output, randn(3, 2)).backward()
        own.step()
        ((a,), (g,)) = factors(own, "0")

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, target)

    dense = dense_fisher(model, MATRIX, loss, randn(3, 2), kind="type-2")
    order = torch.arange(12).view(6, 2).T.flatten()
    compare(torch.kron(g, a.diag()).diag(), dense[order][:, order].diag(), "diagonal")


def test_empty_bags_count_for_nothing() -> None:
    found = []
    for offsets in (torch.tensor([0, 3]), torch.tensor([0, 3, 5, 5])):
        model = fill(nn.Sequential(nn.EmbeddingBag(6, 2, mode="sum")))
        with closing(preconditioner(model, layers="all", samples=lambda: 4)) as own:
            model[0](FLAT[:5], offsets).square().sum().backward()
            own.step()
            found.append(factors(own, "0"))
    compare(found[0][1], found[1][1], "G")
    compare(found[0][0], found[1][0], "A")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mode": "max"}, "'max' is not linear"),
    ({"sparse": True}, "sparse=False"),
    ({"max_norm": 1.0}, "max_norm"),
    ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
]


@pytest.mark.parametrize(("settings", "word"), REFUSED)
def test_what_cannot_be_right_is_refused_by_name(settings: dict[str, Any], word: str) -> None:
    model = nn.Sequential(nn.EmbeddingBag(4, 3, **settings), nn.Linear(3, 2))
    with closing(preconditioner(model, layers="all")) as own:
        assert set(blocks(own)) == {"1"}
        assert word in {row.parameter: row.reason for row in own.report()}["0.weight"]


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused_by_methods_of_gradients_too(kind: Any) -> None:
    model = nn.Sequential(kind(4, 3, sparse=True), nn.Flatten(), nn.Linear(3, 2))
    with closing(preconditioner(model, method="shampoo", damping=None)) as own:
        reasons = {row.parameter: row.reason for row in own.report()}
    assert "sparse=False" in reasons["0.weight"]
    assert not reasons["2.weight"]
    with pytest.raises(ValueError, match=r"0\.weight: .*build it with sparse=False, or freeze it"):
        soframe.Optimizer(model, method="muon", lr=0.1)
