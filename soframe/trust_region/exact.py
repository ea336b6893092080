"""The exact quadratic model of a batch, over all ranks, and the damping that it begins with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from soframe.comm import Backend
from soframe.comm.agreement import add_over_ranks, add_tensor_over_ranks, require_no_failure
from soframe.damping.policies import APART
from soframe.trust_region.forward import Closure, Forward
from soframe.trust_region.param_groups import penalty, slope_and_metric
from soframe.trust_region.quadratic import Quadratic, curvature_along
from soframe.trust_region.replay import Replay
from soframe.trust_region.twice import Direction

TRIES = 10
"""The number of dampings tried in each direction before the first step."""

BETTER = 2.0
"""The factor by which another damping must increase the last one's reduction. The damping with the
best single step is not the best over a hundred: on CURVES the lower dampings skipped by this factor
took a third more steps.
"""


@dataclass(frozen=True)
class Batch:
    """A batch at the present parameters, after its backward passes."""

    parameters: Sequence[nn.Parameter]  # the trained ones
    gradients: Sequence[Tensor]  # of the objective (loss and weight decay), the mean over ranks
    decays: Sequence[float]
    forwards: Sequence[Forward]  # this rank's, one for each closure
    loss: float  # the mean over ranks

    @property
    def passes(self) -> list[tuple[Closure, Replay]]:
        """The closures, and the random states of their forward passes."""
        return [(forward.closure, forward.replay) for forward in self.forwards]

    @property
    def penalty(self) -> float:
        """The weight decay's part of the objective, at the present parameters."""
        return penalty(zip(self.parameters, self.decays, strict=True))


def exact_model(
    backend: Backend, batch: Batch, directions: Sequence[Direction], damping: float
) -> Quadratic:
    """Return the quadratic model of the objective along k directions; a collective of all ranks."""
    count, error = len(directions), None
    curvature = torch.full((count, count), torch.nan, dtype=torch.float64, device="cpu")
    try:
        curvature = curvature_along(batch.forwards, batch.parameters, directions)
    except Exception as raised:  # contributes NaN, so that all ranks fail together
        error = raised
    curvature = add_tensor_over_ranks(backend, curvature) / backend.world_size
    if not bool(curvature.isfinite().all()):
        (failed,) = add_over_ranks(backend, [float(error is not None)])
        require_no_failure(backend, error, failed)
    slope, metric, lengths = slope_and_metric(
        batch.gradients, directions, decays=batch.decays, damping=damping
    )
    return Quadratic(curvature + metric, slope, lengths)


def best_damping(first: float, start: float, after: Callable[[float], float]) -> float:
    """Return the damping with the largest reduction on the first batch, from ``first`` on.

    The search goes downwards, or else upwards, given the objectives before and after a step.
    """
    best, least = first, after(first)
    for factor in (1 / APART, APART):
        begun = best
        for _ in range(TRIES):
            objective = after(best * factor)
            if not start - objective > BETTER * max(0.0, start - least):
                break
            best, least = best * factor, objective
        if best != begun:
            break
    return best
