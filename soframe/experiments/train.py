"""The one training loop: of the demo, of comparisons, of tuning and of the tests.

Every optimizer sees the same initial weights, the same examples in the same order, the same
clock and the same budget. A batch is global: W processes take a W-th of it each, and
DistributedDataParallel averages the gradients, so that W processes follow the trajectory of one.
The clock runs during steps only; evaluations on the whole training set stand outside.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import soframe
from soframe.experiments.config import RunConfig
from soframe.experiments.data import Examples
from soframe.experiments.launch import RefusedError, Worker, launch
from soframe.experiments.optimizers import build_optimizer, build_preconditioner, set_lr
from soframe.experiments.records import Row, RunRecord
from soframe.experiments.requirements import MissingLibraryError, require
from soframe.experiments.workloads import workload


@dataclass(frozen=True)
class Progress:
    """How far a run is, told at every evaluation.

    Attributes:
        row: The evaluation.
        fraction: Of the budget, from 0 to 1; 1 also when the run ends early.
    """

    row: Row
    fraction: float


def run(
    config: RunConfig,
    *,
    processes: int = 1,
    on_progress: Callable[[Progress], None] | None = None,
    tensorboard: Path | None = None,
    timeout: float = 3600.0,
) -> RunRecord:
    """Trains in fresh local processes, one thread each unless the configuration says otherwise.

    Args:
        config: The run.
        processes: How many ranks share each batch.
        on_progress: Called in this process at every evaluation.
        tensorboard: Where to write TensorBoard events, if anywhere.
        timeout: In seconds, for everything: start, training and evaluations.

    Returns:
        The record, with the memory of every rank.

    Raises:
        ValueError: If the batch cannot be split evenly over the processes, if the folder has the
            events of another run, or if soframe refuses a setting.
        OSError: If the folder cannot be made.
    """
    _batch_size(config, processes)
    if tensorboard is not None:
        _require_new(tensorboard)
    start = launch(
        train, processes, on_message=on_progress, timeout=timeout, threads=config.threads
    )
    ranks = start(config, tensorboard)
    # Rank 0 kept the clock; memory differs between ranks, and so may what they send.
    busiest = max(ranks, key=lambda record: sum(record.sent_bytes_per_step.values()))
    return replace(
        ranks[0],
        sent_bytes_per_step=busiest.sent_bytes_per_step,
        curvature_bytes=tuple(size for record in ranks for size in record.curvature_bytes),
    )


def train(worker: Worker, config: RunConfig, tensorboard: Path | None = None) -> RunRecord:
    """Trains in this process, as one rank of the process group if there is one.

    Args:
        worker: The place of this process; rank 0 sends a `Progress` at every evaluation.
        config: The run.
        tensorboard: Where rank 0 writes TensorBoard events, if anywhere.

    Returns:
        The record as this rank saw it.

    Raises:
        RefusedError: If the batch cannot be split evenly, or exceeds the training set; if an
            optimizer refuses a setting, or a library that it needs is missing.
    """
    with numerics(config.threads), _events(worker, tensorboard) as write:
        try:
            training = Run(worker, config)
        except (ValueError, MissingLibraryError) as error:
            raise RefusedError(str(error)) from error
        training.advance(write=write)
        record = training.record()
        training.close()
        return record


def _batch_size(config: RunConfig, processes: int) -> int:
    """Checks the global batch.

    Args:
        config: The run.
        processes: How many ranks share each batch.

    Returns:
        Examples per step over all processes.

    Raises:
        ValueError: If it cannot be split evenly.
    """
    problem = workload(config.workload)
    batch_size = config.batch_size or problem.batch_size
    if config.batch_size is None and config.optimizer == "trust-region" and problem.full_batch:
        batch_size = problem.full_batch // processes * processes
    if batch_size % processes:
        raise ValueError(
            f"a batch of {batch_size} cannot be split evenly over {processes} processes"
        )
    return batch_size


class Run:
    """The state of one run on one rank: it can be paused, so that several can take turns.

    Args:
        worker: The place of this process.
        config: The run.

    Raises:
        ValueError: If the batch cannot be split evenly, or exceeds the training set.
    """

    def __init__(self, worker: Worker, config: RunConfig) -> None:
        dtype: torch.dtype = getattr(torch, config.dtype)
        self.worker = worker
        self.config = config
        self.problem = problem = workload(config.workload)
        self.batch_size = batch_size = _batch_size(config, worker.world_size)
        self.evaluate_every = config.evaluate_every or problem.evaluate_every
        self.data = problem.data(config.seed, dtype)
        if batch_size > len(self.data.train):
            raise ValueError(
                f"a batch of {batch_size} exceeds the {len(self.data.train)} training examples"
            )
        self.model = problem.model(config.seed, dtype)
        full = batch_size == len(self.data.train)
        self.optimizer = build_optimizer(self.model, config, full_batch=full)
        self.preconditioner = build_preconditioner(self.model, self.optimizer, config)
        self.forward: nn.Module = self.model
        if worker.world_size > 1:
            self.forward = DistributedDataParallel(self.model)
        self.targets = config.targets or problem.targets
        self.clock = time.perf_counter if config.clock == "wall" else time.process_time
        self.step_seconds: list[float] = []
        self.curvature_bytes = 0
        self.batches = self._batches()
        # The Monte-Carlo Fisher draws: what it draws must depend on this run and rank alone. Of a
        # seed, 32 bits count; rank 0 has the run's.
        generator = torch.Generator().manual_seed(config.seed + 1_000_003 * worker.rank)
        self.random_state = generator.get_state()
        _warm_up()
        self.rows = [self._evaluate(0)]

    def advance(
        self, seconds: float = math.inf, write: Callable[[Row], None] = lambda row: None
    ) -> None:
        """Steps and evaluates until the budget is spent or the lowest target is reached.

        Args:
            seconds: Also stops at the first evaluation after so many seconds of training, since
                the beginning; the next call goes on.
            write: Called with every evaluation.
        """
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random_state)
            while not self.finished() and self.rows[-1].seconds < seconds:
                for _ in range(self._steps_to_evaluation(self.rows[-1].step)):
                    self._step(next(self.batches))
                row = self._evaluate(len(self.step_seconds))
                self.rows.append(row)
                write(row)
                self.worker.send(Progress(row, 1.0 if self.finished() else self._fraction(row)))
            self.random_state = torch.get_rng_state()

    def close(self) -> None:
        """Removes hooks from the model."""
        if isinstance(
            self.optimizer,
            soframe.TrustRegion | soframe.StochasticTrustRegion | soframe.Optimizer,
        ):
            self.optimizer.close()
        elif self.preconditioner is not None:
            self.preconditioner.close()

    def record(self) -> RunRecord:
        """The record of this rank, so far.

        Returns:
            The record. Before the first step the time of a step is NaN, and nothing was sent.
        """
        each = statistics.median(self.step_seconds) if self.step_seconds else math.nan
        return RunRecord(
            config=self.config,
            processes=self.worker.world_size,
            parameters=sum(p.numel() for p in self.model.parameters()),
            targets=self.targets,
            rows=tuple(self.rows),
            milliseconds_per_step=1e3 * each,
            sent_bytes_per_step=self._sent_bytes_per_step(),
            curvature_bytes=(self.curvature_bytes,),
            gradient_workers=self._gradient_workers(),
        )

    def _step(self, batch: Examples) -> None:
        def closure() -> Tensor:
            return self.problem.losses(self.forward(batch.inputs), batch.targets).mean()

        start = self.clock()
        set_lr(self.optimizer, self.config, len(self.step_seconds))
        if isinstance(self.optimizer, soframe.TrustRegion | soframe.StochasticTrustRegion):
            self.optimizer.step(closure)
            self.step_seconds.append(self.clock() - start)
            self._look_at_memory()
            return
        self.optimizer.zero_grad()
        closure().backward()
        seconds = self.clock() - start
        # Statistics peak here, second-order data after the step; looking at either is not training.
        self._look_at_memory()
        start = self.clock()
        if self.preconditioner is not None and not isinstance(self.optimizer, soframe.Optimizer):
            self.preconditioner.step()
        self.optimizer.step()
        self.step_seconds.append(seconds + self.clock() - start)
        self._look_at_memory()

    def _look_at_memory(self) -> None:
        used = sum(one.memory_usage()["total"] for one in self._preconditioners())
        self.curvature_bytes = max(self.curvature_bytes, used)

    def _preconditioners(self) -> tuple[soframe.Preconditioner, ...]:
        """This rank's preconditioner, if there is one; a trust region has its own."""
        if isinstance(self.optimizer, soframe.TrustRegion):
            return (self.optimizer.preconditioner,)
        return () if self.preconditioner is None else (self.preconditioner,)

    def _batches(self) -> Iterator[Examples]:
        """This rank's part of every global batch, epoch after epoch in a new order.

        The examples that are left over at the end of an epoch are dropped from it.

        Yields:
            `batch / processes` examples.
        """
        examples = self.data.train
        generator = torch.Generator().manual_seed(self.config.seed)
        rank, world_size = self.worker.rank, self.worker.world_size
        while True:
            order = torch.randperm(len(examples), generator=generator)
            if self.batch_size == len(examples):
                order = order.sort().values  # the same sums, to the bit, at every step
            for first in range(0, len(examples) - self.batch_size + 1, self.batch_size):
                yield examples[order[first : first + self.batch_size][rank::world_size]]

    def take(self, steps: int) -> float:
        """Takes steps without evaluating: for those who time them.

        Args:
            steps: How many.

        Returns:
            Their seconds altogether.
        """
        before = len(self.step_seconds)
        for _ in range(steps):
            self._step(next(self.batches))
        return sum(self.step_seconds[before:])

    @torch.no_grad()
    def _evaluate(self, step: int) -> Row:
        """The loss and the accuracy on the test set, shared by the ranks."""
        if self.worker.world_size > 1:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)  # batch norms' means: every rank has its own until then
        training = self.model.training
        self.model.eval()
        totals = torch.zeros(3, dtype=torch.float64)
        test = self.data.test
        measured = self.data.train
        if self.problem.held_out:
            assert test is not None
            measured = test
        with self._averaged():
            totals[:2] = self._sums(measured)
            if test is not None and self.problem.classifies and test is not measured:
                totals[1] = self._sums(test)[1]
        self.model.train(training)
        if self.worker.rank == 0:
            # All ranks read rank 0's clock, so that they stop at the same step.
            totals[2] = sum(self.step_seconds)
        if self.worker.world_size > 1:
            dist.all_reduce(totals)
        loss, correct, seconds = totals.tolist()
        accuracy = correct / len(test) if test is not None and self.problem.classifies else None
        return Row(step, seconds, self.problem.scale * loss / len(measured), accuracy)

    def _averaged(self) -> contextlib.AbstractContextManager[None]:
        """Within it the model has what is evaluated: averaged iterates, where there are any."""
        if isinstance(self.optimizer, soframe.StochasticTrustRegion):
            return self.optimizer.averaged()
        return contextlib.nullcontext()

    def _sums(self, examples: Examples) -> Tensor:
        """The sum of this rank's losses, and how many of its classes are right."""
        examples = examples[slice(self.worker.rank, None, self.worker.world_size)]
        sums = torch.zeros(2, dtype=torch.float64)
        for first in range(0, len(examples), _AT_ONCE):
            part = examples[first : first + _AT_ONCE]
            outputs = self.model(part.inputs)
            sums[0] += self.problem.losses(outputs, part.targets).double().sum()
            if self.problem.classifies:
                sums[1] += (outputs.argmax(dim=1) == part.targets).sum()
        return sums

    def _steps_to_evaluation(self, step: int) -> int:
        if self.config.steps is None:
            return self.evaluate_every
        return min(self.evaluate_every, self.config.steps - step)

    def _fraction(self, row: Row) -> float:
        spent = [0.0]
        if self.config.steps is not None:
            spent.append(row.step / self.config.steps)
        if self.config.seconds is not None:
            spent.append(row.seconds / self.config.seconds)
        return min(1.0, max(spent))

    def finished(self) -> bool:
        """Whether the budget is spent, the lowest target reached, or the loss not finite."""
        row = self.rows[-1]
        reached = self.config.stop_at_target and row.loss <= min(self.targets)
        # A run whose loss is no longer finite never comes back, unless its last step is undone.
        lost = not math.isfinite(row.loss) and not isinstance(self.optimizer, soframe.TrustRegion)
        return self._fraction(row) >= 1.0 or lost or (reached and row.step > 0)

    def _gradient_workers(self) -> tuple[int, ...]:
        return tuple(
            len(block.gradient_workers)
            for one in self._preconditioners()
            for block in one.placement.blocks
        )

    def _sent_bytes_per_step(self) -> dict[str, float]:
        sent: dict[str, float] = {}
        if self.worker.world_size == 1 or not self.step_seconds:
            return sent
        sent["gradients"] = float(
            sum(p.numel() * p.element_size() for p in self.model.parameters())
        )
        for one in self._preconditioners():
            for phase, traffic in one.traffic().items():
                if phase != "total":
                    each = traffic["bytes"] / len(self.step_seconds)
                    sent[phase] = sent.get(phase, 0.0) + each
        return sent


#: Numbers in single precision, just below the 32 MiB from which glibc's threshold no longer moves.
_LARGE = 8_000_000


#: Examples that an evaluation takes at once.
_AT_ONCE = 2048


def _warm_up() -> None:
    """Takes one step on a model of one weight, and frees a large tensor.

    The first step of the first optimizer in a process makes torch import its compiler, which
    takes longer than many a step: it is nobody's training time. And glibc gives free memory back
    to the system beyond twice the largest block that it has seen freed, to ask for it again in
    the next step, page by page. After a large one it keeps what any optimizer here needs.
    """
    torch.zeros(_LARGE)
    model = nn.Linear(1, 1)
    model(torch.zeros(1, 1)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()


@contextlib.contextmanager
def numerics(threads: int) -> Iterator[None]:
    """Sets what would otherwise differ from one machine, or one optimizer, to the next.

    Denormal numbers are computed in microcode on many processors, far slower than others.
    Second-order data may hold many of them (products of small activations and gradients, squared),
    first-order state few, so that a comparison of seconds with denormals compares processors. They
    are flushed to zero for every optimizer alike.

    Args:
        threads: Of torch.

    Yields:
        Nothing.
    """
    before = torch.get_num_threads()
    flushed = bool((torch.full((1,), 1e-310, dtype=torch.float64) * 1.0 == 0.0).item())
    torch.set_num_threads(threads)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(flushed)


def _require_new(folder: Path) -> None:
    """Makes a folder for TensorBoard, which draws all events of one folder as a single run.

    Raises:
        MissingLibraryError: If there is no TensorBoard.
        OSError: If the folder cannot be made.
        ValueError: If it has events.
    """
    require("tensorboard")
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.glob("events.out.tfevents.*")):
        raise ValueError(
            f"{folder} has the events of another run, which TensorBoard would mix with those of "
            f"this one: name a new folder"
        )


@contextlib.contextmanager
def _events(worker: Worker, folder: Path | None) -> Iterator[Callable[[Row], None]]:
    """Writes evaluations as TensorBoard events, on rank 0 and if asked to."""
    if folder is None or worker.rank != 0:
        yield lambda row: None
        return
    (tensorboard,) = require("torch.utils.tensorboard")
    writer: Any = tensorboard.SummaryWriter(str(folder))

    def write(row: Row) -> None:
        writer.add_scalar("loss/training", row.loss, row.step)
        writer.add_scalar("seconds", row.seconds, row.step)
        if row.accuracy is not None:
            writer.add_scalar("accuracy/test", row.accuracy, row.step)

    try:
        yield write
    finally:
        writer.close()
