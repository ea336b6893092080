"""With all data in every step the next loss is the verdict on the last, and costs nothing."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from soframe.testing import compare
from soframe.trust_region import LevenbergMarquardt, reduction
from tests.curvature import fill, half_square, randn
from tests.trust_region.kit import Measured, classes_of, deep, labels, trust_region, vector


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reject", "weight_decay", "fisher"), [(True, 1e-2, "type-2"), (False, 0.0, "monte-carlo")]
)
def test_the_next_loss_judges_as_another_pass_does(
    reject: bool, weight_decay: float, fisher: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers and random numbers are as if the pass that showed a rejection had not been."""
    monkeypatch.setattr(reduction, "MORE", math.inf)
    settings = {"reject": reject, "weight_decay": weight_decay, "fisher": fisher}
    settings |= {"max_increase": None}
    torch.manual_seed(0)
    model, own, losses, _ = trained(9, **settings)
    torch.manual_seed(0)
    other, later, same, _ = trained(9, full_batch=True, **settings)
    assert same == losses
    assert torch.equal(vector(other), vector(model))
    for buffer, expected in zip(other.buffers(), model.buffers(), strict=True):
        assert torch.equal(buffer, expected)
    assert later.damping.at(0) == own.damping.at(0)
    assert later.counters == own.counters
    assert own.counters["rejected_steps"] == 2 * reject


@pytest.mark.parametrize(("full_batch", "weight"), [(True, 0.1), (True, 2.0), (False, 0.1)])
def test_the_policy_hears_at_once_of_more_than_twice_the_promise(
    full_batch: bool, weight: float
) -> None:
    """From small weights the slope of their product grows along the step; from large ones not."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(weight)
    damping = LevenbergMarquardt(1.0, omega=0.5, interval=5)
    own = trust_region(model, "squared-error", damping, full_batch=full_batch)
    x = torch.ones(1, 1)
    for _ in range(2):
        own.step(lambda: half_square(model(x), x))
    assert (own.readout.ratio > 2) == (weight < 1)
    assert own.damping.at(0) == (0.5**5 if full_batch and weight < 1 else 1.0)


@pytest.mark.slow
def test_it_costs_no_pass_but_that_which_shows_a_rejection() -> None:
    _, own, _, passes = trained(9)
    assert passes == 9 + 5  # the first step is judged, too
    assert own.counters["rejected_steps"] == 2
    _, own, _, passes = trained(9, full_batch=True)
    assert passes == 9 + 2
    assert own.counters["rejected_steps"] == 2


def test_a_verdict_is_told_once() -> None:
    """The first four are measured, and then every fourth."""
    model = fill(nn.Linear(3, 2))
    own = trust_region(model, "mse", LevenbergMarquardt(1.0, interval=4))
    x, y = randn(16, 3), randn(16, 2, seed=1)
    told = []
    for _ in range(10):
        own.step(lambda: F.mse_loss(model(x), y))
        told.append("change" in own.last)
    assert told == [*[True] * 4, *[False] * 3, True, False, False]


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
    assert [change is None for change in changes] == [True, False, False, False, False, False]
    for step in range(1, 6):
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


@pytest.mark.parametrize("fisher", ["type-2", "monte-carlo"])
def test_a_batch_that_is_not_finite_after_a_step_that_waits_loses_nothing(fisher: str) -> None:
    model = deep()
    damping = LevenbergMarquardt(1.0, interval=1)
    own = trust_region(model, "cross-entropy", damping, full_batch=True, fisher=fisher)
    x, y = classes_of(0)
    own.step(lambda: F.cross_entropy(model(x), y))
    own.step(lambda: F.cross_entropy(model(x * math.nan), y))
    assert vector(model).isfinite().all()
    assert own.counters == {"rejected_steps": 1, "skipped_steps": 1}
    losses = [float(own.step(lambda: F.cross_entropy(model(x), y))) for _ in range(15)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.slow
def test_a_step_that_waits_can_be_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the last step of a run brought, nobody else would ask."""
    monkeypatch.setattr(reduction, "MORE", math.inf)
    (model, own, *_), (other, later, *_) = trained(8), trained(8, full_batch=True)
    x, y = randn(8, 3), labels(8)
    assert not torch.equal(vector(other), vector(model))
    buffers = [buffer.clone() for buffer in other.buffers()]
    random = torch.get_rng_state()
    assert not later.settle(lambda: F.cross_entropy(other(x), y))
    assert later.settle(lambda: pytest.fail("nothing waits any more"))
    assert torch.equal(vector(other), vector(model))
    assert all(map(torch.equal, other.buffers(), buffers))
    assert torch.equal(torch.get_rng_state(), random)
    assert later.counters == own.counters
    assert later.damping.at(0) == own.damping.at(0)


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen meanwhile", "unfrozen meanwhile"])
def test_a_verdict_is_on_all_that_has_moved(frozen: bool) -> None:
    model = deep()
    own = trust_region(model, "cross-entropy", LevenbergMarquardt(1.0, interval=1), full_batch=True)
    x, y = classes_of(0)
    model[0].requires_grad_(frozen)
    before = vector(model)
    own.param_groups[0]["lr"] = 1e3
    own.step(lambda: F.cross_entropy(model(x), y))
    model[0].requires_grad_(not frozen)
    own.param_groups[0]["lr"] = 1e-9
    own.step(lambda: F.cross_entropy(model(x), y))
    assert own.counters["rejected_steps"] == 1
    compare(vector(model), before, "parameters", rtol=1e-6)
    own.settle(lambda: F.cross_entropy(model(x), y))
    assert not any("moved" in state for state in own.state.values())


def test_the_verdict_has_the_decay_of_its_step() -> None:
    model = deep()
    damping = LevenbergMarquardt(1.0, interval=1)
    own = trust_region(model, "cross-entropy", damping, full_batch=True, weight_decay=1e-3)
    x, y = classes_of(0)
    own.step(lambda: F.cross_entropy(model(x), y))
    own.param_groups[0]["weight_decay"] = 10.0
    own.step(lambda: F.cross_entropy(model(x), y))
    assert own.counters["rejected_steps"] == 0
    assert own.last["change"] < 0


class Counted(nn.Module):
    """Puts another tensor into its buffer, and has one that cannot be written to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("passes", torch.zeros((), dtype=torch.float64))
        self.register_buffer("ones", torch.ones(1, dtype=torch.float64).expand(3))

    def forward(self, x: Tensor) -> Tensor:
        self.passes = self.passes + 1
        return self.linear(x) * self.ones / self.passes.sqrt()


def test_buffers_that_are_replaced_are_put_back() -> None:
    model, own, _, _ = trained(6, lambda: fill(Counted()))
    other, later, _, _ = trained(6, lambda: fill(Counted()), full_batch=True)
    assert own.counters["rejected_steps"] > 0
    assert later.counters == own.counters
    assert other.passes == model.passes == 6
    assert torch.equal(vector(other), vector(model))


def test_a_pass_that_fails_leaves_no_step_waiting() -> None:
    model = deep()
    own = trust_region(model, "cross-entropy", LevenbergMarquardt(1.0, interval=1))
    x, y = classes_of(0)
    passes = 0

    def closure() -> Tensor:
        nonlocal passes
        passes += 1
        if passes == 2:
            raise KeyboardInterrupt
        return F.cross_entropy(model(x), y)

    own.param_groups[0]["lr"] = 1e3  # a verdict would undo it
    with pytest.raises(KeyboardInterrupt):
        own.step(closure)
    after = vector(model)
    own.param_groups[0]["lr"] = 1e-9
    own.step(closure)
    compare(vector(model), after, "parameters", rtol=1e-6)
    assert own.counters["rejected_steps"] == 0


@pytest.mark.parametrize(
    ("lr", "change", "rejected"),
    [(0.0, 1.0, 0), (2.5, 1 / 0.7, 1), (1.0, 0.7, 0)],
    ids=["no step", "a step that the model promises no good of", "the model's own"],
)
def test_a_step_without_a_promise_has_no_ratio_unless_it_does_harm(
    lr: float, change: float, rejected: int
) -> None:
    net, x, y = fill(nn.Sequential(nn.Linear(3, 2))), randn(8, 3), randn(8, 2, seed=1)
    own = trust_region(net, "squared-error", LevenbergMarquardt(1e-6, omega=0.7, interval=1))
    own.param_groups[0]["lr"] = lr
    own.step(lambda: half_square(net(x), y))
    assert own.damping.at(0) == pytest.approx(1e-6 * change)
    assert ("ratio" in own.last) == (lr != 0)
    assert own.counters["rejected_steps"] == rejected


@pytest.mark.parametrize("full_batch", [False, True])
def test_every_step_of_a_quadratic_brings_what_was_promised(full_batch: bool) -> None:
    """With momentum, decay, parts and steps that are too short; the damping all but zero."""
    net, x, y = fill(nn.Sequential(nn.Linear(3, 2))), randn(8, 3), randn(8, 2, seed=1)
    own = trust_region(
        net, "squared-error", Measured(1e-9), weight_decay=0.1, lr=0.5, full_batch=full_batch
    )
    for _ in range(6):
        own.step(lambda: half_square(net(x), y))
    own.settle(lambda: half_square(net(x), y))
    assert own.damping.ratios == pytest.approx([1.0] * 6, abs=1e-5)


def test_the_last_update_never_worsens_what_a_step_promises() -> None:
    model = deep()
    own = trust_region(model, "cross-entropy", 0.1)
    for step in range(6):
        x, y = classes_of(step)
        other = copy.deepcopy(model)
        without = trust_region(other, "cross-entropy", 0.1, momentum=False)
        without.load_state_dict(copy.deepcopy(own.state_dict()))
        without.step(lambda x=x, y=y, other=other: F.cross_entropy(other(x), y))
        own.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
        gain = without.last["predicted"] - own.last["predicted"]
        assert gain >= -1e-12
        assert step == 0 or gain > 1e-6
