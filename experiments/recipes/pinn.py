"""A physics-informed network: the Poisson equation on the unit square, with a known solution.

The network solves ``-Δu = f`` with u = 0 on the boundary, where f is such that the solution is
``sin(kπx) sin(kπy)``. Its output is multiplied by ``x(1-x)y(1-y)``, which satisfies the boundary
condition (Lagaris et al., 1998), so that the mean squared residual is the only loss. The figure is
the relative L2 error, on a grid between the training points.

Run to its end on a CPU; docs/guides/recipes.md has the figures. SOAP reads averaged gradients
alone: the residual contains second derivatives, which K-FAC's hooks do not see.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from experiments.recipes.common import Common


@dataclass(frozen=True)
class Settings(Common):
    """A physics-informed network for the Poisson equation (run to its end on a CPU)."""

    rates: ClassVar[Mapping[str, float]] = {"soframe": 1e-2, "adamw": 3e-2}

    output: Path = Path("runs/pinn")
    epochs: int = 50
    """Passes through the training points."""
    evaluate_every: int | None = 100
    """Steps between evaluations."""
    save_every: int | None = 200
    """Steps between checkpoints."""
    batch_size: int = 256
    """Points of a step."""
    method: str = "soap"
    """Method of soframe, one that reads gradients alone."""
    base: Literal["sgd", "adamw", "lamb"] | None = None
    lr: float | None = None
    """Learning rate; None for 0.01 with soframe and 0.03 with adamw, of a search
    (docs/guides/recipes.md)."""
    waves: int = 2
    """The number k of half waves of the solution along each side."""
    width: int = 64
    """Width of the hidden layers."""
    layers: int = 3
    """Hidden layers, with tanh."""
    points: int = 2048
    """Training points, drawn uniformly."""


class Bounded(nn.Module):
    """A tanh network that is zero on the boundary of the unit square: `(points, 2)` to `(points,)`.

    Args:
        width: Width of the hidden layers.
        layers: Hidden layers.
    """

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        hidden: list[nn.Module] = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(layers - 1):
            hidden += [nn.Linear(width, width), nn.Tanh()]
        self.body = nn.Sequential(*hidden, nn.Linear(width, 1))

    def forward(self, points: Tensor) -> Tensor:
        edge = (points * (1 - points)).prod(dim=1)
        out: Tensor = 16 * edge * self.body(2 * points - 1).squeeze(1)
        return out


def model(settings: Settings) -> nn.Module:
    return Bounded(settings.width, settings.layers)


def _examples(points: Tensor, waves: int) -> TensorDataset:
    """Return points, the right-hand side and the solution there."""
    solution = torch.sin(waves * math.pi * points).prod(dim=1)
    return TensorDataset(points, 2 * (waves * math.pi) ** 2 * solution, solution)


def data(settings: Settings) -> tuple[TensorDataset, TensorDataset]:
    generator = torch.Generator().manual_seed(settings.seed)
    points = torch.rand(settings.points, 2, generator=generator)
    axis = (torch.arange(64) + 0.5) / 64
    grid = torch.cartesian_prod(axis, axis)
    return _examples(points, settings.waves), _examples(grid, settings.waves)


def loss(model: nn.Module, points: Tensor, source: Tensor, solution: Tensor) -> Tensor:
    """Return the mean squared residual; the solution enters the figures alone."""
    with torch.enable_grad():
        points = points.detach().requires_grad_()
        value = model(points)
        (slope,) = torch.autograd.grad(value.sum(), points, create_graph=True)
        curved = sum(
            torch.autograd.grad(slope[:, axis].sum(), points, create_graph=True)[0][:, axis]
            for axis in range(2)
        )
        return (curved + source).square().mean()


def metrics(
    model: nn.Module, points: Tensor, source: Tensor, solution: Tensor
) -> dict[str, Tensor]:
    error = (model(points) - solution).square().mean()
    return {"squared_error": error, "squared_solution": solution.square().mean()}


def summary(means: Mapping[str, float]) -> dict[str, float]:
    return {"relative_l2": math.sqrt(means["squared_error"] / means["squared_solution"])}
