"""Curvature behind a last layer that is linear: without tangents of the outputs, and the same."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from soframe.derivatives.forward import Forward, Outputs
from soframe.derivatives.linear_end import LinearEnd
from soframe.derivatives.replay import Replay
from soframe.derivatives.tape import Tape
from soframe.derivatives.twice import Direction
from soframe.losses import CrossEntropy, Loss, MeanSquaredError, SquaredError
from soframe.testing import compare
from soframe.trust_region.parts import part_of_each, split
from soframe.trust_region.quadratic import curvature_along
from tests.curvature import fill, half_square, randn
from tests.trust_region.kit import fisher, flat, trust_region
from tests.trust_region.test_parts import dense


class Named(nn.Module):
    """Calls the last layer's function by name, on rows of three dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 2), nn.Linear(2, 9)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.unflatten(0, (-1, 2))).tanh()
        found = F.linear(hidden, bias=self.last.bias, weight=self.last.weight)
        return found if self.training else found.flatten(0, 1)


def frozen(*names: str) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 7))
        for name in names:
            model.get_parameter(name).requires_grad_(False)
        return model

    return make


MODELS: dict[str, Callable[[], nn.Module]] = {
    "decoder": frozen(),
    "no bias": lambda: nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 7, bias=False)),
    "frozen bias": frozen("2.bias"),
    "frozen weight": frozen("2.weight"),
    "nothing before": frozen("0.weight", "0.bias"),
    "nothing after": frozen("2.weight", "2.bias"),
    "one layer": lambda: nn.Linear(2, 7),
}


def directions_of(model: nn.Module, parts: int) -> list[Direction]:
    parameters = [p for p in model.parameters() if p.requires_grad]
    numbers = part_of_each(model, parameters, parts)
    found: list[Direction] = []
    for k in range(3):
        rows = [randn(*p.shape, seed=100 * k + i) for i, p in enumerate(parameters)]
        found += split(rows, [numbers[p] for p in parameters]) if k < 2 else [rows]
    return found


def forward_of(
    model: nn.Module, x: Tensor, y: Tensor, criterion: Callable[[Tensor, Tensor], Tensor]
) -> Forward:
    def closure() -> Tensor:
        return criterion(model(x), y)

    outputs, tape, replay = Outputs(model), Tape(), Replay(model)
    found, loss = outputs.of(closure, tape)
    gradients = torch.autograd.grad(loss, found, create_graph=True)
    return Forward(closure, replay, found, gradients, tape)


def curvature(model: nn.Module, forward: Forward, directions: list[Direction]) -> Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    return curvature_along([forward], parameters, directions, isotropic=True)


@pytest.fixture
def grams(monkeypatch: pytest.MonkeyPatch) -> list[LinearEnd]:
    """The last layers that were met."""
    met: list[LinearEnd] = []
    plain = LinearEnd.gram

    def gram(own: LinearEnd) -> Tensor:
        met.append(own)
        return plain(own)

    monkeypatch.setattr(LinearEnd, "gram", gram)
    return met


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", MODELS)
def test_curvature_is_that_of_the_dense_fisher(
    name: str, parts: int, grams: list[LinearEnd]
) -> None:
    model = fill(MODELS[name]())
    width = 2 if name == "one layer" else 3
    x, y = randn(5, width), randn(5, 7, seed=1)
    forward = forward_of(model, x, y, half_square)
    directions = directions_of(model, parts)
    found = curvature(model, forward, directions)
    assert len(grams) == 1
    parameters = [p.detach() for p in model.parameters() if p.requires_grad]
    d = torch.stack([dense(direction, parameters) for direction in directions])
    wanted = [p.requires_grad for p in model.parameters() for _ in range(p.numel())]
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    matrix = fisher(model, [(x, y)], half_square)[wanted][:, wanted]
    compare(found, d @ matrix @ d.T, name)


@pytest.mark.parametrize("flat_rows", [False, True])
def test_rows_of_any_shape_and_arguments_by_name(flat_rows: bool, grams: list[LinearEnd]) -> None:
    """Only where the layer's function returned the output."""
    model = fill(Named()).train(not flat_rows)
    x, y = randn(6, 3), randn(6, 9, seed=1).view(6, 9)
    target = y if flat_rows else y.view(3, 2, 9)
    forward = forward_of(model, x, target, F.mse_loss)
    directions = directions_of(model, 2)
    found = curvature(model, forward, directions)
    assert len(grams) == (0 if flat_rows else 1)
    parameters = list(model.parameters())
    plain = Forward(forward.closure, forward.replay, forward.outputs, forward.gradients)
    expected = curvature_along([plain], parameters, directions)
    compare(found, expected, "curvature")


def masked(outputs: Tensor, targets: Tensor) -> Tensor:
    return half_square(outputs[1:], targets[1:])


def weighted(outputs: Tensor, targets: Tensor) -> Tensor:
    weights = torch.ones_like(outputs)
    weights[0, 0] = 1.001
    return 0.5 * (weights * (outputs - targets) ** 2).sum()


def linear(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs * targets).sum()


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "squares": (half_square, True),
    "mean": (F.mse_loss, True),
    "masked": (masked, False),
    "weighted": (weighted, False),
    "not quadratic": (F.huber_loss, False),
    "linear": (linear, True),  # zero times the identity
}


@pytest.mark.parametrize("name", LOSSES)
def test_what_is_declared_is_held_against_the_loss(name: str, grams: list[LinearEnd]) -> None:
    criterion, isotropic = LOSSES[name]
    model = fill(frozen()())
    x, y = randn(5, 3), randn(5, 7, seed=1)
    forward = forward_of(model, x, 2 * y, criterion)
    scale = forward.isotropy()
    assert (scale is not None) == isotropic
    directions = directions_of(model, 2)
    found = curvature(model, forward, directions)
    assert len(grams) == isotropic
    expected = curvature_along([forward], list(model.parameters()), directions)
    compare(found, expected, name)


def test_an_output_of_zeros_tells_nothing() -> None:
    model = frozen()()
    nn.init.zeros_(model.get_parameter("2.weight"))
    nn.init.zeros_(model.get_parameter("2.bias"))
    forward = forward_of(model.double(), randn(5, 3), randn(5, 7), half_square)
    assert forward.isotropy() is None


def test_where_outputs_are_narrow_their_tangents_are_taken(grams: list[LinearEnd]) -> None:
    """With the loss's Hessian as a number all the same."""
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)))
    x, y = randn(5, 3), randn(5, 4, seed=1)
    forward = forward_of(model, x, y, half_square)
    directions = directions_of(model, 2)
    found = curvature(model, forward, directions)
    assert not grams
    expected = curvature_along([forward], list(model.parameters()), directions)
    compare(found, expected, "curvature")


@pytest.mark.parametrize(
    ("loss", "criterion", "expected"),
    [
        (SquaredError(), half_square, True),
        (MeanSquaredError(), F.mse_loss, True),
        (CrossEntropy(), None, False),
    ],
    ids=["squared-error", "mse", "cross-entropy"],
)
def test_losses_say_whether_they_are_isotropic(
    loss: Loss, criterion: Any, expected: bool, grams: list[LinearEnd]
) -> None:
    """A softmax whose logits are equal has them for an eigenvector, and is not."""
    model = fill(frozen()())
    own = trust_region(model, loss)
    x = randn(5, 3)
    if criterion is None:
        with torch.no_grad():
            model.get_parameter("2.weight").zero_()
            model.get_parameter("2.bias").fill_(1.0)
        own.step(lambda: F.cross_entropy(model(x), torch.arange(5)))
    else:
        y = randn(5, 7, seed=1)
        own.step(lambda: criterion(model(x), y))
    assert len(grams) == expected
    assert own.last["predicted"] < 0
    assert torch.isfinite(flat(list(model.parameters()))).all()
