"""Costs and tasks by hand: shapes of stacks, precisions, phases, and models of odd outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soframe.planning.costs import Costs, parts
from soframe.planning.hardware import Curve
from soframe.planning.pricing import Priced
from soframe.planning.task import Task
from soframe.registry import describe
from soframe.strategies import CommOpt, MemOpt
from soframe.strategies.placement import complete
from tests.planning.kit import CPU, GPU, dense


def costs_of(method: str, *sizes: int, hardware: Any = CPU, **settings: Any) -> Costs:
    inputs = (torch.empty(3, sizes[0]),)
    return Costs(Task.of(dense(*sizes), inputs, method=method, **settings), hardware)


def test_a_task_has_the_usual_intervals_and_nothing_else_unless_told() -> None:
    task = Task((), (), ())
    assert (task.activations, task.intervals, task.frozen) == (0, (10, 100), 0)
    assert (task.model, task.inputs, list(task.calls)) == (None, None, [])


@pytest.mark.parametrize(
    ("method", "one", "two"),
    [("kfac", (1, 2, 2), (2, 2, 2)), ("adamw", (1, 2, 2), (8, 1, 1))],
)
def test_a_stack_has_groups_or_is_one_long_vector(
    method: str, one: tuple[int, ...], two: tuple[int, ...]
) -> None:
    costs = costs_of(method, 2, 2, 2)
    assert (costs.shape([0]), costs.shape([0, 1])) == (one, two)


def test_vectors_of_a_stack_may_have_other_lengths() -> None:
    model = nn.Sequential(nn.Linear(2, 4, bias=False), nn.Linear(4, 6, bias=False))
    costs = Costs(Task.of(model, method="adamw"), CPU)
    assert costs.shape([0, 1]) == (8 + 24, 1, 1)


@pytest.mark.parametrize(("method", "rebases"), [("soap", True), ("kfac", False), ("adamw", False)])
def test_only_states_in_a_basis_are_taken_to_another(method: str, rebases: bool) -> None:
    assert (costs_of(method, 4, 4).rebase([0]) != Priced()) == rebases


@pytest.mark.parametrize(("method", "observes"), [("soap", True), ("kfac", False)])
def test_only_methods_of_gradients_observe_them(method: str, observes: bool) -> None:
    assert (costs_of(method, 4, 4).observe([0]) != Priced()) == observes


def test_all_but_solves_multiply_in_the_precision_that_is_fast() -> None:
    """GPU multiplies ten thousand times as fast in TF32."""
    slow = replace(GPU, operators=CPU.operators)
    fast, full = (costs_of("kfac", 512, 512, hardware=one) for one in (GPU, slow))
    assert fast.passes.seconds < full.passes.seconds
    assert fast.direct([0]).seconds < full.direct([0]).seconds
    (name,) = fast.statistics
    assert fast.statistics[name].seconds < full.statistics[name].seconds
    both = [(one.solve([([0], 0, 1)]).seconds, one.work[0].device) for one in (fast, full)]
    assert both[0] == both[1] == (both[0][0], "cuda")
    assert costs_of("kfac", 4, 4).work[0].device == "cpu"


@pytest.mark.parametrize("strategy", [CommOpt(), MemOpt()], ids=describe)
def test_solves_unpack_their_factors(strategy: Any) -> None:
    """A triangle is read, and a matrix written: of three inputs and two outputs."""
    costs = costs_of("kfac", 3, 2)
    placement = complete(strategy.place(costs.work, 2))
    seconds = [costs.arithmetic(placement, part).solve for part in parts(placement)]
    alone = costs.solve([(placement.stacks[0], index, 1) for index in (0, 1)]).seconds
    unpacking = 1.5 * 4 * (3**2 + 2**2) / CPU.bandwidth
    assert sorted(seconds) == [0.0, pytest.approx(alone + unpacking, rel=1e-9)]


@pytest.mark.parametrize("world", [1, 2])
def test_the_blocks_of_a_stack_count_each(world: int) -> None:
    """Two layers of 2 x 2: four factors, in triangles if they travel."""
    costs = costs_of("kfac", 2, 2, 2)
    placement = complete(CommOpt().place(costs.work, world))
    assert placement.stacks == [[0, 1]]
    numbers = 4 * (4 if world == 1 else 3)
    owned = {rank: [0, 0] for rank in range(world)}
    for block in placement.blocks:
        for index, owner in enumerate(block.owners):
            owned[owner][index] += 1
    for part, ranks in parts(placement).items():
        arithmetic = costs.arithmetic(placement, part)
        average = 6 * 4 * numbers / CPU.bandwidth + 2 * CPU.launch
        assert arithmetic.reduce == pytest.approx(average, rel=1e-9)
        blocks = owned[ranks[0]]
        solves = [(placement.stacks[0], index, n) for index, n in enumerate(blocks) if n]
        unpacking = 1.5 * 4 * 4 * sum(blocks) / CPU.bandwidth
        seconds = costs.solve(solves).seconds + unpacking
        assert arithmetic.solve == pytest.approx(seconds, rel=1e-9)
        gradients = 4 * 2 * 2 * 2
        assert arithmetic.write == pytest.approx(4 * gradients / CPU.bandwidth, rel=1e-9)


def test_calls_of_one_layer_add_up() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.layer(x).tanh())  # type: ignore[no-any-return]

    once = costs_of("kfac", 4, 4).statistics["0"]
    twice = Costs(Task.of(Twice(), (torch.empty(3, 4),), method="kfac"), replace(CPU, hooks=2.0))
    found = twice.statistics["layer"]
    assert found.operators == 2 * once.operators
    assert found.seconds == pytest.approx(2 * once.seconds)
    assert found.host == 2.0 * found.operators


class Odd(nn.Module):
    """Returns integers and a tensor without a gradient beside what is trained; shares a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("scale", torch.ones(4))
        self.table.register_buffer("scale", self.scale)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        hidden = self.table(x) * self.table.scale + self.scale
        return self.head(hidden), {"tokens": x, "scale": self.scale}


def test_the_passes_of_a_model_with_ties_and_odd_outputs_are_priced() -> None:
    model, tokens = Odd(), torch.zeros(3, 5, dtype=torch.long)
    task = Task.of(model, (tokens,), method="adamw")
    priced = Costs(task, CPU).passes
    # Forward a product of 15 rows, and twice as much backward.
    assert priced.flops == 3 * 2 * 15 * 4 * 9
    assert sum(parameter.numel() for parameter in task.parameters) == 9 * 4
    assert task.frozen == 4 * 4


def test_half_precision_takes_its_own_curve() -> None:
    half = {**CPU.operators, "product:bfloat16": Curve(beta=1e-14)}
    hardware = replace(CPU, operators=half)
    task = Task.of(dense(64, 64), (torch.empty(64, 64),), method="kfac")
    usual, amp = (Costs(task, hardware, amp=one).passes for one in (False, True))
    assert usual.flops == amp.flops
    assert amp.seconds < usual.seconds
