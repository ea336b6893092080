"""EKFAC beside that of curvlinops, where that is installed (it is no dependency of the tests).

``pip install --no-deps curvlinops-for-pytorch backpack-for-pytorch unfoldNd einconv
linear_operator jaxtyping wadler-lindig einops opt_einsum tqdm``
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from soframe.blocks import Block
from soframe.testing import compare
from tests.curvature import closing, fill, preconditioner, randn

curvlinops = pytest.importorskip("curvlinops")


def product(block: Block, matrix: Tensor) -> Tensor:
    """The block's EKFAC times a matrix ``[out, in]``."""
    left = block.second_order["G"]["vectors"][0]
    right = block.second_order["A"]["vectors"][0]
    return left @ ((left.T @ matrix @ right) * block.running["S"][0]) @ right.T


@pytest.mark.parametrize("name", ["cross-entropy", "mse"])
def test_blocks_are_those_of_curvlinops(name: str) -> None:
    model = fill(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))
    x = randn(7, 4)
    y = torch.arange(7) % 3 if name == "cross-entropy" else randn(7, 3, seed=1)
    loss = nn.CrossEntropyLoss() if name == "cross-entropy" else nn.MSELoss()
    parameters = list(model.parameters())
    theirs = curvlinops.EKFACLinearOperator(
        model,
        loss,
        parameters,
        [(x, y)],
        fisher_type="type-2",
        separate_weight_and_bias=False,
        check_deterministic=False,
    )
    # The first step makes the bases, the second gathers the scales in them, from the same data.
    settings = {"method": "ekfac", "fisher": "type-2", "loss": name, "solve_every": 9}
    with closing(preconditioner(model, **settings)) as own:
        for _ in range(2):
            model.zero_grad()
            outputs = model(x)
            own.observe(outputs)
            loss(outputs, y).backward()
            own.step()
        direction = [randn(*p.shape, seed=2 + i) for i, p in enumerate(parameters)]
        flat = torch.cat([part.flatten() for part in direction])
        expected = (theirs @ flat).split([part.numel() for part in direction])
        for number, block in enumerate(own.blocks):
            weight, bias = direction[2 * number], direction[2 * number + 1]
            mine = product(block, torch.cat([weight, bias.unsqueeze(1)], 1))
            compare(mine[:, :-1].flatten(), expected[2 * number], f"weight of {block.name}")
            compare(mine[:, -1], expected[2 * number + 1], f"bias of {block.name}")
