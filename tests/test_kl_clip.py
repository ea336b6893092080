"""The KL clip against its closed form: of updates, and of steps at a learning rate."""

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import soframe
from soframe.clips import Clip, KLClip, NormClip
from soframe.step import clip as clipping
from soframe.testing import compare
from tests.curvature import closing, fill, half_square, randn
from tests.examples import examples


def net() -> nn.Sequential:
    return fill(nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 2)))


def step(model: nn.Module, own: soframe.Preconditioner, seed: int = 0) -> list[list[Tensor]]:
    """One step; returns raw and preconditioned gradients."""
    model.zero_grad()
    half_square(model(randn(5, 2, 3, 3, seed=seed)), randn(5, 2, seed=seed + 1)).backward()
    raw = [p.grad.clone() for p in model.parameters()]
    own.step()
    return [raw, [p.grad.clone() for p in model.parameters()]]


def clip(raw: list[Tensor], p: list[Tensor], kappa: float, lr: float = 1.0) -> float:
    """The factor by its definition, over parameters."""
    total = sum(lr**2 * float((a * b).sum()) for a, b in zip(raw, p, strict=True))
    return min(1.0, (kappa / abs(total)) ** 0.5)


def factor_of(
    bounded: Clip, updates: Sequence[Tensor], gradients: Sequence[Tensor], lr: float, bound: float
) -> Tensor:
    """The factor of a step, of one tensor for each stack."""
    terms = [bounded.term(p, g).double() for p, g in zip(updates, gradients, strict=True)]
    return bounded.factor(torch.stack(terms).sum() * lr * lr, bound).clamp(max=1.0)


@given(
    rates=st.tuples(st.floats(1e-3, 10), st.floats(1e-3, 10)),
    kappa=st.sampled_from([1e-6, 1e-3, 1.0, 1e6]),
)
@settings(max_examples=examples(20))
def test_by_default_updates_are_bounded_at_any_rate(
    rates: tuple[float, float], kappa: float
) -> None:
    """So that half the rate is half the step, and a group's rate scales its own layers alone."""
    plain, model = net(), net()
    groups = [{"params": list(model[i].parameters()), "lr": 99.0} for i in (0, 3)]
    optimizer = torch.optim.SGD(groups, lr=99.0)
    unclipped = soframe.Preconditioner(plain, kl_clip=None, statistics_every=1)
    own = soframe.Preconditioner(model, kl_clip=kappa, optimizer=optimizer, statistics_every=1)
    with closing(unclipped), closing(own):
        for number in range(2):
            for group, lr in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = lr / (1 + number)
            raw, p = step(plain, unclipped, number)
            _, clipped = step(model, own, number)
            factor = clip(raw, p, kappa)
            for one, other in zip(clipped, p, strict=True):
                compare(one, factor * other, f"step {number}")


@pytest.mark.parametrize("schedule", [None, lambda step: min(1.0, (step + 1) / 4)])
def test_a_clipped_step_is_as_long_as_its_rate(schedule: Callable[[int], float] | None) -> None:
    """A warm-up warms up; the second of two runs has half the rate, and moves half as far."""
    moves = []
    for rate in (0.4, 0.2):
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        scheduler = schedule and torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
        with closing(soframe.Preconditioner(model, optimizer=optimizer, kl_clip=1e-6)) as own:
            before = [p.detach().clone() for p in model.parameters()]
            step(model, own)
            optimizer.step()
            assert own.metrics()["kl_clip_factor"] < 1
        moves.append([p.detach() - b for p, b in zip(model.parameters(), before, strict=True)])
        if scheduler:
            assert optimizer.param_groups[0]["lr"] == pytest.approx(rate / 4)
    for far, near in zip(*moves, strict=True):
        compare(far, 2 * near, "move")


@pytest.mark.parametrize("rates", [[0.3], [0.3, 0.05, 2.0]])
def test_a_schedule_of_the_learning_rate(rates: list[float]) -> None:
    plain, model = net(), net()
    lr = rates[0] if len(rates) == 1 else lambda number: rates[number]
    unclipped = soframe.Preconditioner(plain, kl_clip=None, statistics_every=1)
    own = soframe.Preconditioner(
        model, kl_clip=lambda number: 1e-4 / (1 + number), lr=lr, statistics_every=1
    )
    with closing(unclipped), closing(own):
        for number, rate in enumerate(rates):
            raw, p = step(plain, unclipped, number)
            _, clipped = step(model, own, number)
            factor = clip(raw, p, 1e-4 / (1 + number), rate)
            assert factor < 1
            for one, other in zip(clipped, p, strict=True):
                compare(one, factor * other, f"step {number}")


def test_layers_without_a_block_are_neither_counted_nor_scaled() -> None:
    model, plain = net(), net()
    settings = {"skip": ["^0$"]}
    own = soframe.Preconditioner(model, kl_clip=1e-6, **{"statistics_every": 1, **settings})
    with (
        closing(own),
        closing(
            soframe.Preconditioner(plain, kl_clip=None, **{"statistics_every": 1, **settings})
        ) as other,
    ):
        raw, p = step(plain, other)
        _, clipped = step(model, own)
    factor = clip(raw[2:], p[2:], 1e-6)
    for number, scale in enumerate((1, 1, factor, factor)):
        compare(clipped[number], scale * p[number], f"parameter {number}")


def test_no_clip_is_no_factor() -> None:
    """With kl_clip=None the gradient is what a bound that is never reached leaves."""
    results = []
    for kl_clip in (None, 1e30):
        model = net()
        with closing(soframe.Preconditioner(model, kl_clip=kl_clip, statistics_every=1)) as own:
            results.append(step(model, own)[1])
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)


def test_a_gradient_of_zeros_stays_zero() -> None:
    model = net()
    with closing(soframe.Preconditioner(model, statistics_every=1)) as own:
        inputs = randn(5, 2, 3, 3)
        half_square(model(inputs), model(inputs).detach()).backward()
        own.step()
    assert all(torch.equal(p.grad, torch.zeros_like(p)) for p in model.parameters())


@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    kappa=st.floats(1e-6, 1e3),
    lr=st.floats(1e-3, 10),
    sign=st.sampled_from([1, -1]),
)
@settings(max_examples=examples(20))
def test_closed_form(sizes: list[int], kappa: float, lr: float, sign: int) -> None:
    p = [randn(1, n, 2, seed=n) for n in sizes]
    g = [sign * (q + 0.1) for q in p]
    factor = factor_of(KLClip(), p, g, lr, kappa)
    compare(factor, torch.tensor(clip(g, p, kappa, lr), dtype=torch.float64), "factor")


def test_nothing_is_read_on_the_host() -> None:
    """Tensors without values: reading one would raise."""
    p = [torch.empty(1, 2, 3, device="meta"), torch.empty(2, 1, 1, device="meta")]
    factor = factor_of(KLClip(), p, p, 0.1, 1e-3)
    assert factor.is_meta
    assert factor.shape == ()
    with pytest.raises(RuntimeError, match="meta"):
        factor.item()


@pytest.mark.parametrize("lr", [1e25, 1e150])
@pytest.mark.parametrize("size", [0.0, 1e-10, 1.0])
def test_rates_whose_squares_are_out_of_range(lr: float, size: float) -> None:
    own = size * torch.ones(1, 2, 2)
    factor = factor_of(KLClip(), [own, own], [own, own], lr, 1e-2)
    expected = min(1.0, 0.1 / (lr * size * 8**0.5)) if size else 1.0
    assert float(factor) == pytest.approx(expected, rel=1e-5, abs=1e-44)
    assert math.isfinite(float(factor_of(NormClip(), [own, own], [own, own], lr, 1e-2)))
    assert float(factor_of(NormClip(), [own], [own], 1e25, 1.0)) == pytest.approx(
        min(1.0, 1 / (1e25 * 2 * size)) if size else 1.0, rel=1e-5
    )


def test_every_device_is_scaled() -> None:
    """Also where some are on another one: here without values, which cannot be scaled together."""
    here, there = torch.ones(1, 2, 3), torch.ones(1, 2, 2, device="meta")
    clipping._scale([here, there], torch.tensor(0.5))
    assert torch.equal(here, torch.full((1, 2, 3), 0.5))
