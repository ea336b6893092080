"""A GPU that computes nothing: counts operators and waits on a machine without one.

Tensors are CUDA FakeTensors, with shapes and no numbers, so that a model of any size fits. What the
host reads from the device is answered with one (or True) and counted as a wait. Views and
allocations launch nothing and are not counted; an operator may launch several kernels, and wait
itself, as eigendecompositions do.

Import this module before torch: the guard has to be there when torch first looks for CUDA.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.fake_gpu.loaded import GUARD

# isort: split
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PACKAGE = f"{Path(__file__).parents[2] / 'soframe'}{os.sep}"
FAKE = FakeTensorMode(allow_non_fake_inputs=True)
_phases = ["other"]

# Operators that overwrite a tensor without reading it; and arguments that are read alone, whatever
# their schema says.
OVERWRITING = {"copy_", "_foreach_copy_", "zero_", "_foreach_zero_", "fill_"}
READ = {"grads"}
# Operators without a fake twin, which return nothing.
WITHOUT_FAKE = {"_fused_sgd_"}
# Operators that launch nothing, beside those whose schema says that they return views.
FREE = {"device", "detach", "alias", "lift_fresh", "t", "sym_size", "is_same_size", "record_stream"}
FREE |= {"view", "_unsafe_view", "_reshape_alias", "empty", "empty_like", "empty_strided"}
FREE |= {"new_empty", "new_empty_strided"}


def install() -> None:
    """Let torch believe in the GPU, for the rest of the process."""
    GUARD.install()
    cuda: Any = torch.cuda
    cuda._lazy_init = lambda: None
    cuda.is_initialized = cuda.is_available = lambda: True
    cuda.is_current_stream_capturing = lambda: False
    cuda.current_device = lambda: 0
    cuda.device_count = lambda: 1
    cuda.synchronize = lambda *_: None
    cuda.current_stream, cuda.Event = lambda *_: None, Event
    cuda.get_device_capability = lambda *_: (9, 0)
    cuda.is_bf16_supported = lambda *_, **__: True
    # FakeTensors have no addresses; those of their storages tell them apart.
    torch.UntypedStorage.data_ptr = lambda self: self._cdata  # type: ignore[method-assign]
    # A FakeTensor reads its elements one by one, and a tensor of a GPU is copied at once.
    FakeTensor.tolist = _tolist  # type: ignore[method-assign]


def fake(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor on the fake GPU."""
    with FAKE:
        return torch.empty(tuple(shape), device="cuda", dtype=dtype)


def moved(model: nn.Module) -> nn.Module:
    """Replace the parameters and buffers of a model by fake ones, in place; ties are kept."""
    parameters = {
        parameter: nn.Parameter(fake(parameter.shape, parameter.dtype), parameter.requires_grad)
        for parameter in model.parameters()
    }
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = parameters[parameter]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = fake(buffer.shape, buffer.dtype)
    return model


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Count what runs within as one phase, but for the phases in it."""
    _phases.append(name)
    try:
        yield
    finally:
        _phases.pop()


@dataclass
class Counts:
    """Operators, and bytes, by phase, line and name; and waits by phase and line."""

    operators: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    bytes: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    times: int = 0

    def clear(self) -> None:
        """Count from zero."""
        self.operators.clear()
        self.bytes.clear()
        self.waits.clear()
        self.times += 1


COUNTS = Counts()


class Event:
    """An event of a stream; the host waits for it, unless it was recorded in an earlier count."""

    def record(self, stream: object) -> None:
        """Record where the stream is."""
        self._counted = COUNTS.times

    def synchronize(self) -> None:
        """Wait for the stream to get there."""
        if self._counted == COUNTS.times:
            _wait()


def _line() -> str:
    """Return the innermost line of soframe that is running, or "torch"."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(PACKAGE):
            return f"soframe/{path.removeprefix(PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "torch"


def _wait() -> None:
    COUNTS.waits[_phases[-1], _line()] += 1


def _tolist(self: Tensor) -> Any:
    if self.device.type == "cuda":
        _wait()
    return torch.ones(self.shape, dtype=self.dtype).tolist()


class Gpu(TorchDispatchMode):
    """Runs operators on the fake GPU, and counts them in `COUNTS`."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        target = torch.device(kwargs["device"]).type if kwargs.get("device") else None
        if tensors and (read := _read(name, args, kwargs, target)) is not None:
            if kwargs.get("non_blocking"):
                COUNTS.operators[_phases[-1], _line(), name] += 1
            else:
                _wait()
            return read
        if not tensors and target == "cuda":
            if name == "_to_copy":  # sent from the host
                out: Any = fake(args[0].shape, kwargs.get("dtype") or args[0].dtype)
            else:
                with FAKE:
                    out = func(*args, **kwargs)
        elif name in WITHOUT_FAKE:
            out = None
        else:
            out = func(*args, **kwargs)
        if (tensors or target == "cuda") and not _launches_nothing(func, name):
            COUNTS.operators[_phases[-1], _line(), name] += 1
            COUNTS.bytes[_phases[-1], _line(), name] += _bytes(func, name, args, kwargs, out)
        return out


def _bytes(func: Any, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> int:
    """Return the bytes that an operator reads and writes, each memory once."""
    read: dict[tuple[int, int], int] = {}
    written: dict[tuple[int, int], int] = {}
    for number, argument in enumerate(func._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        is_written = is_written and argument.name not in READ
        for leaf in tree_leaves(value):
            if not isinstance(leaf, FakeTensor):
                continue
            if is_written:
                written |= _sizes(leaf)
            if not is_written or not (argument.is_out or name in OVERWRITING):
                read |= _sizes(leaf)
    for leaf in tree_leaves(out):
        if isinstance(leaf, FakeTensor):
            written |= _sizes(leaf)
    return sum(read.values()) + sum(written.values())


def _sizes(tensor: Tensor) -> dict[tuple[int, int], int]:
    """Return the bytes of a tensor by its memory; of an expanded one those of its memory."""
    storage = tensor.untyped_storage()
    size = min(tensor.numel() * tensor.itemsize, storage.nbytes())
    return {(storage._cdata, int(tensor.storage_offset())): size}


def _read(name: str, args: Any, kwargs: dict[str, Any], target: str | None) -> Any:
    """Return what the host reads from the device by an operator; None if it reads nothing."""
    first = args[0]
    if name in ("_local_scalar_dense", "is_nonzero", "equal"):
        return True if name != "_local_scalar_dense" else torch.ones((), dtype=first.dtype).item()
    if name == "_to_copy" and target == "cpu":
        return torch.ones(first.shape, dtype=kwargs.get("dtype") or first.dtype)
    if name == "copy_" and not isinstance(first, FakeTensor):
        return first.fill_(1)
    if name == "nonzero":
        return fake((first.numel(), first.dim()), torch.long)
    return None


_free: dict[Any, bool] = {}


def _launches_nothing(func: Any, name: str) -> bool:
    if func not in _free:
        aliases = (result.alias_info for result in func._schema.returns)
        views = any(alias is not None and not alias.is_write for alias in aliases)
        _free[func] = views or name in FREE
    return _free[func]
