"""The running factors: averages of everybody's statistics, on the ranks that hold them.

With weights that add up to ``m`` after the decays of all statistics steps so far, a running factor
is ``R = (1/m) sum_t w_t sum_r c_{r,t}`` over statistics steps t and contributing ranks r. The sums
may be taken in either order. *Eagerly*, over ranks first, at every statistics step::

    m <- decay m + (1 - decay)        R <- R + (1 - decay)/m (sum_r c_r - R)

*Deferred*, over time first: each contributor keeps ``L_r``, and a solve settles them::

    L_r <- decay L_r + (1 - decay) c_r,    p <- decay p + (1 - decay)    at a statistics step
    R <- ((m - p) R + sum_r L_r) / m,      L_r <- 0,  p <- 0             at a solve

The weights ``m`` and ``p`` (`masses` and `pending` of `soframe.blocks.running`) are known to every
rank.

Eager sums are needed by the next solve at the earliest. They travel while the model goes on, and
enter when somebody looks at the running factor, at the latest in the next step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.blocks.block import Block
from soframe.comm.base import Backend
from soframe.comm.fusion import Sum, add_up_sums, additions, own_memory
from soframe.comm.packing import pack_triangle, unpack_triangle
from soframe.comm.tasks import Task, start
from soframe.specs import FactorSpec
from soframe.strategies.placement import Placement
from soframe.strategies.work import BlockPlacement

Placed = tuple[Block, BlockPlacement]
Rates = dict[tuple[Block, str], float | list[float]]
"""How much of a new statistic enters a running factor, of each group where these differ."""
_Total = tuple[Block, BlockPlacement, FactorSpec, Tensor | None]


def enter(
    backend: Backend,
    used: Sequence[Placed],
    contributions: Mapping[Block, dict[str, Tensor]],
    decay: float,
    start_from_identity: bool,
    reached: Mapping[Block, Sequence[float]],
) -> None:
    """Let the contributions of all ranks enter the running factors, or the accumulators.

    Args:
        backend: The backend.
        used: The blocks that have statistics from any rank, the same on every rank.
        contributions: This rank's, ``[groups, n, n]``, divided by the added-up weights already,
            of which the lower triangle counts;
            of each block those of the factors that the rank contributes to. They are used up.
        decay: What the running average keeps of its past.
        start_from_identity: Whether averages start from the identity, as kfac-pytorch's do.
        reached: Of blocks whose groups have averages of their own: how many rows reached each.
    """
    rates: Rates = {}
    for block, place in used:
        block.running.arrive()
        if block.mass == 0 and start_from_identity:
            _start_from_identity(block, place, backend.rank)
        rates.update(_gains(block, decay, reached.get(block)))
        if place.deferred:
            _gather(block, place, backend.rank, contributions[block], decay)
    eager = [(block, place) for block, place in used if not place.deferred]
    jobs = _jobs(backend, eager, contributions)
    if any(len(job.sum.way.spread) > 1 for job in jobs):
        # What travels twice is waited for here: the second way would start out of order.
        add_up_sums(backend, [job.sum for job in jobs], "reduce")
        for job in jobs:
            _enter(job, rates)
        return
    job_of = {id(job.sum): job for job in jobs}
    for parts, addition in additions(backend, [job.sum for job in jobs], "reduce"):
        together = [job_of[id(part)] for part in parts]
        task = _arrival(addition, together, rates)
        start([task], overlap=backend.overlap)
        for block in {job.block: None for job in together}:
            block.running.expect(task)
    for job in jobs:
        if not job.sum.travels:
            _enter(job, rates)


def _gains(block: Block, decay: float, reached: Sequence[float] | None) -> Rates:
    """Let the masses of a block's factors grow, and return how much of the statistics enters."""
    rates: Rates = {}
    for factor in block.captured:
        if factor.name in block.window.gathered:
            keep = decay if factor.decay is None else factor.decay
            rates[block, factor.name] = block.running.gain(factor, keep, reached)
    return rates


def _arrival(addition: Task, jobs: Sequence[_Job], rates: Rates) -> Task:
    """Add up, and let the sums enter when they are there."""
    yield from addition
    for job in jobs:
        _enter(job, rates)


def _enter(job: _Job, rates: Rates) -> None:
    total = job.total()
    if total is None:
        return
    running, name = job.block.running, job.factor.name
    # Sums are lower triangles; what travelled is packed.
    lower = job.factor.kind == "psd" and total.dim() == 3 and not job.place.packed
    if name not in running.arrived:  # a look at `running` itself would wait for this
        running.put(name, store(total, job.factor, job.place), lower=lower)
        return
    new = pack(total, job.factor) if job.place.packed else unpack(total, job.factor)
    running.average(name, new, rates[job.block, name], lower=lower)


def _gather(
    block: Block, place: BlockPlacement, rank: int, new: dict[str, Tensor], decay: float
) -> None:
    """Add this rank's contributions to its accumulators."""
    block.running.defer(decay)
    for index, factor in enumerate(block.factors):
        if not place.contributes(rank, index):
            continue
        if factor.name not in block.running.accumulators:
            zeros = torch.zeros(factor.packed_shape, dtype=block.dtype, device=block.device)
            block.running.accumulate_in(factor.name, zeros)
        moment = new.pop(factor.name, None)
        packed = None if moment is None else pack(moment, factor)
        block.running.accumulate(factor.name, packed, decay)


def observe(
    block: Block, factors: Mapping[str, Tensor], places: BlockPlacement, rank: int, decay: float
) -> None:
    """Let statistics of the averaged gradient enter the running factors; every rank must call.

    They are the same on every gradient worker, so that nothing travels.

    Args:
        block: The block.
        factors: The statistics, on gradient workers; nothing elsewhere.
        places: The block's placement.
        rank: This rank.
        decay: What running averages keep of their past, where factors have no decay of their own.
    """
    for index, factor in enumerate(block.factors):
        if factor.captured:
            continue
        name, running, holds = factor.name, block.running, places.holds(rank, index)
        if factor.start is not None and name not in running.masses:
            start = _identity(block, factor, places, factor.start) if holds else None
            running.begin_at(name, start)
        keep = decay if factor.decay is None else factor.decay
        rate = running.gain(factor, keep)
        if not holds:
            continue
        new = factors[name]
        if name not in running.arrived:
            running.put(name, store(new.to(block.dtype), factor, places))
        else:
            running.average(name, pack(new, factor) if places.packed else unpack(new, factor), rate)


def settle(backend: Backend, placed: Sequence[Placed]) -> None:
    """Bring what was deferred into the running factors; every rank must call.

    Args:
        backend: The backend.
        placed: The blocks, the same on every rank.
    """
    due = [(block, place) for block, place in placed if block.running.pending > 0]
    for block, place, factor, total in _settled(backend, due, "reduce"):
        if total is not None:
            block.running.put(factor.name, store(total, factor, place))
    for block, _ in due:
        block.running.settle()


def settled(backend: Backend, block: Block, place: BlockPlacement, phase: str) -> dict[str, Tensor]:
    """Return the running factors as if they were settled, and change nothing.

    Args:
        backend: The backend.
        block: The block; where it has something pending, every rank must call.
        place: Its placement.
        phase: The phase that traffic is counted under.

    Returns:
        The factors that this rank holds, packed: ``[groups, n (n + 1) / 2]``.
    """
    if block.running.pending == 0:
        running = block.running
        return {f.name: pack(running[f.name], f) for f in block.factors if f.name in running}
    totals = _settled(backend, [(block, place)], phase)
    return {factor.name: total for _, _, factor, total in totals if total is not None}


def _settled(backend: Backend, due: Sequence[Placed], phase: str) -> list[_Total]:
    locals_ = {block: dict(block.running.accumulators) for block, _ in due}
    totals: list[_Total] = []
    jobs = _jobs(backend, due, locals_)
    add_up_sums(backend, [job.sum for job in jobs], phase)
    for job in jobs:
        new = None
        block, name = job.block, job.factor.name
        if (total := job.total()) is not None:
            new = pack(total, job.factor) / block.mass
            if name in block.running:
                share = (block.mass - block.running.pending) / block.mass
                new.add_(pack(block.running[name], job.factor), alpha=share)
        totals.append((block, job.place, job.factor, new))
    return totals


@dataclass
class _Job:
    """One factor whose parts are added up over ranks."""

    block: Block
    place: BlockPlacement
    factor: FactorSpec
    sum: Sum
    held: bool

    def total(self) -> Tensor | None:
        """Return the sum, once it is there, if this rank is to hold it."""
        if not self.held:
            return None
        # A holder that is alone with a factor and has no data holds zeros.
        return self.sum.packed() if self.sum.tensor is None else self.sum.tensor


def _jobs(
    backend: Backend, placed: Sequence[Placed], parts: Mapping[Block, dict[str, Tensor]]
) -> list[_Job]:
    """Say what is to be added up; this rank's parts are used up."""
    jobs = []
    for block, place in placed:
        wire = getattr(torch, place.wire) if place.wire else block.dtype
        for index, factor in enumerate(block.factors):
            if factor.name not in block.window.gathered:
                continue
            mine = parts[block].pop(factor.name, None)
            one = Sum(
                way=place.reductions[index],
                shape=factor.shape,
                dtype=block.dtype,
                wire=wire,
                device=block.device,
                tensor=mine,
                symmetric=factor.kind == "psd",
            )
            jobs.append(
                _Job(block, place, factor=factor, sum=one, held=place.holds(backend.rank, index))
            )
    return jobs


def require_eager(blocks: Sequence[Block], placement: Placement) -> None:
    """Check that averages which groups have of their own are not deferred.

    An accumulator forgets all groups alike, those too that no row reached.

    Args:
        blocks: The blocks, in the placement's order.
        placement: Who holds what, and when.

    Raises:
        ValueError: If one is.
    """
    for block, place in zip(blocks, placement.blocks, strict=True):
        if block.unequal and place.deferred:
            raise ValueError(
                f"{block.name}: its groups have rows of their own, and averages over these cannot "
                f"be deferred to the solves, as the strategy {placement.strategy!r} does: pass one "
                f"that reduces statistics at once (deferred=False), or skip the module"
            )


def pack(stored: Tensor, spec: FactorSpec) -> Tensor:
    """Return a factor as it travels, whichever way it is stored: matrices as triangles.

    Args:
        stored: ``[groups, n, n]`` or ``[groups, n (n + 1) / 2]``; of the spec's shape where it is
            no matrix.
        spec: What it is.
    """
    return pack_triangle(stored) if spec.kind == "psd" and stored.dim() == 3 else stored


def unpack(stored: Tensor, spec: FactorSpec) -> Tensor:
    """Return a factor in its own shape, whichever way it is stored.

    Args:
        stored: ``[groups, n, n]`` or ``[groups, n (n + 1) / 2]``; of the spec's shape where it is
            no matrix.
        spec: What it is.
    """
    if spec.kind == "psd" and stored.dim() == 2:
        return unpack_triangle(stored, spec.size)
    return stored


def store(stored: Tensor, spec: FactorSpec, place: BlockPlacement) -> Tensor:
    """Return a running factor the way that its placement stores it, in memory of its own.

    Args:
        stored: See `pack`.
        spec: What it is.
        place: The block's placement.
    """
    return own_memory(pack(stored, spec) if place.packed else unpack(stored, spec))


def _start_from_identity(block: Block, place: BlockPlacement, rank: int) -> None:
    for index, factor in enumerate(block.factors):
        holds, scale = place.holds(rank, index), factor.start or 1.0
        start = _identity(block, factor, place, scale) if holds else None
        block.running.begin_at(factor.name, start)


def _identity(block: Block, factor: FactorSpec, place: BlockPlacement, scale: float) -> Tensor:
    """Return a multiple of the identity as a running factor is stored; of ones for no matrix."""
    if factor.kind != "psd":
        return torch.full(factor.shape, scale, dtype=block.dtype, device=block.device)
    eye = torch.eye(factor.size, dtype=block.dtype, device=block.device) * scale
    return store(eye.repeat(factor.groups, 1, 1), factor, place)
