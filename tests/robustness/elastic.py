"""A training script that saves, dies where it is told to, and resumes: what torchrun runs."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from soframe.solvers import Eigen
from tests.distributed.training import Case, Run, mean_over

STEPS = 9
SAVE_EVERY = 4


@dataclass(frozen=True)
class Mortal(Eigen):
    """As Eigen, but calls something first."""

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        BEFORE_SOLVE[0]()
        return super().solve(matrix, damping)


BEFORE_SOLVE: list[Callable[[], object]] = [lambda: None]


@dataclass(frozen=True)
class Death:
    """Where a rank is killed, once.

    Attributes:
        step: At which step.
        rank: Which rank.
        where: "backward" (before the preconditioner's step) or "solve" (within).
    """

    step: int
    rank: int
    where: str


def case_of(strategy: str) -> Case:
    options = {"strategy": strategy, "statistics_every": 2, "solve_every": 3, "solver": Mortal()}
    return Case(options, steps=STEPS)


def load(run: Run, file: Path) -> int:
    """Load a checkpoint; return the step to go on with."""
    saved = torch.load(file, weights_only=True)
    run.model.load_state_dict(saved["model"])
    run.optimizer.load_state_dict(saved["optimizer"])
    run.preconditioner.load_state_dict(saved["preconditioner"])
    step: int = saved["step"]
    return step


def save(run: Run, file: Path, step: int) -> None:
    """Save everything; every rank must call, one of them writes."""
    saved = {
        "step": step,
        "model": run.model.state_dict(),
        "optimizer": run.optimizer.state_dict(),
        "preconditioner": run.preconditioner.state_dict(),
    }
    if run.rank == 0:
        torch.save(saved, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)  # never half a checkpoint


def train(
    rank: int, ranks: int, folder: Path, strategy: str, death: Death | None = None
) -> tuple[int, Tensor]:
    """Train to the end, from the last checkpoint if there is one.

    Returns:
        The step it began with, and the weights.
    """
    run = Run(case_of(strategy), rank, ranks, average=mean_over() if ranks > 1 else None)
    run.optimizer.param_groups[0]["momentum"] = 0.5  # so that the optimizer has a state
    file, died = folder / "last.pt", folder / "died"
    first = load(run, file) if file.exists() else 0

    def die() -> None:
        if death is not None and rank == death.rank and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    for step in range(first, STEPS):
        if step > first and step % SAVE_EVERY == 0:
            save(run, file, step)
        here = death is not None and step == death.step
        BEFORE_SOLVE[0] = die if here and death and death.where == "solve" else lambda: None
        between = die if here and death and death.where == "backward" else lambda: None
        run.step(step, lambda _, between=between: between())
    return first, run.weights()


def main(folder: str, strategy: str, death: str) -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    told = Death(**json.loads(death)) if death else None
    first, weights = train(rank, ranks, Path(folder), strategy, told)
    torch.save((first, weights), Path(folder) / f"end-{ranks}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()
    # NOTE: A thread of Gloo lets go of the barrier's tensor after this one has gone on; if it then
    # finds the interpreter at its end, torch aborts the process. So the interpreter has no end.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
