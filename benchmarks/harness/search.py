"""What `harness.tuning` may try, shared out over the trials."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from soframe.experiments.config import OptimizerName


@dataclass(frozen=True)
class Range:
    """A range that the trials share out: one draw from each of as many equal parts.

    Attributes:
        low: The lower end, positive; draws are uniform in the logarithm.
        high: The upper end.
    """

    low: float
    high: float

    def draws(self, generator: random.Random, count: int) -> list[Any]:
        """One value from each part, in random order, rounded to two digits."""
        ratio = (self.high / self.low) ** (1 / count)
        values = [self.low * ratio ** (part + generator.random()) for part in range(count)]
        generator.shuffle(values)
        return [float(f"{value:.2g}") for value in values]


@dataclass(frozen=True)
class Choice:
    """Values that the trials share out.

    Attributes:
        values: What to choose from; one that stands here twice is tried twice as often.
    """

    values: tuple[Any, ...]

    def draws(self, generator: random.Random, count: int) -> list[Any]:
        """Each value as often as the others, or once more, in random order."""
        order = generator.sample(self.values, len(self.values))
        values = [order[i % len(order)] for i in range(count)]
        generator.shuffle(values)
        return values


_SCHEDULES = Choice(("constant", "cosine", "cosine", "cosine"))

#: Search spaces. Names with a dot are arguments of the optimizer.
SPACES: Mapping[OptimizerName, Mapping[str, Range | Choice]] = {
    "sgd": {
        "lr": Range(1e-3, 1e-1),
        "momentum": Choice((0.9, 0.95, 0.98)),
        "schedule": _SCHEDULES,
    },
    "adamw": {
        "lr": Range(5e-4, 1e-2),
        "betas": Choice(((0.9, 0.99), (0.9, 0.999), (0.95, 0.95))),
        "schedule": _SCHEDULES,
    },
    "kfac": {
        "lr": Range(5e-2, 1.0),
        "momentum": Choice((0.8, 0.9)),
        "preconditioner.solver": Choice(("eigen", "inverse")),
        "preconditioner.damping": Range(1e-4, 1e-2),
        "preconditioner.kl_clip": Range(5e-5, 1e-3),
        "preconditioner.decay": Choice((0.8, 0.9)),
        "preconditioner.statistics_every": Choice((5, 10)),
        "preconditioner.solve_every": Choice((10, 20)),
        "schedule": _SCHEDULES,
    },
    "soap": {
        "lr": Range(1e-3, 2e-2),
        "betas": Choice(((0.95, 0.95), (0.9, 0.99))),
        "options.precondition_frequency": Choice((5, 10)),
        "schedule": _SCHEDULES,
    },
    "muon": {
        "lr": Range(5e-3, 1e-1),
        "momentum": Choice((0.9, 0.95)),
        "options.adamw_lr": Range(1e-3, 1e-2),
        "schedule": _SCHEDULES,
    },
    "shampoo": {
        "lr": Range(1e-4, 3e-3),
        "betas": Choice(((0.9, 0.99), (0.9, 0.999))),
        "options.preconditioning_compute_steps": Choice((10, 25)),
        "schedule": _SCHEDULES,
    },
}

#: Those that the trust region is raced against.
PEERS: tuple[OptimizerName, ...] = ("sgd", "adamw", "soap", "muon", "shampoo")

#: Where the loss is one on held-out data, weights may decay; elsewhere that only hinders.
WEIGHT_DECAY: Mapping[str, Choice] = {"byte-gpt": Choice((0.0, 0.1))}
