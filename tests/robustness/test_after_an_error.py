"""A step that raised leaves nothing to the steps after it."""

import copy

import pytest
import torch
from torch import nn

import soframe
from tests.curvature import randn


def test_a_run_goes_on_from_a_checkpoint_with_its_own_gradients() -> None:
    bad = [False]
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 2)).double()
    own = soframe.Preconditioner(
        model, lr=0.1, damping=lambda _: -1.0 if bad[0] else 0.1, statistics_every=2, solve_every=2
    )

    def step(seed: int) -> list[torch.Tensor]:
        model.zero_grad()
        model(randn(6, 3, seed=seed)).square().sum().backward()
        own.step()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    step(0), step(1)
    saved = copy.deepcopy(own.state_dict())
    expected = step(2)  # with statistics
    bad[0] = True
    with pytest.raises(ValueError, match="damping"):
        step(3)  # without
    bad[0] = False
    own.load_state_dict(saved)
    for found, wanted in zip(step(2), expected, strict=True):
        assert torch.equal(found, wanted)
