"""The KL clip against its closed form, with the learning rates that the optimizer has now."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import soframe
from soframe.step import clip as clipping
from soframe.step.clip import kl_clip_factor, norm_clip_factor
from soframe.testing import compare
from tests.curvature import closing, fill, half_square, randn
from tests.examples import examples

LIVE = soframe.Clips(clip_lr="live")


def net() -> nn.Sequential:
    return fill(nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)))


def step(model: nn.Module, own: soframe.Preconditioner, seed: int = 0) -> list[list[Tensor]]:
    """One step; returns raw and preconditioned gradients."""
    model.zero_grad()
    half_square(model(randn(5, 2, 3, 3, seed=seed)), randn(5, 2, seed=seed + 1)).backward()
    raw = [p.grad.clone() for p in model.parameters()]
    own.step()
    return [raw, [p.grad.clone() for p in model.parameters()]]


def clip(raw: list[Tensor], p: list[Tensor], lrs: Sequence[float], kappa: float) -> float:
    """The factor by its definition, over parameters."""
    total = sum(lr**2 * float((a * b).sum()) for lr, a, b in zip(lrs, raw, p, strict=True))
    return min(1.0, (kappa / abs(total)) ** 0.5)


@given(
    lrs=st.tuples(st.floats(1e-3, 10), st.floats(1e-3, 10)),
    kappa=st.sampled_from([1e-6, 1e-3, 1.0, 1e6]),
    as_tensor=st.booleans(),
)
@settings(max_examples=examples(20))
def test_live_learning_rates_of_several_groups(
    lrs: tuple[float, float], kappa: float, as_tensor: bool
) -> None:
    plain, model = net(), net()
    groups = [{"params": list(model[i].parameters()), "lr": 99.0} for i in (0, 3)]
    optimizer = torch.optim.SGD(groups, lr=99.0)
    unclipped = soframe.Preconditioner(plain, kl_clip=None, statistics_every=1)
    own = soframe.Preconditioner(
        model, kl_clip=kappa, optimizer=optimizer, statistics_every=1, clips=LIVE
    )
    with closing(unclipped), closing(own):
        for number in range(2):
            now = [lr / (1 + number) for lr in lrs]
            for group, lr in zip(optimizer.param_groups, now, strict=True):
                group["lr"] = torch.tensor(lr, dtype=torch.float64) if as_tensor else lr
            raw, p = step(plain, unclipped, number)
            _, clipped = step(model, own, number)
            factor = clip(raw, p, [now[0], now[0], now[1], now[1]], kappa)
            for one, other in zip(clipped, p, strict=True):
                compare(one, factor * other, f"step {number}")


@pytest.mark.parametrize("rates", [[0.3], [0.3, 0.05, 2.0]])
def test_a_schedule_of_the_learning_rate(rates: list[float]) -> None:
    plain, model = net(), net()
    lr = rates[0] if len(rates) == 1 else lambda number: rates[number]
    unclipped = soframe.Preconditioner(plain, kl_clip=None, statistics_every=1)
    own = soframe.Preconditioner(
        model, kl_clip=lambda number: 1e-4 / (1 + number), lr=lr, statistics_every=1, clips=LIVE
    )
    with closing(unclipped), closing(own):
        for number, rate in enumerate(rates):
            raw, p = step(plain, unclipped, number)
            _, clipped = step(model, own, number)
            factor = clip(raw, p, [rate] * 4, 1e-4 / (1 + number))
            assert factor < 1
            for one, other in zip(clipped, p, strict=True):
                compare(one, factor * other, f"step {number}")


def test_layers_without_a_block_are_neither_counted_nor_scaled() -> None:
    model, plain = net(), net()
    settings = {"lr": 1.0, "skip": ["^0$"]}
    own = soframe.Preconditioner(model, kl_clip=1e-6, **{"statistics_every": 1, **settings})
    with (
        closing(own),
        closing(
            soframe.Preconditioner(plain, kl_clip=None, **{"statistics_every": 1, **settings})
        ) as other,
    ):
        raw, p = step(plain, other)
        _, clipped = step(model, own)
    factor = clip(raw[2:], p[2:], [1.0, 1.0], 1e-6)
    for number, scale in enumerate((1, 1, factor, factor)):
        compare(clipped[number], scale * p[number], f"parameter {number}")


def test_no_clip_is_no_factor() -> None:
    """With kl_clip=None the gradient is what a bound that is never reached leaves."""
    results = []
    for kl_clip in (None, 1e30):
        model = net()
        with closing(
            soframe.Preconditioner(model, kl_clip=kl_clip, lr=1.0, statistics_every=1)
        ) as own:
            results.append(step(model, own)[1])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_gradient_of_zeros_stays_zero() -> None:
    model = net()
    with closing(soframe.Preconditioner(model, lr=1.0, statistics_every=1)) as own:
        inputs = randn(5, 2, 3, 3)
        half_square(model(inputs), model(inputs).detach()).backward()
        own.step()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    kappa=st.floats(1e-6, 1e3),
    sign=st.sampled_from([1, -1]),
)
@settings(max_examples=examples(20))
def test_closed_form(sizes: list[int], kappa: float, sign: int) -> None:
    p = [randn(1, n, 2, seed=n) for n in sizes]
    g = [sign * (q + 0.1) for q in p]
    lrs = [0.1 * (1 + i) for i in range(len(sizes))]
    factor = kl_clip_factor(p, g, lrs, kappa)
    compare(factor, torch.tensor(clip(g, p, lrs, kappa), dtype=torch.float64), "factor")


def test_nothing_is_read_on_the_host() -> None:
    """Tensors without values: reading one would raise."""
    p = [torch.empty(1, 2, 3, device="meta"), torch.empty(2, 1, 1, device="meta")]
    factor = kl_clip_factor(p, p, [0.1, torch.empty((), device="meta")], 1e-3)
    assert factor.is_meta
    assert factor.shape == ()
    with pytest.raises(RuntimeError, match="meta"):
        factor.item()


@pytest.mark.parametrize("lr", [1e25, 1e200])
@pytest.mark.parametrize("size", [0.0, 1e-10, 1.0])
def test_rates_whose_squares_are_out_of_range(lr: float, size: float) -> None:
    own = size * torch.ones(1, 2, 2)
    factor = kl_clip_factor([own, own], [own, own], [lr, lr], 1e-2)
    expected = min(1.0, 0.1 / (lr * size * 8**0.5)) if size else 1.0
    assert float(factor) == pytest.approx(expected, rel=1e-5, abs=1e-44)
    assert math.isfinite(float(norm_clip_factor([own, own], [lr, lr], 1e-2)))
    assert float(norm_clip_factor([own], [1e25], 1.0)) == pytest.approx(
        min(1.0, 1 / (1e25 * 2 * size)) if size else 1.0, rel=1e-5
    )


def test_every_device_is_scaled() -> None:
    """Also where some are on another one: here without values, which cannot be scaled together."""
    here, there = torch.ones(1, 2, 3), torch.ones(1, 2, 2, device="meta")
    clipping._scale([here, there], torch.tensor(0.5))
    assert torch.equal(here, torch.full((1, 2, 3), 0.5))


def test_weight_and_bias_in_different_groups() -> None:
    plain, model = net(), net()
    weights = [p for name, p in model.named_parameters() if name.endswith("weight")]
    biases = [p for name, p in model.named_parameters() if name.endswith("bias")]
    optimizer = torch.optim.SGD([{"params": weights, "lr": 0.1}, {"params": biases, "lr": 7.0}])
    unclipped = soframe.Preconditioner(plain, kl_clip=None, statistics_every=1)
    own = soframe.Preconditioner(model, kl_clip=1e-3, optimizer=optimizer, statistics_every=1)
    with closing(unclipped), closing(own):
        raw, p = step(plain, unclipped)
        _, clipped = step(model, own)
    factor = clip(raw, p, [0.1, 7.0, 0.1, 7.0], 1e-3)
    assert factor < 0.9 * clip(raw, p, [0.1, 0.1, 0.1, 0.1], 1e-3)  # the biases' rate matters
    for one, other in zip(clipped, p, strict=True):
        compare(one, factor * other, "clipped")


@pytest.mark.parametrize("bound", ["kl_clip", "norm_clip"])
def test_one_of_two_layers_alike_has_its_bias_in_another_group(bound: str) -> None:
    """The two are one stack, in which one has a rate for each entry, and the other one rate."""
    every = [0.1, 7.0, 0.3, 0.3]
    plain, model = (fill(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))) for _ in range(2))
    groups = [{"params": [p], "lr": lr} for p, lr in zip(model.parameters(), every, strict=True)]
    groups[2]["params"] += groups.pop()["params"]
    unclipped = soframe.Preconditioner(plain, kl_clip=None, statistics_every=1)
    bounds = {"kl_clip": None, "norm_clip": None, bound: 1e-3}
    own = soframe.Preconditioner(
        model,
        optimizer=torch.optim.SGD(groups),
        statistics_every=1,
        kl_clip=bounds["kl_clip"],
        clips=soframe.Clips(norm_clip=bounds["norm_clip"]),
    )
    found = []
    for one, preconditioner in ((plain, unclipped), (model, own)):
        with closing(preconditioner):
            half_square(one(randn(5, 3)), randn(5, 3, seed=1)).backward()
            raw = [p.grad.clone() for p in one.parameters()]
            preconditioner.step()
            found.append([p.grad for p in one.parameters()])
    factor = clip(raw, found[0], every, 1e-3)
    if bound == "norm_clip":
        squares = [(lr * p).square().sum() for lr, p in zip(every, found[0], strict=True)]
        factor = 1e-3 / float(sum(squares)) ** 0.5
    assert factor < 1
    for p, direction in zip(found[1], found[0], strict=True):
        compare(p, factor * direction, "clipped")


def test_parameters_that_groups_of_one_size_exchange() -> None:
    plain, model = net(), net()
    optimizer = torch.optim.SGD(
        [
            {"params": list(model[0].parameters()), "lr": 0.1},
            {"params": list(model[3].parameters()), "lr": 7.0},
        ]
    )
    unclipped = soframe.Preconditioner(plain, kl_clip=None, statistics_every=1)
    own = soframe.Preconditioner(model, kl_clip=1e-3, optimizer=optimizer, statistics_every=1)
    one, other = optimizer.param_groups
    with closing(unclipped), closing(own):
        for number, rates in enumerate(([0.1, 0.1, 7.0, 7.0], [7.0, 7.0, 0.1, 0.1])):
            if number == 1:
                one["params"], other["params"] = other["params"], one["params"]
            raw, p = step(plain, unclipped, number)
            _, clipped = step(model, own, number)
            for mine, direction in zip(clipped, p, strict=True):
                compare(mine, clip(raw, p, rates, 1e-3) * direction, f"step {number}")


def test_learning_rates_of_an_optimizer_that_has_loaded_its_state() -> None:
    plain, model = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=99.0)
    unclipped = soframe.Preconditioner(plain, kl_clip=None, statistics_every=1)
    own = soframe.Preconditioner(
        model, kl_clip=1e-4, optimizer=optimizer, statistics_every=1, clips=LIVE
    )
    optimizer.load_state_dict(torch.optim.SGD(plain.parameters(), lr=0.3).state_dict())
    with closing(unclipped), closing(own):
        raw, p = step(plain, unclipped)
        _, clipped = step(model, own)
    factor = clip(raw, p, [0.3] * 4, 1e-4)
    for one, other in zip(clipped, p, strict=True):
        compare(one, factor * other, "clipped")
