"""The clips of the step: which are on, with which learning rates, and what they do together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.blocks.block import Block
from soframe.comm.stages import ALONE, Stages
from soframe.gradients.applying import Directions
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
    directions: Directions,
    raw: Mapping[Block, Tensor | None],
    gradients: AveragedGradients,
    *,
    limits: Limits,
    rates: LearningRates,
    step: int,
    stages: Stages = ALONE,
) -> Clipped:
    """Scale all preconditioned gradients by one factor, in place: the least that any clip asks for.

    Args:
        directions: The preconditioned gradient of each block.
        raw: The raw one, on the ranks that know it.
        gradients: Who knows which.
        limits: The bounds.
        rates: The learning rates.
        step: Completed steps.
        stages: Who has the other blocks of the model, which are clipped by the same factor: every
            stage takes part, whether it has any direction or not.

    Returns:
        Whether they are finite, and the factors.
    """
    blocks = [block for block in directions.matrices if block.method.clipped]
    known = {b: m for b, m in directions.matrices.items() if m is not None}
    if limits.careful:
        # Those that this rank knows; together all ranks know all.
        bad = bool(directions.matrices) and not _finite(list(known.values()), gradients)
        if stages.any(bad):
            return Clipped(finite=False)
        known = {block: known[block].double() for block in blocks if block in known}
        raw = {
            block: gradient if gradient is None else gradient.double()
            for block, gradient in raw.items()
        }
    if limits.kl is None and limits.norm is None:
        return Clipped(finite=True)
    if not blocks and stages.backend is None:
        return Clipped(finite=True)
    every = [tensor for block in blocks for tensor in directions.tensors(block)]
    first = every[0] if every else torch.zeros((), dtype=torch.float64, device="cpu")
    like = first.double() if limits.careful else first  # of the same dtype on every rank
    kl_factor = norm_factor = None
    if limits.kl is not None:
        told = gradients.spoken_for(blocks)
        kl_factor = kl_clip_factor(
            [known[block] for block in told],
            [gradient for block in told if (gradient := raw[block]) is not None],
            lrs=rates.of(told, step),
            kappa=limits.kl,
            add=stages.of(gradients.total),
            like=like,
        )
    if limits.norm is not None:
        counted = set(gradients.counted(blocks))
        norm_factor = norm_clip_factor(
            [known[block] if block in counted else None for block in blocks],
            rates.of(blocks, step),
            bound=limits.norm,
            add=gradients.total_of_directions,
            like=like,
            over_stages=None if stages.backend is None else stages.total,
        )
    factors = [factor for factor in (kl_factor, norm_factor) if factor is not None]
    factor = factors[0] if len(factors) == 1 else torch.minimum(*factors)
    _scale(every, factor.to(first.dtype))
    return Clipped(finite=True, kl=kl_factor, norm=norm_factor)


def _scale(every: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors by one factor, in place; by one call where that can be."""
    if every and all(tensor.device == factor.device for tensor in every):
        torch._foreach_mul_(every, factor)
    else:
        for tensor in every:
            tensor.mul_(factor.to(tensor.device))


def _finite(matrices: Sequence[Tensor], gradients: AveragedGradients) -> bool:
    """Return whether all directions are finite, of all ranks where each knows some."""
    bad = [matrix.isfinite().all().logical_not() for matrix in matrices]
    device = bad[0].device if bad else torch.device("cpu")
    count = torch.tensor(0.0, device=device)
    for one in bad:
        count += one.to(device)
    return not bool(gradients.total_of_directions(count))
