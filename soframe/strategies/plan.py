"""The cost of a placement from shapes: bytes that a rank holds, and bytes that it sends.

The plan follows the step's order and its buffers. Traffic counts the tensors that a rank gives to
or receives from a collective, as `Backend.traffic` does, not the messages of the engine's
algorithm.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from operator import itemgetter
from typing import NamedTuple

from soframe.specs import numel
from soframe.strategies.buckets import in_buckets
from soframe.strategies.work import (
    ITEM_BYTES,
    BlockPlacement,
    BlockWork,
    Pairs,
    Stacked,
    Traffic,
    with_total,
)

Stacks = Sequence[Sequence[int]]  # the blocks of each stack by index, see `Placement.stacks`


@dataclass(frozen=True)
class LocalPlan:
    """The gradients that a step averages beside the blocks', with ``gradients="local"``.

    Attributes:
        rest: The elements and the dtype of each parameter without a block that has a gradient.
        idle: The number of parameters without a block and without a gradient.
        kl_clip: Whether steps are clipped by their KL divergence.
    """

    rest: tuple[tuple[int, str], ...] = ()
    idle: int = 0
    kl_clip: bool = True


class Route(NamedTuple):
    """A route of tensors: tensors of equal routes share buffers."""

    operation: str  # the collective, by its name in `soframe.Backend`
    group: tuple[int, ...]  # the ranks that take part
    root: int | None = None  # source of a broadcast or destination of a reduction; None for all
    dtype: str = "float64"  # the dtype on the wire
    device: str = "cpu"


class Message(NamedTuple):
    """A collective that a rank enters, and the bytes of its tensor."""

    route: Route
    size: int


Items = list[Message]  # tensors that may share a buffer, each with its route and bytes

_FLAGS = 7  # of every step, see `soframe.comm.report.Report`
_REACHED, _REACHED_BLOCK = 2, 2  # see `soframe.step.effect.Effect.flags`
_AGREED_BYTES = 8  # statuses are reduced in float64,
_OUTCOME_BYTES = 4  # outcomes of solves in float32


def memory(
    pairs: Pairs, stacks: Stacks, rank: int, used: Collection[str] | None = None
) -> dict[str, int]:
    """Return the bytes that a rank holds after a solve, see `Placement.memory`."""
    usage = {"factors": 0, "accumulators": 0, "second_order": 0, "statistics": 0}
    if any(work.state for work, _ in pairs):
        usage["state"] = 0
    for work, place in _in_stacks(pairs, stacks, used):
        for kind, size in _held(work, place, rank):
            usage[kind] += size
    return {**usage, "total": sum(usage.values())}


def _held(work: BlockWork, place: BlockPlacement, rank: int) -> Iterator[tuple[str, int]]:
    """Yield the bytes of each tensor of a block on a rank, with their kinds."""
    item = ITEM_BYTES[work.dtype]
    for index, factor in enumerate(work.factors):
        if place.holds(rank, index):
            kept = prod(factor.kept_shape(packed=place.packed))
            yield "factors", ITEM_BYTES[work.factor_dtype] * kept
        if place.deferred and factor.captured and place.contributes(rank, index):
            yield "accumulators", item * factor.packed_numel
    for index, specs in enumerate(work.second_order):
        if rank in place.needing[index]:
            yield "second_order", item * numel(specs)
    if rank in place.gradient_workers and work.state:
        yield "state", ITEM_BYTES[work.state_dtype] * numel(work.state)


def _in_stacks(pairs: Pairs, stacks: Stacks, used: Collection[str] | None) -> Pairs:
    """Return all blocks of stacks with a used block: a stack's tensors hold all its blocks."""
    names = {work.name for work, _ in _named(pairs, used)}
    blocks: list[tuple[BlockWork, BlockPlacement]] = []
    for members in stacks:
        stack = [pairs[index] for index in members]
        if not names.isdisjoint(work.name for work, _ in stack):
            blocks += stack
    return blocks


@dataclass(frozen=True)
class Step:
    """The collectives of one step, phase by phase; arguments as in `Placement.traffic`.

    Each method returns the collectives that this rank enters.
    """

    pairs: Pairs
    stacks: Stacks
    rank: int
    statistics: bool | Collection[str] = False
    solve: bool | Collection[str] = False
    used: Collection[str] | None = None
    local: LocalPlan | None = None
    fused: bool = False
    first: bool = False
    clips: Collection[str] = ()

    def traffic(self) -> Traffic:
        """Return phase -> bytes and calls, and their total."""
        phases: Traffic = {}
        for phase, messages in self.phases():
            for message in messages:
                count = phases.setdefault(phase, {"bytes": 0, "calls": 0})
                count["bytes"] += message.size
                count["calls"] += 1
        return with_total(phases)

    def phases(self) -> list[tuple[str, list[Message]]]:
        """Return the collectives in the order of the step, with their phases."""
        if len(self.everyone) == 1:
            return []
        active = _named(self.pairs, self.used)
        observed = _named(active, self.statistics)
        due = _named(active, self.solve)
        return [
            ("agree", self.status()),
            ("reduce", self.reductions(observed, deferred=False)),
            ("reduce", self.reductions(due, deferred=True)),
            ("gradients", self.averages(active)),
            ("gradients", self.parts(active, back=False)),
            ("agree", self.agreements(due, after=False)),
            ("share", self.shares(due, after=False)),
            ("exchange", self.updates(active)),
            ("agree", self.norms(active)),
            ("exchange", self.parts(active, back=True)),
            ("agree", self.agreements(due, after=True)),
            ("share", self.shares(due, after=True)),
        ]

    @property
    def everyone(self) -> tuple[int, ...]:
        """All ranks; empty without a block."""
        return self.pairs[0][1].everyone if self.pairs else ()

    def _agreed(self, size: int) -> Message:
        """An all-reduce over all ranks."""
        return Message(Route("all_reduce", self.everyone), size)

    def status(self) -> list[Message]:
        """The status all-reduce."""
        numbers, observed = _FLAGS, 0
        for work, place in _named(self.pairs, self.statistics):
            if work.captured:
                numbers += _weights(work, place)
                observed += 1
        if observed:
            numbers += _REACHED + _REACHED_BLOCK * observed
        flagged = [work for work, _ in self.pairs]  # one flag for each gradient
        if self.local is None:
            flagged = [work for work in flagged if not work.remembers]
        else:
            numbers += len(self.local.rest) + self.local.idle
        numbers += sum(work.parameters for work in flagged)
        return [self._agreed(_AGREED_BYTES * numbers)]

    def _stacked(self, pairs: Pairs, *, owners: bool = False) -> list[Stacked]:
        """Group blocks by stack, and by owner too for solves."""
        names = {work.name for work, _ in pairs}
        groups: list[Stacked] = []
        for members in self.stacks:
            alike: dict[object, list[int]] = {}
            for index in members:
                work, place = self.pairs[index]
                if work.name in names:
                    alike.setdefault(place.owners if owners else (), []).append(index)
            groups += [Stacked.of(self.pairs, indices) for indices in alike.values()]
        return groups

    def reductions(self, pairs: Pairs, *, deferred: bool) -> list[Message]:
        """The statistics of blocks that reduce them at once, or of the deferred ones."""
        sums: Items = []
        copies: Items = []
        for group in self._stacked(pairs):
            work, place = group.work, group.place
            if place.deferred != deferred:
                continue
            wire = place.wire or work.dtype
            for factor, way in zip(work.factors, place.reductions, strict=True):
                if not factor.captured or (self.first and factor.needs):
                    continue
                size = len(group.members) * factor.packed_numel * ITEM_BYTES[wire]
                operation = "all_reduce" if way.destination is None else "reduce"
                adding = Route(operation, way.group, way.destination, wire, work.device)
                sums += self._entered(adding, size)
                spreading = adding._replace(operation="broadcast", group=way.spread)
                copies += self._entered(spreading, size)
        return _calls(sums) + _calls(copies)

    def _entered(self, route: Route, size: int) -> Items:
        """Return a message of this route if this rank sends or receives it, or nothing."""
        if len(route.group) > 1 and self.rank in route.group:
            return [Message(route, size)]
        return []

    def shares(self, pairs: Pairs, *, after: bool) -> list[Message]:
        """The second-order data of blocks that are solved before their updates, or after."""
        parcels: Items = []
        for group in self._stacked(pairs, owners=True):
            work, place = group.work, group.place
            if work.after != after:
                continue
            for index, specs in enumerate(work.second_order):
                if work.factors[index].name in work.unsolved:
                    continue
                owner, ranks = place.owners[index], place.sharing[index]
                size = group.item * len(group.members) * numel(specs, packed=True)
                route = Route("broadcast", ranks, owner, work.dtype, work.device)
                parcels += self._entered(route, size)
        return _calls(parcels)

    def updates(self, pairs: Pairs) -> list[Message]:
        """The updates of blocks whose parameters are whole, and parcels."""
        parcels: Items = []
        for group in self._stacked(pairs):
            work, place = group.work, group.place
            worker = place.sources[self.rank]
            ranks = place.exchanges[worker]
            if work.parcel:
                entries = len(group.members) * numel(work.parcel, packed=True)
            elif work.shards:
                continue  # see `parts`
            else:
                entries = group.entries
            route = Route("broadcast", ranks, worker, work.dtype, work.device)
            parcels += self._entered(route, group.item * entries)
        if not self.fused:
            return _calls(parcels)

        # Parcels to all ranks share buffers, from any source.
        def buffer(parcel: Message) -> Message:
            if parcel.route.group != self.everyone:
                return parcel
            return parcel._replace(route=parcel.route._replace(root=None))

        return list(map(self._gathered, in_buckets(parcels, buffer)))

    @staticmethod
    def _gathered(parcels: Items) -> Message:
        route, size = parcels[0].route, sum(parcel.size for parcel in parcels)
        if len({parcel.route.root for parcel in parcels}) > 1:
            route = route._replace(operation="all_gather_shares", root=None)
        return Message(route, size)

    def parts(self, pairs: Pairs, *, back: bool) -> list[Message]:
        """The parts of sharded gradients to gradient workers, or of updates back to all ranks."""
        items: list[tuple[Message, int]] = []  # each with the bytes that this rank sends
        for work, place in pairs:
            if back and work.parcel:
                continue  # each rank makes its parts
            workers, sources = place.gradient_workers, place.sources
            if not back:
                sources = ()
            for shards in work.shards:
                if not shards.travels(workers, sources):
                    continue
                dtype = work.dtype if back else shards.dtype
                route = Route("all_to_all", place.everyone, None, dtype, work.device)
                message = Message(route, ITEM_BYTES[dtype] * shards.whole)
                moves = shards.moves(self.rank, workers, sources)
                carried = sum(shards.numel(move.owner) for move in moves)
                items.append((message, ITEM_BYTES[dtype] * carried))
        calls: list[Message] = []
        for bucket in in_buckets(items, itemgetter(0)):
            message, _ = bucket[0]
            calls.append(message._replace(size=sum(carried for _, carried in bucket)))
        return calls

    def averages(self, pairs: Pairs) -> list[Message]:
        """The gradients that the step averages with ``Distribution(gradients="local")``."""
        if self.local is None:
            return []
        items: Items = []
        route = Route("all_reduce", self.everyone)
        for group in self._stacked(pairs):
            work, workers = group.work, group.place.gradient_workers
            route = route._replace(dtype=work.dtype, device=work.device)
            way = route
            if len(workers) == 1 and self.fused:
                way = route._replace(operation="reduce_scatter")
            elif len(workers) == 1:
                way = route._replace(operation="reduce", root=workers[0])
            items.append(Message(way, group.gradient))
        for size, dtype in self.local.rest:
            items.append(Message(route._replace(dtype=dtype), ITEM_BYTES[dtype] * size))
        return _calls(items)

    def norms(self, pairs: Pairs) -> list[Message]:
        """The inner products and norms that clips reduce."""
        sums = 0  # in float64
        if any(work.shards for work, _ in pairs):
            sums += len(self.clips)
        if self.local is not None and self.local.kl_clip and pairs:
            sums += 1
        return list(itertools.repeat(self._agreed(_AGREED_BYTES), sums))

    def agreements(self, pairs: Pairs, *, after: bool) -> list[Message]:
        """The traces that travel before solves, and the outcomes of solves."""
        jobs, traces = 0, 0
        for work, place in pairs:
            if work.after != after:
                continue
            solved = [factor for factor in work.factors if factor.name not in work.unsolved]
            jobs += len(solved)
            if place.traces_travel:
                traces += sum(factor.groups for factor in solved)
        messages: list[Message] = []
        if traces:
            messages.append(self._agreed(_AGREED_BYTES * traces))
        if jobs:
            messages.append(self._agreed(_OUTCOME_BYTES * jobs))
        return messages


def _named(pairs: Pairs, names: bool | Collection[str] | None) -> Pairs:
    """Return the blocks with some names: all for True or None, none for False."""
    if names is None or names is True:
        return pairs
    if names is False:
        return []
    return [(work, place) for work, place in pairs if work.name in names]


def _weights(work: BlockWork, place: BlockPlacement) -> int:
    """Return the number of EMA weights of a block in the status."""
    captured = [factor for factor in work.factors if factor.captured]
    weights = 2
    if place.contributors:
        weights += len(captured)
    if any(factor.mean_over == "group rows" for factor in captured):
        weights += work.shape.groups
    return weights


def _calls(items: Items) -> list[Message]:
    """Return each collective, in buffers as the step fills them."""
    calls: list[Message] = []
    for bucket in in_buckets(items, lambda message: message):
        size = sum(message.size for message in bucket)
        calls.append(Message(bucket[0].route, size))
    return calls
