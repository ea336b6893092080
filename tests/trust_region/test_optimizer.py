"""The step of the trust region, against the same step by dense linear algebra."""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from soframe.comm import Recording
from soframe.losses import CrossEntropy, MeanSquaredError, SquaredError
from soframe.settings import grouped
from soframe.testing import compare
from soframe.trust_region import ConstantDamping, LevenbergMarquardt
from tests.curvature import fill, half_square, randn
from tests.trust_region.dense import Dense, affine_net, regression
from tests.trust_region.kit import (
    Measured,
    classes_of,
    closures,
    deep,
    labels,
    trust_region,
    vector,
)


@pytest.mark.parametrize(
    ("ours", "dense"),
    [
        ({}, {}),
        ({"weight_decay": 0.3}, {"weight_decay": 0.3}),
        ({"momentum": False}, {"momentum": False}),
        ({"layer_groups": 1}, {"layer_groups": 1}),
        ({"layer_groups": 2}, {"layer_groups": 2}),
        ({"layer_groups": 2, "momentum": False}, {"layer_groups": 2, "momentum": False}),
        ({"lr": 0.3}, {"lr": 0.3}),
        ({"preconditioner_damping": 7.0}, {"factor": 7.0}),
        (
            {"weight_decay": 0.1, "preconditioner_damping": 0.5, "lr": 0.9},
            {"weight_decay": 0.1, "factor": 0.5, "lr": 0.9},
        ),
    ],
    ids=str,
)
def test_steps_are_the_dense_ones(ours: dict[str, Any], dense: dict[str, Any]) -> None:
    net = affine_net()
    own = trust_region(net, "squared-error", Measured(0.5), decay=0.0, reject=False, **ours)
    measured = own.damping
    reference = Dense(vector(net), 0.5, **dense)
    decay = reference.weight_decay
    for step in range(4):
        batches = regression(step)
        each = closures(net, batches, half_square)
        before = sum(closure().item() for closure in each)
        penalty = decay / 2 * float(vector(net).square().sum())
        loss = own.step(each)
        predicted = reference.step(batches)
        compare(vector(net), reference.theta, f"parameters after step {step}")
        assert own.last["predicted"] == pytest.approx(predicted, rel=1e-8)
        assert float(loss) == pytest.approx(before, rel=1e-6)
        after = sum(closure().item() for closure in each)
        after += decay / 2 * float(vector(net).square().sum())
        assert own.last["change"] == pytest.approx(after - before - penalty, rel=1e-8)
        assert measured.ratios[-1] == pytest.approx((after - before - penalty) / predicted)


def test_one_step_solves_linear_regression() -> None:
    net, x, y = fill(nn.Sequential(nn.Linear(3, 2))), randn(8, 3), randn(8, 2, seed=1)
    own = trust_region(net, "squared-error", Measured(1e-10))
    measured = own.damping
    own.step(lambda: half_square(net(x), y))
    inputs = torch.cat([x, torch.ones(8, 1).double()], 1)
    expected = torch.linalg.lstsq(inputs, y).solution.T
    compare(torch.cat([net[0].weight, net[0].bias[:, None]], 1), expected, "solution", rtol=1e-7)
    # The loss is its own quadratic model.
    assert measured.ratios == [pytest.approx(1.0, abs=1e-7)]


def test_decayed_weights_solve_ridge_regression() -> None:
    net, x, y = fill(nn.Sequential(nn.Linear(3, 2, bias=False))), randn(8, 3), randn(8, 2, seed=1)
    own = trust_region(net, "squared-error", 1e-10, weight_decay=0.5)
    own.step(lambda: half_square(net(x), y))
    eye = torch.eye(3, dtype=torch.float64)
    expected = torch.linalg.solve(x.T @ x / 8 + 0.5 * eye, x.T @ y / 8).T
    compare(net[0].weight, expected, "solution", rtol=1e-7)


# -- measured steps --------------------------------------------------------------------------


@pytest.mark.parametrize("reject", [True, False])
def test_a_rejected_step_changes_nothing(reject: bool) -> None:
    net = deep()
    damping = LevenbergMarquardt(1.0, omega=0.5, interval=1)
    own = trust_region(net, "cross-entropy", damping, reject=reject)
    x, y = classes_of(0)
    own.step(lambda: F.cross_entropy(net(x), y))
    before, now = vector(net), own.damping.at(0)
    updates = [own.state[p]["update"].clone() for p in net.parameters()]
    own.param_groups[0]["lr"] = 300.0
    own.step(lambda: F.cross_entropy(net(x), y))
    assert own.last["change"] > 0
    assert own.damping.at(0) == now / 0.5
    assert own.counters["rejected_steps"] == int(reject)
    kept = [torch.equal(own.state[p]["update"], u) for p, u in zip(net.parameters(), updates)]  # noqa: B905
    assert torch.equal(vector(net), before) == reject
    assert kept == [reject] * len(kept)


def test_a_step_that_ends_nowhere_is_always_rejected() -> None:
    net = deep()
    own = trust_region(net, "cross-entropy", LevenbergMarquardt(1.0, interval=1), reject=False)
    x, y = classes_of(0)
    before = vector(net)
    own.param_groups[0]["lr"] = math.inf
    own.step(lambda: F.cross_entropy(net(x), y))
    assert torch.equal(vector(net), before)
    assert own.last["ratio"] == -math.inf
    assert own.damping.at(0) > 1.0


def test_measured_every_so_many_steps() -> None:
    net, damping = deep(), Measured(1.0)
    damping.interval = 3
    own = trust_region(net, "cross-entropy", damping)
    counts = []
    for step in range(7):
        x, y = classes_of(step)
        own.step(closures(net, [(x, y)], F.cross_entropy)[0])
        counts.append(len(own.damping.ratios))
    assert counts == [0, 0, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_steps_back_and_training_recovers(bad: float) -> None:
    net = deep()
    damping = LevenbergMarquardt(1.0, omega=0.5, interval=2)
    own = trust_region(net, "cross-entropy", damping)
    x, y = classes_of(0)

    def good() -> Tensor:
        return F.cross_entropy(net(x), y)

    own.step(good)
    before = vector(net)
    moved = []
    own.step(good)
    now = own.damping.at(0)
    moved.append(vector(net))
    own.step(lambda: F.cross_entropy(net(x * bad), y))
    compare(vector(net), before, "parameters")
    assert not torch.equal(moved[0], before)
    assert own.damping.at(0) == now / 0.25
    assert own.counters == {"rejected_steps": 0, "skipped_steps": 1}
    assert all("update" not in own.state[p] for p in net.parameters())
    losses = [float(own.step(good)) for _ in range(15)]
    assert losses[-1] < 0.5 * losses[0]


def test_nothing_to_undo_at_the_first_step() -> None:
    net = deep()
    own = trust_region(net, "cross-entropy")
    x, y = classes_of(0)
    before = vector(net)
    own.step(lambda: F.cross_entropy(net(x * math.nan), y))
    assert torch.equal(vector(net), before)
    own.step(lambda: F.cross_entropy(net(x), y))
    assert not torch.equal(vector(net), before)


def test_a_curvature_that_is_not_finite_steps_back() -> None:
    net = affine_net()
    own = trust_region(net, SquaredError(1e200))
    x, y = regression(0)[0]
    before = vector(net)
    # The direction without a block is as large as the gradient, and its curvature overflows.
    own.step(lambda: 1e200 * half_square(net(x), y))
    assert torch.equal(vector(net), before)
    assert own.counters["skipped_steps"] == 1


@pytest.mark.parametrize("every", [1, 5])
def test_burning_in_moves_nothing_but_the_statistics(every: int) -> None:
    net = deep()
    own = trust_region(net, "cross-entropy", burn_in=2, statistics_every=every, solve_every=every)
    before, seen = vector(net), []
    for step in range(4):
        x, y = classes_of(step)
        own.step(closures(net, [(x, y)], F.cross_entropy))
        block = own.preconditioner.blocks[0]
        data = next(iter(block.second_order["A"].values()))
        seen.append((block.running["A"].clone(), data.clone()))
        assert torch.equal(vector(net), before) == (step < 2)
    for (a, data), (later, later_data) in itertools.pairwise(seen[:3]):
        assert not torch.equal(a, later)
        assert not torch.equal(data, later_data)
    assert torch.equal(seen[2][0], seen[3][0]) == (every == 5)


def test_a_step_whose_closure_raised_leaves_no_statistics() -> None:
    found = []
    for raised in (True, False):
        net = deep()
        own = trust_region(net, "cross-entropy")
        if raised:
            first = closures(net, [classes_of(5)], F.cross_entropy)
            with pytest.raises(ZeroDivisionError):
                own.step([*first, lambda: torch.tensor(1 // 0)])
        own.step(closures(net, [classes_of(0)], F.cross_entropy))
        found.append(vector(net))
    assert torch.equal(*found)


def test_statistics_are_taken_at_every_third_step_unless_told_otherwise() -> None:
    for settings, expected in (({}, 2), ({"statistics_every": 1}, 4)):
        net = deep()
        own = soframe.TrustRegion(net, "cross-entropy", **grouped({"fisher": "type-2", **settings}))
        seen = []
        for step in range(4):
            own.step(closures(net, [classes_of(step)], F.cross_entropy))
            seen.append(own.preconditioner.blocks[0].running["A"].clone())
        changes = [not torch.equal(a, b) for a, b in itertools.pairwise(seen)]
        assert 1 + sum(changes) == expected


# -- refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("loss", "criterion", "parts", "factor"),
    [
        (SquaredError(), F.mse_loss, 1, 2 / 3),
        (MeanSquaredError(), half_square, 1, 1.5),
        (CrossEntropy(), lambda f, y: F.cross_entropy(f, y, reduction="sum"), 1, 8),
        (CrossEntropy(), lambda f, y: 2 * F.cross_entropy(f, y), 2, 2),
    ],
    ids=["mse", "squared", "sum", "not divided"],
)
def test_a_loss_of_another_scale_is_refused(
    loss: Any, criterion: Any, parts: int, factor: float
) -> None:
    net = deep()
    x = randn(8, 3)
    y = labels(8) if isinstance(loss, CrossEntropy) else randn(8, 3, seed=1)
    own = trust_region(net, loss)
    message = f"has {factor:.4g} times the curvature of loss={type(loss).__name__}"
    batches = list(zip(x.chunk(parts), y.chunk(parts), strict=True))
    for _ in range(2):  # who goes on is told again
        with pytest.raises(ValueError, match=message):
            own.step(closures(net, batches, criterion))


@pytest.mark.parametrize("margin", [5.0, 14.0, 16.0, 60.0, 200.0])
def test_a_saturated_model_is_not_refused(margin: float) -> None:
    net = nn.Linear(3, 3)  # float32, where the curvature of a sure answer is rounding alone
    with torch.no_grad():
        net.bias.copy_(torch.tensor([margin, 0.0, 0.0]))
    own = trust_region(net, "cross-entropy")
    x = randn(8, 3).float()
    own.step(lambda: F.cross_entropy(net(x), torch.zeros(8, dtype=torch.long)))
    assert own.counters == {"rejected_steps": 0, "skipped_steps": 0}


def test_the_check_leaves_the_random_numbers_alone() -> None:
    net, (x, y) = deep(), classes_of(0)
    own = trust_region(net, "cross-entropy")
    before = torch.get_rng_state()
    own.step(lambda: F.cross_entropy(net(x), y))  # of the type-2 Fisher, which draws nothing
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": 0.0}, "lr must be positive, not 0.0"),
        ({"lr": math.nan}, "lr must be positive, not nan"),
        ({"preconditioner_damping": -1.0}, "preconditioner_damping must be positive, not -1.0"),
        ({"weight_decay": -0.1}, "weight_decay must not be negative, not -0.1"),
        ({"fisher": "empirical"}, "needs fisher='monte-carlo', 'type-2' or 'forward-only'"),
        ({"fisher": "exact"}, "needs fisher='monte-carlo', 'type-2' or 'forward-only'"),
    ],
    ids=str,
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        soframe.TrustRegion(deep(), "mse", **grouped(settings))


@pytest.mark.parametrize(
    "make",
    [soframe.StochasticTrustRegion, lambda net: trust_region(net, "cross-entropy")],
    ids=["stochastic", "whole"],
)
def test_the_loss_is_returned_as_it_is(make: Any) -> None:
    """In double precision, whatever the default dtype."""
    net, (x, y) = deep(), classes_of(0)
    before = F.cross_entropy(net(x), y).detach()
    assert torch.equal(make(net).step(lambda: F.cross_entropy(net(x), y)), before)


def test_a_closure_that_penalises_parameters_is_refused() -> None:
    net, (x, y) = deep(), classes_of(0)
    own = trust_region(net, "cross-entropy")
    with pytest.raises(RuntimeError, match="weight_decay="):
        own.step(lambda: F.cross_entropy(net(x), y) + net[0].weight.square().sum())


# -- traces ----------------------------------------------------------------------------------


def test_closing_removes_every_hook() -> None:
    net = deep()
    own = trust_region(net, "cross-entropy")
    assert any(module._forward_hooks for module in net.modules())
    own.close()
    assert not any(module._forward_hooks for module in net.modules())


# -- as an optimizer of torch ----------------------------------------------------------------


def test_schedulers_of_torch_change_the_length() -> None:
    net = deep()
    own = trust_region(net, "cross-entropy")
    assert isinstance(own, torch.optim.Optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(own, 0.5)
    x, y = classes_of(0)
    lengths = []
    for _ in range(2):
        before = copy.deepcopy(net.state_dict()), own.state_dict(), vector(net)
        own.step(lambda: F.cross_entropy(net(x), y))
        lengths.append(vector(net) - before[2])
        net.load_state_dict(before[0])
        own.load_state_dict(before[1])
        scheduler.step()
        own.param_groups[0]["lr"] = 0.5
    compare(lengths[1], lengths[0] / 2, "update", rtol=1e-9)


def test_a_damping_may_follow_a_schedule() -> None:
    net = affine_net()
    dense = Dense(vector(net), 1.0)
    own = trust_region(
        net, "squared-error", ConstantDamping(lambda step: 0.5 / (1 + step)), decay=0.0
    )
    for step in range(3):
        batches = [(randn(6, 3, seed=step), randn(6, 2, seed=step + 9))]
        dense.damping = 0.5 / (1 + step)
        dense.step(batches)
        own.step(closures(net, batches, half_square)[0])
        compare(vector(net), dense.theta, f"parameters after step {step}", rtol=1e-7)


@pytest.mark.parametrize("width", [4, 16])
def test_ranks_exchange_numbers_of_directions_besides_what_the_preconditioner_does(
    width: int,
) -> None:
    """Of the model's own traffic nothing grows with the model."""
    net = fill(nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 3)))
    backend = Recording(rank=0, world_size=3)
    own = trust_region(
        net, "cross-entropy", Measured(1.0), backend=backend, solve_every=9, statistics_every=9
    )
    x, y = classes_of(0)
    for step in range(3):
        backend.events.clear()
        own.step(lambda: F.cross_entropy(net(x), y))
        if step == 2:  # neither statistics nor solves, and there is a last update
            large = [event for event in backend.events if event.numel > 2]
            directions = 2 * 2  # those of two runs of layers, and their last updates
            sizes = [event.numel for event in large if event.operation == "all_reduce"]
            assert directions**2 in sizes
            assert all(event.numel <= directions**2 for event in large), large
