"""With all data in every step the next loss is the verdict on the last, and costs nothing."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from soframe.testing import compare
from soframe.trust_region import LevenbergMarquardt
from tests.curvature import fill, randn
from tests.trust_region.kit import classes_of, deep, labels, trust_region, vector


def normalised() -> nn.Module:
    """With buffers, which each pass changes."""
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)]
    return fill(nn.Sequential(*layers))


def trained(
    steps: int, make: Callable[[], nn.Module] = normalised, **settings: Any
) -> tuple[nn.Module, soframe.TrustRegion, list[float], int]:
    """A model after some steps, too long ones now and then; losses and the number of passes."""
    model = make()
    own = trust_region(
        model, "cross-entropy", LevenbergMarquardt(1.0, omega=0.7, interval=2), **settings
    )
    x, y = randn(8, 3), labels(8)
    passes = 0

    def closure() -> Tensor:
        nonlocal passes
        passes += 1
        return F.cross_entropy(model(x), y)

    losses = []
    for step in range(steps):
        own.param_groups[0]["lr"] = 300.0 if step in (3, 7) else 1.0
        losses.append(float(own.step(closure)))
    return model, own, losses, passes


@pytest.mark.parametrize("reject", [True, False])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_the_next_loss_judges_as_another_pass_does(reject: bool, weight_decay: float) -> None:
    settings = {"reject": reject, "weight_decay": weight_decay, "reuse_activations": False}
    model, own, losses, _ = trained(9, **settings)
    other, later, same, _ = trained(9, full_batch=True, **settings)
    assert same == losses
    assert torch.equal(vector(other), vector(model))
    for buffer, expected in zip(other.buffers(), model.buffers(), strict=True):
        assert torch.equal(buffer, expected)
    assert later.damping.at(0) == own.damping.at(0)
    assert later.counters == own.counters
    assert own.counters["rejected_steps"] == 2 * reject


def test_it_costs_no_pass_but_that_which_shows_a_rejection() -> None:
    _, own, _, passes = trained(9)
    assert passes == 9 + 4
    assert own.counters["rejected_steps"] == 2
    _, own, _, passes = trained(9, full_batch=True)
    assert passes == 9 + 2
    assert own.counters["rejected_steps"] == 2


def test_the_next_step_tells_what_the_last_has_brought() -> None:
    model = deep()
    own = trust_region(model, "cross-entropy", LevenbergMarquardt(interval=2), full_batch=True)
    x, y = classes_of(0)
    losses, told = [], []
    for _ in range(6):
        own.step(lambda: F.cross_entropy(model(x), y))
        losses.append(own.last["loss"])
        told.append((own.last.get("change"), own.last.get("ratio"), own.last["predicted"]))
    changes, ratios, predicted = zip(*told, strict=True)
    assert [change is None for change in changes] == [True, True, False, True, False, True]
    for step in (2, 4):
        assert changes[step] == pytest.approx(losses[step] - losses[step - 1], rel=1e-12)
        assert ratios[step] == pytest.approx(changes[step] / predicted[step - 1], rel=1e-12)


def test_a_step_that_ends_nowhere_is_undone_by_the_next() -> None:
    model = deep()
    own = trust_region(
        model, "cross-entropy", LevenbergMarquardt(1.0, interval=1), reject=False, full_batch=True
    )
    x, y = classes_of(0)
    before = vector(model)
    own.param_groups[0]["lr"] = math.inf
    own.step(lambda: F.cross_entropy(model(x), y))
    assert not vector(model).isfinite().all()
    own.param_groups[0]["lr"] = 1e-9
    own.step(lambda: F.cross_entropy(model(x), y))
    compare(vector(model), before, "parameters", rtol=1e-6)
    assert own.last["ratio"] == -math.inf
    assert own.counters == {"rejected_steps": 1, "skipped_steps": 0}
    assert own.damping.at(0) > 1.0


def test_a_batch_that_is_not_finite_after_a_step_that_waits_loses_nothing() -> None:
    model = deep()
    own = trust_region(model, "cross-entropy", LevenbergMarquardt(1.0, interval=1), full_batch=True)
    x, y = classes_of(0)
    own.step(lambda: F.cross_entropy(model(x), y))
    own.step(lambda: F.cross_entropy(model(x * math.nan), y))
    assert vector(model).isfinite().all()
    assert own.counters == {"rejected_steps": 1, "skipped_steps": 1}
    losses = [float(own.step(lambda: F.cross_entropy(model(x), y))) for _ in range(15)]
    assert losses[-1] < 0.5 * losses[0]


def test_it_goes_on_from_the_state_of_a_version_that_never_waited() -> None:
    model = deep()
    own = trust_region(model, "cross-entropy", LevenbergMarquardt(interval=1), full_batch=True)
    x, y = classes_of(0)
    own.step(lambda: F.cross_entropy(model(x), y))
    state = own.state_dict()
    del state["trust_region"]["reduction"]
    again = trust_region(model, "cross-entropy", LevenbergMarquardt(interval=1), full_batch=True)
    again.load_state_dict(state)
    again.step(lambda: F.cross_entropy(model(x), y))
    assert "ratio" not in again.last
