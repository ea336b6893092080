"""Derivatives of outputs along directions, by differentiating a gradient: for any function.

``J^T u`` is linear in u, so the gradient of ``(J^T u)^T v`` in u is ``J v``, for any u. One
gradient with its own graph serves all directions; each takes one backward pass through that graph.
No forward pass is repeated. Source: Townsend, "A new trick for calculating Jacobian vector
products", 2017.

Fused kernels of attention and recurrent layers have no second derivative, so a forward pass that is
to be differentiated twice runs them in plain ones (`PlainKernels`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

T = TypeVar("T")

Direction = Sequence[Tensor | None]
"""One tensor for each parameter; None for zero."""

_Kernels = Callable[[], AbstractContextManager[object]]


_unfused_attention: _Kernels = partial(sdpa_kernel, SDPBackend.MATH)


@contextmanager
def _unfused_recurrence() -> Iterator[None]:
    # Not their ``flags``, which set further options, and warn.
    libraries: list[Any] = [torch.backends.mkldnn, torch.backends.cudnn]
    before = [library.enabled for library in libraries]
    try:
        for library in libraries:
            library.enabled = False
        yield
    finally:
        for library, enabled in zip(libraries, before, strict=True):
            library.enabled = enabled


_PLAIN: dict[Any, _Kernels] = {
    F.scaled_dot_product_attention: _unfused_attention,
    F.multi_head_attention_forward: _unfused_attention,
    torch.lstm: _unfused_recurrence,
    torch.gru: _unfused_recurrence,
    torch.rnn_tanh: _unfused_recurrence,
    torch.rnn_relu: _unfused_recurrence,
}


class PlainKernels(TorchFunctionMode):
    """A closure's context: plain kernels for fused ones without a second derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.differentiates = False  # whether `torch.autograd.grad` was called within it
        self._used: set[_Kernels] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.differentiates |= func is torch.autograd.grad
        if func is Tensor.backward:
            raise RuntimeError(
                "a closure of a trust region calls backward(): leave it out, and return the loss; "
                "the step runs the backward pass itself"
            )
        options = {} if kwargs is None else kwargs
        kernels = _PLAIN.get(func)
        if kernels is None:
            return func(*args, **options)
        self._used.add(kernels)
        with kernels():
            return func(*args, **options)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Use the same kernels in checkpoints that recompute within a backward pass."""
        with ExitStack() as stack:
            for kernels in self._used:
                stack.enter_context(kernels())
            yield


_CONSTANT = (
    "autograd treated a gradient as constant (does a custom Function have a backward that cannot "
    "be differentiated?)"
)


def jacobian_products(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], directions: Sequence[Direction]
) -> list[tuple[Tensor, ...]]:
    """Return ``J v`` for each of k directions v, with one tensor for each output."""
    moved = _moved(directions)
    ends = [output for output in outputs if output.requires_grad]
    if not ends or not moved:
        return [tuple(map(torch.zeros_like, outputs)) for _ in directions]
    inputs, moves = _selected(inputs, moved), [_selected(v, moved) for v in directions]
    cotangents = [fixed(end).requires_grad_() for end in ends]
    try:
        with torch.enable_grad():
            gradients = torch.autograd.grad(
                ends, inputs, cotangents, create_graph=True, materialize_grads=True
            )
            slopes = [_inner_product(gradients, v) for v in moves]
        products = [_gradient(slope, cotangents) for slope in slopes]
    except RuntimeError as error:  # autograd's error for a missing second derivative
        raise RuntimeError(_remedy(str(error))) from error
    # Check u^T (J v) = (J^T u)^T v: the sides differ if autograd treated a gradient as constant,
    # which raises no error.
    tensors = itertools.chain(cotangents, gradients)
    rounding = 1e3 * max(torch.finfo(tensor.dtype).eps for tensor in tensors)
    with torch.no_grad():
        for v, slope, tangents in zip(moves, slopes, products, strict=True):
            noise = _size(gradients, v) + _size(cotangents, tangents)
            difference = abs(float(_inner_product(cotangents, tangents) - slope))
            if difference > rounding * noise:
                raise RuntimeError(_remedy(_CONSTANT))
    return [_with_zeros(outputs, tangents) for tangents in products]


def _with_zeros(outputs: Sequence[Tensor], tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return tangents of all outputs: zeros where an output needs no gradient."""
    remaining, every = iter(tangents), list[Tensor]()
    for output in outputs:
        every.append(next(remaining) if output.requires_grad else torch.zeros_like(output))
    return tuple(every)


def _gradient(slope: Tensor, cotangents: Sequence[Tensor]) -> Sequence[Tensor]:
    if not slope.requires_grad:  # the outputs do not depend on the parameters that move
        return list(map(torch.zeros_like, cotangents))
    gradients: Sequence[Tensor] = torch.autograd.grad(
        slope, cotangents, retain_graph=True, materialize_grads=True
    )
    return gradients


def _selected(tensors: Sequence[T], indices: Sequence[int]) -> list[T]:
    return [tensors[index] for index in indices]


def _moved(directions: Sequence[Direction]) -> list[int]:
    """Return the indices of the inputs that some direction changes."""
    moved: set[int] = set()
    for direction in directions:
        moved.update(index for index, tensor in enumerate(direction) if tensor is not None)
    return sorted(moved)


def _inner_product(tensors: Sequence[Tensor], vector: Sequence[Tensor | None]) -> Tensor:
    pairs = zip(tensors, vector, strict=True)
    products = [(tensor * other).sum() for tensor, other in pairs if other is not None]
    if not products:
        return tensors[0].new_zeros(())
    return torch.stack(products).sum()


def _size(tensors: Sequence[Tensor], vector: Sequence[Tensor | None]) -> float:
    """Bound the inner product; its rounding is relative to this."""
    # In double precision: squares of tiny numbers would underflow.
    size = 0.0
    for tensor, other in zip(tensors, vector, strict=True):
        if other is not None:
            size += float(_norm(tensor) * _norm(other))
    return size


def _norm(tensor: Tensor) -> Tensor:
    # Torch takes no norm of the sparse gradients of a table.
    norm: Tensor = torch.linalg.vector_norm(tensor.to_dense(), dtype=torch.float64)
    return norm


def fixed(tensor: Tensor) -> Tensor:
    """Return fixed pseudo-random numbers of this shape: the random stream is the user's."""
    count = torch.arange(1, tensor.numel() + 1, dtype=torch.float64, device=tensor.device)
    return count.sin().to(tensor.dtype).view(tensor.shape)


def _remedy(problem: str) -> str:
    if "modified by an inplace" in problem:
        return (
            "TrustRegion differentiates the forward pass twice, and a tensor of it has been "
            "changed in place since: give each closure inputs of its own, change no buffer that "
            "another closure uses (DistributedDataParallel(broadcast_buffers=False)), or pass all "
            "samples in one closure"
        )
    return (
        f"TrustRegion needs derivatives of the model along directions of the parameters, and its "
        f"gradient cannot be differentiated: {problem}. Write the model in other functions, give "
        f"an autograd.Function a backward that can be differentiated, or use "
        f"soframe.Preconditioner, which needs no second derivative"
    )
