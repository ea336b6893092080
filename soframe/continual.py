"""Continual learning: a quadratic penalty for moving weights that earlier tasks determine.

With K-FAC it is the penalty of Ritter et al. (2018), which elastic weight consolidation
(Kirkpatrick et al., 2017) has with the curvature of the method ``"diagonal"``.
"""

from __future__ import annotations

from torch import Tensor

from soframe.blocks import sharding
from soframe.curvature import Curvature
from soframe.products.vectors import Vector, total


def penalty(curvature: Curvature, anchor: Vector) -> Tensor:
    """Return ``1/2 (w - anchor)^T C (w - anchor)`` at the present weights w, for a loss.

    Multiply it by a strength: N after a task of N samples, whose mean loss it then approximates
    times N. It has first derivatives, for ``backward()``, and no second ones. The curvature stays
    as it was fitted, while the weights change. Every rank must call.

    Args:
        curvature: A curvature fitted to an earlier task, of the model that is trained.
        anchor: The weights after that task, name -> ``[*shape]``, such as a copy of the state
            dict; names that the curvature does not cover are ignored.

    Returns:
        A scalar.

    Raises:
        ValueError: If the anchor lacks a weight, has another shape or is no copy, or weights are
            sharded over ranks.
        RuntimeError: If the curvature is not fitted.
    """
    weights = curvature.parameters
    sharding.require_whole(weights.items(), "continual.penalty")
    if missing := [name for name in weights if name not in anchor]:
        raise ValueError(
            f"the anchor lacks {', '.join(missing)}: pass a copy of all weights after the task, "
            f"such as copy.deepcopy(model.state_dict()), of the model inside of its wrapper "
            f"(DistributedDataParallel, torch.compile)"
        )
    for name, weight in weights.items():
        if weight.shape != anchor[name].shape:
            raise ValueError(
                f"{name} has the shape {list(weight.shape)}, and the anchor "
                f"{list(anchor[name].shape)}: leave layers that grow out of the curvature (skip=)"
            )
    if any(weight.is_set_to(anchor[name]) for name, weight in weights.items()):
        raise ValueError("the anchor is not a copy: pass copy.deepcopy(model.state_dict())")
    moves = {name: weight - anchor[name].detach() for name, weight in weights.items()}
    terms = []
    for name, product in (curvature @ moves).items():
        # Of value m^T C m / 2, and with the gradient C m, as C is symmetric.
        move = moves[name]
        terms.append((product * (move - move.detach() / 2)).sum())
    return total(terms)
