"""Clips that users register: a formula of their own, beside the ones that soframe has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import soframe
from soframe.testing import compare
from tests.curvature import closing
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


def test_a_clip_that_does_not_exist_is_refused() -> None:
    clips = soframe.Clips(further={"enrgy": 1.0})
    with pytest.raises(ValueError, match="'enrgy'"):
        soframe.Preconditioner(net(), clips=clips)


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan])
def test_bounds_out_of_range(bad: float) -> None:
    with pytest.raises(ValueError, match="energy_clip must be"):
        soframe.Preconditioner(net(), clips=soframe.Clips(further={"energy": bad}))
