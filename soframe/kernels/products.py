"""Matrix products by oneDNN, where they are faster than those of torch's BLAS, which is MKL.

On AMD's processors with AVX-512 MKL stays at the rate of vectors of 256 bits, and oneDNN does not:
on Zen 5 its products in single precision take half of the time. torch multiplies single precision
by MKL alone, but convolutions, their gradients and compiled linear layers by oneDNN; so these are
what is called here. GFLOP/s with one thread, and with two:

======================================  =========  =========
product                                 MKL        oneDNN
======================================  =========  =========
256 x 2048 times 2048 x 256             102, 196   220, 409
512 x 2048 times 2048 x 512             102, 196   197, 395
16 x 65536 times 65536 x 16             79, 128    171, 257
512 x 65 times 65 x 512                 101, 200   110, 179
1024 x 1024 times 1024 x 257            100, 196   218, 408
======================================  =========  =========

On Zen 4, which takes two turns for vectors of 512 bits, oneDNN brings nothing: 75, 133 in the first
row where MKL has 73, 142. Both add up in single precision, in different orders, so the results
differ by roundings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

LEAST_ROWS = 256  # of `inner`: below, what the call itself takes is more than it saves
LEAST_WORK = 2**20  # multiply-adds, likewise
ZEN_4_CACHE = 2**15  # bytes: of the first level, for data


def inner(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left^T right``.

    Args:
        left: ``[rows, m]``.
        right: ``[rows, n]``.

    Returns:
        ``[m, n]``.
    """
    if not pays(left, right):
        return left.T @ right
    size = left.shape[1]
    # The gradient of the weight of a convolution of one position, whose inputs and output gradients
    # are the two matrices. Its dilation means nothing, and keeps torch from its own convolution,
    # which it prefers otherwise where there is one thread and one image.
    gradient: Tensor = torch.ops.aten.convolution_backward(
        _image(left),
        _image(right),
        left.new_empty(1).expand(size, right.shape[1], 1, 1),
        None,
        [1, 1],
        [0, 0],
        [2, 2],
        False,
        [0, 0],
        1,
        [False, True, False],
    )[1]
    return gradient.flatten(1)


def add_inner(total: Tensor, left: Tensor, right: Tensor, scale: float = 1.0) -> None:
    """Add ``scale left^T right``; torch's product needs no matrix besides the sum.

    Args:
        total: ``[m, n]``, changed in place.
        left: As for `inner`.
        right: Likewise.
        scale: The multiplier.
    """
    if pays(left, right):
        total.add_(inner(left, right), alpha=scale)
    else:
        total.addmm_(left.T, right, alpha=scale)


def times(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left right``, of matrices or of batches of them.

    Args:
        left: ``[..., m, rows]``.
        right: ``[..., rows, n]``.

    Returns:
        ``[..., m, n]``.
    """
    if left.ndim == right.ndim == 3 and len(left) == len(right) == 1:
        return times(left[0], right[0]).unsqueeze(0)
    if left.ndim != 2 or right.ndim != 2 or not _both(left, right, left.numel() * right.shape[1]):
        return left @ right
    if not (right.is_contiguous() or right.T.is_contiguous()):
        right = right.contiguous()  # oneDNN has no fast way for others
    product: Tensor = torch.ops.mkldnn._linear_pointwise(left, right.T, None, "none", [], "")
    return product


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, added: Tensor | None = None
) -> Tensor:
    """Return ``x weight^T + bias + added``, without gradients; to be called outside of autocast.

    Args:
        x: ``[..., in]``.
        weight: ``[out, in]``.
        bias: ``[out]``.
        added: ``[..., out]``, contiguous; its memory is that of the result.

    Returns:
        ``[..., out]``, in memory of its own.
    """
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # whose width may be zero
    if added is None:
        outputs = times(rows, weight.T)
    elif _both(rows, weight, rows.numel() * len(weight)):
        outputs = added.view(len(rows), len(weight)).add_(times(rows, weight.T))
    else:
        outputs = added.view(len(rows), len(weight)).addmm_(rows, weight.T)
    if bias is not None:
        outputs.add_(bias)
    return outputs.view(*x.shape[:-1], len(weight))


def pays(left: Tensor, right: Tensor) -> bool:
    """Return whether `inner` goes by oneDNN.

    Args:
        left: As for `inner`.
        right: Likewise.
    """
    rows, size = left.shape
    return rows >= LEAST_ROWS and _both(left, right, rows * size * right.shape[1])


def serves(x: Tensor, multiply_adds: int) -> bool:
    """Return whether oneDNN multiplies so many numbers faster than torch does, and as exactly.

    Args:
        x: An operand.
        multiply_adds: How many there are.
    """
    return multiply_adds >= LEAST_WORK and prefers_onednn() and has_primitives(x) and are_exact(x)


def are_exact(x: Tensor) -> bool:
    """Return whether products of a tensor are fast, and of the precision of its numbers.

    Args:
        x: An operand; of single precision, on the CPU.
    """
    backend: Any = torch.backends.mkldnn
    exact = backend.matmul.fp32_precision in ("none", "ieee")
    return x.device.type == "cpu" and x.dtype == torch.float32 and exact


def _both(left: Tensor, right: Tensor, multiply_adds: int) -> bool:
    if torch.is_grad_enabled() and (left.requires_grad or right.requires_grad):
        return False  # autograd knows torch's products only
    return left.dtype == right.dtype and left.device == right.device and serves(left, multiply_adds)


def has_primitives(x: Tensor) -> bool:
    """Return whether convolutions have fast and exact primitives for a tensor: oneDNN's.

    cuDNN's are in TensorFloat-32 by default, and on the CPU none but single precision's are fast.

    Args:
        x: An operand.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32:
        return False
    backend: Any = torch.backends.mkldnn
    # Not TensorFloat-32, nor bfloat16.
    exact = backend.conv.fp32_precision in ("none", "ieee")
    return exact and backend.is_available() and torch._C._get_mkldnn_enabled()


@lru_cache(maxsize=1)
def prefers_onednn() -> bool:
    """Return whether the processor is one that MKL holds back and oneDNN does not: AMD's Zen 5.

    Zen 4 has the instructions, and takes two turns for each; so it is told apart by what came after
    it: two extensions, and a larger cache.
    """
    known: Callable[[], dict[str, Any]] = getattr(torch.cpu, "get_capabilities", dict)
    has = known()
    later = has.get("avx_vnni") or has.get("avx512_vp2intersect")
    return (
        hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(has.get("avx512_f"))
        and "AMD" in has.get("cpu_name", "")
        and bool(later or has.get("l1d_cache_size", 0) > ZEN_4_CACHE)
    )


def _image(rows: Tensor) -> Tensor:
    """Return a matrix as one image, channels last: ``[1, columns, 1, rows]``."""
    return rows.contiguous().view(1, 1, *rows.shape).permute(0, 3, 1, 2)
