"""When a model changes, work is placed anew: what ranks remember moves to who is to remember it."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from soframe.comm import TorchDistributed
from soframe.strategies import HybridOpt, Sharded
from tests.distributed.harness import run_ranks
from tests.distributed.test_places import Apart, Deferring, state_of
from tests.distributed.training import Case, Run, mean_over, preconditioner_of, train_alone
from tests.state.test_resume import equal

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

STRATEGIES: dict[str, Any] = {
    "mem": "mem-opt",
    "hybrid": HybridOpt(colocate=False),
    "sharded": "sharded",
    "deferred": Sharded(group=None, deferred=True),
    "deferred everywhere": Deferring(),
    "apart, deferred": Apart(deferred=True),
}
# Statistics at even steps, solves at 0, 3 and 6; at step 4 something is pending.
KEPT = ("factors", "second_order", "statistics")
INTERVALS = {"statistics_every": 2, "solve_every": 3}


def change(run: Run, step: int) -> None:
    """Thaw a layer that had no block, where nothing is solved; freeze a bias, a row of a factor."""
    if step == 0:
        run.model.hidden.requires_grad_(False)
        run.preconditioner.close()
        run.preconditioner = preconditioner_of(run.model, run.optimizer, run.case, run.backend)
    if step == 4:
        run.model.hidden.requires_grad_(True)
    if step == 5:
        run.model.conv.bias.requires_grad_(False)
    run.model.zero_grad()


def train_changing(rank: int, ranks: int, cases: list[Case]) -> list[tuple[Tensor, set[Any]]]:
    found = []
    for case in cases:
        run = Run(case, rank, ranks, average=mean_over() if ranks > 1 else None)
        seen = set()
        for step in range(8):
            change(run, step)
            run.step(step)
            places = run.preconditioner.placement.blocks
            seen |= {(b.block, b.owners, b.gradient_workers) for b in places}
            held = run.preconditioner.memory_usage()
            used = [b.block for b in places if b.block != "unused"]
            planned = run.preconditioner.placement.memory(rank, used=used)
            if step in (0, 3):  # what is gathered anew comes with the next statistics
                assert {k: held[k] for k in KEPT} == {k: planned[k] for k in KEPT}
        found.append((run.weights(), seen))
    return found


@pytest.mark.parametrize(
    "ranks", [3, *(pytest.param(ranks, marks=pytest.mark.thorough) for ranks in (2, 4))]
)
def test_what_continues_moves_to_its_new_ranks(ranks):
    cases = [Case({"strategy": strategy, **INTERVALS}) for strategy in STRATEGIES.values()]
    expected = train_changing(0, 1, [Case(INTERVALS)])[0][0]
    for rank, results in enumerate(run_ranks(train_changing, ranks, cases)):
        for name, (weights, seen) in zip(STRATEGIES, results, strict=True):
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10, msg=f"{name} {rank}")
            # The test means nothing unless some block did change its rank.
            assert len(seen) > len({block for block, *_ in seen}), name


def test_what_a_method_remembers_moves_too() -> None:
    """Of Adam both averages, on three ranks, where blocks change their worker at step 4."""
    options = {"method": {"hidden|head": "kfac", "": "adamw"}, "kl_clip": None}
    cases = [Case({"strategy": "mem-opt", **options})]
    expected = train_changing(0, 1, [Case(options)])[0][0]
    for [(weights, seen)] in run_ranks(train_changing, 3, cases):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
        assert len(seen) > len({block for block, *_ in seen})


def train_in_groups(rank: int, ranks: int) -> tuple[Tensor, list[tuple[int, bool, bool]]]:
    """Of a block at each step that changed its group: whether this and the next changed factors."""
    run = Run(Case({"strategy": Sharded(group=2), **INTERVALS}), rank, ranks, average=mean_over())
    groups: dict[str, Any] = {}
    regrouped: list[tuple[int, bool, bool]] = []
    waiting: dict[str, bool] = {}  # of the blocks whose group this step changed
    for step in range(8):
        before = state_of(run.preconditioner)
        change(run, step)
        run.step(step)
        after = state_of(run.preconditioner)
        changed = {name: not equal(before[name], after[name]) for name in after if name in before}
        regrouped += [(step - 1, at_once, changed[name]) for name, at_once in waiting.items()]
        waiting = {}
        for place in run.preconditioner.placement.blocks:
            known = groups.get(place.block)
            if known not in (None, place.contributors) and before[place.block]:
                waiting[place.block] = changed[place.block]
            groups[place.block] = place.contributors
    return run.weights(), regrouped


def test_other_contributors_begin_with_a_window_of_their_own():
    """They have not captured what the window under way has seen: the next step's is taken."""
    results = run_ranks(train_in_groups, 4)
    for weights, regrouped in results:
        assert regrouped == [(4, False, True)]  # a step of statistics
        assert torch.equal(weights, results[0][0])


# -- groups in a part of the world ------------------------------------------------------------


def in_a_part(rank: int, ranks: int, cases: list[Case]) -> list[Tensor]:
    members = [0, 2, 3]
    group = dist.new_group(members)
    if rank not in members:
        return []
    found = []
    for case in cases:
        backend = TorchDistributed(group)
        run = Run(case, members.index(rank), 3, backend, mean_over(group)).train()
        found.append(run.weights())
    return found


def test_a_part_of_the_world_reduces_without_the_rest():
    strategies = [Sharded(deferred=True), Apart(), Apart(deferred=True)]
    # The inverse solver shares the damping by the traces of both factors.
    options = {"solve_every": 2, "solver": "inverse"}
    cases = [Case({"strategy": strategy, **options}) for strategy in strategies]
    expected = train_alone(Case(options))
    for rank, found in enumerate(run_ranks(in_a_part, 4, cases)):
        assert len(found) == (0 if rank == 1 else 3)
        for weights in found:
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)


def sum_late(rank: int, ranks: int) -> Tensor:
    """A sum on rank 0 over a group that is not prepared: the other rank sends late."""
    backend, tensor = TorchDistributed(), torch.full((5,), rank + 1.0)
    if rank == 1:
        time.sleep(0.3)
    if rank < 2:
        backend.reduce(tensor, 0, (0, 1), "sum").wait()
    dist.barrier()
    return tensor


def test_a_sum_waits_for_whoever_sends_last() -> None:
    assert run_ranks(sum_late, 3)[0].tolist() == [3.0] * 5
