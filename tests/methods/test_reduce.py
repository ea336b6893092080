"""K-FAC, reduce setting: exact where positions are averaged, against the dense Fisher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soframe.layers import Conv2dHelper, LinearHelper
from soframe.layers.base import LayerHelper
from soframe.testing import compare
from tests.curvature import (
    check_exact,
    closing,
    factors,
    fill,
    half_square,
    log_cosh,
    preconditioner,
    randn,
)


class MeanOf(nn.Module):
    """A layer whose positions are averaged."""

    def __init__(self, layer: nn.Module, *dims: int) -> None:
        super().__init__()
        self.layer, self.dims = layer, dims

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).mean(self.dims)


CASES: dict[str, Any] = {
    "linear": (lambda: MeanOf(nn.Linear(3, 2), 1), (5, 3)),
    "without a bias": (lambda: MeanOf(nn.Linear(3, 2, bias=False), 1, 2), (2, 3, 3)),
    "conv": (lambda: MeanOf(nn.Conv2d(2, 3, 2, padding=1, stride=2), 2, 3), (2, 4, 3)),
    "grouped": (lambda: MeanOf(nn.Conv2d(4, 2, 2, groups=2, dilation=2), 2, 3), (4, 4, 3)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("average", ["local", "global", "sum"])
def test_averaged_positions_are_exact(name: str, average: Any) -> None:
    make, shape = CASES[name]
    model = fill(make())
    batches = [
        (randn(size, *shape, seed=size), randn(size, len(model.layer.weight))) for size in (2, 4)
    ]
    options = {"method": "kfac-reduce", "damping": 0.1, "loss_average": average}
    with closing(preconditioner(model, **options)) as own:
        check_exact(model, own, batches, half_square, loss_average=average)


def test_of_one_sample_any_loss_is_exact() -> None:
    model = fill(MeanOf(nn.Linear(3, 2), 1))
    with closing(preconditioner(model, method="kfac-reduce", damping=0.1)) as own:
        check_exact(model, own, [(randn(1, 5, 3), randn(1, 2))], log_cosh)


@pytest.mark.parametrize("scaling", ["fisher", "kaisa"])
@pytest.mark.parametrize("samples", ["batch", "positions"])
def test_one_position_is_nothing_to_reduce(scaling: str, samples: str) -> None:
    found = []
    for method in ("kfac", "kfac-reduce"):
        model = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
        options = {"method": method, "scaling": scaling, "samples": samples}
        with closing(preconditioner(model, **options)) as own:
            model(randn(5, 3)).square().mean().backward()
            own.step()
            found.append([m for name in "02" for m in factors(own, name)])
    for one, two in zip(*found, strict=True):
        compare(one, two, "one position", rtol=1e-12)


@pytest.mark.parametrize(
    "helper",
    [
        LinearHelper(fill(nn.Linear(3, 2))),
        Conv2dHelper(fill(nn.Conv2d(4, 2, (3, 2), stride=2, padding=(2, 1), groups=2))),
        Conv2dHelper(fill(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"))),
        Conv2dHelper(fill(nn.Conv2d(2, 2, 3)), weight=False),
    ],
    ids=["linear", "grouped", "circular", "bias alone"],
)
def test_mean_rows_are_means_of_rows(helper: LayerHelper) -> None:
    x = randn(3, 5, 3) if isinstance(helper, LinearHelper) else randn(3, 4, 6, 5)
    if isinstance(helper, Conv2dHelper):
        x = x[:, : helper.module.in_channels]
    rows = helper.output_rows(helper.module(x))
    compare(helper.mean_rows((x,), rows), helper.block_rows((x,), rows).mean(2, True), "means")


def test_positions_with_losses_of_their_own_keep_the_scale() -> None:
    """With equal inputs and independent gradients at all positions the two settings agree."""
    torch.manual_seed(0)
    positions, batch = 4, 4000
    a = randn(batch, 1, 2).expand(batch, positions, 2)
    g = randn(batch, positions, 3, seed=1) / (batch * positions)
    found = []
    for method in ("kfac", "kfac-reduce"):
        model = fill(nn.Linear(2, 3, bias=False))
        with closing(preconditioner(model, method=method, samples="positions")) as own:
            model(a).backward(g)
            own.step()
            one, two = factors(own, "Linear")
            found.append(torch.kron(two[0].contiguous(), one[0].contiguous()))
    compare(*found, "F", rtol=0.1, atol=0.1)


def test_it_has_no_form_without_output_gradients() -> None:
    with pytest.raises(ValueError, match="has no form for fisher='forward-only'"):
        preconditioner(fill(nn.Linear(2, 2)), method="kfac-reduce", fisher="forward-only")
