"""The running factors: averages of everybody's statistics, on the ranks that hold them.

With weights that add up to ``m`` after the decays of all statistics steps so far, a running factor
is ``R = (1/m) sum_t w_t sum_r c_{r,t}`` over statistics steps t and contributing ranks r. The sums
may be taken in either order. *Eagerly*, over ranks first, at every statistics step::

    m <- decay m + (1 - decay)        R <- R + (1 - decay)/m (sum_r c_r - R)

*Deferred*, over time first: each contributor keeps ``L_r``, and a solve settles them::

    L_r <- decay L_r + (1 - decay) c_r,    p <- decay p + (1 - decay)    at a statistics step
    R <- ((m - p) R + sum_r L_r) / m,      L_r <- 0,  p <- 0             at a solve

The weights ``m`` and ``p`` (`Block.mass` and `Block.pending`) are known to every rank.

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
from soframe.comm.fusion import Sum, add_up, additions, own_memory
from soframe.comm.packing import pack_triangle, packed_size, unpack_triangle
from soframe.comm.tasks import Task, start
from soframe.specs import FactorSpec
from soframe.strategies.placement import BlockPlacement

Placed = tuple[Block, BlockPlacement]
_Total = tuple[Block, BlockPlacement, FactorSpec, Tensor | None]


def enter(
    backend: Backend,
    used: Sequence[Placed],
    contributions: Mapping[Block, dict[str, Tensor]],
    decay: float,
    start_from_identity: bool,
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
    """
    for block, place in used:
        block.arrive()
        if block.mass == 0 and start_from_identity:
            block.mass = 1.0
            _start_from_identity(block, place, backend.rank)
        # Dividing by the gathered mass frees the average of its start (Adam's bias correction).
        block.mass = decay * block.mass + (1 - decay)
        if place.deferred:
            _gather(block, place, backend.rank, contributions[block], decay)
    eager = [(block, place) for block, place in used if not place.deferred]
    jobs = _jobs(backend, eager, contributions)
    rates = {block: (1 - decay) / block.mass for block, _ in eager}
    if any(len(job.sum.way.spread) > 1 for job in jobs):
        # What travels twice is waited for here: the second way would start out of order.
        add_up(backend, [job.sum for job in jobs], "reduce")
        for job in jobs:
            _enter(job, rates)
        return
    job_of = {id(job.sum): job for job in jobs}
    for parts, addition in additions(backend, [job.sum for job in jobs], "reduce"):
        together = [job_of[id(part)] for part in parts]
        task = _arrival(addition, together, rates)
        start([task], overlap=backend.overlap)
        for block in {job.block: None for job in together}:
            block.under_way.append(task)
    for job in jobs:
        if not job.sum.travels:
            _enter(job, rates)


def _arrival(addition: Task, jobs: Sequence[_Job], rates: Mapping[Block, float]) -> Task:
    """Add up, and let the sums enter when they are there."""
    yield from addition
    for job in jobs:
        _enter(job, rates)


def _enter(job: _Job, rates: Mapping[Block, float]) -> None:
    total = job.total()
    if total is None:
        return
    # Not `running`, which waits for this.
    factors, name = job.block.arrived, job.factor.name
    if total.dim() == 3 and not job.place.packed:
        job.block.lower.add(name)  # sums are lower triangles; what travelled is packed
    if name not in factors:
        factors[name] = store(total, job.factor.size, job.place)
        return
    new = pack(total) if job.place.packed else unpack(total, job.factor.size)
    factors[name].lerp_(new, rates[job.block])


def _gather(
    block: Block, place: BlockPlacement, rank: int, new: dict[str, Tensor], decay: float
) -> None:
    """Add this rank's contributions to its accumulators."""
    block.pending = decay * block.pending + (1 - decay)
    for index, factor in enumerate(block.factors):
        if not place.contributes(rank, index):
            continue
        if factor.name not in block.local:
            numel = packed_size(factor.size)
            empty = torch.zeros(factor.groups, numel, dtype=block.dtype, device=block.device)
            block.local[factor.name] = empty
        local = block.local[factor.name].mul_(decay)
        if factor.name in new:
            local.add_(pack_triangle(new.pop(factor.name)), alpha=1 - decay)


def settle(backend: Backend, placed: Sequence[Placed]) -> None:
    """Bring what was deferred into the running factors; every rank must call.

    Args:
        backend: The backend.
        placed: The blocks, the same on every rank.
    """
    due = [(block, place) for block, place in placed if block.pending > 0]
    for block, place, factor, total in _settled(backend, due, "reduce"):
        if total is not None:
            block.running[factor.name] = store(total, factor.size, place)
    for block, _ in due:
        block.pending = 0.0
        for local in block.local.values():
            local.zero_()


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
    if block.pending == 0:
        return {name: pack(factor) for name, factor in block.running.items()}
    found = _settled(backend, [(block, place)], phase)
    return {factor.name: total for _, _, factor, total in found if total is not None}


def _settled(backend: Backend, due: Sequence[Placed], phase: str) -> list[_Total]:
    locals_ = {block: dict(block.local) for block, _ in due}
    found: list[_Total] = []
    jobs = _jobs(backend, due, locals_)
    add_up(backend, [job.sum for job in jobs], phase)
    for job in jobs:
        new = None
        block, name = job.block, job.factor.name
        if (total := job.total()) is not None:
            new = pack(total) / block.mass
            if name in block.running:
                share = (block.mass - block.pending) / block.mass
                new.add_(pack(block.running[name]), alpha=share)
        found.append((block, job.place, job.factor, new))
    return found


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
            own = parts[block].pop(factor.name, None)
            way = place.reductions[index]
            one = Sum(way, factor.shape, block.dtype, wire, block.device, own)
            jobs.append(_Job(block, place, factor, one, place.holds(backend.rank, index)))
    return jobs


def pack(factor: Tensor) -> Tensor:
    """Return a factor as packed triangles, whichever way it is stored.

    Args:
        factor: ``[groups, n, n]`` or ``[groups, n (n + 1) / 2]``.
    """
    return pack_triangle(factor) if factor.dim() == 3 else factor


def unpack(factor: Tensor, size: int) -> Tensor:
    """Return a factor as whole matrices, whichever way it is stored.

    Args:
        factor: ``[groups, n, n]`` or ``[groups, n (n + 1) / 2]``.
        size: n.
    """
    return unpack_triangle(factor, size) if factor.dim() == 2 else factor


def store(factor: Tensor, size: int, place: BlockPlacement) -> Tensor:
    """Return a running factor the way that its placement stores it, in memory of its own.

    Args:
        factor: ``[groups, n, n]`` or ``[groups, n (n + 1) / 2]``.
        size: n.
        place: The block's placement.
    """
    return own_memory(pack(factor) if place.packed else unpack(factor, size))


def _start_from_identity(block: Block, place: BlockPlacement, rank: int) -> None:
    for index, factor in enumerate(block.factors):
        if place.holds(rank, index):
            eye = torch.eye(factor.size, dtype=block.dtype, device=block.device)
            whole = eye.repeat(factor.groups, 1, 1)
            block.running[factor.name] = pack_triangle(whole) if place.packed else whole
