"""Solve and share: factors become second-order data on their owners, and travel to the workers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from soframe.blocks import Block
from soframe.comm.base import Backend
from soframe.comm.fusion import Parcel, deliver, own_memory
from soframe.factors import FactorSpec, TensorSpec
from soframe.running import settle
from soframe.solvers.base import SolveFailedError, mean_trace, solve_safely
from soframe.strategies.placement import BlockPlacement, Placement, exchange_group, share_group

log = logging.getLogger("soframe")


def solve(
    blocks: Sequence[Block],
    due: Sequence[Block],
    placement: Placement,
    backend: Backend,
    damping: float,
    counters: dict[str, int],
) -> None:
    """Solve the factors that are due on their owners and share the results.

    A factor that cannot be solved keeps its last good second-order data, on every rank: the ranks
    agree on the failures before anything is shared.

    Args:
        blocks: All blocks, in the placement's order.
        due: Those to solve, the same on every rank.
        placement: Who owns and who needs what.
        backend: The backend.
        damping: The damping of this step.
        counters: ``retried_solves`` and ``failed_solves`` are raised.
    """
    where = dict(zip(blocks, placement.blocks, strict=True))
    settle(backend, [(block, where[block]) for block in due])
    traces = _mean_traces(due, where, backend)
    jobs = [(block, i, factor) for block in due for i, factor in enumerate(block.factors)]
    fresh: dict[tuple[Block, str], dict[str, torch.Tensor]] = {}
    outcome = torch.zeros(2, len(jobs))  # failed, retried
    for number, (block, index, factor) in enumerate(jobs):
        if where[block].owners[index] != backend.rank:
            continue
        try:
            data, retried = _solve_factor(block, index, factor, traces[block], damping)
        except SolveFailedError as error:
            outcome[0, number] = 1
            log.warning("%s: factor %s cannot be solved (%s)", block.name, factor.name, error)
        else:
            outcome[1, number] = retried
            fresh[block, factor.name] = data
    failed, retried_on = _agree(outcome, backend)
    counters["failed_solves"] += sum(failed)
    counters["retried_solves"] += sum(retried_on)
    solved = [job for job, bad in zip(jobs, failed, strict=True) if not bad]
    _share(solved, fresh, where, backend)
    for block in due:
        block.solved_factors.update(f.name for b, _, f in solved if b is block)


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
            part.copy_(mean_trace(block.matrix(factor)))
    if told:
        numbers = numbers.to(backend.wire_device(numbers.device))
        backend.all_reduce(numbers, "agree").wait()
    parts = iter(numbers.split(sizes))
    traces = {}
    for block in due:
        if block in told:
            traces[block] = [next(parts).to(block.device, block.dtype) for _ in block.factors]
        elif backend.rank in where[block].owners:
            traces[block] = [mean_trace(block.matrix(factor)) for factor in block.factors]
    return traces


def _solve_factor(
    block: Block, index: int, factor: FactorSpec, traces: list[torch.Tensor], damping: float
) -> tuple[dict[str, torch.Tensor], bool]:
    shares = block.solver.shares(traces, damping)
    return solve_safely(block.solver, block.matrix(factor), shares[index])


def _agree(outcome: torch.Tensor, backend: Backend) -> tuple[list[int], list[int]]:
    vector = outcome.flatten().to(backend.wire_device(outcome.device))
    backend.all_reduce(vector, "agree").wait()
    numbers = [int(value) for value in vector.tolist()]
    return numbers[: outcome.shape[1]], numbers[outcome.shape[1] :]


def _share(
    solved: Sequence[tuple[Block, int, FactorSpec]],
    fresh: dict[tuple[Block, str], dict[str, torch.Tensor]],
    where: dict[Block, BlockPlacement],
    backend: Backend,
) -> None:
    parcels = []
    for block, index, factor in solved:
        place = where[block]
        specs = block.tensors[factor.name]
        own = fresh.get((block, factor.name))
        group = share_group(place.owners[index], place.gradient_workers)
        tensors = None if own is None else [own[name] for name in specs]
        parcels.append(
            Parcel(
                place.owners[index],
                group,
                tuple(specs.values()),
                block.dtype,
                block.device,
                tensors,
            )
        )
    deliver(backend, parcels, "share")
    for (block, _, factor), parcel in zip(solved, parcels, strict=True):
        if backend.rank in where[block].gradient_workers:
            assert parcel.tensors is not None
            names = block.tensors[factor.name]
            kept = map(own_memory, parcel.tensors)
            block.second_order[factor.name] = dict(zip(names, kept, strict=True))


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
    ready = [(b, p) for b, p in zip(blocks, placement.blocks, strict=True) if b.solved]
    results: dict[Block, torch.Tensor] = {}
    parcels: list[tuple[Block, Parcel]] = []
    for block, place in ready:
        gradient = gradients.get(block)
        if backend.rank in place.gradient_workers:
            if gradient is None:
                results[block] = torch.zeros(block.shape, dtype=block.dtype, device=block.device)
            else:
                results[block] = block.method.precondition(
                    gradient, block.second_order, block.solver, damping
                )
        for worker in place.gradient_workers:
            group = exchange_group(worker, place.sources)
            tensors = [results[block]] if worker == backend.rank else None
            spec = (TensorSpec(tuple(block.shape)),)
            parcels.append((block, Parcel(worker, group, spec, block.dtype, block.device, tensors)))
    deliver(backend, [parcel for _, parcel in parcels], "exchange")
    for block, parcel in parcels:
        if backend.rank in parcel.group and parcel.tensors is not None:
            results[block] = parcel.tensors[0]
    return {block: results[block] for block in gradients}
