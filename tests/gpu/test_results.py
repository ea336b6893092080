"""What a GPU comes to in float64 is what a processor comes to."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

import soframe
from soframe import Preconditioner, StochasticTrustRegion, TrustRegion
from soframe.settings import grouped
from soframe.solvers import Inverse
from tests.curvature import randn
from tests.gpu.kit import (
    DEVICE,
    MODELS,
    NEEDS_GPU,
    ROTATED,
    assert_same,
    batch_on,
    method_of,
    model_on,
    train,
)

pytestmark = [
    NEEDS_GPU,
    # What cuDNN says of a recurrent layer whose loss is measured at other parameters.
    pytest.mark.filterwarnings("ignore:RNN module weights are not part"),
]
CPU = torch.device("cpu")
METHODS = sorted(set(soframe.available("method")) - {"blocked"})  # that needs an inner one
SOLVERS = sorted(set(soframe.available("solver")) - {"root", "basis"})
TWICE = sorted(set(MODELS) - {"others"})
"""Models whose gradients can be differentiated, as that of a bag of embeddings cannot."""
COMMON: dict[str, Any] = {"layers": "all", "statistics_every": 1, "solve_every": 2}


def both(name: str, make: Any, tolerance: float = 1e-5, **how: Any) -> None:
    here = train(DEVICE, name, make, **how)
    assert all(p.device.type == DEVICE.type for p in here.model.parameters())
    assert_same(train(CPU, name, make, **how), here, tolerance)


def runs(name: str, make: Any, **how: Any) -> None:
    """Where a rounding decides on a basis no numbers are compared: nothing may be elsewhere."""
    trained = train(DEVICE, name, make, **how)
    assert all(p.device.type == DEVICE.type for p in trained.model.parameters())
    assert all(weight.isfinite().all() for weight in trained.weights.values())


def by_method(method: str) -> Any:
    return lambda net: soframe.Optimizer(net, method_of(method), lr=0.02, **COMMON)


def by_solver(solver: str) -> Any:
    def make(net: nn.Module) -> Any:
        sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        return Preconditioner(net, "kfac", solver, optimizer=sgd, **COMMON), sgd

    return make


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str, model: str) -> None:
    check = runs if method in ROTATED and model != "square" else both
    check(model, by_method(method))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("solver", SOLVERS)
def test_solvers(solver: str, model: str) -> None:
    check = runs if solver == "orthogonal-iteration" and model != "square" else both
    check(model, by_solver(solver))


SETTINGS: dict[str, dict[str, Any]] = {
    "mem-opt": {"strategy": "mem-opt"},
    "sharded": {"strategy": "sharded"},
    "background": {"background": 1},
    "background, staggered": {"background": 1, "stagger": True},
    "staggered": {"stagger": True, "solve_every": 4},
    "relative": {"damping": "relative"},
    "norm clip": {"norm_clip": 0.1, "kl_clip": None},
    "forward-only": {"fisher": "forward-only"},
    "local": {"gradients": "local"},
    "auxiliary": {"auxiliary": "adamw"},
    "kaisa": {"scaling": "kaisa", "layers": None},
    "float64": {"dtype": torch.float64},
    "offload": {"offload": True},
}


@pytest.mark.parametrize("model", ["images", "tokens"])
@pytest.mark.parametrize("setting", SETTINGS)
def test_settings(setting: str, model: str) -> None:
    def make(net: nn.Module) -> Any:
        sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
        return Preconditioner(net, optimizer=sgd, **grouped({**COMMON, **SETTINGS[setting]})), sgd

    both(model, make, tolerance=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"full_batch": True},
        {"preconditioner_damping": 1.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("model", TWICE)
def test_trust_region(model: str, options: dict[str, Any]) -> None:
    def make(net: nn.Module) -> Any:
        return TrustRegion(net, "cross-entropy", **grouped({"fisher": "type-2", **options}))

    both(model, make, closure=True, steps=6)


@pytest.mark.parametrize("options", [{}, {"model_every": 2}], ids=str)
@pytest.mark.parametrize("model", TWICE)
def test_stochastic_trust_region(model: str, options: dict[str, Any]) -> None:
    both(model, lambda net: StochasticTrustRegion(net, **options), closure=True, steps=6)


def observed(fisher: str) -> Any:
    def make(net: nn.Module) -> Any:
        sgd = torch.optim.SGD(net.parameters(), lr=0.05)
        settings = {"fisher": fisher, "loss": "cross-entropy", **COMMON}
        return Preconditioner(net, optimizer=sgd, **grouped(settings)), sgd

    return make


def test_an_observed_fisher() -> None:
    both("images", observed("type-2"), 1e-7, observe=True)


def test_a_fisher_of_draws() -> None:
    """What is drawn differs between devices; here it depends on the seed, and on nothing else."""
    one, again, other = (
        train(DEVICE, "images", observed("monte-carlo"), observe=True, seed=seed)
        for seed in (0, 0, 1)
    )
    assert_same(one, again, 1e-12)
    with pytest.raises(AssertionError):
        assert_same(one, other, 1e-7)


@pytest.mark.parametrize("rows", [0.5, 3])
def test_drawn_rows(rows: float) -> None:
    """They are drawn on the host, and so the same ones on every device."""

    def make(net: nn.Module) -> Any:
        sgd = torch.optim.SGD(net.parameters(), lr=0.05)
        return Preconditioner(
            net, optimizer=sgd, statistics=soframe.Statistics(rows=rows), **COMMON
        ), sgd

    both("tokens", make, 1e-6)


@pytest.mark.parametrize("method", ["kfac", "soap", "muon", "shampoo", "ekfac"])
@pytest.mark.parametrize(("begin", "end"), [(DEVICE, CPU), (CPU, DEVICE)], ids=["to CPU", "to GPU"])
def test_state_moves_between_devices(begin: torch.device, end: torch.device, method: str) -> None:
    """A run that goes on elsewhere is the run that stayed."""

    def make(net: nn.Module) -> Any:
        return soframe.Optimizer(net, method_of(method), lr=0.02, **COMMON)

    def go_on(model: nn.Module, optimizer: Any, device: torch.device, steps: range) -> None:
        for step in steps:
            inputs, targets = batch_on(device, "square", step)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()

    model = model_on(begin, "square")
    optimizer = make(model)
    go_on(model, optimizer, begin, range(3))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    file.seek(0)
    of_model, of_optimizer = torch.load(file, map_location=end, weights_only=True)
    other = model_on(end, "square")
    other.load_state_dict(of_model)
    resumed = make(other)
    resumed.load_state_dict(of_optimizer)
    go_on(model, optimizer, begin, range(3, 6))
    go_on(other, resumed, end, range(3, 6))
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(two.cpu(), one.cpu(), rtol=1e-6, atol=1e-6)


def test_moved_after_it_was_built() -> None:
    """A preconditioner follows its model to another device."""

    def make(net: nn.Module) -> Any:
        sgd = torch.optim.SGD(net.parameters(), lr=0.05)
        own = Preconditioner(net.to(CPU), optimizer=sgd, **COMMON)
        net.to(DEVICE)
        return own, sgd

    assert_same(train(CPU, "dense", stays), train(DEVICE, "dense", make))


def stays(net: nn.Module) -> Any:
    """The same, of a model that stays."""
    sgd = torch.optim.SGD(net.parameters(), lr=0.05)
    return Preconditioner(net, optimizer=sgd, **COMMON), sgd


def test_layers_on_two_devices() -> None:
    """A network that is spread over the processor and the GPU."""

    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.near, self.far = nn.Linear(5, 6), nn.Linear(6, 5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.far(
                self.near(x.to(self.near.weight.device)).tanh().to(self.far.weight.device)
            )

    found = []
    for devices in ((CPU, CPU), (CPU, DEVICE)):
        torch.manual_seed(0)
        model = Spread().double()
        model.near.to(devices[0])
        model.far.to(devices[1])
        sgd = torch.optim.SGD(model.parameters(), lr=0.05)
        own = Preconditioner(model, optimizer=sgd, **COMMON)
        for step in range(4):
            inputs, targets = batch_on(CPU, "dense", step)
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets.to(devices[1])).backward()
            own.step()
            sgd.step()
        found.append([p.detach().cpu() for p in model.parameters()])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("size", [4, 40, 300])
@pytest.mark.parametrize("split", ["pi", "full"])
def test_inverses_are_symmetric_to_the_last_bit(split: str, size: int) -> None:
    """Ranks that are sent a triangle have what the one that solved has."""
    rows = torch.randn(1, 2 * size, size, device=DEVICE)
    solver = Inverse(split=split)  # type: ignore[arg-type]
    inverse = solver.solve(rows.mT @ rows, torch.ones(1, device=DEVICE))["inverse"]
    assert torch.equal(inverse, inverse.mT)
    assert inverse.is_contiguous()


@pytest.mark.parametrize("layer", ["images", "wide", "pointwise"])
def test_factors_of_convolutions(layer: str) -> None:
    """By the ways that a GPU has of its own, against those of a processor, in float64."""
    conv = {
        "images": lambda: nn.Conv2d(3, 4, 7, stride=2, padding=3),
        "wide": lambda: nn.Conv2d(200, 160, 3, padding=1, bias=False),
        "pointwise": lambda: nn.Conv2d(260, 130, 1),
    }[layer]()
    conv.double()
    factors = []
    for device in (CPU, DEVICE):
        here = copy.deepcopy(conv).to(device)
        own = Preconditioner(here, lr=0.1, statistics_every=1, solve_every=1)
        x = randn(3, conv.in_channels, 20, 20).to(device)
        here(x).square().mean().backward()
        own.step()
        factors.append({k: v.cpu().tril() for k, v in next(iter(own.blocks)).running.items()})
    for name, factor in factors[0].items():
        torch.testing.assert_close(factors[1][name], factor, rtol=1e-9, atol=1e-12)
