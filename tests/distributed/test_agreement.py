"""Ranks that disagree: a clear error on every rank, never a deadlock. And groups of ranks."""

from __future__ import annotations

from itertools import chain, pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

from soframe import Preconditioner, checkpoint
from soframe.comm import TorchDistributed
from soframe.settings import grouped
from soframe.strategies import CommOpt, HybridOpt, MemOpt, Sharded
from soframe.strategies.base import Strategy
from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.training import Case, Run, Shards, mean_over, train_alone

pytestmark = pytest.mark.distributed


class Broken(Strategy):
    """Raises on one rank, or places for another world."""

    def __init__(self, how: str) -> None:
        self.how = how

    def place(self, work, ranks):
        if self.how == "raises":
            raise ValueError("no placement today")
        return MemOpt().place(work[1:] if self.how == "work" else work, ranks + 1)


def model_of(widths: tuple[int, ...]) -> nn.Module:
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(*layers)


# What the last rank does differently -> the rank's error, and that of the others.
DIFFERENCES = {
    "model": ({"widths": (3, 5, 2)}, "placement of rank", "placement of rank"),
    "skip": ({"skip": ["0"]}, "placement of rank", "placement of rank"),
    "strategy": ({"strategy": "mem-opt"}, "placement of rank", "placement of rank"),
    "solver": ({"solver": "eigen"}, "settings of rank", "settings of rank"),
    "dtype": ({"dtype": torch.float64}, "settings of rank", "settings of rank"),
    "interval": ({"statistics_every": 2}, "settings of rank", "settings of rank"),
    "damping": ({"damping": 0.5}, "settings of rank", "settings of rank"),
    "loss": ({"loss_average": "sum"}, "settings of rank", "settings of rank"),
    "optimizer": ({"optimizer": True}, "settings of rank", "settings of rank"),
    "samples": ({"samples": "positions"}, "samples='positions'", "samples=None"),
    "callable samples": ({"samples": len}, "samples=a callable", "samples=None"),
    "nothing": ({"skip": ["."]}, "nothing to precondition", "could not start"),
    "raises": ({"strategy": Broken("raises")}, "no placement today", "could not start"),
    "unknown": ({"method": "nope"}, "no method 'nope'", "could not start"),
}


def start_differently(rank: int, ranks: int, names: list[str]) -> list[str]:
    errors = []
    for name in names:
        options = dict(DIFFERENCES[name][0]) if rank == ranks - 1 else {}
        model = model_of(options.pop("widths", (3, 4, 2)))
        if "optimizer" in options:
            options["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            Preconditioner(model, kl_clip=None, **grouped({"statistics_every": 1, **options}))
        except ValueError as error:
            errors.append(str(error))
        else:
            errors.append("no error")
    dist.barrier()
    return errors


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_disagree_are_told_so_on_every_rank(ranks):
    results = run_ranks(start_differently, ranks, list(DIFFERENCES))
    for index, (name, (_, own, others)) in enumerate(DIFFERENCES.items()):
        for rank, errors in enumerate(results):
            expected = own if rank == ranks - 1 else others
            assert expected in errors[index], (name, rank, errors[index])
            if "could not start" in expected or "of rank" in expected:
                assert f"[{ranks - 1}]" in errors[index], (name, errors[index])


class Settling(CommOpt):
    """Settles on another strategy, which depends on the rank."""

    def settled(self, circumstances):
        return MemOpt() if circumstances.backend.rank == 1 else HybridOpt()


def settle_differently(rank: int, ranks: int) -> str:
    with pytest.raises(ValueError, match="placement") as caught:
        Preconditioner(model_of((3, 4, 2)), strategy=Settling(), statistics_every=1)
    return str(caught.value)


def test_ranks_that_settle_on_other_strategies_are_told_so():
    for error in run_ranks(settle_differently, 3):
        assert "the placement of rank(s) [1] differs from rank 0's" in error


@pytest.mark.parametrize("how", ["work", "ranks"])
def test_a_placement_of_something_else_is_refused(how):
    with pytest.raises(ValueError, match="strategy 'mem-opt' placed other work, or for other ra"):
        Preconditioner(model_of((3, 4, 2)), strategy=Broken(how), kl_clip=None, statistics_every=1)


def freeze_on_some(rank: int, ranks: int, freezing: tuple[int, ...]) -> tuple[str, list[str]]:
    run = Run(Case(), rank, ranks, average=mean_over())
    run.step(0)

    def freeze(run: Run) -> None:
        if rank in freezing:
            run.model.conv.bias.requires_grad_(False)

    try:
        run.step(1, freeze)
    except RuntimeError as error:
        return str(error), []
    return "", list(run.preconditioner.blocks[0].parameters)


def test_a_model_that_changes_on_some_ranks_only_is_an_error_on_all():
    for error, _ in run_ranks(freeze_on_some, 3, (1,)):
        assert "frozen, thawed or replaced on 1 of 3 ranks" in error


def test_a_model_that_changes_on_all_ranks_is_followed():
    for error, names in run_ranks(freeze_on_some, 2, (0, 1)):
        assert error == ""
        assert names == ["weight"]


def thaw_after_uneven_windows(rank: int, ranks: int) -> torch.Tensor:
    """One rank alone has used a layer when another layer thaws."""
    run = Run(Case(shards=((4,), (4,))), rank, ranks, average=mean_over())
    run.model.hidden.requires_grad_(False)
    for step in range(4):
        if step == 2:
            run.model.hidden.requires_grad_(True)

        def use(run: Run) -> None:
            if rank == 0:
                run.model.unused(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
            run.model.unused.zero_grad(set_to_none=False)

        run.step(step, use if step == 2 else None)
    return run.weights()


def test_what_one_rank_alone_has_seen_does_not_part_the_ranks():
    one, other = run_ranks(thaw_after_uneven_windows, 2)
    assert one.isfinite().all()
    assert torch.equal(one, other)


def use_between_turns(rank: int, ranks: int, strategy: str) -> torch.Tensor:
    """One rank alone has a gradient of a layer that missed its turn for statistics: zeros."""
    case = Case({"strategy": strategy, "statistics_every": 4, "solve_every": 4}, steps=6)
    run = Run(case, rank, ranks, average=mean_over())
    run.optimizer.param_groups[0]["weight_decay"] = 0.1

    def use(run: Run) -> None:
        run.model.unused(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        run.model.unused.zero_grad(set_to_none=False)

    for step in range(case.steps):
        run.step(step, use if step in (1, 5) and rank == 0 else None)
    if rank == 1:
        run.model.unused.zero_grad()
    run.preconditioner.propose()
    gradients = [parameter.grad for parameter in run.model.parameters()]
    return torch.cat([run.weights(), nn.utils.parameters_to_vector(gradients)])


@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt"])
def test_a_layer_that_one_rank_has_used_is_used_on_all(strategy):
    one, other = run_ranks(use_between_turns, 2, strategy)
    assert torch.equal(one, other)


# -- groups ----------------------------------------------------------------------------------

SUBGROUPS = ((1, 3), (0, 2))
HALVES: Shards = ((6,), (6,))


def train_in_a_group(rank: int, ranks: int, cases: list[Case]) -> list[torch.Tensor]:
    groups = [dist.new_group(list(members)) for members in SUBGROUPS]
    mine = next(i for i, members in enumerate(SUBGROUPS) if rank in members)
    own = SUBGROUPS[mine].index(rank)
    results = []
    for number in range(len(cases)):
        # The groups train other cases at the same time.
        case = cases[(number + mine) % len(cases)]
        backend = TorchDistributed(groups[mine])
        run = Run(case, own, 2, backend, mean_over(groups[mine])).train()
        results.append(run.weights())
    return results


def test_disjoint_groups_train_on_their_own():
    cases = [Case({"strategy": s, "solve_every": 2}, HALVES) for s in ("mem-opt", "comm-opt")]
    cases.append(Case({"solver": "eigen"}, HALVES))
    alone = [train_alone(Case(case.options)) for case in cases]
    for rank, results in enumerate(run_ranks(train_in_a_group, 4, cases)):
        mine = next(i for i, members in enumerate(SUBGROUPS) if rank in members)
        for number, weights in enumerate(results):
            expected = alone[(number + mine) % len(cases)]
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)


def train_three_of_four(rank: int, ranks: int, case: Case) -> list[torch.Tensor]:
    results = []
    groups = {members: dist.new_group(list(members)) for members in ((0, 2, 3), (0, 1, 3))}
    for members, group in groups.items():
        if rank in members:
            backend = TorchDistributed(group)
            run = Run(case, members.index(rank), 3, backend, mean_over(group)).train()
            results.append(run.weights())
        else:
            with pytest.raises(ValueError, match="not a member of the given group"):
                TorchDistributed(group)
    return results


@pytest.mark.parametrize("strategy", [HybridOpt(), HybridOpt(colocate=False)])
def test_a_part_of_the_world_trains_without_the_rest(strategy):
    """And another part after it, whose ranks have been in different numbers of groups."""
    case = Case({"strategy": strategy, "solve_every": 2})
    expected = train_alone(case)
    results = run_ranks(train_three_of_four, 4, case)
    assert [len(weights) for weights in results] == [2, 1, 1, 2]
    for weights in chain.from_iterable(results):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)


def test_without_a_process_group_the_torch_backend_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group first"):
        TorchDistributed()


def save_alone(rank: int, ranks: int, what: str) -> str | None:
    # Solved at steps 0 and 3: two windows of statistics are not yet reduced, if that is deferred.
    strategy = CommOpt() if what == "part, nothing deferred" else Sharded(deferred=True)
    options = {"strategy": strategy, "statistics_every": 1, "solve_every": 3}
    backend = TorchDistributed(meet_timeout=1)
    run = Run(Case(options), rank, ranks, backend, mean_over()).train(range(3))
    if rank > 0:
        return None
    save = checkpoint.part if what.startswith("part") else Preconditioner.state_dict
    with pytest.raises(RuntimeError) as caught:
        save(run.preconditioner)
    return str(caught.value)


@pytest.mark.parametrize("what", ["state", "part", "part, nothing deferred"])
def test_a_state_that_one_rank_asks_for_alone_names_the_missing(what):
    call = "Preconditioner.state_dict" if what == "state" else "checkpoint.part"
    first, *_ = run_ranks(save_alone, 3, what, timeout=120, check=False)
    assert not isinstance(first, RankFailure), first
    assert f"{call}() must be called by every rank" in first
    assert "1, 2" in first


class Prepared(TorchDistributed):
    """Keeps the groups that it prepares."""

    def prepare(self, groups):
        self.prepared = list(groups)
        super().prepare(groups)


def prepare_groups(rank: int, ranks: int) -> None:
    backend = Prepared()
    run = Run(Case({"strategy": HybridOpt(colocate=False)}), rank, ranks, backend, mean_over())
    groups = run.preconditioner.placement.groups()
    assert groups
    assert backend.prepared == groups  # before the first step


def test_the_groups_of_a_placement_are_made_with_it():
    run_ranks(prepare_groups, 4)


def differ_in_a_step(rank: int, ranks: int, what: str) -> str:
    """The last rank has another setting at the third step, or an error."""
    odd = rank == ranks - 1
    model = model_of((3, 4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def at(step: int, usual: float, other: float) -> float:
        return other if odd and step == 2 else usual

    options = {
        "statistics": {"statistics_every": lambda step: at(step, 1, 2)},
        "error": {"decay": lambda step: at(step, 0.9, 7.0)},
        "solves": {"solve_every": lambda step: at(step, 1, 2)},
    }.get(what, {})
    options = {"optimizer": optimizer, "statistics_every": 1, **options}
    preconditioner = Preconditioner(model, **grouped(options))
    for step in range(4):
        model.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        try:
            preconditioner.step()
        except (ValueError, RuntimeError) as error:
            dist.barrier()
            return f"step {step}: {error}"
    return "no error"


@pytest.mark.parametrize("what", ["statistics", "solves", "error"])
def test_what_differs_at_one_step_is_an_error_on_all_ranks_at_that_step(what):
    for rank, error in enumerate(run_ranks(differ_in_a_step, 3, what)):
        if what == "error":
            own = "step 2: decay must be"
            others = "step 2: another rank cannot take this step, so none does. rank 2: ValueError"
            assert error.startswith(own if rank == 2 else others), error
        elif what == "statistics":
            # It is noticed at the step before, as the weights of statistics depend on it.
            assert error.startswith("step 1: "), error
            assert "statistics_every" in error
        else:
            assert error.startswith("step 2: "), error
            assert "solve_every: rank(s) [2] have" in error
