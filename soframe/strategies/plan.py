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
    for work, place in zip(placement.work, placement.blocks, strict=True):
        if used is not None and work.name not in used:
            continue
        item = ITEM_BYTES[work.dtype]
        for index, factor in enumerate(work.factors):
            if place.holds(rank, index):
                numel = factor.packed_numel if place.packed else prod(factor.shape)
                numel = prod(factor.shape) if factor.kind != "psd" else numel
                usage["factors"] += item * numel
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
    """Return the bytes of the sums that a rank gathers while a window is under way.

    Args:
        placement: The placement.
        rank: The rank.
        due: The blocks that take statistics in it, and are used; None for all.
    """
    return sum(
        ITEM_BYTES[work.dtype] * prod(factor.shape)
        for work, place in zip(placement.work, placement.blocks, strict=True)
        for index, factor in enumerate(work.factors)
        if factor.captured and place.contributes(rank, index) and (due is None or work.name in due)
    )


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
            _count(phases, "reduce", _reductions(together, rank, first))
        for after in (False, True):
            _count(phases, "share", _shares([(w, p) for w, p in due if w.after == after], rank))
        _count(phases, "exchange", _exchanges(active, rank, fused))
        _count(phases, "gradients", _parts(active, rank, back=False))
        _count(phases, "exchange", _parts(active, rank, back=True))
        if any(work.shards for work, _ in active):
            # An inner product in float64, and squares in the dtype of the first block.
            _count(phases, "agree", [_AGREED_BYTES] * ("kl" in clips))
            _count(phases, "agree", [ITEM_BYTES[active[0][0].dtype]] * ("norm" in clips))
        if local is not None:
            _count(phases, "gradients", _averages(active, local, fused))
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


def _reductions(
    pairs: Collection[tuple[BlockWork, BlockPlacement]], rank: int, first: bool
) -> list[int]:
    sums: list[tuple[Hashable, int]] = []
    copies: list[tuple[Hashable, int]] = []
    for work, place in pairs:
        wire = place.wire or work.dtype
        for index, factor in enumerate(work.factors):
            way = place.reductions[index]
            size = factor.packed_numel * ITEM_BYTES[wire]
            if not factor.captured or (first and factor.needs):
                continue
            if rank in way.group and len(way.group) > 1:
                sums.append(((way.group, way.destination, wire, work.device), size))
            if rank in way.spread and len(way.spread) > 1:
                copies.append(((way.spread, way.destination, wire, work.device), size))
    return _calls(sums) + _calls(copies)


def _shares(pairs: Collection[tuple[BlockWork, BlockPlacement]], rank: int) -> list[int]:
    parcels: list[tuple[Hashable, int]] = []
    for work, place in pairs:
        for index, specs in enumerate(work.second_order):
            owner, group = place.owners[index], place.sharing(index)
            if work.factors[index].name in work.unsolved:
                continue
            size = ITEM_BYTES[work.dtype] * sum(spec.packed_numel for spec in specs)
            if rank in group and len(group) > 1:
                parcels.append(((owner, group, work.dtype, work.device), size))
    return _calls(parcels)


def _exchanges(
    pairs: Collection[tuple[BlockWork, BlockPlacement]], rank: int, fused: bool
) -> list[int]:
    parcels: list[tuple[Hashable, int]] = []
    for work, place in pairs:
        for worker in place.gradient_workers if not work.shards else ():
            group = exchange_group(worker, place.sources)
            if rank in group and len(group) > 1:
                size = ITEM_BYTES[work.dtype] * prod(work.shape)
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


def _averages(
    active: Collection[tuple[BlockWork, BlockPlacement]], local: LocalPlan, fused: bool
) -> list[int]:
    items: list[tuple[Hashable, int]] = []
    device = "cpu"
    for work, place in active:
        workers, device = place.gradient_workers, work.device
        to: object = None
        if len(workers) == 1:
            to = "owners" if fused else workers[0]
        items.append(((to, work.dtype, device), ITEM_BYTES[work.dtype] * prod(work.shape)))
    items += [((None, dtype, device), ITEM_BYTES[dtype] * size) for size, dtype in local.rest]
    return _calls(items)


def _calls(items: list[tuple[Hashable, int]]) -> list[int]:
    """The bytes of each collective."""
    return [sum(items[index][1] for index in bucket) for bucket in fill(items)]
