"""Ready-made schedules, and batches of changing size: what the running factors make of them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from soframe.losses import SquaredError
from soframe.schedules import (
    Every,
    Falling,
    GrowingBatch,
    GrowingInterval,
    WarmInterval,
    sample_decay,
)
from soframe.testing import compare
from tests.curvature import blocks, closing, factors, fill, half_square, preconditioner, randn
from tests.examples import examples
from tests.test_fisher import deep, observe
from tests.trust_region.dense import Dense, affine_net
from tests.trust_region.kit import Measured, closures, trust_region, vector

# -- the defaults --------------------------------------------------------------------------------


class Branch(nn.Module):
    """A residual branch that begins with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.inner = nn.Linear(12, 16), nn.Linear(16, 16)
        self.last, self.head = nn.Linear(16, 16), nn.Linear(16, 6)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.into(x).relu()
        scores: Tensor = self.head(hidden + self.last(self.inner(hidden).relu()))
        return scores


def perceptron() -> nn.Module:
    layers = [nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 6)]
    return nn.Sequential(*layers)


def loss_after_small_batches(
    build: Callable[[], nn.Module], size: int, precondition: Callable[..., Any] | None
) -> float:
    """Train by SGD(0.05, 0.9) on batches of so few samples; return the loss over other samples."""
    torch.manual_seed(0)
    model = build().double()
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    own = precondition(model, optimizer=optimizer) if precondition else None
    inputs, noise = randn(1200, 12), randn(1200, 6, seed=1)
    labels = (inputs @ randn(12, 6, seed=2) + 0.3 * noise).argmax(1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(150):
        chosen = torch.randint(0, 1000, (size,), generator=generator)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        if own is not None:
            own.step()
        optimizer.step()
    with torch.no_grad():
        return F.cross_entropy(model(inputs[1000:]), labels[1000:]).item()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("build", [perceptron, Branch])
def test_the_first_curvature_of_a_few_samples_does_no_harm(
    build: Callable[[], nn.Module], size: int
) -> None:
    untrained = math.log(6)  # of six classes that are equally likely
    plain = loss_after_small_batches(build, size, None)
    found = loss_after_small_batches(build, size, soframe.Preconditioner)
    assert found < 0.9 * min(plain, untrained)


# -- intervals ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (WarmInterval(4, steps=3), [0, 1, 2, 4, 8, 12]),
        (WarmInterval(5, steps=7, first=2), [0, 2, 4, 6, 10]),
        (GrowingInterval(4, age=0.5), [0, 1, 2, 3, 4, 6, 8, 12]),
        (GrowingInterval(1), list(range(14))),
    ],
    ids=str,
)
def test_intervals_by_hand(value: Any, expected: list[int]) -> None:
    every = Every("solve_every", value)
    assert [step for step in range(14) if every.due(step)] == expected


def test_a_number_falls_by_a_factor_down_to_the_last() -> None:
    falling = Falling(0.8, 0.1, factor=0.5)
    assert [falling(step) for step in range(5)] == [0.8, 0.4, 0.2, 0.1, 0.1]
    assert falling(10**9) == 0.1


def test_the_default_damping_falls_with_the_steps() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    default = soframe.Preconditioner(model, optimizer=optimizer)
    for step in range(3):
        assert default.damping == pytest.approx(0.05 * 0.99**step)
        optimizer.zero_grad()
        half_square(model(randn(8, 3).float()), randn(8, 1).float()).backward()
        default.step()
        optimizer.step()


@given(power=st.integers(0, 8), age=st.sampled_from([0.01, 0.1, 0.3, 1.0]))
@settings(max_examples=examples(12))
def test_nothing_is_older_than_its_share_of_the_steps(power: int, age: float) -> None:
    interval = GrowingInterval(2**power, age)
    every, last, due = Every("solve_every", interval), 0, 0
    for step in range(1000):
        if every.due(step):
            last, due = step, due + 1
        assert step - last < max(1.0, min(2**power, age * step) + 1e-9), step
        assert interval(step) <= interval(step + 1) <= 2**power
    # No more often than the age asks for, within the factor of two of the powers.
    wanted = sum(1 / max(1.0, min(2**power, age * step)) for step in range(1000))
    assert due <= 2 * wanted + 1


@pytest.mark.parametrize("name", ["statistics_every", "solve_every"])
def test_a_preconditioner_takes_them(name: str) -> None:
    model = fill(nn.Linear(2, 2))
    taken, seen = [], None
    with closing(preconditioner(model, **{name: WarmInterval(3, steps=2)})) as own:
        for step in range(7):
            model.zero_grad()
            model(randn(3, 2, seed=step)).square().mean().backward()
            own.step()
            block = own.blocks[0]
            data = {"statistics_every": block.running, "solve_every": block.second_order["A"]}
            now = next(iter(data[name].values())).clone()
            if seen is None or not torch.equal(now, seen):
                taken.append(step)
            seen = now
    assert taken == [0, 1, 3, 6]


# -- batches -----------------------------------------------------------------------------------


def test_the_batches_of_the_paper() -> None:
    """``m_k = min(m_1 exp((k - 1) / b), |S|)`` with b such that ``m_500 = |S|``."""
    size = GrowingBatch(1000, 60000, steps=499)
    b = 499 / torch.tensor(60.0, dtype=torch.float64).log()
    for k in (1, 2, 100, 499, 500, 501, 10**6):
        exact = 1000 * torch.tensor((k - 1) / float(b), dtype=torch.float64).exp()
        assert size(k - 1) == round(min(float(exact), 60000.0))


@given(first=st.integers(1, 50), more=st.integers(0, 500), steps=st.integers(1, 60))
@settings(max_examples=examples(20))
def test_batches_grow_from_the_first_to_the_full(first: int, more: int, steps: int) -> None:
    size = GrowingBatch(first, first + more, steps)
    sizes = [size(step) for step in range(steps + 2)]
    assert sizes == sorted(sizes)
    assert sizes[0] == (first if steps > 0 else first + more)
    assert sizes[steps:] == [first + more] * 2


def running(sizes: list[int], times: list[int], **settings: Any) -> list[torch.Tensor]:
    """The running factors after batches of these sizes, each repeated within its batch."""
    model = fill(deep())
    own = preconditioner(model, fisher="type-2", loss="cross-entropy", **settings)
    with closing(own):
        for step, (size, repeats) in enumerate(zip(sizes, times, strict=True)):
            model.zero_grad()
            x = randn(size, 3, seed=step).repeat(repeats, 1)
            observe(model, own, [(x, torch.zeros(len(x)).long())], nn.functional.cross_entropy)
            own.step()
        return [factor for name in blocks(own) for factor in factors(own, name)]


@given(times=st.lists(st.integers(1, 4), min_size=3, max_size=3))
@settings(max_examples=examples(6))
def test_decay_counts_batches_whatever_their_size(times: list[int]) -> None:
    """Every sample of a batch twice over is the same mean, and weighs the same in the average."""
    plain = running([2, 3, 5], [1, 1, 1], decay=0.8)
    for one, other in zip(plain, running([2, 3, 5], times, decay=0.8), strict=True):
        compare(other, one, "factor")


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
@settings(max_examples=examples(8))
def test_with_the_decay_of_samples_it_is_the_mean_over_all(sizes: list[int]) -> None:
    found = running(sizes, [1] * len(sizes), decay=sample_decay(lambda step: sizes[step]))
    model = fill(deep())
    with closing(preconditioner(model, fisher="type-2", loss="cross-entropy")) as own:
        x = torch.cat([randn(size, 3, seed=step) for step, size in enumerate(sizes)])
        observe(model, own, [(x, torch.zeros(len(x)).long())], nn.functional.cross_entropy)
        own.step()
        for name, pair in zip(blocks(own), zip(found[::2], found[1::2], strict=True), strict=True):
            for one, whole in zip(pair, factors(own, name), strict=True):
                compare(one, whole, name)


def test_a_decay_may_be_the_mean_over_statistics_steps() -> None:
    sizes = [2, 3, 5]
    found = running(sizes, [1] * 3, decay="mean")
    for one, other in zip(
        found, running(sizes, [1] * 3, decay=sample_decay(lambda _: 1)), strict=True
    ):
        compare(one, other, "factor")


def test_the_decay_of_samples_resumes_at_any_step() -> None:
    decay = sample_decay(GrowingBatch(2, 8, steps=2))
    assert decay(2) == 1 - 8 / 14
    assert [decay(step) for step in range(3)] == [0.0, 1 - 4 / 6, 1 - 8 / 14]


def test_trust_region_steps_on_growing_batches_are_the_dense_ones() -> None:
    net = affine_net()
    own = trust_region(net, SquaredError(), Measured(0.5), decay=0.0, reject=False)
    reference, size = Dense(vector(net), 0.5), GrowingBatch(2, 16, steps=3)
    for step in range(4):
        x, y = randn(16, 3, seed=step), randn(16, 2, seed=step + 5)
        batch = (x[: size(step)], y[: size(step)])
        own.step(closures(net, [batch], half_square))
        predicted = reference.step([batch])
        compare(vector(net), reference.theta, f"parameters after step {step}")
        assert own.last["predicted"] == pytest.approx(predicted, rel=1e-8)


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WarmInterval(0, 3), "WarmInterval: interval must be a positive integer, not 0"),
        (lambda: WarmInterval(2, 3, first=True), "first must be a positive integer, not True"),
        (lambda: GrowingInterval(0), "last must be a positive integer, not 0"),
        (lambda: GrowingInterval(12), "last must be a power of two, not 12"),
        (lambda: GrowingInterval(4, age=0.0), r"age must be in \(0, 1\], not 0.0"),
        (lambda: GrowingInterval(4, age=float("nan")), r"age must be in \(0, 1\], not nan"),
        (lambda: Falling(0.1, 0.0), "needs 0 < last <= first, finite, not 0.0 and 0.1"),
        (lambda: Falling(0.1, 0.2), "needs 0 < last <= first, finite, not 0.2 and 0.1"),
        (lambda: Falling(float("nan"), 0.2), "needs 0 < last <= first, finite, not 0.2 and nan"),
        (lambda: Falling(0.1, 0.1, factor=1.0), r"factor must be in \(0, 1\), not 1.0"),
        (lambda: GrowingBatch(2.0, 8, 3), "first must be a positive integer, not 2.0"),  # type: ignore[arg-type]
        (lambda: GrowingBatch(2, 8, 0), "steps must be a positive integer, not 0"),
        (lambda: GrowingBatch(9, 8, 3), "first must not be above full, not 9 and 8"),
    ],
)
def test_settings_out_of_range(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_they_are_part_of_the_package() -> None:
    assert soframe.schedules.GrowingBatch is GrowingBatch
