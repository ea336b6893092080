"""The precision of float32 products: TF32 where it is safe, and full float32 where it is not.

Neither is changed by ``torch.autocast``, under which a whole loop may run, with its steps.

TensorFloat-32 rounds operands to 10 bits of mantissa; NVIDIA's GPUs from Ampere on multiply in it
several times faster. torch has one setting for the whole process, and other threads multiply at the
same time: `within` changes it for a phase of the step, and `multiply` does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import Lock
from typing import Any, Literal

import torch
from torch import Tensor

from soframe.kernels import devices

Precision = Literal["fast", "full"]
_VALUES = {"fast": "tf32", "full": "ieee"}
_matmul: Any = torch.backends.cuda.matmul
_lock, _inside, _before = Lock(), list[str](), ""
_CASTING = ("cpu", "cuda", "mps", "xpu")
_NOTHING = nullcontext()


def within(precision: Precision) -> AbstractContextManager[None]:
    """Return a context without autocast, in which NVIDIA's GPUs multiply float32 in TF32 or not."""
    context: AbstractContextManager[None] = _NOTHING
    if torch.version.hip is None and torch.cuda.is_initialized():
        context = _set(_VALUES[precision])
    if torch._C._is_any_autocast_enabled():
        return _without_casts(context)
    return context


@contextmanager
def _without_casts(context: AbstractContextManager[None]) -> Iterator[None]:
    with ExitStack() as contexts:
        for device in filter(torch.is_autocast_enabled, _CASTING):
            contexts.enter_context(torch.autocast(device, enabled=False))
        contexts.enter_context(context)
        yield


@contextmanager
def _set(value: str) -> Iterator[None]:
    global _before  # noqa: PLW0603  # as torch's own setting
    # Backward passes run hooks in one thread for each device: the first to enter reads the user's
    # setting, and the last to leave restores it.
    with _lock:
        if not _inside:
            _before = _matmul.fp32_precision
        _inside.append(value)
        _matmul.fp32_precision = value
    try:
        yield
    finally:
        with _lock:
            _inside.remove(value)
            _matmul.fp32_precision = _inside[-1] if _inside else "none"
            # An unset value is inherited from torch.backends: set it only if that differs.
            if not _inside and _matmul.fp32_precision != _before:
                _matmul.fp32_precision = _before


def multiply(left: Tensor, right: Tensor) -> Tensor:
    """Multiply ``[groups, m, k]`` by ``[groups, k, n]`` in the precision of their common dtype.

    Torch's setting has no effect, for solvers.
    """
    if left.dtype != torch.float32:
        return left @ right
    if may_round(left.device):
        lefts = devices.batches(left)
        rights = right.split(list(map(len, lefts)))
        return torch.cat(list(map(_by_parts, lefts, rights)))
    # By torch.set_float32_matmul_precision("medium") in bfloat16, on some processors.
    on_cpu = left.device.type == "cpu"
    if on_cpu and torch.backends.mkldnn.matmul.fp32_precision in ("bf16", "tf32"):  # type: ignore[attr-defined]  # untyped
        return (left.double() @ right.double()).float()
    return left @ right


def may_round(device: torch.device) -> bool:
    """Return whether a device may multiply float32 in TF32."""
    return devices.capability(device) >= (8, 0)


def _by_parts(left: Tensor, right: Tensor) -> Tensor:
    """Multiply the parts of float32 in bfloat16, whose products are exact, and sum in float32."""
    (a, b, c), (d, e, f) = _parts(left), _parts(right)
    # One sum, small terms first; the ones left out are below the rounding of float32.
    lefts, rights = torch.cat([c, b, a, b, a, a], -1), torch.cat([d, e, f, d, e, d], -2)
    if left.is_cuda:
        return torch.bmm(lefts, rights, out_dtype=torch.float32)
    return lefts.float() @ rights.float()


def _parts(matrix: Tensor) -> list[Tensor]:
    """Split float32 into three numbers of bfloat16, of 8 bits of mantissa each, exactly."""
    parts = [matrix.bfloat16()]
    for _ in range(2):
        matrix = matrix - parts[-1]
        parts.append(matrix.bfloat16())
    return parts
