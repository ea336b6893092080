"""Under another default device soframe comes to what it comes to without one.

Users call ``torch.set_default_device("cuda")``. The meta device stands for the GPU here: a tensor
that is made without a device is there, has no numbers, and cannot be mixed with those of the CPU.
"""

from __future__ import annotations

import copy
import functools
import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import soframe
from soframe import Preconditioner, Statistics, StochasticTrustRegion, TrustRegion, checkpoint
from soframe.integrations import kfac_pytorch
from soframe.settings import grouped
from tests import kit
from tests.curvature import fill
from tests.distributed.harness import run_ranks
from tests.gpu import test_ranks as on_ranks
from tests.gpu.kit import assert_same, batch_on, method_of, model_on, train

CPU = torch.device("cpu")
METHODS = sorted(set(soframe.available("method")) - {"blocked"})  # that needs an inner one
SOLVERS = sorted(set(soframe.available("solver")) - {"root", "basis"})
COMMON: dict[str, Any] = {"layers": "all", "statistics_every": 1, "solve_every": 2}


def loss_of(model: nn.Module, step: int, name: str = "images") -> Tensor:
    inputs, targets = batch_on(CPU, name, step)
    return nn.functional.cross_entropy(model(inputs), targets)


@contextmanager
def elsewhere() -> Iterator[None]:
    """Make tensors on another device unless they name theirs."""
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.fixture(autouse=True)
def _back() -> Iterator[None]:
    """Put the default device back, whatever happens."""
    yield
    torch.set_default_device(None)


def both(name: str, make: Callable[[nn.Module], Any], **how: Any) -> None:
    """A run under another default device must be the run without one."""
    how = {"steps": 3, **how}
    with elsewhere():  # first: what is kept from one run may serve the next one
        other = train(CPU, name, make, **how)
    plain = train(CPU, name, make, **how)
    assert_same(plain, other)
    assert other.losses == pytest.approx(plain.losses, rel=1e-7)


def alike(run: Callable[[], Any]) -> None:
    """What a function returns must not depend on the default device."""
    torch.default_generator.manual_seed(0)  # some draw
    with elsewhere():
        other = run()
    torch.default_generator.manual_seed(0)
    plain = run()
    torch.testing.assert_close(other, plain, rtol=1e-7, atol=1e-7)


def with_sgd(model: nn.Module, *args: Any, **options: Any) -> tuple[Preconditioner, Any]:
    """A preconditioner of all layers, and the optimizer of torch's that makes no tensors."""
    sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return Preconditioner(model, *args, optimizer=sgd, **grouped({**COMMON, **options})), sgd


def weights_of(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_what_is_made_without_a_device_is_elsewhere() -> None:
    """Otherwise this file would test nothing."""
    with elsewhere():
        assert torch.zeros(()).device.type == "meta"
        with pytest.raises(RuntimeError, match="device"):
            torch.zeros(2, device="cpu") + torch.ones(2)
    assert torch.zeros(()).device == CPU


@pytest.mark.parametrize("method", METHODS)
def test_methods(method: str) -> None:
    both("square", lambda model: soframe.Optimizer(model, method_of(method), lr=0.02, **COMMON))


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("model", ["images", "tokens", "recurrent"])
@pytest.mark.covering(together=1)
def test_solvers(solver: str, model: str) -> None:
    both(model, lambda net: with_sgd(net, "kfac", solver))


SETTINGS: dict[str, dict[str, Any]] = {
    "lazy": {"solver": soframe.solvers.Lazy(soframe.solvers.Eigen())},
    "rows": {"rows": 0.5},
    "background": {"background": 1},
    "background, staggered": {"background": 1, "stagger": True},
    "staggered": {"stagger": True, "solve_every": 4},
    "kl clip": {"kl_clip": 1e-4},
    "norm clip": {"norm_clip": 0.1, "kl_clip": None},
    "relative": {"damping": "relative"},
    "auxiliary": {"auxiliary": "adamw", "layers": None},
    "kaisa": {"scaling": "kaisa", "layers": None},
    "forward-only": {"fisher": "forward-only"},
}


@pytest.mark.parametrize(
    ("setting", "model"), [*((setting, "images") for setting in SETTINGS), ("rows", "tokens")]
)
def test_settings(setting: str, model: str) -> None:
    both(model, lambda net: with_sgd(net, **SETTINGS[setting]))


@pytest.mark.parametrize("fisher", ["monte-carlo", "type-2"])
def test_observed(fisher: str) -> None:
    settings = {"fisher": fisher, "loss": "cross-entropy"}
    both("images", lambda net: with_sgd(net, **settings), observe=True)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("square", {}),
        ("images", {"full_batch": True}),
        ("images", {"damping": "constant", "preconditioner_damping": 1.0}),
    ],
    ids=str,
)
def test_trust_region(model: str, options: dict[str, Any]) -> None:
    both(
        model,
        lambda net: TrustRegion(net, "cross-entropy", **grouped({"fisher": "type-2", **options})),
        closure=True,
        steps=4,
    )


@pytest.mark.parametrize("options", [{}, {"model_every": 2}], ids=str)
def test_stochastic_trust_region(options: dict[str, Any]) -> None:
    both("tokens", lambda net: StochasticTrustRegion(net, **options), closure=True, steps=7)


LOSSES: dict[str, tuple[str, int]] = {
    "gaussian": ("gaussian", 2),
    "binary": ("binary-cross-entropy", 2),
    "wide": ("mse", 40),
}
"""The name of a loss, and how many outputs a model has; the last has more than hidden units."""


@pytest.mark.parametrize("case", LOSSES)
def test_losses_of_a_trust_region(case: str) -> None:
    loss, size = LOSSES[case]
    model = fill(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, size)))
    inputs, _ = batch_on(CPU, "square", 0)
    numbers = inputs.repeat(1, 8)[:, :size]

    def value(outputs: Tensor) -> Tensor:
        if case == "gaussian":
            mean, log_variance = outputs.unbind(1)
            return nn.functional.gaussian_nll_loss(mean, numbers[:, 0], log_variance.exp())
        if case == "wide":
            return nn.functional.mse_loss(outputs, numbers)
        return nn.functional.binary_cross_entropy_with_logits(outputs, numbers.sigmoid())

    def run() -> tuple[Tensor, list[float]]:
        net = copy.deepcopy(model)
        optimizer = TrustRegion(net, loss, statistics=soframe.Statistics(fisher="type-2"))
        losses = [float(optimizer.step(lambda: value(net(inputs)))) for _ in range(4)]
        return weights_of(net), losses

    alike(run)


def test_transposed_convolutions() -> None:
    """One of them is told how large its output is."""

    class Upwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(3, 4, 3, stride=2, padding=1)
            self.head = nn.Linear(4, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.up(x, output_size=[16, 16]).mean((2, 3)))

    model = fill(Upwards())

    def run() -> Tensor:
        net = copy.deepcopy(model)
        own, sgd = with_sgd(net)
        return kit.train(net, loss_of, range(3), own, sgd)

    alike(run)


# -- states ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["kfac", "soap", "muon"])
def test_states(method: str) -> None:
    square = functools.partial(loss_of, name="square")

    def run() -> list[Tensor]:
        model, other = model_on(CPU, "square"), model_on(CPU, "square")
        make = {"lr": 0.02, **COMMON}
        optimizer = soframe.Optimizer(model, method_of(method), **grouped(make))
        kit.train(model, square, range(3), optimizer)
        file = io.BytesIO()
        torch.save([model.state_dict(), optimizer.state_dict()], file)
        file.seek(0)
        of_model, of_optimizer = torch.load(file, weights_only=True)
        other.load_state_dict(of_model)
        resumed = soframe.Optimizer(other, method_of(method), **grouped(make))
        resumed.load_state_dict(of_optimizer)
        kit.train(model, square, range(3, 5), optimizer)
        kit.train(other, square, range(3, 5), resumed)
        torch.testing.assert_close(weights_of(other), weights_of(model), rtol=1e-7, atol=1e-7)
        return [weights_of(model), weights_of(other)]

    alike(run)


@pytest.mark.parametrize("kind", [TrustRegion, StochasticTrustRegion])
def test_states_of_trust_regions(kind: Any) -> None:
    def made(model: nn.Module) -> Any:
        if kind is StochasticTrustRegion:
            return kind(model)
        return kind(model, "cross-entropy", statistics=Statistics(fisher="type-2"))

    def go_on(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            x, y = batch_on(CPU, "square", step)
            optimizer.step(lambda x=x, y=y: nn.functional.cross_entropy(model(x), y))

    def run() -> list[Tensor]:
        model = model_on(CPU, "square")
        optimizer = made(model)
        go_on(model, optimizer, range(3))
        other = copy.deepcopy(model)
        resumed = made(other)
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        go_on(model, optimizer, range(3, 5))
        go_on(other, resumed, range(3, 5))
        torch.testing.assert_close(weights_of(other), weights_of(model), rtol=1e-7, atol=1e-7)
        return [weights_of(model), weights_of(other)]

    alike(run)


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_sharded_checkpoints(tmp_path: Path) -> None:
    saved = model_on(CPU, "images")
    before, sgd = with_sgd(saved)
    kit.train(saved, loss_of, range(2), before, sgd)
    dcp.save({"preconditioner": checkpoint.part(before)}, checkpoint_id=tmp_path)

    def run() -> Tensor:
        model = copy.deepcopy(saved)
        own, sgd = with_sgd(model)
        checkpoint.load(own, tmp_path)
        return kit.train(model, loss_of, range(2, 4), own, sgd)

    alike(run)


def test_states_of_kfac_pytorch() -> None:
    layers = {}
    for name, sides in {"0": (19, 4), "2": (17, 5)}.items():
        first, second = (torch.diag(1 + torch.arange(n).double()) for n in sides)
        layers[name] = {"A": first, "G": second}
    model = fill(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(16, 5)))
    x = torch.linspace(-1, 1, 64, dtype=torch.float64).view(2, 2, 4, 4)

    def run() -> list[Tensor]:
        net = copy.deepcopy(model)
        own = Preconditioner(net, **grouped(kfac_pytorch.settings(compute_method="eigen", lr=0.1)))
        kfac_pytorch.load_state(own, {"steps": 3, "layers": layers})
        net(x).square().mean().backward()
        own.step()
        return [parameter.grad for parameter in net.parameters()]

    alike(run)


def test_metrics() -> None:
    def run() -> dict[str, Any]:
        model = model_on(CPU, "images")
        own, sgd = with_sgd(model)
        own.measure()
        kit.train(model, loss_of, range(2), own, sgd)
        return own.metrics(spectra="full")["blocks"]

    plain = run()
    assert plain
    with elsewhere():
        assert json.dumps(run()) == json.dumps(plain)


# -- ranks -----------------------------------------------------------------------------------------


def on_a_rank(rank: int, ranks: int, strategy: str) -> dict[str, Tensor]:
    with elsewhere():
        return on_ranks.train(rank, ranks, "cpu", "gloo", 0, "ddp", {"strategy": strategy})


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["mem-opt", "hybrid-opt"])
def test_ranks(strategy: str) -> None:
    plain = on_ranks.alone({})
    for weights in run_ranks(on_a_rank, 2, strategy, timeout=60.0):
        for name, weight in plain.items():
            torch.testing.assert_close(weights[name], weight, rtol=1e-6, atol=1e-7)
