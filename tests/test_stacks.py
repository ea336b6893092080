"""Stacks against their plain twin, in which every block is a stack of its own; in float64.

The network has layers of every shape, three or four of each, so that every phase batches some.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.blocks.arrangement import Arrangement
from soframe.blocks.block import Stack
from soframe.blocks.home import PlainGrad
from soframe.estimate import solves
from soframe.estimate.gradients import _gathered
from soframe.layers import LinearHelper
from soframe.methods import AdamW, Chain, Direction, Given, Shampoo
from soframe.settings import grouped
from soframe.solvers import Eigen, Inverse, solve_stack
from soframe.solvers.base import Problem
from soframe.strategies import placement, work
from tests import kit
from tests.curvature import randn
from tests.distributed.harness import run_ranks

METHODS = (
    "kfac",
    "ekfac",
    "tnt",
    "eva",
    "foof",
    "diagonal",
    Shampoo(epsilon=0.01, graft_steps=1),
    "kl-shampoo",
    "soap",
)
EVERY = slice(None)
SAMPLES = 40  # more than any side: without full rank rounding decides EKFAC's eigenbasis
METHODS += ("kl-soap", "muon", "newton-muon", "kfac-muon", "soap-normuon", "adamw", "sgd")


class Net(nn.Module):
    """Wide, tall and square matrices, grouped convolutions, some without bias, one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1, groups=2) for _ in range(3))
        self.wide = nn.ModuleList(nn.Linear(36, 5) for _ in range(3))
        self.tall = nn.ModuleList(nn.Linear(5, 12, bias=False) for _ in range(3))
        self.square = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.head = nn.Linear(12, 2)

    def forward(self, x: Tensor, used: int = 3) -> Tensor:
        y = torch.zeros(len(x), 12, dtype=x.dtype)
        for conv, wide, tall in list(zip(self.convs, self.wide, self.tall, strict=True))[:used]:
            y = y + tall(wide(conv(x).tanh().flatten(1)).tanh())
        for square in self.square[:used]:  # the last one is never used
            y = y + square(y).tanh()
        return self.head(y)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to give every block a stack of its own."""
    return lambda: monkeypatch.setattr(work, "SMALL", 0)


def losses(model: nn.Module, step: int, used: int = 3, part: slice = EVERY) -> Iterator[Tensor]:
    for micro in range(2):
        x = randn(SAMPLES, 4, 3, 3, seed=10 * step + micro)[part]
        y = randn(SAMPLES, 2, seed=99 - step - micro)[part]
        yield (model(x, used) - y).square().mean() / 2


def optimizer(model: nn.Module, **settings: Any) -> soframe.Optimizer:
    every = {"auxiliary": "adamw", "auxiliary_lr": 0.01, "statistics_every": 1, "solve_every": 3}
    return soframe.Optimizer(model, lr=0.02, **grouped({**every, **settings}))


def trained(steps: int = 4, loss: Any = losses, **settings: Any) -> Net:
    model = net()
    model.own = optimizer(model, **{"method": "kfac", **settings})  # type: ignore[assignment]
    kit.train(model, loss, range(steps), model.own)
    return model


def same(one: nn.Module, other: nn.Module, tolerance: float = 1e-9) -> None:
    for (name, p), q in zip(one.named_parameters(), other.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=tolerance, atol=tolerance), name


def sizes(model: Net) -> list[int]:
    return sorted(len(stack.blocks) for stack in model.own.preconditioner.curvature.placed.stacks)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_that_of_blocks_apart(method: Any, apart: Callable[[], None]) -> None:
    together = trained(method=method)
    assert max(sizes(together)) >= 3
    apart()
    alone = trained(method=method)
    assert set(sizes(alone)) == {1}
    same(together, alone)


def test_layers_of_one_shape_that_unpack_differently(apart: Callable[[], None]) -> None:
    def run() -> list[Tensor]:
        torch.manual_seed(0)
        layers = [
            nn.Conv2d(4, 4, 1),
            nn.Flatten(),
            nn.Linear(4, 4),
            nn.Linear(4, 4),
            nn.Linear(4, 1),
        ]
        model = nn.Sequential(*layers).double()
        own = soframe.Optimizer(model, "muon", lr=0.02)
        for seed in range(2):
            own.zero_grad()
            model(randn(5, 4, 1, 1, seed=seed)).square().mean().backward()
            own.step()
        shared = {len(stack.blocks) for stack in own.preconditioner.curvature.placed.stacks}
        return [torch.tensor(max(shared)), *(p.detach() for p in model.parameters())]

    together = run()
    apart()
    alone = run()
    assert (int(together[0]), int(alone[0])) == (5, 1)
    for one, other in zip(together[1:], alone[1:], strict=True):
        assert torch.allclose(one, other, rtol=1e-10)


def test_elementwise_methods_have_one_stack_of_any_shapes(apart: Callable[[], None]) -> None:
    settings: dict[str, Any] = {"method": Chain(("sgd", "adamw")), "state_dtype": torch.bfloat16}
    together = trained(**settings)
    assert sizes(together) == [len(list(together.parameters()))]
    state = {b.name: dict(b.state) for b in together.own.preconditioner.blocks}
    apart()
    alone = trained(**settings)
    for block in alone.own.preconditioner.blocks:
        assert state[block.name].keys() == block.state.keys()
        for name, tensor in block.state.items():
            assert torch.equal(state[block.name][name], tensor), "rounding depends on the stack"
    same(together, alone)


def test_long_vectors_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = trained(method="adamw")
    monkeypatch.setattr(placement, "LONGEST", 600)  # entries, of 1,500
    cut = trained(method="adamw")
    assert 2 <= len(sizes(cut)) <= 4 < max(sizes(cut))
    same(cut, whole)


def test_a_subclass_with_an_update_of_its_own_is_not_elementwise() -> None:
    class Centred(AdamW):
        def direct(self, given: Given) -> Direction:
            made = super().direct(given)
            return Direction(made.matrix - made.matrix.mean(), made.state)

    assert AdamW.elementwise
    assert not Centred.elementwise
    assert not Chain(("sgd", Centred())).elementwise


@pytest.mark.parametrize("solver", [Inverse(), Eigen(follows=True), "orthogonal-iteration"])
@pytest.mark.parametrize("more", [{"stagger": True}, {"background": 1}, {"rows": 0.5}])
@pytest.mark.covering(together=1)
@pytest.mark.slow
def test_solvers_turns_and_the_background(
    solver: Any, more: dict[str, Any], apart: Callable[[], None]
) -> None:
    together = trained(6, solver=solver, **more)
    apart()
    same(together, trained(6, solver=solver, **more))


@pytest.mark.parametrize("method", ["kfac", "ekfac", "soap", "adamw", "kfac-muon"])
@pytest.mark.slow
def test_blocks_that_are_used_at_some_steps_only(method: str, apart: Callable[[], None]) -> None:
    """Weights of averages, numbers of updates and first solves differ inside a stack."""

    def loss(model: nn.Module, step: int) -> Iterator[Tensor]:
        return losses(model, step, used=(1, 1, 2, 3, 2, 1, 3, 3)[step])

    together = trained(6, loss, method=method)
    blocks = [b for b in together.own.preconditioner.blocks if b.name.startswith("tall")]
    assert len({block.record.updates for block in blocks}) == 3
    apart()
    same(together, trained(6, loss, method=method))


def test_dampings_of_their_own(apart: Callable[[], None]) -> None:
    def run() -> Net:
        model = net()
        own = soframe.Preconditioner(model, solver="inverse", kl_clip=None, statistics_every=1)
        own.damp({"wide.1": 0.3, "tall.2": 0.01})
        model(randn(5, 4, 3, 3)).square().mean().backward()
        own.step()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0 if p.grad is None else p.grad)
        return model

    together = run()
    apart()
    same(together, run())


def test_a_failed_solve_costs_its_block_alone(apart: Callable[[], None]) -> None:
    class Failing(Inverse):
        def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
            data = super().solve(matrix, damping)
            bad = (matrix[:, 0, 0] > 100) & (matrix.shape[-1] == 37)  # one layer's inputs are large
            return {name: tensor.masked_fill(bad[:, None, None], torch.nan)
                    for name, tensor in data.items()}  # fmt: skip

    def run() -> tuple[Net, dict[str, int]]:
        model = net()
        with torch.no_grad():
            model.wide[1].weight.mul_(0.02)
        own = soframe.Preconditioner(model, solver=Failing(), kl_clip=None, statistics_every=1)
        hook = model.wide[1].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 50,))
        for seed in range(2):
            model.zero_grad()
            model(randn(5, 4, 3, 3, seed=seed)).square().mean().backward()
            raw = [p.grad.clone() for p in model.wide[1].parameters()]
            own.step()
        hook.remove()
        for p, gradient in zip(model.wide[1].parameters(), raw, strict=True):
            assert torch.equal(p.grad, gradient), "without data the gradient stays"
        return model, {b.name: sum(b.record.failures.values()) for b in own.blocks}

    together, failures = run()
    assert [name for name, count in failures.items() if count] == ["wide.1"]
    apart()
    alone, counts = run()
    assert counts == failures
    for p, q in zip(together.parameters(), alone.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.allclose(p.grad, q.grad, rtol=1e-10)


@pytest.mark.parametrize("method", ["kfac", "ekfac", "soap", "adamw"])
@pytest.mark.slow
def test_a_state_of_stacks_continues_apart(method: str, apart: Callable[[], None]) -> None:
    whole = trained(steps=8, method=method)
    half = trained(steps=4, method=method)
    state, weights = copy.deepcopy(half.own.state_dict()), copy.deepcopy(half.state_dict())

    def go_on() -> Net:
        model = net()
        own = optimizer(model, method=method)
        model.load_state_dict(dict(weights))
        own.load_state_dict(state)
        kit.train(model, losses, range(4, 8), own)
        return model

    for p, q in zip(go_on().parameters(), whole.parameters(), strict=True):
        assert torch.equal(p, q), "to the bit on the same layout"
    apart()
    same(go_on(), whole)


def test_tensors_lie_in_one_and_former_data_stay() -> None:
    model = trained(steps=2, method="kfac", solver="inverse", solve_every=1)
    stacks = model.own.preconditioner.curvature.placed.stacks
    (stack,) = [stack for stack in stacks if "wide.0" in str(stack.blocks[0].name)]
    one = stack.blocks[1].second_order["A"]["inverse"]
    assert (
        one.untyped_storage().data_ptr() == stack.data["A"]["inverse"].untyped_storage().data_ptr()
    )
    former, values = stack.blocks[1].snapshot(), one.clone()
    model.own.zero_grad()
    model(randn(5, 4, 3, 3, seed=77)).square().mean().backward()
    model.own.step()
    assert torch.equal(former.data["A"]["inverse"], values)
    assert not torch.equal(stack.blocks[1].second_order["A"]["inverse"], values)


@pytest.mark.parametrize("solver", [Inverse(), Eigen(), "newton-schulz"], ids=str)
@pytest.mark.slow
def test_factors_are_solved_together_as_stack_by_stack(
    solver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shares of the damping and factors of all stacks, against a call for each."""

    def shares_of(runs: Sequence[solves.Run]) -> list[list[Tensor]]:
        return [solves._split_damping(run.stack.like, run.traces, run.damping) for run in runs]

    def each_alone(problems: Sequence[Problem]) -> list[tuple[dict[str, Tensor], Tensor]]:
        return [solve_stack(p.solver, p.matrices, p.damping, p.last) for p in problems]

    together = trained(solver=solver).own.preconditioner
    monkeypatch.setattr(solves, "_damping_shares", shares_of)
    monkeypatch.setattr(solves, "solve_stacks", each_alone)
    alone = trained(solver=solver).own.preconditioner
    assert len(together.curvature.placed.stacks) > 1
    for one, other in zip(together.blocks, alone.blocks, strict=True):
        assert one.solved == other.solved
        for factor, data in one.second_order.items():
            for name, tensor in data.items():
                expected = other.second_order[factor][name]
                assert torch.allclose(tensor, expected, rtol=1e-9, atol=1e-9), (one.name, factor)


class Copies(LinearHelper):
    """Unpacks copies, of which gradients cannot be gathered in place."""

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = super().from_matrix(matrix)
        return (None if weight is None else weight.clone()), (
            None if bias is None else bias.clone()
        )


class CopiesOfBiases(LinearHelper):
    """Unpacks a view of the weight alone."""

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = super().from_matrix(matrix)
        return weight, None if bias is None else bias.clone()


@pytest.mark.parametrize("helper", [Copies, CopiesOfBiases])
def test_helpers_that_unpack_copies(helper: type[LinearHelper]) -> None:
    def run(layers: dict[str, Any]) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)), nn.Linear(4, 2)).double()
        own = soframe.Preconditioner(model, kl_clip=None, statistics_every=1, layers=layers)
        assert any(len(stack.blocks) == 3 for stack in own.curvature.placed.stacks)
        model(randn(7, 4, seed=1)).square().mean().backward()
        own.step()
        return [p.grad for p in model.parameters() if p.grad is not None]

    for one, other in zip(run({"": helper}), run({}), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-15)


class Padded:
    """A layout whose matrices have a column of zeros that no parameter has."""

    def pack(self, tensors: dict[str, Tensor]) -> Tensor:
        return nn.functional.pad(tensors["weight"], (0, 1)).unsqueeze(0)

    def unpack(self, matrix: Tensor) -> dict[str, Tensor]:
        return {"weight": matrix[0, :, :-1]}


def test_gradients_of_padded_matrices() -> None:
    layout, parameters = Padded(), [nn.Parameter(randn(3, 2, seed=seed)) for seed in range(2)]
    for parameter in parameters:
        parameter.grad = parameter.detach() + 1
    blocks: Any = [
        SimpleNamespace(
            layout=layout,
            parameters={"weight": parameter},
            gradient=lambda p=parameter: layout.pack({"weight": p.grad}),
            home=PlainGrad(),
            shape=(1, 3, 3),
            elementwise=False,
            dtype=torch.float64,
            device=torch.device("cpu"),
            join=lambda *_: None,
        )
        for parameter in parameters
    ]
    stack = Stack(blocks, blocks)
    torch.full((2, 3, 3), torch.nan, dtype=torch.float64)  # what the allocator may hand out again
    expected = torch.cat([layout.pack({"weight": p.detach() + 1}) for p in parameters])
    assert torch.equal(_gathered({stack: (0, 1)})[stack], expected)


class Transposed:
    """A layout as that of GPT-2's Conv1D, with entries in another order than in the parameter."""

    def pack(self, tensors: dict[str, Tensor]) -> Tensor:
        return tensors["weight"].T.unsqueeze(0)

    def unpack(self, matrix: Tensor) -> dict[str, Tensor]:
        return {"weight": matrix[0].T}


@pytest.mark.parametrize("elementwise", [False, True])
def test_transposed_matrices_have_no_place_in_a_vector(elementwise: bool) -> None:
    layout, parameters = Transposed(), [nn.Parameter(randn(3, 2, seed=seed)) for seed in range(2)]
    blocks: Any = [
        SimpleNamespace(
            layout=layout, parameters={"weight": p}, shape=(1, 2, 3), elementwise=elementwise
        )
        for p in parameters
    ]
    whole = randn(12, 1, 1) if elementwise else randn(2, 2, 3)
    parts = Arrangement(blocks).parts(whole)
    if elementwise:
        assert parts is None
    else:
        assert parts is not None
        for part, matrix in zip(parts, whole, strict=True):
            assert torch.equal(part, matrix.T)


def on_ranks(rank: int, ranks: int, options: dict[str, Any]) -> list[Tensor]:
    """Each rank takes its share of every micro-batch, and averages gradients itself."""
    model = net()
    own = optimizer(model, gradients="local", **options)
    mine = slice(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)
    kit.train(model, partial(losses, part=mine), range(5), own)
    return [p.detach() for p in model.parameters()]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("method", ["kfac", "ekfac", "diagonal", "soap", "muon", "adamw"])
@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt", "hybrid-opt", "sharded"])
@pytest.mark.covering(together=1)
def test_ranks_take_the_steps_of_one_process(strategy: str, method: str) -> None:
    options = {"method": method, "solve_every": 2}
    alone = on_ranks(0, 1, options)
    if strategy == "sharded":
        options["strategy"] = soframe.strategies.Sharded(group=None, deferred=method == "kfac")
    else:
        options["strategy"] = strategy
    for rank, weights in enumerate(run_ranks(on_ranks, 4, options)):
        for one, other in zip(weights, alone, strict=True):
            assert torch.allclose(one, other, rtol=1e-9, atol=1e-9), (method, rank)
