"""What is averaged where batches are noisy: the quadratic model along a line, and the iterates.

One batch's model of the loss along a direction says little of the next batch's. Slopes, curvatures
and squared lengths are linear in the batch, so the mean of models is the model of the mean loss:

    mean_t M_t(c) = mean_t b_t c + 1/2 c^2 (mean_t C_t + damping mean_t |d_t|^2)

Its minimum is a quotient of means. A mean of minima, each of them a quotient, would be large where
one batch happens to have little curvature.

A learning rate that falls takes noise out of the last iterate, and needs to know when training
ends. The mean of the last iterates is rid of the same noise at any time. It has polynomial decay
(Shamir and Zhang, 2013, section 4), so that it forgets the beginning::

    average_t = average_{t-1} + (eta + 1) / (t + eta) (parameters_t - average_{t-1})
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from soframe.trust_region.quadratic import Quadratic

KEEP = 0.9
"""What the averaged model keeps of its past."""


class AveragedModel:
    """The mean of models along one direction each, by exponential weights.

    Sums stand for means: what they lack of a weight of one cancels in the quotient.
    """

    def __init__(self) -> None:
        self._slope = self._curvature = self._length = 0.0

    def learn(self, model: Quadratic) -> None:
        """Let the model of a batch enter the mean.

        Args:
            model: Along one direction, undamped, with the direction's squared length.
        """
        assert model.lengths is not None
        self._slope = KEEP * self._slope + model.slope.item()
        self._curvature = KEEP * self._curvature + model.curvature.item()
        self._length = KEEP * self._length + model.lengths.item()

    def minimum(self, damping: float) -> float:
        """Return how far along its direction the damped mean is lowest.

        Negative curvature, as losses may have that are not convex in the outputs, counts as none.

        Args:
            damping: The damping.
        """
        bend = max(0.0, self._curvature) + damping * self._length
        return -self._slope / bend if bend > 0 else 0.0

    def state(self) -> dict[str, float]:
        """Return what `load` needs."""
        return {
            "slope": self._slope,
            "curvature": self._curvature,
            "length": self._length,
        }

    def load(self, state: Mapping[str, float]) -> None:
        """Continue from a state.

        Args:
            state: What `state` returned.
        """
        self._slope = state["slope"]
        self._curvature, self._length = state["curvature"], state["length"]


def check(state: Any) -> None:
    """Check that `AveragedModel.load` can take a state.

    Args:
        state: What `AveragedModel.state` returned, perhaps in another run.

    Raises:
        ValueError: If it is damaged.
    """
    good = isinstance(state, Mapping) and set(state) == set(AveragedModel().state())
    if not good or not all(isinstance(n, float) and math.isfinite(n) for n in state.values()):
        raise ValueError(f"the state is damaged: the averaged model is {state!r}")


def share(step: int, eta: float) -> float:
    """Return what a new iterate counts in the average.

    Args:
        step: How many there are, with it.
        eta: The exponent of the decay.
    """
    return (eta + 1) / (step + eta)
