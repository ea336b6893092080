"""Derivatives that reuse activations are those of the plain twin, and cost fewer products."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from soframe.kernels import products
from soframe.testing import compare
from soframe.trust_region.memo import Memo
from soframe.trust_region.quadratic import Forward, Outputs, jacobian_product
from soframe.trust_region.replay import Replay
from tests.curvature import fill, randn


class Sigmoids(nn.Module):
    """Functions as methods and functions, several inputs of one layer, a reused layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.again = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.sigmoid(self.first(x))
        hidden = self.again(hidden).tanh() + torch.relu(self.again(2 * hidden))
        return torch.cat([hidden, hidden.sigmoid() * 3, hidden.relu()], 1)


class Temporaries(nn.Module):
    """Intermediate tensors die at once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for factor in range(6):
            scale = torch.full(x.shape, float(factor), dtype=x.dtype).mul(2.0)
            total = total + self.layer(x + factor).tanh() * scale
        return total


class Noisy(nn.Module):
    """The same random functions of the same tensor, twice: their results differ."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        views = F.dropout(hidden, 0.5) * F.dropout(hidden, 0.5).cos()
        noise = torch.randn_like(hidden) - torch.randn_like(hidden)
        return self.last((views + noise).tanh())


class Single(nn.Module):
    """Goes back to single precision."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float()


class Positions(nn.Module):
    """Rows of three dimensions, attention, layer norm, gelu, dropout and in-place functions."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.norm, self.last = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.inputs(x.reshape(-1, 2, 3))
        attended = F.scaled_dot_product_attention(rows, rows, rows)
        hidden = F.gelu(self.norm(rows + attended))
        hidden = F.dropout(hidden, 0.3).mul_(2).relu_()
        return self.last(hidden).flatten(1)


def without_bias_gradient() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[2].requires_grad_(False)
    model[0].bias.requires_grad_(False)
    model[4].weight.requires_grad_(False)
    return model


def images(inplace: bool = False) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(2, 4, 2, padding=1, groups=2), nn.ReLU(inplace=inplace)]
    layers += [nn.BatchNorm2d(4), nn.Conv2d(4, 3, (2, 1), stride=2, bias=False), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(3))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), (5, 3)),
    "sigmoids, reuse": (Sigmoids, (5, 3)),
    "temporaries": (Temporaries, (5, 3)),
    "positions": (Positions, (4, 6)),
    "noisy": (Noisy, (5, 3)),
    "partly frozen": (without_bias_gradient, (5, 3)),
    "convolutions": (images, (3, 2, 4, 4)),
    "in-place": (lambda: images(inplace=True), (3, 2, 4, 4)),
    "no bias": (lambda: nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU()), (5, 3)),
}


def tangents(
    model: nn.Module, closure: Callable[[], Tensor], *, counting: bool = False
) -> tuple[list[Tensor], list[Tensor], Memo, list[dict[str, int]]]:
    """Two derivatives of the plain twin and two with a memo; and the operators of each."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    directions = [
        [randn(*p.shape, seed=10 * k + i).to(p.dtype) for i, p in enumerate(parameters)]
        for k in range(2)
    ]
    outputs, memo, replay = Outputs(model), Memo(), Replay(model)
    with memo.record():
        primals, _ = outputs.of(closure)
    forward = Forward(closure, replay, primals, primals, memo)
    counts: list[dict[str, int]] = []
    found: list[list[Tensor]] = []
    for one in (replace(forward, memo=None), forward):
        each = []
        for direction in directions:
            with Counting() as count:
                each += jacobian_product(model, one, outputs, parameters, direction)
            counts.append(count.calls)
        found.append(each)
    outputs.close()
    return found[0], found[1], memo, counts


class Counting(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def closure_of(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    return lambda: model(x).square().mean()


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_plain_twin(name: str) -> None:
    make, shape = MODELS[name]
    model = make().double()
    x = randn(*shape)
    model(x)  # lazy layers
    fill(model)
    plain, reused, memo, _ = tangents(model, closure_of(model, x))
    # What a function has overwritten cannot be reused, nor what follows from it.
    assert (memo.hits > 0) == (name != "in-place")
    for one, other in zip(reused, plain, strict=True):
        assert float(other.abs().sum()) > 0
        compare(one, other, name)


@pytest.mark.parametrize("onednn", [False, True])
def test_the_plain_twin_in_bfloat16_under_autocast(
    onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever library multiplies: in place, neither casts what it is given."""
    monkeypatch.setattr(products, "LEAST_WORK", 1)
    monkeypatch.setattr(products, "prefers_onednn", lambda: onednn)
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), Single(), nn.Linear(4, 2))).float()
    x = randn(5, 3).float()

    def closure() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    plain, reused, _, _ = tangents(model, closure)
    for one, other in zip(reused, plain, strict=True):
        assert one.dtype == other.dtype == torch.bfloat16
        compare(one.float(), other.float(), "tangent", rtol=0.03)


def test_products_are_not_computed_again() -> None:
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)]
    model, x = fill(nn.Sequential(*layers)), randn(5, 3)
    *_, counts = tangents(model, closure_of(model, x))
    products = [c.get("mm", 0) + c.get("addmm", 0) + c.get("addmm_", 0) for c in counts]
    # Two for the parameters' and the inputs' tangents, but for the first layer's constant inputs.
    assert products[2:] == [5, 5]
    assert min(products[:2]) >= 8
    slopes = [c.get("rsub", 0) + c.get("tanh", 0) for c in counts[2:]]
    assert slopes == [2, 0]  # computed once, for both directions


def test_what_has_changed_is_not_answered() -> None:
    model, x = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), randn(5, 3)

    def closure() -> Tensor:
        return model(x).square().mean()

    outputs, memo, replay = Outputs(model), Memo(), Replay(model)
    with memo.record():
        primals, _ = outputs.of(closure)
    forward = Forward(closure, replay, primals, primals, memo)
    parameters = list(model.parameters())
    direction = [randn(*p.shape, seed=i) for i, p in enumerate(parameters)]
    x.add_(1.0)  # the memory is the same, what is in it is not
    (found,) = jacobian_product(model, forward, outputs, parameters, direction)
    plain = replace(forward, memo=None)
    (expected,) = jacobian_product(model, plain, outputs, parameters, direction)
    compare(found, expected, "tangent")
    assert memo.hits == 0
    outputs.close()


def test_memory_is_not_given_away() -> None:
    """Or another tensor, there, would be taken for the one that is gone."""
    memo = Memo()
    with memo.record():
        tensor = torch.full((1000,), 1.0)
        torch.mul(tensor, 2.0)
    address = tensor.data_ptr()
    del tensor
    others = [torch.full((1000,), 3.0) for _ in range(100)]
    assert address not in [other.data_ptr() for other in others]


def test_slices_are_told_apart() -> None:
    x, memo = randn(4, 4), Memo()
    first, other = 2 * x[:, :2], 2 * x[:, 1:3]
    with memo.record():
        x[:, :2].mul(2.0)
    with memo.recall():
        doubled, hits = x[:, 1:3].mul(2.0), memo.hits
        again = x[:, :2].mul(2.0)
    assert hits == 0
    assert memo.hits == 2
    assert torch.equal(doubled, other)
    assert torch.equal(again, first)


def test_the_kind_of_a_number_matters() -> None:
    x = randn(4)
    memo = Memo()
    with memo.record():
        torch.div(x, 2, rounding_mode=None)
        torch.mul(x, 1)
    for number in (1.0, True):
        with memo.recall():
            torch.mul(x, number)
        assert memo.hits == 0
    with memo.recall():
        torch.mul(x, 1)
    assert memo.hits == 1


def test_nothing_is_remembered_of_what_is_not_a_plain_tensor() -> None:
    memo = Memo()
    masked = torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (3,), check_invariants=True)
    with memo.record():
        torch.mul(masked, 2.0)
        torch.rand(3, generator=torch.Generator().manual_seed(0))
    with memo.recall():
        torch.mul(masked, 2.0)
        torch.rand(3, generator=torch.Generator().manual_seed(0))
    assert memo.hits == 0
