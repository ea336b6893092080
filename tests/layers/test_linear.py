"""Rows of a linear layer: the gradient from rows is autograd's, whatever the leading dimensions."""

from collections.abc import Collection
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from soframe.kernels import devices
from soframe.layers import LayerHelper, LinearHelper, base
from soframe.testing import check_layer_helper, compare
from tests import kit
from tests.curvature import fill, randn
from tests.examples import examples


@given(
    leading=st.lists(st.integers(1, 3), max_size=3),
    features=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    frozen=st.sampled_from(["", "weight", "bias"]),
    transposed=st.booleans(),
)
@settings(max_examples=examples(30))
def test_rows(leading: list[int], features: tuple[int, int], frozen: str, transposed: bool) -> None:
    layer = fill(nn.Linear(*features))
    helper = LinearHelper(layer, **({frozen: False} if frozen else {}))
    x, start = randn(*leading, features[0]), randn(*leading, features[1], seed=1)
    if transposed and leading:
        x, start = (t.mT.contiguous().mT for t in (x, start))
    names = [name for name in ("weight", "bias") if name != frozen]
    gradients = dict(
        zip(
            names,
            torch.autograd.grad(layer(x), [layer.get_parameter(n) for n in names], start),
            strict=True,
        )
    )
    rows = helper.output_rows(start)
    batch = leading[0] if leading else 1
    assert rows.shape[:2] == (1, batch)
    product = torch.einsum("gnto,gnti->goi", rows, helper.block_rows((x,), rows))
    columns = [gradients[name].reshape(features[1], -1) for name in names]
    compare(product[0], torch.cat(columns, 1), "the gradient, from rows")
    packed = helper.to_matrix(gradients.get("weight"), gradients.get("bias"))
    assert torch.equal(packed[0], torch.cat(columns, 1))
    for name, part in zip(("weight", "bias"), helper.from_matrix(packed), strict=True):
        assert (part is None) == (name == frozen)
        assert part is None or torch.equal(part, gradients[name])


@pytest.mark.parametrize("few", [0, 10**6], ids=["in place", "copied"])
@pytest.mark.parametrize("frozen", ["", "weight", "bias"])
def test_the_moment_of_inputs_is_that_of_the_rows_of_the_block(
    few: int, frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few inputs are copied beside ones for the bias; of many only the sum gets a border."""
    monkeypatch.setattr(base, "FEW", few)
    if not few:
        monkeypatch.setattr(base, "with_ones", lambda *args, **kwargs: pytest.fail("a copy"))
    layer, x = fill(nn.Linear(3, 2)), randn(4, 5, 3)
    helper = LinearHelper(layer, **({frozen: False} if frozen else {}))
    rows = helper.output_rows(randn(4, 5, 2))
    total = helper.input_moment((x,), rows, scale=0.5)
    total = helper.input_moment((x,), rows, total, scale=2.0)
    expected = 2.5 * base.moment(helper.block_rows((x,), rows))
    compare(total.tril(), expected.tril(), "moment")


def test_the_batch_is_the_first_dimension() -> None:
    layer = fill(nn.Linear(2, 3))
    helper = LinearHelper(layer)
    x = randn(2, 4, 5, 2)
    rows = helper.input_rows(x)
    assert rows.shape == (1, 2, 20, 2)
    assert torch.equal(rows[0, 1, 7], x[1, 1, 2])


@pytest.mark.parametrize("shape", [(0, 2), (0, 4, 2)])
def test_no_samples_are_no_rows(shape: tuple[int, ...]) -> None:
    helper = LinearHelper(fill(nn.Linear(2, 3)))
    assert helper.input_rows(torch.zeros(shape)).numel() == 0


def test_keyword_arguments_come_in_the_order_of_forward() -> None:
    helper = LinearHelper(fill(nn.Linear(2, 3)))
    x = randn(4, 2)
    assert helper.inputs((), {"input": x})[0] is x


class Renamed(nn.Module):
    """A linear layer whose weight and bias have other names."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.offset = nn.Parameter(randn(2, 3)), nn.Parameter(randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.kernel, self.offset)


class RenamedHelper(LinearHelper):
    def __init__(self, module: nn.Module, weight: bool, bias: bool) -> None:
        super().__init__(module, weight=weight, bias=bias, keys=("kernel", "offset"))

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        return None

    @classmethod
    def names(cls, module: nn.Module) -> tuple[str, ...]:
        return "kernel", "offset"

    @classmethod
    def of(
        cls, module: nn.Module, trained: Collection[str], *, joint: bool = True
    ) -> list[LayerHelper]:
        weight, bias = "kernel" in trained, joint and "offset" in trained
        return [cls(module, weight, bias)] if weight or bias else []


def test_parameters_of_other_names_may_be_frozen() -> None:
    check_layer_helper(Renamed(), randn(6, 3), helper=RenamedHelper)


class TupleHelper(RenamedHelper):
    """Its shape is a plain tuple."""

    @property
    def shape(self) -> Any:
        return tuple(super().shape)


@pytest.mark.parametrize("method", ["kfac", "eva"])
def test_a_shape_may_be_a_plain_tuple(method: str) -> None:
    check_layer_helper(Renamed(), randn(6, 3), helper=TupleHelper)
    found = []
    for helper in (RenamedHelper, TupleHelper):
        model = nn.Sequential(Renamed())
        own = kit.precondition(model, method, layers={"0": helper})
        kit.train(model, lambda m, _: m(randn(6, 3)).square().mean(), range(2), own)
        found.append(kit.gradients(model))
    for gradient, expected in zip(*found, strict=True):
        assert torch.equal(gradient, expected)


def test_rows_that_do_not_belong_together_name_both() -> None:
    helper = LinearHelper(fill(nn.Linear(2, 3)))
    with pytest.raises(ValueError, match=r"\(1, 4, 1\).*\(1, 5, 1\)"):
        helper.block_rows((randn(4, 2),), helper.output_rows(randn(5, 3)))
    with pytest.raises(ValueError, match=r"\(1, 4, 1, 5\), and a row of the weight has 2:"):
        helper.block_rows((randn(4, 5),), helper.output_rows(randn(4, 3)))


@pytest.mark.parametrize(("few", "gpu"), [(True, False), (False, False), (False, True)])
def test_moments_of_rows_of_half_precision_are_of_single(
    few: bool, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum for the bias as well, which half precision would have three digits of."""
    monkeypatch.setattr(base, "FEW", 2**30 if few else 0)
    monkeypatch.setattr(devices, "on_gpu", lambda _: gpu)
    helper = LinearHelper(nn.Linear(5, 3))
    x, g = (torch.randn(400, n, generator=torch.Generator().manual_seed(n)) for n in (5, 3))
    x, g = (x + 1).bfloat16(), g.bfloat16()
    rows = helper.output_rows(g)
    own = helper.input_moment((x,), rows)
    wide = torch.cat([x.double(), torch.ones(400, 1, dtype=torch.float64)], 1)
    assert own.dtype == helper.output_moment(rows).dtype == torch.float32
    compare(own[0].double().tril(), (wide.T @ wide).tril(), "A", rtol=1e-6)
    compare(helper.output_moment(rows)[0].double(), g.double().T @ g.double(), "G", rtol=1e-6)
