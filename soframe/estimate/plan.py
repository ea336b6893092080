"""The plan of a step: every number that it uses, evaluated once and agreed on by all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

UNDAMPED = 1e-12
"""Below this damping, a float32 gradient over the least damped eigenvalue may not be finite."""


@dataclass(frozen=True)
class Plan:
    """The numbers of one step, the same on every rank."""

    step: int  # completed steps before it
    damping: float  # the damping of blocks without one of their own
    decay: float  # the EMA decay of running averages
    # The bounds of the clips that are on, by name.
    bounds: Mapping[str, float] = field(default_factory=dict)
    lr: float = 1.0  # the learning rate of the steps that the clips bound
    statistics_every: int = 1  # the interval of statistics of calls, in the window after this step
    solve_every: int = 1  # the interval of solves
    observes: bool = False  # whether averaged gradients enter running factors at this step
    # By parameter the number of ranks with its gradient, where ranks may differ.
    present: Sequence[float] = ()
    # The weights of the statistics of all ranks; None if statistics are not used.
    weights: Sequence[float] | None = None
    # Whether the gradients of all ranks are finite; None if that is read later.
    finite: bool | None = None
    # Whether gradients are so large, or the damping so small, that inner products, or even updates
    # and states, may overflow: inner products are then computed in float64, and updates and states
    # are checked.
    careful: bool = False
