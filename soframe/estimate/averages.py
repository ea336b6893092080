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
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from soframe.blocks.block import Block
from soframe.blocks.placed import PlacedBlocks
from soframe.blocks.stack import Stack, unpack
from soframe.comm.base import Backend
from soframe.comm.fused import Pending, Sum, add_up, own_memory
from soframe.comm.packing import pack_triangle
from soframe.estimate.gradients import Gradients
from soframe.kernels.devices import sent
from soframe.layers.layout import BlockShape
from soframe.methods.returned import observed_by
from soframe.specs import FactorSpec


@dataclass
class Contribution:
    """This rank's term of a running factor, for some blocks of a stack.

    Attributes:
        stack: The stack.
        members: The indices of the blocks.
        blocks: The blocks.
        index: The index of the factor.
        factor: The factor.
        tensor: The statistics, divided by the weights of all ranks: ``[groups, n, n]``, with a
            valid lower triangle. None if this rank has none.
        reached: By block the number of rows that reached each group, for averages by group.
        scale: A multiplier that ``tensor`` still lacks for the sum over ranks to be the average.
        turn: The number of the step, by which factors of half precision are rounded.
        rates: The rates of the new statistics, by block or by group; see `_gain`.
    """

    stack: Stack
    members: tuple[int, ...]
    index: int
    tensor: Tensor | None
    reached: Sequence[Sequence[float]] = ()
    scale: float = 1.0
    turn: int = 0
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.factor: FactorSpec = self.stack.like.factors[self.index]
        self.blocks: list[Block] = [self.stack.blocks[member] for member in self.members]

    def held_by(self, rank: int) -> bool:
        """Return whether a rank holds the running factor."""
        return self.stack.place.holds(rank, self.index)


def enter(
    backend: Backend, contributions: Sequence[Contribution], decay: float, *, identity: bool
) -> None:
    """Sum the contributions of all ranks and average them into the running factors."""
    eager: list[Contribution] = []
    deferred: dict[Block, None] = {}
    for one in contributions:
        # As kfac-pytorch's averages, which start from the identity.
        if identity:
            _start(one.stack, one.members, one.index, one.factor.start or 1.0, backend.rank)
        _gain(one, decay)
        if one.stack.place.deferred:
            _accumulate(one, decay, backend.rank)
            deferred.update(dict.fromkeys(one.blocks))
        else:
            eager.append(one)
    # All deferred factors of a block share this number: once per block.
    for block in deferred:
        block.record.pending = decay * block.record.pending + (1 - decay)
    sums = {_sum(one): one for one in eager}
    for pending in add_up(backend, list(sums), "reduce"):
        arriving = [(sums[total], total) for total in pending.sums]
        held = [pair for pair in arriving if pair[0].held_by(backend.rank)]
        entry = _entry(pending, held)
        # Ranks that only send wait too: until then the engine keeps their buffer.
        for stack in {one.stack: None for one, _ in arriving}:
            stack.expect(entry)
    average(
        (one, total.tensor)
        for total, one in sums.items()
        if not total.travels and one.held_by(backend.rank)
    )


def _entry(pending: Pending, held: Sequence[tuple[Contribution, Sum]]) -> Pending:
    """Return the wait for some sums, which then averages the held ones into the factors."""

    def end() -> None:
        pending.wait()
        average((one, total.packed()) for one, total in held)

    return Pending(end, nbytes=pending.nbytes)


def _gain(one: Contribution, decay: float) -> None:
    """Increase the EMA weights of a factor, and set the rates of the new statistics.

    Dividing by the weight removes the start-up bias, as in Adam. Groups that no row reached keep
    their average.
    """
    name, keep = one.factor.name, decay if one.factor.decay is None else one.factor.decay
    for number, block in enumerate(one.blocks):
        masses = block.record.masses
        if one.factor.mean_over != "group rows":
            mass = keep * masses.get(name, (0.0,))[0] + (1 - keep)
            masses[name] = (mass,)
            one.rates.append((1 - keep) / mass)
            continue
        reached = one.reached[number]
        before = masses.get(name, (0.0,) * one.factor.groups)
        after = [
            keep * mass + (1 - keep) if rows > 0 else mass
            for mass, rows in zip(before, reached, strict=True)
        ]
        masses[name] = tuple(after)
        pairs = zip(after, reached, strict=True)
        one.rates += [(1 - keep) / mass if rows > 0 else 0.0 for mass, rows in pairs]


def average(each: Iterable[tuple[Contribution, Tensor | None]]) -> None:
    """Average new statistics into running factors: ``R <- R + rate (new - R)``.

    Statistics are ``[groups, n, n]``, packed, or None for zeros.
    """
    whole = [entry for one, new in each for entry in _averaged(one, new)]
    if whole:
        torch._foreach_lerp_(*map(list, zip(*whole, strict=True)))


def _averaged(one: Contribution, new: Tensor | None) -> list[tuple[Tensor, Tensor, float]]:
    """Average into parts of a factor here; return the whole factor, if it has one rate."""
    stack, members, factor, rates = one.stack, one.members, one.factor, one.rates
    name, packed = factor.name, stack.place.packed and factor.kind == "psd"
    if new is None:
        new = torch.zeros(
            (len(members) * factor.groups, *factor.shape[1:]),
            dtype=stack.like.dtype,
            device=stack.like.device,
        )
    # Statistics of calls have a valid lower triangle only; averaged gradients have both.
    lower = factor.captured and factor.kind == "psd" and new.dim() == 3 and not packed
    new = pack(new, factor) if packed else unpack(new, factor)
    factors = stack.factors
    # The first statistics have rate 1 (groups without rows are zero): they become the factor.
    if name not in factors and len(members) == len(stack.blocks):
        stack.hold(name, own_memory(stack.rounded(new, name, len(members), one.turn)))
        (stack.lower.add if lower else stack.lower.discard)(name)
        return []
    if name not in factors:
        kept = stack.like.factor_dtype
        stack.hold(name, stack.empty(tuple(new.shape), len(members), kept))
    if lower:
        stack.lower.add(name)
    running = stack.held(name).to(stack.like.dtype)
    if len(set(rates)) == 1 and len(members) == len(stack.blocks):
        if running is factors[name]:
            return [(running, new, rates[0])]
        running.lerp_(new, rates[0])
        members = ()
    # One rate per block becomes one for each of its groups.
    each = list(rates)
    if len(each) < len(new):
        each = [rate for rate in each for _ in range(len(new) // len(each))]
    start = 0
    for view in stack.views(running, members):
        stop = start + len(view)
        part, own = new[start:stop], each[start:stop]
        if len(set(own)) == 1:
            view.lerp_(part, own[0])
        else:
            view.lerp_(part, sent(own, part).view(-1, *(1 for _ in part.shape[1:])))
        start = stop
    if running is not factors[name]:
        whole = stack.rounded(running, name, len(stack.blocks), one.turn)
        if whole is not running:  # rounded, with both triangles
            stack.lower.discard(name)
        stack.hold(name, whole)
    return []


def _accumulate(one: Contribution, decay: float, rank: int) -> None:
    """Add this rank's contribution to its accumulator: ``L <- decay L + (1 - decay) c``."""
    stack, factor = one.stack, one.factor
    if not stack.place.contributes(rank, one.index):
        return
    if factor.name not in stack.accumulators:
        stack.accumulators[factor.name] = stack.empty(factor.packed_shape)
    # Without data the accumulator only decays.
    packed = None if one.tensor is None else pack(one.tensor, factor)
    start = 0
    for view in stack.views(stack.accumulators[factor.name], one.members):
        view.mul_(decay)
        if packed is not None:
            view.add_(packed[start : start + len(view)], alpha=1 - decay)
        start += len(view)


def observe(
    placed: PlacedBlocks,
    gradients: Gradients,
    *,
    due: bool,
    decay: float,
    step: int,
    after: bool,
) -> None:
    """Average statistics of the averaged gradients into running factors; every rank must call.

    All gradient workers compute the same statistics, so nothing is sent. Methods that wait for the
    updates (`refreshes_after`) are called with ``after``. Blocks without statistics take their
    first ones in any step, and so do blocks that had no gradient when it was last ``due``; the
    others if it is due.
    """
    for stack in placed.stacks:
        like, gradient = stack.like, gradients.get(stack)
        if len(like.captured) == len(like.factors) or like.method.refreshes_after != after:
            continue
        used = () if gradient is None else gradient.members
        # `Refresh.end_window` marks blocks that have statistics of calls, too.
        if due and not like.captured and len(used) < len(stack.blocks):
            for block in stack.blocks:
                if block.member not in used:
                    block.record.missed = 1
        if gradient is None:
            continue
        # These statistics need second-order data: a block that lost its own is solved first.
        members = [m for m in gradient.members if not stack.blocks[m].lost]
        if not due:
            members = [m for m in members if stack.blocks[m].waits]
        for chosen in stack.alike(members):
            matrix = gradient.of(stack, chosen)
            factors: Mapping[str, Tensor] = {}
            with placed.backend.phases("observe"):
                if matrix is not None and placed.rank in stack.place.gradient_workers:
                    specs = like.method.factors(BlockShape(*matrix.shape))
                    data = stack.data_of(chosen)
                    try:
                        factors = observed_by(like.method, specs, matrix, data)
                    except Exception as error:  # of any kind: all ranks raise together
                        placed.keep(error, stack)
                        factors = {spec.name: matrix.new_zeros(spec.shape) for spec in specs}
                _observe(stack, chosen, factors, rank=placed.rank, decay=decay, step=step)


def _observe(
    stack: Stack,
    members: tuple[int, ...],
    factors: Mapping[str, Tensor],
    *,
    rank: int,
    decay: float,
    step: int,
) -> None:
    """Average statistics of some blocks, ``[groups, n, n]`` by factor, on gradient workers."""
    for index, factor in enumerate(stack.like.factors):
        if factor.captured:
            continue
        if factor.start is not None:
            _start(stack, members, index, factor.start, rank)
        one = Contribution(stack, members, index, None, turn=step)
        _gain(one, decay)
        for block in one.blocks:
            block.record.statistics_at[factor.name] = step
            if not stack.like.captured:
                block.record.missed = 0
        # EMA weights grow on all ranks; only holders have the factor.
        if one.held_by(rank):
            average([(one, factors[factor.name].to(stack.like.dtype))])


def settle(placed: PlacedBlocks, members: Mapping[Stack, tuple[int, ...]]) -> None:
    """Reduce deferred statistics of some blocks into running factors; every rank must call."""
    for stack in members:
        stack.arrive()
    if not (due := _deferred(members)):
        return
    for stack, chosen, factor, total in _settled(placed.backend, due, "reduce"):
        if total is not None:
            turn = max(stack.blocks[m].record.statistics_at[factor.name] for m in chosen)
            stored = store(total, factor, packed=stack.place.packed)
            stack.set_factor(factor.name, chosen, stored, turn)
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
    totals = _settled(placed.backend, {stack: members}, phase)
    return {factor.name: total for _, _, factor, total in totals if total is not None}


def _deferred(members: Mapping[Stack, tuple[int, ...]]) -> dict[Stack, tuple[int, ...]]:
    """Return the given blocks that have deferred statistics."""
    due = {
        stack: tuple(m for m in chosen if stack.blocks[m].record.pending > 0)
        for stack, chosen in members.items()
    }
    return {stack: chosen for stack, chosen in due.items() if chosen}


def _settled(
    backend: Backend, due: Mapping[Stack, tuple[int, ...]], phase: str
) -> list[tuple[Stack, tuple[int, ...], FactorSpec, Tensor | None]]:
    ones = []
    for stack, members in due.items():
        for index, factor in enumerate(stack.like.factors):
            own = stack.accumulators.get(factor.name)
            local = None if own is None else stack.take(own, members)
            ones.append(Contribution(stack, members, index, local))
    sums = [_sum(one) for one in ones]
    for pending in add_up(backend, sums, phase):
        pending.wait()
    totals: list[tuple[Stack, tuple[int, ...], FactorSpec, Tensor | None]] = []
    for one, summed in zip(ones, sums, strict=True):
        new, stack, factor = None, one.stack, one.factor
        if one.held_by(backend.rank):
            # R <- ((m - p) R + sum_r L_r) / m, as in the module's docstring.
            masses = _each(one, [block.mass for block in one.blocks])
            new = summed.packed() / masses
            if factor.name in stack.factors:
                rest = _each(one, [b.mass - b.record.pending for b in one.blocks]) / masses
                held = stack.take(stack.factor(factor.name), one.members)
                new.addcmul_(pack(held, factor).to(new.dtype), rest.expand_as(new))
        totals.append((stack, one.members, factor, new))
    return totals


def _each(one: Contribution, numbers: Sequence[float]) -> Tensor:
    """Return one number per block for each of its groups, ``[groups, 1]``."""
    groups = one.factor.groups
    each = torch.tensor(numbers, dtype=torch.float64, device="cpu").repeat_interleave(groups)
    return each.to(one.stack.like.device, one.stack.like.dtype).unsqueeze(1)


def _sum(one: Contribution) -> Sum:
    """Return the sum of a contribution, and move the tensor into it."""
    like, place, factor = one.stack.like, one.stack.places[one.members[0]], one.factor
    tensor, one.tensor = one.tensor, None
    return Sum(
        way=place.reductions[one.index],
        shape=(len(one.members) * factor.groups, *factor.shape[1:]),
        dtype=like.dtype,
        wire=getattr(torch, place.wire) if place.wire else like.dtype,
        device=like.device,
        tensor=tensor,
        symmetric=factor.kind == "psd",
    )


def pack(stored: Tensor, spec: FactorSpec) -> Tensor:
    """Return a factor as it is sent: symmetric matrices as triangles."""
    return pack_triangle(stored) if spec.kind == "psd" and stored.dim() == 3 else stored


def store(stored: Tensor, spec: FactorSpec, *, packed: bool) -> Tensor:
    """Return a running factor in the format of a placement, in memory of its own."""
    return own_memory(pack(stored, spec) if packed else unpack(stored, spec))


def _start(stack: Stack, members: Iterable[int], index: int, scale: float, rank: int) -> None:
    """Start averages without statistics from a multiple of the identity, or else of ones."""
    factor = stack.like.factors[index]
    new = tuple(m for m in members if factor.name not in stack.blocks[m].record.masses)
    for member in new:
        stack.blocks[member].record.masses[factor.name] = (1.0,)
    if not new or not stack.place.holds(rank, index):
        return
    like, groups = stack.like, len(new) * factor.groups
    if factor.kind == "psd":
        eye = torch.eye(factor.size, dtype=like.dtype, device=like.device) * scale
        start = eye.repeat(groups, 1, 1)
    else:
        shape = (groups, *factor.shape[1:])
        start = torch.full(shape, scale, dtype=like.dtype, device=like.device)
    stack.set_factor(factor.name, new, store(start, factor, packed=stack.place.packed))
