"""What a placement costs, counted from shapes: bytes that a rank holds, bytes that it sends.

Everything here is what the step does, in the step's order and with its buffers, but on numbers.
Bytes of traffic are those of the tensors that a rank gives to or receives from a collective, as
`Backend.traffic` counts them, not what an engine's algorithm makes of them.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable
from math import prod

from soframe.strategies.buckets import fill
from soframe.strategies.local import LocalPlan
from soframe.strategies.placement import (
    ITEM_BYTES,
    BlockPlacement,
    BlockWork,
    Placement,
    Traffic,
    exchange_group,
)

_FLAGS = 7  # of every step, see `soframe.comm.agreement.Poll`
_REACHED, _REACHED_BLOCK = 2, 2  # see `soframe.gradients.effect.Effect.said`
_AGREED_BYTES = 8  # what is agreed travels in float64,
_OUTCOME_BYTES = 4  # the outcomes of solves in float32
_OUTCOMES = 2  # failed, retried


def memory(
    placement: Placement, rank: int, *, used: Collection[str] | None = None
) -> dict[str, int]:
    """See `Placement.memory`.

    Args:
        placement: The placement.
        rank: The rank.
        used: The blocks in use; None for all.

    Returns:
        Bytes by category.
    """
    usage = {"factors": 0, "accumulators": 0, "second_order": 0, "statistics": 0}
    for work, place in _in_stacks(placement, used):
        item = ITEM_BYTES[work.dtype]
        for index, factor in enumerate(work.factors):
            if place.holds(rank, index):
                packed = place.packed and factor.kind == "psd"
                usage["factors"] += item * (factor.packed_numel if packed else prod(factor.shape))
            if place.deferred and factor.captured and place.contributes(rank, index):
                usage["accumulators"] += item * factor.packed_numel
        for index, specs in enumerate(work.second_order):
            if rank in place.needing(index):
                usage["second_order"] += item * sum(prod(spec.shape) for spec in specs)
        if rank in place.gradient_workers and work.state:
            numel = sum(prod(spec.shape) for spec in work.state)
            usage["state"] = usage.get("state", 0) + item * numel
    if any(work.state for work in placement.work):
        usage.setdefault("state", 0)
    return {**usage, "total": sum(usage.values())}


def window(placement: Placement, rank: int, due: Collection[str] | None = None) -> int:
    """Return the bytes of the sums that a rank keeps while a window is under way.

    Args:
        placement: The placement.
        rank: The rank.
        due: The blocks that take statistics in it, and are used; None for all.
    """
    return sum(
        ITEM_BYTES[work.dtype] * prod(factor.shape)
        for work, place in _in_stacks(placement, due)
        for index, factor in enumerate(work.factors)
        if factor.captured and place.contributes(rank, index)
    )


def _in_stacks(
    placement: Placement, used: Collection[str] | None
) -> list[tuple[BlockWork, BlockPlacement]]:
    """Return the blocks of all stacks with a block in use: a stack's tensors are of all of them."""
    pairs = list(zip(placement.work, placement.blocks, strict=True))
    return [
        pairs[index]
        for members in placement.stacks
        if used is None or any(pairs[member][0].name in used for member in members)
        for index in members
    ]


Stacked = list[tuple[BlockWork, BlockPlacement, int]]
"""Blocks of a stack that take part in a phase: one of them, and how many they are."""


def _stacked(
    placement: Placement, pairs: Collection[tuple[BlockWork, BlockPlacement]], *, owners: bool
) -> Stacked:
    """Return the stacks of some blocks, in the order of all stacks.

    Args:
        placement: The placement.
        pairs: The blocks.
        owners: Whether blocks of different owners count apart, as they do in solves.
    """
    names = {work.name for work, _ in pairs}
    found: Stacked = []
    for members in placement.stacks:
        by_owners: dict[object, list[int]] = {}
        for index in members:
            if placement.work[index].name in names:
                key = placement.blocks[index].owners if owners else ()
                by_owners.setdefault(key, []).append(index)
        for own in by_owners.values():
            found.append((placement.work[own[0]], placement.blocks[own[0]], len(own)))
    return found


def traffic(
    placement: Placement,
    rank: int,
    statistics: bool | Collection[str] = False,
    solve: bool | Collection[str] = False,
    used: Collection[str] | None = None,
    local: LocalPlan | None = None,
    fused: bool = False,
    first: bool = False,
    clips: Collection[str] = (),
) -> Traffic:
    """See `Placement.traffic`.

    Args:
        placement: The placement.
        rank: The rank.
        statistics: Whether it is a statistics step; or the blocks that take them in it.
        solve: Whether it is a solve step; or the blocks that are solved in it.
        used: The blocks in use; None for all.
        local: What else there is with local gradients.
        fused: Whether gradients travel fused.
        first: Whether nothing has been solved before this step.
        clips: Which clips are on.

    Returns:
        Phase -> bytes and calls.
    """
    pairs = list(zip(placement.work, placement.blocks, strict=True))
    active = [(w, p) for w, p in pairs if used is None or w.name in used]
    due = _named(active, solve)
    phases: Traffic = {}
    if placement.world_size > 1:
        observed = [(w, p) for w, p in _named(pairs, statistics) if w.captured]
        weights = sum(_weights(w, p) for w, p in observed)
        taking = len(observed)
        reached = _REACHED + _REACHED_BLOCK * taking if taking else 0
        present = _present(pairs, local) if local is not None else 0
        _count(phases, "agree", [_AGREED_BYTES * (_FLAGS + weights + present + reached)])
        for after in (False, True):
            turn = [(w, p) for w, p in due if w.after == after]
            _count(phases, "agree", _solve_agreements(turn))
        reduced = [(w, p) for w, p in due if p.deferred]
        reduced += [(w, p) for w, p in _named(active, statistics) if not p.deferred]
        for eager in (True, False):
            together = [(w, p) for w, p in reduced if p.deferred != eager]
            stacked = _stacked(placement, together, owners=False)
            _count(phases, "reduce", _reductions(stacked, rank, first))
        for after in (False, True):
            turn = [(w, p) for w, p in due if w.after == after]
            _count(phases, "share", _shares(_stacked(placement, turn, owners=True), rank))
        stacked = _stacked(placement, active, owners=False)
        _count(phases, "exchange", _exchanges(stacked, rank, fused))
        _count(phases, "gradients", _parts(active, rank, back=False))
        _count(phases, "exchange", _parts(active, rank, back=True))
        if any(work.shards for work, _ in active):
            # An inner product in float64, and squares in the dtype of the first block.
            _count(phases, "agree", [_AGREED_BYTES] * ("kl" in clips))
            _count(phases, "agree", [ITEM_BYTES[active[0][0].dtype]] * ("norm" in clips))
        if local is not None:
            _count(phases, "gradients", _averages(stacked, local, fused))
            # One inner product, in float64 whatever the dtype of the blocks is.
            _count(phases, "agree", [_AGREED_BYTES] * bool(active and local.kl_clip))
    total = {key: sum(count[key] for count in phases.values()) for key in ("bytes", "calls")}
    return {**phases, "total": total}


def _named(
    pairs: list[tuple[BlockWork, BlockPlacement]], names: bool | Collection[str]
) -> list[tuple[BlockWork, BlockPlacement]]:
    if isinstance(names, bool):
        return pairs if names else []
    return [(work, place) for work, place in pairs if work.name in names]


def _count(phases: Traffic, phase: str, calls: Iterable[int]) -> None:
    for size in calls:
        count = phases.setdefault(phase, {"bytes": 0, "calls": 0})
        count["bytes"] += size
        count["calls"] += 1


def _weights(work: BlockWork, place: BlockPlacement) -> int:
    """Numbers that say what a block's statistics weigh."""
    captured = [factor for factor in work.factors if factor.captured]
    unequal = any(factor.mean_over == "group rows" for factor in captured)
    return (len(captured) + 2 if place.contributors else 2) + work.shape.groups * unequal


def _solve_agreements(active: Collection[tuple[BlockWork, BlockPlacement]]) -> list[int]:
    traces = [
        factor.groups
        for work, place in active
        if place.traces_travel
        for factor in work.factors
        if factor.name not in work.unsolved
    ]
    jobs = sum(len(work.factors) - len(work.unsolved) for work, _ in active)
    if not jobs:
        return []
    return [_AGREED_BYTES * sum(traces)] * bool(traces) + [_OUTCOME_BYTES * _OUTCOMES * jobs]


def _reductions(stacked: Stacked, rank: int, first: bool) -> list[int]:
    sums: list[tuple[Hashable, int]] = []
    copies: list[tuple[Hashable, int]] = []
    for work, place, blocks in stacked:
        wire = place.wire or work.dtype
        for index, factor in enumerate(work.factors):
            way = place.reductions[index]
            size = blocks * factor.packed_numel * ITEM_BYTES[wire]
            if not factor.captured or (first and factor.needs):
                continue
            if rank in way.group and len(way.group) > 1:
                sums.append(((way.group, way.destination, wire, work.device), size))
            if rank in way.spread and len(way.spread) > 1:
                copies.append(((way.spread, way.destination, wire, work.device), size))
    return _calls(sums) + _calls(copies)


def _shares(stacked: Stacked, rank: int) -> list[int]:
    parcels: list[tuple[Hashable, int]] = []
    for work, place, blocks in stacked:
        for index, specs in enumerate(work.second_order):
            owner, group = place.owners[index], place.sharing(index)
            if work.factors[index].name in work.unsolved:
                continue
            size = ITEM_BYTES[work.dtype] * blocks * sum(spec.packed_numel for spec in specs)
            if rank in group and len(group) > 1:
                parcels.append(((owner, group, work.dtype, work.device), size))
    return _calls(parcels)


def _exchanges(stacked: Stacked, rank: int, fused: bool) -> list[int]:
    parcels: list[tuple[Hashable, int]] = []
    for work, place, blocks in stacked:
        for worker in place.gradient_workers if not work.shards else ():
            group = exchange_group(worker, place.sources)
            if rank in group and len(group) > 1:
                size = ITEM_BYTES[work.dtype] * blocks * prod(work.shape)
                source = None if fused and group == place.everyone else worker
                parcels.append(((source, group, work.dtype, work.device), size))
    return _calls(parcels)


def _parts(
    pairs: Collection[tuple[BlockWork, BlockPlacement]], rank: int, *, back: bool
) -> list[int]:
    """Parts of sharded tensors, on their way to gradient workers or back to all ranks."""
    items: list[tuple[Hashable, int]] = []
    carried: list[int] = []
    for work, place in pairs:
        way = (place.gradient_workers, place.sources if back else ())
        for shards in work.shards:
            if shards.travels(*way):
                dtype = work.dtype if back else shards.dtype
                items.append(((dtype, work.device), ITEM_BYTES[dtype] * shards.whole))
                carried.append(ITEM_BYTES[dtype] * shards.carried(rank, *way))
    return [sum(carried[index] for index in bucket) for bucket in fill(items)]


def _present(pairs: Collection[tuple[BlockWork, BlockPlacement]], local: LocalPlan) -> int:
    """Flags that say which gradients a rank has."""
    return sum(work.parameters for work, _ in pairs) + len(local.rest) + local.idle


def _averages(stacked: Stacked, local: LocalPlan, fused: bool) -> list[int]:
    items: list[tuple[Hashable, int]] = []
    device = "cpu"
    for work, place, blocks in stacked:
        workers, device = place.gradient_workers, work.device
        to: object = None
        if len(workers) == 1:
            to = "owners" if fused else workers[0]
        size = ITEM_BYTES[work.dtype] * blocks * prod(work.shape)
        items.append(((to, work.dtype, device), size))
    items += [((None, dtype, device), ITEM_BYTES[dtype] * size) for size, dtype in local.rest]
    return _calls(items)


def _calls(items: list[tuple[Hashable, int]]) -> list[int]:
    """The bytes of each collective."""
    return [sum(items[index][1] for index in bucket) for bucket in fill(items)]
