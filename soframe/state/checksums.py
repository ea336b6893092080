"""Checksums of states: one for every tensor, and one for all other entries together.

A state is a tree of dicts and lists with tensors, numbers and strings. A sealed one also holds

- for each tensor the CRC-32 of its dtype, its shape and its bytes, and
- the CRC-32 of the text of all other entries: keys, numbers, strings, and places of tensors.

CRC-32 detects every flip of up to three bits in tensors of up to 10 kB, every burst of up to 32
bits in any, and all but one in 4e9 of other changes. It protects against accidents, not against an
attacker. A tensor's bytes do not depend on its device.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

KEY = "checksums"
"""The key of a sealed state."""


def of_tensor(tensor: Tensor, where: str = "") -> int:
    """Return the checksum of a dense tensor of any shape, dtype and device; else TypeError."""
    if tensor.layout is not torch.strided or tensor.is_meta:
        kind = "meta" if tensor.is_meta else tensor.layout
        raise TypeError(f"the tensors of a state are dense; {where} is {kind}")
    contiguous = tensor.detach().cpu().contiguous()
    # As bytes, since NumPy lacks dtypes such as bfloat16.
    data = memoryview(contiguous.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return zlib.crc32(data, zlib.crc32(f"{contiguous.dtype}{list(contiguous.shape)}".encode()))


def text(value: Any, where: str = "") -> str:
    """Return a canonical text of a tree: independent of key order; tensors by dtype and shape."""
    if isinstance(value, Tensor):
        return f"tensor {value.dtype}{list(value.shape)}"
    if isinstance(value, Mapping):
        rows = [f"{text(key, where)}: {text(v, f'{where}/{key}')}" for key, v in value.items()]
        return "{" + ", ".join(sorted(rows)) + "}"
    if isinstance(value, list | tuple):
        rows = [text(v, f"{where}/{number}") for number, v in enumerate(value)]
        return f"{'list' if isinstance(value, list) else 'tuple'}[{', '.join(rows)}]"
    if isinstance(value, bool | str | None):
        return repr(value)
    # Not ``repr``: a NumPy float is a float too, but a file restores it as a plain one.
    for kind in (int, float):
        if isinstance(value, kind):
            return kind.__repr__(value)
    raise TypeError(
        f"a state is made of tensors, numbers, strings, dicts and lists; {where.strip('/')} is "
        f"{type(value).__name__}"
    )


def tensors_of(value: Any, where: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a tree with its path, such as ``"blocks/head/factors/A"``."""
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, Mapping | list | tuple):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from tensors_of(inner, f"{where}/{key}" if where else str(key))


def seal(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with checksums of its contents.

    Call it after an intended change of a state, which `verify` would report as damage.

    Args:
        state: Dicts, lists, tuples, numbers, strings and dense tensors; earlier checksums are
            replaced.

    Returns:
        The same objects, and ``"checksums"``.

    Raises:
        TypeError: If it contains another type, at a place that is named, or is nested too deeply.
    """
    plain = {key: value for key, value in state.items() if key != KEY}
    try:
        tensors = {where: of_tensor(tensor, where) for where, tensor in tensors_of(plain)}
        sums = {"plain": zlib.crc32(text(plain).encode()), "tensors": tensors}
    except RecursionError:
        raise TypeError("a state is nested too deeply, or contains itself") from None
    return {**plain, KEY: sums}


@contextmanager
def reading(what: str = "the state") -> Iterator[None]:
    """Raise an error of any kind as a ValueError, since a state may be of a file."""
    try:
        yield
    except ValueError:
        raise
    except Exception as error:  # of any kind: these may be bytes of a file
        raise ValueError(f"{what} is damaged: {error}") from error


_OTHER = (
    "another checksum than when it was saved, as after a cast to another dtype; a changed state "
    "needs soframe.checkpoint.seal"
)


def verify(state: Any, what: str = "the state") -> None:
    """Raise ValueError unless a state matches its checksums; the message lists bad tensors."""
    saved = state.get(KEY) if isinstance(state, Mapping) else None
    if not isinstance(saved, Mapping) or not isinstance(saved.get("tensors"), Mapping):
        raise ValueError(f"{what} is truncated: it lacks its {KEY}")
    with reading(what):
        actual = seal(state)[KEY]
    known, computed = saved["tensors"], actual["tensors"]
    differ = [str(name) for name in {**computed, **known} if known.get(name) != computed.get(name)]
    if differ:
        shown = ", ".join(differ[:3])
        if len(differ) > 3:
            shown += f" and {len(differ) - 3} more"
        raise ValueError(f"{what} is damaged: {shown} has {_OTHER}")
    if saved.get("plain") != actual["plain"]:
        raise ValueError(f"{what} is damaged: its numbers and names have {_OTHER}")
