"""Methods as a researcher writes them: what the first edition's interfaces got silently wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.layers import BlockShape, LayerHelper
from soframe.methods import Call, Direction, Given, Method
from soframe.specs import VALUE, FactorSpec
from soframe.testing import check_layer_helper, check_method
from tests import kit
from tests.distributed.harness import run_ranks


@dataclass(frozen=True)
class Eva(Method):
    """The curvature of mean inputs and mean output gradients (Zhang et al., 2023)."""

    scalings = ("fisher",)

    def factors(self, shape):
        groups, out, into = shape
        return (
            FactorSpec("a", "right", groups, into, kind="vector"),
            FactorSpec("g", "left", groups, out, kind="vector", degree=1),
        )

    def statistics(self, call: Call) -> Mapping[str, Tensor]:
        sums = {"g": call.output_rows.sum((1, 2))}
        if call.inputs is not None:
            rows = call.helper.block_rows(call.inputs, call.output_rows)
            sums["a"] = rows.sum((1, 2))
        return sums

    def direct(self, given: Given) -> Direction:
        a, g = given.data["a"][VALUE].unsqueeze(1), given.data["g"][VALUE].unsqueeze(2)
        inner = g.mT @ given.incoming @ a.mT
        scale = given.damping + a.square().sum(2, keepdim=True) * g.square().sum(1, keepdim=True)
        return Direction((given.incoming - inner / scale * g * a) / given.damping)


@dataclass(frozen=True)
class TNT(Method):
    """Covariances of samples' gradients on both sides (Ren and Goldfarb, 2021)."""

    scalings = ("fisher",)

    def factors(self, shape):
        groups, out, into = shape
        return (
            FactorSpec("L", "left", groups, out, reads="both", mean_over="samples"),
            FactorSpec("R", "right", groups, into, reads="both", degree=2),
        )

    def statistics(self, call: Call) -> Mapping[str, Tensor]:
        if call.inputs is None:
            return {}
        rows = call.helper.block_rows(call.inputs, call.output_rows)
        each = torch.einsum("gnto,gnti->gnoi", call.output_rows, rows)
        return {"L": (each @ each.mT).sum(1), "R": (each.mT @ each).sum(1)}

    def direct(self, given: Given) -> Direction:
        data = given.data
        return Direction(
            given.solver.apply(
                given.incoming, left=data["L"], right=data["R"], damping=given.damping
            )
        )


ON_FOUR = pytest.param(4, marks=[pytest.mark.slow, pytest.mark.thorough])


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, ON_FOUR])
@pytest.mark.parametrize("method", [Eva(), TNT()], ids=repr)
@pytest.mark.thorough
def test_methods_know_no_counts(method: Method, ranks: int) -> None:
    """Nor do they guess a scale: degree and mean say it, in micro-batches and on ranks."""
    check_method(method, ranks=(ranks,), strategies=("comm-opt", "mem-opt"), launch=run_ranks)


@pytest.mark.parametrize("method", [Eva(), TNT()], ids=repr)
@pytest.mark.slow
def test_some_rows_have_the_scale_of_all(method: Method) -> None:
    """The mean over many draws of half of the rows is the factor of all of them."""

    def factors(rows: float, steps: int) -> dict[str, Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 2)).double()
        own = soframe.Preconditioner(
            net,
            method,
            kl_clip=None,
            statistics_every=1,
            solve_every=10**6,
            decay=0.999,
            statistics=soframe.Statistics(rows=rows),
        )
        x = torch.randn(16, 3, dtype=torch.float64)
        kit.train(net, lambda net, _: net(x).square().sum(1).mean(), range(steps), own)
        return {name: factor.clone() for name, factor in own.blocks[0].running.items()}

    some, every = factors(0.5, 200), factors(1.0, 1)
    for name, factor in every.items():
        assert torch.allclose(some[name], factor, rtol=0.1, atol=0.05 * float(factor.abs().max()))


class LowRank(nn.Module):
    """``y = x (U V)^T``: two parameters, none of them a weight or a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.U = nn.Parameter(torch.randn(4, 2, dtype=torch.float64))
        self.V = nn.Parameter(torch.randn(2, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.U @ self.V).T


class UHelper(LayerHelper):
    """The block of U alone: its inputs are ``x V^T``."""

    @classmethod
    def unsupported(cls, module):
        return None

    @classmethod
    def names(cls, module):
        return ("U",)

    @classmethod
    def of(cls, module, trained, *, joint=True):
        return [cls(module)] if "U" in trained else []

    @property
    def parameters(self):
        return {"U": self.module.U}

    @property
    def shape(self):
        return soframe.layers.BlockShape(1, *self.module.U.shape)

    def pack(self, tensors):
        return tensors["U"].unsqueeze(0)

    def unpack(self, matrix):
        return {"U": matrix[0]}

    def input_rows(self, *inputs):
        return (inputs[0] @ self.module.V.T).detach()[None, :, None]

    def output_rows(self, grad_output):
        return grad_output[None, :, None]


def test_a_parameter_of_any_name_has_a_block() -> None:
    torch.manual_seed(0)
    module = LowRank()
    net = nn.Sequential(module)
    twin = nn.Linear(2, 4, bias=False, dtype=torch.float64)
    twin.weight.data.copy_(module.U.data)
    settings = {"kl_clip": None, "statistics_every": 1, "solve_every": 1, "damping": 0.1}
    own = soframe.Preconditioner(net, layers={"^0$": UHelper}, **settings)
    other = soframe.Preconditioner(twin, **settings)
    x = torch.randn(6, 3, dtype=torch.float64)
    net(x).square().sum(1).mean().backward()
    twin((x @ module.V.T).detach()).square().sum(1).mean().backward()
    own.step()
    other.step()
    torch.testing.assert_close(module.U.grad, twin.weight.grad, rtol=0, atol=1e-12)
    reasons = {row.parameter: row.reason for row in own.report()}
    assert reasons["0.U"] == ""
    assert reasons["0.V"]


def test_the_optimizer_trains_what_has_no_block_by_the_auxiliary_method() -> None:
    net = nn.Sequential(LowRank())
    optimizer = soframe.Optimizer(net, "kfac", lr=0.1, layers={"^0$": UHelper}, kl_clip=None)
    rows = {row.parameter: row for row in optimizer.report()}
    assert rows["0.U"].method.startswith("kfac")
    assert rows["0.V"].method == "adamw"


class Twice(nn.Linear):
    """A layer that has its weight under two names."""

    def __init__(self) -> None:
        super().__init__(3, 3, bias=False)
        self.again = self.weight


class TwiceHelper(soframe.layers.LinearHelper):
    @classmethod
    def unsupported(cls, module):
        return None


def test_a_weight_under_two_names_is_one_block_whose_inputs_count_once() -> None:
    torch.manual_seed(0)
    one, two = nn.Linear(3, 3, bias=False), Twice()
    two.weight.data.copy_(one.weight.data)
    x = torch.randn(8, 3)
    found = []
    for net, layers in ((one, {}), (two, {"": TwiceHelper})):
        own = soframe.Preconditioner(net, layers=layers, kl_clip=None, statistics_every=1)
        net(x).square().mean().backward()
        own.step()
        found.append(own.blocks[0].running["A"])
    assert torch.equal(*found)


def test_a_method_without_an_update_is_named_before_training() -> None:
    class Nothing(Method):
        def factors(self, shape: BlockShape) -> Sequence[FactorSpec]:
            return ()

    with pytest.raises(TypeError, match=r"Nothing has neither direct\(\) nor precondition\(\)"):
        soframe.Preconditioner(nn.Linear(3, 2), method=Nothing())


def test_a_helper_that_names_parameters_unlike_the_module_is_refused() -> None:
    class Wrong(UHelper):
        @property
        def parameters(self):
            return {"kernel": self.module.U}

    with pytest.raises(ValueError, match="'kernel', which is not what the module has"):
        soframe.Preconditioner(nn.Sequential(LowRank()), layers={"^0$": Wrong}, kl_clip=None)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"pack": lambda self, tensors: tensors["U"]}, r"pack\(\) gives a matrix \(4, 2\)"),
        ({"unpack": lambda self, matrix: {}}, r"unpack\(\) gives \{\}"),
        ({"unpack": lambda self, matrix: {"U": matrix[0][:1]}}, r"unpack\(\) gives .*\(1, 2\)"),
    ],
)
def test_a_helper_whose_matrix_is_another_is_refused(override: dict[str, Any], words: str) -> None:
    """It would leave gradients as they are, or write rows over others, in silence."""
    helper = type("Wrong", (UHelper,), override)
    with pytest.raises(ValueError, match=words):
        soframe.Preconditioner(nn.Sequential(LowRank()), layers={"^0$": helper}, kl_clip=None)


@pytest.mark.parametrize(
    ("output_rows", "words"),
    [
        (lambda self, g: g.mul_(2)[None, :, None], "has changed the gradient of the output"),
        (lambda self, g: g[None], "output_rows gives"),
    ],
)
def test_rows_that_are_none(output_rows: Any, words: str) -> None:
    net = nn.Sequential(LowRank())
    helper = type("Wrong", (UHelper,), {"output_rows": output_rows})
    _ = soframe.Preconditioner(net, layers={"^0$": helper}, kl_clip=None)
    with pytest.raises(ValueError, match=words):
        net(torch.ones(5, 3, dtype=torch.float64)).square().sum().backward()


@pytest.mark.parametrize("layer", [nn.LSTM(3, 4), nn.LSTMCell(3, 4)], ids=["LSTM", "LSTMCell"])
def test_recurrent_layers_have_a_reason(layer: nn.Module) -> None:
    net = nn.ModuleDict({"recurrent": layer, "head": nn.Linear(4, 2)})
    report = soframe.Preconditioner(net, kl_clip=None).report()
    for row in report:
        assert (row.block is None) == row.parameter.startswith("recurrent")
        assert row.block is not None or "no layer helper" in row.reason


class Gate(nn.Module):
    """Its bias multiplies what its weight makes, so that no column of ones belongs to it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3))
        self.bias = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.bias * (x @ self.weight.T)


class GateHelper(LayerHelper):
    @classmethod
    def names(cls, module: nn.Module) -> tuple[str, ...]:
        return ("weight",)

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        return None

    def input_rows(self, inputs: Tensor) -> Tensor:
        return inputs.unsqueeze(0).unsqueeze(2)

    def output_rows(self, gradient: Tensor) -> Tensor:
        return (gradient * self.module.bias).detach().unsqueeze(0).unsqueeze(2)


class GateHelperOfBlocks(GateHelper):
    """It leaves the bias out of the block, and not out of its names."""

    names = LayerHelper.names

    @classmethod
    def of(cls, module, trained, *, joint=True):
        return [cls(module, bias=False)] if "weight" in trained else []


@pytest.mark.parametrize("helper", [GateHelper, GateHelperOfBlocks])
def test_what_a_helper_leaves_out_is_in_no_block(helper: type[LayerHelper]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Gate()).double()
    layers = {"^0$": helper}
    own = soframe.Preconditioner(model, layers=layers, kl_clip=None, statistics_every=1)
    model(torch.randn(5, 3).double()).square().mean().backward()
    before = model[0].bias.grad.clone()
    own.step()
    assert torch.equal(model[0].bias.grad, before)
    assert set(own.blocks[0].parameters) == {"weight"}
    (row,) = [row for row in own.report() if row.parameter == "0.bias"]
    assert helper is GateHelperOfBlocks or row.reason == "GateHelper.names() leaves it out"


def test_the_kit_trains_what_a_helper_leaves_out() -> None:
    check_layer_helper(Gate(), torch.randn(5, 3), helper=GateHelper)


class Gains(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x + self.bias


class GainsHelper(LayerHelper):
    """Each feature is a layer, by ``shape`` and the packing alone."""

    @property
    def shape(self) -> BlockShape:
        return BlockShape(4, 1, (self.weight is not None) + (self.bias is not None))

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        columns = [tensor for tensor in (weight, bias) if tensor is not None]
        return torch.stack(columns, dim=1).unsqueeze(1)  # [4, 1, columns]

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weight = None if self.weight is None else matrix[:, 0, 0]
        return weight, None if self.bias is None else matrix[:, 0, -1]

    def input_rows(self, x: Tensor) -> Tensor:
        return x.mT.unsqueeze(2).unsqueeze(3)  # [4, batch, 1, 1]

    def output_rows(self, grad_output: Tensor) -> Tensor:
        return grad_output.mT.unsqueeze(2).unsqueeze(3)


class PlainShape(GainsHelper):
    @property
    def shape(self) -> Any:
        return tuple(super().shape)


@pytest.mark.parametrize("helper", [GainsHelper, PlainShape])
def test_the_groups_of_a_helper_are_those_of_its_shape(helper: type[LayerHelper]) -> None:
    check_layer_helper(Gains(), torch.randn(5, 4), helper=helper)
    soframe.Preconditioner(Gains(), lr=0.1, layers={"": helper}).close()


class Kernel(nn.Module):
    """A parameter of another name and layout, ``[in, out]``."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.bias = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel + self.bias


class Unnamed(soframe.layers.LinearHelper):
    unsupported = LayerHelper.unsupported


class Weightless(Unnamed):
    @classmethod
    def unsupported(cls, module):
        return None


class Flat(Weightless):
    @classmethod
    def names(cls, module):
        return ("kernel",)

    @classmethod
    def of(cls, module, trained, *, joint=True):
        return [cls(module, bias=False, keys=("kernel", "bias"))]


@pytest.mark.parametrize(
    ("helper", "message"),
    [
        (Unnamed, r"no weight; for other names override unsupported\(\), names\(\) and of\(\)"),
        (Weightless, "pass the weight's name to keys="),
        (Flat, r"override shape, to_matrix, from_matrix if it is not \[out, in\]"),
    ],
)
def test_a_helper_of_another_layout_says_what_to_override(
    helper: type[LayerHelper], message: str
) -> None:
    with pytest.raises((AssertionError, ValueError), match=message):
        check_layer_helper(Kernel(), torch.randn(5, 3), helper=helper)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "diag"}, "factor 'A': kind must be one of 'psd', 'diagonal', 'vector'"),
        ({"reads": "input"}, "factor 'A': reads must be one of 'inputs', 'outputs'"),
        ({"mean_over": "row"}, "factor 'A': mean_over must be one of 'samples', 'rows'"),
        ({"side": "in"}, "factor 'A': side must be one of 'left', 'right', 'both', not 'in'"),
    ],
)
def test_a_word_that_no_factor_has_is_an_error(fields: dict[str, Any], message: str) -> None:
    """Before, ``kind="diag"`` was a vector, which is not solved."""
    with pytest.raises(ValueError, match=message):
        FactorSpec("A", **{"side": "right", "groups": 1, "size": 3, **fields})
