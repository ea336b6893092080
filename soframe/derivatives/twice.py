"""Derivatives along directions by differentiating a gradient: for any function, and plain.

``J^T u`` is linear in what the outputs are weighed with, so the gradient of ``(J^T u)^T v`` in u is
``J v``, whatever u is. One gradient with its own graph serves all directions; each then takes one
backward pass through that graph. Nothing runs forward again.

Fused kernels of attention and of recurrent layers have no second derivative, so a pass that is to
be differentiated runs those functions in plain ones (`plain_kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Direction = Sequence[Tensor | None]
"""One tensor per parameter; None for zero."""

_ATTENTION = {F.scaled_dot_product_attention, F.multi_head_attention_forward}
_RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}


Kernels = Callable[[], AbstractContextManager[object]]
"""Makes a context in which functions run in kernels that can be differentiated twice."""


def plain_kernels(function: Any) -> Kernels | None:
    """Return in which context a function can be differentiated twice.

    Args:
        function: What is called in it.

    Returns:
        None if the function needs no other kernels than usual.
    """
    if function in _ATTENTION:
        return _unfused_attention
    return _unfused if function in _RECURRENT else None


def _unfused_attention() -> AbstractContextManager[object]:
    context: AbstractContextManager[object] = sdpa_kernel(SDPBackend.MATH)
    return context


@contextmanager
def _unfused() -> Iterator[None]:
    # Not their ``flags``, which set what else those have, and warn of it.
    libraries: list[Any] = [torch.backends.mkldnn, torch.backends.cudnn]
    before = [library.enabled for library in libraries]
    try:
        for library in libraries:
            library.enabled = False
        yield
    finally:
        for library, enabled in zip(libraries, before, strict=True):
            library.enabled = enabled


def tangents_by_gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], directions: Sequence[Direction]
) -> list[tuple[Tensor, ...]]:
    """Return ``J v`` for each direction v, as the gradient of ``(J^T u)^T v`` in u.

    The u that is taken also tells whether ``J^T u`` was differentiable in u: both sides must give
    the same ``u^T J v``.

    Args:
        outputs: Functions of the inputs, with their graph, which stays.
        inputs: What directions are of.
        directions: k directions.

    Returns:
        For each direction one of each output's shape.

    Raises:
        RuntimeError: If a gradient on the way cannot be differentiated, or what it needs has been
            changed in place.
    """
    moved = [i for i in range(len(inputs)) if any(v[i] is not None for v in directions)]
    ends = [output for output in outputs if output.requires_grad]
    if not ends or not moved:
        return [tuple(map(torch.zeros_like, outputs)) for _ in directions]
    moves = [[v[i] for i in moved] for v in directions]
    weights = [_anything_like(end).requires_grad_() for end in ends]
    try:
        with torch.enable_grad():
            gradients = torch.autograd.grad(
                ends,
                [inputs[i] for i in moved],
                weights,
                create_graph=True,
                materialize_grads=True,
            )
            slopes = [_inner_product(gradients, v) for v in moves]
        each = [_gradient(slope, weights) for slope in slopes]
    except RuntimeError as error:  # what torch raises for a derivative that it does not have
        raise RuntimeError(_remedy(str(error))) from error
    rounding = 1e3 * max(torch.finfo(t.dtype).eps for t in (*weights, *gradients))
    with torch.no_grad():
        for v, slope, tangents in zip(moves, slopes, each, strict=True):
            noise = _size(gradients, v) + _size(weights, tangents)
            if abs(float(_inner_product(weights, tangents) - slope)) > rounding * noise:
                raise RuntimeError(_remedy("a gradient does not depend on what it is made of"))
    rows = map(iter, each)
    return [
        tuple(next(row) if output.requires_grad else torch.zeros_like(output) for output in outputs)
        for row in rows
    ]


def _gradient(slope: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the gradient of a slope in the weights, and keep the graph for other slopes."""
    if not slope.requires_grad:  # as where the outputs do not depend on what moves
        return [torch.zeros_like(weight) for weight in weights]
    gradients: Sequence[Tensor] = torch.autograd.grad(
        slope, weights, retain_graph=True, materialize_grads=True
    )
    return gradients


def _inner_product(tensors: Sequence[Tensor], others: Sequence[Tensor | None]) -> Tensor:
    pairs = zip(tensors, others, strict=True)
    products = [(one * other).sum() for one, other in pairs if other is not None]
    return torch.stack(products).sum() if products else tensors[0].new_zeros(())


def _size(tensors: Sequence[Tensor], others: Sequence[Tensor | None]) -> float:
    """Return a bound of the inner product, of which rounding is a share."""
    pairs = zip(tensors, others, strict=True)
    return sum(float(one.norm() * other.norm()) for one, other in pairs if other is not None)


def _anything_like(tensor: Tensor) -> Tensor:
    """Return numbers that have nothing to do with a tensor of that shape, always the same."""
    count = torch.arange(1, tensor.numel() + 1, dtype=torch.float64, device=tensor.device)
    return count.sin().to(tensor.dtype).view(tensor.shape)


def _remedy(problem: str) -> str:
    # The graph is freed where a tape could be followed at first: then something has changed since.
    if "modified by an inplace" in problem or "graph a second time" in problem:
        return (
            "TrustRegion needs the forward pass once more after the backward one, and a tensor of "
            "it has been changed in place since: give each closure inputs of its own, change no "
            "buffer that another closure uses (DistributedDataParallel(broadcast_buffers=False)), "
            "or pass all samples in one closure"
        )
    return (
        f"TrustRegion needs derivatives of the model along directions of the parameters, and its "
        f"gradient cannot be differentiated: {problem}. Write the model in other functions, give "
        f"an autograd.Function a backward that can be differentiated, or use "
        f"soframe.Preconditioner, which does without"
    )
