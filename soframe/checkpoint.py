"""Sharded checkpoints: each rank writes what it owns and reads what it is to hold.

With ``torch.distributed.checkpoint`` (DCP), at once or asynchronously::

    part = soframe.checkpoint.part(preconditioner)
    dcp.save({"model": model.state_dict(), "preconditioner": part}, checkpoint_id=folder)
    ...
    soframe.checkpoint.load(preconditioner, folder)

Nothing is gathered: a running factor is written by its owner, second-order data by one of the
gradient workers, under names that say nothing about ranks. So the world size and the strategy may
differ between the two. What all ranks know (the step, the weights of averages) is a header of
text, which a load reads and checks first; then each rank asks for the tensors that its own
placement gives it, and for no others.
"""

from __future__ import annotations

import json
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader

from soframe import state
from soframe.blocks import Block
from soframe.comm.packing import packed_size
from soframe.preconditioner import Preconditioner
from soframe.registry import describe
from soframe.running import pack, settled
from soframe.strategies.placement import BlockPlacement, Placement

HEADER = "header"


def part(preconditioner: Preconditioner) -> dict[str, Any]:
    """Return what this rank writes of the state, to be saved under a key of its own.

    Call it on every rank: statistics whose reduction is deferred are brought to their owners,
    in copies. What is solved in the background is put to use first. The tensors are this rank's
    alone, so that saving may go on while training does.

    Args:
        preconditioner: The preconditioner.

    Returns:
        Name -> tensor, and ``"header"`` -> text, for ``dcp.save`` or ``dcp.async_save``.
    """
    own = preconditioner
    backend, blocks = own.backend, own._blocks
    own._land("soframe.checkpoint.part()")
    if any(block.pending > 0 for block in blocks):
        backend.meet("soframe.checkpoint.part()")
    header = state.header(blocks, own.counters, own._steps, own._refresh.owed, own._scaling)
    header["initial_lrs"] = [float(rate) for rate in own._lrs.state()]
    found: dict[str, Any] = {}
    for block, place in zip(blocks, own.placement.blocks, strict=True):
        # A block that is not solved altogether is solved anew at the next step.
        header["blocks"][block.name]["solved"] = block.solved
        sums = settled(backend, block, place, "state") if block.pending > 0 else block.running
        for index, factor in enumerate(block.factors):
            if backend.rank == place.owners[index] and factor.name in sums:
                found[_factor(block, factor.name)] = pack(sums[factor.name]).clone()
        if block.solved:
            for index, factor in enumerate(block.factors):
                if backend.rank == _writer(place, index):
                    for name, tensor in block.second_order[factor.name].items():
                        found[_second_order(block, factor.name, name)] = tensor
    # All ranks have the same header; DCP keeps one.
    return {HEADER: json.dumps(header), **found}


def load(
    preconditioner: Preconditioner,
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    key: str = "preconditioner",
    storage_reader: StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Continue from a checkpoint, perhaps of another world size, strategy or solver.

    Call it on every rank.

    Args:
        preconditioner: The preconditioner.
        checkpoint_id: The folder, or what the reader takes for one.
        key: Under which key `part` was saved.
        storage_reader: See ``dcp.load``.
        process_group: The process group of the preconditioner's ranks, if it is not the default
            one.

    Raises:
        ValueError: If the checkpoint is missing, incomplete, damaged or of another model, on any
            rank; nothing has changed then.
    """
    own = preconditioner

    def read(wanted: dict[str, Any]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*to load in a single process")
                dcp_load(
                    {key: wanted},
                    checkpoint_id=checkpoint_id,
                    storage_reader=storage_reader,
                    process_group=process_group,
                    no_dist=not dist.is_initialized(),
                )
        except (CheckpointException, Exception) as error:  # the former is no Exception
            raise ValueError(
                f"no complete checkpoint of a preconditioner can be read from {checkpoint_id}, "
                f"key {key!r}: {error}"
            ) from error

    # DCP's failures are those of all ranks together: the ranks stay together until `_load`.
    first: dict[str, Any] = {HEADER: ""}
    read(first)
    saved = _parse(first[HEADER])
    state.check_header(saved, own._blocks, own._scaling)
    wanted = _wanted(saved, own._blocks, own.placement, own.backend.rank)
    read({**first, **wanted})
    _arrange(saved, own._blocks, wanted)

    def check() -> None:
        for name, tensor in wanted.items():
            if not bool(tensor.isfinite().all()):
                raise ValueError(f"the checkpoint is damaged: {name} is not finite")

    own._load(saved, check)


def _parse(text: Any) -> dict[str, Any]:
    try:
        saved = json.loads(text)
    except (TypeError, ValueError):
        saved = None
    if not isinstance(saved, dict):
        raise ValueError("the checkpoint is damaged: its header cannot be read")
    return saved


def _wanted(
    saved: dict[str, Any], blocks: list[Block], placement: Placement, rank: int
) -> dict[str, Tensor]:
    """Return room for what this rank is to hold of a saved state, by name."""
    wanted = {}
    for block, place in zip(blocks, placement.blocks, strict=True):
        header = saved["blocks"][block.name]
        options: dict[str, Any] = {"dtype": block.dtype, "device": block.device}
        for index, factor in enumerate(block.factors):
            if header["mass"] > 0 and place.holds(rank, index):
                shape: tuple[int, ...] = (factor.groups, packed_size(factor.size))
                wanted[_factor(block, factor.name)] = torch.empty(shape, **options)
        if _usable(header, block) and rank in place.gradient_workers:
            for factor_name, name, spec in block.flat_specs():
                room = torch.empty(spec.shape, **options)
                wanted[_second_order(block, factor_name, name)] = room
    return wanted


def _arrange(saved: dict[str, Any], blocks: list[Block], tensors: dict[str, Tensor]) -> None:
    """Put tensors where a state has them; what this rank does not hold stays away."""
    for block in blocks:
        header = saved["blocks"][block.name]
        factors = [factor.name for factor in block.factors]
        header["factors"] = {f: tensors.get(_factor(block, f)) for f in factors}
        header["second_order"] = {
            factor: {
                name: tensors[full]
                for name in block.tensors[factor]
                if (full := _second_order(block, factor, name)) in tensors
            }
            for factor in factors
            if _usable(header, block)
        }


def _usable(header: dict[str, Any], block: Block) -> bool:
    """Return whether the second-order data are there, and this solver's."""
    return bool(header.get("solved")) and header["solver"] == describe(block.solver)


def _writer(place: BlockPlacement, factor: int) -> int:
    """Return the gradient worker that writes the second-order data of a factor."""
    owner = place.owners[factor]
    return owner if owner in place.gradient_workers else place.gradient_workers[0]


def _factor(block: Block, factor: str) -> str:
    return f"{block.name}/factors/{factor}"


def _second_order(block: Block, factor: str, name: str) -> str:
    return f"{block.name}/second_order/{factor}/{name}"
