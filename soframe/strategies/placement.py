"""A placement: each rank's role for every block, as plain data.

It is computed from shapes and a number of ranks alone, so the same object is executed by the
preconditioner, priced for thousands of ranks on a laptop, printed, and tested. Ranks are numbers
within the process group of the preconditioner. Ranks compare digests before the first collective.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from math import prod
from typing import TypeVar

from soframe.specs import FactorSpec
from soframe.strategies import plan
from soframe.strategies.plan import LocalPlan
from soframe.strategies.work import (
    DIGESTED_WORK,
    ITEM_BYTES,
    LONGEST,
    UNNAMED_PLACE,
    UNNAMED_WORK,
    BlockPlacement,
    BlockWork,
    Pairs,
    Stacked,
    Traffic,
)
from soframe.text import alike, format_table

T = TypeVar("T")


@dataclass(frozen=True)
class Placement:
    """The role of every rank for every block.

    Attributes:
        strategy: The strategy's name, for people.
        world_size: The number of ranks.
        work: The blocks.
        blocks: The placement of each block, in the order of ``work``.
        notes: Choices of the strategy where a request could not be met, with the reason.
    """

    strategy: str
    world_size: int
    work: tuple[BlockWork, ...]
    blocks: tuple[BlockPlacement, ...]
    notes: tuple[str, ...] = ()

    @property
    def pairs(self) -> list[tuple[BlockWork, BlockPlacement]]:
        """Each block's work with its placement."""
        return list(zip(self.work, self.blocks, strict=True))

    def validate(self) -> None:
        """Check that the placement can be executed.

        Raises:
            ValueError: If it cannot; the message has the strategy and the block.
        """
        if [work.name for work in self.work] != [block.block for block in self.blocks]:
            raise ValueError(
                f"strategy {self.strategy!r}: the placement's blocks are not those of the work, in "
                f"its order"
            )
        for work, block in self._firsts:
            checks = chain(
                _workers(block, self.world_size),
                _statistics_places(work, block, self.world_size),
                _residents(work, block),
            )
            for good, problem in checks:
                if not good:
                    raise ValueError(f"strategy {self.strategy!r}, block {work.name!r}: {problem}")

    @cached_property
    def kinds(self) -> list[list[int]]:
        """Indices of the blocks of each kind, which have the same work and place, but for names."""
        kinds: dict[object, list[int]] = {}
        for index, (work, block) in enumerate(self.pairs):
            kinds.setdefault((UNNAMED_WORK(work), UNNAMED_PLACE(block)), []).append(index)
        return list(kinds.values())

    @property
    def _firsts(self) -> list[tuple[BlockWork, BlockPlacement]]:
        """The first block of each kind."""
        return [(self.work[kind[0]], self.blocks[kind[0]]) for kind in self.kinds]

    @cached_property
    def stacks(self) -> list[list[int]]:
        """Indices of the blocks of each stack, which are alike and placed alike but for owners."""
        stacks: dict[object, list[int]] = {}
        entries = Counter[object]()
        for kind, (work, block) in zip(self.kinds, self._firsts, strict=True):
            # Where some ranks hold a factor, its statistics are sent to the owner.
            place = replace(block, block="", owners=block.owners if block.holders else ())
            for index in kind:
                key: object = (work.alike, place) if work.stackable else index
                if work.elementwise:
                    entries[key] += prod(work.shape)
                    key = key, entries[key] // LONGEST
                stacks.setdefault(key, []).append(index)
        return sorted(map(sorted, stacks.values()))

    @cached_property
    def stacked(self) -> list[Stacked]:
        """The stacks, each with the work and the place of its first block."""
        pairs = self.pairs
        return [Stacked.of(pairs, members) for members in self.stacks]

    @property
    def digest(self) -> bytes:
        """The placement's SHA-256; must be equal on all ranks."""
        text_of: dict[int, str] = {}
        for kind, (work, block) in zip(self.kinds, self._firsts, strict=True):
            text = repr([list(DIGESTED_WORK(work)), UNNAMED_PLACE(block)])
            text_of.update(dict.fromkeys(kind, text))
        blocks = [(work.name, text_of[index]) for index, work in enumerate(self.work)]
        everything = [self.strategy, self.world_size, blocks, self.notes]
        return hashlib.sha256(repr(everything).encode()).digest()

    def groups(self) -> list[tuple[int, ...]]:
        """Return every set of two or more ranks that communicates by itself, sorted, each once."""
        groups: set[tuple[int, ...]] = set()
        for _, block in self._firsts:
            groups.update(block.sharing)
            groups.update(block.exchanges.values())
            for way in block.reductions:
                # The group of all ranks always exists.
                groups |= {way.group, way.spread} - {block.everyone}
        return sorted(group for group in groups if len(group) > 1)

    def memory(self, rank: int, *, used: Collection[str] | None = None) -> dict[str, int]:
        """Return the bytes that a rank holds after a solve, from shapes alone.

        They equal `Preconditioner.memory_usage`, to the byte. Factors whose statistics are made
        with second-order data are counted, although they come with the next statistics. While
        backward passes gather statistics, a rank also holds their sums, see `window`.

        Args:
            rank: The rank.
            used: The blocks that are used; None for all.

        Returns:
            The bytes under ``"factors"``, ``"accumulators"``, ``"second_order"``, ``"statistics"``
            (0), and ``"total"``.
        """
        return plan.memory(self.pairs, self.stacks, rank, used)

    def window(self, rank: int) -> int:
        """Return the bytes of the sums that a rank gathers while backward passes run."""
        size = 0
        for stack in self.stacked:
            for index, factor in enumerate(stack.work.factors):
                if factor.captured and stack.place.contributes(rank, index):
                    size += stack.matrix(index, len(stack.members))
        return size

    @cached_property
    def fullest(self) -> dict[str, int]:
        """The bytes on the rank that holds most, see `memory`."""
        ranks = map(self.memory, range(self.world_size))
        return max(ranks, key=lambda usage: usage["total"])

    def traffic(
        self,
        rank: int,
        *,
        statistics: bool | Collection[str] = False,
        solve: bool | Collection[str] = False,
        used: Collection[str] | None = None,
        local: LocalPlan | None = None,
        fused: bool = False,
        first: bool = False,
        clips: Collection[str] = (),
    ) -> Traffic:
        """Return the bytes and calls of a rank's collectives in one step, from shapes alone.

        They equal the growth of `Preconditioner.traffic`, to the byte. Background solves are
        counted at the step that applies them; with ``"ready"`` each step agrees on 8 bytes more.

        Args:
            rank: The rank.
            statistics: Whether it is a statistics step; or the blocks that take statistics in it.
            solve: Whether it is a solve step, with statistics before it; or the blocks that are
                solved in it, if solves are staggered (`soframe.strategies.turns`). Deferred
                statistics are counted as if some had been gathered since the last solve.
            used: The blocks that are used and have been solved; None for all.
            local: The gradients beside the blocks' with ``Distribution(gradients="local")``; None
                for averaged ones.
            fused: `soframe.Backend.fused`.
            first: Whether no solve precedes this step, so that factors whose statistics are made
                with second-order data are not sent. A block has such statistics in the step after
                each solve too, unless that is one of its statistics steps.
            clips: The clips that are on, of ``"kl"`` and ``"norm"``: with sharded parameters ranks
                reduce their inner products and norms.

        Returns:
            Phase -> ``{"bytes", "calls"}``, and their sum under ``"total"``.
        """
        step = plan.Step(
            self.pairs,
            self.stacks,
            rank,
            statistics=statistics,
            solve=solve,
            used=used,
            local=local,
            fused=fused,
            first=first,
            clips=clips,
        )
        return step.traffic()

    def __str__(self) -> str:
        has_statistics = any(_statistics(work, block) for work, block in self.pairs)
        title = (
            f"placement {self.strategy!r} on {self.world_size} rank(s), {self.digest.hex()[:12]}"
        )
        header = ["block", "groups x out x in", "owners", "gradient workers", "exchange"]
        if has_statistics:
            header.append("statistics")

        def how(pair: tuple[BlockWork, BlockPlacement]) -> tuple[object, ...]:
            work, block = pair
            # Blocks of other ranks, in the same numbers, share a line.
            how = (len(block.gradient_workers), block.deferred, block.packed, block.wire)
            return (work.shape, work.factors, how)

        rows: list[list[str]] = []
        for name, pairs in alike(self.pairs, lambda pair: pair[0].name, how):
            rows.append([name, *_cells(pairs)][: len(header)])
        notes = [f"note: {note}" for note in self.notes]
        return "\n".join([title, format_table(header, rows), *notes])


def _cells(pairs: Pairs) -> tuple[str, ...]:
    """Return shape, owners, gradient workers, exchange and statistics of blocks of one kind."""
    work, first = pairs[0]
    owners: list[set[int]] = [set() for _ in work.factors]
    workers, contributors, holders = set[int](), set[int](), set[int]()
    for _, place in pairs:
        workers.update(place.gradient_workers)
        for index, owner in enumerate(place.owners):
            owners[index].add(owner)
            contributors.update(place.contributing(index))
            holders.update(place.holding(index))
    solved = zip(work.factors, owners, strict=True)
    of_workers = _ranks(workers)
    if len(workers) > len(first.gradient_workers):
        of_workers = f"{len(first.gradient_workers)} of {of_workers}"
    exchanges = {_exchange(place) for _, place in pairs}
    if len(exchanges) > 1:
        exchanges = {f"each to {len(first.exchanges[first.gradient_workers[0]]) - 1}"}
    statistics = {_statistics(work, place) for work, place in pairs}
    if len(statistics) > 1:
        statistics = {f"{_ranks(contributors)}=>{_ranks(holders)}"}
    return (
        "x".join(map(str, work.shape)),
        " ".join(f"{factor.name}:{_ranks(ranks)}" for factor, ranks in solved),
        of_workers,
        exchanges.pop(),
        statistics.pop(),
    )


def _exchange(block: BlockPlacement) -> str:
    """Format the receivers of each gradient worker."""
    sends: list[str] = []
    for worker in block.gradient_workers:
        if receivers := set(block.exchanges[worker]).difference({worker}):
            sends.append(f"{worker}->{_ranks(receivers)}")
    return " ".join(sends) or "-"


Checks = Iterator[tuple[bool, str]]


def _workers(block: BlockPlacement, world_size: int) -> Checks:
    """Yield conditions on owners, gradient workers and sources, each with its problem."""
    ranks, workers = set(range(world_size)), block.gradient_workers
    yield ranks.issuperset(block.owners), "an owner is not a rank"
    yield bool(workers), "no gradient worker"
    yield ranks.issuperset(workers), "a worker is not a rank"
    yield len(set(workers)) == len(workers), "a worker is named twice"
    yield len(block.sources) == world_size, "one source per rank"
    known = set(workers)
    for rank, source in enumerate(block.sources):
        if source not in known:
            yield False, f"source of rank {rank} is not a gradient worker"
    for worker in workers:
        source = block.sources[worker]
        yield source == worker, f"gradient worker {worker} must be its own source, not {source}"


def _statistics_places(work: BlockWork, block: BlockPlacement, world_size: int) -> Checks:
    """Yield conditions on contributors, holders and dtypes of statistics, with their problems."""
    ranks = set(range(world_size))
    yield len(block.owners) == len(work.factors), "one owner per factor"
    for name, sets in (("contributors", block.contributors), ("holders", block.holders)):
        yield len(sets) in (0, len(work.factors)), f"{name} of every factor or of none"
        for members in sets:
            yield bool(members), f"a factor without {name}"
            yield ranks.issuperset(members), f"{name}: not all are ranks"
            ordered = list(members) == sorted(set(members))
            yield ordered, f"{name} must be sorted, each named once"
    for index, owner in enumerate(block.owners):
        yield block.holds(owner, index), f"owner {owner} does not hold what it solves"
    known = block.wire is None or block.wire in ITEM_BYTES
    yield known, f"wire must be one of {', '.join(ITEM_BYTES)}, not {block.wire}"


def _residents(work: BlockWork, block: BlockPlacement) -> Checks:
    """Yield conditions on factors of averaged gradients, unsolved factors and readers."""
    workers, names = block.gradient_workers, [factor.name for factor in work.factors]
    for index, factor in enumerate(work.factors):
        is_made = block.makes(index)
        yield is_made != factor.captured, f"factor {factor.name}: made or reduced"
        if work.is_resident(index):
            owned = block.owners[index] in workers
            yield owned, f"factor {factor.name} must be owned by a gradient worker"
        if is_made:
            where = block.holding(index) == tuple(sorted(workers))
            yield where, f"factor {factor.name} is held by other than its makers"
        if factor.name in work.unsolved:
            holding = set(workers) <= set(block.holding(index))
            yield holding, f"factor {factor.name} is not held where it is used"
        for needed in factor.needs:
            ranks = block.needing[names.index(needed)]
            reached = set(block.contributing(index)) <= set(ranks)
            yield reached, f"contributors to {factor.name} lack the data of {needed}"


def complete(placement: Placement) -> Placement:
    """Return a strategy's placement, completed by the places that follow from the work."""
    if len(placement.work) != len(placement.blocks):
        raise ValueError(
            f"a strategy has placed {len(placement.blocks)} block(s), and the model has "
            f"{len(placement.work)}: Strategy.place() returns a BlockPlacement for each BlockWork, "
            f"in their order"
        )
    if all(work.plain for work in placement.work):
        return placement
    blocks: list[BlockPlacement] = []
    for work, block in placement.pairs:
        blocks.append(block if work.plain else _completed(work, block))
    return replace(placement, blocks=tuple(blocks))


def _completed(work: BlockWork, block: BlockPlacement) -> BlockPlacement:
    # Gradient workers have the averaged gradient, so its factors stay with them. Warm-started
    # solves run where the last solve's data are. An unsolved factor is held by the ranks that use
    # it. Ranks whose statistics need second-order data read them.
    workers = tuple(sorted(block.gradient_workers))
    places = [_of_factor(work, block, index, workers) for index in range(len(work.factors))]
    owners, contributors, holders = zip(*places, strict=True)
    readers = _readers(work, contributors, workers)
    is_made = tuple(not factor.captured for factor in work.factors)
    return replace(
        block,
        owners=owners,
        contributors=_unless_all(contributors, block.everyone),
        holders=_unless_all(holders, block.everyone),
        # All factors of a block share one EMA weight and one decay per accumulator.
        deferred=block.deferred and all(map(_accumulates, work.factors)),
        made=_unless_all(is_made, False),
        readers=_unless_all(readers, ()),
    )


def _unless_all(values: tuple[T, ...], usual: T) -> tuple[T, ...]:
    """Return the values of a field by factor, or none if all are the usual one."""
    return () if values.count(usual) == len(values) else values


def _of_factor(
    work: BlockWork, block: BlockPlacement, index: int, workers: tuple[int, ...]
) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Return the owner, the contributors and the holders of a factor."""
    factor, owner, holders = work.factors[index], block.owners[index], set(block.holding(index))
    if work.is_resident(index) and owner not in workers:
        owner = block.gradient_workers[0]
        holders.add(owner)
    if not factor.captured:
        return owner, workers, workers
    if factor.name in work.unsolved:
        holders.update(workers)
    return owner, block.contributing(index), tuple(sorted(holders))


def _readers(
    work: BlockWork, contributors: Sequence[tuple[int, ...]], workers: Collection[int]
) -> tuple[tuple[int, ...], ...]:
    """Return the contributors that read each factor's data for others' statistics, not workers."""
    readers: dict[str, set[int]] = {factor.name: set() for factor in work.factors}
    for factor, ranks in zip(work.factors, contributors, strict=True):
        for needed in factor.needs:
            readers[needed].update(ranks)
    return tuple(tuple(sorted(ranks.difference(workers))) for ranks in readers.values())


def _accumulates(factor: FactorSpec) -> bool:
    """Return whether the statistics of a factor may wait in accumulators."""
    return factor.captured and factor.kind == "psd" and not factor.needs and factor.decay is None


def _statistics(work: BlockWork, block: BlockPlacement) -> str:
    """Format the contributors and holders of factors; empty if all ranks are both."""
    ways: dict[str, list[str]] = {}
    for index, factor in enumerate(work.factors):
        way = f"{_ranks(block.contributing(index))}=>{_ranks(block.holding(index))}"
        ways.setdefault(way, []).append(factor.name)
    everyone = _ranks(block.everyone)
    words = list(ways)
    if len(ways) > 1:
        words = [f"{'+'.join(names)}:{way}" for way, names in ways.items()]
    if block.deferred:
        words.append("deferred")
    if block.packed:
        words.append("packed")
    if block.wire:
        words.append(block.wire)
    simply = f"{everyone}=>{everyone}"
    if words in ([simply], [simply, "packed"]):
        return ""
    return " ".join(words)


def _ranks(ranks: Collection[int]) -> str:
    """Format ranks as ranges: ``0-3,6``."""
    ranges: list[list[int]] = []
    for rank in sorted(ranks):
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    return ",".join("-".join(map(str, part)) for part in ranges)
