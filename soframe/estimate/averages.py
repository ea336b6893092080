"""Running factors: averages over time of the statistics of all ranks.

With weights that add up to ``m`` after the decays of all statistics steps so far, a running factor
is ``R = (1/m) sum_t w_t sum_r c_{r,t}`` over statistics steps t and contributing ranks r. The sums
may be taken in either order. *Eagerly*, over ranks first, at every statistics step::

    m <- decay m + (1 - decay)        R <- R + (1 - decay)/m (sum_r c_r - R)

*Deferred*, over time first: each contributor keeps ``L_r``, and a solve settles them::

    L_r <- decay L_r + (1 - decay) c_r,    p <- decay p + (1 - decay)    at a statistics step
    R <- ((m - p) R + sum_r L_r) / m,      L_r <- 0,  p <- 0             at a solve

``m`` and ``p`` are `Record.masses` and `Record.pending`, the same on every rank. Eager sums are
needed by the next solve at the earliest: their collectives overlap with training, and
`Stack.arrive` averages them in before the next access to the factor.

Plain means over data are eager, and have the numbers of samples or rows as weights::

    m <- m + n        R <- R + n/m (sum_r c_r - R)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, repeat
from typing import NamedTuple

import torch
from torch import Tensor

from soframe.blocks.block import Block, PlacedBlocks, Stack, unpack
from soframe.comm.base import Backend
from soframe.comm.fused import Pending, Sum, add_up, own_memory
from soframe.comm.packing import pack_triangle
from soframe.estimate.gradients import Gradient
from soframe.estimate.plan import Plan
from soframe.kernels.devices import along_first, sent
from soframe.layers.layout import BlockShape
from soframe.methods.returned import observed_by
from soframe.specs import FactorKind, FactorSpec


@dataclass
class Term:
    """This rank's term of a running factor, for some blocks of a stack."""

    stack: Stack
    members: tuple[int, ...]  # the indices of the blocks
    index: int  # of the factor
    # The statistics, divided by the weights of all ranks: ``[groups, n, n]``, with a valid lower
    # triangle. None if this rank has none.
    tensor: Tensor | None
    # By block the number of rows that reached each group, for averages by group; else one number,
    # of samples or rows in a mean over data.
    reached: Sequence[Sequence[float]] = ()
    turn: int = 0  # the number of the step, by which factors of half precision are rounded
    rates: list[float] = field(default_factory=list)  # by block or by group; see `_increase_masses`

    def __post_init__(self) -> None:
        self.factor: FactorSpec = self.stack.like.factors[self.index]
        self.blocks: Sequence[Block] = self.stack.blocks_of(self.members)
        if not self.reached:
            self.reached = list(repeat((1.0,), len(self.members)))


class _Lerp(NamedTuple):
    """A running factor of a stack on its way to new statistics."""

    running: Tensor
    statistics: Tensor
    rate: float


def enter(
    placed: PlacedBlocks, terms: Sequence[Term], decay: float | None, *, identity: bool
) -> None:
    """Sum the terms of all ranks and average them into the running factors.

    Without a decay these are plain means over data.
    """
    backend = placed.backend
    eager: list[Term] = []
    deferred: dict[Block, None] = {}
    for term in terms:
        if decay is None:
            _increase_masses(term, None)
            eager.append(term)
            continue
        # As kfac-pytorch's averages, which start from the identity.
        if identity or term.factor.starts:
            _start(term.stack, term.members, term.index)
        _increase_masses(term, decay)
        if term.stack.place.deferred:
            _accumulate(term, decay, backend.rank)
            deferred.update(dict.fromkeys(term.blocks))
        else:
            eager.append(term)
    # All deferred factors of a block share this number: once per block.
    for block in deferred:
        assert decay is not None
        block.record.pending = decay * block.record.pending + (1 - decay)
    _reduce(placed, eager)


def _reduce(placed: PlacedBlocks, terms: Iterable[Term]) -> None:
    """Begin to sum terms over ranks; terms of one rank alone are averaged at once."""
    sums: dict[Sum, Term] = {}
    alone: list[Term] = []
    for term in terms:
        if len(term.stack.place.reductions[term.index].group) > 1:
            sums[_sum(term)] = term
        elif term.stack.held[term.index]:
            alone.append(term)
    if sums:
        for pending in add_up(placed.backend, list(sums), "reduce"):
            held: list[tuple[Term, Sum]] = []
            waiting: dict[Stack, None] = {}
            for total in pending.sums:
                term = sums[total]
                waiting[term.stack] = None
                if term.stack.held[term.index]:
                    held.append((term, total))
            entry = _then_average(placed, pending, held)
            # Ranks that only send wait too: until then the engine keeps their buffer.
            for stack in waiting:
                stack.pending.append(entry)
    average(placed, alone)


def _then_average(
    placed: PlacedBlocks, pending: Pending, held: Sequence[tuple[Term, Sum]]
) -> Pending:
    """Return the wait for some sums, after which the held ones are averaged into the factors."""

    def end() -> None:
        pending.wait()
        for term, total in held:
            term.tensor = total.packed()
        average(placed, [term for term, _ in held])

    return Pending(end, nbytes=pending.nbytes)


def _increase_masses(term: Term, decay: float | None) -> None:
    """Increase the weights of a factor, and set the rates and the step of the new statistics.

    Dividing by the weight removes the start-up bias, as in Adam. Groups that no row reached keep
    their average.
    """
    factor = term.factor
    keep = 1.0  # in a mean over data
    if decay is not None:
        keep = decay if factor.decay is None else factor.decay
    known: tuple[object, ...] = ()  # most blocks have the weights of the one before
    masses: list[float] = []
    rates: list[float] = []
    for block, reached in zip(term.blocks, term.reached, strict=True):
        record = block.record
        record.statistics_at[factor.name] = term.turn
        old_masses = record.masses.get(factor.name) or tuple(repeat(0.0, len(reached)))
        if (old_masses, reached) != known:
            known, masses, rates = (old_masses, reached), [], []
            for old_mass, rows in zip(old_masses, reached, strict=True):
                mass, rate = old_mass, 0.0
                if rows > 0:
                    weight = rows if decay is None else 1 - keep
                    mass = keep * old_mass + weight
                    rate = weight / mass
                masses.append(mass)
                rates.append(rate)
        record.masses[factor.name] = tuple(masses)
        term.rates += rates


def average(placed: PlacedBlocks, terms: Iterable[Term]) -> None:
    """Average new statistics into running factors: ``R <- R + rate (new - R)``.

    Their tensors, now of all ranks, are ``[groups, n, n]``, packed, or None for zeros.
    """
    lerps: list[_Lerp] = []
    for term in terms:
        factor, like, new = term.factor, term.stack.like, term.tensor
        if new is None:
            shape = (len(term.members) * factor.groups, *factor.shape[1:])
            new = torch.zeros(shape, dtype=like.dtype, device=like.device)
        if isinstance(factor.kind, FactorKind):
            running = _by_kind(placed, term, factor.kind, new)
            term.stack.set_factor(factor.name, term.members, running, term.turn)
            continue
        lerp = _averaged(term, new)
        if lerp is not None:
            lerps.append(lerp)
    if lerps:
        running_factors, statistics, rates = zip(*lerps, strict=True)
        torch._foreach_lerp_(running_factors, statistics, rates)


def _averaged(term: Term, statistics: Tensor) -> _Lerp | None:
    """Average into a factor here; with one rate for all its blocks return it for a fused call."""
    stack, factor, name = term.stack, term.factor, term.factor.name
    has_all_blocks = len(term.members) == len(stack.blocks)
    new = pack(statistics, factor) if stack.place.packed else unpack(statistics, factor)
    # Matrices of calls have a valid lower triangle only; averages of gradients have both.
    is_matrix = factor.kind == "psd" and new.dim() == 3
    is_lower = is_matrix and factor.captured and new is statistics

    # The first statistics have rate 1 (groups without rows are zero): they become the factor.
    if name not in stack.factors:
        if has_all_blocks:
            rounded = stack.rounded(new, name, len(term.members), term.turn)
            stack.store_factor(name, own_memory(rounded), lower=is_lower)
            return None
        kept = stack.like.factor_dtype
        stack.store_factor(name, stack.empty(tuple(new.shape), len(term.members), kept))
    if is_lower:
        stack.lower.add(name)

    # Factors of another dtype, or on the host, are averaged in a copy.
    running = stack.stored_factor(name).to(stack.like.dtype)
    is_copy = running is not stack.factors[name]
    if has_all_blocks and len(set(term.rates)) == 1:
        if not is_copy:
            return _Lerp(running, new, term.rates[0])
        running.lerp_(new, term.rates[0])
    else:
        _lerp_blocks(term, running, new)
    if is_copy:
        rounded = stack.rounded(running, name, len(stack.blocks), term.turn)
        # Rounding makes both triangles.
        stack.store_factor(name, rounded, lower=name in stack.lower and rounded is running)
    return None


def _by_kind(placed: PlacedBlocks, term: Term, kind: FactorKind, new: Tensor) -> Tensor:
    """Return running factors after new statistics, as their kind averages them."""
    stack, name = term.stack, term.factor.name
    running = new.new_zeros((len(new), *term.factor.running_shape[1:]))
    if name in stack.factors:
        running = stack.take(stack.factor(name), term.members).to(new.dtype)
    rates = by_group(_rates_of_groups(term, len(new)), running)
    try:
        averaged = kind.average(running, new, rates)
    except Exception as error:  # of any kind: all ranks raise together
        placed.keep(error, stack)
        return running
    # Groups without rows keep theirs.
    return torch.where(rates > 0, averaged, running)


def _rates_of_groups(term: Term, groups: int) -> list[float]:
    """Return the rate of each group of some blocks."""
    groups_of_rate = groups // len(term.rates)
    return list(chain.from_iterable(repeat(rate, groups_of_rate) for rate in term.rates))


def _lerp_blocks(term: Term, running: Tensor, new: Tensor) -> None:
    """Average into some blocks of a factor, each by its rates."""
    rates = iter(_rates_of_groups(term, len(new)))
    for view, part in term.stack.matched(running, term.members, new):
        rates_of_view = list(islice(rates, len(view)))
        if len(set(rates_of_view)) == 1:
            view.lerp_(part, rates_of_view[0])
        else:
            view.lerp_(part, by_group(rates_of_view, part))


def by_group(numbers: Sequence[float], like: Tensor) -> Tensor:
    """Return one number per group in the dtype and on the device of a tensor, to multiply it."""
    return along_first(sent(numbers, like), like)


def _accumulate(term: Term, decay: float, rank: int) -> None:
    """Add this rank's term to its accumulator: ``L <- decay L + (1 - decay) c``."""
    stack, factor = term.stack, term.factor
    if not stack.place.contributes(rank, term.index):
        return
    if factor.name not in stack.accumulators:
        stack.accumulators[factor.name] = stack.empty(factor.packed_shape)
    accumulator = stack.accumulators[factor.name]
    for view in stack.views(accumulator, term.members):
        view.mul_(decay)
    if term.tensor is not None:
        packed = pack(term.tensor, factor)
        for view, part in stack.matched(accumulator, term.members, packed):
            view.add_(part, alpha=1 - decay)


def observe(placed: PlacedBlocks, stack: Stack, gradient: Gradient | None, plan: Plan) -> None:
    """Average statistics of a stack's averaged gradients into running factors, on every rank.

    All gradient workers compute the same statistics, so nothing is sent. Blocks without statistics
    take their first ones in any step, and so do blocks that had no gradient when these were last
    due; the others if they are due.
    """
    if plan.observes and not stack.like.captured:
        _mark_missed(stack, gradient)
    if gradient is None:
        return
    for chosen in stack.alike(_due_members(stack, gradient, plan)):
        matrix = gradient.of(stack, chosen)
        factors: Mapping[str, Tensor] = {}
        with placed.backend.phases("observe"):
            if matrix is not None and placed.rank in stack.place.gradient_workers:
                factors = _statistics(placed, stack, chosen, matrix)
            _average_observed(placed, stack, chosen, factors, plan)


def _due_members(stack: Stack, gradient: Gradient, plan: Plan) -> list[int]:
    """Return the blocks whose gradients give statistics in this step."""
    members: list[int] = []
    for member in gradient.members:
        block = stack.blocks[member]
        # These statistics need second-order data: a block that lost its own is solved first.
        if block.has_lost_data:
            continue
        if plan.observes or block.is_overdue:
            members.append(member)
    return members


def _mark_missed(stack: Stack, gradient: Gradient | None) -> None:
    """Mark the blocks without a gradient at their turn for statistics."""
    # `Refresh.note_missed_turns` marks blocks that have statistics of calls, too.
    used = () if gradient is None else gradient.members
    if len(used) < len(stack.blocks):
        for block in stack.blocks:
            if block.member not in used:
                block.record.missed = 1


def _statistics(
    placed: PlacedBlocks, stack: Stack, members: tuple[int, ...], gradient: Tensor
) -> Mapping[str, Tensor]:
    """Return the statistics of some blocks' gradients, ``[groups, n, n]`` by factor."""
    method, shape = stack.like.method, gradient.shape
    if shape not in stack.specs:
        stack.specs[shape] = method.factors(BlockShape(*shape))
    specs = stack.specs[shape]
    data = stack.data_of(members)
    try:
        return observed_by(method, specs, gradient, data)
    except Exception as error:  # of any kind: all ranks raise together
        placed.keep(error, stack)
        return {spec.name: gradient.new_zeros(spec.shape) for spec in specs}


def _average_observed(
    placed: PlacedBlocks,
    stack: Stack,
    members: tuple[int, ...],
    factors: Mapping[str, Tensor],
    plan: Plan,
) -> None:
    """Average statistics of some blocks, ``[groups, n, n]`` by factor, on gradient workers."""
    for index, factor in enumerate(stack.like.factors):
        if factor.captured:
            continue
        if factor.starts:
            _start(stack, members, index)
        term = Term(stack, members, index, None, turn=plan.step)
        _increase_masses(term, plan.decay)
        if not stack.like.captured:
            for block in term.blocks:
                block.record.missed = 0
        # EMA weights grow on all ranks; only holders have the factor.
        if stack.held[index]:
            term.tensor = factors[factor.name].to(stack.like.dtype)
            average(placed, [term])


def settle(placed: PlacedBlocks, members: Mapping[Stack, tuple[int, ...]]) -> None:
    """Reduce deferred statistics of some blocks into running factors; every rank must call."""
    for stack in members:
        stack.arrive()
    if not (due := _deferred(members)):
        return
    for term, total in _settled_terms(placed.backend, due, "reduce"):
        if total is not None:
            stack, name = term.stack, term.factor.name
            turn = max(block.record.statistics_at[name] for block in term.blocks)
            stored = store(total, term.factor, packed=stack.place.packed)
            stack.set_factor(name, term.members, stored, turn)
    for stack, chosen in due.items():
        for member in chosen:
            stack.blocks[member].record.pending = 0.0
        for tensor in stack.accumulators.values():
            for view in stack.views(tensor, chosen):
                view.zero_()


def settled(
    placed: PlacedBlocks, stack: Stack, members: tuple[int, ...], phase: str
) -> dict[str, Tensor]:
    """Return settled running factors of some blocks, packed, and change nothing.

    If statistics are pending, every rank must call.
    """
    if not _deferred({stack: members}):
        return {
            factor.name: pack(stack.take(stack.factor(factor.name), members), factor)
            for factor in stack.like.factors
            if factor.name in stack.factors
        }
    totals = _settled_terms(placed.backend, {stack: members}, phase)
    return {term.factor.name: total for term, total in totals if total is not None}


def _deferred(members: Mapping[Stack, tuple[int, ...]]) -> dict[Stack, tuple[int, ...]]:
    """Return the blocks among some that have deferred statistics."""
    due: dict[Stack, tuple[int, ...]] = {}
    for stack, chosen in members.items():
        pending = tuple([m for m in chosen if stack.blocks[m].record.pending > 0])
        if pending:
            due[stack] = pending
    return due


def _settled_terms(
    backend: Backend, due: Mapping[Stack, tuple[int, ...]], phase: str
) -> list[tuple[Term, Tensor | None]]:
    """Return the settled factors of some blocks, packed; None where this rank holds none."""
    sums: dict[Sum, Term] = {}
    for stack, members in due.items():
        for index, factor in enumerate(stack.like.factors):
            local = stack.accumulators.get(factor.name)
            if local is not None:
                local = stack.take(local, members)
            term = Term(stack, members, index, local)
            sums[_sum(term)] = term
    for pending in add_up(backend, list(sums), phase):
        pending.wait()
    totals: list[tuple[Term, Tensor | None]] = []
    for summed, term in sums.items():
        total, stack, factor = None, term.stack, term.factor
        if stack.held[term.index]:
            # R <- ((m - p) R + sum_r L_r) / m, as in the module's docstring.
            total = summed.packed()
            masses: list[float] = []
            settled_masses: list[float] = []
            for block in term.blocks:
                masses += repeat(block.mass, factor.groups)
                settled_masses += repeat(block.mass - block.record.pending, factor.groups)
            divisors = by_group(masses, total)
            total = total / divisors
            if factor.name in stack.factors:
                rates = by_group(settled_masses, total) / divisors
                running = stack.take(stack.factor(factor.name), term.members)
                total.addcmul_(pack(running, factor).to(total.dtype), rates.expand_as(total))
        totals.append((term, total))
    return totals


def _sum(term: Term) -> Sum:
    """Return the sum of a term over ranks, and move the tensor into it."""
    like, place, factor = term.stack.like, term.stack.places[term.members[0]], term.factor
    tensor, term.tensor = term.tensor, None
    return Sum(
        reduction=place.reductions[term.index],
        shape=(len(term.members) * factor.groups, *factor.shape[1:]),
        dtype=like.dtype,
        wire=getattr(torch, place.wire) if place.wire else like.dtype,
        device=like.device,
        tensor=tensor,
        symmetric=factor.kind == "psd",
    )


def pack(stored: Tensor, spec: FactorSpec) -> Tensor:
    """Return a factor as it is sent: symmetric matrices as triangles."""
    if spec.kind == "psd" and stored.dim() == 3:
        return pack_triangle(stored)
    return stored


def store(stored: Tensor, spec: FactorSpec, *, packed: bool) -> Tensor:
    """Return a running factor in the format of a placement, in memory of its own."""
    return own_memory(pack(stored, spec) if packed else unpack(stored, spec))


def _start(stack: Stack, members: Iterable[int], index: int) -> None:
    """Start averages without statistics: by their kind, from the identity, or else from ones."""
    factor = stack.like.factors[index]
    new = tuple(m for m in members if factor.name not in stack.blocks[m].record.masses)
    # One weight for each group, or one for all: `_increase_masses` reads as many.
    numbers = factor.groups if factor.mean_over == "group rows" else 1
    for member in new:
        stack.blocks[member].record.masses[factor.name] = tuple([1.0] * numbers)
    if not new or not stack.held[index]:
        return
    start = _initial(factor, stack.like)
    start = start.repeat(len(new), *repeat(1, start.dim() - 1))
    stack.set_factor(factor.name, new, store(start, factor, packed=stack.place.packed))


def _initial(factor: FactorSpec, like: Block) -> Tensor:
    """Return the running factor of a block before its statistics."""
    if isinstance(factor.kind, FactorKind):
        start = factor.kind.start(factor)
        if start is not None:
            return start.to(like.device, like.dtype)
    scale = 1.0 if factor.start is None else factor.start
    ones = torch.full(factor.running_shape, scale, dtype=like.dtype, device=like.device)
    if factor.kind == "psd":
        return ones * torch.eye(factor.size, dtype=like.dtype, device=like.device)
    return ones
