"""Finite gradients that are so large that what is made of them may not be finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.methods import AdamW
from soframe.methods.base import Direction, Given
from soframe.settings import grouped
from soframe.solvers import Eigen, Relative
from soframe.step import verdict as gradients
from tests import kit
from tests.distributed.harness import run_ranks


def batch(step: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64).to(dtype)


def after(
    scales: list[float], dtype: torch.dtype, *, deep: bool = True, **options: Any
) -> tuple[Any, list[Tensor]]:
    """Gradients after the last of some steps on losses of some scales."""
    torch.manual_seed(1)
    if deep:
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.LayerNorm(3))
    else:
        model = nn.Sequential(nn.Linear(4, 3, bias=False))  # a single block
    model.to(dtype)
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


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("clips", [{"kl_clip": 1e-4}, {"kl_clip": None}], ids=str)
def test_results_that_are_not_finite_cost_one_update(clips: dict[str, Any], deep: bool) -> None:
    """The gradients are finite, and over the damping they are not."""
    settings: dict[str, Any] = {"damping": 1e-8, "deep": deep, **clips}
    own, found = after([1.0, 1e37], torch.float32, **settings)
    assert own.counters["skipped_updates"] == 1
    assert not any(bool(gradient.any()) for gradient in found)
    own, found = after([1.0, 1e37, 1.0], torch.float32, **settings)
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


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("bad", [None, 0, 1, 2, 3])
def test_small_gradients_are_read_together(
    bad: int | None, dtype: torch.dtype, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large gradient between small ones, one of which is not contiguous."""
    monkeypatch.setattr(gradients, "on_gpu", lambda _: gpu)
    shapes = [(3, 2), (gradients.SMALL + 1,), (1,), (2, 5)]
    tensors = [torch.ones(shape, dtype=dtype) for shape in shapes]
    tensors[3] = tensors[3].mT
    parameters = list(map(nn.Parameter, tensors))
    assert gradients.Magnitude(parameters, tensors).read() == (0.0, True)
    if bad is not None:
        for value in (1e15, math.inf, math.nan):
            tensors[bad][-1] = value
            size, _ = gradients.Magnitude(parameters, tensors).read()
            assert size == pytest.approx(value, rel=0.01, nan_ok=True)


def spiked(rank: int, ranks: int, method: Any, scales: list[float], **options: Any) -> Any:
    """Train in float32 on losses of some scales, on the last rank alone; counters and weights."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = soframe.Optimizer(model, method, lr=0.01, solve_every=1, **options)

    def loss(model: nn.Module, step: int) -> Tensor:
        # Steps without a spike have the batches that a run without the spike has.
        usual = [number for number, scale in enumerate(scales) if scale == 1.0]
        seed = usual.index(step) if step in usual else 99
        scale = scales[step] if rank == ranks - 1 else 1.0
        return model(batch(seed, torch.float32)).square().mean() * scale

    weights = kit.train(model, loss, range(len(scales)), kit.Averaging(model), optimizer)
    counters = dict(optimizer.preconditioner.counters)
    optimizer.close()
    return counters, weights


METHODS = ("adamw", "muon", "normuon", "soap", "soap-normuon", "shampoo", "kl-soap", "newton-muon")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e22, 1e32])
def test_a_spike_whose_squares_overflow_costs_one_update(method: str, scale: float) -> None:
    """The gradient is finite; second moments, factors and norms of momenta would not be."""
    # A damping of the step would be another after a skipped one.
    options = {"statistics_every": 1, "damping": 0.05} if method == "newton-muon" else {}
    counters, weights = spiked(0, 1, method, [1.0] * 3 + [scale] + [1.0] * 4, **options)
    assert counters["skipped_updates"] == 1
    assert counters["failed_solves"] == 0
    _, expected = spiked(0, 1, method, [1.0] * 7, **options)
    assert torch.equal(weights, expected)


@pytest.mark.parametrize("scale", [1e12, 1e18])
def test_a_spike_whose_squares_are_in_range_is_torchs(scale: float) -> None:
    scales = [1.0, 1.0, scale, 1.0, 1.0]
    counters, weights = spiked(0, 1, "adamw", scales)
    assert counters["skipped_updates"] == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soframe, "Optimizer", Torchs)
        _, expected = spiked(0, 1, "adamw", scales)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-7)


class Torchs(torch.optim.AdamW):
    """torch's AdamW, called as soframe's."""

    def __init__(self, model: nn.Module, method: str, lr: float, **settings: Any) -> None:
        super().__init__(model.parameters(), lr, weight_decay=0.0)
        self.preconditioner = self
        self.counters = {"skipped_updates": 0}

    def close(self) -> None:
        pass


class Cubes(AdamW):
    """Adam with a state that overflows before its squares do, and a finite update."""

    def direct(self, given: Given) -> Direction:
        found = super().direct(given)
        new = given.incoming
        return Direction(found.matrix, {**found.state, "mean": new * new * new})


def test_a_state_that_is_not_finite_costs_one_update() -> None:
    """A state is looked at where gradients are large: it may overflow where squares do not."""
    counters, weights = spiked(0, 1, Cubes(), [1.0] * 3 + [1e15] + [1.0] * 4)
    assert counters["skipped_updates"] == 1
    assert torch.equal(weights, spiked(0, 1, Cubes(), [1.0] * 7)[1])


def spikes(rank: int, ranks: int) -> list[Any]:
    scales = [1.0] * 2 + [1e15, 1e25] + [1.0]
    return [spiked(rank, ranks, Cubes(), scales, strategy=s) for s in ("comm-opt", "sharded")]


@pytest.mark.distributed
def test_ranks_skip_a_state_that_is_not_finite_on_one() -> None:
    """Under "sharded" each state is on one rank, which alone sees that it is not finite."""
    for first, second in zip(*run_ranks(spikes, 2), strict=True):
        assert first[0]["skipped_updates"] == second[0]["skipped_updates"] == 2
        assert torch.equal(first[1], second[1])
