"""The clips of the step: which are on, with which learning rates, and what they do together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.blocks.block import Block
from soframe.gradients.averaging import AveragedGradients
from soframe.gradients.kl_clip import kl_clip_factor
from soframe.gradients.norm_clip import norm_clip_factor
from soframe.gradients.rates import LearningRates
from soframe.schedules import Schedule, Scheduled


@dataclass(frozen=True)
class Bounds:
    """The bounds of the clips.

    Attributes:
        kl: The KL clip's, or None.
        norm: The norm clip's, or None.
    """

    kl: Scheduled | None
    norm: Scheduled | None

    @classmethod
    def of(cls, kl: Schedule | None, norm: Schedule | None) -> Bounds:
        """Return bounds that are checked.

        Args:
            kl: What the user passed as ``kl_clip``.
            norm: What the user passed as ``norm_clip``.
        """
        given = {"kl_clip": kl, "norm_clip": norm}
        return cls(*(v if v is None else Scheduled(n, v, open_low=True) for n, v in given.items()))

    @property
    def any(self) -> bool:
        """Whether there is any."""
        return self.kl is not None or self.norm is not None

    def at(self, step: int) -> Limits:
        """Return the bounds of a step.

        Args:
            step: Completed steps.
        """
        kl, norm = (b if b is None else b.at(step) for b in (self.kl, self.norm))
        return Limits(kl, norm)


UNDAMPED = 1e-12
"""Below this damping, what float32 holds may not be finite over what the curvature leaves."""


@dataclass(frozen=True)
class Limits:
    """The bounds of the clips at one step.

    Attributes:
        kl: The KL clip's, or None.
        norm: The norm clip's, or None.
        careful: Whether gradients are so large, or the damping so small, that inner products, or
            even the results, may be out of range: the first are then taken in float64, the others
            looked at.
    """

    kl: float | None
    norm: float | None
    careful: bool = False


@dataclass(frozen=True)
class Clipped:
    """What the clips have done to the directions of a step.

    Attributes:
        finite: Whether all directions are, on every rank alike: all of them have the same.
        kl: The factor that the KL clip asks for, a scalar in (0, 1]; None where it is off.
        norm: That of the norm clip, likewise. Directions are scaled by the lesser of the two.
    """

    finite: bool
    kl: Tensor | None = None
    norm: Tensor | None = None


def clip(
    results: Mapping[Block, Tensor],
    raw: Mapping[Block, Tensor | None],
    gradients: AveragedGradients,
    limits: Limits,
    rates: LearningRates,
    step: int,
) -> Clipped:
    """Scale all preconditioned gradients by one factor, in place: the least that any clip asks for.

    Args:
        results: The preconditioned gradient of each block.
        raw: The raw one, on the ranks that know it.
        gradients: Who knows which.
        limits: The bounds.
        rates: The learning rates.
        step: Completed steps.

    Returns:
        Whether they are finite, and the factors.
    """
    every = list(results.values())
    clipped = {block: result for block, result in results.items() if block.method.clipped}
    if limits.careful:
        bad = [result.isfinite().all().logical_not() for result in every]
        if every and bool(torch.stack([one.to(bad[0].device) for one in bad]).any()):
            return Clipped(finite=False)
        results = {block: result.double() for block, result in clipped.items()}
        raw = {block: own if own is None else own.double() for block, own in raw.items()}
    else:
        results = clipped
    if not results or (limits.kl is None and limits.norm is None):
        return Clipped(finite=True)
    wide = list(results.values())
    factors: list[Tensor] = []
    kl_factor = norm_factor = None
    if limits.kl is not None:
        known = gradients.spoken_for(results)
        kl_factor = kl_clip_factor(
            [results[block] for block in known],
            [own for block in known if (own := raw[block]) is not None],
            rates.of(known, step),
            limits.kl,
            gradients.total,
            wide[0],
        )
        factors.append(kl_factor)
    if limits.norm is not None:
        norm_factor = norm_clip_factor(wide, rates.of(list(results), step), limits.norm)
        factors.append(norm_factor)
    factor = factors[0] if len(factors) == 1 else torch.minimum(*factors)
    every = list(clipped.values())
    factor = factor.to(every[0].dtype)
    if all(result.device == factor.device for result in every):
        torch._foreach_mul_(every, factor)
    else:
        for result in every:
            result.mul_(factor.to(result.device))
    return Clipped(finite=True, kl=kl_factor, norm=norm_factor)
