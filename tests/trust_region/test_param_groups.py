"""Param groups: lengths and weight decays of some parameters, and what is frozen and thawed."""

import copy
import io
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import soframe
from soframe.testing import compare
from soframe.trust_region import AdaptiveDamping, LevenbergMarquardt
from tests.curvature import fill, half_square, randn
from tests.distributed.harness import run_ranks
from tests.examples import examples
from tests.trust_region.dense import Dense, affine_net, regression
from tests.trust_region.kit import Measured, classes_of, closures, deep, trust_region, vector

SIZES = [12, 8, 2, 2]
"""Of the parameters of `affine_net`."""


def of_each(values: list[float]) -> Tensor:
    each = [torch.full((n,), v, dtype=torch.float64) for n, v in zip(SIZES, values, strict=True)]
    return torch.cat(each)


def grouped(net: nn.Module, lrs: list[float], decays: list[float]) -> list[dict[str, Any]]:
    rows = zip(net.parameters(), lrs, decays, strict=True)
    return [{"params": [p], "lr": lr, "weight_decay": decay} for p, lr, decay in rows]


FOUR = st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0]), min_size=4, max_size=4)


@pytest.mark.slow
@settings(max_examples=examples(8), deadline=None)
@given(lrs=FOUR.filter(any), decays=FOUR, momentum=st.booleans())
def test_steps_of_groups_are_the_dense_ones(
    lrs: list[float], decays: list[float], momentum: bool
) -> None:
    net = affine_net()
    measured = Measured(0.5)
    params = grouped(net, [1.0] * 4, decays)
    own = trust_region(
        net, "squared-error", measured, params=params, decay=0.0, reject=False, momentum=momentum
    )
    reference = Dense(vector(net), 0.5, weight_decay=of_each(decays), momentum=momentum)
    for step in range(4):
        for group, lr in zip(own.param_groups, lrs, strict=True):
            group["lr"] = lr if step else 1.0  # so that what stands then has moved before
        reference.lr = of_each(lrs) if step else 1.0
        each = closures(net, regression(step), half_square)
        before = sum(closure().item() for closure in each) + reference.penalty()
        own.step(each)
        predicted = reference.step(regression(step))
        compare(vector(net), reference.theta, f"parameters after step {step}")
        assert own.last["predicted"] == pytest.approx(predicted, rel=1e-8)
        after = sum(closure().item() for closure in each) + reference.penalty()
        assert own.last["change"] == pytest.approx(after - before, rel=1e-7, abs=1e-12)
    own.close()


@pytest.mark.slow
def test_steps_solve_a_ridge_regression_whose_bias_is_free() -> None:
    net, x, y = fill(nn.Sequential(nn.Linear(3, 2))), randn(8, 3), randn(8, 2, seed=1)
    params = [{"params": [net[0].weight], "weight_decay": 0.5}, {"params": [net[0].bias]}]
    own = trust_region(net, "squared-error", 1e-10, params=params, weight_decay=0.0)
    for _ in range(40):  # the damping within the block is another one than that of the bias
        own.step(lambda: half_square(net(x), y))
    inputs = torch.cat([x, torch.ones(8, 1).double()], 1)
    decay = torch.tensor([0.5, 0.5, 0.5, 0.0], dtype=torch.float64).diag()
    expected = torch.linalg.solve(inputs.T @ inputs / 8 + decay, inputs.T @ y / 8).T
    compare(torch.cat([net[0].weight, net[0].bias[:, None]], 1), expected, "solution", rtol=1e-6)


def trained(model: nn.Module, steps: int = 6, **ours: Any) -> soframe.TrustRegion:
    damping = LevenbergMarquardt(1.0, omega=0.7, interval=2)
    own = trust_region(model, "cross-entropy", damping, **ours)
    for step in range(steps):
        x, y = classes_of(step)
        own.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
    return own


def test_equal_groups_are_one() -> None:
    model, other = deep(), deep()
    trained(model, weight_decay=1e-2)
    trained(other, weight_decay=1e-2, params=[{"params": [p]} for p in other.parameters()])
    assert torch.equal(vector(other), vector(model))


@pytest.mark.parametrize("kind", ["list", "iterator", "names"])
def test_parameters_are_given_as_to_other_optimizers(kind: str) -> None:
    model = deep()
    named = kind == "names"
    params: Any = iter(model.named_parameters() if named else model.parameters())
    own = trust_region(model, "cross-entropy", params=list(params) if kind == "list" else params)
    assert len(own.param_groups[0]["params"]) == 4
    assert not named or own.param_groups[0]["param_names"][0] == "0.weight"


REFUSED: list[tuple[Callable[[nn.Module], Any], str]] = [
    (lambda m: [{"params": m[0].parameters()}], "'2.weight' needs a gradient, and is in no param"),
    (
        lambda m: [{"params": m.parameters()}, {"params": [nn.Parameter(torch.ones(2, 5))]}],
        r"a parameter of shape \[2, 5\] that is not, or no longer, the model's",
    ),
    (lambda m: [{"params": m.parameters(), "damping": 1.0}], r"not \['damping'\]"),
    (lambda m: [{"params": m.parameters(), "lr": 0.0}], "lr must be positive, not 0.0"),
    (lambda m: [{"params": m.parameters(), "weight_decay": -1.0}], "must not be negative, not -1"),
]


@pytest.mark.parametrize(("params", "message"), REFUSED)
def test_groups_that_are_refused(params: Callable[[nn.Module], Any], message: str) -> None:
    model = deep()
    with pytest.raises(ValueError, match=message):
        trust_region(model, "cross-entropy", params=params(model))
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_without_parameters_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter of the model needs a gradient"):
        trust_region(deep().requires_grad_(False), "cross-entropy")


def test_a_group_that_is_refused_leaves_the_others() -> None:
    model = deep()
    own = trust_region(model, "cross-entropy")
    with pytest.raises(ValueError, match="no longer, the model's"):
        own.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert len(own.param_groups) == 1
    x, y = classes_of(0)
    own.step(lambda: F.cross_entropy(model(x), y))


def in_groups(**ours: Any) -> tuple[nn.Module, soframe.TrustRegion]:
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 3)]
    model = fill(nn.Sequential(*layers))
    rows = [(model[0], 0.5, 0.1), (model[1:], 1.0, 0.0)]
    params = [{"params": m.parameters(), "lr": lr, "weight_decay": w} for m, lr, w in rows]
    damping = LevenbergMarquardt(1.0, omega=0.7, interval=2)
    own = AdaptiveDamping(interval=1, longest=2)
    settings = {"solver": "inverse", "preconditioner_damping": own, "params": params, **ours}
    return model, trust_region(model, "cross-entropy", damping, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("full_batch", [pytest.param(False, marks=pytest.mark.thorough), True])
def test_training_goes_on_bit_by_bit_while_layers_are_frozen_and_thawed(full_batch: bool) -> None:
    def train(model: nn.Module, own: soframe.TrustRegion, first: int) -> list[bytes]:
        saved = []
        for step in range(first, 9):
            for number in (0, 2):  # with and without a block
                model[number].requires_grad_(not 3 <= step < 6)
            file = io.BytesIO()
            torch.save({"model": model.state_dict(), "optimizer": own.state_dict()}, file)
            saved.append(file.getvalue())
            own.param_groups[0]["lr"] = 60.0 if step == 2 else 0.5
            x, y = classes_of(step)
            own.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
        return saved

    whole, first = in_groups(full_batch=full_batch)
    files = train(whole, first, 0)
    for step, file in enumerate(files):
        if step not in (1, 4, 8):
            continue
        model, own = in_groups(full_batch=full_batch)
        for number in (0, 2):
            model[number].requires_grad_(not 3 <= step < 6)
        everything = torch.load(io.BytesIO(file), weights_only=True)
        model.load_state_dict(everything["model"])
        own.load_state_dict(everything["optimizer"])
        train(model, own, step)
        assert torch.equal(vector(model), vector(whole)), f"from step {step}"
        assert own.counters == first.counters


def test_a_state_of_other_groups_loads_nothing() -> None:
    model, own = in_groups()
    other = trust_region(copy.deepcopy(model), "cross-entropy", LevenbergMarquardt(interval=2))
    x, y = classes_of(0)
    own.step(lambda: F.cross_entropy(model(x), y))
    before = copy.deepcopy(own.preconditioner.state_dict())
    with pytest.raises(ValueError, match=r"of \[8\] parameters, TrustRegion of \[2, 6\]"):
        own.load_state_dict(other.state_dict())
    after = own.preconditioner.state_dict()
    assert after.keys() == before.keys()
    assert str(after) == str(before)


def train_rank(rank: int, ranks: int, parts: int) -> Tensor:
    model = deep()
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    biases = [p for p in model.parameters() if p.dim() == 1]
    weights = [p for p in model.parameters() if p.dim() > 1]
    params = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "lr": 0.5}]
    own = trust_region(wrapped, "cross-entropy", LevenbergMarquardt(interval=2), params=params)
    for step in range(5):
        x, y = classes_of(step)
        x, y = x.chunk(ranks)[rank], y.chunk(ranks)[rank]
        batches = list(zip(x.chunk(parts), y.chunk(parts), strict=True))
        own.step(closures(wrapped, batches, F.cross_entropy))
    return vector(model)


@pytest.mark.distributed
@pytest.mark.parametrize("parts", [1, 2], ids=["one batch", "micro-batches"])
@pytest.mark.thorough
def test_ranks_with_groups_are_one_process(parts: int) -> None:
    one, two = run_ranks(train_rank, 2, parts)
    assert torch.equal(one, two)
    compare(one, train_rank(0, 1, 1), "parameters", rtol=1e-9)


# -- frozen and thawed -----------------------------------------------------------------------


def freeze(net: nn.Module, reference: Dense, number: int, *, frozen: bool) -> None:
    own = slice(sum(SIZES[:number]), sum(SIZES[: number + 1]))
    list(net.parameters())[number].requires_grad_(not frozen)
    reference.trained[own] = float(not frozen)
    if frozen and reference.last is not None:
        reference.last[own] = 0.0


@pytest.mark.parametrize("number", range(4))
@pytest.mark.slow
def test_what_is_frozen_for_a_while_is_so_for_the_dense_step(number: int) -> None:
    net = affine_net()
    own = trust_region(net, "squared-error", 0.5, decay=0.0, weight_decay=0.1)
    reference = Dense(vector(net), 0.5, weight_decay=0.1)
    for step in range(8):
        if step in (2, 5):
            freeze(net, reference, number, frozen=step == 2)
        own.step(closures(net, regression(step), half_square))
        reference.step(regression(step))
        compare(vector(net), reference.theta, f"parameters after step {step}")


@pytest.mark.parametrize("first", [True, False], ids=["frozen first", "thawed first"])
@pytest.mark.slow
def test_dampings_of_parts_follow_what_is_frozen(first: bool) -> None:
    """With a trial at every step, and fewer parts than before or more."""
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3)]
    model = fill(nn.Sequential(*layers))
    damping = AdaptiveDamping(interval=1, longest=1)
    model[0].requires_grad_(not first)
    own = trust_region(
        model, "cross-entropy", solver="inverse", preconditioner_damping=damping, layer_groups=3
    )
    x, y = classes_of(0)
    losses, counts = [], []
    for step in range(12):
        if step in (4, 8):
            model[0].requires_grad_((step == 4) == first)
        before = model[0].weight.detach().clone()
        losses.append(float(own.step(lambda: F.cross_entropy(model(x), y))))
        assert torch.equal(before, model[0].weight) != model[0].weight.requires_grad
        counts.append(len(own._damping_within.state()["now"]))
    few, many = [2] * 4, [3] * 4
    assert counts == ([*few, *many, *few] if first else [*many, *few, *many])
    assert losses[-1] < 0.5 * losses[0]


def test_a_verdict_has_the_decay_of_what_was_frozen_meanwhile() -> None:
    model = deep()
    measured = Measured(1.0)
    own = trust_region(model, "cross-entropy", measured, full_batch=True, weight_decay=0.1)
    x, y = classes_of(0)

    def objective() -> float:
        return F.cross_entropy(model(x), y).item() + 0.05 * float(vector(model).square().sum())

    before = objective()
    own.step(lambda: F.cross_entropy(model(x), y))
    change = objective() - before
    model[0].requires_grad_(False)
    own.step(lambda: F.cross_entropy(model(x), y))
    assert own.last["change"] == pytest.approx(change, rel=1e-6)


def test_an_update_of_before_the_freeze_is_not_undone_after_it() -> None:
    model = deep()
    own = trust_region(model, "cross-entropy")
    x, y = classes_of(0)
    own.step(lambda: F.cross_entropy(model(x), y))
    model[0].requires_grad_(False)
    own.step(lambda: F.cross_entropy(model(x), y))
    model[0].requires_grad_(True)
    before = copy.deepcopy(model[0])
    own.step(lambda: F.cross_entropy(model(x * float("nan")), y))
    assert own.counters["skipped_steps"] == 1
    assert torch.equal(model[0].weight, before.weight)
    assert torch.equal(model[0].bias, before.bias)


def test_a_layer_that_is_exchanged_needs_a_new_optimizer() -> None:
    model = deep()
    own = trust_region(model, "cross-entropy")
    x, y = classes_of(0)
    own.step(lambda: F.cross_entropy(model(x), y))
    before = vector(model[0])
    model[2] = fill(nn.Linear(4, 3), seed=1)
    with pytest.raises(ValueError, match="not, or no longer, the model's: make an optimizer"):
        own.step(lambda: F.cross_entropy(model(x), y))
    assert torch.equal(vector(model[0]), before)


def test_a_layer_that_comes_later_needs_a_group() -> None:
    model = deep()
    own = trust_region(model, "cross-entropy")
    x, y = classes_of(0)
    own.step(lambda: F.cross_entropy(model(x), y))
    before = vector(model)
    model.append(fill(nn.Linear(3, 3), seed=1))
    with pytest.raises(ValueError, match=r"'3\.weight' needs a gradient, and is in no param group"):
        own.step(lambda: F.cross_entropy(model(x), y))
    assert torch.equal(vector(model[:3]), before)
    own.add_param_group({"params": model[3].parameters(), "weight_decay": 1e-3})
    losses = [own.step(lambda: F.cross_entropy(model(x), y)).item() for _ in range(8)]
    assert losses[-1] < 0.8 * losses[0]


def test_what_broke_the_loss_is_undone_in_layers_that_were_frozen_since() -> None:
    model = deep()
    own = trust_region(model, "cross-entropy", 0.1)
    x, y = classes_of(0)
    before = vector(model)
    own.step(lambda: F.cross_entropy(model(x), y))
    model[0].requires_grad_(False)
    with torch.no_grad():
        for parameter, old in zip(model.parameters(), before.split([12, 4, 12, 3]), strict=True):
            parameter.copy_(old.view_as(parameter) + 1.0)
            own.state[parameter]["update"] = torch.ones_like(parameter)
    own.step(lambda: F.cross_entropy(model(x), y) * math.inf)
    compare(vector(model), before, "parameters", rtol=1e-12)


def test_a_step_that_would_end_nowhere_is_not_taken_where_nobody_measures() -> None:
    model = deep()
    own = trust_region(model, "cross-entropy", 0.1)
    x, y = classes_of(0)
    before = vector(model)
    own.param_groups[0]["lr"] = math.inf
    own.step(lambda: F.cross_entropy(model(x), y))
    assert torch.equal(vector(model), before)
    assert own.counters["skipped_steps"] == 1


def test_a_thawed_first_layer_does_not_hide_what_can_be_undone() -> None:
    model = deep()
    own = trust_region(model, "cross-entropy", LevenbergMarquardt(interval=99))
    model[0].requires_grad_(False)
    x, y = classes_of(0)
    for _ in range(12):
        own.step(lambda: F.cross_entropy(model(x), y))
    model[0].requires_grad_(True)
    before, last = vector(model[2]), [own.state[p]["update"] for p in model[2].parameters()]
    own.step(lambda: F.cross_entropy(model(x), y) + 100.0)
    assert own.counters["skipped_steps"] == 1
    moved = torch.cat([update.flatten() for update in last])
    compare(vector(model[2]), before - moved, "parameters", rtol=1e-12)
