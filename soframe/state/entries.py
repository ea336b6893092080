"""The tensors of a block's state by name, with the ranks that hold them.

Saving, loading, checking and moving read one table. Factors travel and are stored as packed
triangles. Tensors keep their names in state dicts and sharded checkpoints::

    factors/A, second_order/A/vectors, state/momentum
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from soframe.blocks.block import Block
from soframe.comm.base import Backend
from soframe.comm.fused import Parcel, deliver
from soframe.estimate.averages import pack, store
from soframe.registry import describe
from soframe.specs import TensorSpec
from soframe.strategies.work import BlockPlacement

Path = tuple[str, ...]
"""``("factors", factor)``, ``("second_order", factor, tensor)`` or ``("state", tensor)``."""
Tensors = Mapping[Path, Tensor]


@dataclass(frozen=True)
class Entry:
    """A tensor of a block: path, shape, the rank that sends or writes it, and its holders."""

    path: Path
    spec: TensorSpec
    source: int
    holders: frozenset[int]

    def name_in(self, block: Block) -> str:
        """Return its name among the tensors of all blocks."""
        return "/".join((block.name, *self.path))


_NOTHING: Mapping[str, Any] = {"masses": {}, "updates": 0, "solved": False}
"""The part of a block in a state in which it has nothing."""


def entries(
    block: Block, place: BlockPlacement, *, factors: Collection[str], solved: bool, updates: int
) -> Iterator[Entry]:
    """Yield the tensors of a block with these factors, perhaps solved, after so many updates."""
    workers = place.gradient_workers
    for index, factor in enumerate(block.factors):
        owner = place.owners[index]
        if factor.name in factors:
            holders = frozenset(place.holding(index))
            spec = TensorSpec(factor.kept_shape())
            yield Entry(("factors", factor.name), spec, owner, holders)
        if solved and factor.name in block.tensors:
            source = owner if owner in workers else workers[0]
            holders = frozenset(place.needing[index])
            for name, spec in block.tensors[factor.name].items():
                yield Entry(("second_order", factor.name, name), spec, source, holders)
    if updates:
        for name, spec in block.states.items():
            yield Entry(("state", name), spec, workers[0], frozenset(workers))


def part_of(state: Mapping[str, Any], block: Block) -> Mapping[str, Any]:
    """Return a block's part of a state; it may lack blocks that are frozen, which begin anew."""
    part: Mapping[str, Any] = state["blocks"].get(block.name, _NOTHING)
    return part


def entries_saved(block: Block, place: BlockPlacement, state: Mapping[str, Any]) -> list[Entry]:
    """Return the tensors that a block loads from a state."""
    saved = part_of(state, block)
    # Second-order data of another solver are dropped; the next step solves the block.
    solved = saved.get("solved", bool(saved.get("second_order"))) and same_solvers(saved, block)
    factors, updates = saved["masses"], saved["updates"]
    return list(entries(block, place, factors=factors, solved=solved, updates=updates))


def solvers(block: Block) -> dict[str, str]:
    """Return the solver of each factor that is solved: the user's, or the method's own."""
    return {factor.name: describe(solver) for _, factor, solver in block.solved_factors}


def same_solvers(saved: Mapping[str, Any], block: Block) -> bool:
    """Return whether the saved solvers of a block's factors equal its present ones."""
    return bool(saved["solvers"] == solvers(block))


def held(block: Block, factors: Mapping[str, Tensor]) -> dict[Path, Tensor]:
    """Return the tensors of a block on this rank; `factors` may hold settled running factors."""
    by_path: dict[Path, Tensor] = {}
    for factor in block.factors:
        if factor.name in factors:
            # Statistics that were pending make it wider than it is kept.
            kept = factors[factor.name].to(block.factor_dtype)
            by_path["factors", factor.name] = pack(kept, factor)
    for name, data in block.second_order.items():
        by_path |= {("second_order", name, key): tensor for key, tensor in data.items()}
    return by_path | {("state", name): tensor for name, tensor in block.state.items()}


def stored_dtype(block: Block, path: Path) -> torch.dtype:
    """Return the dtype in which a tensor of a block is kept."""
    kinds = {"state": block.state_dtype, "factors": block.factor_dtype}
    return kinds.get(path[0], block.dtype)


def gather(
    backend: Backend, block: Block, sent: Sequence[Entry], stored: Tensors, phase: str
) -> dict[Path, Tensor]:
    """Broadcast tensors of a block from their sources to all ranks; a collective of all ranks."""
    everyone = tuple(range(backend.world_size))
    parcels = [
        Parcel(
            entry.source,
            everyone,
            specs=(entry.spec,),
            dtype=stored_dtype(block, entry.path),
            device=block.device,
            tensors=[stored[entry.path]] if backend.rank == entry.source else None,
        )
        for entry in sent
    ]
    deliver(backend, parcels, phase)
    return {
        entry.path: parcel.tensors[0]
        for entry, parcel in zip(sent, parcels, strict=True)
        if parcel.tensors is not None
    }


def put(
    block: Block,
    place: BlockPlacement,
    tensors: Tensors,
    *,
    masses: Mapping[str, tuple[float, ...]],
    solved: bool,
    updates: int,
) -> None:
    """Store this rank's tensors in a block's stack, which holds no entries of it yet."""
    specs = {factor.name: factor for factor in block.factors}
    stack, member, record = block.stack, block.member, block.record
    for path, tensor in tensors.items():
        if path[0] == "factors":
            stored = store(tensor, specs[path[1]], packed=place.packed)
            stack.set_factor(path[1], (member,), stored)
        elif path[0] == "second_order":
            stack.fill(stack.data.setdefault(path[1], {}), path[2], member, tensor)
        else:
            stack.fill(stack.state, path[1], member, tensor)
    record.masses, record.pending = dict(masses), 0.0
    record.solved, record.updates = solved, updates
