"""Runs of workloads, by the loop of `experiments.loop`.

Every optimizer sees the same initial weights, the same examples in the same order, the same clock
and the same budget.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

import soframe
from experiments.batches import Batches
from experiments.config import RunConfig
from experiments.data import Source, size
from experiments.launch import Place, RefusedError, Worker, launch
from experiments.libraries import MissingLibraryError
from experiments.loop import Job, Run
from experiments.optimizers import (
    build_optimizer,
    build_preconditioner,
    schedule_factor,
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

    @property
    def status(self) -> str:
        """The evaluation in words."""
        row, loss = self.row, "diverged"
        if math.isfinite(row.loss):
            loss = f"{row.loss:.4f}"
        return f"loss {loss}  step {row.step}  {row.seconds:.1f} s"


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
        curvature_bytes=sum((record.curvature_bytes for record in ranks), ()),
    )


def train(worker: Worker, config: RunConfig) -> RunRecord:
    """Train in this process, as one rank of the process group, if initialised.

    Raises:
        RefusedError: If the batch cannot be split evenly, or exceeds the training set; if an
            optimizer refuses a setting, or a library that it needs is missing.
    """
    with numerics(config.threads):
        try:
            training = WorkloadRun(worker, config)
        except (ValueError, MissingLibraryError) as error:
            raise RefusedError(str(error)) from error
        training.advance()
        training.close()
        return training.record()


class WorkloadRun(Run):
    """A run of a workload on one rank, with what is recorded of it.

    Raises:
        ValueError: If the batch cannot be split evenly, or exceeds the training set.
    """

    def __init__(self, worker: Worker, config: RunConfig) -> None:
        place = Place(worker.rank, worker.world_size, torch.device("cpu"))
        self.worker, self.config = worker, config
        self.workload = workload(config.workload)
        self.task = task = self.workload.make(config.seed, getattr(torch, config.dtype))
        examples = size(task.train)
        batch_size = self._batch_size(examples)
        optimizer = build_optimizer(
            task.model, config, task.likelihood, full_batch=batch_size == examples
        )
        preconditioner = build_preconditioner(task.model, optimizer, config)
        batches = Batches(task.train, task.test, place, batch_size, seed=config.seed)
        clock = {"wall": time.perf_counter, "cpu": time.process_time}[config.clock]
        rate = partial(schedule_factor, config)
        super().__init__(
            Job(task.model, task.loss, optimizer, preconditioner, batches, rate, clock)
        )
        self.settings = settings_of(optimizer, self.preconditioner)
        self.targets = self.workload.targets
        if config.targets is not None:
            self.targets = config.targets
        self.curvature_bytes = 0
        _warm_up()
        self.rows = [self.evaluate()]

    def advance(self, seconds: float = math.inf) -> None:
        """Train until the end, or the first evaluation after so many seconds from the start."""
        while not self.finished() and self.rows[-1].seconds < seconds:
            self.take(until=self._evaluation_due())
            row = self.evaluate()
            self.rows.append(row)
            fraction = 1.0 if self.finished() else self._fraction(row)
            self.worker.send(Progress(row, fraction))

    def record(self) -> RunRecord:
        """Return the record of this rank, so far; before the first step its time is NaN."""
        seconds, workers = math.nan, list[int]()
        if self.step_seconds:
            seconds = statistics.median(self.step_seconds)
        if self.preconditioner is not None:
            for block in self.preconditioner.placement.blocks:
                workers.append(len(block.gradient_workers))
        return RunRecord(
            config=self.config,
            processes=self.place.size,
            parameters=sum(p.numel() for p in self.model.parameters()),
            targets=self.targets,
            rows=tuple(self.rows),
            milliseconds_per_step=1e3 * seconds,
            sent_bytes_per_step=self._sent_bytes_per_step(),
            curvature_bytes=(self.curvature_bytes,),
            gradient_workers=tuple(workers),
            settings=self.settings,
        )

    def finished(self) -> bool:
        """Whether the budget is spent, the lowest target reached, or the loss not finite."""
        row = self.rows[-1]
        if self._fraction(row) >= 1.0:
            return True
        if not math.isfinite(row.loss):
            # Such a run never comes back, unless its last step is undone.
            return not isinstance(self.optimizer, soframe.TrustRegion)
        if row.step == 0 or not self.config.stop_at_target:
            return False
        return row.loss <= min(self.targets, default=-math.inf)

    def evaluate(self) -> Row:
        """Return the loss and the accuracy; the ranks share the examples."""
        task, accuracy = self.task, None
        measured = task.test if self.workload.held_out else task.train
        assert measured is not None
        loss = self._mean(task.loss, measured)
        if task.test is not None and self.workload.classifies:
            accuracy = self._mean(_accuracy, task.test)
        clock = self.seconds if self.place.rank == 0 else 0.0
        (seconds,) = self.summed([torch.tensor(clock, dtype=torch.float64)])  # ranks stop together
        return Row(self.step, seconds, self.workload.scale * loss, accuracy)

    def _mean(self, mean: Callable[..., Tensor], examples: Source) -> float:
        def measure(model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
            return {"mean": mean(model, *batch)}

        return self.means(measure, examples, self.workload.at_once or AT_ONCE)["mean"]

    def _batch_size(self, examples: int) -> int:
        if self.config.batch_size:
            return self.config.batch_size
        takes_all = self.config.optimizer == "trust-region" and self.workload.whole
        if self.workload.batch_size and not takes_all:
            return self.workload.batch_size
        return examples // self.worker.world_size * self.worker.world_size

    def _look(self) -> None:
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
        return lambda: self.step >= step

    def _fraction(self, row: Row) -> float:
        fraction = 0.0
        if self.config.steps is not None:
            fraction = row.step / self.config.steps
        if self.config.seconds is not None:
            fraction = max(fraction, row.seconds / self.config.seconds)
        return min(1.0, fraction)

    def _sent_bytes_per_step(self) -> dict[str, float]:
        if self.place.size == 1 or not self.step:
            return {}
        gradients = sum(p.numel() * p.element_size() for p in self.model.parameters())
        sent = {"gradients": float(gradients)}
        if self.preconditioner is not None:
            for phase, traffic in self.preconditioner.traffic().items():
                if phase != "total":
                    sent[phase] = sent.get(phase, 0.0) + traffic["bytes"] / self.step
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
