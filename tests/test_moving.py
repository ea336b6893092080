"""How weights move where soframe owns the step: cautious decay, and norms that are kept."""

from __future__ import annotations

import copy
import io
import math
from collections import OrderedDict
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import soframe
from soframe import PlainGrad
from soframe.step.moving import Ball, Move, descend, is_matrix
from soframe.testing import check_method
from tests import kit
from tests.distributed.harness import RankFailure, run_ranks

RATES = st.floats(1e-6, 0.9)
SEEDS = st.integers(0, 10_000)


def move_of(lr: float, decay: float = 0.0, kind: Any = "decoupled", ball: Any = None) -> Move:
    return Move(lr, decay, kind, ball, decay_vectors=True)


def with_direction(weight: np.ndarray, direction: np.ndarray, dtype: Any = None) -> nn.Parameter:
    parameter = nn.Parameter(torch.tensor(weight, dtype=dtype))
    parameter.grad = torch.tensor(direction, dtype=dtype)
    return parameter


def moved(parameters: list[nn.Parameter], move: Move) -> None:
    with torch.no_grad():
        descend(parameters, PlainGrad(), move)


# -- steps that the device may leave out --------------------------------------------------------


@pytest.mark.parametrize("layout", ["dense", "transposed", "double", "gradient"])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_the_device_leaves_a_step_out(layout: str, decay: float) -> None:
    """Where memory is dense by one kernel, else by zeros; weights are the same to the bit."""
    generator = torch.Generator().manual_seed(0)
    weight, gradient = torch.randn(2, 5, 4, generator=generator)
    update = torch.randn(5, 4, generator=generator)
    values = {
        "dense": update,
        "transposed": update.T.contiguous().T,
        "double": update.double(),
        "gradient": None,
    }[layout]

    def after(bad: float | None, value: float | None = None) -> Tensor:
        parameter = nn.Parameter(weight.clone())
        parameter.grad = gradient.clone() if value is None else torch.full_like(weight, value)
        updates: dict[int, Tensor] = {}
        if values is not None:
            filled = values.clone() if value is None else torch.full_like(values, value)
            updates[id(parameter)] = filled
        flag = None if bad is None else torch.tensor(bad)
        move = move_of(0.3, decay)
        with torch.no_grad():
            descend([parameter], PlainGrad(), move, updates, flag)
        if value is not None:
            assert not parameter.grad.isfinite().any()  # gradients stay
        return parameter.detach()

    expected = (
        weight.double() * (1 - 0.3 * decay)
        - 0.3 * (gradient if values is None else values).double()
    )
    for flag in (None, 0.0):
        torch.testing.assert_close(after(flag), expected.float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(after(1.0, math.nan), weight)
    assert torch.equal(after(1.0, math.inf), weight)


# -- decay --------------------------------------------------------------------------------------

SIGNED = st.lists(
    st.tuples(st.sampled_from([-2.0, -1e-30, -0.0, 0.0, 1e-30, 3.0]), st.floats(-1e3, 1e3)),
    min_size=1,
    max_size=8,
)


@given(entries=SIGNED, lr=RATES, decay=st.floats(0.0, 2.0))
def test_cautious_decay_is_its_definition(entries: Any, lr: float, decay: float) -> None:
    """Entry by entry, in plain numbers."""
    weight = np.array([w for w, _ in entries])
    direction = np.array([u for _, u in entries])
    parameter = with_direction(weight, direction)
    moved([parameter], move_of(lr, decay, "cautious"))
    expected = []
    for w, u in entries:
        apart = (w > 0 and u < 0) or (w < 0 and u > 0)
        expected.append(w - lr * u - (0.0 if apart else lr * decay * w))
    np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-13, atol=1e-13)


def test_cautious_decay_reads_signs_and_no_products() -> None:
    """The product of these is zero in float32, and they point apart."""
    weight, direction = np.array([1e-30, 1e-30]), np.array([-1e-30, 1e-30])
    parameter = with_direction(weight, direction, torch.float32)
    moved([parameter], move_of(0.5, 1.0, "cautious"))
    assert parameter[0].item() == pytest.approx(1.5e-30)
    assert parameter[1].item() == pytest.approx(0.0, abs=1e-36)


@given(seed=SEEDS, lr=RATES, decay=st.floats(0.0, 2.0))
def test_decoupled_decay_is_its_definition(seed: int, lr: float, decay: float) -> None:
    generator = np.random.default_rng(seed)
    weight, direction = generator.normal(size=(2, 3, 2))
    parameter = with_direction(weight, direction)
    moved([parameter], move_of(lr, decay))
    expected = weight - lr * direction - lr * decay * weight
    np.testing.assert_allclose(parameter.detach().numpy(), expected, rtol=1e-13, atol=1e-13)


def test_what_has_no_direction_stays() -> None:
    parameter = nn.Parameter(torch.ones(2))
    for kind in ("decoupled", "cautious"):
        moved([parameter], move_of(0.1, 0.5, kind))
    assert parameter.tolist() == [1.0, 1.0]


# -- norms that are kept ------------------------------------------------------------------------


def ball_of(module: nn.Module, method: str = "kfac") -> Ball:
    """The matrices of a module's first block."""
    model = nn.Sequential(module).double()
    preconditioner = soframe.Preconditioner(model, method, kl_clip=None)
    preconditioner.close()
    names = {id(p): name for name, p in model.named_parameters()}
    return Ball(preconditioner.blocks[0], names)


def modules() -> list[tuple[nn.Module, int]]:
    return [(nn.Linear(3, 4), 1), (nn.Conv2d(4, 6, 2, groups=2), 2), (nn.Conv2d(2, 3, 2), 1)]


@given(seed=SEEDS, lr=RATES, which=st.integers(0, 2), length=st.floats(1e-6, 1e6))
def test_hyperball_is_its_definition(seed: int, lr: float, which: int, length: float) -> None:
    """The norm is kept, and the angle is that of the formula, of every group by itself."""
    torch.manual_seed(seed)
    module, groups = modules()[which]
    ball = ball_of(module)
    weight = ball.matrices["weight"]
    radii = ball.norms()
    before = weight.detach().reshape(groups, -1).numpy().copy()
    direction = length * torch.randn(weight.shape, dtype=weight.dtype)
    weight.grad = direction.clone()
    with torch.no_grad():
        ball.move(PlainGrad(), radii, lr)
    assert torch.equal(weight.grad, direction)
    rows = zip(before, weight.detach().reshape(groups, -1), direction.view(groups, -1), strict=True)
    for w, new, along in rows:
        after, u = new.numpy(), along.numpy()
        radius = np.linalg.norm(w)
        inside = w / radius - lr * u / np.linalg.norm(u)
        expected = radius * inside / np.linalg.norm(inside)
        np.testing.assert_allclose(after, expected, rtol=1e-10, atol=1e-13)
        assert np.linalg.norm(after) == pytest.approx(radius, rel=1e-12)
        # The angle, from the cosine of weight and direction alone.
        cosine = w @ u / radius / np.linalg.norm(u)
        tangent = lr * math.sqrt(max(0.0, 1 - cosine**2)) / (1 - lr * cosine)
        angle = math.acos(min(1.0, w @ after / radius**2))
        assert angle == pytest.approx(math.atan(tangent), rel=1e-6, abs=1e-7)


def test_the_norm_does_not_drift() -> None:
    ball = ball_of(nn.Conv2d(4, 6, 2, groups=2))
    weight, radii = ball.matrices["weight"], ball.norms()
    for _ in range(200):
        weight.grad = torch.randn_like(weight)
        with torch.no_grad():
            ball.move(PlainGrad(), radii, 0.3)
        torch.testing.assert_close(ball.norms(), radii, rtol=1e-12, atol=0)


def test_of_one_group_the_packed_matrix_has_the_same_norm() -> None:
    """The shortcut for blocks of one group, and its plain twin."""
    for module, groups in modules():
        ball = ball_of(module)
        wide = ball._wide(ball.matrices)
        packed = torch.linalg.vector_norm(ball._packed(wide), dim=(1, 2))
        assert packed.shape == (groups,)
        torch.testing.assert_close(ball.norms(), packed, rtol=1e-14, atol=0)


def test_a_zero_direction_and_a_step_to_the_centre_move_nothing() -> None:
    ball = ball_of(nn.Linear(3, 4))
    weight, radii = ball.matrices["weight"], ball.norms()
    before = weight.detach().clone()
    for direction, lr in ((torch.zeros_like(weight), 0.1), (before.clone(), 1.0)):
        weight.grad = direction
        with torch.no_grad():
            ball.move(PlainGrad(), radii, lr)
        torch.testing.assert_close(weight.detach(), before, rtol=1e-12, atol=1e-12)


def test_narrow_weights_move_in_single_precision() -> None:
    model = nn.Sequential(nn.Linear(16, 16, bias=False)).to(torch.bfloat16)
    optimizer = soframe.Optimizer(model, "sgd", lr=0.05, constraint="hyperball")
    start = model[0].weight.detach().float().norm()
    for step in range(10):
        optimizer.zero_grad()
        torch.manual_seed(step)
        model(torch.randn(8, 16, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
    assert optimizer._radii["0.weight"].dtype == torch.float32
    torch.testing.assert_close(model[0].weight.detach().float().norm(), start, rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((), False), ((3,), False), ((1, 1, 5), False), ((2, 3), True), ((4, 1, 3, 3), True)],
)
def test_what_is_a_matrix(shape: tuple[int, ...], expected: bool) -> None:
    assert is_matrix(nn.Parameter(torch.ones(shape))) is expected


# -- in the optimizer ---------------------------------------------------------------------------


class Net(nn.Module):
    """A grouped convolution, a norm, and linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, groups=2)
        self.norm = nn.LayerNorm(4)
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.conv(x).flatten(1))
        return self.head(self.hidden(x.tanh()).tanh())


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def loss_of(model: nn.Module, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 4, 3, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    return (model(x) - y).square().sum(1).mean()


EVERY_STEP: dict[str, Any] = {"statistics_every": 1, "solve_every": 1, "kl_clip": None}


def norms(model: nn.Module) -> dict[str, Tensor]:
    """Of every parameter, in the groups of the convolution."""
    groups = {"conv.weight": 2}
    return {
        name: p.detach().reshape(groups.get(name, 1), -1).norm(dim=1)
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("method", ["kfac", "soap", "soap-muon", "adamw"])
def test_matrices_of_the_method_keep_their_norm(method: str) -> None:
    """Biases, gains and what is the auxiliary method's do not; nor does their decay end."""
    model = net()
    optimizer = soframe.Optimizer(
        model,
        method,
        lr=0.05,
        constraint="hyperball",
        auxiliary_weight_decay=0.1,
        auxiliary_lr=0.01,
        **EVERY_STEP,
    )
    before = copy.deepcopy(model.state_dict())
    start = norms(model)
    auxiliary = {row.parameter for row in optimizer.report() if row.method == "adamw"}
    auxiliary -= {name for name in auxiliary if method == "adamw"}
    kit.train(model, loss_of, range(5), optimizer)
    kept = []
    for name, each in norms(model).items():
        assert not torch.equal(model.state_dict()[name], before[name]), name
        now, per_group = each, start[name]
        if method == "adamw":  # it takes every parameter as one matrix
            now, per_group = each.norm(), per_group.norm()
        if name.endswith("weight") and "norm" not in name and name not in auxiliary:
            torch.testing.assert_close(now, per_group, rtol=1e-12, atol=0)
            kept.append(name)
        else:
            assert (now - per_group).abs().max() > 1e-6, name
    assert "hidden.weight" in kept
    assert ("head.weight" in kept) == (method != "soap-muon")


def test_groups_may_differ() -> None:
    """The auxiliary one may have the constraint, and the main one decay."""
    model = net()
    optimizer = soframe.Optimizer(
        model,
        "muon",
        lr=0.01,
        weight_decay=0.5,
        weight_decay_kind="cautious",
        auxiliary_weight_decay=0.0,
        auxiliary_weight_decay_kind="decoupled",
        auxiliary_constraint="hyperball",
        auxiliary_lr=0.05,
    )
    start = norms(model)
    settings = {
        (group["weight_decay"], group["weight_decay_kind"], group["constraint"])
        for group in optimizer.param_groups
    }
    assert settings == {(0.5, "cautious", None), (0.0, "decoupled", "hyperball")}
    kit.train(model, loss_of, range(4), optimizer)
    now = norms(model)
    torch.testing.assert_close(now["head.weight"], start["head.weight"], rtol=1e-12, atol=0)
    assert abs(now["hidden.weight"] - start["hidden.weight"]).item() > 1e-3


def test_cautious_decay_in_a_step() -> None:
    """Plain descent, by hand; decay in the entries alone where both go to zero."""
    model = net()
    reference = copy.deepcopy(model)
    settings = {"lr": 0.1, "weight_decay": 0.5, "weight_decay_kind": "cautious"}
    optimizer = soframe.Optimizer(model, "sgd", decay_vectors=True, **settings, **EVERY_STEP)
    kit.train(model, loss_of, range(1), optimizer)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 4, 3, 3, generator=generator, dtype=torch.float64)
    y = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    (reference(x) - y).square().sum(1).mean().backward()
    masks = []
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        mask = (other.grad * other >= 0).double()
        masks.append(mask.flatten())
        expected = other - 0.1 * (other.grad + 0.5 * mask * other)
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)
    assert 0.2 < float(torch.cat(masks).mean()) < 0.9


def test_a_schedule_scales_the_angle() -> None:
    model = net()
    optimizer = soframe.Optimizer(model, "sgd", lr=0.1, constraint="hyperball", **EVERY_STEP)
    angles = []
    for lr in (0.1, 0.01):
        for group in optimizer.param_groups:
            group["lr"] = lr
        before = model.hidden.weight.detach().clone()
        kit.train(model, loss_of, range(1), optimizer)
        after = model.hidden.weight.detach()
        cosine = (before * after).sum() / before.norm() / after.norm()
        angles.append(math.acos(float(cosine)))
    assert 6 < angles[0] / angles[1] < 15


@pytest.mark.parametrize("method", ["soap-muon", "kfac"])
def test_a_resumed_run_is_the_same_to_the_bit(method: str) -> None:
    settings: dict[str, Any] = {"lr": 0.05, "constraint": "hyperball", **EVERY_STEP}
    model = net()
    optimizer = soframe.Optimizer(model, method, **settings)
    kit.train(model, loss_of, range(3), optimizer)
    with torch.no_grad():
        model.hidden.weight.mul_(1.5)  # who measured it anew would keep another norm
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    radii = kept(saved[1])
    assert radii
    again = net()
    again.load_state_dict(saved[0])
    other = soframe.Optimizer(again, method, **{**settings, "constraint": None})
    other.load_state_dict(saved[1])  # which has the constraint too
    kit.train(model, loss_of, range(3, 6), optimizer)
    kit.train(again, loss_of, range(3, 6), other)
    for mine, wanted in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, wanted)
    # Rounding has moved the norm of the weights; what is kept is that of the first step.
    for key, radius in kept(other.state_dict()).items():
        assert torch.equal(radius, radii[key])


def test_a_frozen_matrix_has_its_norm_after_a_resume() -> None:
    settings: dict[str, Any] = {"lr": 0.05, "constraint": "hyperball", **EVERY_STEP}
    model = net()
    optimizer = soframe.Optimizer(model, "sgd", **settings)
    start = norms(model)["hidden.weight"]
    kit.train(model, loss_of, range(2), optimizer)
    model.hidden.weight.requires_grad_(False)
    kit.train(model, loss_of, range(2, 3), optimizer)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for is_frozen_before in (False, True):
        again = net()
        again.hidden.weight.requires_grad_(not is_frozen_before)
        other = soframe.Optimizer(again, "sgd", **settings)
        again.load_state_dict(saved[0])
        expects = nullcontext()
        if is_frozen_before:
            expects = pytest.warns(UserWarning, match=r"of hidden\.weight are not loaded")
        with expects:
            other.load_state_dict(saved[1])
        with torch.no_grad():
            again.hidden.weight.mul_(1.5)  # who measured it anew would keep another norm
        again.hidden.weight.requires_grad_(True)
        kit.train(again, loss_of, range(3, 5), other)
        factor = 1.5 if is_frozen_before else 1.0
        norm = norms(again)["hidden.weight"]
        torch.testing.assert_close(norm, factor * start, rtol=1e-12, atol=0)


def kept(state: dict[str, Any]) -> dict[str, Tensor]:
    whole = next(entry["soframe"] for entry in state["state"].values() if "soframe" in entry)
    return torch.load(io.BytesIO(whole), weights_only=True)["own"]["radii"]


def test_the_norm_is_that_of_the_first_step() -> None:
    """Weights that are loaded before count, and those that move later do not."""
    model = net()
    optimizer = soframe.Optimizer(model, "sgd", lr=0.05, constraint="hyperball", **EVERY_STEP)
    with torch.no_grad():
        model.hidden.weight.mul_(3)
    start = model.hidden.weight.detach().norm()
    kit.train(model, loss_of, range(1), optimizer)
    with torch.no_grad():
        model.hidden.weight.mul_(2)
    kit.train(model, loss_of, range(1, 2), optimizer)
    torch.testing.assert_close(model.hidden.weight.detach().norm(), start, rtol=1e-12, atol=0)


def test_a_bias_that_freezes_leaves_its_weight_on_its_sphere() -> None:
    model = net()
    optimizer = soframe.Optimizer(model, "kfac", lr=0.05, constraint="hyperball", **EVERY_STEP)
    start = norms(model)["hidden.weight"]
    kit.train(model, loss_of, range(2), optimizer)
    radii = dict(optimizer._radii)
    model.hidden.bias.requires_grad_(False)
    kit.train(model, loss_of, range(2, 5), optimizer)
    torch.testing.assert_close(norms(model)["hidden.weight"], start, rtol=1e-12, atol=0)
    assert optimizer._radii.keys() == radii.keys()
    assert all(optimizer._radii[key] is radius for key, radius in radii.items())


def test_a_weight_that_is_thawed_has_the_norm_of_then() -> None:
    model = net()
    model.hidden.weight.requires_grad_(False)
    optimizer = soframe.Optimizer(model, "soap", lr=0.05, constraint="hyperball", **EVERY_STEP)
    kit.train(model, loss_of, range(2), optimizer)
    with torch.no_grad():
        model.hidden.weight.mul_(3)
    before = model.hidden.weight.detach().clone()
    model.hidden.weight.requires_grad_(True)
    kit.train(model, loss_of, range(2, 6), optimizer)
    after = model.hidden.weight.detach()
    assert not torch.equal(before, after)
    torch.testing.assert_close(after.norm(), before.norm(), rtol=1e-12, atol=0)


def test_norms_of_another_model_are_refused_and_change_nothing() -> None:
    model = net()
    optimizer = soframe.Optimizer(model, "sgd", lr=0.05, constraint="hyperball", **EVERY_STEP)
    kit.train(model, loss_of, range(2), optimizer)
    state = optimizer.state_dict()
    renamed = nn.Sequential(OrderedDict({"body": nn.Sequential(net()), "more": nn.Linear(2, 2)}))
    other = soframe.Optimizer(renamed, "sgd", lr=0.05, constraint="hyperball", **EVERY_STEP)
    with pytest.raises(ValueError, match=r"norm\(s\) of .*weight, which this model does not have"):
        other.load_state_dict(state)
    assert other.preconditioner.steps == 0


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"weight_decay": 0.1}, r"weight_decay=0\.1 could not change it: pass weight_decay=0"),
        (
            {"auxiliary_constraint": "hyperball", "auxiliary_weight_decay": 0.1},
            r"auxiliary_constraint='hyperball' keeps .* pass auxiliary_weight_decay=0",
        ),
        ({"constraint": "ball"}, "constraint must be None or 'hyperball', not 'ball'"),
        ({"auxiliary_constraint": 3}, "auxiliary_constraint must be None or 'hyperball', not 3"),
        ({"weight_decay_kind": "bold"}, "weight_decay_kind must be one of 'decoupled', 'cautious'"),
        ({"auxiliary_weight_decay_kind": "l2"}, "auxiliary_weight_decay_kind must be one of"),
    ],
)
def test_settings_that_cannot_be_meant(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        soframe.Optimizer(net(), "muon", **{"lr": 0.1, "constraint": "hyperball", **settings})


@pytest.mark.parametrize(
    ("value", "problem"), [(0.0, "which is zero"), (math.inf, "which is not finite")]
)
def test_a_weight_without_a_sphere_is_refused(value: float, problem: str) -> None:
    """One group of it is enough."""
    model = net()
    with torch.no_grad():
        model.conv.weight[:2].fill_(value)
    with pytest.raises(ValueError, match=rf"norm of conv\.weight, {problem} in some group"):
        soframe.Optimizer(model, "kfac", lr=0.1, constraint="hyperball", kl_clip=None)
    with torch.no_grad():
        model.conv.weight.fill_(1.0)
    optimizer = soframe.Optimizer(model, "kfac", lr=0.1, constraint="hyperball", kl_clip=None)
    with torch.no_grad():
        model.conv.weight[2:].fill_(value)  # as loading does, after it was built
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=rf"norm of conv\.weight, {problem} in some group"):
        optimizer.step()
    assert all(torch.equal(before[key], now) for key, now in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("weight_decay", 0.1, "param group 'sgd.*could not change it"),
        ("weight_decay", math.inf, "param group 'sgd.*weight_decay must be finite"),
        ("lr", math.nan, "param group 'sgd.*lr must be finite"),
        ("lr", -0.1, "param group 'sgd.*lr must be finite .* not negative"),
        ("constraint", "box", "param group 'sgd.*constraint must be"),
        ("weight_decay_kind", "l2", "param group 'sgd.*weight_decay_kind must be"),
    ],
)
def test_settings_of_groups_are_checked_at_each_step(name: str, value: Any, problem: str) -> None:
    model = net()
    optimizer = soframe.Optimizer(model, "sgd", lr=0.1, constraint="hyperball", **EVERY_STEP)
    kit.train(model, loss_of, range(1), optimizer)
    before = copy.deepcopy(model.state_dict())
    optimizer.param_groups[0][name] = value
    with pytest.raises(ValueError, match=problem):
        kit.train(model, loss_of, range(1, 2), optimizer)
    assert all(torch.equal(before[key], now) for key, now in model.state_dict().items())


# -- on ranks -----------------------------------------------------------------------------------

SETTINGS: list[dict[str, Any]] = [
    {"constraint": "hyperball", "weight_decay": 0.0},
    {"weight_decay": 0.5, "weight_decay_kind": "cautious"},
]
NAMES = ["hyperball", "cautious"]


@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
@pytest.mark.parametrize("method", ["kfac", "soap-muon"])
@pytest.mark.slow
def test_micro_batches_and_resumption(method: str, settings: dict[str, Any]) -> None:
    check_method(method, ranks=(), fishers=("empirical",), **settings)


@pytest.mark.distributed
@pytest.mark.parametrize("settings", SETTINGS, ids=NAMES)
def test_ranks_are_one_process(settings: dict[str, Any]) -> None:
    """Saved on three ranks, and resumed on two under another strategy."""
    check_method(
        "soap",
        ranks=(2, 3),
        strategies=("comm-opt", "mem-opt"),
        fishers=("empirical",),
        launch=run_ranks,
        **settings,
    )


def part_ways(rank: int, ranks: int, name: str, value: Any) -> None:
    model = net()
    optimizer = soframe.Optimizer(model, "sgd", lr=0.1, kl_clip=None)
    kit.train(model, loss_of, range(1), optimizer)
    if rank == 1:
        optimizer.param_groups[0][name] = value
    kit.train(model, loss_of, range(1, 2), optimizer)


@pytest.mark.distributed
def test_a_setting_that_one_rank_refuses_is_an_error_on_all() -> None:
    results = run_ranks(part_ways, 2, "constraint", "box", check=False)
    for result in results:
        assert isinstance(result, RankFailure)
        assert isinstance(result.exception, (ValueError, RuntimeError)), result
        assert "param group" in str(result.exception), result
