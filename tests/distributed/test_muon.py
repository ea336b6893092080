"""Muon over ranks: each matrix is orthogonalised once, with no more bytes than an all-reduce."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from soframe import Optimizer
from soframe.comm import TorchDistributed
from soframe.methods import orthogonal
from soframe.settings import grouped
from tests import kit
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed

WIDTHS = (8, 8, 24, 8, 6, 6)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for into, out in zip(WIDTHS, WIDTHS[1:], strict=False):  # noqa: RUF007
        layers += [nn.Linear(into, out), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(WIDTHS[-1], 2)).double()


def take_steps(model: nn.Module, rank: int, ranks: int, **options: object) -> None:
    optimizer = Optimizer(model, "muon", lr=0.02, **grouped(options))  # type: ignore[arg-type]

    def loss(model: nn.Module, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(12, WIDTHS[0], generator=generator, dtype=torch.float64)
        return model(x[rank::ranks]).square().sum(1).mean()

    kit.train(model, loss, range(3), optimizer)
    optimizer.close()


def train_on_ranks(rank: int, ranks: int) -> tuple[list[torch.Tensor], int, dict[str, int]]:
    """Return the weights, how many matrices this rank made orthogonal, and the bytes of a phase."""
    model, made = make_model(), 0
    inner = orthogonal.nearest_orthogonal

    def counted(matrix: torch.Tensor, *norm: torch.Tensor, **settings: Any) -> torch.Tensor:
        nonlocal made
        made += len(matrix)
        return inner(matrix, *norm, **settings)

    orthogonal.nearest_orthogonal = counted
    backend = TorchDistributed(fused=True)
    strategy = {"strategy": "mem-opt", "gradients": "local", "backend": backend}
    take_steps(model, rank, ranks, **strategy)
    sent = {phase: count["bytes"] for phase, count in backend.traffic().items()}
    return [p.detach() for p in model.parameters()], made, sent


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_matrix_is_orthogonalised_once_for_all_ranks(ranks: int) -> None:
    alone = make_model()
    take_steps(alone, 0, 1)
    found = run_ranks(train_on_ranks, ranks)
    matrices = len(WIDTHS) - 1  # the head is AdamW's
    assert sum(made for _, made, _ in found) == 3 * matrices
    size = 8 * sum(p.numel() for p in alone.parameters())
    for weights, _, sent in found:
        for own, expected in zip(weights, alone.parameters(), strict=True):
            torch.testing.assert_close(own, expected.detach(), rtol=1e-9, atol=1e-12)
        # A reduce-scatter of all gradients and an all-gather of all directions: an all-reduce is
        # both of them.
        assert sent["gradients"] <= 3 * size
        assert sent["exchange"] <= 3 * size
        assert set(sent) <= {"start", "agree", "gradients", "exchange", "total"}
