"""Steps to a loss of the exact Gauss-Newton matrix, and of the methods that approximate it.

    python -m benchmarks.oracle               # seeds 0, 1, 2; first tries what is not stored
    python -m benchmarks.oracle --tune        # tries all settings anew
    python -m benchmarks.oracle --short       # three steps, to see that it runs

Two small problems: an autoencoder of 256 digits, all of them in each step, and convolutions on
digits in batches of 128. Each contender has constant settings, tuned alike over six combinations
for the fewest steps to the target, on a seed of its own. *Steps* is the first step
after which the loss of all training examples is at most the target; *seconds* are of the processor,
of one thread, and depend on the size of the model more than on anything else.

The oracles take the exact matrix of the batch of the step; K-FAC and EKFAC the same loss's, as a
running average of batches, at every step. All four are SGD with momentum behind that matrix.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import soframe
from experiments import problems
from experiments.display import aligned
from experiments.tasks import Task
from soframe.testing import Oracle

TUNED = Path(__file__).parent.parent / "experiments" / "tuned" / "settings" / "oracle.json"
TUNING_SEED, SEEDS, MOST = 1000, (0, 1, 2), 200

Settings = Mapping[str, float]
Step = Callable[[Callable[[], Tensor]], None]
"""A step from a closure, which runs the model and returns the loss."""


@dataclass(frozen=True)
class Problem:
    """A problem with its target.

    Attributes:
        make: From a seed to the task.
        target: The loss of all training examples to reach.
        batch: The examples of a step; None for all.
        fisher: The Fisher of K-FAC and EKFAC, and its loss.
    """

    make: Callable[[int], Task]
    target: float
    batch: int | None
    fisher: soframe.Statistics


def autoencoder(seed: int) -> Task:
    """Return the autoencoder of digits with 256 examples."""
    task = problems.autoencoder(seed)
    assert isinstance(task.train, tuple)
    return replace(task, train=tuple(tensor[:256] for tensor in task.train))


PROBLEMS = {
    "autoencoder": Problem(
        autoencoder,
        1.0,
        None,
        soframe.Statistics(fisher="monte-carlo", loss="squared-error"),
    ),
    "convolutions": Problem(
        problems.cnn, 0.1, 128, soframe.Statistics(fisher="type-2", loss="cross-entropy")
    ),
}


def oracle(blocks: Any) -> Callable[[Task, Problem, Settings], Step]:
    """Return a contender with the exact matrix."""

    def build(task: Task, problem: Problem, settings: Settings) -> Step:
        optimizer = Oracle(
            task.model,
            settings["lr"],
            damping=settings["damping"],
            blocks=blocks,
            momentum=settings["momentum"],
            tolerance=1e-2,
            iterations=50,
        )

        def step(closure: Callable[[], Tensor]) -> None:
            optimizer.step(closure)

        return step

    return build


def approximation(method: str) -> Callable[[Task, Problem, Settings], Step]:
    """Return a contender with the matrix of a method behind the same SGD."""

    def build(task: Task, problem: Problem, settings: Settings) -> Step:
        sgd = torch.optim.SGD(
            task.model.parameters(), settings["lr"], momentum=settings["momentum"]
        )
        preconditioner = soframe.Preconditioner(
            task.model,
            method,
            "eigen",
            optimizer=sgd,
            damping=settings["damping"],
            kl_clip=None,
            statistics_every=1,
            solve_every=5 if method == "ekfac" else 1,  # its scale is of the bases before
            statistics=problem.fisher,
        )
        outputs: list[Tensor] = []
        task.model.register_forward_hook(lambda module, inputs, output: outputs.append(output))

        def step(closure: Callable[[], Tensor]) -> None:
            outputs.clear()
            loss = closure()
            preconditioner.observe(outputs[0])
            loss.backward()
            preconditioner.step()
            sgd.step()

        return step

    return build


def gradient_method(
    make: Callable[[nn.Module, Settings], torch.optim.Optimizer],
) -> Callable[[Task, Problem, Settings], Step]:
    """Return a contender that an optimizer of gradients makes."""

    def build(task: Task, problem: Problem, settings: Settings) -> Step:
        optimizer = make(task.model, settings)

        def step(closure: Callable[[], Tensor]) -> None:
            closure().backward()
            optimizer.step()

        return step

    return build


def _soap(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    betas = (settings["beta1"], 0.95)
    method = soframe.available("method")["soap"](betas=betas)
    return soframe.Optimizer(
        model, method, lr=settings["lr"], statistics_every=1, solve_every=1, weight_decay=0.0
    )


def _muon(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    auxiliary = settings["auxiliary_lr"]
    return soframe.Optimizer(
        model, "muon", lr=settings["lr"], auxiliary_lr=auxiliary, weight_decay=0.0
    )


def _adamw(model: nn.Module, settings: Settings) -> torch.optim.Optimizer:
    betas = (settings["beta1"], 0.999)
    return torch.optim.AdamW(model.parameters(), settings["lr"], betas, weight_decay=0.0)


@dataclass(frozen=True)
class Contender:
    """A method, and the settings to try."""

    build: Callable[[Task, Problem, Settings], Step]
    grid: Mapping[str, Sequence[float]]

    def trials(self) -> list[dict[str, float]]:
        """Return all combinations of settings."""
        values = itertools.product(*self.grid.values())
        return [dict(zip(self.grid, pair, strict=True)) for pair in values]


_NEWTON = {"lr": (0.1, 0.3, 1.0), "damping": (0.03, 0.3), "momentum": (0.0,)}
_ADAM = {"lr": (0.02, 0.04, 0.08), "beta1": (0.9, 0.8)}
_MUON = {"lr": (0.04, 0.08, 0.16), "auxiliary_lr": (0.01, 0.02)}
CONTENDERS = {
    "Gauss-Newton, all": Contender(oracle("all"), _NEWTON),
    "Gauss-Newton, layerwise": Contender(oracle("layers"), _NEWTON),
    "EKFAC": Contender(approximation("ekfac"), _NEWTON),
    "K-FAC": Contender(approximation("kfac"), _NEWTON),
    "SOAP": Contender(gradient_method(_soap), _ADAM),
    "Muon": Contender(gradient_method(_muon), _MUON),
    "AdamW": Contender(gradient_method(_adamw), _ADAM),
}


@dataclass(frozen=True)
class Outcome:
    """A run: the steps to the target, infinite if it was not reached, and its seconds.

    Attributes:
        steps: The steps.
        loss: The last loss.
        seconds: Of the processor, of a step.
    """

    steps: float
    loss: float
    seconds: float


def run(
    problem: Problem, contender: Contender, settings: Settings, seed: int, most: int
) -> Outcome:
    """Train until the target is reached, at most so many steps."""
    task = problem.make(seed)
    generator = torch.Generator().manual_seed(seed)
    assert isinstance(task.train, tuple)
    examples = len(task.train[0])
    take = contender.build(task, problem, settings)
    order: list[Tensor] = []
    loss, seconds = math.inf, 0.0
    for number in range(1, most + 1):
        if not order:
            rows = torch.randperm(examples, generator=generator)
            size = problem.batch or examples
            order = [part for part in rows.split(size) if len(part) == size]
        chosen = order.pop()
        batch = task.train if problem.batch is None else tuple(t[chosen] for t in task.train)
        start = time.process_time()
        task.model.zero_grad()
        take(lambda batch=batch: task.loss(task.model, *batch))  # type: ignore[misc]
        seconds += time.process_time() - start
        with torch.no_grad():
            loss = float(task.loss(task.model, *task.train))
        if loss <= problem.target:
            return Outcome(number, loss, seconds / number)
        if not math.isfinite(loss):
            break
    return Outcome(math.inf, loss, seconds / number)


def tuned(name: str, problem: Problem, contender: Contender, most: int) -> dict[str, float]:
    """Return the settings with the fewest steps; of several that miss the target the best loss."""
    best: tuple[float, float] = (math.inf, math.inf)
    chosen: dict[str, float] = {}
    for settings in contender.trials():
        # A trial that is behind the best one has lost.
        limit = most if math.isinf(best[0]) else int(best[0])
        outcome = run(problem, contender, settings, TUNING_SEED, limit)
        rank = (outcome.steps, outcome.loss if math.isfinite(outcome.loss) else math.inf)
        if not chosen or rank < best:
            best, chosen = rank, settings
    print(f"{name}: {chosen}, {best[0]} steps, loss {best[1]:.4f}", file=sys.stderr, flush=True)
    return chosen


def table(title: str, problem: Problem, settings: Mapping[str, Settings], most: int) -> str:
    """Return the steps and seconds of all contenders on a problem."""
    lines = [["", "steps: median", "of each seed", "ms a step", "settings"]]
    for name, contender in CONTENDERS.items():
        outcomes = [run(problem, contender, settings[name], seed, most) for seed in SEEDS]
        steps = [outcome.steps for outcome in outcomes]
        milliseconds = 1e3 * statistics.median(outcome.seconds for outcome in outcomes)
        each = ", ".join(_shown(number, most) for number in steps)
        chosen = ", ".join(f"{key} {value:g}" for key, value in settings[name].items())
        middle = _shown(statistics.median(steps), most)
        lines.append([name, middle, each, f"{milliseconds:.1f}", chosen])
    return aligned(f"{title}: steps to a training loss of {problem.target:g}", lines)


def _shown(steps: float, most: int) -> str:
    return f"over {most}" if math.isinf(steps) else f"{steps:.0f}"


def main() -> int:
    """Print a table for each problem."""
    parser = argparse.ArgumentParser(description="Steps of exact and approximate Gauss-Newton.")
    parser.add_argument("--problem", choices=PROBLEMS, action="append", help="default: both")
    parser.add_argument("--tune", action="store_true", help="try all settings anew")
    parser.add_argument("--short", action="store_true", help="three steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    most = 3 if options.short else MOST
    stored = json.loads(TUNED.read_text(encoding="utf-8")) if TUNED.exists() else {}
    for title in options.problem or PROBLEMS:
        problem, settings = PROBLEMS[title], stored.setdefault(title, {})
        for name, contender in CONTENDERS.items():
            if options.tune or name not in settings:
                settings[name] = tuned(f"{title}, {name}", problem, contender, most)
                if not options.short:
                    TUNED.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
        print(table(title, problem, settings, most), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
