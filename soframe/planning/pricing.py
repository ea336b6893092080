"""Pricing: the seconds of code on described hardware, from the operators that it calls.

The code itself runs, on tensors with shapes and without numbers, and each operator is priced by its
shapes. A new method, solver or layer helper therefore needs no formula for its cost. Reads of
numbers by the host are answered with one.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from soframe.planning.hardware import Hardware

FACTORISATIONS = {
    "linalg_cholesky_ex": "cholesky",
    "cholesky": "cholesky",
    "_linalg_eigh": "eigh",
    "linalg_qr": "qr",
    "geqrf": "qr",
    "cholesky_inverse": "inverse",
    "linalg_inv_ex": "inverse",
    "linalg_solve_triangular": "triangular",
    "triangular_solve": "triangular",
}
"""Operators whose time depends on the side of a matrix, by the curve that they have."""

PRODUCTS = {"mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "addbmm", "addbmm_"}

# Operators that compute nothing, beside those whose schema says that they return views.
FREE = {"device", "detach", "alias", "lift_fresh", "t", "view", "_unsafe_view", "_reshape_alias"}
FREE |= {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "is_same_size"}


@dataclass
class Priced:
    """The cost of some code."""

    seconds: float = 0.0  # the time of its operators, one after another
    operators: int = 0
    flops: float = 0.0  # the FLOPs of products and convolutions
    peak: int = 0  # the most bytes that it held at once in new tensors, its results among them
    results: int = 0  # the bytes of its results
    host: float = 0.0  # seconds of the host beside the operators


class Pricing(TorchDispatchMode):
    """Prices every operator in ``priced``; products of float32 perhaps in ``"tf32"``."""

    def __init__(self, hardware: Hardware, precision: str = "float32") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._hardware, self._float32 = hardware, precision
        self.priced = Priced()
        self.held = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if name in ("is_nonzero", "equal"):
            return True
        if name == "_local_scalar_dense":
            return _one(args[0].dtype)
        if name in ("nonzero", "_unique2"):  # as many entries as there can be
            return _all_entries(name, args[0])
        out = func(*args, **kwargs)
        arguments, results = tensors_in((args, kwargs)), tensors_in(out)
        if not _computes_nothing(func, name):
            moved = sum(tensor.nbytes for tensor in arguments + results)
            seconds = self._compute(func, name, args, kwargs, out)
            # A foreach operator is one launch, or a few, on a GPU, and a loop on a CPU.
            launches = 1
            if name.startswith("_foreach") and self._hardware.device == "cpu":
                launches = len(results) or len(args[0])
            least = launches * self._hardware.launch
            self.priced.seconds += max(least, seconds, moved / self._hardware.bandwidth)
            self.priced.operators += 1
        self._hold(arguments, results)
        return out

    def _compute(self, func: Any, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> float:
        """Return the seconds of arithmetic of an operator, and count its FLOPs."""
        if name in PRODUCTS:
            first, second = args[-2:]  # [..., n, k] and [..., k, m]
            batch, flops = prod(first.shape[:-2]), 2.0 * prod(first.shape[-2:]) * second.shape[-1]
            self.priced.flops += batch * flops
            return self._hardware.product(flops, batch, self._dtype(first))
        if name in FACTORISATIONS:
            matrix, kind = args[0], FACTORISATIONS[name]
            side, batch = matrix.shape[-1], prod(matrix.shape[:-2])
            return self._hardware.factorisation(kind, side, batch, self._name(matrix))
        if func.overloadpacket in flop_registry:
            flops = float(flop_registry[func.overloadpacket](*args, **kwargs, out_val=out))
            kind = "convolution" if "convolution" in name else "product"
            self.priced.flops += flops
            return self._hardware.product(flops, 1, self._dtype(args[0]), kind)
        return 0.0

    def _dtype(self, tensor: Tensor) -> str:
        return self._float32 if tensor.dtype == torch.float32 else self._name(tensor)

    @staticmethod
    def _name(tensor: Tensor) -> str:
        return str(tensor.dtype).removeprefix("torch.")

    def _hold(self, arguments: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Count the memory of new tensors for as long as they live."""
        known = {tensor.untyped_storage()._cdata for tensor in arguments}
        for tensor in results:
            storage = tensor.untyped_storage()
            if storage._cdata in known:
                continue
            known.add(storage._cdata)
            self.held += storage.nbytes()
            self.priced.peak = max(self.priced.peak, self.held)
            weakref.finalize(storage, self._release, storage.nbytes())

    def _release(self, size: int) -> None:
        self.held -= size


def tensors_in(nested: Any) -> list[Tensor]:
    """Return the tensors in nested lists, tuples and dicts."""
    return [leaf for leaf in tree_leaves(nested) if isinstance(leaf, Tensor)]


def _all_entries(name: str, tensor: Tensor) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    count = tensor.numel()
    if name == "nonzero":
        return tensor.new_empty((count, tensor.dim()), dtype=torch.long)
    places = torch.empty_like(tensor, dtype=torch.long)
    return tensor.new_empty(count), places, tensor.new_empty(count, dtype=torch.long)


def _one(dtype: torch.dtype) -> bool | float | int:
    if dtype == torch.bool:
        return True
    if dtype.is_floating_point:
        return 1.0
    return 1


@functools.cache
def _computes_nothing(func: Any, name: str) -> bool:
    aliases = (result.alias_info for result in func._schema.returns)
    return name in FREE or any(alias is not None and not alias.is_write for alias in aliases)


@contextlib.contextmanager
def without_numbers(code: str, remedy: str) -> Iterator[None]:
    """Raise a ValueError with a remedy if code fails on tensors without numbers."""
    try:
        yield
    except Exception as error:  # of any kind: code of users runs within
        raise ValueError(
            f"{code} cannot be planned, as it fails on tensors without numbers "
            f"({type(error).__name__}: {error}): {remedy}"
        ) from error


class Paper:
    """A context of tensors with shapes and without numbers, on paths of the hardware's device."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        # Of a GPU's paths all but few are taken on the meta device, which no driver has to serve.
        self.device = "meta"
        self._mode: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if hardware.device == "cpu":
            self.device, self._mode = "cpu", FakeTensorMode(allow_non_fake_inputs=True)

    def __enter__(self) -> Paper:
        self._mode.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._mode.__exit__(*error)

    def new(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
        """Return a tensor."""
        return torch.empty(tuple(shape), dtype=dtype, device=self.device)

    def price(self, code: Callable[[], object], *, products: str = "float32") -> Priced:
        """Return the cost of some code, with products of float32 in another precision."""
        pricing = Pricing(self._hardware, products)
        with pricing:
            results = code()
            pricing.priced.results = pricing.held
        del results
        return pricing.priced
