"""Derivatives along directions of what torch does not differentiate forward.

Some functions have several kernels, of which the fastest has no forward-mode derivative: those run
in another (`differentiable`). Where there is none, a gradient is differentiated: it is linear in
what the outputs are weighed with, and its derivative in that is the one along a direction
(`tangents_by_gradients`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

_ATTENTION = (F.scaled_dot_product_attention, F.multi_head_attention_forward)
_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def differentiable(function: Any) -> AbstractContextManager[object]:
    """Return a context in which a function runs in kernels whose derivatives torch knows.

    Args:
        function: What is called in it.
    """
    if function in _ATTENTION:
        return sdpa_kernel(SDPBackend.MATH)
    return _unfused() if function in _RECURRENT else nullcontext()


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
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], direction: Sequence[Tensor], what: str
) -> list[Tensor | None]:
    """Return ``J v`` as the gradient of ``(J^T u)^T v`` in u.

    That is exact for every u; the one that is taken also tells whether J^T u was differentiable
    in u: both must give the same ``u^T J v``.

    Args:
        outputs: Functions of the inputs, with their graph.
        inputs: What the direction is of.
        direction: v, one of each input's shape.
        what: What the outputs are, for errors.

    Returns:
        One of each output's shape; None where the derivative is zero.

    Raises:
        RuntimeError: If a gradient on the way cannot be differentiated.
    """
    tangents: list[Tensor | None] = [None] * len(outputs)
    own = [i for i, output in enumerate(outputs) if output.requires_grad]
    if not own:
        return tangents
    ends = [outputs[i] for i in own]
    weights = [_anything_like(end).requires_grad_() for end in ends]
    try:
        gradients = torch.autograd.grad(
            ends, inputs, weights, create_graph=True, materialize_grads=True
        )
        pairs = [*zip(gradients, direction, strict=True)]
        slope = torch.stack([(g * v).sum() for g, v in pairs]).sum()
        found: Sequence[Tensor | None] = [None] * len(own)
        if slope.requires_grad:
            found = torch.autograd.grad(slope, weights, allow_unused=True)
    except RuntimeError as error:  # what torch raises for a derivative that it does not have
        raise RuntimeError(_remedy(what)) from error
    rows = [(w.detach(), t) for w, t in zip(weights, found, strict=True) if t is not None]
    with torch.no_grad():
        actual = sum(float((w * t).sum()) for w, t in rows)
        noise = sum(float(w.norm() * t.norm()) for w, t in rows)
        noise += sum(float(g.norm() * v.norm()) for g, v in pairs)
    rounding = 1e3 * max(torch.finfo(t.dtype).eps for t in (*weights, *gradients))
    if abs(actual - float(slope.detach())) > rounding * noise:
        raise RuntimeError(_remedy(what))
    for i, tangent in zip(own, found, strict=True):
        tangents[i] = tangent
    return tangents


def _anything_like(tensor: Tensor) -> Tensor:
    """Return numbers that have nothing to do with a tensor of that shape, always the same."""
    count = torch.arange(1, tensor.numel() + 1, dtype=torch.float64, device=tensor.device)
    return count.sin().to(tensor.dtype).view(tensor.shape)


def _remedy(what: str) -> str:
    return (
        f"TrustRegion needs derivatives of {what} along directions of the parameters, and torch "
        f"has them neither forward nor by differentiating its gradient; write it in other "
        f"functions, or as an autograd.Function with a `jvp`, or use soframe.Preconditioner, "
        f"which does without"
    )
