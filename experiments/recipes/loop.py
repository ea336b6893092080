"""Runs of recipes, by the loop of `experiments.loop`, with files and checkpoints.

A run has one process, several local ones, or the ranks of torchrun, and is determined by its
settings. An interrupt (SIGINT, as of Ctrl-C, or SIGTERM) lets the step end; the ranks agree on it,
save, and leave together.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import multiprocessing
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

from experiments import display, loop
from experiments.batches import Batches
from experiments.environment import environment
from experiments.launch import Place, RefusedError, Worker, WorkerError, launch
from experiments.libraries import MissingLibraryError
from experiments.recipes import common
from experiments.recipes.common import Common
from experiments.recipes.ranks import Interrupt, agreed, device_of, group
from experiments.records import jsonable, write_json
from soframe import checkpoint
from soframe.diagnostics import ScalarLogger

LONGEST = 30 * 86400.0  # seconds of a launched run


def _print(text: str) -> None:
    print(text, flush=True)


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
        return RecipeRun(recipe, settings, place).advance()


def _run_local(recipe: ModuleType, settings: Common) -> Outcome:
    if settings.workers:
        raise ValueError("--workers with --processes is not supported: use torchrun")
    if device_of(settings).type == "cuda":
        raise ValueError("--processes is for CPUs: pass --device cpu, or use torchrun")
    start = launch(
        _work,
        settings.processes,
        on_message=_print,
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
        # The parent prints: its output may go elsewhere.
        return RecipeRun(importlib.import_module(name), settings, place, worker.send).advance()
    except (ValueError, OSError, MissingLibraryError) as error:
        raise RefusedError(str(error)) from error


class RecipeRun(loop.Run):
    """A run on one rank: built, and where `resume` finds a checkpoint, moved to its step.

    Args:
        recipe: The recipe.
        settings: Its settings.
        place: This process among the ranks.
        say: Prints a line of the progress.

    Raises:
        ValueError: See `run`.
    """

    def __init__(
        self,
        recipe: ModuleType,
        settings: Common,
        place: Place,
        say: Callable[[str], None] = _print,
    ) -> None:
        self.recipe, self.settings, self.place = cast(Any, recipe), settings, place
        self._say = say
        last = self._last_checkpoint()
        if settings.tf32:
            torch.set_float32_matmul_precision("high")
        loop.seed_draws(settings.seed)
        model = self.recipe.model(settings).to(place.device)
        if settings.channels_last:
            model.to(memory_format=torch.channels_last)
        if settings.init is not None and last is None:
            self._load_weights(model, settings.init)
        super().__init__(self._job(model))
        if last is not None:
            self._resume(checkpoint.read(last, process_group=place.control))
        self.writer: Any = None
        self.logger: ScalarLogger | None = None
        if place.rank == 0:
            self._begin_files()

    def _job(self, model: nn.Module) -> loop.Job:
        settings, place = self.settings, self.place
        train, self.test = self.recipe.data(settings)
        batches = Batches(
            train,
            self.test,
            place,
            settings.batch_size,
            settings.accumulate,
            settings.steps,
            settings.epochs,
            settings.seed,
            settings.workers,
        )
        assert batches.steps is not None
        self.steps, self.per_epoch = batches.steps, batches.per_epoch
        self.evaluate_every = settings.evaluate_every or self.per_epoch
        self.save_every = settings.save_every or self.per_epoch
        is_scaled = settings.amp == "fp16"
        scaler = torch.amp.GradScaler(place.device.type, enabled=is_scaled)
        more: dict[str, Any] = {}
        if is_scaled and settings.optimizer == "soframe":
            more["grad_scaler"] = scaler
        build = getattr(self.recipe, "optimizer", common.optimizer)
        optimizer, preconditioner = build(model, settings, **more)
        return loop.Job(
            model=model,
            loss=self.recipe.loss,
            optimizer=optimizer,
            preconditioner=preconditioner,
            batches=batches,
            rate=lambda step, _: settings.factor(step, self.steps, step / self.per_epoch),
            scaler=scaler,
            amp=settings.amp,
            channels_last=settings.channels_last,
            clip=settings.clip,
            terms=getattr(self.recipe, "terms", None),
        )

    def advance(self) -> Outcome:
        """Train to the end or to an interrupt.

        Raises:
            DivergedError: If the loss is not finite.
        """
        if self.step >= self.steps:
            self._tell(f"{self.settings.output}: all {self.steps} steps are taken")
            return Outcome(self.step, finished=True, figures=self.evaluate())
        figures: Mapping[str, float] = {}
        stopped = False
        label = self.recipe.__name__.rpartition(".")[2]
        bars = display.bars(display.console(), [label], hidden=self.place.rank > 0)
        with Interrupt(all_of_them=self.place.size > 1) as interrupt, bars as watch:
            while self.step < self.steps and not stopped:
                self.take(1)
                if self.logger is not None:
                    self.logger.step()
                stopped = agreed(interrupt.asked, self.place)
                last = self.step == self.steps
                if last or (not stopped and self.step % self.evaluate_every == 0):
                    figures = self._record()
                if last or stopped or self.step % self.save_every == 0:
                    self.save()
                state = display.State(f"step {self.step}  {_text(figures)}", self.step / self.steps)
                watch(label, state)
        if stopped and self.step < self.steps:
            self._tell(
                f"interrupted after step {self.step} of {self.steps}; the same command with "
                f"--resume goes on from {self.settings.output}"
            )
        return Outcome(self.step, finished=self.step == self.steps, figures=figures)

    # -- evaluations ------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Return means over the test set, and the recipe's summary of them."""

        def measure(model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
            means = {"loss": self.recipe.loss(model, *batch)}
            if hasattr(self.recipe, "metrics"):
                means |= self.recipe.metrics(model, *batch)
            return means

        figures = self.means(measure, self.test, self.job.batches.micro)
        if hasattr(self.recipe, "summary"):
            figures |= self.recipe.summary(figures)
        return figures

    def _record(self) -> dict[str, float]:
        """Evaluate, and write a line."""
        training = self.training_loss()
        figures = self.evaluate()
        row = {
            "step": self.step,
            "epoch": self.step / self.per_epoch,
            "seconds": self.seconds,
            "lr": self.optimizer.param_groups[0]["lr"],
            "training_loss": training,
            **figures,
        }
        if self.place.rank == 0:
            if not display.console().is_terminal:
                self._tell(f"step {self.step}  {_text(figures)}")
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

    def _load_weights(self, model: nn.Module, folder: Path) -> None:
        """Load the weights of another run's last checkpoint."""
        last = checkpoint.latest(folder, process_group=self.place.control)
        if last is None:
            raise ValueError(f"--init: {folder} has no checkpoint")
        weights = checkpoint.read(last, process_group=self.place.control)["model"]
        try:
            model.load_state_dict(weights)
        except RuntimeError as error:
            raise ValueError(f"--init: {folder} is of another model: {error}") from error

    def _fixed(self) -> dict[str, str]:
        """Return the settings that a continuation has to share, as text."""
        named = {field.name: getattr(self.settings, field.name) for field in fields(self.settings)}
        return {name: repr(value) for name, value in named.items() if name not in Common.FREE}

    def save(self) -> None:
        """Write a checkpoint; a call for every rank."""
        state = {**self.state(), "settings": self._fixed()}
        checkpoint.save(self.settings.output, state, process_group=self.place.control)

    def _resume(self, state: Mapping[str, Any]) -> None:
        now, before = self._fixed(), state["settings"]
        changed = [name for name in now if now[name] != before.get(name)]
        if changed:
            was = ", ".join(f"{name}={before.get(name)}" for name in changed)
            raise ValueError(f"{self.settings.output} was begun with {was}: pass the same")
        self.load(state)

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
        lines = [line for line in lines if json.loads(line)["step"] <= self.step]
        path.write_text("".join(lines), encoding="utf-8")
        if self.settings.tensorboard and importlib.util.find_spec("tensorboard") is not None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(str(output / "tensorboard"), purge_step=self.step + 1)
            if self.preconditioner is not None:
                # A prime: solves then have every age in the logged steps.
                self.logger = ScalarLogger(self.preconditioner, self.writer, every=47)

    def _tell(self, text: str) -> None:
        if self.place.rank == 0:
            self._say(text)


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


def _text(figures: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4g}" for name, value in figures.items())


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value
