"""No run is ruined and none stands still: what is judged, believed, begun with and said."""

import copy
import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import soframe
from soframe.losses import SumLoss, Term
from soframe.losses.base import Loss
from soframe.testing import compare
from soframe.trust_region import (
    AdaptiveDamping,
    ConstantDamping,
    History,
    LevenbergMarquardt,
    Quadratic,
    Scalars,
)
from tests.curvature import fill, half_square, randn
from tests.distributed.harness import run_ranks
from tests.trust_region.kit import classes_of, deep, labels, trust_region, vector

# -- every step is judged --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("full_batch", "step", "judged"),
    [(True, 1, True), (True, 7, True), (False, 1, True), (False, 7, False)],
)
def test_a_step_that_does_harm_is_undone_whenever_its_loss_is_known(
    full_batch: bool, step: int, judged: bool
) -> None:
    """Steps 4 and 9 are those at which the policy wants a ratio."""
    model = deep()
    damping = LevenbergMarquardt(1.0, interval=5)
    own = trust_region(
        model, "cross-entropy", damping, full_batch=full_batch, max_increase=None, weight_decay=1e-4
    )
    x, y = classes_of(0)
    for number in range(step + 1):
        before = vector(model)
        own.param_groups[0]["lr"] = 300.0 if number == step else 1.0
        own.step(lambda: F.cross_entropy(model(x), y))
    own.settle(lambda: F.cross_entropy(model(x), y))
    assert own.counters["rejected_steps"] == judged
    assert torch.equal(vector(model), before) == judged


def test_the_policy_hears_of_ratios_at_its_interval_and_of_harm_at_once() -> None:
    model = deep()
    own = trust_region(
        model, "cross-entropy", LevenbergMarquardt(1.0, omega=0.5, interval=3), full_batch=True
    )
    x, y = classes_of(0)
    found = []
    for step in range(6):
        own.param_groups[0]["lr"] = 300.0 if step == 3 else 1.0
        own.step(lambda: F.cross_entropy(model(x), y))
        assert step == 0 or own.last["ratio"] > 0.75 or step == 4
        found.append(own.damping.at(0))
    assert found == [1.0, 1.0, 1.0, 0.125, 1.0, 1.0]


# -- a promise that cannot be kept ------------------------------------------------------------


def saturated(**settings: Any) -> tuple[nn.Module, soframe.TrustRegion, Any]:
    """A classifier that is sure and wrong: curvature has vanished, the slope has not."""
    x, y = 30 * randn(16, 3), labels(16)
    model = fill(nn.Sequential(nn.Linear(3, 3)))
    with torch.no_grad():
        model[0].weight.mul_(3)
    damping = settings.pop("damping", LevenbergMarquardt(1e-6, interval=1))
    own = trust_region(model, "cross-entropy", damping, full_batch=True, layer_groups=1, **settings)
    return model, own, lambda: F.cross_entropy(model(x), y)


@pytest.mark.slow
def test_nothing_is_promised_below_the_floor_of_the_loss() -> None:
    _, own, closure = saturated()
    loss = float(own.step(closure))
    # The floor of the loss is 0; a promise that is cut to it is a sum of products, which rounds.
    assert -own.last["loss"] * (1 + 1e-9) <= own.last["predicted"] < 0
    assert own.last["damping"] > 1e-5
    assert own.readout is not None
    assert "the model promised more than the loss can fall" in own.readout.notes
    for _ in range(15):
        own.step(closure)
    own.settle(closure)
    assert closure().item() < 0.5 * loss


def test_a_damping_that_cannot_rise_shortens_the_step() -> None:
    _, own, closure = saturated(damping=ConstantDamping(1e-6))
    own.step(closure)
    assert own.last["predicted"] == pytest.approx(-own.last["loss"], rel=1e-9)


def test_a_loss_below_its_floor_or_without_one_is_believed() -> None:
    _model, own, closure = saturated()
    plain = closure().item()
    own.step(lambda: closure() - 2 * plain)
    assert own.last["predicted"] < -2 * plain
    assert own.last["damping"] == 1e-6


@pytest.mark.parametrize("most", [0.1, 1.0])
def test_a_shortened_step_promises_just_that(most: float) -> None:
    a = randn(3, 3)
    own = Quadratic(a @ a.T, randn(3, seed=1))
    whole = own.minimise()
    most *= -own.change(whole)
    short = own.shortened(whole, most)
    assert own.change(short) == pytest.approx(-most)
    assert float(short @ whole) > 0
    assert float(short.norm()) <= float(whole.norm()) * (1 + 1e-6)


class Floorless(Loss):
    """Of which nothing is known but its Hessian."""

    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        return vectors

    def half_factor(self, outputs: Tensor) -> Any:
        yield outputs


def test_floors_of_losses() -> None:
    known = SumLoss([Term("cross-entropy", output=0), Term("mse", output=1, weight=3.0)])
    assert known.floor == 0.0
    assert SumLoss([Term("squared-error", output=0), Term(Floorless(), output=1)]).floor is None
    assert Floorless().floor is None
    for name in ("cross-entropy", "binary-cross-entropy", "mse", "squared-error"):
        assert soframe.available("loss")[name]().floor == 0.0


def steps(own: soframe.TrustRegion, closure: Any, count: int) -> None:
    for _ in range(count):
        own.step(closure)


# -- standing still ---------------------------------------------------------------------------


def single(high: float) -> tuple[nn.Module, soframe.TrustRegion, Any]:
    """In single precision, at a damping so high that no step shows in the loss."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).float()
    x, y = randn(16, 3).float(), randn(16, 3, seed=1).float()
    damping = LevenbergMarquardt(high, omega=0.5, interval=5, high=high)
    own = soframe.TrustRegion(model, "squared-error", damping=damping, full_batch=True)
    return model, own, lambda: half_square(model(x), y)


@pytest.mark.slow
def test_changes_below_rounding_let_the_damping_fall() -> None:
    _, own, closure = single(1e9)
    first = float(own.step(closure))
    own.step(closure)
    assert own.readout is not None
    assert own.readout.ratio is None
    assert own.readout.notes[0] == "the change was below the loss's rounding"
    for _ in range(40):
        own.step(closure)
    assert own.damping.at(0) < 1.0
    assert closure().item() < 0.7 * first


@pytest.mark.slow
def test_a_run_that_has_converged_says_so_once() -> None:
    model = nn.Sequential(nn.Linear(3, 1)).float()
    x = randn(16, 3).float()
    y = x.sum(1, keepdim=True) + 1
    own = soframe.TrustRegion(model, "squared-error", full_batch=True, weight_decay=0.1)
    with pytest.warns(UserWarning, match="the last 20 steps of TrustRegion that were judged") as w:
        steps(own, lambda: half_square(model(x), y), 80)
    assert [one.filename for one in w] == [__file__]


@pytest.mark.slow
def test_a_damping_at_its_cap_is_said_once() -> None:
    """A loss that rises by itself, whatever the step."""
    model = deep()
    damping = LevenbergMarquardt(1.0, high=10.0)
    own = trust_region(model, "squared-error", damping, full_batch=True)
    x, runs = randn(8, 3), 0

    def closure() -> Tensor:
        nonlocal runs
        runs += 1
        return half_square(model(x), x) + runs

    with pytest.warns(UserWarning, match="damping of TrustRegion is at its cap") as warned:
        steps(own, closure, 12)
    assert len(warned) == 1
    assert own.readout is not None
    assert own.readout.undone == "the objective rose"
    assert "the damping is at its cap" in own.readout.notes


# -- how it begins ----------------------------------------------------------------------------


def scaled(factor: float, damping: LevenbergMarquardt, **settings: Any) -> Any:
    """A loss of another scale, so that no constant suits all."""
    model, (x, y) = deep(), (randn(16, 3), randn(16, 3, seed=1))
    loss = soframe.losses.SquaredError(precision=factor)
    own = trust_region(
        model,
        loss,
        damping,
        solver="inverse",
        preconditioner_damping=AdaptiveDamping(interval=100, longest=100),
        **settings,
    )
    return model, own, lambda: factor * half_square(model(x), y)


def fall(factor: float, damping: float) -> float:
    """What a first step with a damping brings, without a trial of others."""
    _, own, closure = scaled(factor, LevenbergMarquardt(damping, interval=1), reject=False)
    own._damping_within._due = 1
    own.step(closure)
    return -own.last["change"]


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
def test_the_first_damping_is_the_one_that_brings_most(factor: float) -> None:
    _model, own, closure = scaled(factor, LevenbergMarquardt(omega=0.99, interval=10))
    own.step(closure)
    found = own.last["damping"]
    steps = math.log10(found / 3.0)
    assert steps == pytest.approx(round(steps), abs=1e-6)
    assert not fall(factor, found / 10) > 2 * max(0.0, fall(factor, found)) or found > 3
    if found < 3:
        assert fall(factor, found) > 2 * fall(factor, found * 10)
    if factor == 1e-3:
        assert found < 0.1  # a constant of 3 would hardly move


def test_the_search_leaves_no_trace_but_the_damping() -> None:
    model, own, closure = scaled(1e-3, LevenbergMarquardt(interval=10))
    random = torch.get_rng_state()
    own.step(closure)
    assert torch.equal(torch.get_rng_state(), random)
    other, fixed, same = scaled(1e-3, LevenbergMarquardt(own.last["damping"], interval=10))
    fixed.step(same)
    compare(vector(model), vector(other), "parameters")
    assert fixed.last["predicted"] == pytest.approx(own.last["predicted"])


def test_a_resumed_run_does_not_search_again() -> None:
    model, own, closure = scaled(1e-3, LevenbergMarquardt(interval=10))
    own.step(closure)
    again, later, same = scaled(1e-3, LevenbergMarquardt(interval=10))
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    later.load_state_dict(copy.deepcopy(own.state_dict()))
    own.step(closure)
    later.step(same)
    assert torch.equal(vector(again), vector(model))
    assert later.last["damping"] == own.last["damping"]


def test_a_policy_that_is_reused_begins_anew() -> None:
    x, y = classes_of(0)
    policy, adaptive = LevenbergMarquardt(1.0, interval=1), AdaptiveDamping(interval=1)
    firsts = []
    for _ in range(2):
        model = deep()
        own = trust_region(
            model, "cross-entropy", policy, preconditioner_damping=adaptive, solver="inverse"
        )
        losses = [float(own.step(lambda m=model: F.cross_entropy(m(x), y))) for _ in range(4)]
        firsts.append((losses, own.damping.at(0), own._damping_within.at(0.0)))
        own.close()
    assert firsts[0] == firsts[1]
    assert firsts[0][1] != 1.0
    assert policy.at(0) == 1.0
    assert adaptive.at(7.0) == [7.0]


# -- outputs that are made of others ----------------------------------------------------------


class Chained(nn.Module):
    """Its second output is made of its first, or of a first of its own."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first, self.second, self.again = nn.Linear(3, 4), nn.Linear(4, 2), again

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.first(x).tanh()
        return hidden, self.second(self.first(x).tanh() if self.again else hidden)


def test_an_output_may_be_made_of_another() -> None:
    found = []
    x, y, z = randn(8, 3), randn(8, 4, seed=1), randn(8, 2, seed=2)
    for again in (False, True):
        model = fill(Chained(again))
        loss = SumLoss([Term("squared-error", output=0), Term("squared-error", output=1)])
        own = trust_region(model, loss, 0.1, layers="all")

        def closure(model: nn.Module = model) -> Tensor:
            one, other = model(x)
            return half_square(one, y) + half_square(other, z)

        for _ in range(3):
            own.step(closure)
        found.append((own.last["loss"], own.last["predicted"]))
    # K-FAC averages over calls of a reused layer, so only the model and its slope are the same.
    assert found[0][0] == pytest.approx(found[1][0], rel=0.2)
    model = fill(Chained(False))
    own = trust_region(model, loss, 1e-9, lr=1e-4)
    before = closure(model).item()
    own.step(lambda: closure(model))
    assert closure(model).item() - before == pytest.approx(own.last["predicted"], rel=1e-3)


# -- what is said -----------------------------------------------------------------------------


class Writer:
    """Takes scalars as a SummaryWriter does."""

    def __init__(self) -> None:
        self.found: dict[str, list[int]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        assert math.isfinite(scalar_value)
        self.found.setdefault(tag, []).append(global_step)


@pytest.mark.slow
def test_every_step_is_read_out(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    history, writer = History(), Writer()
    scalars = Scalars(writer)

    def both(readout: Any) -> None:
        history(readout)
        scalars(readout)

    model = deep()
    own = trust_region(
        model,
        "cross-entropy",
        LevenbergMarquardt(1.0, interval=2),
        full_batch=True,
        preconditioner_damping=AdaptiveDamping(),
        on_step=both,
    )
    x, y = classes_of(0)
    for step in range(6):
        own.param_groups[0]["lr"] = 300.0 if step == 3 else 1.0
        nothing = math.nan if step == 5 else 1.0
        own.step(lambda nothing=nothing: F.cross_entropy(model(x * nothing), y))
    assert [one.step for one in history] == [0, 1, 2, 3, 4, 5]
    assert history[4].undone == "the objective rose"
    assert history[4].change > 0
    assert history[4].predicted < 0
    assert history[5].undone == "the loss is not finite"
    assert history[5].coefficients == ()
    assert history[5].predicted is None
    assert len(history[2].coefficients) == 4
    assert len(history[2].preconditioner_dampings) == 2
    assert history[2].ratio == pytest.approx(history[2].change / history[1].predicted)
    assert history[2].line().startswith("step 2: loss ")
    assert json.loads(json.dumps(history[2].as_dict()))["loss"] == history[2].loss
    assert writer.found["trust_region/undone"] == [0, 1, 2, 3, 4, 5]
    assert writer.found["trust_region/predicted"] == [0, 1, 2, 3, 4]
    assert writer.found["trust_region/coefficients/3"] == [1, 2, 3, 4]
    history.plot(tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 1000


# -- on several ranks -------------------------------------------------------------------------


def everything(rank: int, ranks: int) -> tuple[Tensor, list[Any]]:
    """A search for the first damping, a rejection at any step, a promise below the floor."""
    part = slice(rank * 12 // ranks, (rank + 1) * 12 // ranks)
    found, seen = [], []
    for sure in (False, True):
        model = deep()
        if sure:
            with torch.no_grad():
                model[2].weight.mul_(300)
        x, y = randn(12, 3)[part], labels(12)[part]
        wrapped = DistributedDataParallel(model) if ranks > 1 else model
        history = History()
        own = trust_region(
            wrapped,
            "cross-entropy",
            LevenbergMarquardt(1e-8 if sure else None, interval=3),
            full_batch=True,
            on_step=history,
            preconditioner_damping=AdaptiveDamping(),
        )
        for step in range(7):
            own.param_groups[0]["lr"] = 1e3 if step == 4 else 1.0
            own.step(lambda wrapped=wrapped, x=x, y=y: F.cross_entropy(wrapped(x), y))
        seen += [(one.damping, one.notes, one.undone) for one in history]
        found.append(vector(model))
        own.close()
    return torch.cat(found), seen


@pytest.mark.distributed
def test_ranks_decide_as_one_process() -> None:
    weights, seen = everything(0, 1)
    assert "the model promised more than the loss can fall" in {
        n for _, one, _ in seen for n in one
    }
    assert seen[0][0] != 3.0
    assert "the objective rose" in {undone for *_, undone in seen}
    for own_weights, own_seen in run_ranks(everything, 2, timeout=60):
        compare(own_weights, weights, "weights", rtol=1e-5)
        for one, other in zip(own_seen, seen, strict=True):
            assert one == (pytest.approx(other[0]), *other[1:])
