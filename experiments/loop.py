"""The training loop of all experiments: of workloads, which are compared, and of recipes.

A batch is global: each of W processes takes a W-th of it, and DistributedDataParallel averages the
gradients, so that W processes follow the trajectory of one. The draws of a step, such as dropout's
or a Monte Carlo Fisher's, are determined by seed, step and rank: a run can be paused while others
train in the same process, and one that is resumed on as many ranks ends with the bits of one that
was not interrupted. The clock runs during steps, with the reading of their data; evaluations are
outside.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel

import soframe
from experiments.batches import Batches
from experiments.data import Examples, Source
from experiments.optimizers import Own, set_lr
from experiments.recipes.loaders import Stream, number
from soframe.testing import Oracle

TakesClosure = soframe.TrustRegion | soframe.StochasticTrustRegion | Oracle
"""Optimizers that evaluate the loss in their steps."""


@dataclass(frozen=True)
class Job:
    """A model, on its device, and all that trains it on one rank."""

    model: nn.Module
    loss: Callable[..., Tensor]  # from the model and a batch to their mean loss
    optimizer: torch.optim.Optimizer
    preconditioner: soframe.Preconditioner | None  # in front of the optimizer
    batches: Batches
    rate: Callable[[int, float], float]  # from steps and seconds to the factor of the rate
    clock: Callable[[], float] = time.perf_counter
    scaler: GradScaler = field(default_factory=partial(GradScaler, "cpu", enabled=False))
    amp: Literal["none", "bf16", "fp16"] = "none"
    channels_last: bool = False
    clip: float | None = None  # bound on the norm of a first-order optimizer's gradients
    terms: Callable[..., Tensor | int] | None = None  # of the loss of a batch


class Run:
    """A run on one rank: it can be paused, saved and continued."""

    def __init__(self, job: Job) -> None:
        self.job, self.place = job, job.batches.place
        self.model, self.optimizer = job.model, job.optimizer
        self.forward: nn.Module = job.model
        device, on = self.place.device, None
        if self.place.size > 1:
            if device.type == "cuda":
                on = [device.index]
            self.forward = DistributedDataParallel(job.model, device_ids=on)
        set_lr(job.optimizer, 1.0)  # notes the peak in each group
        self.step, self.seconds = 0, 0.0
        self.step_seconds: list[float] = []
        self._upcoming: Iterator[Examples] | None = None
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        self._counted = 0

    @property
    def preconditioner(self) -> soframe.Preconditioner | None:
        """The preconditioner, in front of the optimizer or within it."""
        if isinstance(self.optimizer, soframe.TrustRegion | soframe.Optimizer):
            return self.optimizer.preconditioner
        return self.job.preconditioner

    # -- steps ------------------------------------------------------------------------------------

    def take(self, steps: int | None = None, *, until: Callable[[], bool] | None = None) -> float:
        """Take so many steps, or until a condition holds after one, and return their seconds."""
        before, first = self.seconds, self.step
        if self._upcoming is None:
            self._upcoming = self.job.batches.training(self.step)
        with torch.random.fork_rng(devices=[]):
            while self.step - first != steps:
                self._take_one(self._upcoming)
                if until is not None and until():
                    break
        return self.seconds - before

    def _take_one(self, upcoming: Iterator[Examples]) -> None:
        start = self.job.clock()
        set_lr(self.optimizer, self.job.rate(self.step, self.seconds))
        seed_draws(self.job.batches.seed, self.step, self.place.rank)
        before = 0.0
        if isinstance(self.optimizer, TakesClosure):
            batch = self.moved(next(upcoming))
            self.optimizer.step(lambda: self.job.loss(self.forward, *batch))
        else:
            self._backward(upcoming)
            before = self.job.clock() - start
            self._look()
            start = self.job.clock()
            self._update()
        self.step += 1
        self.step_seconds.append(before + self.job.clock() - start)
        self.seconds += self.step_seconds[-1]
        self._look()

    def _backward(self, upcoming: Iterator[Examples]) -> None:
        """Accumulate the gradients of the next micro-batches."""
        count = self.job.batches.accumulate
        self.optimizer.zero_grad()
        for index in range(count):
            batch = self.moved(next(upcoming))
            if self.preconditioner is not None and self.job.terms is not None:
                self.preconditioner.count(self.job.terms(*batch))
            with self._averages(is_last=index + 1 == count):
                with self._autocast():
                    loss = self.job.loss(self.forward, *batch)
                self.job.scaler.scale(loss / count).backward()
            self._total += loss.detach()
            self._counted += 1

    def _averages(self, *, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """Let DistributedDataParallel average gradients in the last backward pass alone."""
        if is_last or not isinstance(self.forward, DistributedDataParallel):
            return contextlib.nullcontext()
        no_sync: contextlib.AbstractContextManager[None] = self.forward.no_sync()
        return no_sync

    def _update(self) -> None:
        job = self.job
        if job.preconditioner is not None:
            job.scaler.unscale_(self.optimizer)
            job.preconditioner.step()
        elif job.clip is not None and not isinstance(self.optimizer, soframe.Optimizer):
            job.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), job.clip)
        job.scaler.step(self.optimizer)
        job.scaler.update()

    def _look(self) -> None:
        """Look at the memory of a step, outside of its time."""

    def moved(self, batch: Sequence[Tensor]) -> Examples:
        """Return a batch on the device."""
        tensors: list[Tensor] = []
        for tensor in batch:
            moved = tensor.to(self.place.device, non_blocking=True)
            if self.job.channels_last and moved.dim() == 4:
                moved = moved.contiguous(memory_format=torch.channels_last)
            tensors.append(moved)
        return tuple(tensors)

    def _autocast(self) -> torch.autocast:
        dtype = torch.float16 if self.job.amp == "fp16" else torch.bfloat16
        return torch.autocast(self.place.device.type, dtype=dtype, enabled=self.job.amp != "none")

    # -- evaluations ------------------------------------------------------------------------------

    @torch.no_grad()
    def means(
        self, measure: Callable[..., Mapping[str, Tensor]], examples: Source | Stream, at_once: int
    ) -> dict[str, float]:
        """Return means over a set, which the ranks share, from those of batches, by name."""
        if self.place.size > 1:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)  # batch norms' means differ between ranks
        training = self.model.training
        self.model.eval()
        sums: dict[str, Tensor] = {}
        count = 0
        with self._averaged(), self._autocast(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # losses that draw are compared at the same draws
            for batch in map(self.moved, self.job.batches.shares(examples, at_once)):
                for name, mean in measure(self.model, *batch).items():
                    sums[name] = sums.get(name, 0.0) + mean.double() * len(batch[0])
                count += len(batch[0])
        self.model.train(training)
        *totals, samples = self.summed([*sums.values(), torch.tensor(float(count))])
        return {name: total / samples for name, total in zip(sums, totals, strict=True)}

    def summed(self, numbers: Sequence[Tensor]) -> list[float]:
        """Return sums over the ranks."""
        stacked = torch.stack([tensor.to(self.place.device).double() for tensor in numbers])
        if self.place.size > 1:
            dist.all_reduce(stacked)
        return list(stacked.tolist())

    def training_loss(self) -> float:
        """Return the mean loss of all batches since the last call."""
        total, count = self._losses()
        self._total.zero_()
        self._counted = 0
        return total / count

    def _losses(self) -> list[float]:
        return self.summed([self._total, torch.tensor(float(self._counted))])

    @contextlib.contextmanager
    def _averaged(self) -> Iterator[None]:
        """Put averaged iterates into the model, where an optimizer has any."""
        optimizer: Any = self.optimizer
        if isinstance(optimizer, soframe.StochasticTrustRegion):
            with optimizer.averaged():
                yield
        elif hasattr(optimizer, "eval"):  # the schedule-free optimizers
            optimizer.eval()
            yield
            optimizer.train()
        else:
            yield

    # -- state ------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint; a call for every rank."""
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "preconditioner": None,
        }
        if self.job.preconditioner is not None:
            state["preconditioner"] = self.job.preconditioner.state_dict()
        return {**state, "scaler": self.job.scaler.state_dict(), "losses": self._losses()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        self.step, self.seconds = state["step"], state["seconds"]
        self._upcoming = None
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.job.preconditioner is not None:
            self.job.preconditioner.load_state_dict(state["preconditioner"])
        self.job.scaler.load_state_dict(state["scaler"])
        if self.place.rank == 0:
            total, counted = state["losses"]
            self._total += total
            self._counted = int(counted)

    def close(self) -> None:
        """Remove hooks from the model, and end the processes that read data."""
        self._upcoming = None
        hooked = self.optimizer if isinstance(self.optimizer, Own) else self.job.preconditioner
        if hooked is not None:
            hooked.close()


def seed_draws(*parts: int) -> None:
    """Seed torch's default generators, here and on the GPU in use, from several numbers."""
    torch.default_generator.manual_seed(number(*parts))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number(*parts))
