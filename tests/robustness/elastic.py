"""A training script that saves, dies where it is told to, and resumes: what torchrun runs."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from soframe import checkpoint
from soframe.comm.distributed import TorchDistributed
from soframe.solvers import Eigen
from tests.distributed.training import Case, Run, mean_over

STEPS = 9
SAVE_EVERY = 4
TIMEOUT = 30.0
"""Seconds that a rank waits for one that is stopped."""


@dataclass(frozen=True)
class Mortal(Eigen):
    """As Eigen, but calls something first."""

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        BEFORE_SOLVE[0]()
        return super().solve(matrix, damping)


BEFORE_SOLVE: list[Callable[[], object]] = [lambda: None]


@dataclass(frozen=True)
class Death:
    """Where a rank gets a signal, once.

    Attributes:
        step: At which step.
        rank: Which rank.
        where: "backward" (before the preconditioner's step), "solve" (within), "save" (within the
            save of this step), or "anywhere": it says at this step what its process id is, and is
            sent the signal from outside.
        number: The signal's.
        share: For "save": after which share of the time that the save before it took.
    """

    step: int
    rank: int
    where: str
    number: int = signal.SIGKILL
    share: float = 0.5


@dataclass(frozen=True)
class Plan:
    """What is trained, and how it is saved.

    Attributes:
        strategy: The strategy.
        steps: How many.
        every: Steps between checkpoints.
        sharded: Whether each rank writes a part of them.
        pace: Seconds that each step takes at least.
    """

    strategy: str
    steps: int = STEPS
    every: int = SAVE_EVERY
    sharded: bool = False
    pace: float = 0.0


def case_of(plan: Plan) -> Case:
    every = {"statistics_every": 2, "solve_every": 3}
    return Case({"strategy": plan.strategy, **every, "solver": Mortal()}, steps=plan.steps)


def everything(run: Run, step: int) -> dict[str, Any]:
    return {
        "step": step,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
    }


def load(run: Run, last: Path, plan: Plan) -> int:
    """Load a checkpoint; return the step to go on with."""
    if plan.sharded:
        run.step(0)  # gives momentum room
        saved = everything(run, 0)
        reader, planner = checkpoint.PlainReader(last), checkpoint.PlainPlanner()
        dcp.load(saved, storage_reader=reader, planner=planner)
        checkpoint.load(run.preconditioner, last)
    else:
        saved = checkpoint.read(last)
        run.preconditioner.load_state_dict(saved["preconditioner"])
    run.model.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    step: int = saved["step"]
    return step


def save(run: Run, folder: Path, step: int, plan: Plan) -> None:
    own = run.preconditioner
    curvature = checkpoint.part(own) if plan.sharded else own.state_dict()
    state = {**everything(run, step), "preconditioner": curvature}
    checkpoint.save(folder, state, sharded=plan.sharded)


def train(
    rank: int, ranks: int, folder: Path, plan: Plan, death: Death | None = None
) -> tuple[int, Tensor]:
    """Train to the end, from the last checkpoint if there is one.

    Returns:
        The step it began with, and the weights.
    """
    backend = TorchDistributed(meet_timeout=TIMEOUT) if ranks > 1 else None
    run = Run(case_of(plan), rank, ranks, backend, mean_over() if ranks > 1 else None)
    run.optimizer.param_groups[0]["momentum"] = 0.5  # so that the optimizer has a state
    died = folder / "died"
    mortal = death if death is not None and death.rank == rank and not died.exists() else None
    last = checkpoint.latest(folder / "saved")
    first = load(run, last, plan) if last is not None else 0

    def die() -> None:
        assert mortal is not None
        if not died.exists():
            died.touch()
            os.kill(os.getpid(), mortal.number)

    took = 0.02
    for step in range(first, plan.steps):
        here = mortal.where if mortal is not None and mortal.step == step else ""
        if here == "anywhere":
            (folder / "pid.new").write_text(str(os.getpid()))
            (folder / "pid.new").rename(folder / "pid")
        if step > first and step % plan.every == 0:
            if here == "save" and mortal is not None:
                threading.Timer(mortal.share * took, die).start()
            began = time.perf_counter()
            save(run, folder / "saved", step, plan)
            took = time.perf_counter() - began
        BEFORE_SOLVE[0] = die if here == "solve" else lambda: None
        between: Callable[[], object] = die if here == "backward" else lambda: None
        run.step(step, lambda _, between=between: between())
        time.sleep(plan.pace)
    return first, run.weights()


def main(folder: str, told: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    given = json.loads(told)
    death = Death(**given["death"]) if given["death"] else None
    first, weights = train(rank, ranks, Path(folder), Plan(**given["plan"]), death)
    torch.save((first, weights), Path(folder) / f"end-{ranks}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    # NOTE: A thread of Gloo lets go of the barrier's tensor after this one has gone on; if it then
    # finds the interpreter at its end, torch aborts the process. So the interpreter has no end.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
