"""One of two ranks raises, in any local computation, and lives on: all ranks raise, none waits."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import soframe
from soframe.layers import LinearHelper
from soframe.methods import KFAC, SOAP
from soframe.settings import DAMPING
from soframe.solvers import Eigen
from tests.distributed.harness import run_ranks
from tests.distributed.training import Case, Run, mean_over, train_alone
from tests.gallery import GALLERY

pytestmark = pytest.mark.distributed

dion, mkor = GALLERY.dion, GALLERY.mkor
STEPS, BAD = 4, 2  # the step in which one rank raises
PASSES, MIDDLE, SOLVE = "passes", "middle", "solve"

OF_GRADIENTS = {"damping": DAMPING, "decay": 0.95, "kl_clip": 0.2}  # the defaults
OF_SOAP = {"method": "soap", **OF_GRADIENTS}

# Place -> class, method, settings, and the part of a step that it belongs to.
PLACES: dict[str, tuple[type, str, dict[str, Any], str]] = {
    "inputs of a helper": (LinearHelper, "inputs", {}, PASSES),
    "rows of a helper": (LinearHelper, "output_rows", {}, PASSES),
    "statistics": (KFAC, "statistics", {}, PASSES),
    "average": (mkor.Inverse, "average", {"method": mkor.MKOR(), **OF_GRADIENTS}, MIDDLE),
    "observe": (SOAP, "observe", OF_SOAP, MIDDLE),
    "direct": (SOAP, "direct", OF_SOAP, MIDDLE),
    "direct, with a parcel": (
        dion.Dion,
        "direct",
        {"method": dion.Dion(0.25), **OF_GRADIENTS},
        MIDDLE,
    ),
    "rebase": (SOAP, "rebase", OF_SOAP, MIDDLE),
    "apply": (Eigen, "apply", {}, MIDDLE),
    "follow": (Eigen, "follow", {"solver": Eigen(follows=True), "solve_every": 3}, MIDDLE),
    "solve": (Eigen, "solve", {}, SOLVE),
}


class OutOfLuckError(Exception):
    """The error of one rank."""


def fail(rank: int, ranks: int, names: list[str]) -> list[tuple[str, int, int, str, bool]]:
    """The error of each case, the step that raised it, and whether training went on."""
    found = []
    for name in names:
        strategy, place = name.split(": ")
        kind, method, options, part = PLACES[place]
        if place == "follow" and strategy != "comm-opt":
            continue
        odd = len(found) % ranks
        broken = mock.patch.object(kind, method, side_effect=OutOfLuckError(f"{place} at λ = 10⁻³"))
        usual = {"solve_every": 1, "strategy": strategy}
        if kind is Eigen:
            usual["solver"] = "eigen"
        run = Run(Case({**usual, **options}), rank, ranks, average=mean_over())
        for step in range(BAD):
            run.step(step)
        saved, weights = run.preconditioner.state_dict(), run.weights()
        error, when = "none", -1
        for step in range(BAD, STEPS):
            try:
                with broken if step == BAD and rank == odd else nullcontext():
                    run.step(step)
            except (OutOfLuckError, RuntimeError) as raised:
                notes = "; ".join(getattr(raised, "__notes__", ()))
                error, when = f"{type(raised).__name__}: {raised} {notes}", step
                break
        if part == PASSES:
            run.preconditioner.reset_batch()
        else:
            run.preconditioner.load_state_dict(saved)
            torch.nn.utils.vector_to_parameters(weights, run.model.parameters())
        run.train(range(BAD, STEPS))
        every = [torch.empty_like(weights) for _ in range(ranks)]
        dist.all_gather(every, run.weights())
        found.append((name, odd, when, error, all(torch.equal(every[0], one) for one in every)))
        run.preconditioner.close()
    return found


EVERY = [f"{strategy}: {place}" for strategy in ("comm-opt", "mem-opt") for place in PLACES]
FEW = [
    name for name in EVERY if "mem-opt" in name or name in ("comm-opt: direct", "comm-opt: follow")
]


@pytest.mark.parametrize(
    ("ranks", "names"), [(2, FEW), pytest.param(3, EVERY, marks=pytest.mark.thorough)]
)
def test_an_error_on_one_rank_is_raised_on_all(ranks, names):
    results = run_ranks(fail, ranks, names, timeout=60)
    for rank, cases in enumerate(results):
        for name, odd, when, error, same in cases:
            *_, part = PLACES[name.split(": ")[1]]
            assert when == (BAD + 1 if part == MIDDLE else BAD), (rank, name, error)
            assert same, (rank, name)
            if rank == odd:
                assert error.startswith("OutOfLuckError"), (name, error)
            elif part != SOLVE:
                assert f"rank {odd}: OutOfLuckError: " in error, (name, error)
            # The module is named, by all ranks.
            if part == PASSES or rank != odd:
                assert any(f"{layer}" in error for layer in ("hidden", "head", "conv", "grouped"))
            if part == MIDDLE:
                assert "load the last checkpoint" in error, (name, error)


def train_checkpointed(rank: int, ranks: int) -> Tensor:
    run = Run(Case(steps=2), rank, ranks, average=mean_over())
    whole = run.model.forward
    run.model.forward = lambda x: checkpoint(whole, x, use_reentrant=False)  # type: ignore[method-assign]
    return run.train().weights()


def test_a_checkpoint_ends_the_calls_that_it_repeats():
    """By an exception that passes through the hooks, and is no error of a rank."""
    for weights in run_ranks(train_checkpointed, 2):
        torch.testing.assert_close(weights, train_alone(Case(steps=2)), rtol=0, atol=1e-10)


class Unsaveable:
    def state_dict(self) -> dict[str, Tensor]:
        raise OutOfLuckError("not here")

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


def fail_to_save(rank: int, ranks: int, folder: str) -> list[str]:
    found = []
    for sharded in (False, True):
        for odd in range(ranks):
            bad = rank == odd
            state: dict[str, Any] = {"x": torch.ones(3)}
            if bad and sharded:
                state["stateful"] = Unsaveable()
            keywords = {"keep": 0} if bad and not sharded else {}
            try:
                soframe.checkpoint.save(folder, state, sharded=sharded, **keywords)
            except RuntimeError as error:
                found.append(str(error))
            else:
                found.append("none")
    soframe.checkpoint.save(folder, {"x": torch.ones(3)})
    return found


def test_a_rank_that_cannot_save_raises_on_all():
    with tempfile.TemporaryDirectory() as folder:
        for found in run_ranks(fail_to_save, 2, folder, timeout=60):
            for number, error in enumerate(found):
                assert f"rank {number % 2}: " in error, error
