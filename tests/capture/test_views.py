"""Outputs that are views and are changed in place: torch gives these another past."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from soframe.layers import LinearHelper
from tests.capture.kit import WORLDS, Case, check, images, precondition, sequences, softplus
from tests.curvature import closing

Change = Callable[[Tensor], Tensor]


def rectified(x: Tensor) -> Tensor:
    return F.relu_(x)


def kept(x: Tensor) -> Tensor:
    return x.tanh()


def masked(x: Tensor) -> Tensor:
    """A mask written into the output, as SpecAugment does."""
    x[:, torch.ones(x.shape[1:], dtype=torch.bool).tril()] = 0
    return x


def several(x: Tensor) -> Tensor:
    return x.mul_(2).add_(0.1).tanh_()


def sliced(x: Tensor) -> Tensor:
    x[..., :2].mul_(3)
    x[:, 0].tanh_()
    return x


def turned(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).tanh_().transpose(-1, -2)


CHANGES: dict[str, Change] = {
    change.__name__: change for change in (rectified, kept, masked, several, sliced, turned)
}


class Network(nn.Module):
    """Layers whose outputs are changed; plainly, a copy of them is."""

    def __init__(self, change: Change, plain: bool = False, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self._change, self._plain, self._reentrant = change, plain, reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self._reentrant is None:
            hidden = self._hidden(x)
        else:
            start = x.clone().requires_grad_()
            hidden = checkpoint(self._hidden, start, use_reentrant=self._reentrant)
        return self._changed(self.last(self._changed(self.first(hidden))))

    def _hidden(self, x: Tensor) -> Tensor:
        return self._changed(self.first(x))

    def _changed(self, x: Tensor) -> Tensor:
        return self._change(x.clone() if self._plain else x)


class Images(nn.Module):
    """A convolution and linear layers on what it gives, with four dimensions."""

    def __init__(self, plain: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 3, 2), nn.Linear(3, 2)
        self._plain = plain

    def forward(self, x: Tensor) -> Tensor:
        output = self.last(self.first(x).permute(0, 2, 3, 1))
        return (output.clone() if self._plain else output).tanh_()


CASES = {
    **{
        name: Case(partial(Network, change), partial(Network, change, True), data=sequences)
        for name, change in CHANGES.items()
    },
    **{
        f"{name}, checkpoint {reentrant}": Case(
            partial(Network, change, False, reentrant),
            partial(Network, change, True),
            data=sequences,
            ddp={"static_graph": True},
        )
        for name, change in CHANGES.items()
        for reentrant in (False, True)
    },
    "four dimensions": Case(Images, partial(Images, True), data=images),
}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.covering(together=1)
def test_changed_in_place(name: str, world_size: int) -> None:
    """Statistics and steps are those of the model whose outputs stay, by the dense reference."""
    check(CASES[name], world_size)


def statistics(model: nn.Module, x: Tensor, context: Any = None, **options: Any) -> dict[str, Any]:
    """Return the factors after one step, and the preconditioned gradients."""
    with closing(precondition(model, **options)) as own:
        with context or nullcontext():
            output = model(x)
        if own.loss is not None:
            own.observe(output)
        softplus(output.float() if output.dtype == torch.bfloat16 else output).backward()
        own.step()
        factors = {
            f"{block.name} {factor.name}": block.running.matrix(factor)
            for block in own.blocks
            for factor in block.factors
        }
        named = model.named_parameters()
        return {**factors, **{name: p.grad for name, p in named if p.grad is not None}}


def require_equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Require the same bits."""
    assert got.keys() == want.keys()
    assert sum(name.endswith((" A", " G")) for name in got) == 4
    for name, tensor in want.items():
        assert torch.equal(got[name], tensor), name


def both(change: Change) -> tuple[nn.Module, nn.Module]:
    """Return a model and its plain twin, in double precision."""
    model, twin = (Network(change, plain).double() for plain in (False, True))
    twin.load_state_dict(model.state_dict())
    return model, twin


@pytest.mark.parametrize("name", CHANGES)
def test_probes(name: str) -> None:
    """What probes send backward arrives at the outputs as they were."""
    options = {"fisher": "type-2", "loss": "mse"}
    model, twin = both(CHANGES[name])
    x = sequences(0)
    require_equal(statistics(model, x, **options), statistics(twin, x, **options))


@pytest.mark.parametrize("name", CHANGES)
def test_autocast(name: str) -> None:
    model, twin = (each.float() for each in both(CHANGES[name]))
    x = sequences(0).float()
    found = [statistics(each, x, torch.autocast("cpu", torch.bfloat16)) for each in (model, twin)]
    require_equal(*found)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize(
    "name",
    [
        "turned",
        *(pytest.param(name, marks=pytest.mark.thorough) for name in ("rectified", "several")),
    ],
)
def test_compiled(name: str) -> None:
    torch._dynamo.reset()
    model, twin = both(CHANGES[name])
    want = statistics(twin, sequences(0))
    model.compile(backend="aot_eager")
    require_equal(statistics(model, sequences(0)), want)
    torch._dynamo.reset()


class Lone(nn.Module):
    """A convolution of one image without a batch, channels first or last in memory."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(2, 3, 2), nn.Conv2d(3, 2, 1)
        self._plain = plain

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.first, self.last):
            x = layer(x)
            x = (x.clone() if self._plain else x).relu_()
        return x


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_convolution_without_a_batch(memory_format: torch.memory_format) -> None:
    model, twin = (Lone(plain).double().to(memory_format=memory_format) for plain in (False, True))
    twin.load_state_dict(model.state_dict())
    require_equal(statistics(model, images(0)[0]), statistics(twin, images(0)[0]))


class PartOf(nn.Linear):
    """Returns some of the features that it makes, as a view of them all."""

    def __init__(self, plain: bool) -> None:
        super().__init__(3, 3)
        self._plain = plain

    def forward(self, x: Tensor) -> Tensor:
        whole = x @ self.weight.T.repeat(1, 2)
        part = whole[..., 3:]
        return part.clone() if self._plain else part


@pytest.mark.parametrize("change", [F.relu_, F.relu])
def test_output_that_is_a_part_of_its_base(change: Change) -> None:
    found = []
    weights = torch.randn(2, 3, 3).double()
    for plain in (False, True):
        layers = [PartOf(plain).double() for _ in range(2)]
        for layer, weight in zip(layers, weights, strict=True):
            layer.weight = nn.Parameter(weight.clone())
            layer.bias = None

        class Model(nn.ModuleList):
            def forward(self, x: Tensor) -> Tensor:
                return change(self[1](change(self[0](x))))

        model = Model(layers)
        found.append(statistics(model, sequences(0), layers={".*": LinearHelper}))
    require_equal(*found)


def unchanged(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize("change", [unchanged, turned])
def test_gradients_that_lie_otherwise_than_the_base(change: Change) -> None:
    """That of a sum is one number in memory, which is no element's own."""
    found = []
    for model in both(change):
        with closing(precondition(model)) as own:
            model(sequences(0)).sum().backward()
            own.step()
            found.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in found[1].items():
        assert torch.equal(found[0][name], gradient), name


class Hooked(nn.Module):
    """A hook on the output of a layer changes its gradient; plainly, it is on the next tensor."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 3), nn.Linear(3, 2)
        self._plain = plain

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self._plain:
            hidden = hidden.clone()
        hidden.register_hook(lambda gradient: (10 * gradient).clamp(max=0.5))
        return self.last(hidden.tanh())


@pytest.mark.parametrize("flat", [True, False], ids=["two dimensions", "a view"])
def test_hooks_of_an_output_that_change_its_gradient_come_first(flat: bool) -> None:
    """The layer's own gradients are made of what they return, and so are its statistics."""
    model, twin = (Hooked(plain).double() for plain in (False, True))
    twin.load_state_dict(model.state_dict())
    x = sequences(0).flatten(0, 1) if flat else sequences(0)
    require_equal(statistics(model, x), statistics(twin, x))
