"""Whether ranks have the same weights where they ought to, looked at before the first step.

Whatever ranks do together supposes that a layer is one layer: statistics of all of them are added
up, and one rank makes the direction of another's gradient. Where every rank has experts of its own
under names that all of them use, or was initialised apart from the others, no shape tells, and
every step would be wrong. So before the first step ranks compare sums of the bits of their weights:
of whole ones in the poll, of parts with the ranks that have copies of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from soframe.blocks.block import Block
from soframe.comm.base import Backend
from soframe.specs import Shards

OF = "the weights of "
"""What the names of `Weights.common` begin with."""

HINTS: Mapping[str, str] = {
    OF: "Ranks are to have the same weights at the first step: initialise them with one seed, or "
    "let DistributedDataParallel bring them to all. Of experts that ranks have for themselves (or "
    "layers that they cut up by hand) each rank has another: make their weights DTensors on a "
    "dimension of the mesh, with a method that reads gradients alone; or skip them"
}

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Weights:
    """The weights of blocks, which ranks compare once.

    Args:
        blocks: The blocks.
        backend: The backend.
    """

    def __init__(self, blocks: Sequence[Block], backend: Backend) -> None:
        self._blocks, self._backend = blocks, backend
        self._waits = backend.world_size > 1 and not backend.on_paper

    def common(self) -> dict[str, object]:
        """Return what ranks must have in common at the first step, by name; then nothing."""
        if not self._waits:
            return {}
        whole = [block for block in self._blocks if not block.shards]
        sums = [sum_of_bits(p) for block in whole for p in block.parameters.values()]
        numbers = iter(_read(sums))
        return {OF + b.name: [next(numbers) for _ in b.parameters] for b in whole}

    def require_copies(self) -> None:
        """Check that ranks which hold the same parts hold the same; every rank must call.

        Raises:
            ValueError: On every rank, if they do not.
        """
        waits, self._waits = self._waits, False
        parts: list[tuple[str, Shards]] = []
        sums: list[Tensor] = []
        for block in self._blocks if waits else ():
            for name, shards in block.shards.items():
                if shards.copied:
                    parts.append((block.name, shards))
                    sums.append(sum_of_bits(block.home.local(block.parameters[name])))
        if not parts:
            return
        mine = torch.tensor(_read(sums), device="cpu")
        mine = mine.to(self._backend.wire_device(mine.device))
        every = [told.tolist() for told in self._backend.all_gather(mine, "agree")]
        for index, (name, shards) in enumerate(parts):
            seen: dict[object, tuple[int, int]] = {}
            for rank, told in enumerate(every):
                first, number = seen.setdefault(shards.where(rank), (rank, told[index]))
                if told[index] != number:
                    raise ValueError(
                        f"ranks {first} and {rank} hold the same part of {name}, and not the same "
                        f"numbers. {HINTS[OF]}"
                    )


def sum_of_bits(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's elements, their bits taken for integers.

    Args:
        tensor: Dense, of any shape and dtype.

    Returns:
        An integer of 64 bits, which may have overflown: as a tensor, on the same device.
    """
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = plain.detach().contiguous().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


def total_of_bits(tensors: Sequence[Tensor]) -> int:
    """Return the sum of `sum_of_bits` over tensors, of any shapes, dtypes and devices.

    Args:
        tensors: The tensors.
    """
    return sum(_read([sum_of_bits(tensor) for tensor in tensors]))


def _read(sums: Sequence[Tensor]) -> list[int]:
    """Return numbers on devices, of which each is waited for once."""
    found: dict[int, int] = {}
    for device in {one.device for one in sums}:
        mine = [index for index, one in enumerate(sums) if one.device == device]
        numbers: list[int] = torch.stack([sums[index] for index in mine]).tolist()
        found.update(zip(mine, numbers, strict=True))
    return [found[index] for index in range(len(sums))]
