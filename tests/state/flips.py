"""Flips single bits: in tensors, and in files."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor


def flip_in_tensor(tensor: Tensor, draw: random.Random) -> None:
    """Flip a bit of a contiguous tensor, in place."""
    data = tensor.view(-1).view(torch.uint8)
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)


def flipped(data: bytes, draw: random.Random) -> bytes:
    """Return a file with one bit flipped."""
    changed = bytearray(data)
    changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def flip_in_folder(folder: Path, draw: random.Random) -> tuple[Path, bytes]:
    """Flip a bit somewhere in the files of a folder, each byte of all of them as likely.

    Returns:
        The file, and what it was.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    (file,) = draw.choices(files, [path.stat().st_size for path in files])
    before = file.read_bytes()
    file.write_bytes(flipped(before, draw))
    return file, before
