"""A placement is data: who owns, preconditions and receives what.

It is computed from shapes and a number of ranks alone, so the same object is executed by the
preconditioner, priced for thousands of ranks on a laptop, printed, and tested. Ranks are numbers
within the process group that the preconditioner was given. Its digest is compared across ranks
before the first collective.

Statistics have places too: some ranks *contribute* those of their own data to a factor, and some
*hold* the running factor, which is what the contributions are added up for. In between, they are
reduced at every statistics step, or gathered where they arise and reduced when a solve needs them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod

from soframe.layers.base import BlockShape
from soframe.specs import FactorSpec, Shards, TensorSpec
from soframe.strategies.local import LocalPlan
from soframe.text import format_table

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""The dtypes that factors can have and statistics can travel in, and their bytes per element."""

SMALL = 40_000
"""Elements of a gradient's matrix: on CPUs larger ones have a stack each. With one thread six
blocks of 16 x 144 took 0.57 of the time together, five of 64 x 576 0.83, and 24 of 256 x 256 1.5
times the time (AVX2; `bench_apply` of `benchmarks/bench_kernels.py`)."""

Traffic = dict[str, dict[str, int]]
"""Phase -> ``{"bytes", "calls"}``."""


@dataclass(frozen=True)
class BlockWork:
    """What has to be placed for one block.

    Attributes:
        name: The block's name.
        shape: The shape of its gradient matrix.
        factors: Its factors.
        second_order: The tensors that the solver makes of each factor; only plans of memory and
            traffic need them, so they are no part of the placement's identity.
        dtype: The dtype of factors and second-order data, by its name; likewise.
        device: Where they live; likewise.
        parameters: How many parameters the block has; likewise.
        resident: For each factor whether a gradient worker must own it: it is made of the averaged
            gradient, or its solves start from the last one's data; empty where none must.
        unsolved: The names of the factors that are used as they are, by all gradient workers.
        state: What the method keeps on gradient workers; for plans, as ``second_order``.
        effort: The operations of a direction, up to a constant, where they count: of methods that
            make one of the gradient alone.
        after: Whether statistics of the averaged gradient, and the solves of the block, come after
            its direction; for plans.
        shards: How each of its parameters is shared out over ranks; empty where none is.
        kind: A number that blocks of the same method and solver have in common; for stacks alone.
    """

    name: str
    shape: BlockShape
    factors: tuple[FactorSpec, ...]
    second_order: tuple[tuple[TensorSpec, ...], ...] = field(default=(), compare=False)
    dtype: str = field(default="float32", compare=False)
    device: str = field(default="cpu", compare=False)
    parameters: int = field(default=1, compare=False)
    resident: tuple[bool, ...] = ()
    unsolved: tuple[str, ...] = ()
    state: tuple[TensorSpec, ...] = field(default=(), compare=False)
    effort: float = 0.0
    after: bool = field(default=False, compare=False)
    shards: tuple[Shards, ...] = ()
    kind: int = field(default=0, compare=False)

    @property
    def stackable(self) -> bool:
        """Whether it may share a stack: every tensor's first dimension is the block's groups.

        On CPUs large matrices stay by themselves: products of a batch of them take longer than one
        after the other, and copies into the batch come on top.
        """
        groups, out, into = self.shape
        if self.device == "cpu" and out * into > SMALL:
            return False
        specs = [*self.state, *(spec for specs in self.second_order for spec in specs)]
        return all(factor.groups == groups for factor in self.factors) and all(
            spec.shape and spec.shape[0] == groups for spec in specs
        )

    @property
    def alike(self) -> tuple[object, ...]:
        """What blocks of one stack have in common, beside their place."""
        tensors = (self.second_order, self.state, self.dtype, self.device, self.shards)
        return (self.kind, self.shape, self.factors, self.resident, self.after, *tensors)

    @property
    def elements(self) -> float:
        """The elements that a direction takes on a gradient worker, where they count."""
        if not self.effort:
            return 0.0
        return float(sum(prod(s.shape) for s in self.state) + prod(self.shape))

    @property
    def captured(self) -> bool:
        """Whether the block takes statistics of calls."""
        return any(factor.captured for factor in self.factors)

    @property
    def only_captured(self) -> bool:
        """Whether nothing that is kept is made of averaged gradients, but directions."""
        return all(factor.captured for factor in self.factors)

    @property
    def plain(self) -> bool:
        """Whether all factors are matrices, made of calls, and solved as they are."""
        needy = any(factor.needs or factor.decay is not None for factor in self.factors)
        return not self.resident and not self.unsolved and not needy


@dataclass(frozen=True)
class Reduction:
    """How statistics are added up.

    Attributes:
        group: The ranks that take part; those that do not contribute add zeros.
        destination: The rank that has the sum; None for all, which are all ranks.
        spread: The ranks that the destination sends the sum to, itself among them.
    """

    group: tuple[int, ...]
    destination: int | None
    spread: tuple[int, ...]


@dataclass(frozen=True)
class BlockPlacement:
    """Who does what for one block.

    Attributes:
        block: The block's name.
        owners: The rank that solves each factor, in the order of the block's factors.
        gradient_workers: The ranks that hold the second-order data and precondition.
        sources: For each rank the gradient worker that it has the preconditioned gradient from;
            a gradient worker's source is itself.
        contributors: For each factor the sorted ranks whose data make its statistics; empty for
            all ranks. The others neither compute nor send any.
        holders: For each factor the sorted ranks that keep the running factor, the owner among
            them; empty for all ranks.
        deferred: Whether contributors gather their statistics, in an accumulator of their own,
            until a solve needs them; otherwise they are reduced at every statistics step.
        packed: Whether running factors are kept as triangles ``[groups, n (n + 1) / 2]``, and are
            whole only while they are solved.
        wire: The dtype in which statistics travel, by its name; None for the factors' own.
        made: For each factor whether its holders make its statistics themselves, of the averaged
            gradient, so that nothing is reduced; empty for none.
        readers: For each factor the sorted ranks that need its second-order data besides the
            gradient workers, since statistics are made with it; empty for none.
    """

    block: str
    owners: tuple[int, ...]
    gradient_workers: tuple[int, ...]
    sources: tuple[int, ...]
    contributors: tuple[tuple[int, ...], ...] = ()
    holders: tuple[tuple[int, ...], ...] = ()
    deferred: bool = False
    packed: bool = False
    wire: str | None = None
    made: tuple[bool, ...] = ()
    readers: tuple[tuple[int, ...], ...] = ()

    @cached_property
    def everyone(self) -> tuple[int, ...]:
        """All ranks."""
        return tuple(range(len(self.sources)))

    def contributing(self, factor: int) -> tuple[int, ...]:
        """Return the ranks that contribute statistics to a factor.

        Args:
            factor: Its index.
        """
        return self.contributors[factor] if self.contributors else self.everyone

    def holding(self, factor: int) -> tuple[int, ...]:
        """Return the ranks that hold a running factor.

        Args:
            factor: Its index.
        """
        return self.holders[factor] if self.holders else self.everyone

    def contributes(self, rank: int, factor: int) -> bool:
        """Return whether a rank contributes statistics to a factor.

        Args:
            rank: The rank.
            factor: The factor's index.
        """
        return not self.contributors or rank in self.contributors[factor]

    def holds(self, rank: int, factor: int) -> bool:
        """Return whether a rank holds a running factor.

        Args:
            rank: The rank.
            factor: The factor's index.
        """
        return not self.holders or rank in self.holders[factor]

    def needing(self, factor: int) -> tuple[int, ...]:
        """Return the ranks that need the second-order data of a factor.

        Args:
            factor: Its index.
        """
        return self.gradient_workers + (self.readers[factor] if self.readers else ())

    def sharing(self, factor: int) -> tuple[int, ...]:
        """Return the sorted ranks among which the second-order data of a factor are shared.

        Args:
            factor: Its index.
        """
        return share_group(self.owners[factor], self.needing(factor))

    @cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """How the statistics of each factor get from those that have them to its holders."""
        return tuple(map(self._reduction, range(len(self.owners))))

    def _reduction(self, factor: int) -> Reduction:
        holders = self.holding(factor)
        if self.made and self.made[factor]:
            return Reduction((), None, ())
        group = tuple(sorted({*self.contributing(factor), *holders}))
        if holders == self.everyone:
            return Reduction(group, None, ())
        return Reduction(group, self.owners[factor], holders)

    @property
    def traces_travel(self) -> bool:
        """Whether an owner lacks a factor of the block, and so its trace, which solvers ask for."""
        factors = range(len(self.owners))
        return any(not self.holds(owner, factor) for owner in self.owners for factor in factors)


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

    def validate(self) -> None:
        """Check that the placement can be executed.

        Raises:
            ValueError: If it cannot; the message names the strategy and the block.
        """

        def require(condition: bool, block: str, problem: str) -> None:
            if not condition:
                raise ValueError(f"strategy {self.strategy!r}, block {block!r}: {problem}")

        ranks = range(self.world_size)
        names = [work.name for work in self.work]
        require(
            names == [block.block for block in self.blocks],
            "*",
            "the placement's blocks are not those of the work, in its order",
        )
        for work, block in zip(self.work, self.blocks, strict=True):
            workers = block.gradient_workers
            require(len(block.owners) == len(work.factors), work.name, "one owner per factor")
            require(all(r in ranks for r in block.owners), work.name, "an owner is not a rank")
            require(bool(workers), work.name, "no gradient worker")
            require(all(r in ranks for r in workers), work.name, "a worker is not a rank")
            require(len(set(workers)) == len(workers), work.name, "a worker is named twice")
            require(len(block.sources) == self.world_size, work.name, "one source per rank")
            for rank, source in enumerate(block.sources):
                require(source in workers, work.name, f"source of rank {rank} is no worker")
                require(
                    source == rank or rank not in workers,
                    work.name,
                    f"gradient worker {rank} must be its own source, not {source}",
                )
            self._validate_statistics(work, block, require)

    def _validate_statistics(
        self, work: BlockWork, block: BlockPlacement, require: Callable[[bool, str, str], None]
    ) -> None:
        ranks = range(self.world_size)
        for name, sets in (("contributors", block.contributors), ("holders", block.holders)):
            one_each = len(sets) in (0, len(work.factors))
            require(one_each, work.name, f"{name} of every factor or of none")
            for members in sets:
                require(bool(members), work.name, f"a factor without {name}")
                require(all(r in ranks for r in members), work.name, f"{name}: not all are ranks")
                ordered = list(members) == sorted(set(members))
                require(ordered, work.name, f"{name} must be sorted, each named once")
        for index, owner in enumerate(block.owners):
            held = block.holds(owner, index)
            require(held, work.name, f"owner {owner} does not hold what it solves")
        self._validate_residents(work, block, require)
        known = block.wire is None or block.wire in ITEM_BYTES
        require(known, work.name, f"wire must be one of {', '.join(ITEM_BYTES)}, not {block.wire}")

    def _validate_residents(
        self, work: BlockWork, block: BlockPlacement, require: Callable[[bool, str, str], None]
    ) -> None:
        workers, name = block.gradient_workers, work.name
        for index, factor in enumerate(work.factors):
            made = bool(block.made) and block.made[index]
            resident = bool(work.resident) and work.resident[index]
            require(made != factor.captured, name, f"factor {factor.name}: made or reduced")
            if resident:
                owned = block.owners[index] in workers
                require(owned, name, f"factor {factor.name} must be owned by a gradient worker")
            if made:
                where = block.holding(index) == tuple(sorted(workers))
                require(where, name, f"factor {factor.name} is held by other than its makers")
            if factor.name in work.unsolved:
                holding = set(workers) <= set(block.holding(index))
                require(holding, name, f"factor {factor.name} is not held where it is used")
            for needed in factor.needs:
                ranks = block.needing([f.name for f in work.factors].index(needed))
                told = set(block.contributing(index)) <= set(ranks)
                require(told, name, f"contributors to {factor.name} lack the data of {needed}")

    @cached_property
    def stacks(self) -> list[list[int]]:
        """The blocks that are alike and have the same place but for owners, by their index."""
        stacks: dict[object, list[int]] = {}
        for index, (work, block) in enumerate(zip(self.work, self.blocks, strict=True)):
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
        from soframe.strategies import plan

        return plan.memory(self, rank, used=used)

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
        from soframe.strategies import plan

        return plan.traffic(
            self,
            rank,
            statistics=statistics,
            solve=solve,
            used=used,
            local=local,
            fused=fused,
            first=first,
            clips=clips,
        )

    def __str__(self) -> str:
        told = any(_statistics(w, b) for w, b in zip(self.work, self.blocks, strict=True))
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
            for work, block in zip(self.work, self.blocks, strict=True)
        ]
        header: tuple[str, ...] = ("block", "groups x out x in", "owners")
        header += ("gradient workers", "exchange", *(("statistics",) if told else ()))
        title = (
            f"placement {self.strategy!r} on {self.world_size} rank(s), {self.digest.hex()[:12]}"
        )
        return "\n".join([title, format_table(header, rows), *(f"note: {n}" for n in self.notes)])


def complete(placement: Placement) -> Placement:
    """Return a placement with what follows from the work, whichever strategy it is of.

    What is made of the averaged gradient stays with the gradient workers, who have it. What solves
    start from is at their owners. A factor that is used as it is comes to those who use it, and
    second-order data come to those who make statistics with them.

    Args:
        placement: A strategy's answer.

    Returns:
        The same object, where nothing is to be changed.

    Raises:
        ValueError: If it has not a block for each work.
    """
    if len(placement.work) != len(placement.blocks):
        raise ValueError(
            f"a strategy has placed {len(placement.blocks)} block(s), and the model has "
            f"{len(placement.work)}: Strategy.place() returns a BlockPlacement for each BlockWork, "
            f"in their order"
        )
    pairs = list(zip(placement.work, placement.blocks, strict=True))
    if all(work.plain for work, _ in pairs):
        return placement
    blocks = tuple(block if work.plain else _completed(work, block) for work, block in pairs)
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


def share_group(owner: int, gradient_workers: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks among which an owner shares second-order data.

    Args:
        owner: The rank that solved the factor.
        gradient_workers: The ranks that need it.

    Returns:
        The sorted ranks, the owner among them.
    """
    return tuple(sorted({owner, *gradient_workers}))


def exchange_group(worker: int, sources: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks among which a gradient worker exchanges the preconditioned gradient.

    Args:
        worker: The gradient worker.
        sources: The source of each rank.

    Returns:
        The sorted ranks, the worker among them.
    """
    return tuple(sorted({worker, *(rank for rank, s in enumerate(sources) if s == worker)}))


def _statistics(work: BlockWork, block: BlockPlacement) -> str:
    """Say where statistics come from and go to; nothing where they simply go from all to all."""
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
