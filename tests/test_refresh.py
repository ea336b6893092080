"""Staggered solves: each block once per interval, balanced by cost, the same for every rank."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from soframe.layers.base import BlockShape
from soframe.methods import KFAC, Chain, Momentum
from soframe.preconditioner import Preconditioner
from soframe.schedules import GrowingInterval, WarmInterval
from soframe.solvers import Eigen, Inverse
from soframe.specs import FactorSpec
from soframe.strategies import MemOpt, Placement, turns
from soframe.strategies.work import BlockWork
from tests import kit
from tests.curvature import closing, fill, preconditioner, randn
from tests.distributed.training import Case, Run
from tests.examples import examples

STEPS = 14


def loss_of(model: nn.Module, _: int) -> Tensor:
    return model(randn(3, 2)).square().mean()


def placed(sizes: Sequence[tuple[int, int]], ranks: int = 1) -> Placement:
    """A placement of blocks of these sizes."""
    work = []
    for index, (out, into) in enumerate(sizes):
        factors = (FactorSpec("A", "right", 1, into), FactorSpec("G", "left", 1, out))
        work.append(BlockWork(f"b{index}", BlockShape(1, out, into), factors))
    return MemOpt().place(work, ranks)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12),
    interval=st.integers(1, 15),
)
@settings(max_examples=examples(50))
def test_no_turn_costs_much_more_than_another(sizes: list[tuple[int, int]], interval: int) -> None:
    found = turns(placed(sizes), interval)
    assert found == turns(placed(sizes, ranks=3), interval)
    assert len(found) == len(sizes)
    assert all(0 <= turn < interval for turn in found)
    costs = [out**3 + into**3 for out, into in sizes]
    loads = [0] * interval
    for cost, turn in zip(costs, found, strict=True):
        loads[turn] += cost
    bound = sum(costs) / interval + (1 - 1 / interval) * max(costs, default=0)
    assert max(loads) <= bound * (1 + 1e-12)


@pytest.mark.parametrize(
    ("sizes", "interval", "expected"),
    [
        ([(4, 4)] * 4, 1, (0, 0, 0, 0)),
        ([(4, 4)] * 4, 2, (0, 1, 0, 1)),
        ([(1, 1), (9, 9), (8, 8), (2, 2)], 2, (1, 0, 1, 1)),
        ([(1, 9), (9, 9), (2, 2)], 5, (1, 0, 2)),
        ([], 5, ()),
    ],
)
def test_turns(sizes: list[tuple[int, int]], interval: int, expected: tuple[int, ...]) -> None:
    assert turns(placed(sizes), interval) == expected


# -- through the preconditioner --------------------------------------------------------------


WIDTHS = [20, 16, 14, 11, 8, 5, 3]


def solved(steps: int, **options: Any) -> tuple[Preconditioner, list[list[int]]]:
    """The blocks that are solved at each step, and the preconditioner."""
    pairs = itertools.pairwise(WIDTHS)
    model = fill(nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairs)))
    found = []
    own = preconditioner(model, **options)
    with closing(own):
        for step in range(steps):
            x = randn(6, WIDTHS[0], seed=step)
            kit.train(model, lambda net, _: net(x).square().mean(), [step], own)  # noqa: B023
            of_blocks = [block.record.solved_at for block in own.blocks]
            found.append([i for i, at in enumerate(of_blocks) if at == {"A": step, "G": step}])
    return own, found


@pytest.mark.parametrize("interval", [1, 2, 4, 9])
def test_every_block_is_solved_once_in_any_interval(interval: int) -> None:
    own, found = solved(STEPS, solve_every=interval, stagger=True)
    every = list(range(len(WIDTHS) - 1))
    assert sorted(found[0]) == every
    for step in range(1, STEPS - interval + 1):
        assert sorted(itertools.chain(*found[step : step + interval])) == every
    planned = turns(own.placement, interval)
    for step in range(1, STEPS):
        assert found[step] == [b for b in every if planned[b] == step % interval]


@pytest.mark.parametrize("change", ["frozen and thawed", "replaced", "added"])
def test_turns_outlast_a_change_of_the_model(change: str) -> None:
    model = fill(nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(6))))
    extra = fill(nn.Sequential(nn.Linear(8, 8, bias=False)))
    with closing(preconditioner(model, solve_every=4, stagger=True)) as own:
        for step in range(16):
            if step in (5, 6):
                match change:
                    case "frozen and thawed":
                        model[2].requires_grad_(step == 6)
                    case "replaced" if step == 5:
                        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
                    case "added" if step == 5:
                        model.append(extra)
            x = randn(6, 8, seed=step)
            kit.train(model, lambda net, _: net(x).square().mean(), [step], own)  # noqa: B023
            if step in range(1, 5) or step > 8:
                found = {b.name for b in own.blocks if b.record.solved_at == {"A": step, "G": step}}
                turn_of = zip(own.blocks, turns(own.placement, 4), strict=True)
                assert found == {block.name for block, turn in turn_of if turn == step % 4}


def test_unstaggered_solves_all_at_once() -> None:
    _, found = solved(7, solve_every=3)
    assert [len(own) for own in found] == [6, 0, 0, 6, 0, 0, 6]


@pytest.mark.parametrize(
    "schedule", [WarmInterval(4, steps=6, first=1), GrowingInterval(4, age=0.5)], ids=str
)
def test_intervals_may_change(schedule: Any) -> None:
    """Where one becomes another, a block waits for less than both together."""
    own, found = solved(24, solve_every=schedule, stagger=True)
    for step in range(1, 24):
        its = turns(own.placement, schedule(step))
        assert found[step] == [b for b, turn in enumerate(its) if turn == step % schedule(step)]
    for block in range(len(WIDTHS) - 1):
        steps = [step for step, own in enumerate(found) if block in own]
        for one, other in itertools.pairwise(steps):
            together = schedule(one) + schedule(other) - 1
            assert other - one <= (together if schedule(one) != schedule(other) else schedule(one))


@pytest.mark.parametrize("solver", [Eigen(), Inverse()], ids=["eigen", "inverse"])
def test_of_constant_factors_staggered_solves_are_the_same(solver: Any) -> None:
    weights = []
    for stagger in (False, True):
        options = {"statistics_every": 100, "solve_every": 3, "solver": solver, "stagger": stagger}
        run = Run(Case(options)).train(range(6))
        weights.append(run.weights())
    assert torch.equal(*weights)


@pytest.mark.parametrize("value", [1, "yes", None])
def test_what_stagger_cannot_be(value: Any) -> None:
    with pytest.raises(TypeError, match="stagger must be True or False"):
        preconditioner(fill(nn.Linear(2, 2)), stagger=value)


@pytest.mark.parametrize(
    ("statistics_every", "solve_every", "message"),
    [
        (2, 3, r"not a multiple of statistics_every=2, .* up to 1 step\(s\) old; .* =2 or .*=4"),
        (10, 25, r"up to 5 step\(s\) old; pass solve_every=20 or solve_every=30"),
        (10, 1, "most solves find no new statistics; pass solve_every=10, or statistics_every=1"),
    ],
)
def test_intervals_that_do_not_go_together(
    statistics_every: int, solve_every: int, message: str
) -> None:
    options = {"statistics_every": statistics_every, "solve_every": solve_every}
    message = f"solve_every={solve_every} is .*{message.replace(' =', ' solve_every=')}"
    with pytest.warns(UserWarning, match=message) as told:
        preconditioner(fill(nn.Linear(2, 2)), **options)
    assert told[0].filename == kit.__file__  # where the preconditioner is built
    schedules = {name: (lambda step, n=n: n) for name, n in options.items()}
    model = fill(nn.Linear(2, 2))
    with closing(preconditioner(model, **schedules)) as own:
        with pytest.warns(UserWarning, match=message) as told:
            kit.train(model, loss_of, range(1), own)
        assert told[0].filename == kit.__file__  # where the step is called
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kit.train(model, loss_of, range(1), own)  # they were told


@pytest.mark.parametrize("pair", [(1, 7), (5, 5), (3, 12)])
def test_intervals_that_go_together(pair: tuple[int, int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        preconditioner(fill(nn.Linear(2, 2)), statistics_every=pair[0], solve_every=pair[1])
        schedule = GrowingInterval(64, age=0.5)
        model = fill(nn.Linear(2, 2))
        options = {"statistics_every": schedule, "solve_every": schedule}
        with closing(preconditioner(model, **options)) as own:
            kit.train(model, loss_of, range(6), own)


def test_turns_of_an_endless_interval() -> None:
    """There are no more turns than blocks, however many steps there are."""
    options = {"statistics_every": 10**9, "solve_every": 10**9, "stagger": True}
    model = fill(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    with closing(preconditioner(model, **options)) as own:
        kit.train(model, loss_of, range(2), own)
        turns = own.curvature.parts.refresh._turns(own.curvature.placed, 2)
        assert list(turns.values()) == [0, 1]


# -- dampings that are tried -------------------------------------------------------------------


def test_a_damping_that_is_tried_solves_the_blocks_whose_data_it_is_in() -> None:
    """Other solvers divide by it later, and a method that remembers keeps its update."""
    model = fill(nn.Sequential(*(nn.Linear(3, 3) for _ in range(3))))
    settings: dict[str, Any] = {
        "method": {"1": Chain((KFAC(), Momentum())), ".*": "kfac"},
        "solver": {"0": "eigen", ".*": "inverse"},
        "solve_every": 4,
    }
    with closing(preconditioner(model, kl_clip=None, **settings)) as own:
        for step in range(2):  # factors of the second step are not solved
            model.zero_grad()
            model(randn(5, 3, seed=step)).square().sum(1).mean().backward()
            own.step()

        def data() -> dict[str, list[Tensor]]:
            found = {}
            for block in own.blocks:
                tensors = (list(part.values()) for part in block.second_order.values())
                found[block.name] = [tensor.clone() for tensor in itertools.chain(*tensors)]
            return found

        before = data()
        update = model[1].weight.grad.clone()
        own.damp(dict.fromkeys(before, 0.5))
        own.propose()
        after = data()
        same = {name: all(map(torch.equal, before[name], after[name])) for name in before}
        assert same == {"0": True, "1": True, "2": False}
        assert torch.equal(model[1].weight.grad, update)
