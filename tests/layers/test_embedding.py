"""Embeddings: a diagonal factor straight from indices, held to one-hot rows of a linear layer."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soframe
from soframe.damping.policies import RelativeDamping
from soframe.layers import EmbeddingHelper, LayerHelper
from soframe.layers.base import moment
from soframe.solvers import Lazy
from soframe.specs import FactorSpec
from soframe.testing import check_layer_helper, compare, dense_fisher, dense_preconditioned
from tests import kit
from tests.curvature import (
    Kind,
    blocks,
    closing,
    factors,
    fill,
    gather,
    half_square,
    log_cosh,
    preconditioner,
    put_gradients,
    randn,
)

INDICES = torch.tensor([[0, 3, 3], [1, 2, 0], [3, 3, 3], [4, 0, 2]])


@pytest.mark.parametrize("padding", [None, 2, -1])
@pytest.mark.parametrize("shape", [(6,), (5, 4), (3, 2, 2)])
def test_rows_are_those_of_autograd(padding: int | None, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    dtype = torch.int32 if padding is None else torch.int64
    indices = torch.randint(0, 7, shape, dtype=dtype)
    check_layer_helper(nn.Embedding(7, 3, padding_idx=padding), indices)


class OneHot(EmbeddingHelper):
    """The twin: a matrix of one-hot rows."""

    def factor(self, spec: FactorSpec) -> FactorSpec:
        found = super().factor(spec)
        return spec if found.kind == "diagonal" else found

    def input_moment(
        self,
        inputs: tuple[Tensor, ...],
        output_rows: Tensor,
        total: Tensor | None = None,
        scale: float = 1.0,
    ) -> Tensor:
        found = scale * moment(self.block_rows(inputs, output_rows))
        return found if total is None else total.add_(found)


@pytest.mark.parametrize("damping", [0.1, RelativeDamping(0.1)], ids=["", "relative"])
@pytest.mark.parametrize("solver", ["eigen", "inverse", "newton-schulz", "orthogonal-iteration"])
def test_a_diagonal_is_the_matrix_of_one_hot_rows(solver: str, damping: Any) -> None:
    found = []
    for helper in (EmbeddingHelper, OneHot):
        model = fill(nn.Sequential(nn.Embedding(5, 3, padding_idx=2), nn.Tanh(), nn.Linear(3, 2)))
        settings = {
            "solver": solver,
            "damping": damping,
            "layers": {"0": helper},
            "samples": "batch",
        }
        with closing(preconditioner(model, **settings)) as own:
            kit.train(model, lambda net, _: log_cosh(net(INDICES), randn(4, 3, 2)), range(3), own)
            assert blocks(own)["0"].running["A"].dim() == (2 if helper is EmbeddingHelper else 3)
            found.append(model[0].weight.grad)
    compare(*found, "preconditioned gradient", rtol=1e-6)


@pytest.mark.parametrize("kind", ["type-2", "empirical"])
def test_the_block_of_one_sample_is_the_dense_fisher(kind: Kind) -> None:
    model = fill(nn.Sequential(nn.Embedding(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    x, y = torch.tensor([2]), randn(1, 2)
    with closing(preconditioner(model, layers="all")) as own:
        gather(model, [(x, y)], log_cosh, kind)
        own.step()
        a, g = factors(own, "0")
        dense = dense_fisher(model, x, log_cosh, y, parameters=["0.weight"], kind=kind)
    order = torch.arange(12).view(4, 3).T.flatten()
    compare(torch.kron(g[0], a[0].diag()), dense[order][:, order], "block")


@pytest.mark.parametrize("average", ["local", "global", "sum"])
def test_the_block_is_the_dense_fisher_where_all_outputs_have_a_square_loss(average: Any) -> None:
    model = fill(nn.Sequential(nn.Embedding(5, 2)))
    batches = [(INDICES[:1], randn(1, 3, 2)), (INDICES[1:], randn(3, 3, 2))]
    with closing(preconditioner(model, layers="all", loss_average=average, samples="batch")) as own:
        gather(model, batches, half_square, loss_average=average)
        put_gradients(model)
        raw = model[0].weight.grad.clone()
        own.step()
        a, g = factors(own, "0")
    parts = [dense_fisher(model, x, half_square, y, kind="type-2") for x, y in batches]
    weights = [0.5, 0.5] if average == "local" else [0.25, 0.75]
    dense = sum(w * part for w, part in zip(weights, parts, strict=True))
    order = torch.arange(10).view(5, 2).T.flatten()
    exact = dense[order][:, order]
    compare(torch.kron(g[0], a[0].diag()), exact, "block")
    expected = dense_preconditioned(exact, raw.T, 0.1)
    compare(model[0].weight.grad.T, expected, "preconditioned gradient")


@pytest.mark.parametrize("method", ["kfac", "kfac-reduce"])
@pytest.mark.parametrize("fisher", ["empirical", "type-2"])
def test_padding_counts_for_nothing(method: str, fisher: str) -> None:
    """Whatever the gradient of its outputs: a batch with more padding has the same factors."""
    found = []
    for extra in (0, 3):
        model = fill(nn.Sequential(nn.Embedding(5, 2, padding_idx=2), nn.Linear(2, 2)))
        padded = F.pad(INDICES, (0, extra), value=2)
        weights = 1.0 if method == "kfac" else (3 + extra) / 3  # of means over positions
        settings = {"layers": "all", "method": method, "fisher": fisher, "loss": "mse"}
        settings["samples"] = lambda: 4
        with closing(preconditioner(model, **settings)) as own:
            output = model(padded)
            if fisher == "type-2":
                own.observe(output)
            (output[:, :3] - 1).square().sum().backward()
            own.step()
            a, g = factors(own, "0")
            found.append((a * weights**2, g))
    rows = int((INDICES != 2).sum())
    if method == "kfac":
        counts = torch.bincount(INDICES[INDICES != 2], minlength=5).double()
        compare(found[0][0][0] * 4, counts, "counts")
        assert rows == 10
    if fisher == "empirical":
        for name, one, other in zip("AG", *found, strict=True):
            compare(other, one, name)
    elif method == "kfac":
        compare(found[1][0], found[0][0], "A")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"sparse": True}, "sparse"),
        ({"max_norm": 1.0}, "max_norm"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq"),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(settings: dict[str, Any], word: str) -> None:
    model = nn.Sequential(nn.Embedding(4, 3, **settings), nn.Linear(3, 2))
    with closing(preconditioner(model, layers="all")) as own:
        assert word in {row.parameter: row.reason for row in own.report()}["0.weight"]


def test_the_report_says_what_is_diagonal() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))
    with closing(preconditioner(model, layers="all")) as own:
        notes = {row.parameter: row.note for row in own.report()}
    assert notes["0.weight"] == "A diagonal (4 rows)"
    assert not notes["1.weight"]


def test_solvers_without_diagonals_say_so_with_a_remedy() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"0: Lazy.*no diagonal factors, as A is; choose"):
        preconditioner(model, layers="all", solver=Lazy(soframe.solvers.Eigen()))
    with pytest.raises(ValueError, match=r"kaisa.*no diagonal factors"):
        preconditioner(model, layers="all", scaling="kaisa")


def test_a_run_goes_on_from_its_state() -> None:
    def made() -> tuple[nn.Module, soframe.Preconditioner]:
        model = fill(nn.Sequential(nn.Embedding(5, 2, padding_idx=2), nn.Linear(2, 2)))
        return model, preconditioner(model, layers="all", samples="batch")

    def step(model: nn.Module, own: soframe.Preconditioner, seed: int) -> Tensor:
        model.zero_grad()
        half_square(model(INDICES.roll(seed, 0)), randn(4, 3, 2, seed=seed)).backward()
        own.step()
        return model[0].weight.grad

    model, own = made()
    step(model, own, 0)
    other, resumed = made()
    resumed.load_state_dict(own.state_dict())
    assert torch.equal(step(model, own, 1), step(other, resumed, 1))


CASES: dict[str, Any] = {
    "indices": (lambda: nn.Embedding(5, 3), INDICES),
    "padding": (lambda: nn.Embedding(5, 3, padding_idx=3), INDICES),
    "bags": (lambda: nn.EmbeddingBag(5, 3, mode="mean", padding_idx=2), INDICES),
}


@pytest.mark.parametrize("case", CASES)
def test_second_moments_in_the_basis_are_those_of_samples(case: str) -> None:
    """EKFAC: of autograd's gradients, turned by the eigenvectors of G alone."""
    make, x = CASES[case]
    model = fill(nn.Sequential(make(), nn.Flatten(1), nn.Tanh()))
    y = randn(*model(x).shape)
    settings = {"layers": "all", "method": "ekfac", "samples": lambda: len(x), "solve_every": 9}
    with closing(preconditioner(model, **settings)) as own:
        for _ in range(2):  # the first step makes the basis, the second one's statistics are in it
            model.zero_grad()
            log_cosh(model(x), y).backward()
            raw = model[0].weight.grad.T.clone()
            own.step()
        block = blocks(own)["0"]
        basis, counts = block.second_order["G"]["vectors"][0], block.second_order["A"]["values"]
        assert counts.shape == (1, 5)
        expected = torch.zeros(3, 5, dtype=torch.float64)
        for one, target in zip(x, y, strict=True):
            loss = log_cosh(model(one[None]), target[None])
            (gradient,) = torch.autograd.grad(loss, [model[0].weight])
            expected += (basis.T @ gradient.T).square() / len(x)
        compare(block.running["S"][0], expected, "second moments")
        direction = basis @ ((basis.T @ raw) / (expected + 0.1))
        compare(model[0].weight.grad.T, direction, "direction")
        helper = block.helpers[0]
        inputs, rows = helper.inputs((x,), {}), randn(1, 4, 1 if case == "bags" else 3, 3)
        plain = LayerHelper.squared_gradients(helper, inputs, rows)
        compare(helper.squared_gradients(inputs, rows), plain, "its plain twin")
