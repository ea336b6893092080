"""Subclasses of known layers: served unless they override ``forward``, which the report says."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import soframe
from soframe.layers import Conv1dHelper, EmbeddingHelper, LayerHelper, LinearHelper
from soframe.registry import KINDS
from soframe.specs import FactorSpec
from soframe.testing import check_layer_helper, compare, dense_fisher
from tests import kit
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


class Tripled:
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)  # type: ignore[misc]


class Mixed(Tripled, nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)


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


class Named(nn.Linear):
    """It computes as its class does."""

    def __init__(self, name: str = "") -> None:
        super().__init__(3, 3)
        self.name = name


class Cast(nn.Linear):
    """As many language models have it: parameters in float32, products in the inputs' type."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert self.bias is not None
        return F.linear(x, self.weight.to(x.dtype), self.bias.to(x.dtype))


def stepped(layer: nn.Module, x: Tensor, **settings: Any) -> soframe.Preconditioner:
    model = nn.Sequential(layer)
    settings["statistics"] = soframe.Statistics(samples="batch")
    own = soframe.Preconditioner(model, kl_clip=None, statistics_every=1, **settings)
    model(x).float().square().mean().backward()
    own.step()
    return own


def rows() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(4, 3)


OVERRIDES: dict[Callable[[], nn.Module], str] = {
    Masked: r"Masked overrides Linear\.forward.*register\('layer', Masked\)\(soframe\.layers\.Lin",
    Scaled: r"Scaled overrides Linear\.forward",
    Mixed: r"Mixed overrides Linear\.forward",
    Standardised: r"Standardised overrides Conv2d\._conv_forward.*soframe\.layers\.Conv2dHelper",
    Normed: r"Normed overrides LayerNorm\.forward",
}


@pytest.mark.parametrize("build", OVERRIDES)
def test_a_subclass_that_overrides_forward_is_reported(build: Callable[[], nn.Module]) -> None:
    with pytest.raises(ValueError, match=f"nothing to precondition(.|\n)*{OVERRIDES[build]}"):
        soframe.Preconditioner(nn.Sequential(build()), kl_clip=None, layers="all")


def test_a_subclass_with_the_forward_of_its_class_is_served_as_that() -> None:
    one, two = Named().double(), nn.Linear(3, 3).double()
    two.load_state_dict(one.state_dict())
    found = [stepped(layer, rows().double()) for layer in (one, two)]
    for name in ("A", "G"):
        assert torch.equal(*(own.blocks[0].running[name] for own in found))
    assert torch.equal(one.weight.grad, two.weight.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_line_of_the_report_registers_it(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(KINDS["layer"], "_components", dict(KINDS["layer"].available()))
    soframe.register("layer", Cast)(soframe.layers.LinearHelper)
    assert stepped(Cast(), rows().to(dtype)).blocks[0].mass > 0


class Dense(nn.Module):
    """A linear layer of its own class, as PyTorch Geometric's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(3, 3)), nn.Parameter(torch.rand(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


Geometric = type("Linear", (Dense,), {"__module__": "torch_geometric.nn.dense.linear"})


class Vectors(nn.Module):
    """Scales in a container, as IA3's adapters have them."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterDict({"default": nn.Parameter(torch.rand(3))})

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales["default"]


class Products(nn.Linear):
    """Falcon's: the same mathematics, in other words."""

    def __init__(self) -> None:
        super().__init__(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


REMEDIES: dict[Callable[[], nn.Module], str] = {
    Products: r"Products overrides Linear\.forward.*register\('layer', Products\)\(soframe\.layers",
    Dense: r"if Dense computes x W\^T \+ b, soframe\.register\('layer', Dense\)\(soframe\.layer",
    Vectors: r"a ParameterDict is not called, and others use its parameters; a method that reads g",
}


@pytest.mark.parametrize("build", REMEDIES)
def test_an_error_names_what_trains_the_model(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(build())
    with pytest.raises(ValueError, match=f"(.|\n)*{REMEDIES[build]}(.|\n)*trains these") as raised:
        soframe.Preconditioner(model, kl_clip=None)
    line = str(raised.value).splitlines()[-1].partition(" trains")[0]
    optimizer = eval(line, {"soframe": soframe, "model": model})
    before = model(rows()).square().mean().item()
    kit.train(model, lambda model, _: model(rows()).square().mean(), range(3), optimizer)
    assert model(rows()).square().mean().item() < before
    assert all(row.block is not None for row in optimizer.report())
    optimizer.close()
    if build is Vectors:
        return
    # A linear layer of another class has the factors of torch's.
    monkeypatch.setattr(KINDS["layer"], "_components", dict(KINDS["layer"].available()))
    soframe.register("layer", build)(soframe.layers.LinearHelper)  # type: ignore[arg-type]
    _compare_with_torch(build())


def test_a_matrix_without_a_bias_may_be_a_linear_layer() -> None:
    layer = Dense()
    layer.register_parameter("bias", None)
    with pytest.raises(ValueError, match=REMEDIES[Dense]):
        soframe.Preconditioner(layer)


def test_pytorch_geometric_s_linear_has_a_block() -> None:
    _compare_with_torch(Geometric())


def _compare_with_torch(layer: nn.Module) -> None:
    plain = nn.Linear(3, 3).double()
    plain.load_state_dict(layer.state_dict())
    found = [stepped(one, rows().double()) for one in (layer.double(), plain)]
    for name in ("A", "G"):
        compare(*(own.blocks[0].running[name] for own in found), name)
    compare(layer.get_parameter("weight").grad, plain.weight.grad, "direction")


def test_nothing_trains_a_frozen_model() -> None:
    with pytest.raises(ValueError, match="nothing to precondition") as raised:
        soframe.Preconditioner(nn.Linear(3, 3).requires_grad_(False), kl_clip=None)
    assert "trains these" not in str(raised.value)


def test_a_helper_chosen_for_the_module_serves_it() -> None:
    assert stepped(Cast(), rows(), layers={"^0$": LinearHelper}).blocks[0].mass > 0


class Causal(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.pad(x, (2, 0)))


class CausalHelper(Conv1dHelper):
    def input_rows(self, *inputs: Tensor) -> Tensor:
        return super().input_rows(F.pad(inputs[0], (2, 0)))


class Table(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


class TableHelper(EmbeddingHelper):
    def input_rows(self, *inputs: Tensor) -> Tensor:
        return 3 * super().input_rows(*inputs)


class Diagonal(LinearHelper):
    """Its A is a diagonal."""

    def factor(self, spec: FactorSpec) -> FactorSpec:
        return replace(spec, kind="diagonal") if spec.side == "right" else spec


@pytest.mark.parametrize(
    ("layer", "helper", "x"),
    [
        (Causal(2, 3, 3), CausalHelper, torch.rand(4, 2, 5)),
        (Table(4, 3), TableHelper, torch.arange(6).view(3, 2) % 4),
        (nn.Linear(3, 2), Diagonal, torch.rand(4, 3)),
    ],
    ids=["conv", "embedding", "diagonal"],
)
def test_moments_are_of_the_rows_that_a_subclass_defines(
    layer: nn.Module, helper: type[LayerHelper], x: Tensor
) -> None:
    check_layer_helper(layer, x, helper=helper)
    for method in ("kfac", "kfac-reduce"):
        assert stepped(layer, x, method=method, layers={"^0$": helper}).blocks[0].mass > 0


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


def sharded(rank: int, ranks: int) -> dict[str, str]:
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), Named(), nn.Linear(3, 2))
    for layer in (*model, model):
        fully_shard(layer)
    own = soframe.Preconditioner(model, kl_clip=None, statistics_every=1)
    model(rows()).square().mean().backward()
    own.step()
    return {row.parameter: row.reason for row in own.report()}


@pytest.mark.distributed
def test_sharded_layers_are_those_of_their_class() -> None:
    """fully_shard mixes a class of its own into that of each module."""
    for reasons in run_ranks(sharded, 2):
        assert "Scaled overrides Linear.forward" in reasons["0.weight"]
        assert not reasons["1.weight"]
        assert not reasons["2.weight"]
