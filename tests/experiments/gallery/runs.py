"""Runs of the gallery's methods on a rank, which tests start in processes of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import soframe
from experiments.gallery.dion import Dion
from soframe.methods import Direction, Given
from tests.curvature import randn


def with_gaps(rank: int, ranks: int, strategy: str) -> list[Tensor]:
    """The weights after steps in which one of two alike layers has no gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(3))).double()
    optimizer = soframe.Optimizer(model, Dion(rank_fraction=0.3), strategy=strategy, lr=0.1)
    for step in range(4):
        for index, parameter in enumerate(model.parameters()):
            is_left_out = step == 1 + index
            parameter.grad = None if is_left_out else randn(6, 6, seed=10 * step + index)
        optimizer.step()
    optimizer.close()
    return [parameter.detach().clone() for parameter in model.parameters()]


class Empty(Dion):
    """It declares a parcel and returns none."""

    def direct(self, step: Given) -> Direction:
        update = super().direct(step)
        return Direction(update.matrix, update.state)


def empty(rank: int, ranks: int) -> str:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False))
    own = soframe.Preconditioner(
        model, Empty(rank_fraction=0.1), strategy="mem-opt", auxiliary="sgd"
    )
    model(torch.ones(2, 6)).sum().backward()
    try:
        own.step()
        own.step()
    except Exception as error:
        return str(error)
    finally:
        own.close()
    return ""
