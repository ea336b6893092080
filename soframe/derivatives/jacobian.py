"""Derivatives of a model's outputs along directions of its parameters."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from soframe.derivatives.denormals import users_mode
from soframe.derivatives.forward import Forward, Outputs
from soframe.derivatives.replay import eagerly, exchanged
from soframe.derivatives.tangents import Pair, dual, replaced
from soframe.derivatives.twice import differentiable, tangents_by_gradients

log = logging.getLogger(__name__)

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
    run = (model, forward, outputs, parameters, direction)
    try:
        return _forward_mode(*run)
    except RuntimeError as error:  # torch has no such derivative of something within, or fails
        _tell(str(error))
        return _by_gradients(*run)


@lru_cache(maxsize=64)  # once, not at every step
def _tell(problem: str) -> None:
    log.info("derivatives differentiate the gradient: %s", problem)


def _forward_mode(
    model: nn.Module,
    forward: Forward,
    outputs: Outputs,
    parameters: Sequence[nn.Parameter],
    direction: Direction,
) -> tuple[Tensor, ...]:
    rows = zip(parameters, direction, strict=True)
    with fwd.dual_level():
        others = {id(p): dual(Pair(p.detach(), tangent)) for p, tangent in rows}
        with _again(model, forward, others):
            found, _ = outputs.of(forward.closure, cut=True)
        duals = [fwd.unpack_dual(output) for output in found]
    return tuple(
        torch.zeros_like(dual.primal) if dual.tangent is None else dual.tangent.detach()
        for dual in duals
    )


def _by_gradients(
    model: nn.Module,
    forward: Forward,
    outputs: Outputs,
    parameters: Sequence[nn.Parameter],
    direction: Direction,
) -> tuple[Tensor, ...]:
    rows = [(p, v) for p, v in zip(parameters, direction, strict=True) if v is not None]
    others = {id(p): p.detach() for p in parameters}
    for p, _ in rows:
        others[id(p)].requires_grad_()
    leaves = [others[id(p)] for p, _ in rows]
    with _again(model, forward, others):  # until the end: a checkpoint runs modules again
        found, _ = outputs.of(forward.closure)
        tangents = tangents_by_gradients(found, leaves, [v for _, v in rows], "the model")
    return tuple(
        torch.zeros_like(output) if tangent is None else tangent.detach()
        for output, tangent in zip(found, tangents, strict=True)
    )


@contextmanager
def _again(model: nn.Module, forward: Forward, others: Mapping[int, Tensor]) -> Iterator[None]:
    """Be where a forward pass began, with other tensors for parameters."""
    places = [module._parameters for module in model.modules()]
    with (
        forward.replay.again(),
        exchanged(places, others),
        torch.enable_grad(),
        eagerly(),
        _Differentiable(others),
        users_mode(),
    ):
        yield


class _Differentiable(TorchFunctionMode):
    """Calls functions so that they have derivatives along directions.

    What has no gradient, since it is computed under ``no_grad``, gets no tangent either. A
    parameter that a module has somewhere else too, as recurrent ones do, is exchanged there.
    """

    def __init__(self, others: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._others = others

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = replaced((args, kwargs or {}), Tensor, self._other)
        has_gradient = torch.is_grad_enabled()
        tangents = nullcontext() if has_gradient else fwd._set_fwd_grad_enabled(False)
        with tangents, differentiable(func):
            return func(*args, **kwargs)

    def _other(self, tensor: Tensor) -> Tensor:
        return self._others.get(id(tensor), tensor)
