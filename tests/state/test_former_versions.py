"""States of the second edition load, and states of other versions are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.checkpoint import seal
from tests import kit

FORMER = Path(__file__).parent / "former"
AT, STEPS = 5, 10


def resumed(state: dict[str, Any]) -> tuple[nn.Module, soframe.Preconditioner]:
    """Continue from the model and the state in a file, as the script did that wrote it."""
    layers = (nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Tanh(), nn.Linear(8, 3), nn.Tanh())
    model = nn.Sequential(*layers, nn.Linear(3, 2, bias=False)).double()
    model.load_state_dict(state["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    method = soframe.methods.Chain(("momentum", "kfac"))
    settings: dict[str, Any] = {"solver": "eigen", "damping": 0.02}
    settings |= {"statistics_every": 2, "solve_every": 3}
    preconditioner = soframe.Preconditioner(model, method, optimizer=optimizer, **settings)
    preconditioner.load_state_dict(state["preconditioner"])

    def loss(model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 1, 3, 3, generator=generator, dtype=torch.float64)
        return model(x).square().sum(1).mean()

    kit.train(model, loss, range(AT, STEPS), preconditioner, optimizer)
    return model, preconditioner


def test_a_state_of_the_second_edition_continues_exactly() -> None:
    state = torch.load(FORMER / "version4.pt", weights_only=True)
    model, _ = resumed(state)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, state["after"][name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("version", [3, 5, None])
def test_another_version_is_named(version: int | None) -> None:
    state = torch.load(FORMER / "version4.pt", weights_only=True)
    state["preconditioner"] = seal({**state["preconditioner"], "version": version})
    with pytest.raises(ValueError, match=f"has version {version}, and this soframe"):
        resumed(state)
