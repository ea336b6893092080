"""The forward-only Fisher: K-FAC's own A, the identity for G, and no other trace of G."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import soframe
from soframe.methods import EKFAC, FOOF, KFAC, KFACReduce
from soframe.solvers import Eigen, Inverse, Solver
from soframe.testing import compare, dense_preconditioned, layer_fisher
from tests.curvature import (
    blocks,
    closing,
    fill,
    gradient_matrix,
    half_square,
    preconditioner,
    randn,
)
from tests.distributed.harness import run_ranks
from tests.examples import examples
from tests.trust_region.kit import closures, trust_region


class Plain(Solver):
    """A solver that leaves `apply_right` to its base class."""

    def tensors(self, factor: Any) -> Any:
        return Eigen().tensors(factor)

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        return Eigen().solve(matrix, damping)

    def apply(self, gradient: Tensor, **data: Any) -> Tensor:
        return Eigen().apply(gradient, **data)


SOLVERS = [Eigen(), Inverse(), Inverse("sqrt"), Inverse("full"), Plain()]


@given(sizes=st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)), bias=st.booleans())
@settings(max_examples=examples(8))
@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: repr(s)[:20])
def test_one_layer_of_a_squared_error_is_exact(
    solver: Solver, sizes: tuple[int, int, int], bias: bool
) -> None:
    samples, into, out = sizes
    model = fill(nn.Linear(into, out, bias=bias))
    x, y = randn(samples, into), randn(samples, out, seed=1)
    with closing(preconditioner(model, solver=solver, fisher="forward-only")) as own:
        half_square(model(x), y).backward()
        (block,) = blocks(own).values()
        raw = gradient_matrix(block).clone()
        own.step()
        fisher = layer_fisher(model, "", x, half_square, y, kind="type-2")[0]
        compare(torch.kron(torch.eye(out).double(), block.running["A"][0]), fisher, "kron(I, A)")
        expected = dense_preconditioned(fisher, raw[0], 0.1)
        compare(gradient_matrix(block)[0], expected, "preconditioned gradient", rtol=1e-8)


class Net(nn.Module):
    """A convolution in groups, a layer called twice, one in a checkpoint, one that is frozen."""

    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 2, groups=2)
        self.twice = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.head = nn.Linear(16, 3)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).flatten(1).tanh()

        def middle(x: Tensor) -> Tensor:
            return self.frozen(self.twice(self.twice(x).tanh()))

        if self.reentrant is None:
            return self.head(middle(x))
        return self.head(checkpoint(middle, x, use_reentrant=self.reentrant))


def data(step: int, samples: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return randn(samples, 2, 3, 3, seed=step), torch.randint(3, (samples,), generator=generator)


def train(
    model: nn.Module,
    fisher: str,
    *,
    average: Any = "local",
    parts: int = 1,
    factor: float = 1.0,
    wrapped: nn.Module | None = None,
    rows: slice = slice(None),
    **options: Any,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Two steps; returns A of every block, packed, and the last preconditioned gradients."""
    own = preconditioner(model, fisher=fisher, loss_average=average, **options)
    run = wrapped or model
    with closing(own):
        for step in range(2):
            model.zero_grad()
            x, y = (t[rows] for t in data(step))
            if not getattr(model, "reentrant", None):  # such a checkpoint warns
                with torch.no_grad():
                    run(x * 7)  # a validation pass
            run(x * 9)  # one that is never differentiated
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(run(a), b) / parts * factor).backward()
            raw = {name: gradient_matrix(b).clone() for name, b in blocks(own).items()}
            own.step()
        # By way of the state: on several ranks not everyone holds every factor.
        saved = own.state_dict()["blocks"]
        found = {name: block["factors"]["A"] for name, block in saved.items()}
        if fisher == "forward-only" and wrapped is None:
            for name, block in blocks(own).items():
                assert set(block.running) == set(block.second_order) == {"A"}
                for group, a in enumerate(block.running["A"]):
                    result = gradient_matrix(block)[group]
                    fisher_block = torch.kron(torch.eye(len(result)).double(), a)
                    expected = dense_preconditioned(fisher_block, raw[name][group], 0.1)
                    compare(result, expected, f"{name}, group {group}", rtol=1e-8)
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}
    return found, gradients


@pytest.mark.parametrize(
    ("average", "parts", "reentrant"),
    [
        *(("local", parts, reentrant) for parts in (1, 3) for reentrant in (None, False)),
        ("global", 3, None),
        ("sum", 3, None),
        ("sum", 3, True),
    ],
)
def test_the_inputs_factor_is_the_empirical_ones(
    average: str, parts: int, reentrant: bool | None
) -> None:
    ones, _ = train(fill(Net(reentrant)), "empirical", average=average, parts=parts)
    others, _ = train(fill(Net(reentrant)), "forward-only", average=average, parts=parts)
    assert set(ones) == set(others) == {"conv", "twice", "head"}
    for name, one in ones.items():
        assert torch.equal(one, others[name]), name


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_the_curvature_does_not_know_the_loss(factor: float) -> None:
    (one, unit), (other, scaled) = (
        train(fill(Net()), "forward-only", factor=f) for f in (1.0, factor)
    )
    assert all(torch.equal(one[name], other[name]) for name in one)
    for name, gradient in unit.items():
        compare(scaled[name], factor * gradient, name)


def test_no_moment_of_output_gradients_is_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Tensor:
        raise AssertionError("a moment of output gradients")

    monkeypatch.setattr(soframe.LayerHelper, "output_moment", refuse)
    train(fill(Net()), "forward-only")


@pytest.mark.slow
def test_state_and_memory_hold_the_inputs_factor_alone() -> None:
    model, x = fill(nn.Linear(3, 40)), randn(4, 3)
    with closing(preconditioner(model, fisher="forward-only")) as own:
        model(x).square().sum().backward()
        own.step()
        saved, usage = own.state_dict(), own.memory_usage()
        assert set(saved["blocks"]["Linear"]["factors"]) == {"A"}
        assert usage["factors"] == 8 * 4 * 4
        assert usage["second_order"] == 8 * (4 * 4 + 4)
        assert "foof / eigen" in str(own.report())
    with closing(preconditioner(model)) as other, pytest.raises(ValueError, match="made by FOOF"):
        other.load_state_dict(saved)
    results = []
    for state in (saved, None):
        with closing(preconditioner(model, fisher="forward-only", solve_every=9)) as own:
            if state:
                own.load_state_dict(state)
            model.zero_grad()
            model(x).square().sum().backward()
            own.step()
            results.append(model.weight.grad.clone())
    compare(results[0], results[1], "resumed")


def test_observing_is_not_needed_and_not_refused() -> None:
    results = []
    for observed in (True, False):
        model = fill(Net())
        with closing(preconditioner(model, fisher="forward-only", loss="cross-entropy")) as own:
            x, y = data(0)
            output = model(x)
            if observed:
                own.observe(output)
            F.cross_entropy(output, y).backward()
            own.step()
            results.append([blocks(own)[name].running["A"] for name in blocks(own)])
    assert all(map(torch.equal, *results))


def test_the_method_by_its_own_name_for_some_layers() -> None:
    model = fill(Net())
    with closing(preconditioner(model, method={"conv": "foof", ".*": "kfac"})) as own:
        assert [type(b.method) for b in blocks(own).values()] == [FOOF, KFAC, KFAC]
    with closing(preconditioner(model, method="foof", fisher="forward-only")) as own:
        assert {type(b.method) for b in blocks(own).values()} == {FOOF}


def test_a_method_without_such_a_form_is_refused() -> None:
    class Other(KFAC):
        def precondition(self, gradient: Tensor, *others: Any, **named: Any) -> Tensor:
            return 2 * super().precondition(gradient, *others, **named)

    for method in (Other, EKFAC, KFACReduce):
        with pytest.raises(ValueError, match=r"\(\) has no form for fisher='forward-only'"):
            preconditioner(fill(Net()), method=method, fisher="forward-only")


def test_the_trust_region_takes_it() -> None:
    """The exact model along ``-(A ⊗ I + damping)^-1 gradient``, by hand for one linear layer."""
    model, x, y = fill(nn.Linear(3, 2)), randn(5, 3), randn(5, 2, seed=1)
    weights = torch.cat([model.weight, model.bias[:, None]], 1).detach()
    own = trust_region(model, "squared-error", 0.3, fisher="forward-only", momentum=False)
    own.step(closures(model, [(x, y)], half_square))
    own.close()
    rows = torch.cat([x, torch.ones(5, 1).double()], 1)
    a = rows.T @ rows / 5
    gradient = (weights @ rows.T - y.T) @ rows / 5
    # The squared error of one layer has A ⊗ I for its curvature: the full step is the minimum.
    expected = weights - gradient @ torch.linalg.inv(a + 0.3 * torch.eye(4).double())
    compare(torch.cat([model.weight, model.bias[:, None]], 1).detach(), expected, "weights")


def train_rank(rank: int, ranks: int, strategy: str, solver: str) -> dict[str, Tensor]:
    model = fill(Net())
    wrapped = DistributedDataParallel(model) if ranks > 1 else None
    rows = slice(rank * 6 // ranks, (rank + 1) * 6 // ranks)
    options = {"strategy": strategy, "solver": solver, "wrapped": wrapped, "rows": rows}
    found, gradients = train(model, "forward-only", **options)
    return {**found, **gradients}


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt", "hybrid-opt"])
@pytest.mark.parametrize(("solver", "ranks"), [("eigen", 2), ("inverse", 3)])
def test_ranks_are_one_process(strategy: str, solver: str, ranks: int) -> None:
    alone = train_rank(0, 1, "comm-opt", solver)
    for own in run_ranks(train_rank, ranks, strategy, solver):
        assert set(own) == set(alone)
        for name, tensor in own.items():
            compare(tensor, alone[name], name, rtol=1e-8)


def test_weight_of_the_average() -> None:
    """A is a mean over samples: twice the same batch is the same A, and N samples of e_1 e_1^T."""
    model = fill(nn.Linear(2, 2, bias=False))
    with closing(preconditioner(model, fisher="forward-only")) as own:
        model(torch.tensor([[2.0, 0.0]] * 3, dtype=torch.float64)).sum().backward()
        own.step()
        assert math.isclose(float(blocks(own)["Linear"].running["A"][0, 0, 0]), 4.0)
