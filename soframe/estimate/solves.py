"""Solves: second-order data from running factors, computed by owners, sent to gradient workers.

Blocks of a stack with the same owners and damping are solved by one call for each factor. A solve
runs in the step, or *in the background*: a solve of step s then starts from copies of the factors
at step s, runs in a thread while training goes on, and *lands*, which means that its results are
broadcast and installed,

- in step s + n, for ``background=n``: the same bits in every run, however long the solves take;
- in the first step that finds all owners done, for ``background="ready"``;
- earlier in either case if one of its blocks is due again, or the state is saved.

Every rank lands the same solves at the same steps, so that collectives keep their order.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from operator import attrgetter

import torch
from torch import Tensor

from soframe.blocks.block import Block, PlacedBlocks, Stack, unpack
from soframe.comm.agreement import start_sum
from soframe.comm.base import Backend
from soframe.comm.fused import Parcel, Pending, buckets, send
from soframe.estimate.averages import settle
from soframe.estimate.worker import Work, Worker
from soframe.solvers.base import Problem, Solver, retry, solve_stacks
from soframe.specs import FactorSpec

log = logging.getLogger("soframe")

# The outcomes of a factor of a block; 0 if its first solve has succeeded.
FAILED = 1  # it cannot be solved
RAISED = 2  # the solver raised another error
RETRIED = 3  # float64 solved it
_OUTCOMES = attrgetter("outcomes")


@dataclass(eq=False, kw_only=True)
class Job(Parcel):
    """One factor of a run: its results travel from the owner to the ranks that need them."""

    names: tuple[str, ...]  # the names of the tensors that the solver makes
    factor: FactorSpec
    solver: Solver
    needed: bool  # whether this rank needs the results
    last: dict[str, Tensor]  # the data of the last solve, for a solver that continues from them
    outcomes: list[int]  # by block, until the end on the owner alone
    copy: Tensor | None = None  # a copy of the running factor, for a solve in the background


@dataclass(eq=False)
class Run:
    """Blocks of a stack that are solved together: with the same owners and damping."""

    stack: Stack
    members: tuple[int, ...]  # the indices of the blocks
    blocks: Sequence[Block]
    damping: float  # of the blocks
    jobs: list[Job]  # their factors
    owned: list[Job]  # the factors that this rank solves
    traces: list[Tensor] = field(default_factory=list)  # of each factor: ``[groups]``, on owners
    error: Exception | None = None  # that a solver raised, other than a failed factorisation
    work: Work | None = None  # the solve in the background, on owners
    # The blocks whose factors were all solved: their indices, and their numbers in the run.
    solved: dict[int, int] = field(default_factory=dict)

    def begin(self, worker: Worker) -> None:
        """Solve in the background, from copies: running factors change in place."""
        # These tensors must outlive the solve on its stream.
        uses = list(self.traces)
        for job in self.owned:
            stored = self.stack.take(self.stack.factor(job.factor.name), self.members)
            job.copy = stored.clone()
            uses += [job.copy, *job.last.values()]
        if self.owned:
            self.work = worker.submit(lambda: _solve([self])[0], uses)

    def problems(self, shares: Sequence[Tensor]) -> list[Problem]:
        """Return the factors that this rank owns, with their shares of the damping."""
        problems = []
        for job, share in zip(self.jobs, shares, strict=True):
            if job not in self.owned:
                continue
            if job.copy is not None:
                matrix = unpack(job.copy, job.factor).to(self.stack.like.dtype)
            else:
                matrix = self.stack.matrices(job.factor, self.members, lower=True)
            problems.append(Problem(job.solver, matrix, share, job.last))
        return problems

    def results(self, attempts: Sequence[Attempt]) -> list[Tensor]:
        """Keep and return the second-order data, after another attempt for failed groups."""
        results: list[list[Tensor]] = []
        for job, attempt in zip(self.owned, attempts, strict=True):
            returned = {name: tuple(tensor.shape) for name, tensor in attempt.data.items()}
            declared = {n: spec.shape for n, spec in zip(job.names, job.stacked, strict=True)}
            if not declared.items() <= returned.items():
                raise ValueError(
                    f"{job.solver!r}: solve() returned {returned} for the factor "
                    f"{job.factor.name!r}, and tensors() declares {declared}"
                )
            data = self._retry(job, attempt) if attempt.failed else attempt.data
            results.append([data[name] for name in job.names])
        for job, tensors in zip(self.owned, results, strict=True):  # once all are there
            job.tensors = tensors
        return list(itertools.chain.from_iterable(results))

    def fail(self, error: Exception) -> None:
        """Store an error of a solver: all ranks raise together, in `conclude`."""
        self.error = error
        for job in self.owned:
            job.outcomes = list(itertools.repeat(RAISED, len(self.members)))

    def _retry(self, job: Job, attempt: Attempt) -> dict[str, Tensor]:
        """Solve groups once more in float64, and mark the blocks for which that fails."""
        problem = attempt.problem
        data, reasons = retry(
            job.solver, problem.matrices, problem.damping, attempt.data, attempt.failed
        )
        groups_per_block = len(problem.matrices) // len(self.members)
        for group in attempt.failed:
            job.outcomes[group // groups_per_block] = RETRIED
        for group, reason in reasons.items():
            index = group // groups_per_block
            job.outcomes[index] = FAILED
            block = self.blocks[index]
            if not block.record.failures[job.factor.name]:
                # Once: every later solve may fail as well.
                log.warning(
                    "%s: factor %s cannot be solved (%s); the block keeps its last good "
                    "second-order data, or without any its raw gradient. Further failures are "
                    "counted, see report() and counters",
                    block.name,
                    job.factor.name,
                    reason,
                )
        return data

    def record_outcomes(self) -> list[Block]:
        """Record failed blocks, and return the others, whose factors were all solved."""
        solved: list[Block] = []
        for number, block in enumerate(self.blocks):
            failed = [j.factor.name for j in self.jobs if j.outcomes[number] == FAILED]
            if failed:
                block.record.failed = True
                block.record.failures.update(failed)
            else:
                self.solved[block.member] = number
                solved.append(block)
        return solved

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Return the groups of each solved block, of a tensor of the whole run."""
        groups = len(tensor) // len(self.members)
        numbers = self.solved.values()
        return [tensor[number * groups : (number + 1) * groups] for number in numbers]


@dataclass(frozen=True, eq=False)
class Attempt:
    """A factor that was solved once: its second-order data, and the groups that failed."""

    problem: Problem
    data: dict[str, Tensor]
    failed: list[int]


def _solve(runs: Sequence[Run]) -> list[list[Tensor] | None]:
    """Solve this rank's factors of some runs; None for each with a solver that raises."""
    try:
        problems: list[Problem] = []
        for run, shares in zip(runs, _damping_shares(runs), strict=True):
            problems += run.problems(shares)
        solutions = solve_stacks(problems)
        # The flags of all solves in one tensor, of all devices: the host waits once.
        device = solutions[0][1].device
        usable = torch.cat([good.to(device) for _, good in solutions]).tolist()
    except Exception as error:  # of any kind: all ranks raise together
        return _solve_apart(runs, error)
    finally:
        # Copies are as large as the factors: free them, after any retry.
        for run in runs:
            for job in run.owned:
                job.copy = None
    results: list[list[Tensor] | None] = []
    solved, flags = zip(problems, solutions, strict=True), iter(usable)
    for run in runs:
        attempts: list[Attempt] = []
        for problem, (data, _) in itertools.islice(solved, len(run.owned)):
            failed = [group for group in range(len(problem.matrices)) if not next(flags)]
            attempts.append(Attempt(problem, data, failed))
        try:
            results.append(run.results(attempts))
        except Exception as error:
            run.fail(error)
            results.append(None)
    return results


def _solve_apart(runs: Sequence[Run], error: Exception) -> list[list[Tensor] | None]:
    """Solve runs one by one, to find those whose solvers raise."""
    if len(runs) > 1:
        results: list[list[Tensor] | None] = []
        for run in runs:
            results += _solve([run])
        if None in results:
            return results
    # It was raised by this run, or only by all together.
    for run in runs:
        run.fail(error)
    return [None] * len(runs)


def _damping_shares(runs: Sequence[Run]) -> list[list[Tensor]]:
    """Return the damping of each run's factors; equal runs share the computation."""
    alike: dict[tuple[object, ...], list[Run]] = {}
    for run in runs:
        first = run.traces[0]
        key: tuple[object, ...] = (run,)
        if len(set(map(len, run.traces))) == 1:
            key = (run.stack.like.solvers_text, run.damping, first.dtype, first.device)
        alike.setdefault(key, []).append(run)
    shares: dict[Run, list[Tensor]] = {}
    for same in alike.values():
        like, damping = same[0].stack.like, same[0].damping
        if len(same) == 1:
            shares[same[0]] = _split_damping(like, same[0].traces, damping)
            continue
        # One tensor for each factor, [groups of all runs]: first the traces, then the shares.
        traces_of_factors = zip(*[run.traces for run in same], strict=True)
        joint_traces = list(map(torch.cat, traces_of_factors))
        joint_shares = _split_damping(like, joint_traces, damping)
        groups = [len(run.traces[0]) for run in same]
        shares_of_runs = zip(*[share.split(groups) for share in joint_shares], strict=True)
        shares.update(zip(same, map(list, shares_of_runs), strict=True))
    return [shares[run] for run in runs]


def _split_damping(like: Block, traces: Sequence[Tensor], damping: float) -> list[Tensor]:
    """Return each solved factor's share of the damping, ``[groups]``, given mean traces."""
    # Each solver splits the block's damping over all of its factors together.
    shares = list(traces)
    for solver, numbers in like.solvers:
        split = solver.shares([traces[number] for number in numbers], damping)
        for number, share in zip(numbers, split, strict=True):
            shares[number] = share
    return shares


@dataclass(eq=False)
class SolveRound:
    """Solves that begin at one step, until their results are installed.

    If a factor of a block cannot be solved, the block keeps its last good second-order data, of all
    its factors, on every rank.
    """

    placed: PlacedBlocks
    blocks: Sequence[Block]  # the same on every rank
    runs: Sequence[Run]  # of these blocks
    jobs: Sequence[Job]  # of all runs
    step: int | None  # completed steps, for `Record.solved_at`; None between steps
    lands: float  # the step at which background results are installed; infinite for "ready"
    pending: list[Pending] = field(default_factory=list)  # the results on their way
    # Waits for the outcomes of all jobs, one for each block, summed over ranks.
    summed_outcomes: Callable[[], list[float]] | None = None

    @classmethod
    def begin(
        cls,
        placed: PlacedBlocks,
        due: Sequence[Block],
        damping: float,
        step: int | None,
        worker: Worker | None = None,
        lands: float = math.inf,
    ) -> SolveRound:
        """Reduce deferred statistics and traces, and start to solve blocks; every rank must call.

        A ``worker`` solves in the background, from copies; without it `share` solves.
        """
        members = placed.members(due)
        settle(placed, members)
        runs: list[Run] = []
        for stack, chosen in members.items():
            runs += _runs(stack, chosen, damping, placed.rank)
        _take_traces(placed.backend, runs)
        jobs: list[Job] = []
        for run in runs:
            jobs += run.jobs
            if worker is not None:
                run.begin(worker)
        return cls(placed, due, runs, jobs, step, lands)

    @property
    def finished(self) -> bool:
        """Whether this rank's background solves have ended."""
        return all(run.work is None or run.work.done for run in self.runs)

    def held(self) -> Iterator[Tensor]:
        """Yield this rank's tensors of background solves: copies and results."""
        for run in self.runs:
            if run.work is None:
                continue
            counted: set[int] = set()
            for job in run.owned:
                counted.update(map(Tensor.data_ptr, job.last.values()))
                if job.copy is not None:
                    yield job.copy
            # A solver may return its inputs, which are counted already.
            for tensor in run.work.made:
                if tensor.data_ptr() not in counted:
                    yield tensor

    def drop(self) -> None:
        """Cancel the solves under way, on every rank; errors of solvers are logged."""
        # The last ones first, so that solves that have not begun never do.
        for run in reversed(self.runs):
            if run.work is not None:
                run.work.cancel()
            if run.error is not None:
                log.warning("%s", run.blocks[0].name, exc_info=run.error)

    def share(self) -> None:
        """Compute and send the results, and start to sum the outcomes; every rank must call."""
        backend = self.placed.backend
        owned = [run for run in self.runs if run.owned]
        parts: Sequence[tuple[Sequence[Run], Sequence[Parcel]]] = [(owned, ())]
        if backend.world_size > 1:
            parts = self._parts(owned)
        for runs, bucket in parts:
            with backend.phases("solve"):
                now: list[Run] = []
                for run in runs:
                    if run.work is None:
                        now.append(run)
                    else:
                        run.work.result()  # waits for its end
                if now:
                    _solve(now)
            if bucket:
                with backend.phases("share"):
                    self.pending.append(send(backend, bucket, "share"))
        if backend.world_size > 1:
            # Outcomes are set by owners alone, so the sum over ranks is the outcome.
            outcomes = itertools.chain.from_iterable(map(_OUTCOMES, self.jobs))
            self.summed_outcomes = start_sum(backend, list(outcomes), torch.float32)

    def _parts(self, waiting: list[Run]) -> list[tuple[Sequence[Run], Sequence[Parcel]]]:
        """Return this rank's runs with the bucket that they are solved for, in order.

        Each bucket is sent before the next one is solved, so that sending overlaps with solving.
        """
        parts: list[tuple[Sequence[Run], Sequence[Parcel]]] = []
        for bucket in buckets(self.placed.backend, self.jobs):
            senders = [run for run in waiting if not set(bucket).isdisjoint(run.owned)]
            for run in senders:
                waiting.remove(run)
            parts.append((senders, bucket))
        # The results of runs in no bucket stay on this rank: these are solved last, by one call.
        parts.append((waiting, ()))
        return parts

    def conclude(self, counters: dict[str, int]) -> list[Block]:
        """Install the results, and return the blocks whose factors were all solved."""
        with self.placed.backend.phases("share"):
            for pending in self.pending:
                pending.wait()
            if self.summed_outcomes is not None:
                remaining = map(int, self.summed_outcomes())
                for job in self.jobs:
                    job.outcomes = list(itertools.islice(remaining, len(job.outcomes)))
        _raise_errors(self.runs)
        for job in self.jobs:
            counters["failed_solves"] += job.outcomes.count(FAILED)
            counters["retried_solves"] += job.outcomes.count(RETRIED)
        installed: list[Block] = []
        solved_of: dict[Stack, list[Run]] = {}
        for run in self.runs:
            installed += run.record_outcomes()
            if run.solved:
                solved_of.setdefault(run.stack, []).append(run)
        for stack, runs in solved_of.items():
            try:
                _install(stack, runs, self.step)
            except Exception as error:  # of any kind: all ranks raise together
                self.placed.keep(error, stack)
        return installed


def _runs(stack: Stack, members: Sequence[int], damping: float, rank: int) -> list[Run]:
    """Return the runs of some blocks of a stack."""
    alike: dict[tuple[tuple[int, ...], float, bool], list[int]] = {}
    for member in members:
        block = stack.blocks[member]
        # Solved blocks may continue from their last data, so they are apart from new ones.
        key = (stack.places[member].owners, block.damped_with(damping), block.solved)
        alike.setdefault(key, []).append(member)
    runs, like = [], stack.like
    for (_, block_damping, solved), chosen in alike.items():
        place = stack.places[chosen[0]]
        jobs: list[Job] = []
        for index, factor, solver in like.solved_factors:
            specs = like.tensors[factor.name]
            # An owner that is no gradient worker has no last data, and solves from scratch.
            last: dict[str, Tensor] = {}
            if solved and solver.continues:
                last = stack.take_each(stack.data.get(factor.name, {}), chosen)
            job = Job(
                names=tuple(specs),
                factor=factor,
                solver=solver,
                needed=rank in place.needing[index],
                last=last,
                outcomes=[0] * len(chosen),
                source=place.owners[index],
                group=place.sharing[index],
                specs=tuple(specs.values()),
                blocks=len(chosen),
                dtype=like.dtype,
                device=like.device,
                # If the solve fails, NaN is sent: the other ranks wait for a tensor.
                missing=math.nan,
            )
            jobs.append(job)
        blocks = stack.blocks_of(chosen)
        owned = [job for job in jobs if job.source == rank]
        runs.append(Run(stack, tuple(chosen), blocks, block_damping, jobs, owned))
    return runs


def _take_traces(backend: Backend, runs: Sequence[Run]) -> None:
    """Compute the mean traces of all factors on the owners of their blocks.

    The damping of a factor depends on the traces of all factors of its block: if an owner does not
    hold all of these, the traces are summed over ranks.
    """
    travelling: list[Run] = []
    local: dict[tuple[torch.device, torch.dtype], list[Run]] = {}
    jobs: dict[Job, Run] = {}  # whose traces this rank computes
    for run in runs:
        like = run.stack.like
        if run.stack.places[run.members[0]].traces_travel:
            travelling.append(run)
            jobs.update(dict.fromkeys(run.owned, run))
        elif run.owned:
            local.setdefault((like.device, like.dtype), []).append(run)
            jobs.update(dict.fromkeys(run.jobs, run))
    means = _mean_traces(jobs)
    if travelling:
        _add_up_traces(backend, travelling, means)
    for (_, dtype), alike in local.items():
        traces: list[Tensor] = []
        for run in alike:
            traces += [means[job] for job in run.jobs]
        parts = iter(torch.cat(traces).to(dtype).split(list(map(len, traces))))
        for run in alike:
            run.traces = list(itertools.islice(parts, len(run.jobs)))


def _add_up_traces(backend: Backend, runs: Sequence[Run], means: Mapping[Job, Tensor]) -> None:
    """Set the traces of factors whose owners differ, summed over ranks."""
    sizes: list[int] = []
    for run in runs:
        sizes += [len(run.members) * job.factor.groups for job in run.jobs]
    # Zeros but for the factors of this rank: the sum over ranks has all traces.
    numbers = torch.zeros(sum(sizes), dtype=torch.float64, device="cpu")
    parts = iter(numbers.split(sizes))
    for run in runs:
        for job in run.jobs:
            part = next(parts)
            if job in means:
                part.copy_(means[job])
    numbers = numbers.to(backend.wire_device(numbers.device))
    backend.all_reduce(numbers, "agree").wait()
    parts = iter(numbers.split(sizes))
    for run in runs:
        like = run.stack.like
        run.traces = [next(parts).to(like.device, like.dtype) for _ in run.jobs]


def _mean_traces(jobs: Mapping[Job, Run]) -> dict[Job, Tensor]:
    """Return traces of factors over their size, ``[groups]`` in float64, by one mean a size."""
    alike: dict[tuple[object, ...], dict[Job, Tensor]] = {}
    for job, run in jobs.items():
        diagonals = run.stack.diagonals(job.factor, run.members)  # [groups, n]
        key = (diagonals.shape[1], diagonals.dtype, diagonals.device)
        alike.setdefault(key, {})[job] = diagonals
    means: dict[Job, Tensor] = {}
    for diagonals_of in alike.values():
        parts = list(diagonals_of.values())
        diagonals = parts[0] if len(parts) == 1 else torch.cat(parts)
        traces = diagonals.mean(-1, dtype=torch.float64)  # in which the sum does not overflow
        means.update(zip(diagonals_of, traces.split(list(map(len, parts))), strict=True))
    return means


def _install(stack: Stack, runs: Sequence[Run], step: int | None) -> None:
    """Install second-order data of the solved blocks of a stack, and rebase their states."""
    # Runs split a stack by owner and damping; its tensors have the order of members.
    members: list[int] = []
    for run in runs:
        members += run.solved
    order = sorted(range(len(members)), key=members.__getitem__)
    chosen = tuple(sorted(members))
    blocks = stack.blocks_of(chosen)
    jobs = runs[0].jobs

    # States in the old eigenbases are expressed in the new ones, of blocks with earlier updates.
    kept: list[int] = []
    if stack.like.rebases and stack.state:
        kept += [block.member for block in blocks if block.solved and block.record.updates]
    old = stack.second_order_of(kept) if kept else {}
    for number, job in enumerate(jobs):
        if job.needed:
            stack.set_second_order(job.factor.name, chosen, _joined(runs, number, order))
    solved_at = {} if step is None else {job.factor.name: step for job in jobs}
    for block in blocks:
        block.record.solved = True
        block.record.solved_at.update(solved_at)
        for name in stack.like.dependents:  # of statistics that were taken with the old data
            block.record.masses.pop(name, None)
    if kept:
        moved = stack.like.method.rebase(stack.state_of(kept), old, stack.second_order_of(kept))
        stack.set_state(kept, moved)


def _joined(runs: Sequence[Run], number: int, order: Sequence[int]) -> dict[str, Tensor]:
    """Return the second-order data of a factor of all solved blocks, in the order of members."""
    first = runs[0]
    names, tensors = first.jobs[number].names, first.jobs[number].tensors
    assert tensors is not None
    # The tensors of one run without failures have the order of its members already.
    if len(runs) == 1 and len(first.solved) == len(first.members):
        return dict(zip(names, tensors, strict=True))
    joined: dict[str, Tensor] = {}
    for index, name in enumerate(names):
        blocks: list[Tensor] = []
        for run in runs:
            tensors = run.jobs[number].tensors
            assert tensors is not None
            blocks += run.split(tensors[index])
        joined[name] = torch.cat([blocks[position] for position in order])
    return joined


def _raise_errors(runs: Sequence[Run]) -> None:
    """Raise on every rank, if a solver raised on any."""
    names: list[str] = []
    for run in runs:
        if run.error is not None:
            # The rank with the error raises it; the others name it.
            raise run.error
        names += [f"{run.blocks[0].name}.{j.factor.name}" for j in run.jobs if RAISED in j.outcomes]
    if names:
        listed = ", ".join(names)
        raise RuntimeError(f"the solver raised for {listed} on another rank; see its own error")


class Solves:
    """The solves under way, and the steps at which they are installed: the same on every rank.

    ``when`` is the number of steps until then, 0 to solve in the step, or ``"ready"``. Without
    ``overlap`` no thread solves: solves run when they begin, and land at the same step.
    """

    def __init__(self, when: object, *, overlap: bool = True) -> None:
        remedy = (
            f"background must be 0 (factors are solved in the step), a positive number of steps "
            f"after which solves are put to use, or 'ready', not {when!r}"
        )
        if isinstance(when, bool) or not isinstance(when, Integral | str):
            raise TypeError(remedy)
        self._when = when
        if when == "ready":
            self._steps = math.inf  # until a solve lands by itself
            self.delay = 1  # the steps from the start of a solve to its use, at least
        elif isinstance(when, Integral) and int(when) >= 0:
            self._steps = self.delay = int(when)
        else:
            raise ValueError(remedy)
        self.in_background = self._steps > 0
        self._worker = Worker(threaded=overlap)
        self._under_way: list[SolveRound] = []  # in the background, the oldest first

    def __repr__(self) -> str:
        return f"background={self._when}"

    def waits(self) -> list[float]:
        """Return a flag for ``"ready"``, to be summed: 1 if the oldest solve still runs here."""
        if self._when != "ready":
            return []
        return [float(bool(self._under_way) and not self._under_way[0].finished)]

    def land_if_finished(self, waiting: Sequence[float]) -> None:
        """Let the oldest solve land at this step if all ranks have finished it."""
        all_finished = list(waiting) == [0.0]  # the sum of the ranks' flags
        if self._under_way and all_finished:
            self._under_way[0].lands = 0  # which any step has reached

    def advance(
        self,
        placed: PlacedBlocks,
        due: Sequence[Block],
        *,
        damping: float,
        counters: dict[str, int],
        step: int | None = None,
        changed: Collection[Block] = (),
    ) -> list[Block]:
        """Install the solves that land, and solve the blocks that are due, or begin to.

        The blocks that were solved at once are returned; without ``step`` these are all.
        ``changed`` are the blocks with new statistics, from which some second-order data are
        refreshed between solves.
        """
        landed: list[Block] = []
        if self._under_way:
            # Without a step only solves with blocks that are due again land: none lands before 0.
            landed = self._land(-1 if step is None else step, placed, counters, due)
        now: list[Block] = []
        later: list[Block] = []
        for block in due:
            # The first solve of a block is never in the background: it has no data yet.
            if self.in_background and step is not None and block.solved:
                later.append(block)
            else:
                now.append(block)
        if following := {*landed, *changed}.difference(now):
            _follow(placed, following)
        if later:
            assert step is not None
            lands = step + self._steps
            solves = SolveRound.begin(placed, later, damping, step, self._worker, lands)
            self._under_way.append(solves)
        if now:
            solves = SolveRound.begin(placed, now, damping, step)
            solves.share()
            return solves.conclude(counters)
        return []

    def _land(
        self,
        step: float,
        placed: PlacedBlocks,
        counters: dict[str, int],
        due: Collection[Block] = (),
    ) -> list[Block]:
        """Install the solves that land at a step, and the ones with a block that is due again."""
        landing: list[SolveRound] = []
        under_way: list[SolveRound] = []
        for solves in self._under_way:
            is_due = any(block in due for block in solves.blocks)
            if is_due or solves.lands <= step:
                landing.append(solves)
            else:
                under_way.append(solves)
        self._under_way = under_way
        # All results are on their way before the first is waited for.
        blocks: list[Block] = []
        for solves in landing:
            solves.share()
            blocks += solves.blocks
        for solves in landing:
            solves.conclude(counters)
        return blocks

    # -- between steps ----------------------------------------------------------------------------

    def land(self, placed: PlacedBlocks, counters: dict[str, int], what: str) -> Sequence[Block]:
        """Install all solves under way, and return their blocks; every rank must call.

        ``what`` names the call in errors.
        """
        if not self._under_way:
            return ()
        placed.backend.meet(what)
        landed = self._land(math.inf, placed, counters)
        _follow(placed, set(landed))
        return landed

    def drop(self) -> None:
        """Cancel all solves under way, on every rank."""
        under_way, self._under_way = self._under_way, []
        for solves in reversed(under_way):
            solves.drop()

    def close(self) -> None:
        """Cancel all solves under way, and end the thread."""
        self.drop()
        self._worker.close()

    def held(self) -> list[Tensor] | None:
        """Return this rank's tensors of solves under way; None if solves run in the step."""
        if not self.in_background:
            return None
        return list(itertools.chain.from_iterable(s.held() for s in self._under_way))


def _follow(placed: PlacedBlocks, changed: Collection[Block]) -> None:
    """Refresh second-order data that follow running factors between solves.

    All gradient workers hold the factor then (see `soframe.combinations`), so that the data stay
    the same on all of them.
    """
    # Deferred statistics have not reached the running factors yet.
    following = [b for b in changed if b.follows and b.solved and not b.record.pending]
    for stack, members in placed.members(following).items():
        if placed.rank not in stack.place.gradient_workers:
            continue
        data = stack.second_order_of(members)
        for _, factor, solver in stack.like.solved_factors:
            if not solver.follows:
                continue
            try:
                new = solver.follow(stack.matrices(factor, members), data[factor.name])
                if new is not None:
                    stack.set_second_order(factor.name, members, new)
            except Exception as error:  # of any kind: all ranks raise together
                placed.keep(error, stack)
