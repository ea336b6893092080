"""The training loop of the recipes: one process, several local ones, or the ranks of torchrun.

A run is determined by its settings: the order of samples by seed and epoch, the draws of an item by
seed, epoch and index, and the draws of a step, such as dropout's, by seed, step and rank. So a
checkpoint needs no state of a sampler or of a generator, and a run that is resumed on as many ranks
ends with the bits of one that was not interrupted.

An interrupt (SIGINT, as of Ctrl-C, or SIGTERM) lets the step end; the ranks agree on it, save, and
leave together.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import math
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, Subset

import soframe
from experiments import display
from experiments.environment import environment
from experiments.launch import RefusedError, Worker, WorkerError, launch
from experiments.libraries import MissingLibraryError
from experiments.optimizers import set_lr
from experiments.recipes import common
from experiments.recipes.common import Common
from experiments.recipes.loaders import Stream, number
from experiments.recipes.ranks import Interrupt, Place, agreed, device_of, group
from experiments.records import jsonable, write_json
from soframe import checkpoint
from soframe.diagnostics import ScalarLogger

LONGEST = 30 * 86400.0  # seconds of a launched run


class DivergedError(ValueError):
    """The loss is not finite."""


@dataclass(frozen=True)
class Outcome:
    """The end of a run.

    Attributes:
        step: Steps taken.
        finished: Whether these are all; False after an interrupt.
        figures: The last evaluation: "loss", a recipe's metrics and its summary.
    """

    step: int
    finished: bool
    figures: Mapping[str, float]


def run(recipe: ModuleType, settings: Common) -> Outcome:
    """Train a recipe, as a rank of torchrun or of a process group, alone, or in new processes.

    Args:
        recipe: A module, see `experiments.recipes`.
        settings: Its settings.

    Returns:
        The outcome, the same on every rank.

    Raises:
        ValueError: If a setting is refused, the data are of another format, or the loss is not
            finite.
        OSError: If data are missing, or files cannot be written.
        MissingLibraryError: If the recipe needs a library that is not installed.
        WorkerError: If a local process fails.
    """
    if settings.processes > 1:
        return _run_local(recipe, settings)
    with group(settings) as place:
        return Run(recipe, settings, place).advance()


def _run_local(recipe: ModuleType, settings: Common) -> Outcome:
    if settings.workers:
        raise ValueError("--workers with --processes is not supported: use torchrun")
    if device_of(settings).type == "cuda":
        raise ValueError("--processes is for CPUs: pass --device cpu, or use torchrun")
    start = launch(
        _work,
        settings.processes,
        timeout=LONGEST,
        threads=max(1, torch.get_num_threads() // settings.processes),
    )
    running = set(multiprocessing.active_children())

    def forward() -> None:
        for child in set(multiprocessing.active_children()) - running:
            child.terminate()  # SIGTERM, which the loop there answers

    with Interrupt(forward) as interrupt:
        try:
            return start(recipe.__name__, settings)[0]
        except WorkerError:
            if not interrupt.asked:
                raise
            return Outcome(0, finished=False, figures={})  # it came before the loop


def _work(worker: Worker, name: str, settings: Common) -> Outcome:
    """Train as a rank that `launch` started."""
    place = Place(worker.rank, worker.world_size, torch.device("cpu"))
    try:
        return Run(importlib.import_module(name), settings, place).advance()
    except (ValueError, OSError, MissingLibraryError) as error:
        raise RefusedError(str(error)) from error


def _seed(*parts: int) -> None:
    """Seed torch's default generators, here and on the GPU in use."""
    torch.default_generator.manual_seed(number(*parts))
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(number(*parts))


class _Seeded(Dataset[Any]):
    """A dataset whose items are found by epoch and index, which also seed their draws."""

    def __init__(self, inner: Any, seed: int) -> None:
        self._inner, self._seed = inner, seed

    def __getitem__(self, place: tuple[int, int]) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(number(self._seed, *place))
            return self._inner[place[1]]


class _Order(Sampler[list[tuple[int, int]]]):
    """This rank's micro-batches from one to another, epoch after epoch, each in a new order."""

    def __init__(
        self, sampler: DistributedSampler[Any], size: int, per_epoch: int, begin: int, end: int
    ) -> None:
        self._sampler, self._size, self._per_epoch = sampler, size, per_epoch
        self._begin, self._end = begin, end

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        order: list[int] = []
        for micro in range(self._begin, self._end):
            epoch, part = divmod(micro, self._per_epoch)
            if part == 0 or not order:
                self._sampler.set_epoch(epoch)
                order = list(self._sampler)
            yield [(epoch, i) for i in order[part * self._size : (part + 1) * self._size]]


def _ignore_interrupts(worker: int) -> None:
    """Let the process that reads the data answer interrupts."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class Run:
    """A run on one rank: built, and where `resume` finds a checkpoint, moved to its step.

    Args:
        recipe: The recipe.
        settings: Its settings.
        place: This process among the ranks.

    Raises:
        ValueError: See `run`.
    """

    def __init__(self, recipe: ModuleType, settings: Common, place: Place) -> None:
        self.recipe, self.settings, self.place = cast(Any, recipe), settings, place
        last = self._last_checkpoint()
        if settings.tf32:
            torch.set_float32_matmul_precision("high")
        _seed(settings.seed)
        self.model: nn.Module = self.recipe.model(settings).to(place.device)
        if settings.channels_last:
            self.model.to(memory_format=torch.channels_last)
        if settings.init is not None and last is None:
            self._begin_with(settings.init)
        self.train, self.test = self.recipe.data(settings)
        self._count_steps()
        self.forward = self.model
        if place.size > 1:
            on = [place.device.index] if place.device.type == "cuda" else None
            self.forward = DistributedDataParallel(self.model, device_ids=on)
        scaled = settings.amp == "fp16"
        self.scaler = torch.amp.GradScaler(place.device.type, enabled=scaled)
        make = getattr(recipe, "optimizer", common.optimizer)
        more: dict[str, Any] = {}
        if scaled and settings.optimizer == "soframe":
            more["grad_scaler"] = self.scaler
        built: common.Built = make(self.model, settings, **more)
        self.optimizer, self.preconditioner = built
        set_lr(self.optimizer, 1.0)  # notes the peak in each group
        self.step, self.seconds = 0, 0.0
        self.total = torch.zeros((), dtype=torch.float64, device=place.device)
        self.counted = 0
        if last is not None:
            self._load(checkpoint.read(last, process_group=place.control))
        self.rows: list[dict[str, Any]] = []
        self.writer: Any = None
        self.logger: ScalarLogger | None = None
        if place.rank == 0:
            self._begin_files()

    # -- the data ---------------------------------------------------------------------------------

    def _count_steps(self) -> None:
        """Work out batches, epochs and steps."""
        settings, size = self.settings, self.place.size
        self.micro, rest = divmod(settings.batch_size, size * settings.accumulate)
        if rest:
            raise ValueError(
                f"a batch of {settings.batch_size} cannot be split over {size} rank(s) with "
                f"{settings.accumulate} micro-batch(es) each"
            )
        count = self.train.samples if isinstance(self.train, Stream) else len(self.train)
        self.per_epoch = count // settings.batch_size
        if self.per_epoch == 0:
            raise ValueError(f"a batch of {settings.batch_size} exceeds the {count} samples")
        if not isinstance(self.test, Stream) and len(self.test) < size:
            raise ValueError(f"{size} ranks cannot share {len(self.test)} test samples")
        self.steps = settings.steps or settings.epochs * self.per_epoch
        self.evaluate_every = settings.evaluate_every or self.per_epoch
        self.save_every = settings.save_every or self.per_epoch

    def _loader(self, dataset: Any, **options: Any) -> DataLoader[Any]:
        return DataLoader(
            dataset,
            num_workers=self.settings.workers,
            pin_memory=self.place.device.type == "cuda",
            worker_init_fn=_ignore_interrupts,
            generator=torch.Generator(),  # its draws are not the model's
            **options,
        )

    def _batches(self) -> Iterator[list[Tensor]]:
        """Yield this rank's micro-batches from the present step on."""
        times, place, seed = self.settings.accumulate, self.place, self.settings.seed
        begin, end, per_epoch = (n * times for n in (self.step, self.steps, self.per_epoch))
        if isinstance(self.train, Stream):
            self.train.place(place.rank, place.size, self.micro, per_epoch, begin)
            yield from self._loader(self.train, batch_size=self.micro)
            return
        share: DistributedSampler[Any] = DistributedSampler(
            self.train, num_replicas=place.size, rank=place.rank, seed=seed, drop_last=True
        )
        order = _Order(share, self.micro, per_epoch, begin, end)
        yield from self._loader(_Seeded(self.train, seed), batch_sampler=order)

    def _test_batches(self) -> Iterator[list[Tensor]]:
        """Yield this rank's part of the test set."""
        place = self.place
        if isinstance(self.test, Stream):
            self.test.place(place.rank, place.size)
            yield from self._loader(self.test, batch_size=self.micro)
            return
        numbers = range(place.rank, len(self.test), place.size)
        placed = _Seeded(self.test, self.settings.seed)
        indices = Subset(cast(Any, placed), [(0, index) for index in numbers])  # type: ignore[misc]
        yield from self._loader(indices, batch_size=self.micro)

    # -- training ---------------------------------------------------------------------------------

    def advance(self) -> Outcome:
        """Train to the end or to an interrupt.

        Raises:
            DivergedError: If the loss is not finite.
        """
        if self.step >= self.steps:
            self._print(f"{self.settings.output}: all {self.steps} steps are taken")
            return Outcome(self.step, finished=True, figures=self._evaluate())
        figures: Mapping[str, float] = {}
        stopped = False
        batches = self._batches()
        with Interrupt(all_of_them=self.place.size > 1) as interrupt, self._bar() as show:
            while self.step < self.steps and not stopped:
                start = time.perf_counter()
                self._step(batches)
                self.seconds += time.perf_counter() - start
                stopped = agreed(interrupt.asked, self.place)
                last = self.step == self.steps
                if last or (not stopped and self.step % self.evaluate_every == 0):
                    figures = self._record()
                if last or stopped or self.step % self.save_every == 0:
                    self._save()
                show(figures)
        if stopped and self.step < self.steps:
            self._print(
                f"interrupted after step {self.step} of {self.steps}; the same command with "
                f"--resume goes on from {self.settings.output}"
            )
        return Outcome(self.step, finished=self.step == self.steps, figures=figures)

    def _step(self, batches: Iterator[list[Tensor]]) -> None:
        settings, times = self.settings, self.settings.accumulate
        set_lr(self.optimizer, settings.factor(self.step, self.steps, self.step / self.per_epoch))
        _seed(settings.seed, self.step, self.place.rank)
        self.optimizer.zero_grad()
        for micro in range(times):
            batch = self._moved(next(batches))
            self._declare_terms(batch)
            together = isinstance(self.forward, DistributedDataParallel) and micro + 1 < times
            with self.forward.no_sync() if together else contextlib.nullcontext():
                with self._autocast():
                    loss = self.recipe.loss(self.forward, *batch)
                self.scaler.scale(loss / times).backward()
            self.total += loss.detach()
            self.counted += 1
        if self.preconditioner is not None:
            self.scaler.unscale_(self.optimizer)
            self.preconditioner.step()
        elif settings.clip is not None and not isinstance(self.optimizer, soframe.Optimizer):
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        if self.logger is not None:
            self.logger.step()

    def _moved(self, batch: list[Tensor]) -> list[Tensor]:
        moved = [tensor.to(self.place.device, non_blocking=True) for tensor in batch]
        if self.settings.channels_last:
            images = torch.channels_last
            moved = [t.contiguous(memory_format=images) if t.dim() == 4 else t for t in moved]
        return moved

    def _autocast(self) -> torch.autocast:
        dtype = torch.float16 if self.settings.amp == "fp16" else torch.bfloat16
        on = self.settings.amp != "none"
        return torch.autocast(self.place.device.type, dtype=dtype, enabled=on)

    def _declare_terms(self, batch: list[Tensor]) -> None:
        preconditioner = self.preconditioner or getattr(self.optimizer, "preconditioner", None)
        if preconditioner is not None and hasattr(self.recipe, "terms"):
            preconditioner.count(self.recipe.terms(*batch))

    # -- evaluations ------------------------------------------------------------------------------

    def _evaluate(self) -> dict[str, float]:
        """Return means over the test set, and the recipe's summary of them."""
        if self.place.size > 1:
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)  # batch norms' means differ between ranks
        self.model.eval()
        sums: dict[str, Tensor] = {}
        count = 0
        with torch.no_grad(), self._autocast():
            for batch in map(self._moved, self._test_batches()):
                means = {"loss": self.recipe.loss(self.model, *batch)}
                if hasattr(self.recipe, "metrics"):
                    means |= self.recipe.metrics(self.model, *batch)
                for name, mean in means.items():
                    sums[name] = sums.get(name, 0.0) + mean.double() * len(batch[0])
                count += len(batch[0])
        self.model.train()
        *totals, samples = self._summed([*sums.values(), torch.tensor(float(count))])
        means_of_all = {name: total / samples for name, total in zip(sums, totals, strict=True)}
        if hasattr(self.recipe, "summary"):
            means_of_all |= self.recipe.summary(means_of_all)
        return means_of_all

    def _summed(self, numbers: list[Tensor]) -> list[float]:
        """Return sums over the ranks."""
        stacked = torch.stack([tensor.to(self.place.device).double() for tensor in numbers])
        if self.place.size > 1:
            dist.all_reduce(stacked)
        return list(stacked.tolist())

    def _record(self) -> dict[str, float]:
        """Evaluate, and write a line."""
        total, count = self._summed([self.total, torch.tensor(float(self.counted))])
        training = total / count
        self.total.zero_()
        self.counted = 0
        figures = self._evaluate()
        row = {
            "step": self.step,
            "epoch": self.step / self.per_epoch,
            "seconds": self.seconds,
            "lr": self.optimizer.param_groups[0]["lr"],
            "training_loss": training,
            **figures,
        }
        if self.place.rank == 0:
            self.rows.append(row)
            with (self.settings.output / "metrics.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(jsonable(row)) + "\n")
            if self.writer is not None:
                for name, value in row.items():
                    self.writer.add_scalar(name, value, self.step)
                self.writer.flush()
        if not math.isfinite(training):
            raise DivergedError(f"the loss is {training} at step {self.step}")
        return figures

    # -- files ------------------------------------------------------------------------------------

    def _last_checkpoint(self) -> Path | None:
        output = self.settings.output
        last = checkpoint.latest(output, process_group=self.place.control)
        if last is not None and not self.settings.resume:
            raise ValueError(
                f"{output} has checkpoints of another run: pass --resume to go on with it, or "
                f"another --output"
            )
        return last

    def _begin_with(self, folder: Path) -> None:
        """Load the weights of another run's last checkpoint."""
        last = checkpoint.latest(folder, process_group=self.place.control)
        if last is None:
            raise ValueError(f"--init: {folder} has no checkpoint")
        weights = checkpoint.read(last, process_group=self.place.control)["model"]
        try:
            self.model.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"--init: {folder} is of another model: {error}") from error

    def _fixed(self) -> dict[str, str]:
        """Return the settings that a continuation has to share, as text."""
        named = {field.name: getattr(self.settings, field.name) for field in fields(self.settings)}
        return {name: repr(value) for name, value in named.items() if name not in Common.FREE}

    def _save(self) -> None:
        preconditioner = self.preconditioner
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "settings": self._fixed(),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "preconditioner": None if preconditioner is None else preconditioner.state_dict(),
            "scaler": self.scaler.state_dict(),
            "losses": self._summed([self.total, torch.tensor(float(self.counted))]),
        }
        checkpoint.save(self.settings.output, state, process_group=self.place.control)

    def _load(self, state: Mapping[str, Any]) -> None:
        now, before = self._fixed(), state["settings"]
        changed = [name for name in now if now[name] != before.get(name)]
        if changed:
            was = ", ".join(f"{name}={before.get(name)}" for name in changed)
            raise ValueError(f"{self.settings.output} was begun with {was}: pass the same")
        self.step, self.seconds = state["step"], state["seconds"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.preconditioner is not None:
            self.preconditioner.load_state_dict(state["preconditioner"])
        self.scaler.load_state_dict(state["scaler"])
        if self.place.rank == 0:
            total, counted = state["losses"]
            self.total += total
            self.counted = int(counted)

    def _begin_files(self) -> None:
        """Write run.json, and cut off the lines after the checkpoint."""
        settings, output = self.settings, self.settings.output
        write_json(
            output / "run.json", description(self.recipe.__name__, settings, self.place, self.model)
        )
        path = output / "metrics.jsonl"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        # A run that was killed may have left a part of a line.
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        rows = [json.loads(line) for line in lines]
        self.rows = [row for row in rows if row["step"] <= self.step]
        path.write_text("".join(json.dumps(row) + "\n" for row in self.rows), encoding="utf-8")
        if self.settings.tensorboard and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(output / "tensorboard"), purge_step=self.step + 1)
            preconditioner = self.preconditioner or getattr(self.optimizer, "preconditioner", None)
            if preconditioner is not None:
                # A prime: solves then have every age in the logged steps.
                self.logger = ScalarLogger(preconditioner, self.writer, every=47)

    # -- the screen -------------------------------------------------------------------------------

    def _print(self, text: str) -> None:
        if self.place.rank == 0:
            print(text, flush=True)

    @contextlib.contextmanager
    def _bar(self) -> Iterator[Callable[[Mapping[str, float]], None]]:
        """Show progress on rank 0: a bar on a terminal, else a line for each evaluation."""
        if self.place.rank > 0:
            yield lambda figures: None
            return
        screen = display.console()
        quiet = not screen.is_terminal
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        loss = TextColumn("{task.fields[status]}")
        with Progress(*columns, loss, console=screen, disable=quiet) as shown:
            task = shown.add_task("", total=self.steps, completed=self.step, status="")
            printed = self.rows[-1]["step"] if self.rows else 0

            def show(figures: Mapping[str, float]) -> None:
                nonlocal printed
                text = "  ".join(f"{name} {value:.4g}" for name, value in figures.items())
                status = text.partition("  ")[0]  # a terminal may be narrow
                shown.update(task, completed=self.step, status=status)
                if self.rows and self.rows[-1]["step"] > printed:
                    printed = self.rows[-1]["step"]
                    if quiet:
                        print(f"step {printed}  {text}", flush=True)

            yield show


def description(name: str, settings: Common, place: Place, model: nn.Module) -> dict[str, Any]:
    """Return the settings of a run, the versions, the commit and the hardware, for JSON.

    Args:
        name: The recipe's module.
        settings: The settings.
        place: The rank.
        model: The model.
    """
    return {
        "recipe": name,
        "settings": {key: _plain(value) for key, value in asdict(settings).items()},
        "rate": settings.rate,
        "parameters": sum(p.numel() for p in model.parameters()),
        "ranks": place.size,
        "device": "cpu" if place.device.type == "cpu" else torch.cuda.get_device_name(place.device),
        **environment(torch.get_num_threads()),
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
