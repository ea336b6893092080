"""Checksums of states: of every tensor, and of all else together.

A state is a tree of dicts and lists with tensors, numbers and strings. Sealed, it holds beside them

- for each tensor the CRC-32 of its dtype, its shape and its bytes, and
- that of the text of everything else: keys, numbers, strings, and where the tensors are.

CRC-32 finds every flip of up to three bits in tensors of up to 10 kB, every burst of up to 32 bits
in any, and all but one in 4e9 of other changes; it is faster than disks are. It protects against
accidents, not against somebody who computes it anew. A tensor's bytes do not depend on its device.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

KEY = "checksums"
"""Where a sealed state has them."""


def of_tensor(tensor: Tensor) -> int:
    """Return the checksum of a tensor.

    Args:
        tensor: Dense, of any shape, dtype and device.
    """
    contiguous = tensor.detach().cpu().contiguous()
    data = memoryview(contiguous.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
    return zlib.crc32(data, zlib.crc32(f"{contiguous.dtype}{list(contiguous.shape)}".encode()))


def of_plain(value: Any) -> int:
    """Return the checksum of what is no tensor, wherever in a tree it is.

    Args:
        value: Dicts, lists, tuples, numbers, strings and tensors; of the latter only their dtypes,
            shapes and places count.

    Raises:
        TypeError: If there is something else in it; the message says where.
    """
    return zlib.crc32(text(value).encode())


def text(value: Any, where: str = "") -> str:
    """Return a text that is the same for equal trees, whatever the order of their keys.

    Args:
        value: See `of_plain`.
        where: The path to it.

    Raises:
        TypeError: See `of_plain`.
    """
    if isinstance(value, Tensor):
        return f"tensor {value.dtype}{list(value.shape)}"
    if isinstance(value, Mapping):
        rows = [f"{text(key, where)}: {text(v, f'{where}/{key}')}" for key, v in value.items()]
        return "{" + ", ".join(sorted(rows)) + "}"
    if isinstance(value, list | tuple):
        rows = [text(v, f"{where}/{number}") for number, v in enumerate(value)]
        return f"{'list' if isinstance(value, list) else 'tuple'}[{', '.join(rows)}]"
    if value is None or isinstance(value, bool | str):
        return repr(value)
    # Not ``repr``: a float of numpy is a float too, and comes back from a file as a plain one.
    for kind in (int, float):
        if isinstance(value, kind):
            return kind.__repr__(value)
    raise TypeError(
        f"a state is made of tensors, numbers, strings, dicts and lists; {where.strip('/')} is "
        f"{type(value).__name__}"
    )


def tensors_of(value: Any, where: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a tree, with the path to it.

    Args:
        value: See `of_plain`.
        where: The path to it.

    Yields:
        ``"blocks/head/factors/A"`` and the like, and the tensor.
    """
    if isinstance(value, Tensor):
        yield where, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from tensors_of(inner, f"{where}/{key}" if where else str(key))
    elif isinstance(value, list | tuple):
        for number, inner in enumerate(value):
            yield from tensors_of(inner, f"{where}/{number}")


def seal(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the checksums of what is in it.

    Args:
        state: The state; checksums that it has already are replaced.

    Returns:
        The same tensors and numbers, and ``"checksums"``.

    Raises:
        TypeError: See `of_plain`.
    """
    plain = {key: value for key, value in state.items() if key != KEY}
    tensors = {where: of_tensor(tensor) for where, tensor in tensors_of(plain)}
    return {**plain, KEY: {"plain": of_plain(plain), "tensors": tensors}}


def verify(state: Mapping[str, Any], what: str = "the state") -> None:
    """Check that a state is what was sealed.

    Args:
        state: What `seal` returned, perhaps after a time on a disk.
        what: What it is, for the message.

    Raises:
        ValueError: If it is not; the message names the tensors that differ.
    """
    saved = state.get(KEY)
    if not isinstance(saved, Mapping) or not isinstance(saved.get("tensors"), Mapping):
        raise ValueError(f"{what} is truncated: it lacks its {KEY}")
    try:
        actual = seal(state)[KEY]
    except TypeError as error:
        raise ValueError(f"{what} is damaged: {error}") from error
    known = saved["tensors"]
    differ = [where for where in actual["tensors"] if known.get(where) != actual["tensors"][where]]
    differ += [str(where) for where in known if where not in actual["tensors"]]
    if differ:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise ValueError(
            f"{what} is damaged: {', '.join(differ[:3])}{more} is not what was saved. Its checksum "
            f"differs, as it does where somebody casts a tensor to another dtype; what is changed "
            f"on purpose needs soframe.checkpoint.seal"
        )
    if saved.get("plain") != actual["plain"]:
        raise ValueError(
            f"{what} is damaged: its numbers and names are not those that were saved, their "
            f"checksum differs; what is changed on purpose needs soframe.checkpoint.seal"
        )
