"""TensorFloat-32 on a processor: products round their operands to ten bits of mantissa."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from soframe.kernels import precision

ATEN = torch.ops.aten
PRODUCTS = {ATEN.mm, ATEN.bmm, ATEN.addmm, ATEN.addmm_, ATEN.baddbmm, ATEN.baddbmm_, ATEN.addbmm_}


class TensorFloat(TorchDispatchMode):
    """Rounds the operands of float32 products while torch's setting for a GPU is TF32.

    Attributes:
        settings: Torch's setting at each product.
    """

    def __init__(self) -> None:
        super().__init__()
        self.settings: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in PRODUCTS:
            matmul: Any = torch.backends.cuda.matmul
            self.settings.append(matmul.fp32_precision)
            if self.settings[-1] == "tf32":
                args = (*args[:-2], *map(_rounded, args[-2:]))
        return func(*args, **(kwargs or {}))


def _rounded(x: Tensor) -> Tensor:
    if x.dtype != torch.float32:
        return x
    return ((x.contiguous().view(torch.int32) + (1 << 12)) & -(1 << 13)).view(torch.float32)


@contextmanager
def gpu_with_tensor_float() -> Iterator[None]:
    """Let soframe set precisions as with such a GPU; torch's setting is restored at the end."""
    matmul: Any = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    with (
        mock.patch.object(torch.cuda, "is_initialized", return_value=True),
        mock.patch.object(torch.cuda, "is_current_stream_capturing", return_value=False),
        mock.patch.object(precision, "may_round", return_value=True),
    ):
        try:
            yield
        finally:
            matmul.fp32_precision = before
