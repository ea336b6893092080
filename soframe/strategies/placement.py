"""A placement: each rank's role for every block, as plain data.

It is computed from shapes and a number of ranks alone, so the same object is executed by the
preconditioner, priced for thousands of ranks on a laptop, printed, and tested. Ranks are numbers
within the process group of the preconditioner. The digest is compared across ranks before the
first collective.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property

from soframe.specs import FactorSpec
from soframe.strategies import plan
from soframe.strategies.local import LocalPlan
from soframe.strategies.work import (
    ITEM_BYTES,
    BlockPlacement,
    BlockWork,
    Traffic,
    exchange_group,
)
from soframe.text import format_table


@dataclass(frozen=True)
class Placement:
    """Who does what, for every block.

    Attributes:
        strategy: The strategy's name, for people.
        world_size: The number of ranks.
        work: What was placed.
        blocks: Where it went, in the order of ``work``.
        notes: What the strategy chose where it could not do what was asked, and why.
    """

    strategy: str
    world_size: int
    work: tuple[BlockWork, ...]
    blocks: tuple[BlockPlacement, ...]
    notes: tuple[str, ...] = ()

    @property
    def pairs(self) -> list[tuple[BlockWork, BlockPlacement]]:
        """The work of each block with its placement."""
        return list(zip(self.work, self.blocks, strict=True))

    def validate(self) -> None:
        """Check that the placement can be executed.

        Raises:
            ValueError: If it cannot; the message names the strategy and the block.
        """
        if [work.name for work in self.work] != [block.block for block in self.blocks]:
            raise ValueError(
                f"strategy {self.strategy!r}: the placement's blocks are not those of the work, in "
                f"its order"
            )
        for work, block in self.pairs:
            checks = [
                *_workers(block, self.world_size),
                *_statistics_places(work, block, self.world_size),
                *_residents(work, block),
            ]
            for good, problem in checks:
                if not good:
                    raise ValueError(f"strategy {self.strategy!r}, block {work.name!r}: {problem}")

    @cached_property
    def stacks(self) -> list[list[int]]:
        """The blocks that are alike and have the same place but for owners, by their index."""
        stacks: dict[object, list[int]] = {}
        for index, (work, block) in enumerate(self.pairs):
            # Where some ranks hold a factor, its statistics are sent to the owner.
            place = replace(block, block="", owners=block.owners if block.holders else ())
            key = (work.alike, place) if work.stackable else index
            stacks.setdefault(key, []).append(index)
        return list(stacks.values())

    @property
    def digest(self) -> bytes:
        """The placement's SHA-256; equal on all ranks, or they must not start."""
        left_out = {"second_order", "dtype", "device", "parameters", "state", "after", "kind"}
        names = [one.name for one in fields(BlockWork) if one.name not in left_out]
        work = [[getattr(block, name) for name in names] for block in self.work]
        everything = [self.strategy, self.world_size, work, self.blocks, self.notes]
        return hashlib.sha256(repr(everything).encode()).digest()

    def groups(self) -> list[tuple[int, ...]]:
        """Return every set of ranks that communicates by itself, sorted, each once.

        Returns:
            The sets of two or more ranks.
        """
        groups: set[tuple[int, ...]] = set()
        for block in self.blocks:
            groups.update(map(block.sharing, range(len(block.owners))))
            for worker in block.gradient_workers:
                groups.add(exchange_group(worker, block.sources))
            for way in block.reductions:
                # All ranks together are a group that is always there.
                groups.update(g for g in (way.group, way.spread) if g != block.everyone)
        return sorted(group for group in groups if len(group) > 1)

    def memory(self, rank: int, *, used: Collection[str] | None = None) -> dict[str, int]:
        """Return the bytes that a rank holds after a solve, from shapes alone.

        That is what `Preconditioner.memory_usage` then says, to the byte. Factors whose statistics
        are made with second-order data are counted; they come with the next statistics. While a
        backward pass gathers statistics there are, besides, the sums of the blocks that the rank
        contributes to.

        Args:
            rank: The rank.
            used: The blocks that are used; None for all.

        Returns:
            ``"factors"``, ``"accumulators"``, ``"second_order"``, ``"statistics"`` (none) and
            their ``"total"``.
        """
        return plan.memory(self.pairs, self.stacks, rank, used)

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
        """Return what a rank's collectives carry in one step, from shapes alone.

        That is what `Preconditioner.traffic` grows by, to the byte. What is solved in the
        background is shared when it lands; with ``"ready"`` ranks agree on 8 bytes more in a step.

        Args:
            rank: The rank.
            statistics: Whether it is a statistics step; or the blocks that take them in it.
            solve: Whether it is a solve step, after there were statistics; or the blocks that are
                solved in it, where solves are staggered (`soframe.strategies.turns`). Deferred
                statistics are counted as if there were any since the last solve.
            used: The blocks that are used and have been solved; None for all.
            local: What else there is with ``gradients="local"``; None for averaged ones.
            fused: The backend's, see `soframe.Backend`.
            first: Whether nothing has been solved before this step, so that no factor is sent whose
                statistics are made with second-order data. A block has such statistics in the step
                after each solve too, if that is none of its statistics steps.
            clips: Which clips are on, of ``"kl"`` and ``"norm"``: where parameters are sharded
                ranks add up what they know of these.

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
        return step.traffic() if self.world_size > 1 else plan.total({})

    def __str__(self) -> str:
        told = any(_statistics(w, b) for w, b in self.pairs)
        rows = [
            (
                work.name,
                "x".join(str(size) for size in work.shape),
                " ".join(
                    f"{factor.name}:{owner}"
                    for factor, owner in zip(work.factors, block.owners, strict=True)
                ),
                _ranks(block.gradient_workers),
                " ".join(
                    f"{worker}->{_ranks(receivers)}"
                    for worker in block.gradient_workers
                    if (
                        receivers := [
                            r for r in exchange_group(worker, block.sources) if r != worker
                        ]
                    )
                )
                or "-",
                *((_statistics(work, block),) if told else ()),
            )
            for work, block in self.pairs
        ]
        header: tuple[str, ...] = ("block", "groups x out x in", "owners")
        header += ("gradient workers", "exchange", *(("statistics",) if told else ()))
        title = (
            f"placement {self.strategy!r} on {self.world_size} rank(s), {self.digest.hex()[:12]}"
        )
        return "\n".join([title, format_table(header, rows), *(f"note: {n}" for n in self.notes)])


Checks = Iterator[tuple[bool, str]]


def _workers(block: BlockPlacement, world_size: int) -> Checks:
    """Yield conditions on owners, gradient workers and sources, each with its problem."""
    ranks, workers = range(world_size), block.gradient_workers
    yield all(r in ranks for r in block.owners), "an owner is not a rank"
    yield bool(workers), "no gradient worker"
    yield all(r in ranks for r in workers), "a worker is not a rank"
    yield len(set(workers)) == len(workers), "a worker is named twice"
    yield len(block.sources) == world_size, "one source per rank"
    for rank, source in enumerate(block.sources):
        yield source in workers, f"source of rank {rank} is no worker"
        own = source == rank or rank not in workers
        yield own, f"gradient worker {rank} must be its own source, not {source}"


def _statistics_places(work: BlockWork, block: BlockPlacement, world_size: int) -> Checks:
    """Yield conditions on contributors, holders and the dtype of statistics."""
    ranks = range(world_size)
    yield len(block.owners) == len(work.factors), "one owner per factor"
    for name, sets in (("contributors", block.contributors), ("holders", block.holders)):
        yield len(sets) in (0, len(work.factors)), f"{name} of every factor or of none"
        for members in sets:
            yield bool(members), f"a factor without {name}"
            yield all(r in ranks for r in members), f"{name}: not all are ranks"
            ordered = list(members) == sorted(set(members))
            yield ordered, f"{name} must be sorted, each named once"
    for index, owner in enumerate(block.owners):
        yield block.holds(owner, index), f"owner {owner} does not hold what it solves"
    known = block.wire is None or block.wire in ITEM_BYTES
    yield known, f"wire must be one of {', '.join(ITEM_BYTES)}, not {block.wire}"


def _residents(work: BlockWork, block: BlockPlacement) -> Checks:
    """Yield conditions on factors that gradient workers make, use or need."""
    workers, names = block.gradient_workers, [factor.name for factor in work.factors]
    for index, factor in enumerate(work.factors):
        made = bool(block.made) and block.made[index]
        yield made != factor.captured, f"factor {factor.name}: made or reduced"
        if work.resident and work.resident[index]:
            owned = block.owners[index] in workers
            yield owned, f"factor {factor.name} must be owned by a gradient worker"
        if made:
            where = block.holding(index) == tuple(sorted(workers))
            yield where, f"factor {factor.name} is held by other than its makers"
        if factor.name in work.unsolved:
            holding = set(workers) <= set(block.holding(index))
            yield holding, f"factor {factor.name} is not held where it is used"
        for needed in factor.needs:
            ranks = block.needing(names.index(needed))
            reached = set(block.contributing(index)) <= set(ranks)
            yield reached, f"contributors to {factor.name} lack the data of {needed}"


def complete(placement: Placement) -> Placement:
    """Return a strategy's placement with the places that follow from the work."""
    # Factors of the averaged gradient stay with the gradient workers, which have it. Solves that
    # continue from the last one are at a rank that has its data. A factor that is not solved is
    # held by the ranks that use it, and second-order data are read by those whose statistics need
    # them.
    if len(placement.work) != len(placement.blocks):
        raise ValueError(
            f"a strategy has placed {len(placement.blocks)} block(s), and the model has "
            f"{len(placement.work)}: Strategy.place() returns a BlockPlacement for each BlockWork, "
            f"in their order"
        )
    if all(work.plain for work in placement.work):
        return placement
    blocks = tuple(b if w.plain else _completed(w, b) for w, b in placement.pairs)
    return replace(placement, blocks=blocks)


def _completed(work: BlockWork, block: BlockPlacement) -> BlockPlacement:
    workers = tuple(sorted(block.gradient_workers))
    owners, contributors, holders = [], [], []
    for index, factor in enumerate(work.factors):
        owner, holding = block.owners[index], set(block.holding(index))
        if work.resident and work.resident[index] and owner not in workers:
            owner = block.gradient_workers[0]
            holding.add(owner)
        if factor.name in work.unsolved:
            holding.update(workers)
        owners.append(owner)
        contributors.append(block.contributing(index) if factor.captured else workers)
        holders.append(tuple(sorted(holding)) if factor.captured else workers)
    everyone = (block.everyone,) * len(work.factors)
    names = [factor.name for factor in work.factors]
    readers: list[set[int]] = [set() for _ in names]
    for index, factor in enumerate(work.factors):
        for needed in factor.needs:
            readers[names.index(needed)].update(contributors[index])
    made = tuple(not factor.captured for factor in work.factors)
    return replace(
        block,
        owners=tuple(owners),
        contributors=() if tuple(contributors) == everyone else tuple(contributors),
        holders=() if tuple(holders) == everyone else tuple(holders),
        # Accumulators have one mass and one decay for all factors of a block.
        deferred=block.deferred and all(_accumulates(factor) for factor in work.factors),
        made=made if any(made) else (),
        readers=tuple(tuple(sorted(r.difference(workers))) for r in readers)
        if any(r.difference(workers) for r in readers)
        else (),
    )


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
    words = [
        *(w if len(ways) == 1 else f"{'+'.join(names)}:{w}" for w, names in ways.items()),
        *(["deferred"] if block.deferred else []),
        *(["packed"] if block.packed else []),
        *([block.wire] if block.wire else []),
    ]
    simply = f"{everyone}=>{everyone}"
    return "" if words in ([simply], [simply, "packed"]) else " ".join(words)


def _ranks(ranks: Sequence[int]) -> str:
    """Format ranks as ranges: ``0-3,6``."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank == ranges[-1][-1] + 1:
            ranges[-1][1:] = [rank]
        else:
            ranges.append([rank])
    return ",".join("-".join(map(str, part)) for part in ranges)
