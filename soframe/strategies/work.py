"""Work and placement of one block: the data that strategies, plans and the step share.

Statistics have places too: some ranks *contribute* statistics of their own data to a factor, and
some *hold* the running factor, the average of the reduced contributions. They are reduced at every
statistics step, or accumulated by each contributor and reduced when a solve needs them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import prod
from operator import attrgetter

from soframe.layers.base import BlockShape
from soframe.specs import FactorSpec, Shards, TensorSpec, numel

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
"""The dtypes that factors can have and statistics can travel in, and their bytes per element."""

SMALL = 70_000
"""The largest gradient matrix, in elements, that shares a stack on CPUs: 256 x 256 or 128 x 512.
In one stack rather than alone, steps of twelve such layers take 0.76 to 1.06 of the time, and of
twelve of 384 x 384 0.94 to 1.08 (one thread; decision 5)."""

LONGEST = 2**27
"""The entries of a stack of an elementwise method, about: its temporary tensors are as long."""

Traffic = dict[str, dict[str, int]]
"""Phase -> ``{"bytes", "calls"}``."""


def with_total(phases: Traffic) -> Traffic:
    """Return traffic with its sum over phases under ``"total"``."""
    sums = {"bytes": 0, "calls": 0}
    for count in phases.values():
        sums["bytes"] += count["bytes"]
        sums["calls"] += count["calls"]
    return {**phases, "total": sums}


@dataclass(frozen=True)
class BlockWork:
    """The factors, shapes and states of one block: the input of a strategy.

    Attributes:
        name: The block's name.
        shape: The shape of its gradient matrix.
        factors: The specs of its factors.
        second_order: The solver's tensors for each factor; only plans of memory and traffic need
            them, so the placement's digest leaves them out.
        dtype: The dtype of statistics and second-order data, by its name; not in the digest.
        state_dtype: The dtype of the method's state; not in the digest.
        factor_dtype: The dtype in which running factors are kept; not in the digest.
        device: Their device; not in the digest.
        parameters: The number of the block's parameters; not in the digest.
        resident: For each factor whether a gradient worker must own it, because it is made of the
            averaged gradient or its solves start from the last one's data; empty if all owners are
            free.
        unsolved: The names of the factors that all gradient workers use without a solve.
        state: The method's state on gradient workers; for plans, as ``second_order``.
        parcel: The tensors that are sent in place of its update; for plans, as ``second_order``.
        effort: The FLOPs of an update, up to a constant, of methods that compute it from the
            gradient alone; 0 for others.
        after: Whether the block's update precedes its statistics of the averaged gradient and its
            solves; for plans.
        shards: The sharding of each of its parameters; empty if all are whole.
        elementwise: Whether each entry of its update and its states depends on that entry alone, so
            that it shares a stack with blocks of any shape; for stacks alone.
        kind: A number that blocks with the same method and solver share; for stacks alone.
    """

    name: str
    shape: BlockShape
    factors: tuple[FactorSpec, ...]
    second_order: tuple[tuple[TensorSpec, ...], ...] = field(default=(), compare=False)
    dtype: str = field(default="float32", compare=False)
    state_dtype: str = field(default="float32", compare=False)
    factor_dtype: str = field(default="float32", compare=False)
    device: str = field(default="cpu", compare=False)
    parameters: int = field(default=1, compare=False)
    resident: tuple[bool, ...] = ()
    unsolved: tuple[str, ...] = ()
    state: tuple[TensorSpec, ...] = field(default=(), compare=False)
    parcel: tuple[TensorSpec, ...] = field(default=(), compare=False)
    effort: float = 0.0
    after: bool = field(default=False, compare=False)
    shards: tuple[Shards, ...] = ()
    elementwise: bool = field(default=False, compare=False)
    kind: int = field(default=0, compare=False)

    @property
    def stackable(self) -> bool:
        """Whether it may share a stack, if it is elementwise or has its groups as first dimensions.

        On CPUs large matrices stay by themselves: a batched product of them is slower than a loop,
        and copies into the batch come on top.
        """
        groups, out, into = self.shape
        if self.device == "cpu" and out * into > SMALL:
            return False
        if self.elementwise:
            return True
        for spec in itertools.chain(self.state, self.parcel, *self.second_order):
            if spec.shape[:1] != (groups,):
                return False
        return all(factor.groups == groups for factor in self.factors)

    @property
    def alike(self) -> tuple[object, ...]:
        """The properties that blocks of one stack share, beside their place."""
        where = (self.dtype, self.state_dtype, self.factor_dtype, self.device)
        if self.elementwise:
            return (self.kind, len(self.state), self.after, where)
        tensors = (self.second_order, self.state, self.shards)
        return (self.kind, self.shape, self.factors, self.resident, self.after, tensors, where)

    @property
    def elements(self) -> float:
        """The elements of the state and the update on a gradient worker; 0 if ``effort`` is."""
        if not self.effort:
            return 0.0
        return float(numel(self.state) + prod(self.shape))

    @property
    def captured(self) -> bool:
        """Whether hooks capture statistics for some factor."""
        return any(factor.captured for factor in self.factors)

    @property
    def remembers(self) -> bool:
        """Whether its updates depend on earlier gradients."""
        return bool(self.state) or not all(factor.captured for factor in self.factors)

    def is_resident(self, factor: int) -> bool:
        """Return whether a gradient worker must own a factor."""
        return bool(self.resident) and self.resident[factor]

    @property
    def plain(self) -> bool:
        """Whether all factors are captured matrices, solved as they are."""
        if self.resident or self.unsolved:
            return False
        return all(not factor.needs and factor.decay is None for factor in self.factors)


@dataclass(frozen=True)
class Reduction:
    """One reduction of statistics.

    Attributes:
        group: The ranks that take part; ranks that do not contribute add zeros.
        destination: The rank that gets the sum; None for an all-reduce.
        spread: The ranks to which the destination sends the sum, itself among them.
    """

    group: tuple[int, ...]
    destination: int | None
    spread: tuple[int, ...]


@dataclass(frozen=True)
class BlockPlacement:
    """The ranks of one block, by role.

    Attributes:
        block: The block's name.
        owners: The rank that solves each factor, in the order of the block's factors.
        gradient_workers: The ranks that hold the second-order data and precondition.
        sources: For each rank, the gradient worker that sends it the preconditioned gradient; a
            gradient worker's source is itself.
        contributors: For each factor, the sorted ranks that compute and send its statistics; empty
            for all ranks.
        holders: For each factor, the sorted ranks that keep the running factor, the owner among
            them; empty for all ranks.
        deferred: Whether contributors gather their statistics, in an accumulator of their own,
            until a solve needs them; otherwise they are reduced at every statistics step.
        packed: Whether running factors are kept as triangles ``[groups, n (n + 1) / 2]``, and
            unpacked only for a solve.
        wire: The dtype in which statistics travel, by its name; None for the factors' own.
        made: For each factor, whether its holders make its statistics from the averaged gradient,
            without a reduction; empty for none.
        readers: For each factor, the sorted ranks outside the gradient workers that make statistics
            with its second-order data; empty for none.
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
        """Return the ranks that contribute statistics to a factor."""
        return self.contributors[factor] if self.contributors else self.everyone

    def partial(self, factors: Sequence[FactorSpec]) -> list[int]:
        """Return the factors with statistics of calls to which only some ranks contribute."""
        partial: list[int] = []
        for index, ranks in enumerate(self.contributors):
            if factors[index].captured and ranks != self.everyone:
                partial.append(index)
        return partial

    def holding(self, factor: int) -> tuple[int, ...]:
        """Return the ranks that hold a running factor."""
        return self.holders[factor] if self.holders else self.everyone

    def contributes(self, rank: int, factor: int) -> bool:
        """Return whether a rank contributes statistics to a factor."""
        return not self.contributors or rank in self.contributors[factor]

    def holds(self, rank: int, factor: int) -> bool:
        """Return whether a rank holds a running factor."""
        return not self.holders or rank in self.holders[factor]

    def held_by(self, rank: int) -> Sequence[bool]:
        """Return by factor whether a rank holds the running one."""
        return [self.holds(rank, factor) for factor in range(len(self.owners))]

    def makes(self, factor: int) -> bool:
        """Return whether holders make the statistics of a factor from the averaged gradient."""
        return bool(self.made) and self.made[factor]

    @cached_property
    def needing(self) -> tuple[tuple[int, ...], ...]:
        """For each factor, the ranks that need its second-order data."""
        if not self.readers:
            return tuple(self.gradient_workers for _ in self.owners)
        return tuple(self.gradient_workers + ranks for ranks in self.readers)

    @cached_property
    def sharing(self) -> tuple[tuple[int, ...], ...]:
        """For each factor, the sorted ranks among which its second-order data travel."""
        pairs = zip(self.owners, self.needing, strict=True)
        return tuple(tuple(sorted({owner}.union(needing))) for owner, needing in pairs)

    @cached_property
    def exchanges(self) -> dict[int, tuple[int, ...]]:
        """The sorted ranks to which each gradient worker broadcasts updates, with itself."""
        groups: dict[int, list[int]] = {}
        for rank, source in enumerate(self.sources):
            groups.setdefault(source, []).append(rank)
        return {worker: tuple(ranks) for worker, ranks in groups.items()}

    @cached_property
    def reductions(self) -> tuple[Reduction, ...]:
        """The reduction of each factor's statistics, from contributors to holders."""
        return tuple(map(self._reduction, range(len(self.owners))))

    def _reduction(self, factor: int) -> Reduction:
        holders = self.holding(factor)
        if self.makes(factor):
            return Reduction((), None, ())
        group = tuple(sorted(set(holders).union(self.contributing(factor))))
        if holders == self.everyone:
            return Reduction(group, None, ())
        return Reduction(group, self.owners[factor], holders)

    @cached_property
    def traces_travel(self) -> bool:
        """Whether an owner lacks a factor of the block, so that traces are reduced for solvers."""
        places = itertools.product(self.owners, range(len(self.owners)))
        return not all(itertools.starmap(self.holds, places))


Pairs = Sequence[tuple[BlockWork, BlockPlacement]]  # blocks, each by its work and its place


@dataclass(frozen=True)
class Stacked:
    """Some or all blocks of a stack by index, with the work and the place of the first."""

    members: Sequence[int]
    work: BlockWork
    place: BlockPlacement
    entries: int  # of the gradients of all

    @classmethod
    def of(cls, pairs: Pairs, members: Sequence[int]) -> Stacked:
        """Return blocks, which are alike and placed alike, by their indices."""
        work, place = pairs[members[0]]
        return cls(members, work, place, sum(prod(pairs[index][0].shape) for index in members))

    @property
    def item(self) -> int:
        """The bytes of an entry."""
        return ITEM_BYTES[self.work.dtype]

    @property
    def gradient(self) -> int:
        """The bytes of the gradients."""
        return self.item * self.entries

    def matrix(self, factor: int, blocks: int) -> int:
        """Return the bytes of a factor of some blocks, or of their statistics."""
        return self.item * blocks * prod(self.work.factors[factor].shape)

    def triangle(self, factor: int, blocks: int) -> int:
        """Return the bytes of the same, with matrices as triangles."""
        return self.item * blocks * self.work.factors[factor].packed_numel

    def unpacks(self, factor: int) -> bool:
        """Return whether solves of a factor unpack triangles."""
        return self.place.packed and self.work.factors[factor].kind == "psd"


UNNAMED_WORK = attrgetter(*(f.name for f in fields(BlockWork) if f.name != "name"))
UNNAMED_PLACE = attrgetter(*(f.name for f in fields(BlockPlacement) if f.name != "block"))
"""Return all but the block's name: blocks with equal work and places are of one kind."""

DIGESTED_WORK = attrgetter(*(f.name for f in fields(BlockWork)[1:] if f.compare))
"""Return the fields by which work is compared between ranks, but the name, the first."""
