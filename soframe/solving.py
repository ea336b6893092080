"""Solve and share: factors become second-order data on their owners, and travel to the workers."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence

import torch

from soframe.blocks import Block
from soframe.comm.base import Backend
from soframe.comm.fusion import Parcel, deliver, deliveries, own_memory
from soframe.comm.tasks import start
from soframe.factors import FactorSpec, TensorSpec
from soframe.running import settle
from soframe.solvers.base import SolveFailedError, solve_safely
from soframe.strategies.placement import BlockPlacement, Placement, exchange_group, share_group

log = logging.getLogger("soframe")


_RAISED = 2  # in the outcomes, where 1 is a factor that cannot be solved


def solve(
    blocks: Sequence[Block],
    due: Sequence[Block],
    placement: Placement,
    backend: Backend,
    damping: float,
    counters: dict[str, int],
) -> None:
    """Solve the factors that are due on their owners and share the results.

    What is solved travels while the next factors are solved. A factor that cannot be solved keeps
    its last good second-order data, on every rank: zeros travel for it, and when the ranks agree on
    the failures, afterwards, nobody takes them.

    Args:
        blocks: All blocks, in the placement's order.
        due: Those to solve, the same on every rank.
        placement: Who owns and who needs what.
        backend: The backend.
        damping: The damping of this step.
        counters: ``retried_solves`` and ``failed_solves`` are raised.

    Raises:
        RuntimeError: If a solver raised something else on another rank; there, what it raised.
    """
    where = dict(zip(blocks, placement.blocks, strict=True))
    settle(backend, [(block, where[block]) for block in due])
    jobs = [_Job(block, i, f, where[block]) for block in due for i, f in enumerate(block.factors)]
    traces = _mean_traces(due, where, backend)
    for job in jobs:
        if job.owner == backend.rank:
            job.parcel.make = functools.partial(job.solve, traces[job.block], damping)
    end = start(deliveries(backend, [job.parcel for job in jobs], "share"), overlap=backend.overlap)
    failed, retried_on = _agree(jobs, backend)
    end()
    _raise_errors(jobs, failed)
    counters["failed_solves"] += sum(failed)
    counters["retried_solves"] += sum(retried_on)
    for job, bad in zip(jobs, failed, strict=True):
        if not bad:
            job.keep(backend.rank)


class _Job:
    """One factor to solve."""

    def __init__(self, block: Block, index: int, factor: FactorSpec, place: BlockPlacement) -> None:
        self.block, self.index, self.factor, self.place = block, index, factor, place
        self.owner = place.owners[index]
        self.specs = block.tensors[factor.name]
        self.failed = self.retried = 0
        self.error: Exception | None = None
        group = share_group(self.owner, place.gradient_workers)
        specs = tuple(self.specs.values())
        self.parcel = Parcel(self.owner, group, specs, block.dtype, block.device)

    def solve(self, traces: list[torch.Tensor], damping: float) -> list[torch.Tensor] | None:
        """Solve on the owner; None if that fails."""
        block, factor = self.block, self.factor
        try:
            share = block.solver.shares(traces, damping)[self.index]
            data, retried = solve_safely(block.solver, block.matrix(factor), share)
        except SolveFailedError as error:
            self.failed = 1
            log.warning("%s: factor %s cannot be solved (%s)", block.name, factor.name, error)
            return None
        except Exception as error:  # whatever it is: the other ranks wait, and must be told
            self.failed, self.error = _RAISED, error
            return None
        self.retried = int(retried)
        return [data[name] for name in self.specs]

    def keep(self, rank: int) -> None:
        """Take what has arrived, where it is needed."""
        self.block.solved_factors.add(self.factor.name)
        if rank in self.place.gradient_workers:
            assert self.parcel.tensors is not None
            kept = map(own_memory, self.parcel.tensors)
            self.block.second_order[self.factor.name] = dict(zip(self.specs, kept, strict=True))


def _mean_traces(
    due: Sequence[Block], where: dict[Block, BlockPlacement], backend: Backend
) -> dict[Block, list[torch.Tensor]]:
    """Return the mean traces of the factors of the blocks that this rank solves for.

    Owners that do not hold all factors of a block are told the traces of the others.
    """
    told = [block for block in due if where[block].traces_travel]
    sizes = [factor.groups for block in told for factor in block.factors]
    numbers = torch.zeros(sum(sizes), dtype=torch.float64)
    for (block, index, factor), part in zip(
        [(b, i, f) for b in told for i, f in enumerate(b.factors)],
        numbers.split(sizes),
        strict=True,
    ):
        if where[block].owners[index] == backend.rank:
            part.copy_(block.mean_trace(factor))
    if told:
        numbers = numbers.to(backend.wire_device(numbers.device))
        backend.all_reduce(numbers, "agree").wait()
    parts = iter(numbers.split(sizes))
    traces = {}
    for block in due:
        if block in told:
            traces[block] = [next(parts).to(block.device, block.dtype) for _ in block.factors]
        elif backend.rank in where[block].owners:
            traces[block] = [block.mean_trace(factor) for factor in block.factors]
    return traces


def _agree(jobs: Sequence[_Job], backend: Backend) -> tuple[list[int], list[int]]:
    """Return which factors failed, and which were retried, on their owners."""
    outcome = [[job.failed for job in jobs], [job.retried for job in jobs]]
    vector = torch.tensor(outcome, dtype=torch.float32).flatten()
    vector = vector.to(backend.wire_device(vector.device))
    backend.all_reduce(vector, "agree").wait()
    numbers = [int(value) for value in vector.tolist()]
    return numbers[: len(jobs)], numbers[len(jobs) :]


def _raise_errors(jobs: Sequence[_Job], failed: Sequence[int]) -> None:
    """Raise on every rank, if a solver raised on any."""
    raised = [job for job, how in zip(jobs, failed, strict=True) if how == _RAISED]
    for job in raised:
        if job.error is not None:
            raise job.error
    if raised:
        names = ", ".join(f"{job.block.name}.{job.factor.name}" for job in raised)
        raise RuntimeError(f"the solver raised for {names} on another rank; see its own error")


def precondition(
    blocks: Sequence[Block],
    placement: Placement,
    backend: Backend,
    damping: float,
    gradients: Mapping[Block, torch.Tensor | None],
) -> dict[Block, torch.Tensor]:
    """Precondition on the gradient workers and send the result to the receivers.

    Every rank enters the same collectives whatever gradients it has: a worker without a gradient
    sends zeros.

    Args:
        blocks: All blocks, in the placement's order.
        placement: Who preconditions and who receives.
        backend: The backend.
        damping: The damping of this step.
        gradients: The raw gradients of blocks that are solved, ``[groups, out, in]``; None where
            this rank is no gradient worker.

    Returns:
        The preconditioned gradient of each of these blocks, ``[groups, out, in]``.
    """
    results: dict[Block, torch.Tensor] = {}
    parcels: list[tuple[Block, Parcel]] = []
    for block, place in zip(blocks, placement.blocks, strict=True):
        if not block.solved:
            continue
        work = functools.partial(_precondition, block, gradients.get(block), damping)
        spec = (TensorSpec(tuple(block.shape)),)
        for worker in place.gradient_workers:
            group = exchange_group(worker, place.sources)
            parcel = Parcel(worker, group, spec, block.dtype, block.device)
            if worker == backend.rank:
                parcel.make = work
            parcels.append((block, parcel))
    deliver(backend, [parcel for _, parcel in parcels], "exchange")
    for block, parcel in parcels:
        if backend.rank in parcel.group and parcel.tensors is not None:
            results[block] = parcel.tensors[0]
    return {block: results[block] for block in gradients}


def _precondition(
    block: Block, gradient: torch.Tensor | None, damping: float
) -> list[torch.Tensor] | None:
    """Precondition on a gradient worker; None without a gradient."""
    if gradient is None:
        return None
    return [block.method.precondition(gradient, block.second_order, block.solver, damping)]
