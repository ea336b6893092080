"""Holding the declared loss against the closure's: most mistakes here are ones of scale."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from soframe.losses.base import Loss
from soframe.trust_region.quadratic import Forward


def check_declared_loss(declared: Loss | None, forwards: Sequence[Forward]) -> None:
    """Compare the curvature of the closure's loss with that of the declared one.

    Args:
        declared: The declared loss.
        forwards: The forward passes of a step, one per closure.

    Raises:
        ValueError: If they differ.
    """
    assert declared is not None
    forward = forwards[0]
    output = forward.output.detach()
    generator = torch.Generator(output.device).manual_seed(0)  # the user's stays as it is
    tangent = torch.randn(
        output.shape, generator=generator, dtype=output.dtype, device=output.device
    )
    per_sample = declared.hessian_product(output, tangent)
    expected = float((tangent * per_sample).sum())
    actual = float((tangent * forward.hessian_product(tangent)).sum())
    actual *= len(output) * len(forwards)
    # Saturated outputs leave a curvature that is all rounding, which says nothing of a scale.
    rounding = 16 * torch.finfo(output.dtype).eps
    noise = rounding * float(tangent.square().sum())
    if not math.isclose(actual, expected, rel_tol=max(1e-3, rounding), abs_tol=noise):
        times = actual / expected if expected else math.inf
        raise ValueError(
            f"the closure's loss has {times:.4g} times the curvature of loss={declared!r}, as a "
            f"mean over {len(output)} samples and {len(forwards)} closure(s); declare the loss "
            f"that the closure returns"
        )
