"""Solve and share: factors become second-order data on their owners, and travel to the workers.

A `Solution` begins with what the solves start from and ends with the delivery of what they give.
In between owners solve: at once, or beside the training of some steps
(`soframe.solving.background`). Whoever solves where and when, collectives are started by
the thread that trains.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from soframe.blocks.block import Block
from soframe.blocks.placed import PlacedBlocks
from soframe.comm.agreement import told_all
from soframe.comm.fusion import Parcel, deliveries, own_memory
from soframe.comm.tasks import Task, finish, start
from soframe.gradients.applying import Directions, precondition
from soframe.methods.returned import rebased_by
from soframe.solvers.base import SolveFailedError, Solver, solve_safely
from soframe.solving.worker import Work, Worker
from soframe.specs import FactorSpec, TensorSpec
from soframe.statistics.running import settle, unpack
from soframe.strategies.work import BlockPlacement

log = logging.getLogger("soframe")

Shares = Callable[[], list[torch.Tensor]]
"""Returns the share of the damping of each factor of a block."""

_RAISED = 2  # in the outcomes, where 1 is a factor that cannot be solved


def update(
    placed: PlacedBlocks,
    due: Sequence[Block],
    *,
    damping: float,
    counters: dict[str, int],
    gradients: Callable[[], Mapping[Block, torch.Tensor | None]],
    landing: Sequence[Solution] = (),
) -> Directions:
    """Solve what is due and precondition.

    A rank preconditions with what has arrived while others solve still.

    Args:
        placed: All blocks, with their places.
        due: Those to solve, the same on every rank.
        damping: The damping of this step.
        counters: ``retried_solves`` and ``failed_solves`` are raised.
        gradients: Returns the raw gradients, see `precondition`.
        landing: What was solved in the background and is on the way to the gradient workers.

    Returns:
        What has become of the gradients.

    Raises:
        RuntimeError: If a solver raised something else than its failure on another rank; there,
            what it raised.
    """
    new = any(not block.solved for block in due)
    solution = Solution(placed, due, damping)
    solution.deliver()
    if new or not placed.backend.overlap:
        # Who takes part in what follows, and whether there are data for methods that make
        # directions without, depends on which blocks are solved for the first time.
        solution.conclude(counters)
    raw = gradients()
    solutions = (*landing, solution)

    def arrive(block: Block) -> None:
        for one in solutions:
            one.arrive(block)

    directions = precondition(placed, damping=damping, gradients=raw, arrive=arrive)
    for one in solutions:
        one.conclude(counters)
    return directions


class Solution:
    """The factors that are due, solved on their owners and on the way to the gradient workers.

    What is solved travels while the next factors are solved. The block of a factor that cannot be
    solved keeps its last good second-order data, of all factors, on every rank: the gradient
    workers are sent numbers that are none, and all ranks agree on the failures without waiting for
    each other before the end.

    Args:
        placed: All blocks, with their places.
        due: Those to solve, the same on every rank.
        damping: The damping of this step.
        worker: Solves in the background, from copies; None to solve when `deliver` is called.
    """

    def __init__(
        self,
        placed: PlacedBlocks,
        due: Sequence[Block],
        damping: float,
        worker: Worker | None = None,
    ) -> None:
        self._backend, self._history = placed.backend, placed.history
        self._since = placed.history.step
        self._jobs: dict[Block, list[_Job]] = {
            block: [
                _Job(
                    block,
                    number,
                    index=index,
                    factor=factor,
                    solver=solver,
                    place=placed.place(block),
                )
                for number, (index, factor, solver) in enumerate(block.solved_here)
            ]
            for block in due
        }
        self._every = [job for jobs in self._jobs.values() for job in jobs]
        self._open = bool(due)
        if not due:
            return
        settle(placed.backend, placed.of(due))
        traces = _mean_traces(placed, due)
        mine = [job for job in self._every if job.owner == placed.rank]
        shares = {
            block: functools.cache(functools.partial(block.shares, each, damping))
            for block, each in traces.items()
        }
        for job in mine:
            job.parcel.made_by(functools.partial(job.solve, shares[job.block]))
        if worker is not None:
            for job in mine:
                job.begin(worker, shares[job.block], traces[job.block])

    @property
    def blocks(self) -> Collection[Block]:
        """The blocks."""
        return self._jobs.keys()

    @property
    def finished(self) -> bool:
        """Whether this rank has solved its part in the background."""
        return all(job.work is None or job.work.done for job in self._every)

    def held(self) -> list[torch.Tensor]:
        """Return what the solves in the background hold on this rank: copies, and results."""
        return [tensor for job in self._every for tensor in job.held()]

    def drop(self) -> None:
        """Give up what is under way; every rank does so. What a solver raised goes to the log."""
        # The last ones first: what has not begun when the first is waited for never does.
        for job in reversed(self._every):
            if job.work is not None:
                job.work.cancel()
            if job.error is not None:
                log.warning("%s: factor %s", job.block.name, job.factor.name, exc_info=job.error)

    def deliver(self) -> None:
        """Send what is solved, and start to agree on what failed; every rank must call."""
        if not self._open:
            return
        job_of = {id(job.parcel): job for job in self._every}

        def tasks() -> Iterator[Task]:
            parcels = [job.parcel for job in self._every]
            for bucket, task in deliveries(self._backend, parcels, "share"):
                for parcel in bucket:
                    job_of[id(parcel)].task = task
                yield task

        with self._backend.phases("solve"):
            self._end = start(tasks(), overlap=self._backend.overlap)
        outcome = [[job.failed for job in self._every], [job.retried for job in self._every]]
        vector = torch.tensor(outcome, dtype=torch.float32, device="cpu").flatten()
        self._outcome = vector.to(self._backend.wire_device(vector.device))
        self._agreement = self._backend.all_reduce(self._outcome, "agree")

    def arrive(self, block: Block) -> None:
        """Let a gradient worker have what was solved of a block.

        Args:
            block: The block, due or not.
        """
        jobs = self._jobs.get(block, ())
        arrived = [job.arrive(self._backend.rank) for job in jobs]
        # All of a block or nothing: what the damping was split into belongs together.
        good = [data for data in arrived if data is not None]
        if jobs and len(good) == len(jobs):
            new = {job.factor.name: data for job, data in zip(jobs, good, strict=True)}
            old = dict(block.second_order)
            block.second_order.put(new)
            for name in new:
                block.renew(name)
            if old and block.state:
                state = rebased_by(block.method, block.state, old, block.second_order)
                block.state.put(state)

    def conclude(self, counters: dict[str, int]) -> None:
        """Wait for everything, once.

        Args:
            counters: ``retried_solves`` and ``failed_solves`` are raised.
        """
        if not self._open:
            return
        self._open = False
        with self._backend.phases("share"):
            self._end()
            for block in self._jobs:
                self.arrive(block)
            self._agreement.wait()
        numbers = [int(value) for value in self._outcome.tolist()]
        failed, retried = numbers[: len(self._every)], numbers[len(self._every) :]
        _raise_errors(self._every, failed)
        counters["failed_solves"] += sum(failed)
        counters["retried_solves"] += sum(retried)
        bad_blocks = {job.block for job, bad in zip(self._every, failed, strict=True) if bad}
        for job, bad in zip(self._every, failed, strict=True):
            block, name = job.block, job.factor.name
            if bad:
                block.second_order.fail(name)
            elif block not in bad_blocks:
                block.second_order.succeed(name)
                self._history.solved(block.name, name, self._since)
                block.renew(name)  # on every rank, also where no data have arrived


def _require_specs(
    solver: Solver,
    factor: FactorSpec,
    specs: Mapping[str, TensorSpec],
    data: Mapping[str, torch.Tensor],
) -> None:
    """Check that a solver has made what it says, by which it travels and is saved."""
    made = {name: tuple(tensor.shape) for name, tensor in data.items()}
    said = {name: tuple(spec.shape) for name, spec in specs.items()}
    if any(made.get(name) != shape for name, shape in said.items()):
        raise ValueError(
            f"{solver!r}: solve() returned {made} of the factor {factor.name!r}, and tensors() "
            f"says {said}"
        )


class _Job:
    """One factor to solve."""

    def __init__(
        self,
        block: Block,
        number: int,
        index: int,
        factor: FactorSpec,
        solver: Solver,
        place: BlockPlacement,
    ) -> None:
        self.block, self.number, self.factor, self.solver = block, number, factor, solver
        self.owner, self.needing = place.owners[index], place.needing(index)
        self.specs = block.tensors[factor.name]
        self.failed = self.retried = 0
        self.error: Exception | None = None
        self.work: Work | None = None
        self.copy: torch.Tensor | None = None
        self.last: Mapping[str, torch.Tensor] | None = None
        self.task: Task | None = None
        self.taken = False
        group = place.sharing(index)
        specs = tuple(self.specs.values())
        self.parcel = Parcel(
            self.owner,
            group,
            specs=specs,
            dtype=block.dtype,
            device=block.device,
            otherwise=math.nan,
        )

    def begin(self, worker: Worker, shares: Shares, traces: list[torch.Tensor]) -> None:
        """Let a worker solve from what is there now, on the owner."""
        stored = self.block.running[self.factor.name]  # changes in place, the last data never do
        self.copy, self.last = stored.clone(), self.block.second_order.get(self.factor.name)
        uses = [self.copy, *traces, *(self.last or {}).values()]
        self.work = worker.submit(functools.partial(self.solve, shares), uses)
        self.parcel.made_by(self.work.result)

    def held(self) -> list[torch.Tensor]:
        """Return what this rank holds for a solve in the background."""
        copy, kept = self.copy, {id(tensor) for tensor in (self.last or {}).values()}
        made = [] if self.work is None else self.work.made
        # A solver may hand on what it had.
        made = [tensor for tensor in made if id(tensor) not in kept]
        return made if copy is None else [copy, *made]

    def solve(self, shares: Shares) -> list[torch.Tensor] | None:
        """Solve on the owner; None if that fails."""
        block, factor = self.block, self.factor
        try:
            share = shares()[self.number]
            if self.copy is not None:
                matrix, last = unpack(self.copy, factor), self.last
            else:
                # An owner that is no gradient worker has no data of the last solve.
                matrix = block.running.matrix(factor)
                last = block.second_order.get(factor.name)
            data, retried = solve_safely(self.solver, matrix, share, last)
            _require_specs(self.solver, factor, self.specs, data)
        except SolveFailedError as error:
            self.failed = 1
            if not block.second_order.failures[factor.name]:
                # Once: it may be so for the rest of training.
                log.warning(
                    "%s: factor %s cannot be solved (%s); the block keeps its last good "
                    "second-order data, or without any its raw gradient. Further failures are "
                    "counted, see report() and counters",
                    block.name,
                    factor.name,
                    error,
                )
            return None
        except Exception as error:  # whatever it is: the other ranks wait, and must be told
            self.failed, self.error = _RAISED, error
            return None
        finally:
            self.copy = None
        self.retried = int(retried)
        return [data[name] for name in self.specs]

    def arrive(self, rank: int) -> dict[str, torch.Tensor] | None:
        """Return what has been solved, once, where it is needed and good.

        Args:
            rank: This rank.

        Returns:
            The second-order data, in memory of their own; None where there is nothing to take.
        """
        if self.taken or rank not in self.needing:
            return None
        self.taken = True
        if self.task is not None and rank != self.owner:
            finish(self.task)
        tensors = self.parcel.take()
        # All of a factor that could not be solved is not finite, and nothing of any other.
        if tensors is None or not all(math.isfinite(float(t.flatten()[0])) for t in tensors[:1]):
            return None
        return dict(zip(self.specs, map(own_memory, tensors), strict=True))


def _mean_traces(placed: PlacedBlocks, due: Sequence[Block]) -> dict[Block, list[torch.Tensor]]:
    """Return the mean traces of the factors of the blocks that this rank solves for.

    Owners that do not hold all factors of a block are told the traces of the others.
    """
    backend = placed.backend
    told = [block for block in due if placed.place(block).traces_travel]
    sizes = [factor.groups for block in told for _, factor, _ in block.solved_here]
    numbers = torch.zeros(sum(sizes), dtype=torch.float64, device="cpu")
    for (block, index, factor), part in zip(
        [(b, i, f) for b in told for i, f, _ in b.solved_here],
        numbers.split(sizes),
        strict=True,
    ):
        if placed.place(block).owners[index] == backend.rank:
            part.copy_(block.running.mean_trace(factor))
    if told:
        numbers = numbers.to(backend.wire_device(numbers.device))
        backend.all_reduce(numbers, "agree").wait()
    parts = iter(numbers.split(sizes))
    traces = {}
    for block in due:
        if block in told:
            traces[block] = [next(parts).to(block.device, block.dtype) for _ in block.tensors]
        elif backend.rank in placed.place(block).owners:
            traces[block] = [block.running.mean_trace(factor) for _, factor, _ in block.solved_here]
    return traces


def _raise_errors(jobs: Sequence[_Job], failed: Sequence[int]) -> None:
    """Raise on every rank, if a solver raised on any."""
    raised = [job for job, outcome in zip(jobs, failed, strict=True) if outcome == _RAISED]
    for job in raised:
        if job.error is not None:
            raise told_all(job.error)
    if raised:
        names = ", ".join(f"{job.block.name}.{job.factor.name}" for job in raised)
        raise told_all(
            RuntimeError(f"the solver raised for {names} on another rank; see its own error")
        )
