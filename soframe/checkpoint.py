"""Checkpoints: whole or not there, and sharded where each rank writes what it owns.

`save` writes a checkpoint beside those that are there and renames it when it is whole; `latest`
finds the last that is, by the checksums of its files::

    soframe.checkpoint.save(folder, {"model": model.state_dict(), ...})
    ...
    last = soframe.checkpoint.latest(folder)
    if last is not None:
        state = soframe.checkpoint.read(last)

Sharded, by ``torch.distributed.checkpoint`` (DCP)::

    part = soframe.checkpoint.part(preconditioner)
    soframe.checkpoint.save(folder, {"preconditioner": part, ...}, sharded=True)
    ...
    soframe.checkpoint.load(preconditioner, soframe.checkpoint.latest(folder))

What `part` returns may also be given to ``dcp.save`` or ``dcp.async_save``. Nothing is gathered but
checksums: a running factor is written by its owner, second-order data by one of the gradient
workers, under names that say nothing about ranks. So the world size and the strategy may differ
between the two. What all ranks know (the step, the weights of averages, the checksums) is a header
of text, which a load reads and checks first; then each rank asks for the tensors that its own
placement gives it, and for no others.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader

from soframe.blocks.block import Block
from soframe.blocks.placed import PlacedBlocks
from soframe.comm.agreement import gather_texts
from soframe.comm.stages import STAGES
from soframe.preconditioner import Preconditioner
from soframe.state import checksums
from soframe.state import saving as state
from soframe.state.checksums import seal
from soframe.state.durable import latest, read, save
from soframe.state.plain_metadata import PlainPlanner, PlainReader, reader_of
from soframe.step.averages import pack, settled
from soframe.strategies.placement import BlockPlacement, Placement

__all__ = ["PlainPlanner", "PlainReader", "latest", "load", "merge", "part", "read", "save", "seal"]

HEADER = "header"
TENSORS = "tensors"
"""Where the header has the dtype and the checksum of each tensor."""
_DTYPES = {
    str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


def part(preconditioner: Preconditioner) -> dict[str, Any]:
    """Return what this rank writes of the state, to be saved under a key of its own.

    Call it on every rank: the ranks exchange checksums, and statistics whose reduction is deferred
    are brought to their owners, in copies. What is solved in the background is put to use first.
    The tensors are this rank's alone, so that saving may go on while training does.

    Args:
        preconditioner: The preconditioner.

    Returns:
        Name -> tensor, and ``"header"`` -> text, for `save`, ``dcp.save`` or ``dcp.async_save``.
    """
    backend, blocks = preconditioner.backend, preconditioner._blocks
    preconditioner._land("soframe.checkpoint.part()")
    if any(block.record.pending > 0 for block in blocks):
        backend.meet("soframe.checkpoint.part()")
    header = state.header(
        blocks,
        preconditioner.counters,
        step=preconditioner._steps,
        owed_statistics=preconditioner._refresh.owed,
        scaling=preconditioner._scaling,
    )
    header.update(preconditioner.beside_blocks())
    header["initial_lrs"] = [float(rate) for rate in header["initial_lrs"]]
    tensors: dict[str, Tensor] = {}
    for block, place in zip(blocks, preconditioner.placement.blocks, strict=True):
        # A block that is not solved altogether is solved anew at the next step.
        header["blocks"][block.name]["solved"] = block.solved
        tensors.update(_written(preconditioner._placed, block, place))
    # All ranks have the same header; DCP keeps one. So it needs the checksums of all.
    mine = {name: [str(t.dtype), checksums.of_tensor(t)] for name, t in tensors.items()}
    header[TENSORS] = {}
    for said in gather_texts(backend, json.dumps(mine)):
        header[TENSORS].update(json.loads(said))
    return _put_under(preconditioner, {HEADER: json.dumps(seal(header)), **tensors})


def _written(placed: PlacedBlocks, block: Block, place: BlockPlacement) -> dict[str, Tensor]:
    """Return the tensors of a block that this rank writes, by name."""
    tensors: dict[str, Tensor] = {}
    backend = placed.backend
    pending = block.record.pending > 0
    sums = settled(placed, block.stack, (block.member,), "state") if pending else block.running
    for index, factor in enumerate(block.factors):
        if backend.rank == place.owners[index] and factor.name in sums:
            tensors[_factor(block, factor.name)] = pack(sums[factor.name], factor).clone()
    if block.record.updates and backend.rank == place.gradient_workers[0]:
        for name in block.states:
            tensors[_state(block, name)] = block.state[name]
    for index, factor, _ in block.solved_here if block.solved else ():
        if backend.rank == _writer(place, index):
            for name, tensor in block.second_order[factor.name].items():
                tensors[_second_order(block, factor.name, name)] = tensor
    return tensors


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
        storage_reader: See ``dcp.load``. By default the reader runs nothing of what it reads (see
            `PlainReader`); one that is given is trusted: DCP's own unpickle ``.metadata``.
        process_group: The process group of the preconditioner's ranks, if it is not the default
            one.

    Raises:
        ValueError: If the checkpoint is missing, incomplete, damaged or of another model, on any
            rank; nothing has changed then.
    """

    def read_into(wanted: dict[str, Any]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*to load in a single process")
                dcp_load(
                    {key: _put_under(preconditioner, wanted)},
                    storage_reader=storage_reader or reader_of(checkpoint_id),
                    checkpoint_id=checkpoint_id,
                    planner=PlainPlanner(),
                    process_group=process_group,
                    no_dist=not dist.is_initialized(),
                )
        except (CheckpointException, Exception) as error:  # the former is no Exception
            raise ValueError(
                f"no complete checkpoint of a preconditioner can be read from {checkpoint_id}, "
                f"key {key!r}: {error}"
            ) from error

    saved: dict[str, Any] = {}

    def check_header() -> None:
        saved.update(_parse(first[HEADER]))
        preconditioner._stages.own_part(saved)  # raises where it is of other stages
        state.check_header(
            saved, preconditioner._blocks, preconditioner._scaling, preconditioner._lrs
        )
        _check_tensors_named(saved, preconditioner._blocks)
        state.verify(saved)
        preconditioner.check_beside_blocks(saved)

    # DCP's failures are those of all ranks together; so are others, before DCP goes on.
    first: dict[str, Any] = {HEADER: ""}
    read_into(first)
    preconditioner.agree_on_state(check_header, lambda: first[HEADER])
    wanted = _wanted(
        saved, preconditioner._blocks, preconditioner.placement, preconditioner.backend.rank
    )
    read_into({**first, **wanted})
    entries = saved.get(TENSORS, {})
    _arrange(saved, preconditioner._blocks, wanted)
    preconditioner._load(saved, lambda: _check_tensors(wanted, entries))


def _put_under(preconditioner: Preconditioner, found: dict[str, Any]) -> dict[str, Any]:
    """Return what DCP saves and loads, of stages of a pipeline under a name of their own.

    DCP keeps one header under each name, and every stage has its own.
    """
    return {f"stages {preconditioner.stage}": found} if preconditioner.stage else found


def merge(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a whole model, from those of all stages of a pipeline.

    What loads it is a preconditioner of the whole model, or of stages that are cut otherwise: each
    rank loads it whole, and keeps its part.

    Args:
        states: What ``state_dict`` returned on one rank for each stage, in whichever order. Modules
            have the names that they have in the whole model.

    Returns:
        The state, for ``load_state_dict``.

    Raises:
        ValueError: If a state is damaged, or of no stages; if they are of different steps or
            settings; if two have blocks of one name.
    """
    parts = list(states)
    for one in parts:
        if STAGES not in one:
            raise ValueError("merge() takes the states of the stages of a pipeline, one of each")
        state.verify(one)
    if not parts:
        raise ValueError("merge() takes the states of the stages of a pipeline, one of each")
    first = parts[0]
    for key in ("version", "step", "owed_statistics", "scaling", "initial_lrs", "damping"):
        if any(one.get(key) != first.get(key) for one in parts):
            raise ValueError(
                f"these states are of different runs or steps: {key} is "
                f"{', '.join(str(one.get(key)) for one in parts)}"
            )
    blocks: dict[str, Any] = {}
    history: dict[str, dict[str, Any]] = {}
    for one in parts:
        if both := sorted(set(blocks) & set(one["blocks"])):
            raise ValueError(
                f"two stages have blocks of the name(s) {', '.join(both)}: let modules have the "
                f"names that they have in the whole model"
            )
        blocks.update(one["blocks"])
        for kind, of_blocks in one["history"].items():
            history.setdefault(kind, {}).update(of_blocks)
    counters = {
        name: (max if name.startswith("skipped") else sum)(one["counters"][name] for one in parts)
        for name in first["counters"]
    }
    whole = {key: value for key, value in first.items() if key != STAGES}
    return seal({**whole, "blocks": blocks, "history": history, "counters": counters})


def _parse(text: Any) -> dict[str, Any]:
    try:
        saved = json.loads(text)
    except (TypeError, ValueError):
        saved = None
    if not isinstance(saved, dict):
        raise ValueError("the checkpoint is damaged: its header cannot be read")
    return saved


def _check_tensors_named(saved: dict[str, Any], blocks: list[Block]) -> None:
    """Check that the header has dtypes and checksums of all tensors, if of any.

    Raises:
        ValueError: If it has not.
    """
    if saved["version"] < 3:
        return
    entries = saved.get(TENSORS)
    if not isinstance(entries, dict):
        raise ValueError("the checkpoint is truncated: its header has no checksums of tensors")
    for name in _names(saved, blocks):
        entry = entries.get(name)
        if not isinstance(entry, list) or len(entry) != 2 or entry[0] not in _DTYPES:
            raise ValueError(f"the checkpoint is damaged: of {name} its header says {entry!r}")


def _check_tensors(wanted: dict[str, Tensor], entries: dict[str, Any]) -> None:
    """Check the tensors that were read.

    Args:
        wanted: Name -> tensor.
        entries: Name -> dtype and checksum, where the checkpoint has them.

    Raises:
        ValueError: If one is not finite, or not what was saved.
    """
    for name, tensor in wanted.items():
        if not bool(tensor.isfinite().all()):
            raise ValueError(f"the checkpoint is damaged: {name} is not finite")
        if name in entries:
            _, checksum = entries[name]
            if checksums.of_tensor(tensor) != checksum:
                raise ValueError(
                    f"the checkpoint is damaged: {name} is not what was saved, its checksum differs"
                )


def _names(saved: dict[str, Any], blocks: list[Block]) -> list[str]:
    """Return the names of all tensors that a rank may ask for."""
    names = []
    for block in blocks:
        header = saved["blocks"][block.name]
        names += [_factor(block, name) for name in state.masses_of(header, block)]
        names += [_state(block, name) for name in block.states if header.get("updates")]
        if _usable(header, block):
            names += [
                _second_order(block, factor, name) for factor, name, _ in state.flat_specs(block)
            ]
    return names


def _wanted(
    saved: dict[str, Any], blocks: list[Block], placement: Placement, rank: int
) -> dict[str, Tensor]:
    """Return room for what this rank is to hold of a saved state, by name.

    It is as it was saved, on the CPU, until its checksums are compared.
    """
    known = saved.get(TENSORS, {})

    def room(name: str, shape: tuple[int, ...], block: Block) -> Tensor:
        dtype = _DTYPES[known[name][0]] if known else block.dtype
        return torch.empty(shape, dtype=dtype, device="cpu")

    wanted = {}
    for block, place in zip(blocks, placement.blocks, strict=True):
        header = saved["blocks"][block.name]
        for index, factor in enumerate(block.factors):
            if factor.name in state.masses_of(header, block) and place.holds(rank, index):
                name = _factor(block, factor.name)
                wanted[name] = room(name, factor.packed_shape, block)
            if _usable(header, block) and rank in place.needing(index):
                for tensor_name, spec in block.tensors.get(factor.name, {}).items():
                    name = _second_order(block, factor.name, tensor_name)
                    wanted[name] = room(name, tuple(spec.shape), block)
        if header.get("updates") and rank in place.gradient_workers:
            for state_name, spec in block.states.items():
                name = _state(block, state_name)
                wanted[name] = room(name, tuple(spec.shape), block)
    return wanted


def _arrange(saved: dict[str, Any], blocks: list[Block], tensors: dict[str, Tensor]) -> None:
    """Put tensors where a state has them; what this rank does not hold stays away."""
    for block in blocks:
        header = saved["blocks"][block.name]
        factors = list(state.masses_of(header, block))
        header["state"] = {
            name: tensors[full] for name in block.states if (full := _state(block, name)) in tensors
        }
        header["factors"] = {f: tensors.get(_factor(block, f)) for f in factors}
        header["second_order"] = {
            factor: {
                name: tensors[full]
                for name in block.tensors[factor]
                if (full := _second_order(block, factor, name)) in tensors
            }
            for factor in block.tensors
            if _usable(header, block)
        }


def _usable(header: dict[str, Any], block: Block) -> bool:
    """Return whether the second-order data are there, and these solvers'."""
    return bool(header.get("solved")) and state.same_solvers(header, block)


def _writer(place: BlockPlacement, factor: int) -> int:
    """Return the gradient worker that writes the second-order data of a factor."""
    owner = place.owners[factor]
    return owner if owner in place.gradient_workers else place.gradient_workers[0]


def _factor(block: Block, factor: str) -> str:
    return f"{block.name}/factors/{factor}"


def _state(block: Block, name: str) -> str:
    return f"{block.name}/state/{name}"


def _second_order(block: Block, factor: str, name: str) -> str:
    return f"{block.name}/second_order/{factor}/{name}"
