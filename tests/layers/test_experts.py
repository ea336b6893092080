"""Experts in one parameter: each is a layer of its own, with a scale of its own."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.layers import BlockShape, ExpertsHelper
from soframe.methods import KFAC
from soframe.specs import FactorSpec
from soframe.strategies import Sharded
from soframe.testing import check_layer_helper, compare, dense_fisher, dense_preconditioned
from tests.curvature import closing, factors, half_square, preconditioner, randn
from tests.distributed.harness import run_ranks

EXPERTS, OUT, INTO = 3, 2, 4


class Experts(nn.Module):
    """``y[e] = x[e] W[e]^T``."""

    def __init__(self, transposed: bool = False) -> None:
        super().__init__()
        shape = (EXPERTS, INTO, OUT) if transposed else (EXPERTS, OUT, INTO)
        self.kernel = nn.Parameter(randn(*shape, seed=3))
        self.transposed = transposed

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ (self.kernel if self.transposed else self.kernel.mT)


class Routed(nn.Module):
    """Sends every sample to an expert of its own, in rows of which some are padding.

    Args:
        rows: How many rows an expert has room for.
    """

    def __init__(self, transposed: bool = False, rows: int = 6) -> None:
        super().__init__()
        self.experts, self.rows = Experts(transposed), rows

    def forward(self, x: Tensor) -> Tensor:
        features, expert = x[:, :INTO], x[:, INTO].long()
        places = torch.zeros(len(x), dtype=torch.long)
        for e in range(EXPERTS):
            places[expert == e] = torch.arange(int((expert == e).sum()))
        given = features.new_zeros(EXPERTS, self.rows, INTO).index_put((expert, places), features)
        return self.experts(given)[expert, places]


class Kernel(ExpertsHelper):
    parameter = "kernel"


class TransposedKernel(Kernel):
    transposed = True


HELPERS = {False: Kernel, True: TransposedKernel}


def batch(routes: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.cat([randn(len(routes), INTO, seed=seed), torch.tensor(routes)[:, None].double()], 1)
    return x, randn(len(routes), OUT, seed=seed + 50)


def exact(model: Routed, x: Tensor, y: Tensor, kind: Any = "type-2") -> Tensor:
    """The dense block of each expert, over (out, in)."""
    dense = dense_fisher(model, x, half_square, y, kind=kind)
    order = torch.arange(EXPERTS * OUT * INTO)
    if model.experts.transposed:
        order = order.view(EXPERTS, INTO, OUT).mT.flatten()
    dense = dense[order][:, order].view(EXPERTS, OUT * INTO, EXPERTS, OUT * INTO)
    return torch.stack([dense[e, :, e] for e in range(EXPERTS)])


def prepared(transposed: bool = False, **settings: Any) -> tuple[Routed, Any]:
    model = Routed(transposed)
    layers = {"experts": HELPERS[transposed]}
    own = preconditioner(model, layers=layers, **settings)
    return model, closing(own)


@pytest.mark.parametrize("transposed", [False, True])
def test_rows_are_those_of_autograd(transposed: bool) -> None:
    rows = randn(EXPERTS, 5, INTO)
    rows[0, 3:] = rows[2, 1:] = 0
    check_layer_helper(Experts(transposed), rows, helper=HELPERS[transposed], batch_dim=1)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("average", ["local", "global", "sum"])
def test_each_block_is_the_dense_fisher_of_its_expert(transposed: bool, average: Any) -> None:
    """A square loss, type-2, unequal numbers of rows; and the step that follows from it."""
    x, y = batch([0, 1, 0, 2, 0, 1])
    settings = {"fisher": "type-2", "loss": "mse", "loss_average": average}
    model, opened = prepared(transposed, **settings)
    with opened as own:
        output = model(x)
        own.observe(output)
        loss = (output - y).square()
        (loss.sum() if average == "sum" else loss.mean()).backward()
        raw = model.experts.kernel.grad.clone()
        own.step()
        a, g = factors(own, "experts")
    dense = exact(model, x, y) * 2 / OUT  # what the factors of a sum are of is its mean, too
    raw, result = (t.mT if transposed else t for t in (raw, model.experts.kernel.grad))
    for e in range(EXPERTS):
        compare(torch.kron(g[e], a[e]), dense[e], f"expert {e}")
        compare(result[e], dense_preconditioned(dense[e], raw[e], 0.1), f"step of {e}")


def test_each_block_of_one_row_is_the_dense_empirical_fisher() -> None:
    x, y = batch([0, 2, 1])
    model, opened = prepared(samples=lambda: 3)
    with opened as own:
        half_square(model(x), y).backward()
        own.step()
        a, g = factors(own, "experts")
    dense = exact(model, x, y, "empirical")
    for e in range(EXPERTS):
        compare(torch.kron(g[e], a[e]), dense[e], f"expert {e}")


def test_the_rows_of_an_expert_have_nothing_to_reduce() -> None:
    x, y = batch([0, 1, 0, 2, 0, 1])
    found = []
    for method in ("kfac", "kfac-reduce"):
        model, opened = prepared(method=method, samples=lambda: 6)
        with opened as own:
            half_square(model(x), y).backward()
            own.step()
            found.append(factors(own, "experts"))
    for name, one, reduced in zip("AG", *found, strict=True):
        compare(reduced, one, name)


def test_an_expert_that_no_row_reaches_keeps_what_is_known_of_its_outputs() -> None:
    """A is a mean over samples, zeros where none comes; G one over the rows that come."""
    windows = [batch([0, 1, 1], 0), batch([1, 1, 0, 0], 1), batch([2, 0], 2)]
    model, opened = prepared(samples=lambda: count[0], decay=0.5)
    count = [0]
    inputs, outputs = [], []
    with opened as own:
        for x, y in windows:
            count[0] = len(x)
            model.zero_grad()
            output = model(x)
            gradient = (output - y).detach()
            half_square(output, y).backward()
            own.step()
            expert, rows = x[:, INTO].long(), x[:, :INTO]
            inputs.append(
                [rows[expert == e].T @ rows[expert == e] / len(x) for e in range(EXPERTS)]
            )
            outputs.append([gradient[expert == e] for e in range(EXPERTS)])
        a, g = factors(own, "experts")
    for e in range(EXPERTS):
        weights = [0.125, 0.25, 0.5]
        wanted = sum(w * part[e] for w, part in zip(weights, inputs, strict=True)) / sum(weights)
        compare(a[e], wanted, f"A of expert {e}")
        seen = [part[e] for part in outputs if len(part[e])]
        kept = weights[-len(seen) :]
        moments = [rows.T @ rows / len(rows) for rows in seen]
        wanted = sum(w * m for w, m in zip(kept, moments, strict=True)) / sum(kept)
        compare(g[e], wanted, f"G of expert {e}")


class OutputsFirst(KFAC):
    """K-FAC with its factors in another order."""

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        a, g = super().factors(shape)
        return g, a


def test_experts_are_solved_before_a_row_has_reached_the_first() -> None:
    """Whichever factor comes first: A has one weight, and G one for each expert."""
    x, y = batch([1, 1, 2])
    found = []
    for method in (KFAC(), OutputsFirst()):
        model, opened = prepared(method=method, samples=lambda: 3)
        with opened as own:
            half_square(model(x), y).backward()
            own.step()
            found.append(model.experts.kernel.grad)
    compare(found[1], found[0], "step", rtol=1e-12)


def test_micro_batches_are_the_batch() -> None:
    whole = batch([0, 1, 1, 2, 0, 1])
    found = []
    for cuts in ([6], [2, 4]):
        count = [0]
        model, opened = prepared(samples=lambda count=count: count[0], loss_average="global")
        with opened as own:
            for x, y in zip(*(t.split(cuts) for t in whole), strict=True):
                count[0] = len(x)
                (half_square(model(x), y) * len(x) / 6).backward()
            own.step()
            found.append(factors(own, "experts"))
    for one, other in zip(*found, strict=True):
        compare(one, other, "micro-batches")


class Two(nn.Module):
    """The sum of two layers of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Routed(), Routed(transposed=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second(x)


def directions(rank: int, ranks: int) -> list[Tensor]:
    """Return two steps' directions; every rank has the same batch."""
    model, (x, y) = Two(), batch([0, 1, 1, 2, 0, 1])
    layers = {"first.experts": Kernel, "second.experts": TransposedKernel}
    with closing(preconditioner(model, layers=layers, strategy="owner-local")) as own:
        for _ in range(2):
            model.zero_grad()
            half_square(model(x), y).backward()
            own.step()
        return [kernel.grad for kernel in model.parameters()]


@pytest.mark.distributed
def test_a_rank_reads_no_inputs_of_experts_that_another_owns() -> None:
    for found in run_ranks(directions, 2):
        for direction, of_one_process in zip(found, directions(0, 1), strict=True):
            compare(direction, of_one_process, "owner-local")


def test_what_cannot_be_right_is_refused_by_name() -> None:
    model = Routed()
    with pytest.raises(ValueError, match=r"experts.*cannot be deferred.*deferred=False"):
        preconditioner(model, layers={"experts": Kernel}, strategy=Sharded(deferred=True))
    with pytest.raises(ValueError, match=r"kaisa.*means over the rows of each group"):
        preconditioner(model, layers={"experts": Kernel}, scaling="kaisa")
    reason = ExpertsHelper.unsupported(nn.Linear(2, 2))
    assert reason is not None
    assert "weight is 2-dimensional" in reason


class _Experts(nn.Module):
    """Three experts with biases, and a vector, as models of transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.randn(3, 4, 2))
        self.up_bias = nn.Parameter(torch.randn(3, 4))
        self.scale = nn.Parameter(torch.randn(3))


SomeExperts = type("SomeExperts", (_Experts,), {"__module__": "transformers.models.some"})


def test_methods_of_gradients_take_experts_one_by_one() -> None:
    """The direction of each is that of a model that has nothing else."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": SomeExperts(), "head": nn.Linear(4, 2)})
    optimizer = soframe.Optimizer(model, method="muon", lr=1.0, auxiliary_lr=0.1)
    rows = {row.parameter: row.method for row in optimizer.report()}
    methods = {"experts.up_proj": "muon", "experts.up_bias": "adamw", "experts.scale": "adamw"}
    assert {name: rows[name] for name in methods} == methods
    experts = model["experts"]
    before, gradient = experts.up_proj.detach().clone(), torch.randn(3, 4, 2)
    experts.up_proj.grad = gradient.clone()
    optimizer.step()
    for number in range(3):
        alone = nn.ModuleDict({"one": nn.Linear(2, 4, bias=False), "head": nn.Linear(4, 2)})
        start, alone["one"].weight.grad = (
            alone["one"].weight.detach().clone(),
            gradient[number].clone(),
        )
        soframe.Optimizer(alone, method="muon", lr=1.0).step()
        moved = experts.up_proj[number] - before[number]
        compare(moved, alone["one"].weight - start, f"expert {number}")
    optimizer.close()


def test_the_first_line_has_the_part_of_the_weights_that_have_a_block() -> None:
    """Of experts that a class keeps in one parameter, most have none."""
    model = nn.ModuleDict({"experts": SomeExperts(), "head": nn.Linear(4, 2)})
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    with closing(soframe.Preconditioner(model, layers="all")) as preconditioner:
        report = preconditioner.report()
    covered = sum(sizes[row.parameter] for row in report if row.block is not None)
    assert 0 < covered < sum(sizes.values()) / 2
    first = str(report).splitlines()[0]
    assert first.endswith(f", {covered / sum(sizes.values()):.0%} of the trained weights")
