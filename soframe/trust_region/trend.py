"""Means over batches: of the quadratic model along a line, and of the loss of averaged iterates.

One batch's model along a direction predicts the next batch's poorly. Slopes, curvatures and squared
lengths are linear in the batch, so the mean of models is the model of the mean loss::

    mean_t M_t(c) = mean_t b_t c + 1/2 c^2 (mean_t C_t + damping mean_t |d_t|^2)

Its minimum is a quotient of means. A mean of minima, each of them a quotient, would be large if one
batch happens to have little curvature.

Steps of one length get no further than the noise of gradients allows, and a batch that can be
fitted by itself gives a good reduction ratio at every step, even if it raises the loss on others.
Both show on unseen batches: there the average of the iterates is compared with an earlier one, on
the same samples, so that their noise cancels. Steps become shorter if several such differences show
that the average got worse, or if more of them do not show that it got better, and longer again, up
to the model's own length, if it did.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from soframe.trust_region.quadratic import Quadratic

KEEP = 0.9
"""The decay of the averaged model."""

APART = 30
"""The fewest steps from one average to the next."""

LEAST, MOST = 4, 10
"""Differences for a verdict, and for the verdict that the average did not get better."""

ERRORS = 1.0
"""Standard errors of the mean that are significant."""

SHORTER, LONGER = 0.5, 1.25
"""Factors of the share after a rise, and after a fall: it stays if three falls follow each rise,
since ``1.25^3`` is about two."""

STALLED = 0.7
"""Its factor where neither is significant."""

SAID = "the average got no better on fresh batches: lengths are shorter"


@dataclass
class AveragedModel:
    """The exponential mean of models along one direction each.

    The sums stand for means: their common weight cancels in the quotient.
    """

    slope: float = 0.0
    curvature: float = 0.0
    length: float = 0.0

    def learn(self, model: Quadratic) -> None:
        """Add the undamped model of a batch along one direction."""
        assert model.lengths is not None
        self.slope = KEEP * self.slope + model.slope.item()
        self.curvature = KEEP * self.curvature + model.curvature.item()
        self.length = KEEP * self.length + model.lengths.item()

    def minimum(self, damping: float) -> float:
        """Return the step to the minimum of the damped mean; negative curvature counts as zero."""
        bend = max(0.0, self.curvature) + damping * self.length
        return -self.slope / bend if bend > 0 else 0.0


@dataclass
class Trend:
    """Collects changes of the average's loss on unseen batches."""

    share: float = 1.0  # the factor of the model's length
    count: int = 0  # differences since the last verdict
    mean: float = 0.0
    squares: float = 0.0  # the sum of their squared deviations
    at: float = -1.0  # the step of the last average

    def due(self, step: int) -> bool:
        """Whether the next average is due after this number of completed steps."""
        return self.at < 0 or step - self.at >= APART

    def begin(self, step: int) -> bool:
        """Begin the next difference; return whether an earlier average exists for comparison."""
        first, self.at = self.at < 0, float(step)
        return not first

    def learn(self, now: float, earlier: float, eps: float) -> bool:
        """Add a difference of objectives; return whether steps become shorter."""
        change = now - earlier
        if math.isfinite(earlier) and not math.isfinite(now):
            return self._judge(SHORTER)
        if not abs(change) > eps * abs(earlier):  # below rounding, or not finite
            return False
        self.count += 1
        off = change - self.mean
        self.mean += off / self.count
        self.squares += off * (change - self.mean)  # Welford's
        if self.count < LEAST:
            return False
        error = ERRORS * math.sqrt(self.squares / (self.count * (self.count - 1)))
        if abs(self.mean) > error:
            factor = SHORTER if self.mean > 0 else LONGER
            return self._judge(factor)
        if self.count < MOST:
            return False
        return self._judge(STALLED)

    def _judge(self, factor: float) -> bool:
        self.share = min(1.0, self.share * factor)
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        return factor < 1
