"""What a curvature keeps of what was learned: tasks in turn, and merged models.

    python -m benchmarks.continual             # settings and three seeds
    python -m benchmarks.continual --short     # a hundred images, to see that it runs

*In turn*: a perceptron learns five permutations of the pixels of MNIST's digits, one after another:
alone, or with the penalty of each task before (`soframe.continual`).

*Merged*: a perceptron of upright digits is fine-tuned to digits that are turned to the left, and
apart from that to digits that are turned to the right. Both are merged into one by the plain mean
of their weights, or by their curvatures (`soframe.merging`).

The penalties' strength, and the damping of a merge in mean eigenvalues, are those of the best mean
accuracy on validation images with the first seed, of one grid for all contenders. Tables have test
images. Runs are kept in ``--runs``: an interrupted benchmark goes on where it was. Name another
file after a change of the code.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from experiments import canvases, display
from experiments.display import console, print_json, run_command
from experiments.records import read_json, write_json

WIDTH, BATCH, LR = 100, 200, 2e-3
TRAINING = 3200  # images; 800 more choose settings, and 1,000 test
ANGLE = 30.0  # degrees to each side
SEEDS = (0, 1, 2)
METHODS = {"diagonal": "diagonal", "K-FAC": "kfac", "EKFAC": "ekfac"}

Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Size:
    """The size of a benchmark, and the grids of its settings.

    Attributes:
        images: Training images of a task.
        tasks: Permutations.
        epochs: Passes over the images of a task.
        strengths: Multiples of the penalties.
        dampings: Of a merge, in mean eigenvalues.
    """

    images: int = TRAINING
    tasks: int = 5
    epochs: int = 5
    strengths: tuple[float, ...] = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
    dampings: tuple[float, ...] = (1e-3, 0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0)


SHORT = Size(images=100, tasks=2, epochs=1, strengths=(1.0,), dampings=(1.0,))


@dataclass(frozen=True)
class Task:
    """Images and classes to train on, to choose settings on, and to test on."""

    train: Data
    choice: Data
    test: Data


@dataclass(frozen=True)
class Accuracies:
    """The part of images that a model classifies rightly, by task."""

    choice: list[float]
    test: list[float]


def task(change: Callable[[Tensor], Tensor], size: Size) -> Task:
    """Return MNIST's digits with changed pixels ``[images, 784]``."""
    pixels, classes = canvases.split(held_out=False)
    test_pixels, test_classes = canvases.split(held_out=True)
    pixels = change(pixels)
    return Task(
        (pixels[: size.images], classes[: size.images]),
        (pixels[TRAINING:], classes[TRAINING:]),
        (change(test_pixels), test_classes),
    )


def rotated(pixels: Tensor, degrees: float) -> Tensor:
    """Turn images ``[images, 784]`` to the left, by bilinear interpolation."""
    cosine, sine = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    matrix = torch.tensor([[cosine, -sine, 0.0], [sine, cosine, 0.0]])
    images = pixels.view(-1, 1, 28, 28)
    grid = F.affine_grid(
        matrix.expand(len(images), -1, -1), list(images.shape), align_corners=False
    )
    return F.grid_sample(images, grid, align_corners=False).flatten(1)


def permutations(seed: int, size: Size) -> list[Task]:
    """Return tasks of permuted pixels."""
    generator = torch.Generator().manual_seed(seed)
    tasks = []
    for _ in range(size.tasks):
        order = torch.randperm(784, generator=generator)
        tasks.append(task(partial(torch.index_select, dim=1, index=order), size))
    return tasks


def perceptron(seed: int) -> nn.Module:
    """Return a perceptron with two hidden layers, and seed the order of its batches."""
    torch.manual_seed(seed)
    hidden = [nn.Linear(784, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*hidden, nn.Linear(WIDTH, 10))


def loss(model: nn.Module, batch: Data) -> tuple[Tensor, Tensor]:
    """Return the outputs of a batch, and their cross-entropy."""
    outputs = model(batch[0])
    return outputs, F.cross_entropy(outputs, batch[1])


def train(
    model: nn.Module,
    data: Data,
    epochs: int,
    penalties: Sequence[Callable[[], Tensor]] = (),
    strength: float = 0.0,
) -> None:
    """Train a model by Adam on its loss and penalties."""
    adam = torch.optim.Adam(model.parameters(), LR)
    for _ in range(epochs):
        for rows in torch.randperm(len(data[1])).split(BATCH):
            adam.zero_grad()
            _, value = loss(model, (data[0][rows], data[1][rows]))
            for penalty in penalties:
                value = value + strength * penalty()
            value.backward()
            adam.step()


def together(tasks: Sequence[Task]) -> Data:
    """Return the training images and classes of all tasks."""
    images, classes = zip(*(task.train for task in tasks), strict=True)
    return torch.cat(images), torch.cat(classes)


def fitted(model: nn.Module, method: str, data: Data) -> soframe.Curvature:
    """Return the curvature of a model's loss: the Gauss-Newton matrix as a method has it."""
    exact = soframe.Statistics(fisher="type-2", loss="cross-entropy")
    batches = list(zip(data[0].split(BATCH), data[1].split(BATCH), strict=True))
    return soframe.Curvature(model, method, statistics=exact).fit(batches, loss)


@torch.no_grad()
def accuracy(model: nn.Module, data: Data) -> float:
    """Return the part of images that a model classifies rightly."""
    return float((model(data[0]).argmax(1) == data[1]).double().mean())


def accuracies(models: Sequence[nn.Module], tasks: Sequence[Task]) -> Accuracies:
    """Return the accuracies of a model for each task."""
    pairs = list(zip(models, tasks, strict=True))
    choice = [accuracy(model, task.choice) for model, task in pairs]
    return Accuracies(choice, [accuracy(model, task.test) for model, task in pairs])


def in_turn(contender: str, strength: float, seed: int, size: Size) -> Accuracies:
    """Return the accuracies after the last task."""
    tasks, model = permutations(seed, size), perceptron(seed)
    if contender == "all tasks at once":
        train(model, together(tasks), size.epochs)
        return accuracies([model] * len(tasks), tasks)
    penalties: list[Callable[[], Tensor]] = []
    for number, current in enumerate(tasks):
        train(model, current.train, size.epochs, penalties, strength)
        if contender in METHODS and number < len(tasks) - 1:
            curvature = fitted(model, METHODS[contender], current.train)
            anchor = copy.deepcopy(model.state_dict())
            penalties.append(partial(soframe.continual.penalty, curvature, anchor))
    return accuracies([model] * len(tasks), tasks)


@cache
def fine_tuned(seed: int, size: Size) -> tuple[nn.Module, list[Task], list[nn.Module]]:
    """Return a model of upright digits, tasks of turned ones, and the model of each task."""
    start = perceptron(seed)
    train(start, task(torch.clone, size).train, size.epochs)
    tasks, models = [], []
    for degrees in (ANGLE, -ANGLE):
        turned = task(partial(rotated, degrees=degrees), size)
        model = copy.deepcopy(start)
        train(model, turned.train, size.epochs)
        tasks.append(turned)
        models.append(model)
    return start, tasks, models


@cache
def curvatures(method: str, seed: int, size: Size) -> list[soframe.Curvature]:
    """Return the curvature of each model on its task."""
    _, tasks, models = fine_tuned(seed, size)
    pairs = zip(models, tasks, strict=True)
    return [fitted(model, method, task.train) for model, task in pairs]


def merged(contender: str, damping: float, seed: int, size: Size) -> Accuracies:
    """Return the accuracies of one model for both tasks, or of each model for its task."""
    start, tasks, models = fine_tuned(seed, size)
    if contender == "a model for each task":
        return accuracies(models, tasks)
    model = copy.deepcopy(start)
    if contender == "both tasks at once":
        torch.manual_seed(seed)
        train(model, together(tasks), size.epochs)
    elif contender == "plain mean":
        pairs = zip(model.parameters(), *(other.parameters() for other in models), strict=True)
        for parameter, first, second in pairs:
            parameter.data = (first.detach() + second.detach()) / 2
    elif contender in METHODS:
        fits = curvatures(METHODS[contender], seed, size)
        eigenvalues = torch.stack([curvature.eigenvalues() for curvature in fits])
        weights = soframe.merging.merge(fits, damping=damping * float(eigenvalues.mean()))
        model.load_state_dict(weights, strict=False)
    return accuracies([model] * len(tasks), tasks)


@dataclass(frozen=True)
class Experiment:
    """An experiment.

    Attributes:
        run: From contender, setting, seed and size to accuracies.
        untuned: The contenders without a setting.
        setting: The name of the others' setting.
        grid: Its values.
    """

    run: Callable[[str, float, int, Size], Accuracies]
    untuned: Sequence[str]
    setting: str
    grid: Callable[[Size], Sequence[float]]


EXPERIMENTS = {
    "in turn": Experiment(
        in_turn,
        ("all tasks at once", "no penalty"),
        "strength",
        lambda size: size.strengths,
    ),
    "merged": Experiment(
        merged,
        ("a model for each task", "both tasks at once", "the start", "plain mean"),
        "damping",
        lambda size: size.dampings,
    ),
}


def scores(name: str, size: Size, file: Path) -> dict[str, Any]:
    """Return what each contender of an experiment tried, chose and reached."""
    experiment = EXPERIMENTS[name]
    known = read_json(file)
    amount = f"{size.images}, {size.tasks}, {size.epochs}"

    def run(contender: str, setting: float, seed: int) -> dict[str, list[float]]:
        key = f"{name}, {contender}, {setting:g}, {seed}, {amount}"
        if key not in known:
            known[key] = asdict(experiment.run(contender, setting, seed, size))
            write_json(file, known)
        found: dict[str, list[float]] = known[key]
        return found

    results: dict[str, Any] = {}
    for contender in (*experiment.untuned, *METHODS):
        grid = experiment.grid(size) if contender in METHODS else (0.0,)
        tried = {}
        for setting in grid:
            tried[setting] = statistics.mean(run(contender, setting, SEEDS[0])["choice"])
        chosen = max(grid, key=lambda setting: tried[setting])
        seeds = [run(contender, chosen, seed)["test"] for seed in SEEDS]
        results[contender] = {"tried": tried, experiment.setting: chosen, "accuracies": seeds}
    return results


def table(name: str, results: dict[str, Any]) -> Table:
    """Return an experiment as a table of test accuracies."""
    setting = EXPERIMENTS[name].setting
    rows = []
    for contender, found in results.items():
        means = [statistics.mean(seed) for seed in found["accuracies"]]
        shown = f"{found[setting]:g}" if contender in METHODS else "-"
        cells = [contender, shown, f"{statistics.mean(means):.1%}"]
        cells.append(", ".join(f"{mean:.1%}" for mean in means))
        by_task = zip(*found["accuracies"], strict=True)
        cells.append(", ".join(f"{statistics.mean(seeds):.1%}" for seeds in by_task))
        rows.append(cells)
    columns = ["contender", setting, "accuracy", "of each seed", "of each task"]
    return display.table(f"Tasks {name}: accuracy on test images", columns, rows)


def main(
    short: Annotated[bool, typer.Option("--short", help="A hundred images of a task.")] = False,
    kept: Annotated[Path, typer.Option("--runs", help="Where runs are kept.")] = Path(
        "runs/continual.json"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Figures alone.")] = False,
) -> None:
    """Learn tasks in turn, merge models, and print tables."""
    torch.set_num_threads(1)
    size = SHORT if short else Size()
    results = {name: scores(name, size, kept) for name in EXPERIMENTS}
    if as_json:
        print_json(results)
        return
    screen = console(width=140)
    for name, found in results.items():
        screen.print(table(name, found))


if __name__ == "__main__":
    run_command(main)
