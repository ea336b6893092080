"""Steps without a model: the mean of the coefficients that the last models had.

The exact model takes most of a step's time, and a mini-batch's model says little of the next batch.
So with ``model_every=k`` only every k-th step has one. The steps in between go along the directions
of their own gradient, by the mean of the coefficients that the last models give those directions
alone, without the last update: a mean of coefficients which belong to another update is none of
this one's. A direction that averages gradients, as momentum does, owes little to the batch of its
model, so that slope and curvature along it are those of other batches too, up to noise that
the mean takes away.

After a step that is undone the next one has a model. The mean stays: what one batch makes of it is
no better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

KEEP = 0.8
"""What the mean keeps of its past."""

FIRST = 5
"""Steps that have a model in any case: averages and bases only begin in them."""


class Lengths:
    """The mean coefficient of each direction, and when the next model is due.

    Args:
        every: Steps from one model to the next.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self.forget()

    def renew(self) -> None:
        """Let the next step have a model."""
        self._since = self._every

    def forget(self) -> None:
        """Know nothing: other parameters are trained."""
        self._names: tuple[str, ...] = ()
        self._mean: list[float] = []
        self._mass = 0.0
        self._since = 0

    def learn(self, names: Sequence[str], coefficients: Tensor) -> None:
        """Let the coefficients of a model enter the mean.

        Args:
            names: What each direction is; where they are others than before, the mean begins anew.
            coefficients: ``[k]``.
        """
        if tuple(names) != self._names:
            self.forget()
            self._names, self._mean = tuple(names), [0.0] * len(names)
        self._mass = KEEP * self._mass + (1 - KEEP)
        rate = (1 - KEEP) / self._mass
        new = coefficients.tolist()
        self._mean = [old + rate * (c - old) for old, c in zip(self._mean, new, strict=True)]
        self._since = 0

    def due(self, step: int) -> bool:
        """Return whether a step has a model, whatever its directions.

        Args:
            step: Completed steps.
        """
        return step < FIRST or not self._names or self._since + 1 >= self._every

    def take(self, names: Sequence[str]) -> Tensor | None:
        """Return the coefficients of a step without a model, and count it.

        Args:
            names: What its directions are.

        Returns:
            ``[k]``, float64; None where these are others than those of the last model.
        """
        if tuple(names) != self._names:
            return None
        self._since += 1
        return torch.tensor(self._mean, dtype=torch.float64, device="cpu")

    def state(self) -> dict[str, Any]:
        """Return what `load` needs."""
        return {
            "names": list(self._names),
            "mean": list(self._mean),
            "mass": self._mass,
            "since": self._since,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a state.

        Args:
            state: What `state` returned; nothing, if that run had a model at every step.
        """
        self.forget()
        if state:
            self._names, self._mean = tuple(state["names"]), list(state["mean"])
            self._mass, self._since = float(state["mass"]), int(state["since"])


def check(state: Any) -> None:
    """Check that `Lengths.load` can take a state.

    Args:
        state: What `Lengths.state` returned, perhaps in another run, or nothing.

    Raises:
        ValueError: If it is damaged.
    """
    good = isinstance(state, Mapping)
    if good and state:
        names, mean = state.get("names"), state.get("mean")
        good = isinstance(names, list) and isinstance(mean, list) and len(names) == len(mean)
        good = good and all(isinstance(name, str) for name in names)
        numbers = [*(mean if good else ()), state.get("mass"), state.get("since")]
        good = good and all(
            isinstance(n, int | float) and not isinstance(n, bool) and math.isfinite(n)
            for n in numbers
        )
        good = good and state["mass"] >= 0 and state["since"] >= 0
    if not good:
        raise ValueError(f"the state is damaged: the lengths of steps without a model are {state}")
