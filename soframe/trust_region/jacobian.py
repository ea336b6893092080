"""Derivatives of a model's outputs along directions of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from soframe.trust_region.denormals import users_mode
from soframe.trust_region.forward import Forward, Outputs
from soframe.trust_region.replay import eagerly, exchanged
from soframe.trust_region.tangents import Pair, dual

Direction = Sequence[Tensor | None]
"""One tensor per parameter; None for zero."""


def jacobian_products(
    model: nn.Module,
    forward: Forward,
    outputs: Outputs,
    parameters: Sequence[nn.Parameter],
    directions: Sequence[Direction],
) -> list[tuple[Tensor, ...]]:
    """Return the derivatives of the model's outputs along directions.

    Args:
        model: The model.
        forward: The forward pass to differentiate, by its tape if that can be followed.
        outputs: The model's collector.
        parameters: The parameters.
        directions: k directions.

    Returns:
        For each direction one of each output's shape.
    """
    if forward.tape is None or not forward.follows():
        return [
            jacobian_product(model, forward, outputs, parameters, direction)
            for direction in directions
        ]
    rows = forward.tape.tangents(parameters, directions)
    each = [
        [torch.zeros_like(output) if tangent is None else tangent for tangent in row]
        for output, row in zip(forward.outputs, rows, strict=True)
    ]
    return [*zip(*each, strict=True)]


def jacobian_product(
    model: nn.Module,
    forward: Forward,
    outputs: Outputs,
    parameters: Sequence[nn.Parameter],
    direction: Direction,
) -> tuple[Tensor, ...]:
    """Return the derivative of the model's outputs along a direction, by running the closure again.

    Args:
        model: The model.
        forward: The forward pass to differentiate.
        outputs: The model's collector.
        parameters: The parameters.
        direction: The direction; what comes before its first parameter is not differentiated.

    Returns:
        One of each output's shape.
    """
    rows = zip(parameters, direction, strict=True)
    places = [module._parameters for module in model.modules()]
    with forward.replay.again(), fwd.dual_level():
        others = {id(p): dual(Pair(p.detach(), tangent)) for p, tangent in rows}
        with exchanged(places, others), torch.enable_grad(), eagerly(), _Constants(), users_mode():
            found, _ = outputs.of(forward.closure, cut=True)
        duals = [fwd.unpack_dual(output) for output in found]
    return tuple(
        torch.zeros_like(dual.primal) if dual.tangent is None else dual.tangent.detach()
        for dual in duals
    )


class _Constants(TorchFunctionMode):
    """What has no gradient, since it is computed under ``no_grad``, gets no tangent either."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        has_gradient = torch.is_grad_enabled()
        with nullcontext() if has_gradient else fwd._set_fwd_grad_enabled(False):
            return func(*args, **(kwargs or {}))
