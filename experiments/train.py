"""The training loop of all experiments.

Every optimizer sees the same initial weights, the same examples in the same order, the same clock
and the same budget. A batch is global: each of W processes takes a W-th of it, and
DistributedDataParallel averages the gradients, so that W processes follow the trajectory of one.
The clock runs during steps only; evaluations are outside.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import soframe
from experiments.config import RunConfig
from experiments.data import Examples, Source, size, take
from experiments.launch import RefusedError, Worker, launch
from experiments.libraries import MissingLibraryError
from experiments.optimizers import (
    Own,
    build_optimizer,
    build_preconditioner,
    schedule_factor,
    set_lr,
    settings_of,
)
from experiments.records import Row, RunRecord
from experiments.workloads import workload
from soframe.kernels.devices import keep_memory

AT_ONCE = 2048  # examples of an evaluation


def _unheard(message: object) -> None:
    """Drop a message; a lambda could not be sent to other processes."""


ALONE = Worker(rank=0, world_size=1, send=_unheard)


@dataclass(frozen=True)
class Progress:
    """An evaluation, and the fraction of the budget that is spent: 1 also at an early end."""

    row: Row
    fraction: float


def run(
    config: RunConfig,
    *,
    processes: int = 1,
    on_progress: Callable[[Progress], None] | None = None,
    timeout: float = 24 * 3600.0,
) -> RunRecord:
    """Train in fresh local processes, and return a record with the memory of every rank.

    Args:
        config: The run.
        processes: Processes that share each batch.
        on_progress: Called in this process at every evaluation.
        timeout: Seconds for start, training and evaluations.

    Raises:
        ValueError: If the batch cannot be split evenly over the processes, or if soframe refuses a
            setting.
    """
    ranks = launch(
        train, processes, on_message=on_progress, timeout=timeout, threads=config.threads
    )(config)
    busiest = max(ranks, key=lambda record: sum(record.sent_bytes_per_step.values()))
    return replace(
        ranks[0],  # it kept the clock
        sent_bytes_per_step=busiest.sent_bytes_per_step,
        curvature_bytes=tuple(
            itertools.chain.from_iterable(record.curvature_bytes for record in ranks)
        ),
    )


def train(worker: Worker, config: RunConfig) -> RunRecord:
    """Train in this process, as one rank of the process group, if initialised.

    Raises:
        RefusedError: If the batch cannot be split evenly, or exceeds the training set; if an
            optimizer refuses a setting, or a library that it needs is missing.
    """
    with numerics(config.threads):
        try:
            training = Run(worker, config)
        except (ValueError, MissingLibraryError) as error:
            raise RefusedError(str(error)) from error
        training.advance()
        training.close()
        return training.record()


class Run:
    """The state of one run on one rank: it can be paused, so that several runs can take turns.

    Raises:
        ValueError: If the batch cannot be split evenly, or exceeds the training set.
    """

    def __init__(self, worker: Worker, config: RunConfig) -> None:
        self.worker, self.config = worker, config
        self.workload = workload(config.workload)
        self.task = task = self.workload.make(config.seed, getattr(torch, config.dtype))
        self.model, examples = task.model, size(task.train)
        self.batch_size = self._batch_size(examples)
        full = self.batch_size == examples
        self.optimizer = build_optimizer(self.model, config, task.likelihood, full_batch=full)
        self.preconditioner = build_preconditioner(self.model, self.optimizer, config)
        self.settings = settings_of(self.optimizer, self.preconditioner)
        self.forward: nn.Module = self.model
        if worker.world_size > 1:
            self.forward = DistributedDataParallel(self.model)
        self.targets = self.workload.targets if config.targets is None else config.targets
        self.clock = time.perf_counter if config.clock == "wall" else time.process_time
        self.seconds = 0.0
        self.step_seconds: list[float] = []
        self.curvature_bytes = 0
        self.batches = self._batches()
        # Dropout and the Monte-Carlo Fisher draw: from this run and rank alone. 32 bits count.
        generator = torch.Generator().manual_seed(config.seed + 1_000_003 * worker.rank)
        self.random_state = generator.get_state()
        _warm_up()
        self.rows = [self.evaluate()]

    def advance(self, seconds: float = math.inf) -> None:
        """Train until the end, or the first evaluation after so many seconds from the start."""
        while not self.finished() and self.rows[-1].seconds < seconds:
            self.take(until=self._evaluation_due())
            row = self.evaluate()
            self.rows.append(row)
            self.worker.send(Progress(row, 1.0 if self.finished() else self._fraction(row)))

    def take(self, steps: int | None = None, *, until: Callable[[], bool] | None = None) -> float:
        """Take so many steps, or until a condition holds, and return their seconds."""
        before, first = self.seconds, len(self.step_seconds)
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self.random_state)
            while len(self.step_seconds) - first != steps:
                self._step(next(self.batches))
                if until is not None and until():
                    break
            self.random_state = torch.get_rng_state()
        return self.seconds - before

    def close(self) -> None:
        """Remove hooks from the model."""
        hooked = self.optimizer if isinstance(self.optimizer, Own) else self.preconditioner
        if hooked is not None:
            hooked.close()

    def record(self) -> RunRecord:
        """Return the record of this rank, so far; before the first step its time is NaN."""
        seconds = statistics.median(self.step_seconds) if self.step_seconds else math.nan
        return RunRecord(
            config=self.config,
            processes=self.worker.world_size,
            parameters=sum(p.numel() for p in self.model.parameters()),
            targets=self.targets,
            rows=tuple(self.rows),
            milliseconds_per_step=1e3 * seconds,
            sent_bytes_per_step=self._sent_bytes_per_step(),
            curvature_bytes=(self.curvature_bytes,),
            gradient_workers=self._gradient_workers(),
            settings=self.settings,
        )

    def finished(self) -> bool:
        """Whether the budget is spent, the lowest target reached, or the loss not finite."""
        row = self.rows[-1]
        stops = self.config.stop_at_target and self.targets
        reached = row.step > 0 and stops and row.loss <= min(self.targets)
        # A run whose loss is no longer finite never comes back, unless its last step is undone.
        lost = not math.isfinite(row.loss) and not isinstance(self.optimizer, soframe.TrustRegion)
        return self._fraction(row) >= 1.0 or lost or bool(reached)

    @torch.no_grad()
    def evaluate(self) -> Row:
        """Return the loss and the accuracy; the ranks share the examples."""
        if self.worker.world_size > 1:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)  # batch norms' means differ between ranks
        training = self.model.training
        self.model.eval()
        totals = torch.zeros(3, dtype=torch.float64)
        measured, test = self.task.train, self.task.test
        if self.workload.held_out:
            assert test is not None
            measured = test
        with self._averaged(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # losses that draw are compared at the same draws
            totals[0] = self._sum(self.task.loss, measured)
            if test is not None and self.workload.classifies:
                totals[1] = self._sum(_accuracy, test)
        self.model.train(training)
        if self.worker.rank == 0:
            totals[2] = self.seconds  # for all ranks, so that they stop at the same step
        if self.worker.world_size > 1:
            dist.all_reduce(totals)
        loss, correct, seconds = totals.tolist()
        accuracy = None
        if test is not None and self.workload.classifies:
            accuracy = correct / size(test)
        mean = self.workload.scale * loss / size(measured)
        return Row(len(self.step_seconds), seconds, mean, accuracy)

    def _sum(self, mean: Callable[..., Tensor], examples: Source) -> float:
        """Return this rank's part of a sum over examples."""
        indices = torch.arange(self.worker.rank, size(examples), self.worker.world_size)
        total = 0.0
        for part in indices.split(self.workload.at_once or AT_ONCE):
            total += float(mean(self.model, *take(examples, part))) * len(part)
        return total

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """Put averaged iterates into the model, where an optimizer has any."""
        # The schedule-free optimizers have a mode of evaluation.
        modes: Any = self.optimizer if hasattr(self.optimizer, "eval") else None
        has_average = isinstance(self.optimizer, soframe.StochasticTrustRegion)
        with self.optimizer.averaged() if has_average else contextlib.nullcontext():  # type: ignore[attr-defined]
            if modes:
                modes.eval()
            yield
            if modes:
                modes.train()

    def _batch_size(self, examples: int) -> int:
        takes_all = self.config.optimizer == "trust-region" and self.workload.whole
        size = self.config.batch_size or (None if takes_all else self.workload.batch_size)
        processes = self.worker.world_size
        size = size or examples // processes * processes
        if size % processes:
            raise ValueError(f"a batch of {size} cannot be split evenly over {processes} processes")
        if size > examples:
            raise ValueError(f"a batch of {size} exceeds the {examples} training examples")
        return size

    def _batches(self) -> Iterator[Examples]:
        """Yield this rank's part of every global batch, epoch after epoch in a new order.

        The examples that are left over at the end of an epoch are dropped from it.
        """
        examples = size(self.task.train)
        generator = torch.Generator().manual_seed(self.config.seed)
        rank, world_size = self.worker.rank, self.worker.world_size
        while True:
            order = torch.randperm(examples, generator=generator)
            if self.batch_size == examples:
                order = order.sort().values  # the same sums, to the bit, at every step
            for first in range(0, examples - self.batch_size + 1, self.batch_size):
                yield take(
                    self.task.train, order[first : first + self.batch_size][rank::world_size]
                )

    def _step(self, batch: Examples) -> None:
        def closure() -> Tensor:
            return self.task.loss(self.forward, *batch)

        start = self.clock()
        set_lr(self.optimizer, schedule_factor(self.config, len(self.step_seconds), self.seconds))
        before = 0.0
        if isinstance(self.optimizer, soframe.TrustRegion | soframe.StochasticTrustRegion):
            self.optimizer.step(closure)
        else:
            self.optimizer.zero_grad()
            closure().backward()
            before = self.clock() - start
            # Statistics peak here, second-order data after the step; looking is not training.
            self._look_at_memory()
            start = self.clock()
            if self.preconditioner is not None and not isinstance(self.optimizer, Own):
                self.preconditioner.step()
            self.optimizer.step()
        self.step_seconds.append(before + self.clock() - start)
        self.seconds += self.step_seconds[-1]
        self._look_at_memory()

    def _look_at_memory(self) -> None:
        if self.preconditioner is not None:
            used = self.preconditioner.memory_usage()["total"]
            self.curvature_bytes = max(self.curvature_bytes, used)

    def _evaluation_due(self) -> Callable[[], bool]:
        """Return whether the next evaluation is due, for use after each step."""
        last, config = self.rows[-1], self.config
        if config.evaluate_seconds is not None:
            at = min(last.seconds + config.evaluate_seconds, config.seconds or math.inf)
            return lambda: self.seconds >= at
        step = last.step + (config.evaluate_every or self.workload.evaluate_every)
        step = min(step, config.steps or step)
        return lambda: len(self.step_seconds) >= step

    def _fraction(self, row: Row) -> float:
        steps = 0.0 if self.config.steps is None else row.step / self.config.steps
        seconds = 0.0 if self.config.seconds is None else row.seconds / self.config.seconds
        return min(1.0, max(steps, seconds))

    def _gradient_workers(self) -> tuple[int, ...]:
        if self.preconditioner is None:
            return ()
        blocks = self.preconditioner.placement.blocks
        return tuple(len(block.gradient_workers) for block in blocks)

    def _sent_bytes_per_step(self) -> dict[str, float]:
        if self.worker.world_size == 1 or not self.step_seconds:
            return {}
        gradients = sum(p.numel() * p.element_size() for p in self.model.parameters())
        sent = {"gradients": float(gradients)}
        if self.preconditioner is not None:
            for phase, traffic in self.preconditioner.traffic().items():
                if phase != "total":
                    per_step = traffic["bytes"] / len(self.step_seconds)
                    sent[phase] = sent.get(phase, 0.0) + per_step
        return sent


def _accuracy(model: nn.Module, inputs: Tensor, classes: Tensor) -> Tensor:
    right: Tensor = model(inputs).argmax(dim=1) == classes
    return right.double().mean()


def _warm_up() -> None:
    """Take one step on a model of one weight, and let the process keep memory.

    The first step of the first optimizer in a process makes torch import its compiler, which is no
    optimizer's training time. And soframe keeps memory for the next step, by which others gain too.
    """
    keep_memory()
    model = nn.Linear(1, 1)
    model(torch.zeros(1, 1)).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.0).step()


@contextlib.contextmanager
def numerics(threads: int) -> Iterator[None]:
    """Set torch's threads, and flush denormal numbers to zero, for every optimizer alike.

    Many processors compute denormals in microcode. Second-order data may hold many of them
    (products of small activations and gradients, squared), first-order state few: a comparison of
    seconds with denormals would compare processors.
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
