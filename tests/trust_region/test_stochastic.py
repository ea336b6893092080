"""Adam with lengths from an averaged exact model: dense steps, verdicts, resume, ranks."""

from __future__ import annotations

import copy
import io
import math
from dataclasses import asdict
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import soframe
from soframe.trust_region import ConstantDamping, LevenbergMarquardt, Quadratic, trend
from soframe.trust_region.trend import KEEP, AveragedModel
from tests.curvature import fill, half_square, randn
from tests.distributed.harness import RankFailure, run_ranks
from tests.trust_region.dense import affine_net, regression
from tests.trust_region.kit import classes_of, closures, deep, fisher, gradient, vector

DAMPING = 0.3
BETAS = (0.9, 0.99)
EPS = 1e-8
MODELS = [0, 1, 2, 3, 4, 7, 10]  # with one at every third step


@given(st.integers(1, 6), st.integers(0, 2**16), st.floats(1e-6, 1e3))
def test_the_averaged_model_is_the_dense_mean(count: int, seed: int, damping: float) -> None:
    """Of whole quadratic functions in eight parameters, weighed and added up."""
    own, size = AveragedModel(), 8
    roots, gradients, ways = (randn(count, size, size, seed=seed + n) for n in range(3))
    weights = torch.tensor([KEEP**age for age in reversed(range(count))], dtype=torch.float64)
    weights /= weights.sum()
    curvatures = roots @ roots.transpose(1, 2)
    gradients, ways = gradients[:, 0], ways[:, 0]
    for f, g, d in zip(curvatures, gradients, ways, strict=True):
        numbers = [(d @ f @ d).view(1, 1), (g @ d).view(1), (d @ d).view(1, 1)]
        own.learn(Quadratic(*numbers))

    def mean(length: float) -> float:
        moved = length * ways
        bent = curvatures + damping * torch.eye(size, dtype=torch.float64)
        each = (gradients * moved).sum(1) + torch.einsum("ni,nij,nj->n", moved, bent, moved) / 2
        return float(weights @ each)

    best = own.minimum(damping)
    # A parabola is lowest midway between two points of equal height.
    step = 0.5 + abs(best)
    rise = mean(best + step) - mean(best - step)
    assert abs(rise) < 1e-9 * (mean(best + step) - mean(best))
    other = AveragedModel(**asdict(own))
    assert other.minimum(damping) == best


def test_negative_curvature_counts_as_none() -> None:
    own = AveragedModel()
    assert own.minimum(1.0) == 0.0
    one = torch.ones(1, 1, dtype=torch.float64)
    own.learn(Quadratic(-3 * one, -2 * one[0], one))
    assert own.minimum(0.5) == pytest.approx(4.0)


CASES: dict[str, tuple[dict[str, Any], list[float], list[float]]] = {
    "plain": ({}, [1.0] * 3, [0.0] * 3),
    "decay": ({"weight_decay": 0.1, "lr": 1.0}, [1.0] * 3, [0.1] * 3),
    "groups": ({}, [0.5, 1.0, 0.25], [0.2, 0.0, 0.1]),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_are_the_dense_ones(case: str) -> None:
    settings, lrs, decays = CASES[case]
    net = affine_net()
    largest = settings.get("lr", 0.7)
    if case == "groups":
        pairs = zip(net, lrs, decays, strict=True)
        made = [{"params": m.parameters(), "lr": a, "weight_decay": b} for m, a, b in pairs]
        settings, largest = {"params": made}, 1.0
    own = soframe.StochasticTrustRegion(
        net, damping=ConstantDamping(DAMPING), model_every=3, averaging=4.0, **settings
    )
    sizes = [12, 8, 4]
    share, decay = (
        torch.cat([torch.full((n,), x).double() for n, x in zip(sizes, values, strict=True)])
        for values in (lrs, decays)
    )
    theta, average = vector(net), torch.zeros(24, dtype=torch.float64)
    mean, square = torch.zeros_like(theta), torch.zeros_like(theta)
    slopes, bends = [], []
    for step in range(12):
        batches = regression(step)
        g = gradient(net, batches, half_square) + decay * theta
        mean, square = BETAS[0] * mean + 0.1 * g, BETAS[1] * square + 0.01 * g * g
        root = (square / (1 - BETAS[1] ** (step + 1))).sqrt() + EPS
        d = -share * mean / (1 - BETAS[0] ** (step + 1)) / root
        if step in MODELS:
            damped = fisher(net, batches, half_square) + torch.diag(decay + DAMPING)
            slopes.append(float(g @ d))
            bends.append(float(d @ damped @ d))
        weights = [KEEP**age for age in reversed(range(len(slopes)))]
        length = -sum(map(float.__mul__, weights, slopes)) / sum(map(float.__mul__, weights, bends))
        theta = theta + largest * length * d
        assert own.step(closures(net, batches, half_square)).item() > 0
        assert own.readout is not None
        assert ("without a model" in own.readout.notes) == (step not in MODELS)
        assert own.readout.coefficients == pytest.approx((largest * length,), rel=1e-6)
        torch.testing.assert_close(vector(net), theta, rtol=1e-6, atol=1e-9)
        average = average + 5.0 / (step + 5.0) * (theta - average)
        with own.averaged():
            torch.testing.assert_close(vector(net), average, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close(vector(net), theta, rtol=1e-6, atol=1e-9)


def test_a_step_without_a_model_runs_the_closure_once() -> None:
    model, runs = deep(), 0
    (closure,) = closures(model, [classes_of(0)], F.cross_entropy)

    def counted() -> Tensor:
        nonlocal runs
        runs += 1
        return closure()

    own = soframe.StochasticTrustRegion(model, model_every=4)
    each = []
    for _ in range(12):
        before = runs
        own.step(counted)
        each.append(runs - before)
    assert each[1:] == [2, 2, 2, 2, 1, 1, 1, 2, 1, 1, 1]  # once more for a verdict
    assert each[0] > 2  # dampings are tried
    assert own.damping.at(0) < LevenbergMarquardt().at(0)


OFTEN = {"APART": 3, "LEAST": 2, "MOST": 3}
"""Of `soframe.trust_region.trend`: verdicts in short runs."""


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OFTEN.items():
        monkeypatch.setattr(trend, name, value)


@pytest.mark.parametrize("shorten", [True, False])
def test_steps_are_shorter_where_the_average_gets_no_better(
    shorten: bool, often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing shows, so that the third difference has the verdict."""
    monkeypatch.setattr(trend, "ERRORS", math.inf)
    (closure,) = closures(deep(), [classes_of(0, 32)], F.cross_entropy)
    lengths: dict[bool, list[float]] = {}
    for judged in (False, shorten):
        model = deep()
        (closure,) = closures(model, [classes_of(0, 32)], F.cross_entropy)
        own = soframe.StochasticTrustRegion(model, damping=0.3, model_every=2, shorten=judged)
        lengths[judged], told = [], []
        for step in range(26):
            own.step(closure)
            assert own.readout is not None
            lengths[judged] += own.readout.coefficients
            told += [step for note in own.readout.notes if note == trend.SAID]
        assert told == ([18] if judged else [])  # the first average is of step 6, then 10, 14, 18
    assert lengths[shorten][:18] == lengths[False][:18]
    assert (lengths[shorten][18] == pytest.approx(trend.STALLED * lengths[False][18])) == shorten


def test_differences_are_of_two_averages_on_a_batch_before_its_step(
    often: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And of the objective, in which a constant of the batch cancels."""
    learned: list[tuple[float, float]] = []
    monkeypatch.setattr(
        trend.Trend, "learn", lambda _, now, earlier, eps: learned.append((now, earlier))
    )
    model, decay = deep(), 0.2
    own = soframe.StochasticTrustRegion(model, model_every=2, weight_decay=decay)
    averages: list[Tensor] = []
    expected = []
    for step in range(17):
        (closure,) = closures(model, [classes_of(step)], F.cross_entropy)
        if step in (6, 10, 14):
            with own.averaged():
                averages.append(vector(model).clone())
        if step in (10, 14):
            other = deep()
            pair = []
            for average in (averages[-1], averages[-2]):
                nn.utils.vector_to_parameters(average, other.parameters())
                (loss,) = closures(other, [classes_of(step)], F.cross_entropy)
                pair.append(loss().item() + decay / 2 * average.square().sum().item())
            expected.append(tuple(pair))
        own.step(closure)
    assert learned == [pytest.approx(pair, rel=1e-12) for pair in expected]


@pytest.mark.slow
def test_batches_that_can_be_fitted_by_themselves_ruin_nothing() -> None:
    """Rows of embeddings: each step's own batch is content with it, however long it is."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(n, 4, generator=generator).double() for n in (40, 30))
    pairs = torch.cartesian_prod(torch.arange(40), torch.arange(30))
    y = (left[pairs[:, 0]] * right[pairs[:, 1]]).sum(1)
    worst = {}
    for shorten in (True, False):
        model = Product().double()
        for table, seed in zip(model.tables, (1, 2), strict=True):
            table.weight.data.copy_(0.3 * randn(*table.weight.shape, seed=seed))
        own = soframe.StochasticTrustRegion(model, shorten=shorten)
        for step in range(700):
            part = torch.randperm(1200, generator=torch.Generator().manual_seed(step))[:64]
            x, target = pairs[part], y[part]
            own.step(lambda m=model, x=x, target=target: F.mse_loss(m(x), target))
            if step >= 500 and step % 50 == 49:
                with own.averaged(), torch.no_grad():
                    loss = float(F.mse_loss(model(pairs), y))
                worst[shorten] = max(loss, worst.get(shorten, 0.0))
    assert worst[True] < 0.2
    assert worst[False] > 1.0


class Product(nn.Module):
    """Inner products of rows of two tables."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(40, 4), nn.Embedding(30, 4)])

    def forward(self, pairs: Tensor) -> Tensor:
        left, right = (t(i) for t, i in zip(self.tables, pairs.unbind(1), strict=True))
        return (left * right).sum(1)


def test_a_step_that_does_harm_is_undone_to_the_bit() -> None:
    model = deep()
    damping = LevenbergMarquardt(1e-2)
    own = soframe.StochasticTrustRegion(model, damping=damping, model_every=7)
    (closure,) = closures(model, [classes_of(0, 32)], F.cross_entropy)
    for step in range(11):
        before, was = vector(model), own.damping.at(0)
        own.param_groups[0]["lr"] = 100.0 if step == 4 else 0.5
        own.step(closure)
        assert own.readout is not None
        undone = own.readout.undone == "the objective rose"
        assert undone == (step == 4)
        assert torch.equal(vector(model), before) == undone
        if undone:
            assert own.damping.at(0) > was
            assert own.readout.ratio is not None
            assert own.readout.ratio < 0
        # The step after an undone one has a model.
        assert ("without a model" in own.readout.notes) == (step in range(6, 12))
    assert own.counters == {"rejected_steps": 1, "skipped_steps": 0}


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_what_is_not_finite_goes_back_to_the_average(what: str) -> None:
    model = deep()
    own = soframe.StochasticTrustRegion(model, damping=1.0)
    (closure,) = closures(model, [classes_of(0, 32)], F.cross_entropy)
    for _ in range(8):
        own.step(closure)
    with own.averaged():
        expected = vector(model)
    kept = copy.deepcopy([dict(state) for state in own.state.values()])
    assert not torch.equal(vector(model), expected)
    bad = {
        "loss": lambda: closure() * math.nan,
        # The root has an infinite slope at zero.
        "gradient": lambda: closure() + 0 * (model(torch.zeros(1, 3).double()) * 0).sum().sqrt(),
    }[what]
    own.step(bad)
    assert own.readout is not None
    assert own.readout.undone == "the loss or its gradient is not finite"
    assert torch.equal(vector(model), expected)
    for state, before in zip(own.state.values(), kept, strict=True):
        assert all(torch.equal(state[name], before[name]) for name in before)
    assert own.counters["skipped_steps"] == 1
    before = closure().item()
    own.step(closure)
    assert "without a model" not in own.readout.notes
    assert closure().item() < before


def test_the_average_is_for_evaluation_alone() -> None:
    model = deep()
    own = soframe.StochasticTrustRegion(model)
    (closure,) = closures(model, [classes_of(0)], F.cross_entropy)
    with own.averaged():  # nothing is averaged yet
        pass
    own.step(closure)
    with own.averaged():
        for attempt in (lambda: own.step(closure), own.state_dict, own.averaged().__enter__):
            with pytest.raises(RuntimeError, match="averaged"):
                attempt()
    own.step(closure)
    iterate = vector(model)
    with own.averaged():
        assert not torch.equal(vector(model), iterate)
    assert torch.equal(vector(model), iterate)
    with pytest.raises(ZeroDivisionError), own.averaged():
        raise ZeroDivisionError
    assert torch.equal(vector(model), iterate)
    own.step(closure)


def test_the_average_is_seen_within_autocast() -> None:
    """Within one context torch casts each parameter once, whatever becomes of it."""
    model = deep().float()
    own = soframe.StochasticTrustRegion(model)
    x, y = classes_of(0)
    for _ in range(3):
        own.step(lambda: F.cross_entropy(model(x.float()), y))
    with torch.autocast("cpu", torch.bfloat16):
        before = model(x.float())
        with own.averaged():
            averaged = model(x.float())
        after = model(x.float())
    assert torch.equal(before, after)
    assert not torch.equal(before, averaged)


def test_the_average_is_there_where_parameters_are_frozen_for_evaluation() -> None:
    model = deep()
    own = soframe.StochasticTrustRegion(model)
    (closure,) = closures(model, [classes_of(0)], F.cross_entropy)
    for _ in range(3):
        own.step(closure)
    iterate = vector(model)
    with own.averaged():
        average = vector(model)
    model.requires_grad_(False)
    with own.averaged():
        assert torch.equal(vector(model), average)
        model.requires_grad_(True)  # whatever becomes of that, the iterates come back
    assert torch.equal(vector(model), iterate)
    assert not torch.equal(average, iterate)


def test_any_loss_will_do() -> None:
    """A mean and a log-variance, whose Hessian depends on the targets, and may be indefinite."""
    model = fill(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2)))
    x = randn(64, 1)
    y = torch.sin(3 * x) + 0.1 * randn(64, 1, seed=1)

    def closure() -> Tensor:
        mean, log = model(x).split(1, 1)
        return (log / 2 + (y - mean).square() * (-log).exp() / 2).mean()

    own = soframe.StochasticTrustRegion(model)
    before = closure().item()
    for _ in range(60):
        own.step(closure)
    with own.averaged():
        assert closure().item() < before - 0.5


def save(model: nn.Module, own: soframe.StochasticTrustRegion) -> bytes:
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": own.state_dict()}, file)
    return file.getvalue()


def train(
    model: nn.Module,
    own: soframe.StochasticTrustRegion,
    steps: range,
    part: slice = slice(None),
) -> list[bytes]:
    saved = []
    for step in steps:
        saved.append(save(model, own))
        x, y = (tensor[part] for tensor in classes_of(step % 11, 24))
        own.param_groups[0]["lr"] = 100.0 if step == 3 else 0.5  # so that one is undone
        own.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
    return saved


LONG = 46
"""Steps of a run in which lengths become shorter, and then longer."""


def same(own: soframe.StochasticTrustRegion, other: soframe.StochasticTrustRegion) -> bool:
    """Whether two runs are at the same point, to the bit."""
    iterates = [[p for group in one.param_groups for p in group["params"]] for one in (own, other)]
    mine, theirs = own.state_dict(), other.state_dict()
    return all(map(torch.equal, *iterates)) and mine["trust_region"] == theirs["trust_region"]


def made(model: nn.Module) -> soframe.StochasticTrustRegion:
    return soframe.StochasticTrustRegion(model, model_every=3, weight_decay=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("often")
def test_training_goes_on_bit_by_bit_from_every_step() -> None:
    whole = deep()
    first = made(whole)
    saved = train(whole, first, range(LONG))
    assert first.counters["rejected_steps"] > 0
    assert len({_share(state) for state in saved}) > 3
    for step in (3, 25, 40):
        model = fill(deep(), seed=1)
        own = made(model)
        everything = torch.load(io.BytesIO(saved[step]), weights_only=True)
        model.load_state_dict(everything["model"])
        own.load_state_dict(everything["optimizer"])
        train(model, own, range(step, LONG))
        assert same(own, first), f"from step {step}"


def _share(saved: bytes) -> float:
    everything = torch.load(io.BytesIO(saved), weights_only=True)
    share: float = everything["optimizer"]["trust_region"]["trend"]["share"]
    return share


@pytest.mark.slow
@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("shorten", [True, False])
def test_a_run_goes_on_with_verdicts_or_without(shorten: bool) -> None:
    """What was saved by the other kind of run."""
    model = deep()
    before = soframe.StochasticTrustRegion(model, model_every=3, shorten=not shorten)
    train(model, before, range(24))
    own = soframe.StochasticTrustRegion(model, model_every=3, shorten=shorten)
    own.load_state_dict(before.state_dict())
    for state in own.state.values():
        assert ("earlier" in state) == shorten
        if shorten:
            assert torch.equal(state["earlier"], state["average"])
    train(model, own, range(24, LONG))
    assert (own.state_dict()["trust_region"]["trend"]["at"] >= 24) == shorten


def test_a_state_is_what_was_saved_whatever_goes_on() -> None:
    """Neither its own optimizer nor others that go on from it change it, or each other."""
    model = deep()
    own = made(model)
    train(model, own, range(3))
    state, weights = own.state_dict(), copy.deepcopy(model.state_dict())
    others = []
    for _ in range(2):
        other = deep()
        other.load_state_dict(weights)
        others.append((other, made(other)))
        others[-1][1].load_state_dict(state)
        train(*others[-1], range(3, 5))
    train(model, own, range(3, 7))
    train(*others[0], range(5, 7))
    model.load_state_dict(weights)
    own.load_state_dict(state)
    train(model, own, range(3, 7))
    assert same(own, others[0][1])


def damaged() -> dict[str, tuple[Any, str]]:
    def without(*path: str) -> Any:
        def change(state: Any) -> None:
            for key in path[:-1]:
                state = state[key]
            del state[path[-1]]

        return change

    def older(state: Any) -> None:
        state["trust_region"]["version"] = 7

    return {
        "another optimizer's": (without("trust_region"), "not the state of"),
        "truncated": (without("trust_region", "model"), "lacks .'model'"),
        "version": (older, "it has 7"),
        "without a trend": (without("trust_region", "trend"), "lacks .'trend'"),
    }


@pytest.mark.parametrize("case", damaged())
def test_a_damaged_state_changes_nothing(case: str) -> None:
    change, said = damaged()[case]
    model = deep()
    own = made(model)
    train(model, own, range(4))
    before, kept = vector(model), copy.deepcopy(own.state_dict())
    state = copy.deepcopy(own.state_dict())
    change(state)
    with pytest.raises(ValueError, match=said):
        own.load_state_dict(state)
    assert torch.equal(vector(model), before)
    assert own.state_dict()["trust_region"] == kept["trust_region"]


def test_a_state_of_another_model_or_policy() -> None:
    model = deep()
    own = made(model)
    train(model, own, range(2))
    with pytest.raises(ValueError, match="another model: parameter 0"):
        made(deep(inputs=4)).load_state_dict(own.state_dict())
    constant = soframe.StochasticTrustRegion(deep(), damping=1.0)
    with pytest.raises(ValueError, match="another damping policy"):
        constant.load_state_dict(own.state_dict())


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "averaging": ({"averaging": -1.0}, ValueError, "averaging must not be"),
    "lr": ({"lr": 0.0}, ValueError, "lr must be positive"),
    "damping": ({"damping": "relative"}, ValueError, "one damping for the whole model"),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_averages_need_single_precision(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"would soon stand still.* under torch.autocast"):
        soframe.StochasticTrustRegion(deep().to(dtype))


@pytest.mark.parametrize("case", REFUSED)
def test_settings_out_of_range(case: str) -> None:
    settings, kind, said = REFUSED[case]
    with pytest.raises(kind, match=said):
        soframe.StochasticTrustRegion(deep(), **settings)


def test_readouts_and_frozen_parameters() -> None:
    seen: list[soframe.trust_region.Readout] = []
    model = deep()
    own = soframe.StochasticTrustRegion(model, on_step=seen.append, model_every=3)
    (closure,) = closures(model, [classes_of(0)], F.cross_entropy)
    for step in range(8):
        model[0].weight.requires_grad_(step != 6)
        frozen = model[0].weight.detach().clone()
        own.step(closure)
        assert torch.equal(model[0].weight, frozen) == (step == 6)
    assert [one.step for one in seen] == [*range(8)]
    assert seen[0].predicted is not None
    assert seen[0].ratio is not None
    model.add_module("more", nn.Linear(3, 3).double())
    own.step(closure)
    own.step(closure)  # neither has a model
    with pytest.raises(ValueError, match="is in no param group"):
        own.step(closure)
    own.close()


def on_ranks(rank: int, ranks: int) -> tuple[bytes, Tensor, dict[str, int]]:
    model = deep()
    wrapped = DistributedDataParallel(model)
    own = made(wrapped)
    part = slice(rank * 24 // ranks, (rank + 1) * 24 // ranks)
    vars(trend).update(OFTEN)
    train(wrapped, own, range(LONG), part)
    with own.averaged():
        averages = vector(model)
    return vector(model).numpy().tobytes(), averages, own.counters


@pytest.mark.distributed
@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.thorough)])
def test_ranks_are_one_process(ranks: int) -> None:
    model = deep()
    own = made(model)
    train(model, own, range(LONG))
    found = run_ranks(on_ranks, ranks)
    assert len({iterates for iterates, _, _ in found}) == 1
    with own.averaged():
        for _, averages, counters in found:
            torch.testing.assert_close(averages, vector(model), rtol=1e-7, atol=1e-9)
            assert counters == own.counters


def in_legs(
    rank: int, ranks: int, steps: range, saved: bytes | None
) -> tuple[bytes, Tensor, dict[str, int]]:
    """Train on this rank's rows, in two micro-batches, perhaps from what others have saved."""
    vars(trend).update(OFTEN)
    model = deep()
    wrapped = DistributedDataParallel(model)
    own = made(wrapped)
    if saved is not None:
        everything = torch.load(io.BytesIO(saved), weights_only=True)
        model.load_state_dict(everything["model"])
        own.load_state_dict(everything["optimizer"])
    for step in steps:
        x, y = classes_of(step % 11, 24)
        mine = range(rank * 24 // ranks, (rank + 1) * 24 // ranks)
        halves = [slice(mine.start, mine.stop, 2), slice(mine.start + 1, mine.stop, 2)]
        own.param_groups[0]["lr"] = 100.0 if step == 3 else 0.5  # so that one is undone
        own.step([lambda h=h: F.cross_entropy(wrapped(x[h]), y[h]) / 2 for h in halves])  # noqa: B023
    return save(model, own), vector(model), own.counters


@pytest.mark.distributed
@pytest.mark.usefixtures("often")
@pytest.mark.thorough
def test_four_ranks_in_micro_batches_and_then_two_are_one_process() -> None:
    model = deep()
    own = made(model)
    train(model, own, range(LONG))
    saved = run_ranks(in_legs, 4, range(25), None)[-1][0]
    for _, iterates, counters in run_ranks(in_legs, 2, range(25, LONG), saved):
        torch.testing.assert_close(iterates, vector(model), rtol=1e-7, atol=1e-9)
        assert counters == own.counters


def alone_on_each(rank: int, ranks: int, kind: str) -> None:
    """Each rank has gradients of its own: nobody averages them."""
    model = deep()
    x, y = classes_of(rank)
    own: torch.optim.Optimizer
    if kind == "stochastic":
        own = soframe.StochasticTrustRegion(model, damping=0.1, reject=False)
    else:
        own = soframe.TrustRegion(
            model, "cross-entropy", damping=0.1, preconditioner_damping=1.0, reject=False
        )
    own.step(lambda: F.cross_entropy(model(x), y))


@pytest.mark.distributed
@pytest.mark.parametrize("kind", ["stochastic", "trust region"])
def test_gradients_that_nobody_averages_are_told(kind: str) -> None:
    for failure in run_ranks(alone_on_each, 2, kind, check=False):
        assert isinstance(failure, RankFailure)
        assert "bits of all gradients" in failure.summary
        assert "wrap the model in DistributedDataParallel" in failure.summary


def with_a_schedule(rank: int, ranks: int) -> None:
    def damping(step: int) -> float:
        if rank == 1 and step == 1:
            raise ZeroDivisionError("no damping")
        return 0.1

    wrapped = DistributedDataParallel(deep())
    own = soframe.StochasticTrustRegion(wrapped, damping=damping)
    x, y = classes_of(rank)
    for _ in range(2):
        own.step(lambda: F.cross_entropy(wrapped(x), y))


@pytest.mark.distributed
def test_a_damping_that_raises_on_one_rank_is_told_on_all() -> None:
    first, second = run_ranks(with_a_schedule, 2, check=False)
    assert "ZeroDivisionError" in second.summary
    assert "no damping" in first.summary


def differ(rank: int, ranks: int) -> list[str]:
    said = []
    for what in ("setting", "lr", "verdict"):
        model = deep()
        wrapped = DistributedDataParallel(model)
        settings = {"model_every": 4} if what == "setting" and rank == 1 else {}
        damping = LevenbergMarquardt(1.0)
        own = soframe.StochasticTrustRegion(wrapped, damping=damping, **settings)
        x, y = classes_of(rank)
        for step in range(2):
            if what == "lr" and step == 1 and rank == 1:
                own.param_groups[0]["lr"] = 0.25
            runs = 0

            def closure() -> Tensor:
                nonlocal runs
                runs += 1
                if runs == 2 and rank == 1 and what == "verdict":  # noqa: B023
                    raise ZeroDivisionError("no second run")
                return F.cross_entropy(wrapped(x), y)  # noqa: B023

            try:
                own.step(closure)
            except (ValueError, RuntimeError, ZeroDivisionError) as error:
                said.append(f"{step}: {type(error).__name__}: {error}")
                break
    return said


@pytest.mark.distributed
def test_ranks_that_differ_are_told_on_all() -> None:
    first, second = run_ranks(differ, 2)
    for own in (first, second):
        assert "0: ValueError" in own[0]
        assert "settings" in own[0]
        assert "1: ValueError" in own[1]
        assert "lr and weight_decay" in own[1]
    assert "ZeroDivisionError" in second[2]
    assert "rank 1" in first[2]
