"""SOAP's basis is determined by the gradients, not by rounding, where factors lack rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soframe import Preconditioner
from tests import kit

STEPS = 20
SHAPES = {"wide": (40, 6), "tall": (5, 32), "square": (20, 20)}  # inputs, outputs


def path_of(method: str, sizes: tuple[int, int], flip: bool, **options: Any) -> Tensor:
    """Return the path of the weights, with the samples of each batch in order or reversed."""
    torch.manual_seed(0)
    inputs, outputs = sizes
    layers = (nn.Linear(inputs, outputs), nn.Tanh(), nn.Linear(outputs, inputs))
    model = nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    own = Preconditioner(model, method, optimizer=optimizer, kl_clip=None, **options)

    def loss(model: nn.Module, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, inputs, generator=generator, dtype=torch.float64)
        classes = torch.randint(inputs, (8,), generator=generator)
        if flip:
            x, classes = x.flip(0), classes.flip(0)
        # Gradients of this loss are zero along the sum of the outputs, a null space of its own.
        return nn.functional.cross_entropy(model(x), classes)

    path = [kit.train(model, loss, [step], own, optimizer) for step in range(STEPS)]
    own.close()
    return torch.stack(path)


@pytest.mark.parametrize("solve_every", [1, 5])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("method", ["soap", "kl-soap", "soap-muon", "soap-normuon"])
@pytest.mark.covering(together=1)
def test_the_order_of_samples_does_not_matter(method: str, shape: str, solve_every: int) -> None:
    one, other = (
        path_of(method, SHAPES[shape], flip, solve_every=solve_every) for flip in (False, True)
    )
    assert (one[-1] - one[0]).norm() > 0.01
    torch.testing.assert_close(other, one, rtol=0, atol=1e-9)
