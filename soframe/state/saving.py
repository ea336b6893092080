"""The state of a preconditioner, independent of world size and strategy.

Running factors are stored as packed triangles. Second-order data are stored too: factors change
between solves, so the data cannot be recomputed. A state consists of tensors, numbers, strings,
dicts and lists, which ``torch.load(weights_only=True)`` reads, and it is sealed with checksums.
Loading checks everything before it changes anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from torch import Tensor

from soframe.blocks.block import Block, PlacedBlocks, Stack
from soframe.comm.agreement import agree_on_state
from soframe.comm.base import Backend
from soframe.comm.stages import ALONE, Stages
from soframe.estimate.averages import settled
from soframe.estimate.window import Window
from soframe.registry import describe
from soframe.state import checksums
from soframe.state.entries import (
    Entry,
    Path,
    entries,
    entries_saved,
    gather,
    held,
    part_of,
    put,
    same_solvers,
    solvers,
    stored_dtype,
)
from soframe.strategies.work import BlockPlacement

FORMAT = "soframe.Preconditioner"
VERSION = 4
KEYS = ("step", "owed_statistics", "scaling", "counters", "history", "blocks")


def save(placed: PlacedBlocks, header: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state, the same on every rank; a collective if tensors are spread over ranks."""
    backend = placed.backend
    everyone = set(range(backend.world_size))
    state = {**header, "blocks": {}}
    if any(_is_spread(place) for place in placed.placement.blocks):
        # A backend that can, raises an error if a rank does not call.
        backend.meet("Preconditioner.state_dict()")
    for block, place in placed:
        block_entries, tensors = present(placed, block, place)
        # Tensors that every rank holds are not sent.
        spread = [entry for entry in block_entries if entry.holders != everyone]
        tensors.update(gather(backend, block, spread, tensors, "state"))
        saved = state["blocks"][block.name] = {
            **header["blocks"][block.name],
            "factors": {},
            "second_order": {},
            "state": {},
        }
        if block.solved:
            saved["second_order"] = {factor: {} for factor in block.tensors}
        for entry in block_entries:
            *parents, name = entry.path
            target = saved
            for parent in parents:
                target = target[parent]
            target[name] = lasting(entry.path, tensors[entry.path])
    return state


def _is_spread(place: BlockPlacement) -> bool:
    """Return whether a rank lacks tensors of a block, or has statistics of its own."""
    if place.deferred:
        return True
    everyone = set(place.everyone)
    holders = [place.gradient_workers, *map(place.holding, range(len(place.owners)))]
    return any(set(ranks) != everyone for ranks in holders)


def present(
    placed: PlacedBlocks, block: Block, place: BlockPlacement
) -> tuple[list[Entry], dict[Path, Tensor]]:
    """Return the tensors that a block has now, and the ones on this rank."""
    # A collective if statistics are deferred: they are reduced.
    masses = block.record.masses
    factors = settled(placed, block.stack, (block.member,), "state") if masses else {}
    tensors = held(block, {name: t for name, t in factors.items() if name in masses})
    # It is saved as solved only if all its factors are; otherwise the next step solves it.
    solved, updates = block.solved, block.record.updates
    return list(entries(block, place, factors=masses, solved=solved, updates=updates)), tensors


def lasting(path: Path, tensor: Tensor) -> Tensor:
    """Return a tensor that later steps do not change, as they change all but second-order data."""
    return tensor if path[0] == "second_order" else tensor.clone()


def of_block(block: Block) -> dict[str, Any]:
    """Return the part of a block in a state without tensors."""
    return {
        "shape": list(block.shape),
        "method": describe(block.method),
        "solver": describe(block.solver),
        "solvers": solvers(block),
        "masses": {name: list(masses) for name, masses in block.record.masses.items()},
        "updates": block.record.updates,
    }


def _check_names(saved: Set[str], blocks: Sequence[Block], frozen: Set[str]) -> None:
    """Raise ValueError unless a state has the expected blocks, but for frozen ones."""
    # What was frozen before construction has no block, here or in the state. Blocks have the name
    # of a parameter or module, perhaps with a part's behind it, as "attention.out_proj_weight".
    lacking = {block.name for block in blocks if not block.frozen} - saved
    others = saved - {block.name for block in blocks}
    strange = {n for n in others if frozen.isdisjoint((n, n.rpartition(".")[0]))}
    if lacking or strange:
        raise ValueError(
            f"the state is of another model or another choice of layers: it lacks "
            f"{sorted(lacking) or 'nothing'} and has "
            f"{sorted(strange) or 'nothing'} besides: choose the same layers, and freeze "
            f"the same parameters before the preconditioner is built, and others afterwards"
        )


@checksums.reading()
def check_header(state: Any, blocks: Sequence[Block], scaling: str, frozen: Set[str]) -> None:
    """Raise ValueError unless a state, perhaps without tensors, is complete and fits the blocks."""
    _check_keys(state)
    _check_names(state["blocks"].keys(), blocks, frozen)
    checksums.verify(state)
    if state["scaling"] != scaling:
        raise ValueError(
            f"the state was made with scaling={state['scaling']!r}, not {scaling!r}: the factors "
            f"differ by constants"
        )
    for block in blocks:
        if block.name in state["blocks"]:
            _check_block(state["blocks"][block.name], block)


def _check_keys(state: Any) -> None:
    """Raise ValueError unless a state is of this version, with all of its entries."""
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise ValueError("this is not the state of a soframe.Preconditioner")
    if state.get("version") != VERSION:
        raise ValueError(
            f"the state has version {state.get('version')!r}, and this soframe reads version "
            f"{VERSION}: load it with the soframe that wrote it"
        )
    if missing := [key for key in (*KEYS, checksums.KEY) if key not in state]:
        raise ValueError(f"the state is truncated: it lacks {', '.join(missing)}")


def _check_block(saved: Mapping[str, Any], block: Block) -> None:
    """Raise ValueError unless shape, method and bases equal a block's."""
    name, method = block.name, describe(block.method)
    if saved["shape"] != list(block.shape):
        raise ValueError(
            f"block {name!r} has shape {saved['shape']} in the state and {list(block.shape)} in "
            f"the model: load the state of this model, or build the model that was saved"
        )
    if saved["method"] != method:
        raise ValueError(f"block {name!r} was made by {saved['method']}, and is now by {method}")
    if saved["updates"] and block.method.rebases and not same_solvers(saved, block):
        raise ValueError(
            f"block {name!r} was solved by {saved['solver']}, and is now by "
            f"{describe(block.solver)}: the state of {method} is in the bases of the last solve, "
            f"which another solver cannot use. Pass the solver= that it was solved by"
        )


def check(
    state: Any, tensors: Mapping[str, Tensor], placed: PlacedBlocks, *, everywhere: bool
) -> None:
    """Raise ValueError if tensors for this rank, or with `everywhere` for any rank, are missing."""
    for block, place in placed:
        for entry in entries_saved(block, place, state):
            if not everywhere and placed.rank not in entry.holders:
                continue
            name = entry.name_in(block)
            tensor, shape, got = tensors.get(name), tuple(entry.spec.shape), "missing"
            if tensor is not None:
                if tensor.is_floating_point() and tuple(tensor.shape) == shape:
                    continue
                got = f"{tensor.dtype}, {tuple(tensor.shape)}"
            raise ValueError(
                f"the state is damaged: {name} is {got}, not a floating-point tensor of shape "
                f"{shape}"
            )


def load(
    state: Callable[[], tuple[Mapping[str, Any], Mapping[str, Tensor]]],
    placed: PlacedBlocks,
    stages: Stages = ALONE,
) -> Mapping[str, Any]:
    """Load the result of ``state`` on every rank; if it raises on one rank, load on none."""
    checked: list[tuple[Mapping[str, Any], Mapping[str, Tensor]]] = []

    def common() -> str:
        return str(checked[0][0][checksums.KEY]["plain"])

    def step() -> str:
        return f"{checked[0][0]['step']} {checked[0][0]['owed_statistics']}"

    agree(placed.backend, lambda: checked.append(state()), common, stages, step)
    ((saved, tensors),) = checked
    # All ranks have a valid state by now; nothing was changed before.
    for stack in placed.stacks:
        stack.clear()
    for block, place in placed:
        of_block = part_of(saved, block)
        block_entries = entries_saved(block, place, saved)
        kept: dict[Path, Tensor] = {}
        for entry in block_entries:
            if placed.rank in entry.holders:
                tensor, dtype = tensors[entry.name_in(block)], stored_dtype(block, entry.path)
                # A copy: steps change tensors in place, and the state is the caller's.
                kept[entry.path] = tensor.detach().to(block.device, dtype, copy=True)
        solved = any(entry.path[0] == "second_order" for entry in block_entries)
        masses = {name: tuple(masses) for name, masses in of_block["masses"].items()}
        put(block, place, kept, masses=masses, solved=solved, updates=of_block["updates"])
    return saved


def agree(
    backend: Backend,
    check: Callable[[], object],
    common: Callable[[], str],
    stages: Stages = ALONE,
    of_stages: Callable[[], str] = str,
) -> None:
    """Raise on every rank if ``check`` raises on one, or if ``common`` differs between ranks.

    In a pipeline this covers all stages; ``of_stages`` is the text that stages compare.
    """
    if stages.backend is not None:
        # The copies of each stage first; an error of theirs is then one of all stages.
        agree(stages.backend, lambda: agree(backend, check, common), of_stages)
        return
    backend.meet("loading the state of a preconditioner")
    try:
        check()
        text = common()
    except Exception:  # of any kind: the other ranks wait in the collective
        agree_on_state(backend, None)
        raise
    agree_on_state(backend, text)


def history(blocks: Sequence[Block]) -> dict[str, dict[str, dict[str, int]]]:
    """Return the steps of the last statistics and solves: kind -> block -> factor -> step.

    Blocks that missed their last turn are under ``"missed"``.
    """
    steps: dict[str, dict[str, dict[str, int]]] = {"statistics": {}, "solves": {}}
    for block in blocks:
        if block.record.statistics_at:
            steps["statistics"][block.name] = dict(block.record.statistics_at)
        if block.record.solved_at:
            steps["solves"][block.name] = dict(block.record.solved_at)
        if block.record.missed:
            steps.setdefault("missed", {})[block.name] = {"turn": block.record.missed}
    return steps


def load_history(saved: Mapping[str, Any], blocks: Sequence[Block]) -> None:
    """Restore a `history`."""
    for block in blocks:
        block.record.statistics_at = dict(saved.get("statistics", {}).get(block.name, {}))
        block.record.solved_at = dict(saved.get("solves", {}).get(block.name, {}))
        block.record.missed = saved.get("missed", {}).get(block.name, {}).get("turn", 0)


def dampings(
    blocks: Sequence[Block], former: Mapping[str, float | None]
) -> dict[str, float | None]:
    """Return the dampings of single blocks, by name; ``former`` has those of frozen layers."""
    every = {**former, **{block.name: block.record.damping for block in blocks}}
    return {name: float(damping) for name, damping in every.items() if damping is not None}


def memory_usage(
    placed: PlacedBlocks, window: Window, under_way: Sequence[Tensor] | None = None
) -> dict[str, int]:
    """Return the bytes on this rank by kind, and their total."""
    stacks = placed.stacks
    in_flight = _in_flight(stacks)  # before factors are read, which waits for them
    usage = dict.fromkeys(("factors", "accumulators", "second_order", "statistics"), 0)
    if any(block.states for block in placed.blocks):
        usage["state"] = 0
    for stack in stacks:
        usage["factors"] += _bytes(stack.factors)
        usage["accumulators"] += _bytes(stack.accumulators)
        usage["second_order"] += sum(map(_bytes, stack.data.values()))
        if "state" in usage:
            usage["state"] += _bytes(stack.state)
    for sums in window.sums.values():
        sums.multiply()
        usage["statistics"] += _bytes(sums.totals)
    if under_way is not None:
        usage["under_way"] = sum(tensor.nbytes for tensor in under_way)
    if in_flight:
        usage["in_flight"] = in_flight
    return {**usage, "total": sum(usage.values())}


def _in_flight(stacks: Iterable[Stack]) -> int:
    """Return the bytes of the buffers of reductions under way; some are of several stacks."""
    pending = set(itertools.chain.from_iterable(stack.pending for stack in stacks))
    return sum(transfer.nbytes for transfer in pending if not transfer.done)


def _bytes(tensors: Mapping[Any, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
