"""What a plan has to be told where ``step`` averages gradients: a placement sees blocks alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LocalPlan:
    """What a plan of traffic has to know of a model with ``gradients="local"``.

    Attributes:
        rest: The elements and the dtype of each parameter without a block that has a gradient.
        idle: How many parameters without a block have none.
        kl_clip: Whether steps are clipped by their KL divergence.
    """

    rest: tuple[tuple[int, str], ...] = ()
    idle: int = 0
    kl_clip: bool = True
