"""What is under way when a state is saved or loaded, the model changes, or training ends."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from soframe import checkpoint
from soframe.blocks.block import Solved
from soframe.estimate.worker import Work
from soframe.solvers import Eigen, Lazy
from tests.background import (
    EVERY,
    STEPS,
    Gated,
    in_use,
    still,
    under_way,
    wait_until_solved,
)
from tests.distributed.training import same, snapshot
from tests.state.test_resume import load, save, triangles

# -- state -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"solver": "eigen"}, marks=pytest.mark.thorough),
        pytest.param({"solver": "inverse", "stagger": True}, marks=pytest.mark.thorough),
        {"solver": Lazy(Eigen(follows=True), tolerance=0.3), "stagger": True},
        # Its third factor takes its first statistics in the window after the landing, whether the
        # window under way takes others or none.
        {"method": "ekfac", "solver": "eigen"},
        {"method": "ekfac", "solver": "eigen", "statistics_every": 4},
    ],
)
def test_a_resumed_run_is_the_run_that_saved(runs, options):
    options = {"background": 2, **options}
    for at in range(STEPS):
        whole = runs(**options).train(range(at))
        saved = save(whole)
        assert under_way(whole) == 0
        resumed = load(runs(**options), saved)
        for run in (whole, resumed):
            run.train(range(at, STEPS))
        assert torch.equal(resumed.weights(), whole.weights()), at
        assert same(triangles(resumed), triangles(whole)), at


def test_all_solves_under_way_land(runs):
    """In turns each step begins a solve, of other blocks."""
    own, plain = (still(runs(stagger=True, background=after)) for after in (3, 0))
    for run in (own, plain):
        run.train(range(EVERY + 3))
    assert len(own.preconditioner.curvature.parts.solves._under_way) > 1
    assert not same(in_use(own), in_use(plain))
    own.preconditioner.state_dict()
    assert same(in_use(own), in_use(plain))


def test_a_landing_after_the_backward_pass_drops_what_was_taken_in_the_old_basis(runs):
    """Of EKFAC: the scale waits for the next window, the other statistics stay."""
    settings = {"method": "ekfac", "solver": "eigen", "background": 3}
    own, plain = (still(runs(**settings)).train(range(EVERY + 1)) for _ in range(2))
    own.step(EVERY + 1, lambda run: run.preconditioner.state_dict())
    plain.step(EVERY + 1)
    found, expected = snapshot(own.preconditioner), snapshot(plain.preconditioner)
    scales = {name for name in expected if name.endswith(".S")}
    assert scales.isdisjoint(found)
    factors = [name for name in expected if name.endswith((".A", ".G"))]
    assert len(factors) == 2 * len(scales) > 0
    for name in factors:
        assert torch.equal(found[name], expected[name]), name


def test_landing_refreshes_data_that_follow_their_factors(runs):
    """The solve began from older factors: eigenvalues are those of the present ones."""
    run = runs(background=3, solver=Eigen(follows=True)).train(range(EVERY + 2))
    assert under_way(run) > 0
    run.preconditioner.state_dict()
    data = snapshot(run.preconditioner)
    names = [name.removesuffix(".values") for name in data if name.endswith(".values")]
    assert names
    for name in names:
        vectors = data[f"{name}.vectors"]
        expected = (vectors * (data[name] @ vectors)).sum(-2)
        torch.testing.assert_close(data[f"{name}.values"], expected, rtol=1e-9, atol=1e-12)


def test_a_sharded_checkpoint_has_what_was_under_way(runs):
    own, plain = still(runs(background=3)), still(runs())
    for run in (own, plain):
        run.train(range(EVERY + 1))
    assert not same(in_use(own), in_use(plain))
    part, expected = (checkpoint.part(run.preconditioner) for run in (own, plain))
    header = part.pop("header")
    assert header == expected.pop("header")
    assert same(part, expected)
    assert under_way(own) == 0


def test_loading_drops_what_was_under_way(runs):
    saved = save(runs().train(range(2)))
    own, fresh = runs(background=2), runs(background=2)
    own.train(range(EVERY + 1))
    assert under_way(own) > 0
    for run in (own, fresh):
        load(run, saved).train(range(2, 4))  # it would have landed after these
    assert under_way(own) == 0
    assert torch.equal(own.weights(), fresh.weights())
    assert same(snapshot(own.preconditioner), snapshot(fresh.preconditioner))


def test_what_is_not_loaded_changes_nothing(runs):
    own, plain = still(runs(background=2)), still(runs())
    for run in (own, plain):
        run.train(range(EVERY + 1))
    with pytest.raises(ValueError, match="not the state"):
        own.preconditioner.load_state_dict({})
    own.train(range(EVERY + 1, EVERY + 3))
    assert same(in_use(own), in_use(plain))


# -- whatever else happens between two steps -------------------------------------------------------


def test_a_model_that_changes_has_what_was_under_way(runs):
    own, plain = still(runs(background=3)), still(runs())
    for run in (own, plain):
        run.train(range(EVERY + 1))
        run.model.hidden.weight.requires_grad_(False)
        run.model.conv.requires_grad_(False)
    assert not same(in_use(own), in_use(plain))
    for run in (own, plain):
        run.step(EVERY + 1)
    found = in_use(own)
    assert {name.split(".")[0] for name in found} == {"conv", "grouped", "hidden", "head"}
    assert same(found, in_use(plain))
    assert under_way(own) == 0


def test_preconditioning_again_is_with_the_factors_of_now(runs):
    own, plain = still(runs(background=3, solver="inverse")), still(runs(solver="inverse"))
    for run in (own, plain):
        run.train(range(EVERY + 2))
        own_blocks = run.preconditioner.blocks
        run.preconditioner.damp(dict.fromkeys((b.name for b in own_blocks), 0.5))
        run.preconditioner.propose()
    assert under_way(own) == 0
    assert same(in_use(own), in_use(plain))
    own.train(range(EVERY + 2, EVERY + 4))
    assert same(in_use(own), in_use(plain)), "nothing older has landed on top"


def test_data_that_are_set_are_used_until_the_next_landing(runs):
    own, plain = still(runs(background=2)), still(runs())
    own.train(range(1))
    plain.train(range(EVERY + 1))
    blocks = own.preconditioner.blocks
    zeros = [
        Solved(
            {f: {k: 0 * t for k, t in d.items()} for f, d in b.second_order.items()}, None, False
        )
        for b in blocks
    ]
    own.train(range(1, EVERY + 1))
    for block, data in zip(blocks, zeros, strict=True):
        block.restore(data)
    own.step(EVERY + 1)
    assert all(not t.any() for t in in_use(own).values())
    own.step(EVERY + 2)
    assert same(in_use(own), in_use(plain))


def test_copies_and_results_are_counted(runs):
    solver = Gated()
    own = runs(background=3, solver=solver)
    own.train(range(EVERY))
    usage = own.preconditioner.memory_usage()
    assert usage["under_way"] == 0
    own.step(EVERY)
    now = own.preconditioner.memory_usage()
    assert now["under_way"] == now["factors"], "one copy of each"
    assert now["total"] == usage["total"] + now["under_way"]
    solver.gate.set()
    wait_until_solved(own)
    assert under_way(own) == now["second_order"], "copies are gone, results there"
    own.train(range(EVERY + 1, EVERY + 4))
    assert own.preconditioner.memory_usage() == usage
    assert "under_way" not in runs().preconditioner.memory_usage()


# -- the end ---------------------------------------------------------------------------------------


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("soframe")]


@pytest.mark.slow
def test_closing_ends_the_thread_and_begins_nothing_more(runs, monkeypatch):
    cancel = Work.cancel

    def late(work: Work) -> None:
        time.sleep(0.01)  # in which the thread would begin what waits, if it could
        cancel(work)

    monkeypatch.setattr(Work, "cancel", late)
    solver = Gated()
    own = runs(background=3, solver=solver)
    own.train(range(EVERY + 1))
    assert len(threads()) == 1
    first = sum(not one["beside"] for one in solver.seen)
    while len(solver.seen) == first:
        time.sleep(0.001)
    threading.Timer(0.5, solver.gate.set).start()
    own.preconditioner.close()
    assert threads() == []
    assert len(solver.seen) == first + 2  # the factors of the block under way, and no other
    assert own.preconditioner.state_dict()["step"] == EVERY + 1


def test_an_error_that_is_given_up_is_in_the_log(runs, caplog):
    solver = Gated(error=KeyError("not this one"))
    solver.gate.set()
    own = runs(background=3, solver=solver)
    own.train(range(EVERY + 1))
    wait_until_solved(own)
    with caplog.at_level(logging.WARNING, "soframe"):
        own.preconditioner.close()
    assert "KeyError: 'not this one'" in caplog.text


SCRIPT = """
import sys, time
from soframe.solvers import Inverse
from tests.distributed.training import Case, Run

class Slow(Inverse):
    def solve(self, matrix, damping):
        time.sleep(0.05)
        return super().solve(matrix, damping)

run = Run(Case({"solve_every": 2, "background": "ready", "solver": Slow()}))
for step in range(3):
    run.step(step)
assert run.preconditioner.memory_usage()["under_way"] > 0
print("under way", flush=True)
if sys.argv[1] == "raises":
    raise ValueError("the script's own")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "status"), [("ends", 0), pytest.param("raises", 1, marks=pytest.mark.thorough)]
)
@pytest.mark.thorough
def test_a_script_that_closes_nothing_ends_with_its_own_status(how, status):
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", SCRIPT, how]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, timeout=90, check=False
    )
    assert "under way" in done.stdout, done.stderr
    assert done.returncode == status, done.stderr
    assert done.stderr.count("Traceback") == status
    assert ("ValueError: the script's own" in done.stderr) == (status == 1)
