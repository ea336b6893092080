"""Checkpoints: atomic saves, and sharded ones in which each rank writes its own tensors.

`save` writes a checkpoint under a hidden name and renames it when it is complete; `latest` returns
the last one whose files match their checksums::

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

``dcp.save`` and ``dcp.async_save`` also take the result of `part`. Only checksums are gathered: a
running factor is written by its owner, second-order data by one of the gradient workers, under
names that do not depend on ranks, so the world size and the strategy may change. Data common to all
ranks (the step, EMA weights, checksums) are a header of text, which is read and checked first; then
each rank reads the tensors that its own placement gives it.
"""

from __future__ import annotations

import io
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.storage import StorageReader

from soframe.comm.agreement import gather_json
from soframe.comm.stages import STAGES
from soframe.state import checksums
from soframe.state import saving as state
from soframe.state.checksums import seal
from soframe.state.durable import Ranks, latest, read, save
from soframe.state.entries import entries_saved
from soframe.state.plain_metadata import PlainPlanner, PlainReader, reader_of

__all__ = [
    "PlainPlanner",
    "PlainReader",
    "Whole",
    "latest",
    "load",
    "merge",
    "part",
    "read",
    "save",
    "seal",
]

HEADER = "header"
TENSORS = "tensors"
"""The key of the header under which each tensor has its dtype and its checksum."""
_DTYPES = {
    str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}


class Owner(Protocol):
    """Whose state a checkpoint has: a preconditioner, or a fitted curvature."""

    @property
    def curvature(self) -> Any:
        """The curvature."""

    def land(self, call: str) -> None:
        """Install all background solves."""

    def load_checked(
        self, check: Callable[[], tuple[Mapping[str, Any], Mapping[str, Tensor]]]
    ) -> object:
        """Take a state that ``check`` returns, or raises."""


def part(preconditioner: Owner) -> dict[str, Any]:
    """Return the part of the state that this rank writes, to be saved under a key of its own.

    Call it on every rank: the ranks exchange checksums, and deferred statistics are reduced into
    copies. Background solves are finished first. The tensors do not change while training
    continues.

    Returns:
        Name -> tensor, and ``"header"`` -> text, for `save`, ``dcp.save`` or ``dcp.async_save``.
    """
    curvature = preconditioner.curvature
    placed, backend = curvature.placed, curvature.placed.backend
    preconditioner.land("soframe.checkpoint.part()")
    backend.meet("soframe.checkpoint.part()")
    header = curvature.header()
    tensors: dict[str, Tensor] = {}
    for block, place in placed:
        header["blocks"][block.name]["solved"] = block.solved
        block_entries, present = state.present(placed, block, place)
        for entry in block_entries:
            if backend.rank == entry.source:
                tensor = state.lasting(entry.path, present[entry.path])
                tensors[entry.name_in(block)] = tensor
    # DCP keeps one header, so it has the checksums of all ranks.
    sums = {name: [str(t.dtype), checksums.of_tensor(t)] for name, t in tensors.items()}
    header[TENSORS] = {}
    for theirs in gather_json(backend, sums):
        header[TENSORS].update(theirs)
    return _of_stage(curvature.stage, {HEADER: json.dumps(seal(header)), **tensors})


def load(
    preconditioner: Owner,
    checkpoint_id: str | os.PathLike[str] | None = None,
    *,
    key: str = "preconditioner",
    storage_reader: StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Load a sharded checkpoint, perhaps of another world size, strategy or solver.

    Call it on every rank.

    Args:
        preconditioner: The preconditioner.
        checkpoint_id: The folder, or the identifier that the reader expects.
        key: The key under which `part` was saved.
        storage_reader: As for ``dcp.load``. The default runs no code from the checkpoint (see
            `PlainReader`); another reader is trusted: DCP's own unpickle ``.metadata``.
        process_group: A process group of the preconditioner's ranks, in which DCP reads; None for
            the preconditioner's own.

    Raises:
        ValueError: If the checkpoint is missing, incomplete, damaged or of another model, on any
            rank; then no rank changes.
    """
    curvature = preconditioner.curvature
    ranks = Ranks.of_backend(curvature.backend)
    if process_group is not None:
        ranks = Ranks.of(process_group)

    def read_into(tensors: dict[str, Any]) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*to load in a single process")
                dcp_load(
                    {key: _of_stage(curvature.stage, tensors)},
                    storage_reader=storage_reader or reader_of(checkpoint_id),
                    checkpoint_id=checkpoint_id,
                    planner=PlainPlanner(),
                    process_group=ranks.group,
                    no_dist=ranks.size == 1,
                )
        # CheckpointException is a BaseException only
        except (CheckpointException, Exception) as error:
            raise ValueError(
                f"no complete checkpoint of a preconditioner can be read from {checkpoint_id}, "
                f"key {key!r}: {error}"
            ) from error

    saved: dict[str, Any] = {}

    def check_header() -> None:
        try:
            saved.update(json.loads(first[HEADER]))
        except (TypeError, ValueError, RecursionError) as error:
            raise ValueError("the checkpoint is damaged: its header cannot be read") from error
        curvature.check_header(saved)

    def check_tensors() -> tuple[dict[str, Any], dict[str, Tensor]]:
        for name, tensor in tensors.items():
            if checksums.of_tensor(tensor) != saved[TENSORS][name][1]:
                raise ValueError(f"the checkpoint is damaged: {name} has another checksum")
        state.check(saved, tensors, curvature.placed, everywhere=False)
        return saved, tensors

    # Errors of DCP are raised on all ranks, and all ranks check the header before DCP goes on.
    first: dict[str, Any] = {HEADER: ""}
    read_into(first)
    curvature.agree_on_state(check_header, lambda: first[HEADER])
    tensors: dict[str, Tensor] = {}
    for block, place in curvature.placed:
        for entry in entries_saved(block, place, saved):
            if curvature.placed.rank in entry.holders:
                name = entry.name_in(block)
                # Keep the saved dtype until the checksums are compared.
                dtype = _DTYPES[saved[TENSORS][name][0]]
                tensors[name] = torch.empty(entry.spec.shape, dtype=dtype, device="cpu")
    read_into({**first, **tensors})
    preconditioner.load_checked(check_tensors)


def _of_stage(stage: str, contents: dict[str, Any]) -> dict[str, Any]:
    """Name a part after its pipeline stages: DCP keeps one header under each name."""
    return {f"stages {stage}": contents} if stage else contents


class Whole:
    """Lets ``torch.distributed.checkpoint`` save an optimizer of soframe whole, in one entry.

    DCP reads into the tensors of ``state_dict``, and an optimizer before its first step has few. So
    DCP gets ``{"optimizer": Whole(optimizer)}``, whose state is the bytes of the whole state. It
    may be loaded on another number of ranks.

    Args:
        stateful: An optimizer or a preconditioner. All ranks call DCP, on loading too.
    """

    def __init__(self, stateful: Any) -> None:
        self._stateful = stateful

    def state_dict(self) -> dict[str, bytes]:
        """Return the state as bytes."""
        file = io.BytesIO()
        torch.save(self._stateful.state_dict(), file)
        return {"whole": file.getvalue()}

    def load_state_dict(self, state: Mapping[str, bytes]) -> None:
        """Load the state, by ``torch.load(weights_only=True)``."""
        file = io.BytesIO(state["whole"])
        self._stateful.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))


def merge(states: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state of a whole model, from the states of all stages of a pipeline.

    A preconditioner of the whole model, or of other stages, loads it: each rank loads the whole
    state, and keeps its part.

    Args:
        states: The ``state_dict`` of one rank of each stage, in any order. Modules have the same
            names as in the whole model.

    Returns:
        The state, for ``load_state_dict``.

    Raises:
        ValueError: If a state is damaged or not of a stage; if the states have different steps or
            settings; if two have blocks of one name.
    """
    parts = list(states)
    _require_one_run(parts)
    first = parts[0]
    blocks: dict[str, Any] = {}
    history: dict[str, dict[str, Any]] = {}
    dampings: dict[str, float] = {}
    late: list[Any] = []
    for stage_state in parts:
        late += stage_state.get("late", ())
        dampings.update(stage_state.get("dampings", {}))
        if both := sorted(set(blocks) & set(stage_state["blocks"])):
            raise ValueError(
                f"two stages have blocks of the name(s) {', '.join(both)}: let modules have the "
                f"names that they have in the whole model"
            )
        blocks.update(stage_state["blocks"])
        for kind, of_blocks in stage_state["history"].items():
            history.setdefault(kind, {}).update(of_blocks)
    counters = dict(first["counters"])
    for name in counters:
        if not name.startswith("skipped"):  # stages skip the same steps
            counters[name] = sum(stage_state["counters"][name] for stage_state in parts)
    merged = dict(first)
    for key in (STAGES, "late"):
        merged.pop(key, None)
    if late:
        merged["late"] = late
    merged |= {"blocks": blocks, "history": history, "counters": counters, "dampings": dampings}
    return seal(merged)


def _require_one_run(parts: Sequence[Mapping[str, Any]]) -> None:
    """Raise a ValueError unless states are undamaged, of stages, and of one step of one run."""
    if not parts or not all(STAGES in stage_state for stage_state in parts):
        raise ValueError("merge() takes the states of the stages of a pipeline, one of each")
    for stage_state in parts:
        checksums.verify(stage_state)
    for key in ("version", "step", "owed_statistics", "scaling", "damping"):
        values = [stage_state.get(key) for stage_state in parts]
        if values.count(values[0]) < len(values):
            raise ValueError(
                f"these states are of different runs or steps: {key} is "
                f"{', '.join(map(str, values))}"
            )
