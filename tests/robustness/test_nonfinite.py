"""A bad batch costs one update on every rank, and nothing else."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.testing import compare
from tests import kit
from tests.distributed.harness import run_ranks
from tests.distributed.training import Case, Run, mean_over, same, snapshot


@dataclass(frozen=True)
class Bad:
    """What goes wrong.

    Attributes:
        where: "gradient", "one gradient", "input", or "statistics" (gradients stay finite).
        step: At which step.
        ranks: On which ranks; None for all.
        value: What appears.
        strategy: The strategy.
        intervals: statistics_every, solve_every.
    """

    where: str
    step: int = 2
    ranks: tuple[int, ...] | None = None
    value: float = float("nan")
    strategy: str = "comm-opt"
    intervals: tuple[int, int] = (1, 1)

    @property
    def case(self) -> Case:
        every, solve = self.intervals
        options = {"strategy": self.strategy, "statistics_every": every, "solve_every": solve}
        return Case(options, steps=6)

    @property
    def statistics_step(self) -> bool:
        return self.step % self.intervals[0] == 0

    @property
    def solve_step(self) -> bool:
        return self.step % self.intervals[1] == 0


STRATEGIES = ("comm-opt", "mem-opt", "hybrid-opt", "sharded")
INF = float("inf")
CASES = [
    *[Bad(where, value=value) for where in ("gradient", "input") for value in (INF, -INF)],
    *[Bad("one gradient", ranks=(1,), strategy=s) for s in STRATEGIES],
    *[Bad("gradient", strategy=s) for s in STRATEGIES],
    *[Bad("input", ranks=(0,), strategy=s, intervals=(1, 2)) for s in STRATEGIES],
    *[Bad("statistics", ranks=(1,), strategy=s) for s in STRATEGIES],
    *[Bad("statistics", step=step, intervals=(2, 3)) for step in (0, 2, 3, 4)],
    *[Bad("input", step=step, ranks=(1,), intervals=(2, 3)) for step in (0, 1, 2, 3, 4)],
    *[Bad("one gradient", step=step, intervals=(2, 3), value=INF) for step in (0, 1, 3)],
]


def spoil(bad: Bad, run: Run) -> None:
    """Break this rank's gradients or statistics, after the backward passes."""
    if bad.ranks is not None and run.rank not in bad.ranks:
        return
    parameters = [p for p in run.model.parameters() if p.grad is not None]
    if bad.where == "gradient":
        for parameter in parameters:
            parameter.grad.flatten()[0] = bad.value
    elif bad.where == "one gradient":
        parameters[1].grad.flatten()[-1] = bad.value
    elif bad.where == "statistics":
        # Finite inputs whose second moment is not.
        x = torch.full((2, 16), 1e200, dtype=torch.float64)
        output = run.model.hidden(x)
        kept = [p.grad.clone() for p in run.model.hidden.parameters()]
        output.backward(torch.full_like(output, 1e-250))
        for parameter, gradient in zip(run.model.hidden.parameters(), kept, strict=True):
            parameter.grad.copy_(gradient)
    else:
        x = torch.ones(2, 2, 4, 4, dtype=torch.float64)
        x[0, 0, 0, 0] = bad.value
        run.model(x).sum().backward()


@dataclass
class Record:
    """What one rank saw."""

    kept_weights: bool
    kept_factors: bool
    kept_second_order: bool
    solved_good: bool
    counters: dict[str, int]
    saved_counters: dict[str, int]
    weights: list[Tensor]


def factors_of(found: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t for name, t in found.items() if name.count(".") == 1}


def train_badly(rank: int, ranks: int, cases: list[Bad]) -> list[Record]:
    return [_train_badly(rank, ranks, bad) for bad in cases]


def _train_badly(rank: int, ranks: int, bad: Bad) -> Record:
    run = Run(bad.case, rank, ranks, average=mean_over() if ranks > 1 else None)
    weights = []
    checks: dict[str, bool] = {}
    for step in range(bad.case.steps):
        before, state = run.weights(), snapshot(run.preconditioner)
        if step != bad.step:
            run.step(step)
        else:
            run.step(step, functools.partial(spoil, bad))
            after = snapshot(run.preconditioner)
            old, new = factors_of(state), factors_of(after)
            checks = {
                "kept_weights": torch.equal(run.weights(), before),
                "kept_factors": same(old, new),
                "kept_second_order": same(
                    {k: t for k, t in state.items() if k not in old},
                    {k: t for k, t in after.items() if k not in new},
                ),
                "solved_good": all(t.isfinite().all() for t in after.values()),
            }
        weights.append(run.weights())
    saved = run.preconditioner.state_dict()["counters"]
    run.preconditioner.close()
    return Record(
        **checks, counters=run.preconditioner.counters, saved_counters=saved, weights=weights
    )


@functools.cache
def results() -> list[list[Record]]:
    return run_ranks(train_badly, 2, CASES)


@functools.cache
def records(ranks: int, index: int) -> list[Record]:
    if ranks == 1:
        return [_train_badly(0, 1, CASES[index])]
    return [own[index] for own in results()]


def name_of(bad: Bad) -> str:
    ranks = "all" if bad.ranks is None else bad.ranks
    return f"{bad.where} {bad.value} step {bad.step} {bad.intervals} {bad.strategy} {ranks}"


RUNS = [
    pytest.param(
        ranks, i, id=f"{ranks} {name_of(bad)}", marks=[pytest.mark.distributed] * (ranks > 1)
    )
    for ranks in (1, 2)
    for i, bad in enumerate(CASES)
    if ranks == 2 or bad.ranks is None or 0 in bad.ranks
]


@pytest.mark.parametrize(("ranks", "index"), RUNS)
@pytest.mark.covering(together=1)
def test_one_update_is_lost(ranks, index):
    bad = CASES[index]
    lost_update = bad.where != "statistics"
    for record in records(ranks, index):
        assert record.kept_weights is lost_update
        # A bad window never enters the factors; off the statistics steps none does.
        assert record.kept_factors
        assert record.solved_good
        if not bad.solve_step or bad.intervals == (1, 1):
            assert record.kept_second_order
        expected = {
            "skipped_updates": int(lost_update),
            "skipped_statistics": int(bad.statistics_step),
            "retried_solves": 0,
            "failed_solves": 0,
        }
        assert record.counters == record.saved_counters == expected
        assert all(w.isfinite().all() for w in record.weights)
        assert not torch.equal(record.weights[-1], record.weights[bad.step])
    first, *others = records(ranks, index)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first.weights, other.weights, strict=True))


@pytest.mark.parametrize("where", ["gradient", "input"])
@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_training_goes_on_as_if_the_bad_batch_had_never_been(where, solver):
    case = Case({"solver": solver, "solve_every": 1})
    bad, never = Run(case), Run(case)
    for step in (0, 1, 2, 3, 4):
        spoiling = step == 2
        bad.step(step, functools.partial(spoil, Bad(where)) if spoiling else None)
        if not spoiling:
            never.step(step)
        assert torch.equal(bad.weights(), never.weights()), step


def test_an_overflow_at_the_first_step_leaves_a_fresh_start():
    bad, fresh = Run(Case()), Run(Case())
    bad.step(0, functools.partial(spoil, Bad("gradient")))
    assert snapshot(bad.preconditioner) == {}
    for step in (1, 2):
        bad.step(step)
        fresh.step(step)
        assert torch.equal(bad.weights(), fresh.weights())


def test_gradients_outside_of_any_block_are_watched_too():
    run = Run(Case({"skip": ["head"]}))
    before = run.weights()

    def bias(run: Run) -> None:
        run.model.head.bias.grad[0] = INF

    run.step(0, bias)
    assert torch.equal(run.weights(), before)
    assert run.preconditioner.counters["skipped_updates"] == 1


def test_gradients_that_are_never_finite_are_warned_of_once() -> None:
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    own = soframe.Preconditioner(model, kl_clip=None)

    def steps(number: int, scale: float) -> None:
        kit.train(model, lambda net, _: scale * net(x).square().mean(), range(number), own)

    steps(9, math.nan)
    steps(1, 1.0)
    steps(9, math.nan)  # filters of warnings raise: there was none so far
    lasting = "rank 0 had gradients .* not finite in 10 steps in a row"
    with pytest.warns(UserWarning, match=lasting) as warned:
        steps(1, math.nan)
    assert warned[0].filename == kit.__file__  # where the step is called
    steps(20, math.nan)
    assert own.counters["skipped_updates"] == 39


def test_statistics_are_owed_while_there_are_none() -> None:
    """A bad first batch does not cost the curvature of a whole interval."""
    model = nn.Linear(3, 2)
    preconditioner = soframe.Preconditioner(model, statistics_every=10, kl_clip=None)
    for value in (float("nan"), 1.0, 1.0):
        model.zero_grad()
        model(torch.full((4, 3), value)).square().mean().backward()
        raw = [p.grad.clone() for p in model.parameters()]
        preconditioner.step()
    factors = preconditioner.state_dict()["blocks"]["Linear"]["factors"]
    compare(factors["A"].sum(), torch.tensor(10.0), "A of ones, packed, once")
    for own, before in zip(model.parameters(), raw, strict=True):
        assert not torch.equal(own.grad, before)
