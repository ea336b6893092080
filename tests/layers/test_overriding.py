"""Subclasses of known layers: served where they compute what the class does, refused otherwise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import soframe
from soframe.layers import LinearHelper
from soframe.testing import compare, dense_fisher
from tests.distributed.harness import run_ranks


class Masked(nn.Linear):
    """Its weight has zeros in places, as MADE's."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("mask", torch.ones(3, 3).triu())

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class Standardised(nn.Conv2d):
    """It overrides what torch's convolutions have beneath ``forward``."""

    def __init__(self) -> None:
        super().__init__(1, 3, 1)

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(x, weight - weight.mean(), bias)


class Normed(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 + x.square())


class Counting(nn.Linear):
    """It computes what its class does, and something besides."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Cast(nn.Linear):
    """As many language models have it: parameters in float32, products in the inputs' type."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


def stepped(layer: nn.Module, x: Tensor, **settings: Any) -> soframe.Preconditioner:
    model = nn.Sequential(layer)
    own = soframe.Preconditioner(model, kl_clip=None, statistics_every=1, **settings)
    model(x).float().square().mean().backward()
    own.step()
    return own


def rows() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 3)


@pytest.mark.parametrize("build", [Masked, Scaled, Normed])
def test_a_subclass_that_computes_otherwise_is_named(build: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=rf"0: {build.__name__}.forward does not compute what"):
        stepped(build(), rows(), layers="all")


def test_what_is_mixed_in_counts() -> None:
    class Tripled:
        def forward(self, x: Tensor) -> Tensor:
            return 3 * super().forward(x)  # type: ignore[misc]

    class Layer(Tripled, nn.Linear):
        pass

    with pytest.raises(ValueError, match=r"Layer\.forward does not compute what Linear's does"):
        stepped(Layer(3, 3), rows())


def test_what_a_convolution_overrides_beneath_its_forward_counts() -> None:
    with pytest.raises(ValueError, match=r"Standardised\.forward does not compute what Conv2d's"):
        stepped(Standardised(), torch.randn(4, 1, 2, 2))


def test_a_forward_that_an_instance_was_given_counts() -> None:
    layer = nn.Linear(3, 3)
    plain = layer.forward
    layer.forward = plain  # type: ignore[method-assign]
    stepped(layer, rows()).close()
    layer.forward = lambda x: 2 * plain(x)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=r"Linear\.forward does not compute"):
        stepped(layer, rows())


def test_one_that_begins_to_compute_otherwise_is_named_at_that_step() -> None:
    model = nn.Sequential(Gated(3, 3))
    own = soframe.Preconditioner(model, kl_clip=None, statistics_every=1)
    for gate in (1.0, 0.5):
        model[0].gate = gate
        model(rows()).square().mean().backward()
        if gate == 1.0:
            own.step()
    with pytest.raises(ValueError, match="Gated"):
        own.step()


def test_a_subclass_that_computes_the_same_is_served_as_its_class() -> None:
    one, two = Counting().double(), nn.Linear(3, 3).double()
    two.load_state_dict({k: v for k, v in one.state_dict().items() if k != "calls"})
    found = [stepped(layer, rows().double()) for layer in (one, two)]
    for name in ("A", "G"):
        assert torch.equal(*(own.blocks[0].running[name] for own in found))
    assert torch.equal(one.weight.grad, two.weight.grad)
    assert one.calls == 1, "the comparison calls the class, not the module"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_a_subclass_may_cast(dtype: torch.dtype) -> None:
    assert stepped(Cast(), rows().to(dtype)).blocks[0].mass > 0


def test_buffers_of_a_norm_are_left_alone() -> None:
    class Same(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    found = []
    for kind in (Same, nn.BatchNorm1d):
        layer = kind(3)
        stepped(layer, rows(), layers="all")
        found.append(layer.running_mean)
    assert torch.equal(*found)


def test_other_methods_and_other_helpers_are_not_concerned() -> None:
    class Own(LinearHelper):
        """A helper for this layer."""

        def output_rows(self, gradient: Tensor) -> Tensor:
            return super().output_rows(3 * gradient)

    torch.manual_seed(0)
    layer, x = Scaled().double(), rows().double()
    twin = copy.deepcopy(layer)
    optimizer = soframe.Optimizer(nn.Sequential(twin), "muon", lr=0.1)
    twin(x).square().mean().backward()
    optimizer.step()
    # Of a single sample the block is the Fisher itself.
    own = stepped(layer, x[:1], layers={"^0$": Own})
    dense = dense_fisher(
        nn.Sequential(layer), x[:1], lambda y, _: y.square().mean(), x[:1], parameters=["0.weight"]
    )
    a, g = (own.blocks[0].running[name][0] for name in ("A", "G"))
    compare(torch.kron(g, a[:3, :3]), dense, "the Fisher of the weight", rtol=1e-6)


def sharded(rank: int, ranks: int, kind: type[nn.Module]) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(kind(), nn.Linear(3, 2))
    for layer in (*model, model):
        fully_shard(layer)
    own = soframe.Preconditioner(model, kl_clip=None, statistics_every=1)
    model(rows()).square().mean().backward()
    try:
        own.step()
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.distributed
def test_sharded_layers_are_compared_with_their_gathered_parameters() -> None:
    """fully_shard mixes a class of its own into that of each module."""
    for said in run_ranks(sharded, 2, Scaled):
        assert "FSDPScaled.forward does not compute what Linear's does" in said
    assert run_ranks(sharded, 2, Counting) == ["", ""]


class Gated(nn.Linear):
    gate = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.gate * super().forward(x)


def gated_once(rank: int, ranks: int) -> list[str]:
    """The second micro-batch of one rank is computed otherwise, in the second step."""
    torch.manual_seed(0)
    model = nn.Sequential(Gated(3, 3))
    own = soframe.Preconditioner(model, kl_clip=None, statistics_every=1)
    said = []
    for step in range(3):
        model.zero_grad()
        for part in range(2):
            model[0].gate = 0.5 if (rank, step, part) == (2, 1, 1) else 1.0
            (model(rows()).square().mean() / 2).backward()
        before = model[0].weight.grad.clone()
        try:
            own.step()
            said.append("")
        except (ValueError, RuntimeError) as error:
            assert torch.equal(model[0].weight.grad, before)
            said.append(str(error))
            own.reset_batch()
    return said


@pytest.mark.distributed
def test_all_ranks_are_told_of_a_call_of_one_and_go_on() -> None:
    each = run_ranks(gated_once, 4)
    assert all(first == last == "" and middle for first, middle, last in each)
    assert "Gated.forward does not compute what Linear's does" in each[2][1]
    assert all("rank 2" in middle for _, middle, _ in (*each[:2], each[3]))
