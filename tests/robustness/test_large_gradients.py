"""Finite gradients that are so large that what is made of them may not be finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.settings import grouped
from soframe.solvers import Eigen, Relative
from soframe.step import magnitude as gradients
from tests import kit
from tests.distributed.harness import run_ranks


def batch(step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64).to(dtype)


def after(scales: list[float], dtype: torch.dtype, **options: Any) -> tuple[Any, list[Tensor]]:
    """Gradients after the last of some steps on losses of some scales."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.LayerNorm(3)).to(dtype)
    own = soframe.Preconditioner(model, lr=0.1, **grouped({"statistics_every": 10, **options}))

    def loss(model: nn.Module, step: int) -> Tensor:
        return model(batch(step, dtype)).square().mean() * scales[step]

    kit.train(model, loss, range(len(scales)), own)
    own.close()
    return own, kit.gradients(model)


@pytest.mark.parametrize(
    "clips",
    [
        {"kl_clip": 1e-4},
        {"kl_clip": None, "norm_clip": 1.0},
        {"kl_clip": 1e-4, "norm_clip": 1.0},
        {"kl_clip": 1e-4, "gradients": "local"},
    ],
    ids=str,
)
@pytest.mark.parametrize("scale", [1e12, 1e19, 1e30])
def test_a_spike_is_clipped_like_in_float64(clips: dict[str, Any], scale: float) -> None:
    """Its inner products and its squares are infinite in float32."""
    (_, single), (_, double) = (
        after([1.0, scale], dtype, **clips) for dtype in (torch.float32, torch.float64)
    )
    for one, exact in zip(single[:4], double[:4], strict=True):  # without LayerNorm's
        assert float(one.norm()) > 0
        torch.testing.assert_close(one.double(), exact, rtol=1e-3, atol=1e-3 * float(exact.norm()))


@pytest.mark.parametrize("clips", [{"kl_clip": 1e-4}, {"kl_clip": None}], ids=str)
def test_results_that_are_not_finite_cost_one_update(clips: dict[str, Any]) -> None:
    """The gradients are finite, and over the damping they are not."""
    own, found = after([1.0, 1e37], torch.float32, damping=1e-8, **clips)
    assert own.counters["skipped_updates"] == 1
    assert not any(bool(gradient.any()) for gradient in found)
    own, found = after([1.0, 1e37, 1.0], torch.float32, damping=1e-8, **clips)
    assert own.counters["skipped_updates"] == 1
    assert all(bool(g.isfinite().all()) and bool(g.any()) for g in found)


@pytest.mark.parametrize("clips", [{"kl_clip": 1e-4}, {"kl_clip": None}], ids=str)
@pytest.mark.parametrize(
    "undamped",
    [
        {"damping": 0.0, "solver": "eigen"},
        {"damping": "relative"},
        {"solver": {"^2$": Relative(Eigen()), ".*": "eigen"}},
    ],
    ids=str,
)
def test_without_damping_results_are_looked_at(
    undamped: dict[str, Any], clips: dict[str, Any]
) -> None:
    """The curvature is that of a tiny loss, the next gradient is not."""
    for scale in (1e-19, 1.0):
        own, found = after([scale, 1.0], torch.float32, **undamped, **clips)
        assert own.counters["skipped_updates"] == (scale < 1)
        assert all(bool(gradient.isfinite().all()) for gradient in found)


def spike(rank: int, ranks: int) -> tuple[dict[str, int], list[Tensor]]:
    # One rank alone has it: the others learn of it by the poll.
    scale = 1e19 if rank == 1 else 1.0
    own, found = after([1.0, scale], torch.float32, kl_clip=1e-4, gradients="local")
    return own.counters, found


@pytest.mark.distributed
def test_ranks_are_careful_together() -> None:
    (_, first), (counters, second) = run_ranks(spike, 2)
    assert counters["skipped_updates"] == 0
    for one, other in zip(first, second, strict=True):
        assert bool(one.isfinite().all())
        assert torch.equal(one, other)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, -2.0], 0.0),  # nothing large
        ([3e12, 0.0], 3e12),
        ([3e38, 3e38], 3e38),  # finite, unlike their sum
        ([math.inf, -math.inf], math.inf),
        ([1.0, -math.inf], math.inf),
    ],
)
def test_magnitude(
    values: list[float], expected: float, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By sums, and by all norms at once, as on an accelerator."""
    monkeypatch.setattr(gradients, "on_gpu", lambda _: gpu)
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(0))]
    parameters[0].grad, parameters[1].grad = torch.tensor(values), torch.zeros(0)
    for statistics, finite in ([], True), ([1e30, 2.0], True), ([1.0, -math.inf], False):
        scalars = [torch.tensor(number, dtype=torch.float64) for number in statistics]
        size, seen = gradients.Magnitude(parameters, [p.grad for p in parameters], scalars).read()
        assert size == pytest.approx(expected)
        assert seen == finite
        assert gradients.Magnitude([], [], scalars).read() == (0.0, finite)
    parameters[0].grad[0] = math.nan
    nan = torch.tensor(math.nan)
    size, finite = gradients.Magnitude(parameters, [p.grad for p in parameters], [nan]).read()
    assert math.isnan(size)
    assert not finite
