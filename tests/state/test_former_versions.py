"""States that former versions of soframe wrote go on as they would have there."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import soframe

FORMER = Path(__file__).parent / "former"
AT, STEPS = 5, 10


def train(state: dict[str, Any]) -> tuple[nn.Module, soframe.Preconditioner]:
    """Go on as the script that wrote the files did, from the state of the model in them."""
    layers = (nn.Conv2d(1, 2, 2), nn.Flatten(), nn.Tanh(), nn.Linear(8, 3), nn.Tanh())
    model = nn.Sequential(*layers, nn.Linear(3, 2, bias=False)).double()
    model.load_state_dict(state["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings: dict[str, Any] = {"damping": 0.02, "statistics_every": 2, "solve_every": 3}
    preconditioner = soframe.Preconditioner(model, optimizer=optimizer, **settings)
    preconditioner.load_state_dict(state["preconditioner"])
    for step in range(AT, STEPS):
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(6, 1, 3, 3, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        model(x).square().sum(1).mean().backward()
        preconditioner.step()
        optimizer.step()
    return model, preconditioner


@pytest.mark.parametrize("version", [2, 3])
def test_a_former_state_goes_on_as_it_did(version: int) -> None:
    state = torch.load(FORMER / f"version{version}.pt", weights_only=True)
    assert state["preconditioner"]["version"] == version
    with warnings.catch_warnings():
        if version == 2:
            warnings.filterwarnings("ignore", ".*has version 2, which has no checksums")
        model, preconditioner = train(state)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, state["after"][name], rtol=1e-9, atol=1e-12)
    assert preconditioner.state_dict()["version"] == 4
