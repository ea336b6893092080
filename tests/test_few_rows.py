"""A few rows of alike layers are multiplied together; alone, each layer's are, as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.estimate import window
from soframe.estimate.window import Sums
from soframe.layers import LinearHelper
from soframe.methods import base
from tests.calls import operators

Model = nn.Sequential


def linear() -> Model:
    layers = [layer for _ in range(4) for layer in (nn.Linear(5, 5), nn.Tanh())]
    return Model(*layers, nn.Linear(5, 3, bias=False), nn.Linear(3, 3, bias=False))


def grouped() -> Model:
    def conv() -> nn.Module:
        return nn.Conv2d(4, 4, 1, groups=2)

    return Model(nn.Unflatten(1, (4, 1, 1)), conv(), nn.Tanh(), conv(), nn.Flatten())


def images() -> Model:
    layers: list[nn.Module] = [nn.Unflatten(1, (2, 3, 4))]
    for bias in (True, True, False, False):
        layers += [nn.Conv2d(2, 2, 3, padding=1, bias=bias), nn.Tanh()]
    # Two geometries share a stack: their factors have the same sides.
    layers += [nn.Conv2d(2, 2, 3, padding=1, stride=2), nn.Tanh()]
    layers += [nn.Conv2d(2, 2, 1), nn.Tanh(), nn.Conv2d(2, 2, 1, stride=2)]
    return Model(*layers, nn.Flatten())


def batch(number: int, width: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(number, width, generator=generator)


def one_pass(model: Model, x: Tensor) -> None:
    model(x).square().mean().backward()


def micro_batches(model: Model, x: Tensor) -> None:
    for part in (x[:3], x[3:6], x[6:], x[:3]):
        model(part).square().mean().backward()


def several_calls(model: Model, x: Tensor) -> None:
    (model(x).square().mean() + model[:2](model[:2](x)).square().mean()).backward()


def some_layers(model: Model, x: Tensor) -> None:
    model[:4](x).square().mean().backward()


def zeroed_between(model: Model, x: Tensor) -> None:
    model(x).sum().backward()
    model.zero_grad()
    model(x[:4]).square().mean().backward()


def raised_between(model: Model, x: Tensor) -> None:
    def fail(gradient: Tensor) -> None:
        raise KeyError("in the middle")

    middle = model[:4](x)
    middle.register_hook(fail)
    with pytest.raises(KeyError):
        model[4:](middle).sum().backward()
    model(x).square().mean().backward()


def positions(model: Model, x: Tensor) -> None:
    model(x.view(2, 4, -1)).square().mean().backward()


def unequal_rows(model: Model, x: Tensor) -> None:
    model[4:](model[:4](x)[:5]).square().mean().backward()


def retained(model: Model, x: Tensor) -> None:
    loss = model(x).square().mean()
    torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    loss.backward()


def declared(model: Model, x: Tensor) -> None:
    model(x).square().mean().backward(inputs=list(model.parameters()))


def observed(model: Model, x: Tensor) -> None:
    outputs = model(x)
    vars(model)["observe"](outputs)
    outputs.square().sum().div(2 * len(x)).backward()


def other_terms(model: Model, x: Tensor) -> None:
    for layers, terms in ((model[:4], 4), (model[4:8], 8)):
        vars(model)["count"](terms)
        layers(x[:4]).square().mean().backward()


PASSES = [one_pass, micro_batches, several_calls, some_layers, zeroed_between, raised_between]
PASSES += [positions, unequal_rows, retained, declared, other_terms]


def factors_after(
    passes: Callable[[Model, Tensor], None], make: Callable[[], Model], x: Tensor, **settings: Any
) -> dict[str, Tensor]:
    """Return all running factors after two steps."""
    torch.manual_seed(0)
    model = make().to(x.dtype)
    preconditioner = soframe.Preconditioner(model, statistics_every=1, **settings)
    vars(model).update(observe=preconditioner.observe, count=preconditioner.count)
    for number in range(2):
        model.zero_grad()
        passes(model, x + number)
        preconditioner.step()
    found: dict[str, Tensor] = {}
    for block in preconditioner.curvature.blocks:
        for name, factor in block.running.items():
            found[f"{block.name} {name}"] = factor
    preconditioner.close()
    return found


def compared(
    monkeypatch: pytest.MonkeyPatch, *given: Any, rtol: float = 1e-12, **settings: Any
) -> int:
    """Compare factors with those of products alone; return how often rows were multiplied."""
    products = 0
    multiply = Sums.multiply

    def counted(self: Sums) -> None:
        nonlocal products
        products += len(self._rows)
        multiply(self)

    monkeypatch.setattr(Sums, "multiply", counted)
    together = factors_after(*given, **settings)
    made = products
    monkeypatch.setattr(window, "few_rows", lambda moment, factor: None)
    alone = factors_after(*given, **settings)
    assert products == made
    assert together.keys() == alone.keys()
    for name, factor in alone.items():
        torch.testing.assert_close(together[name], factor, rtol=rtol, atol=rtol)
    return made


@pytest.mark.parametrize("passes", PASSES, ids=lambda passes: passes.__name__)
def test_factors_are_those_of_layers_alone(
    passes: Callable[[Model, Tensor], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compared(monkeypatch, passes, linear, batch(8, 5).double()) > 0


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "ekfac"},
        {"method": "foof"},
        {"statistics": soframe.Statistics(scaling="kaisa")},
        {"statistics": soframe.Statistics(rows=0.5)},
        {"statistics": soframe.Statistics(loss_average="global")},
    ],
    ids=["ekfac", "foof", "kaisa", "rows", "global"],
)
def test_so_they_are_under_other_settings(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert compared(monkeypatch, micro_batches, linear, batch(8, 5).double(), **settings) > 0


def test_so_they_are_of_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = soframe.Statistics(fisher="type-2", loss="squared-error")
    x = batch(8, 5).double()
    assert compared(monkeypatch, observed, linear, x, statistics=statistics) > 0


def test_so_they_are_of_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    x = batch(8, 4).double()
    assert compared(monkeypatch, one_pass, grouped, x) > 0


@pytest.mark.parametrize("passes", [one_pass, micro_batches, some_layers, zeroed_between])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_so_they_are_of_images(
    passes: Callable[[Model, Tensor], None],
    layout: torch.memory_format,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make() -> Model:
        model: Model = images().to(memory_format=layout)  # type: ignore[call-overload]
        return model

    assert compared(monkeypatch, passes, make, batch(8, 24).double()) > 0


def test_so_they_are_of_transposed_convolutions(monkeypatch: pytest.MonkeyPatch) -> None:
    def make() -> Model:
        convs = [nn.ConvTranspose2d(2, 2, 3, padding=1) for _ in range(2)]
        return Model(nn.Unflatten(1, (2, 3, 4)), *convs, nn.Flatten())

    assert compared(monkeypatch, one_pass, make, batch(8, 24).double()) > 0


def test_so_they_are_in_single_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    assert compared(monkeypatch, one_pass, linear, batch(8, 5), rtol=1e-5) > 0


class Narrow(LinearHelper):
    """Its output rows lack a feature, where a bias would have its ones."""

    def output_rows(self, grad_output: Tensor) -> Tensor:
        return super().output_rows(grad_output)[..., :-1]


def test_rows_that_lack_a_feature_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    preconditioner = soframe.Preconditioner(
        model, statistics_every=1, layers={"0": Narrow, "1": Narrow}
    )
    model(batch(4, 3)).square().mean().backward()
    with pytest.raises(ValueError, match="rows of Narrow"):
        preconditioner.step()
    preconditioner.close()


def test_many_rows_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "FEW", 0)  # they have fewer numbers than the matrix
    assert compared(monkeypatch, one_pass, linear, batch(8, 5).double()) == 0


def test_rows_of_large_factors_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    def large() -> Model:
        return Model(nn.Linear(256, 256, bias=False), nn.Linear(256, 256, bias=False))

    # Products by blocks of columns leave out most of the upper triangle.
    assert compared(monkeypatch, one_pass, large, batch(2, 256).double()) == 0


def test_rows_of_a_window_under_way_take_the_memory_of_their_factors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for together in (True, False):
        if not together:
            monkeypatch.setattr(window, "few_rows", lambda moment, factor: None)
        model = linear().double()
        preconditioner = soframe.Preconditioner(model, statistics_every=1)
        one_pass(model, batch(8, 5).double())
        found.append(preconditioner.memory_usage()["statistics"])
        preconditioner.close()
    assert found[0] == found[1] > 0


@pytest.mark.parametrize(("kernel", "most"), [(0, 23), (1, 18), (3, 18)])
def test_a_layer_costs_no_products_of_its_own(kernel: int, most: float) -> None:
    def layer() -> nn.Module:
        return nn.Conv2d(4, 4, kernel, padding="same") if kernel else nn.Linear(4, 4)

    def each(layers: int) -> float:
        torch.manual_seed(0)
        deep = [part for _ in range(layers) for part in (layer(), nn.Tanh())]
        model, x = Model(*deep), batch(8, 16).view(2, 4, 4, 4) if kernel else batch(8, 4)
        preconditioner = soframe.Preconditioner(model, statistics_every=1, solve_every=1000)

        def step() -> None:
            model.zero_grad()
            one_pass(model, x)
            preconditioner.step()

        step()
        return operators(step, steps=2)

    # With products alone 30 for a linear layer, and 47 and 29 for convolutions.
    assert (each(8) - each(4)) / 4 <= most


def test_memory_usage_has_the_sums_of_rows() -> None:
    model = linear()
    preconditioner = soframe.Preconditioner(model, statistics_every=1)
    one_pass(model, batch(8, 5))
    counted = preconditioner.memory_usage()["statistics"]
    # Four layers of 5 with a bias, and one of 5 to 3 and one of 3 to 3 without.
    assert counted == 4 * (4 * (36 + 25) + (25 + 9) + (9 + 9))
