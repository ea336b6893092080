"""Methods of single entries, against torch's optimizers and the dense Fisher's diagonal."""

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.kernels.samples import by_samples, squared_gradients
from soframe.methods import SGD, SOAP, AdamW, Diagonal, Given, Muon
from soframe.solvers import Inverse
from soframe.specs import VALUE
from soframe.testing import compare
from tests import kit
from tests.curvature import (
    LAYERS,
    Kind,
    LossAverage,
    by_passes,
    closing,
    gradient_matrix,
    of_a_net,
    randn,
)
from tests.methods import stages


class Everything(nn.Module):
    """Parameters of every shape: a scalar, vectors, matrices, kernels, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.table = nn.Embedding(5, 4)
        self.kernel = nn.Conv1d(4, 6, 2, groups=2)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.kernel(self.table(x).mT).mean(2)
        return self.head(self.scale * self.norm(x))


def compare_with(reference: Any, method: Any, lr: float, rtol: float, dtype: torch.dtype) -> None:
    one, other = Everything().to(dtype), Everything().to(dtype)
    peer = reference(other.parameters())
    plain = torch.optim.SGD(one.parameters(), lr=lr)

    def loss(model: nn.Module, step: int) -> Tensor:
        return model(torch.arange(12).view(3, 4).add(step).remainder(5)).square().sum()

    with closing(stages.preconditioner(one, method)) as own:
        assert own.covered() == set(one.parameters())
        kit.train(one, loss, range(6), own, plain)
    kit.train(other, loss, range(6), peer)
    start = stages.weights(Everything().to(dtype))
    for before, mine, theirs in zip(start, stages.weights(one), stages.weights(other), strict=True):
        compare(mine - before, theirs - before, "update", rtol=rtol, atol=rtol * 1e-2)


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str
)
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.7)], ids=str)
def test_adamw_is_torchs(betas: Any, dtype: torch.dtype, rtol: float) -> None:
    def reference(parameters: Any) -> Any:
        return torch.optim.AdamW(parameters, lr=0.02, betas=betas, weight_decay=0.0)

    compare_with(reference, AdamW(betas), 0.02, rtol, dtype)


def test_adamw_with_decay_is_torchs() -> None:
    one, other = Everything().double(), Everything().double()
    own = soframe.Optimizer(one, AdamW(eps=1e-3), lr=0.02, weight_decay=0.3, decay_vectors=True)
    peer = torch.optim.AdamW(other.parameters(), lr=0.02, eps=1e-3, weight_decay=0.3)
    for model, optimizer in ((one, own), (other, peer)):
        kit.train(
            model, lambda net, n: net(torch.tensor([[n, 1, 2]])).square().sum(), range(4), optimizer
        )
    own.close()
    torch.testing.assert_close(stages.weights(one), stages.weights(other), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}], ids=str
)
def test_sgd_is_torchs(options: dict[str, Any]) -> None:
    def reference(parameters: Any) -> Any:
        return torch.optim.SGD(parameters, lr=0.02, **options)

    compare_with(reference, SGD(**options), 0.02, 1e-12, torch.float64)


@pytest.mark.covering(together=1)
@pytest.mark.slow
@pytest.mark.parametrize("average", ["local", "global", "sum"])
@pytest.mark.parametrize("kind", ["empirical", "type-2"])
@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_diagonal_by_passes(layer: nn.Module, kind: Kind, average: LossAverage) -> None:
    """Micro-batches of one, two and three samples, of one and of several positions."""
    block, raw, fishers = by_passes(layer, "diagonal", kind, average)
    diagonal = fishers.diagonal(dim1=1, dim2=2).reshape(raw.shape)
    compare(block.running["diagonal"], diagonal, "diagonal")
    compare(gradient_matrix(block), raw / (diagonal + 0.1), "direction")


@pytest.mark.parametrize("kind", ["type-2", "empirical"])
@pytest.mark.parametrize("positions", [(), (4,)], ids=str)
def test_diagonal_of_a_net(kind: Kind, positions: tuple[int, ...]) -> None:
    for block, _, fishers in of_a_net("diagonal", kind, positions):
        diagonal = torch.stack([one.diagonal() for one in fishers])
        compare(block.running["diagonal"].flatten(1), diagonal, block.name)


def test_squares_of_samples() -> None:
    rows, gradients = randn(2, 5, 3, 4), randn(2, 5, 3, 2, seed=1)
    expected = torch.zeros(2, 2, 4, dtype=torch.float64)
    for group in range(2):
        for n in range(5):
            own = sum(torch.outer(gradients[group, n, t], rows[group, n, t]) for t in range(3))
            expected[group] += own**2
    for at_once in (1, 40, 10**6):
        compare(by_samples(rows, gradients, at_once), expected, "squares")
    one, other = rows[:, :, :1], gradients[:, :, 1:2]
    compare(squared_gradients(one, other), by_samples(one, other), "one position")


def test_nothing_is_divided_by_zero() -> None:
    data = {"diagonal": {VALUE: torch.tensor([[[0.0, 2.0]]])}}
    matrix = torch.ones(1, 1, 2)
    given = Given(matrix, matrix, data, {}, updates=0, solver=Inverse(), damping=0.0)
    assert torch.equal(Diagonal().direct(given).matrix, torch.tensor([[[0.0, 0.5]]]))
    copy = Diagonal().direct(replace(given, data={})).matrix
    assert torch.equal(copy, matrix)
    assert copy is not matrix


@pytest.mark.parametrize(
    ("build", "setting"),
    [
        (lambda: SGD(momentum=lambda step: 0.9), "SGD: momentum"),
        (lambda: AdamW(betas=(lambda step: 0.9, 0.99)), "AdamW: betas"),
        (lambda: AdamW(betas=0.9), "AdamW: betas are two numbers"),
        (lambda: AdamW(eps="1e-8"), "AdamW: eps"),
        (lambda: SOAP(betas=(0.9,)), "SOAP: betas are two numbers"),
        (lambda: Muon(momentum=lambda step: 0.9), r"Momentum: beta must .* param_groups"),
    ],
)
def test_settings_that_are_no_numbers_are_named(build: Any, setting: str) -> None:
    with pytest.raises(ValueError, match=setting):
        build()


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="betas"):
        AdamW((0.9, 1.0))
    with pytest.raises(ValueError, match="eps"):
        AdamW(eps=0.0)
    with pytest.raises(ValueError, match="momentum"):
        SGD(1.5)
    with pytest.raises(ValueError, match="nesterov"):
        SGD(nesterov=True)
    with pytest.raises(ValueError, match="kaisa"):
        stages.preconditioner(stages.network(), "diagonal", scaling="kaisa")


TWENTY: dict[str, tuple[Any, Any, float]] = {
    "sgd": (SGD(), lambda p: torch.optim.SGD(p, lr=0.05), 0.0),
    "momentum": (SGD(0.9), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), 0.0),
    "nesterov": (
        SGD(0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
        0.0,
    ),
    "adamw": (AdamW(), lambda p: torch.optim.AdamW(p, lr=0.05, weight_decay=0.2), 0.2),
    "adamw, other settings": (
        AdamW((0.8, 0.95), 1e-4),
        lambda p: torch.optim.AdamW(p, lr=0.05, betas=(0.8, 0.95), eps=1e-4, weight_decay=0.2),
        0.2,
    ),
}


@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float64, 1e-11), (torch.float32, 1e-4)], ids=str
)
@pytest.mark.parametrize("name", TWENTY)
def test_twenty_steps_of_torchs(name: str, dtype: torch.dtype, rtol: float) -> None:
    """With a schedule; of parameters of every shape, which are all in param groups."""
    method, peer_of, decay = TWENTY[name]
    models = [Everything().to(dtype) for _ in range(2)]
    own = soframe.Optimizer(models[0], method, lr=0.05, weight_decay=decay, decay_vectors=True)
    peer = peer_of(models[1].parameters())
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1 / (1 + step / 10))
        for one in (own, peer)
    ]

    def loss(model: nn.Module, step: int) -> Tensor:
        return model(torch.arange(12).view(3, 4).add(step).remainder(5)).square().mean()

    for model, optimizer, schedule in zip(models, (own, peer), schedules, strict=True):
        kit.train(model, loss, range(20), optimizer, schedule)
    own.close()
    start = stages.weights(Everything().to(dtype))
    pairs = zip(start, *map(stages.weights, models), strict=True)
    for number, (before, mine, theirs) in enumerate(pairs):
        compare(mine - before, theirs - before, f"parameter {number}", rtol=rtol, atol=rtol * 1e-2)
        assert not torch.equal(mine, before)


@pytest.mark.skipif(
    importlib.util.find_spec("pytorch_optimizer") is None, reason="pytorch_optimizer is missing"
)
def test_decoupled_decay_is_pytorch_optimizers() -> None:
    """Of SGD with momentum, where torch's decays the gradient."""
    from pytorch_optimizer import SGDW

    models = [Everything().double() for _ in range(2)]
    own = soframe.Optimizer(models[0], SGD(0.9), lr=0.05, weight_decay=0.2, decay_vectors=True)
    peer = SGDW(models[1].parameters(), lr=0.05, momentum=0.9, weight_decay=0.2)
    for model, optimizer in zip(models, (own, peer), strict=True):
        kit.train(
            model,
            lambda net, n: net(torch.tensor([[n, 1, 2]])).square().mean(),
            range(5),
            optimizer,
        )
    own.close()
    torch.testing.assert_close(*map(stages.weights, models), rtol=1e-10, atol=1e-12)


class Spectral(nn.Module):
    """A layer of a neural operator: complex weights in frequency space, beside real ones."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.Parameter(torch.randn((), dtype=torch.float64))
        self.modes = nn.Parameter(torch.randn(3, 5, dtype=torch.complex128))
        self.shift = nn.Parameter(torch.randn((), dtype=torch.complex128))
        self.lift = nn.Linear(4, 8).double()

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(self.lift(x)).unsqueeze(-2) * self.modes + self.shift
        return self.gain * torch.fft.irfft(found, 8)


@pytest.mark.parametrize("method", ["adamw", "sgd", "muon", "kfac"])
def test_complex_weights_move_as_torchs(method: str) -> None:
    """Real and imaginary parts each have moments of their own, as in torch's AdamW."""
    own, theirs = Spectral(), Spectral()
    settings: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3}
    rates = {**settings, "auxiliary_lr": 0.02}
    plain = method == "sgd"
    chosen: Any = SGD(0.9) if plain else method
    ours = soframe.Optimizer(own, chosen, decay_vectors=True, **rates)
    assert {row.parameter for row in ours.report() if row.block is None} == set()
    for model in (own, theirs):
        model.lift.requires_grad_(False)
    weights = [theirs.gain, theirs.modes, theirs.shift]
    if plain:
        reference: torch.optim.Optimizer = torch.optim.SGD(weights, 0.02, 0.9)
        for group in ours.param_groups:
            group["weight_decay"] = 0.0  # torch's is no decoupled one
    else:
        reference = torch.optim.AdamW(weights, **settings)
    for step in range(6):
        x = torch.randn(6, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        for model, optimizer in ((own, ours), (theirs, reference)):
            model.zero_grad()
            model(x).square().sum((-1, -2)).mean().backward()
            optimizer.step()
        torch.testing.assert_close(own.modes, theirs.modes, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(own.shift, theirs.shift, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(own.gain, theirs.gain, rtol=1e-10, atol=1e-12)
    again = Spectral()
    again.load_state_dict(own.state_dict())
    again.lift.requires_grad_(False)
    other = soframe.Optimizer(again, chosen, lr=1.0)
    other.load_state_dict(ours.state_dict())
    for model, optimizer in ((own, ours), (again, other)):
        model.zero_grad()
        model(x).square().sum((-1, -2)).mean().backward()
        optimizer.step()
    assert torch.equal(own.modes, again.modes)
