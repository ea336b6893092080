"""A recipe with all that a resumed run has to bring back: batch norm, dropout, random crops."""

import sys
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

from experiments.launch import Place
from experiments.recipes import loop, pinn
from experiments.recipes.common import Common


@dataclass(frozen=True)
class Settings(Common):
    rates = {"soframe": 0.05, "sgd": 0.05, "adamw": 1e-3}  # noqa: RUF012
    epochs: int = 2
    batch_size: int = 8
    accumulate: int = 2
    statistics_every: int | None = 2
    solve_every: int | None = 4
    warmup: float = 0.2
    save_every: int | None = 3
    evaluate_every: int | None = 4
    tensorboard: bool = False
    together: bool = False  # float64, and nothing that depends on a rank's part of the batch


class Shifted(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(5)
        self.images = torch.randn(count, 1, 6, 6, generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        shift = int(torch.randint(3, ()))
        return self.images[index].roll(shift, -1), torch.tensor(index % 3)


def model(settings):
    parts = [nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)]
    if not settings.together:
        parts.insert(0, nn.BatchNorm2d(4))
        parts.insert(-1, nn.Dropout(0.2))
    made = nn.Sequential(nn.Conv2d(1, 4, 3), *parts)
    return made.double() if settings.together else made


def data(settings):
    return Shifted(44), Shifted(7)


def loss(model, images, classes):
    dtype = next(model.parameters()).dtype
    return F.cross_entropy(model(images.to(dtype)), classes)


def begin_then_resume(rank, ranks, folder, stop, changes):
    """Train once from start to end, and once with a stop on the way."""
    settings = Settings(output=folder / "whole", **changes)
    loop.run(sys.modules[__name__], settings)
    place = Place(rank, ranks, torch.device("cpu"))
    run = loop.RecipeRun(sys.modules[__name__], replace(settings, output=folder / "parts"), place)
    run.take(stop)
    run.save()
    resumed = replace(settings, output=folder / "parts", resume=True)
    return loop.run(sys.modules[__name__], resumed).step


def train_until(rank, ranks, settings, stop):
    """Train, or go on, to a step; return the weights there."""
    place = Place(rank, ranks, torch.device("cpu"))
    run = loop.RecipeRun(sys.modules[__name__], settings, place)
    run.take(stop - run.step)
    run.save()
    return nn.utils.parameters_to_vector(run.model.parameters()).detach()


def train_pinn(rank, ranks, settings):
    return loop.run(pinn, settings)
