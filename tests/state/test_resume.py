"""Save at any step, load anywhere, and training goes on as if nothing had happened."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from soframe import Preconditioner, checkpoint
from soframe.solvers import Eigen, Lazy
from soframe.state import checksums
from soframe.strategies import HybridOpt, Sharded
from tests import kit
from tests.curvature import closing
from tests.distributed.harness import run_ranks
from tests.distributed.training import (
    LR,
    Case,
    Run,
    mean_over,
    preconditioner_of,
    same,
    snapshot,
)

STEPS = 7  # one more than a cycle of statistics and solves
CASE = Case({"statistics_every": 2, "solve_every": 3}, steps=STEPS)
Saved = bytes


def save(run: Run) -> Saved:
    """Everything that a training script saves, as a file's bytes."""
    file = io.BytesIO()
    everything = {
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "preconditioner": run.preconditioner.state_dict(),
    }
    torch.save(everything, file)
    return file.getvalue()


def load(run: Run, saved: Saved) -> Run:
    everything = torch.load(io.BytesIO(saved), weights_only=True)
    run.model.load_state_dict(everything["model"])
    run.optimizer.load_state_dict(everything["optimizer"])
    run.preconditioner.load_state_dict(everything["preconditioner"])
    return run


def resume_everywhere(make: Callable[[], Run]) -> list[tuple[bool, bool]]:
    """Per step: whether weights and memory of a run resumed there end with the same bits."""
    saved: list[Saved] = []
    whole = make()
    for step in range(STEPS):
        saved.append(save(whole))
        whole.step(step)
    outcome = []
    for step, file in enumerate(saved):
        resumed = load(make(), file).train(range(step, STEPS))
        outcome.append(
            (
                torch.equal(resumed.weights(), whole.weights()),
                same(triangles(resumed), triangles(whole)),
            )
        )
    return outcome


def triangles(run: Run) -> dict[str, Tensor]:
    """What is remembered; of factors only the lower triangle means anything."""
    found = snapshot(run.preconditioner)
    return {name: t.tril() if name.count(".") == 1 else t for name, t in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("solver", "stagger"),
    [
        ("inverse", False),
        ("orthogonal-iteration", True),
        ("newton-schulz", False),
        pytest.param("eigen", False, marks=pytest.mark.thorough),
        pytest.param("eigen", True, marks=pytest.mark.thorough),
        (Lazy(Eigen(follows=True), tolerance=0.3), False),
    ],
)
def test_one_process_goes_on_bit_by_bit_from_every_step(solver, stagger):
    case = CASE.with_options(solver=solver, stagger=stagger)
    assert resume_everywhere(lambda: Run(case)) == [(True, True)] * STEPS


def resume_on_rank(rank: int, ranks: int, cases: list[Case]) -> list[list[tuple[bool, bool]]]:
    return [
        resume_everywhere(lambda case=case: Run(case, rank, ranks, average=mean_over()))
        for case in cases
    ]


LAYOUTS = {
    "mem": CASE.with_options(strategy="mem-opt"),
    "hybrid": CASE.with_options(strategy="hybrid-opt"),
    "spread": CASE.with_options(strategy=HybridOpt(colocate=False), solver="inverse"),
    "comm": CASE.with_options(strategy="comm-opt"),
    "sharded": CASE.with_options(strategy=Sharded(group=2)),
    "owner-local": CASE.with_options(strategy="owner-local", solver="inverse"),
    "warm": CASE.with_options(strategy=Sharded(group=2), solver="orthogonal-iteration"),
    "staggered": CASE.with_options(strategy=Sharded(group=2), stagger=True),
}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.thorough
def test_ranks_go_on_bit_by_bit_from_every_step():
    for own in run_ranks(resume_on_rank, 3, list(LAYOUTS.values()), timeout=120):
        for name, outcome in zip(LAYOUTS, own, strict=True):
            assert outcome == [(True, True)] * STEPS, name


# -- another layout --------------------------------------------------------------------------


def train_on_rank(
    rank: int, ranks: int, case: Case, saved: Saved | None, first: int, last: int
) -> tuple[Saved, Tensor, dict[str, int]]:
    run = Run(case, rank, ranks, average=mean_over() if ranks > 1 else None)
    if saved is not None:
        load(run, saved)
    run.train(range(first, last))
    return save(run), run.weights(), run.preconditioner.memory_usage()


def relay(legs: list[tuple[int, Case, int, int]]) -> Tensor:
    """Train in legs on other worlds, each from what the last rank of the one before saved."""
    saved, weights = None, torch.empty(0)
    for ranks, case, first, last in legs:
        if ranks == 1:
            results = [train_on_rank(0, 1, case, saved, first, last)]
        else:
            results = run_ranks(train_on_rank, ranks, case, saved, first, last)
        states = [torch.load(io.BytesIO(r[0]), weights_only=True) for r in results]
        for state in states:
            assert equal(state["preconditioner"], states[0]["preconditioner"])
        saved, weights = results[-1][0], results[-1][1]
    return weights


def equal(one: Any, other: Any) -> bool:
    """Deep equality, tensors bit by bit."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[k], other[k]) for k in one)
    return bool(one == other)


MEM, COMM, HALF, SHARDED = (
    CASE.with_options(strategy=strategy)
    for strategy in ("mem-opt", "comm-opt", "hybrid-opt", "sharded")
)
DEFERRED = CASE.with_options(strategy=Sharded(group=None, deferred=True))


@pytest.mark.distributed
@pytest.mark.parametrize(
    "legs",
    [
        [(2, MEM, 0, 1), (3, COMM, 1, 5), (1, COMM, 5, STEPS)],
        # Statistics at steps 0, 2, 4 and 6, solves at 0, 3 and 6: at 5 some are pending.
        pytest.param([(2, DEFERRED, 0, 5), (3, SHARDED, 5, STEPS)], marks=pytest.mark.slow),
        pytest.param([(3, HALF, 0, 4), (2, MEM, 4, STEPS)], marks=pytest.mark.slow),
        pytest.param(
            [(1, DEFERRED, 0, 3), (3, DEFERRED, 3, 5), (4, DEFERRED, 5, 7), (2, COMM, 7, STEPS)],
            marks=pytest.mark.thorough,
        ),
        pytest.param(
            [(1, MEM, 0, 2), (3, HALF, 2, 7), (1, MEM, 7, STEPS)], marks=pytest.mark.thorough
        ),
    ],
    ids=["mem-comm-one", "deferred-sharded", "hybrid-mem", "deferred", "one-hybrid-one"],
)
def test_another_world_goes_on_within_rounding(legs):
    whole = Run(CASE).train(range(STEPS)).weights()
    torch.testing.assert_close(relay(legs), whole, rtol=0, atol=1e-10)


@pytest.mark.distributed
def test_each_rank_keeps_what_its_placement_says():
    saved, _, alone = train_on_rank(0, 1, CASE, None, 0, 4)
    memory = [result[2] for result in run_ranks(train_on_rank, 2, MEM, saved, 4, 4)]
    assert sum(m["second_order"] for m in memory) == alone["second_order"]
    triangles = [
        f.numel() for b in load_state(saved)["blocks"].values() for f in b["factors"].values()
    ]
    assert all(m["factors"] == 8 * sum(triangles) < alone["factors"] for m in memory)
    memory = [m for *_, m in run_ranks(train_on_rank, 2, SHARDED, saved, 4, 4)]
    assert sum(m["factors"] for m in memory) == 8 * sum(triangles)
    assert sum(m["second_order"] for m in memory) == alone["second_order"]
    assert all(m["factors"] for m in memory)


def load_state(saved: Saved) -> Any:
    return torch.load(io.BytesIO(saved), weights_only=True)["preconditioner"]


# -- other choices ---------------------------------------------------------------------------


def test_another_solver_loads_the_factors_and_solves_at_once():
    before = Run(CASE).train(range(4))
    after = load(Run(CASE.with_options(solver="eigen")), save(before))
    assert not any(block.solved for block in after.preconditioner.blocks)
    factors = {k: t for k, t in triangles(before).items() if k.count(".") == 1}
    assert same(factors, {k: t for k, t in triangles(after).items() if k.count(".") == 1})
    after.step(4)  # not a solve step
    assert [b.name for b in after.preconditioner.blocks if b.solved] == [
        "conv",
        "grouped",
        "hidden",
        "head",
    ]


def test_the_users_schedules_stay_theirs():
    calls = []

    def damping(step: int) -> float:
        calls.append(step)
        return 0.02 if step < 100 else 0.5

    def every(step: int) -> int:
        return 2

    case = CASE.with_options(damping=damping, statistics_every=every)
    first = Run(case).train(range(3))
    state = first.preconditioner.state_dict()
    assert not {"damping", "statistics_every", "solve_every", "decay", "kl_clip"} & set(state)
    second = load(Run(case.with_options(decay=0.5)), save(first))
    calls.clear()
    second.step(3)
    assert calls == [3]
    assert second.preconditioner.curvature.parts.decay.at(0) == 0.5


def test_counters_and_steps_are_restored():
    run = Run(CASE)

    def spoil(run: Run) -> None:
        run.model.head.bias.grad[0] = float("nan")

    run.step(0, spoil)
    run.step(1, spoil)
    again = load(Run(CASE), save(run))
    assert again.preconditioner.counters == run.preconditioner.counters
    assert again.preconditioner.counters["skipped_updates"] == 2
    assert again.preconditioner.state_dict()["step"] == 2


def test_a_state_is_a_copy_of_the_counters_and_outlives_the_run():
    run = Run(CASE).train(range(3))
    state = run.preconditioner.state_dict()
    kept = copy.deepcopy(state)
    run.train(range(3, 7))
    assert equal(state, kept)


def test_states_have_second_order_data_without_a_copy():
    """Solves make new tensors, so that a state can keep the old ones; averages change in place."""
    run = Run(CASE).train(range(4))
    first, second = (run.preconditioner.state_dict()["blocks"]["hidden"] for _ in range(2))
    assert first["factors"].keys() == first["second_order"].keys() == {"A", "G"}
    for factor, tensors in first["second_order"].items():
        for name, tensor in tensors.items():
            assert tensor.data_ptr() == second["second_order"][factor][name].data_ptr()
        assert first["factors"][factor].data_ptr() != second["factors"][factor].data_ptr()


def test_a_state_between_backward_and_step_disturbs_nothing():
    plain = Run(CASE).train(range(STEPS))
    asked = Run(CASE)
    for step in range(STEPS):
        asked.step(step, lambda run: run.preconditioner.state_dict())
    assert torch.equal(asked.weights(), plain.weights())


def ask_between(rank: int, ranks: int, case: Case) -> bool:
    plain = Run(case, rank, ranks, average=mean_over()).train(range(5))
    asked = Run(case, rank, ranks, average=mean_over())
    for step in range(5):
        asked.step(step, lambda run: run.preconditioner.state_dict())
    return torch.equal(asked.weights(), plain.weights())


@pytest.mark.distributed
@pytest.mark.parametrize("case", [MEM, DEFERRED], ids=["mem", "deferred"])
def test_a_state_between_backward_and_step_disturbs_no_rank(case):
    assert run_ranks(ask_between, 2, case) == [True, True]


def load_wrapped(rank: int, ranks: int, saved: Saved) -> tuple[Saved, list[str]]:
    run = Run(MEM, rank, ranks, average=mean_over())
    run.preconditioner.close()
    model = DistributedDataParallel(run.model, find_unused_parameters=True)
    run.preconditioner = preconditioner_of(model, run.optimizer, MEM, None)
    load(run, saved)
    return save(run), sorted(run.preconditioner.state_dict()["blocks"])


@pytest.mark.distributed
def test_a_ddp_wrapper_changes_no_name():
    saved = save(Run(CASE).train(range(4)))
    original = torch.load(io.BytesIO(saved), weights_only=True)["preconditioner"]
    for file, found in run_ranks(load_wrapped, 2, saved):
        assert found == ["conv", "grouped", "head", "hidden", "unused"]
        state = torch.load(io.BytesIO(file), weights_only=True)["preconditioner"]
        assert equal(state, original)


# -- layers that freeze and thaw -------------------------------------------------------------


LEFT_OUT = pytest.mark.filterwarnings("ignore:soframe. moments and statistics of")


def freeze(run: Run, name: str, frozen: bool) -> None:
    getattr(run.model, name).requires_grad_(not frozen)


@LEFT_OUT
@pytest.mark.parametrize(("change", "saved_at"), [(3, 4), (3, 5), (3, 6), (4, 5), (4, 6)])
@pytest.mark.parametrize("thaw", [False, True])
@pytest.mark.covering(together=1)
def test_a_run_with_a_layer_that_changed_goes_on_bit_by_bit(change, saved_at, thaw):
    def make(frozen: bool) -> Run:
        run = Run(CASE)
        freeze(run, "hidden", frozen)
        run.preconditioner.close()
        run.preconditioner = preconditioner_of(run.model, run.optimizer, CASE, None)
        return run

    whole, file = make(frozen=thaw), b""
    for step in range(STEPS):
        if step == change:
            freeze(whole, "hidden", frozen=not thaw)
        if step == saved_at:
            file = save(whole)
        whole.step(step)
    resumed = load(make(frozen=not thaw), file).train(range(saved_at, STEPS))
    assert torch.equal(resumed.weights(), whole.weights())


def test_statistics_of_a_layer_that_was_frozen_before_construction_are_not_loaded():
    file = save(Run(CASE).train(range(2)))
    run = Run(CASE)
    freeze(run, "hidden", frozen=True)
    run.preconditioner.close()
    run.preconditioner = Preconditioner(run.model, lr=LR, statistics_every=1)
    with pytest.warns(UserWarning, match=r"statistics of hidden are not.*freeze them afterwards"):
        load(run, file)
    assert "hidden" not in {block.name for block in run.preconditioner.blocks}


def test_a_state_that_lacks_what_is_frozen_lets_it_begin_anew():
    first, other = Run(CASE), Run(CASE).train(range(2))
    freeze(first, "hidden", frozen=True)
    first.preconditioner.close()
    first.preconditioner = preconditioner_of(first.model, first.optimizer, CASE, None)
    file = save(first.train(range(2)))
    with pytest.raises(ValueError, match=r"lacks \['hidden'\] and has nothing besides"):
        load(other, file)
    freeze(other, "hidden", frozen=True)
    load(other, file)
    (hidden,) = [block for block in other.preconditioner.blocks if block.name == "hidden"]
    assert not (hidden.solved)
    assert not (hidden.running)
    assert not (hidden.record.updates)
    freeze(other, "hidden", frozen=False)
    other.train(range(2, STEPS))
    (hidden,) = [block for block in other.preconditioner.blocks if block.name == "hidden"]
    assert hidden.solved


# -- dampings of single blocks ---------------------------------------------------------------


def damped(frozen: bool = False) -> tuple[nn.Sequential, Preconditioner]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    model[0].requires_grad_(not frozen)
    return model, kit.precondition(model, lr=LR)


def squares(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return model(torch.randn(16, 5, generator=generator, dtype=torch.float64)).square().mean()


@pytest.mark.parametrize("sharded", [False, True])
def test_dampings_of_single_blocks_are_resumed(sharded, tmp_path):
    model, own = damped()
    own.damp({"0": 10.0, "2": 1e-6})
    kit.train(model, squares, [0], own)
    again, other = damped()
    other.damp({"2": 5.0})  # which the state has another one for
    if sharded:
        folder = checkpoint.save(tmp_path, {"p": checkpoint.part(own)}, sharded=True)
        checkpoint.load(other, folder, key="p")
    else:
        other.load_state_dict(own.state_dict())
    kit.train(model, squares, [1], own)
    kit.train(again, squares, [1], other)
    for gradient, expected in zip(kit.gradients(again), kit.gradients(model), strict=True):
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize(
    ("dampings", "message"),
    [
        ({"1": 1.0}, "no block '1'"),
        ({"0": -1.0}, "at least 0"),
        ({"0": float("nan")}, "at least 0"),
        ({"0": "0.1"}, "a number"),
    ],
)
def test_dampings_of_no_block_or_out_of_range_are_refused(dampings, message):
    _, own = damped()
    with pytest.raises(ValueError, match=message):
        own.damp({"2": 3.0} | dampings)
    assert [block.damped_with(own.damping) for block in own.blocks] == [own.damping] * 2


def test_a_snapshot_of_no_block_is_refused():
    model, own = damped()
    kit.train(model, squares, [0], own)
    snapshot = own.snapshot()
    own.damp({"0": 3.0})
    with pytest.raises(ValueError, match="restore: there is no block 'head'"):
        own.restore({"0": snapshot["0"], "head": snapshot["2"]})
    assert own.blocks[0].damped_with(0.1) == 3.0
    own.restore({"0": snapshot["0"]})
    assert own.blocks[0].damped_with(0.1) == 0.1


def test_a_run_that_goes_back_after_a_backward_pass_is_the_same():
    """The statistics of the pass are dropped with its gradients: see docs/guides/unchecked.md."""
    model, own = damped()
    kit.train(model, squares, [0], own)
    saved = own.state_dict()
    kit.train(model, squares, [1], own)
    expected = kit.gradients(model)
    again, other = damped()
    kit.train(again, squares, [0], other)
    squares(again, 5).mul(100).backward()
    other.load_state_dict(saved)
    kit.train(again, squares, [1], other)
    for gradient, wanted in zip(kit.gradients(again), expected, strict=True):
        assert torch.equal(gradient, wanted)


def test_a_state_without_dampings_is_of_an_earlier_version():
    model, own = damped()
    kit.train(model, squares, [0], own)
    former = own.state_dict()
    del former["dampings"]
    _, other = damped()
    other.damp({"0": 10.0})
    other.load_state_dict(checkpoint.seal(former))
    assert [block.damped_with(other.damping) for block in other.blocks] == [10.0, other.damping]


@LEFT_OUT
@pytest.mark.parametrize("saved", ["not", "frozen", "thawed"])
def test_a_damping_outlasts_a_freeze(saved):
    model, own = damped()
    own.damp({"0": 10.0})
    for step in range(3):
        model[0].requires_grad_(step != 1)
        kit.train(model, squares, [step], own)
        if saved == {1: "frozen", 2: "thawed"}.get(step):
            state, twin = own.state_dict(), copy.deepcopy(model.state_dict())
            model, own = damped(frozen=step == 1)
            model.load_state_dict(twin)
            own.load_state_dict(state)
    assert {block.name: block.damped_with(0.0) for block in own.blocks} == {"0": 10.0, "2": 0.0}


def test_a_state_that_has_the_rates_of_former_clips_loads() -> None:
    """Clips read learning rates once, and their peaks were in states of this version."""
    model = nn.Linear(3, 2)
    with closing(kit.precondition(model)) as own:
        kit.train(model, lambda net, _: net(torch.ones(4, 3)).square().mean(), range(1), own)
        state = {k: v for k, v in own.state_dict().items() if k != checksums.KEY}
        own.load_state_dict(checksums.seal({**state, "initial_lrs": [0.1]}))
        assert own.steps == 1
