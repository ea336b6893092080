"""Moments of some rows: those of the rows that were chosen, unbiased, with the error as stated."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soframe.capture.sampling import Draw, Sampler, chosen
from soframe.layers import Conv2dHelper, LayerHelper, LinearHelper
from soframe.testing import compare
from tests import kit
from tests.curvature import blocks, closing, factors, fill, preconditioner, randn
from tests.distributed.training import Case, Run, train_alone


def run(model: nn.Module, batches: list[Tensor], steps: int = 1, **options: Any) -> Any:
    """The preconditioner after some steps on the same weights."""
    own = preconditioner(model, decay=0.5, **options)
    with closing(own):
        kit.train(model, lambda net, _: (net(x).square().sum() for x in batches), range(steps), own)
    return own


class Smaller(LinearHelper):
    """The plain twin: rows are written out, those that are not chosen are left out."""

    rows: Any = None

    def input_rows(self, *inputs: Tensor) -> Tensor:
        return self._some(super().input_rows(*inputs))

    def output_rows(self, grad_output: Tensor) -> Tensor:
        return self._some(super().output_rows(grad_output))

    def _some(self, rows: Tensor) -> Tensor:
        return rows.flatten(1, 2)[:, self.rows].unsqueeze(2)


@pytest.mark.parametrize(("rows", "wanted"), [(0.25, 5), (7, 7), (0.01, 1), (0.99, 20), (99, 20)])
def test_factors_are_those_of_the_chosen_rows(rows: float | int, wanted: int) -> None:
    """With a loss that is a sum every row counts alike: a smaller batch has the same factors."""
    x = randn(5, 4, 3)
    own = run(fill(nn.Linear(3, 2)), [x], rows=rows, loss_average="sum", samples="positions")
    Smaller.rows = chosen(0, 0, 0, 20, wanted)
    assert len(Smaller.rows) == wanted
    options = {"layers": {".*": Smaller}, "loss_average": "sum", "samples": "positions"}
    twin = run(fill(nn.Linear(3, 2)), [x], **options)
    for one, two in zip(factors(own, "Linear"), factors(twin, "Linear"), strict=True):
        compare(one, two, "chosen rows", rtol=1e-12)


@pytest.mark.parametrize("groups", [1, 2])
def test_of_images_whole_ones_are_taken(groups: int) -> None:
    x = randn(6, 2, 5, 4)
    model = fill(nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=groups))
    own = run(model, [x], rows=0.5)
    index = chosen(0, 0, 0, 6, 3)
    plain = run(fill(nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=groups)), [x[index]])
    a, g = zip(factors(own, "Conv2d"), factors(plain, "Conv2d"), strict=True)
    compare(*a, "A", rtol=1e-12)
    # Of a mean over 6 samples, which g0 is a part of, rather than one over 3.
    compare(g[0], 4 * g[1], "G", rtol=1e-12)


def test_a_number_of_rows_is_at_least_that_many() -> None:
    """An image has 6 positions here: for 7 rows there must be two of them."""
    x, geometry = randn(6, 2, 4, 3), {"kernel_size": 2}
    own = run(fill(nn.Conv2d(2, 4, **geometry)), [x], rows=7)
    plain = run(fill(nn.Conv2d(2, 4, **geometry)), [x[chosen(0, 0, 0, 6, 2)]])
    compare(factors(own, "Conv2d")[0], factors(plain, "Conv2d")[0], "A", rtol=1e-12)


def test_layers_take_as_many_images_as_their_own_positions_need() -> None:
    """Of 16 rows a layer with 16 positions has one image, and one with 4 positions has four."""

    def images() -> nn.Module:
        return fill(nn.Sequential(nn.Conv2d(2, 2, 1), nn.Conv2d(2, 2, 2, stride=2)))

    x = randn(6, 2, 4, 4)
    own = run(images(), [x], rows=16)
    for name, wanted in (("0", 1), ("1", 4)):
        plain = run(images(), [x[chosen(0, 0, 0, 6, wanted)]])
        compare(factors(own, name)[0], factors(plain, name)[0], f"A of {name}", rtol=1e-12)


class Pooled(nn.Module):
    """The head has a row of each sample, the layer below one of each position."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).mean(1))


def moment(inputs: Tensor) -> Tensor:
    """The sum of products of rows ``[..., 3]`` and a one for the bias."""
    rows = torch.cat([inputs.detach().view(-1, 3), torch.ones(inputs.numel() // 3, 1).double()], 1)
    return rows.T @ rows


def test_layers_and_passes_draw_rows_of_their_own() -> None:
    model, batches = fill(Pooled()), [randn(6, 4, 3, seed=seed) for seed in range(2)]
    own = run(model, batches, rows=3, loss_average="sum")
    inner = head = torch.zeros(())
    for number, x in enumerate(batches):
        inner = inner + moment(x.flatten(0, 1)[chosen(0, 0, number, 24, 3)]) * 24 / 3
        head = head + moment(model.inner(x).mean(1)[chosen(0, 0, number, 6, 3)]) * 6 / 3
    compare(factors(own, "inner")[0][0], inner / 12, "A of positions", rtol=1e-12)
    compare(factors(own, "head")[0][0], head / 12, "A of samples", rtol=1e-12)


def test_an_input_of_two_passes_is_drawn_from_twice() -> None:
    x = randn(8, 3)
    own = run(fill(nn.Linear(3, 2)), [x, x], rows=3, loss_average="sum")
    total = moment(x[chosen(0, 0, 0, 8, 3)]) + moment(x[chosen(0, 0, 1, 8, 3)])
    compare(factors(own, "Linear")[0][0], total * 8 / 3 / 16, "A", rtol=1e-12)


def test_rows_of_data_are_drawn_beside_as_many_of_a_layer_without_padding() -> None:
    model, x, mask = fill(Pooled()), randn(6, 4, 3), torch.zeros(6, 4, dtype=torch.bool)
    mask[:, 1] = True
    with closing(preconditioner(model, rows=3)) as own:
        own.count(6, rows=mask)
        model(x).square().sum().backward()
        own.step()
    index = chosen(0, 0, 0, 6, 3)
    compare(factors(own, "inner")[0][0], moment(x[mask][index]) / 3, "A of data", rtol=1e-12)
    head = moment(model.inner(x).mean(1)[index]) / 3
    compare(factors(own, "head")[0][0], head, "A of samples", rtol=1e-12)


def test_everything_is_the_default_bit_by_bit() -> None:
    weights = [
        Run(Case({"solver": "inverse", **options}, steps=2)).train().weights()
        for options in ({}, {"rows": 1.0}, {"rows": 10**6})
    ]
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    "wanted", [16, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 36))]
)
@pytest.mark.slow
def test_the_error_is_the_one_that_is_stated(wanted: int) -> None:
    """Over many draws the mean is the moment of all rows, and the deviation ``s / sqrt(n)``."""
    total, draws = 40, 1500
    helper = LinearHelper(fill(nn.Linear(3, 2, bias=False)))
    x, g = randn(8, 5, 3), helper.output_rows(randn(8, 5, 2, seed=1))
    sampler, found = Sampler(wanted, 0), []
    for step in range(draws):
        (own,), rows, part = Draw(sampler, step).take(helper, ((x,), g), 0, False)
        assert rows.shape == (1, wanted, 1, 2)
        moment = helper.input_moment((own,), rows)[0].tril()
        found.append(part * (moment + moment.tril(-1).mT))
    flat = x.flatten(0, 1)
    products = flat[:, :, None] * flat[:, None, :]
    s = products.std(0, correction=0)
    stated = s * total / math.sqrt(wanted) * math.sqrt((total - wanted) / (total - 1))
    estimates = torch.stack(found)
    off = (estimates.mean(0) - products.sum(0)).abs() / (stated / math.sqrt(draws))
    assert off.max() < 5
    # The deviation of 1500 draws is known to about 1 / sqrt(2 * 1500).
    assert (estimates.std(0) / stated - 1).abs().max() < 0.08


def test_layers_of_one_input_share_its_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(3, 2), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x).sum() * self.k(x).sum()

    count = []
    plain = LinearHelper.input_moment
    monkeypatch.setattr(
        LinearHelper, "input_moment", lambda *args: (count.append(1), plain(*args))[1]
    )
    own = run(fill(Both()), [randn(4, 5, 3)], rows=0.5)
    assert len(count) == 1
    one, two = (blocks(own)[name].running["A"] for name in "qk")
    compare(one.tril(), two.tril(), "A", rtol=1e-12)


def test_every_pass_and_step_and_rank_draws_anew_and_a_resumed_run_the_same() -> None:
    draws = {tuple(chosen(*where, 50, 5).tolist()) for where in [(0, 0, 0), (1, 0, 0), (0, 1, 0)]}
    draws.add(tuple(chosen(0, 0, 1, 50, 5).tolist()))
    assert len(draws) == 4
    case = Case({"statistics_every": 2, "rows": 0.5, "stagger": True}, steps=6)
    whole, first, other = Run(case).train(), Run(case).train(range(3)), Run(case)
    other.model.load_state_dict(first.model.state_dict())
    other.preconditioner.load_state_dict(first.preconditioner.state_dict())
    assert torch.equal(whole.weights(), other.train(range(3, 6)).weights())
    assert not torch.equal(whole.weights(), train_alone(case.with_options(rows=1.0)))


def test_a_later_version_draws_the_same_rows() -> None:
    """A run may be resumed by it: the seed is a number of four digits, the last one the rows."""
    base = 1_000_003
    seed = (((21 * base + 2) * base + 3) * base + 51) % 2**63
    drawn = torch.randperm(50, generator=torch.Generator().manual_seed(seed))[:5]
    assert torch.equal(chosen(20, 1, 2, 50, 5), drawn.sort().values)


class Opaque(LinearHelper):
    """Says nothing of what can be taken."""

    unit = None


def test_what_cannot_be_taken_apart_is_taken_whole() -> None:
    x = randn(4, 5, 3)
    own = run(fill(nn.Linear(3, 2)), [x], rows=0.25, layers={".*": Opaque})
    plain = run(fill(nn.Linear(3, 2)), [x])
    for one, two in zip(factors(own, "Linear"), factors(plain, "Linear"), strict=True):
        assert torch.equal(one, two)


def test_a_method_that_reduces_takes_whole_samples() -> None:
    x = randn(6, 4, 3)
    own = run(fill(nn.Linear(3, 2)), [x], rows=0.5, method="kfac-reduce", loss_average="sum")
    index = chosen(0, 0, 0, 6, 3)
    options = {"method": "kfac-reduce", "loss_average": "sum"}
    plain = run(fill(nn.Linear(3, 2)), [x[index]], **options)
    for one, two in zip(factors(own, "Linear"), factors(plain, "Linear"), strict=True):
        compare(one, two, "reduced", rtol=1e-12)


@pytest.mark.parametrize("helper", [LinearHelper, Conv2dHelper])
def test_units(helper: type[LayerHelper]) -> None:
    assert helper.unit == ("row" if helper is LinearHelper else "sample")
    assert LayerHelper.unit is None


@pytest.mark.parametrize("rows", [0, -1, 0.0, 1.5, True, "all", float("nan")])
def test_what_rows_cannot_be(rows: Any) -> None:
    with pytest.raises(ValueError, match="rows must be a fraction in"):
        preconditioner(fill(nn.Linear(2, 2)), rows=rows)
