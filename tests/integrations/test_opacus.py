"""Opacus makes its private gradient within a step: methods of gradients get it.

It is in no extra: it installs a package that is called benchmarks, which hides the folder here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import soframe


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def private(model: nn.Module, optimizer: Any) -> tuple[Any, Any, Any]:
    """What Opacus makes of them, without noise."""
    opacus = pytest.importorskip("opacus")
    data = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.randn(8, 2))
    made: tuple[Any, Any, Any] = opacus.PrivacyEngine().make_private(
        module=model,
        optimizer=optimizer,
        data_loader=torch.utils.data.DataLoader(data, batch_size=4),
        noise_multiplier=0.0,
        max_grad_norm=0.1,
        poisson_sampling=False,
    )
    return made


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", ["muon", "shampoo"])
def test_methods_of_gradients_get_the_private_one(method: str) -> None:
    """The step is that of the mean of clipped gradients, sample by sample.

    Not SOAP's: rounding decides on its basis where few gradients leave directions out.
    """
    weights = []
    x, y = (torch.randn(4, width, dtype=torch.float64) for width in (3, 2))
    for within in (True, False):
        model = network()
        plain = soframe.Optimizer(model, method, lr=0.1)
        if within:
            wrapped, optimizer, _ = private(model, plain)
        for _ in range(3):
            if within:
                optimizer.zero_grad()
                nn.functional.mse_loss(wrapped(x), y).backward()
                optimizer.step()
                continue
            clipped = [torch.zeros_like(p) for p in model.parameters()]
            for one, target in zip(x, y, strict=True):
                loss = nn.functional.mse_loss(model(one), target)
                of_one = torch.autograd.grad(loss, list(model.parameters()))
                size = torch.cat([g.flatten() for g in of_one]).norm()
                factor = min(1.0, 0.1 / (float(size) + 1e-6)) / 4
                clipped = [c + factor * g for c, g in zip(clipped, of_one, strict=True)]
            plain.zero_grad()
            for parameter, gradient in zip(model.parameters(), clipped, strict=True):
                parameter.grad = gradient
            plain.step()
        weights.append([p.detach().clone() for p in model.parameters()])
    for one, other in zip(*weights, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)
