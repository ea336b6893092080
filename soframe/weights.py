"""The weights of a model that a curvature covers."""

from __future__ import annotations

from torch import Tensor, nn

from soframe.blocks import sharding
from soframe.curvature import Curvature


def covered(curvature: Curvature) -> dict[str, nn.Parameter]:
    """Return the parameters that vectors have, by name, in the order of the model."""
    named = curvature.parts.model.named_parameters()
    return {name: p for name, p in named if name not in curvature.left_out}


def values_of(curvature: Curvature) -> dict[str, Tensor]:
    """Return the values of `covered`, whole where they are sharded; then every rank must call."""
    return {name: sharding.whole(p.detach()) for name, p in covered(curvature).items()}


def samples_of(curvature: Curvature) -> float:
    """Return the number of samples that a curvature was fitted to, on all ranks.

    Raises:
        RuntimeError: If it is not fitted, or is the curvature of a preconditioner.
    """
    number = 0.0
    weights = curvature.fitting.weights
    for block in curvature.blocks:
        for factor in block.factors:
            if factor.mean_over == "samples":
                number = max(number, *weights.get(block.name, {}).get(factor.name, [0.0]))
    if not number:
        raise RuntimeError(
            "this curvature is not fitted to data: call fit(), or load() one that was"
        )
    return number
