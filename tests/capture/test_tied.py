"""Tied weights and modules with several names: the sum that the chain rule gives, or a reason."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from soframe.testing import compare
from tests.capture.kit import (
    WORLDS,
    Case,
    Recorder,
    check,
    images,
    precondition,
    sequences,
    snapshot,
    softplus,
    vectors,
)


class Tied(nn.Module):
    """Two layers with one weight, and a layer of its own."""

    bias, same_bias = True, True

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3, bias=self.bias)
        self.second = nn.Linear(3, 3, bias=self.bias)
        self.second.weight = self.first.weight
        if self.bias and self.same_bias:
            self.second.bias = self.first.bias
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh()).tanh())


class TiedWithoutBias(Tied):
    bias = False


class TiedAcrossPositions(Tied):
    """The layers see different numbers of positions, one of them twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh().sum(1)).tanh() + self.second(x[:, 0]))


class TiedSideBySide(nn.Module):
    """Neither square nor in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(3, 2)
        self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).tanh() * self.second(x.square())


class TiedConvolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 2, 2, padding=1)
        self.second = nn.Conv2d(2, 2, 2, padding=1)
        self.second.weight, self.second.bias = self.first.weight, self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


class TwoNames(nn.Module):
    """One module under two names, called by both."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.wrapped = nn.Sequential(nn.Tanh(), self.first)
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.wrapped(self.first(x)))


CASES = {
    "the same bias": Case(Tied),
    "without bias": Case(TiedWithoutBias),
    "calls with different positions": Case(TiedAcrossPositions, data=sequences),
    "side by side": Case(TiedSideBySide),
    "convolutions": Case(TiedConvolutions, data=images),
    "one module under two names": Case(TwoNames),
}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.covering(together=1)
def test_tied(name: str, world_size: int) -> None:
    check(CASES[name], world_size)


class OtherBias(Tied):
    same_bias = False


class OneWithBias(Tied):
    """Only one of the two has a bias."""

    same_bias = False

    def __init__(self) -> None:
        super().__init__()
        self.second.bias = None


class SharedBias(nn.Module):
    """Layers with weights of their own and one bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.bias = self.first.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh())


@pytest.mark.parametrize(
    ("kind", "biases"),
    [
        (OtherBias, ["first.bias", "second.bias"]),
        (OneWithBias, ["first.bias"]),
        (SharedBias, ["first.bias"]),
    ],
)
def test_bias_that_is_not_shared_alike_is_left_alone(
    kind: type[nn.Module], biases: list[str]
) -> None:
    """The weight's block is the weight's alone; the biases keep their gradients and a reason.

    The reference knows no such block; a twin whose biases are frozen does.
    """
    model, raw, twin = (Case(kind).build() for _ in range(3))
    preconditioner = precondition(model)
    for bias in biases:
        twin.get_parameter(bias).requires_grad_(False)
    recorder = Recorder(twin)
    for each in (model, raw, twin):
        softplus(each(vectors(0))).backward()
    preconditioner.step()
    recorder.step(len(vectors(0)))
    for name, parameter in model.named_parameters():
        if name in biases:
            assert torch.equal(parameter.grad, raw.get_parameter(name).grad)
        else:
            compare(parameter.grad, twin.get_parameter(name).grad, name)
    rows = {row.parameter: row for row in preconditioner.report()}
    for bias in biases:
        assert rows[bias].block is None
        assert "not shared by the same modules" in rows[bias].reason
    assert "shared by first, second" in rows["first.weight"].note or kind is SharedBias


class LanguageModel(nn.Module):
    """An embedding tied with its decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.middle = nn.Linear(3, 3)
        self.decoder = nn.Linear(3, 4)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.middle(self.embedding(x)).tanh())


class Functional(nn.Module):
    """A module of the user's with the weight of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(3, 3)
        self.decoder = nn.Linear(3, 3)
        self.user = nn.Module()
        self.user.kernel = self.decoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.decoder(self.middle(x)).tanh(), self.user.kernel)


class OtherGeometry(nn.Module):
    """Convolutions of one weight and of different strides, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Conv2d(2, 2, 1)
        self.grouped = nn.Conv2d(4, 2, 1, groups=2)
        self.grouped.weight = self.decoder.weight
        self.middle = nn.Linear(2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.grouped(self.decoder(x).tanh().repeat(1, 2, 1, 1))
        return self.middle(x.mean((2, 3)))


TOKENS = torch.tensor([[0, 1], [2, 3], [3, 3]])
FORWARD_ONLY = {"layers": "all", "fisher": "forward-only"}
REFUSED = [
    (LanguageModel, TOKENS, {}, "no layer helper", "shared with embedding, which has no block"),
    (Functional, vectors(0), {}, "no layer helper", "shared with user, which has no block"),
    (Tied, vectors(0), {"skip": ["second"]}, "skipped by 'second'", "shared with second"),
    (OtherGeometry, images(0), {}, "another geometry", "another geometry"),
    # A ⊗ I of one use is I ⊗ A of the other.
    (LanguageModel, TOKENS, FORWARD_ONLY, "another geometry", "another geometry"),
]


@pytest.mark.parametrize(("kind", "x", "options", "reason", "partner"), REFUSED)
def test_weight_shared_beyond_helpers_is_left_alone(
    kind: type[nn.Module], x: Tensor, options: dict[str, list[str]], reason: str, partner: str
) -> None:
    """A block would miss part of the gradient's curvature: no block, a reason, the raw gradient."""
    model, raw = Case(kind).build(), Case(kind).build()
    preconditioner = precondition(model, **options)
    softplus(model(x)).backward()
    softplus(raw(x)).backward()
    preconditioner.step()
    rows = {row.parameter: row for row in preconditioner.report()}
    assert rows.keys() == dict(model.named_parameters()).keys()
    refused = [row for row in rows.values() if row.block is None]
    assert refused
    for row in refused:
        assert torch.equal(
            model.get_parameter(row.parameter).grad, raw.get_parameter(row.parameter).grad
        )
    reasons = " | ".join(row.reason for row in refused)
    assert reason in reasons
    assert partner in reasons
    own = {row.block for row in rows.values() if row.block is not None}
    assert own == ({"last"} if kind is Tied else {"middle"})
    for name in own:
        weight = f"{name}.weight"
        assert not torch.equal(model.get_parameter(weight).grad, raw.get_parameter(weight).grad)
    assert set(snapshot(model, preconditioner)["A"]) == own
