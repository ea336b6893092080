"""Runs whose solves are in the background, and solvers that wait until they are let."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from soframe.comm import SingleProcess
from soframe.solvers import Inverse
from tests.distributed.training import Case, Run, snapshot

EVERY, STEPS = 4, 11
Data = dict[str, Tensor]


class Waits(SingleProcess):
    """The plain twin: it solves where it trains."""

    overlap = False


@dataclass(frozen=True)
class Gated(Inverse):
    """Solves when it is let, but for the first time at once; or raises instead."""

    gate: threading.Event = field(default_factory=threading.Event, repr=False)
    error: Exception | None = field(default=None, repr=False)
    seen: list[dict[str, Any]] = field(default_factory=list, repr=False)

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        beside = threading.current_thread() is not threading.main_thread()
        modes = {"gradients": torch.is_grad_enabled(), "autocast": torch.is_autocast_enabled("cpu")}
        self.seen.append({"beside": beside, **modes})
        if beside:
            assert self.gate.wait(30)
            if self.error is not None:
                raise self.error
        return super().solve(matrix, damping)


@pytest.fixture(name="runs")
def closing_runs() -> Iterator[Callable[..., Run]]:
    """Makes runs, and closes them."""
    made: list[Run] = []

    def make(backend: SingleProcess | None = None, **options: Any) -> Run:
        case = Case({"statistics_every": 1, "solve_every": EVERY, **options}, steps=STEPS)
        made.append(Run(case, backend=backend or SingleProcess()))
        return made[-1]

    yield make
    for run in made:
        for block in run.preconditioner.blocks:
            if isinstance(block.solver, Gated):
                block.solver.gate.set()
        run.preconditioner.close()


def in_use(run: Run) -> Data:
    """The second-order data of now."""
    return {name: t for name, t in snapshot(run.preconditioner).items() if name.count(".") == 2}


def still(run: Run) -> Run:
    """Let nothing move: factors are then those of any other such run."""
    run.optimizer.param_groups[0]["lr"] = 0.0
    return run


def under_way(run: Run) -> int:
    """The bytes that solves under way hold."""
    return run.preconditioner.memory_usage()["under_way"]


def wait_until_solved(run: Run) -> None:
    """Return when the thread has nothing more to do."""
    for solution in run.preconditioner.curvature.parts.solves._under_way:
        while not solution.finished:
            time.sleep(0.001)
