"""Inputs of a traffic plan with ``Distribution(gradients="local")``: parameters without a block."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LocalPlan:
    """The gradients that a step averages beside the blocks', for a plan of traffic.

    Attributes:
        rest: The elements and the dtype of each parameter without a block that has a gradient.
        idle: The number of parameters without a block and without a gradient.
        kl_clip: Whether steps are clipped by their KL divergence.
    """

    rest: tuple[tuple[int, str], ...] = ()
    idle: int = 0
    kl_clip: bool = True
