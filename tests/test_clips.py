"""Clips that users register: a formula of their own, beside the ones that soframe has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import soframe
from soframe.testing import compare
from tests.curvature import closing, half_square, randn
from tests.distributed.harness import run_ranks
from tests.test_kl_clip import net, step


@soframe.register("clip", "energy")
class Energy(soframe.Clip):
    """Bounds half the squared length."""

    reads_gradients = False

    def term(self, update: Tensor, gradient: Tensor) -> Tensor:
        return update.square().sum() / 2

    def factor(self, total: Tensor, bound: float) -> Tensor:
        return (bound / total).sqrt()


@pytest.mark.parametrize("lr", [None, 0.5])
def test_a_clip_of_a_user_scales_all_updates(lr: float | None) -> None:
    plain, model = net(), net()
    clips = soframe.Clips(further={"energy": 1e-3})
    own = soframe.Preconditioner(model, kl_clip=None, clips=clips, lr=lr)
    with closing(own), closing(soframe.Preconditioner(plain, kl_clip=None)) as unclipped:
        _, updates = step(plain, unclipped)
        _, clipped = step(model, own)
        metrics = own.metrics()
    rate = 1.0 if lr is None else lr
    energy = sum(float((rate * update).square().sum()) / 2 for update in updates)
    factor = (1e-3 / energy) ** 0.5
    assert factor < 1
    for scaled, update in zip(clipped, updates, strict=True):
        compare(scaled, factor * update, "clipped")
    assert metrics["energy_clip"] == 1e-3
    assert metrics["energy_clip_factor"] == pytest.approx(factor)
    assert metrics["clip_factor"] == pytest.approx(factor)


def test_the_strictest_of_all_clips_holds() -> None:
    model = net()
    clips = soframe.Clips(norm_clip=1e-2, further={"energy": 1e-3})
    with closing(soframe.Preconditioner(model, clips=clips)) as own:
        step(model, own)
        factors = own.metrics()
    named = [factors[f"{name}_clip_factor"] for name in ("kl", "norm", "energy")]
    assert factors["clip_factor"] == min(named)


@pytest.mark.parametrize(
    "bounds", [{"kl_clip": 0.2}, {"clips": soframe.Clips(norm_clip=0.2)}], ids=str
)
def test_a_step_whose_clip_is_out_of_range_is_skipped(bounds: Any) -> None:
    """Gradients and updates are in the range of float64; their products are not."""
    model = net()
    with closing(soframe.Preconditioner(model, **{"kl_clip": None, **bounds})) as own:
        for scale in (1.0, 1e160):
            model.zero_grad()
            (scale * half_square(model(randn(5, 2, 3, 3)), randn(5, 2))).backward()
            own.step()
        assert own.counters["skipped_updates"] == 1
        assert not any(p.grad.any() for p in model.parameters() if p.grad is not None)


def test_a_clip_that_does_not_exist_is_refused() -> None:
    clips = soframe.Clips(further={"enrgy": 1.0})
    with pytest.raises(ValueError, match="'enrgy'"):
        soframe.Preconditioner(net(), clips=clips)


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan])
def test_bounds_out_of_range(bad: float) -> None:
    with pytest.raises(ValueError, match="energy_clip must be"):
        soframe.Preconditioner(net(), clips=soframe.Clips(further={"energy": bad}))


STEPS = 4  # after the second, two ranks go on where four were


BINDING = {
    "energy": soframe.Clips(norm_clip=0.5, further={"energy": 1e-3}),
    "norm": soframe.Clips(norm_clip=0.01),
}
"""Clips of which the named one has the smallest factor."""


def clipped(
    rank: int, ranks: int, name: str, strategy: str, steps: range, folder: Path
) -> list[Tensor]:
    """Take steps on a share of the batch each, with gradients that the step averages."""
    model = net()
    own = soframe.Preconditioner(
        model,
        strategy=strategy,
        statistics_every=1,
        solve_every=1,
        clips=BINDING[name],
        distribution=soframe.Distribution(gradients="local"),
    )
    if steps.start:
        state = torch.load(folder / "state.pt", weights_only=True)
        model.load_state_dict(state["model"])
        own.load_state_dict(state["own"])
    for number in steps:
        model.zero_grad()
        inputs, targets = randn(8, 2, 3, 3, seed=number), randn(8, 2, seed=number + 9)
        for half in range(2):  # micro-batches
            rows = slice((2 * rank + half) * 4 // ranks, (2 * rank + half + 1) * 4 // ranks)
            (half_square(model(inputs[rows]), targets[rows]) / 2).backward()
        own.step()
        metrics = own.metrics()
        assert metrics[f"{name}_clip_factor"] == metrics["clip_factor"] < 1
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
    state = {"model": model.state_dict(), "own": own.state_dict()}
    if rank == 0 and not steps.start:
        torch.save(state, folder / "state.pt")
    own.close()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt", "sharded"])
@pytest.mark.parametrize("name", BINDING)
def test_four_ranks_clip_as_one_process_and_two_go_on(
    name: str, strategy: str, tmp_path: Path
) -> None:
    (tmp_path / "alone").mkdir()
    half = STEPS // 2
    for ranks, steps in ((4, range(half)), (2, range(half, STEPS))):
        expected = clipped(0, 1, name, "comm-opt", steps, tmp_path / "alone")
        for found in run_ranks(clipped, ranks, name, strategy, steps, tmp_path):
            for weight, wanted in zip(found, expected, strict=True):
                torch.testing.assert_close(weight, wanted, rtol=1e-9, atol=1e-11)
