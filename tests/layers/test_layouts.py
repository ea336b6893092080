"""Layouts and sums by hand: shapes of blocks, what is packed where, and sums that go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from soframe.layers import base
from soframe.layers.attention import AttentionHelper
from soframe.layers.base import LayerHelper, moment, widened
from soframe.layers.conv import Conv2dHelper
from soframe.layers.embedding import EmbeddingBagHelper, EmbeddingHelper
from soframe.layers.layout import (
    BlockShape,
    CutLayout,
    GroupedLayout,
    PlainLayout,
    WeightAndBias,
    parameter_of,
    plain_layout,
    positions_of,
)
from soframe.layers.linear import LinearHelper
from soframe.layers.recurrent import RecurrentCellHelper
from soframe.testing import compare
from tests.curvature import fill, randn


def module_with(**shapes: tuple[int, ...]) -> nn.Module:
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.randn(shape)))
    return module


class HomeMade(nn.Module):
    """A convolution that is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel_size = (2, 2)
        self.weight = nn.Parameter(torch.randn(4, 3, 2, 2))


SHAPES: dict[str, tuple[nn.Module, str, tuple[int, int, int]]] = {
    "scalar": (module_with(p=()), "p", (1, 1, 1)),
    "vector": (module_with(p=(5,)), "p", (1, 5, 1)),
    "matrix": (module_with(p=(5, 3)), "p", (1, 5, 3)),
    "stack": (module_with(p=(2, 5, 3)), "p", (2, 5, 3)),
    "stack of stacks": (module_with(p=(2, 4, 5, 3)), "p", (8, 5, 3)),
    "one matrix": (module_with(p=(1, 5, 3)), "p", (1, 1, 15)),
    "stack of rows": (module_with(p=(4, 1, 3)), "p", (1, 4, 3)),
    "stack of columns": (module_with(p=(4, 3, 1)), "p", (1, 4, 3)),
    "biases of a stack": (module_with(w=(2, 5, 3), b=(2, 5)), "b", (2, 5, 1)),
    "numbered biases": (module_with(w=(2, 5, 3), b1=(2, 5)), "b1", (2, 5, 1)),
    "named biases": (module_with(w=(2, 5, 3), up_bias=(2, 5)), "up_bias", (2, 5, 1)),
    "another name": (module_with(w=(2, 5, 3), scale=(2, 5)), "scale", (1, 2, 5)),
    "biases of another stack": (module_with(w=(3, 5, 3), b=(2, 5)), "b", (1, 2, 5)),
    "biases of matrices": (module_with(w=(2, 5), b=(2, 5)), "b", (1, 2, 5)),
    "convolution": (nn.Conv2d(6, 4, 3), "weight", (1, 4, 54)),
    "its bias": (nn.Conv2d(6, 4, 3, groups=2), "bias", (1, 4, 1)),
    "grouped convolution": (nn.Conv2d(6, 4, 3, groups=2), "weight", (2, 2, 27)),
    "home-made convolution": (HomeMade(), "weight", (1, 4, 12)),
}


@pytest.mark.parametrize("name", SHAPES)
def test_a_parameter_has_the_matrix_of_its_shape(name: str) -> None:
    module, parameter, shape = SHAPES[name]
    layout = plain_layout(module, parameter)
    assert layout.shape == BlockShape(*shape)
    tensor = torch.randn_like(module._parameters[parameter])  # type: ignore[arg-type]
    matrix = layout.pack({parameter: tensor})
    assert matrix.shape == shape
    unpacked = layout.unpack(matrix)
    assert unpacked.keys() == {parameter}
    assert torch.equal(unpacked[parameter], tensor)
    assert list(layout.parameters) == [parameter]


def test_complex_numbers_are_pairs() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(2, 3, dtype=torch.complex64))
    layout = plain_layout(module, "weight")
    assert layout.shape == BlockShape(1, 12, 1)
    tensor = torch.randn(2, 3, dtype=torch.complex64)
    matrix = layout.pack({"weight": tensor})
    assert torch.equal(matrix.flatten(), torch.view_as_real(tensor).flatten())
    assert torch.equal(layout.unpack(matrix.double())["weight"], tensor)


def test_a_stack_behind_a_parametrisation_is_one_matrix() -> None:
    module = module_with(weight=(2, 5, 3))
    parametrize.register_parametrization(module, "weight", nn.Tanh(), unsafe=True)
    behind = module.parametrizations.weight  # type: ignore[union-attr,index]
    assert plain_layout(behind, "original").shape == BlockShape(1, 2, 15)  # type: ignore[arg-type]


def test_biases_of_a_stack_are_grouped_beside_a_scalar() -> None:
    module = module_with(scale=(), w=(2, 3, 4), bias=(2, 3))
    assert plain_layout(module, "bias").shape == BlockShape(2, 3, 1)
    assert plain_layout(module, "scale").shape == BlockShape(1, 1, 1)


@pytest.mark.parametrize(
    ("module", "positions"),
    [
        (nn.Conv2d(6, 4, (2, 3)), 6),
        (nn.Conv1d(6, 4, 5, groups=2), 5),
        (nn.Conv3d(2, 4, 2), 8),
        (nn.Conv2d(1, 4, 3), 1),
        (nn.Conv2d(4, 4, 3, groups=4), 1),
        (nn.Conv2d(6, 4, 1), 1),
        (nn.Linear(12, 4), 1),
        (nn.ConvTranspose2d(6, 4, 3), 1),
    ],
    ids=str,
)
def test_positions_are_those_of_a_kernel(module: nn.Module, positions: int) -> None:
    assert positions_of(module, plain_layout(module, "weight")) == positions
    assert positions_of(module, PlainLayout(module, "bias")) == 1


def test_outputs_are_cut_into_equal_parts() -> None:
    layout = CutLayout(PlainLayout(module_with(w=(6, 4)), "w"), 3)
    assert layout.shape == BlockShape(3, 2, 4)
    tensor = torch.randn(6, 4)
    matrix = layout.pack({"w": tensor})
    assert torch.equal(matrix, tensor.view(3, 2, 4))
    assert torch.equal(layout.unpack(matrix)["w"], tensor)
    stacked = GroupedLayout(module_with(w=(2, 6, 4)), "w")
    assert CutLayout(stacked, 4).shape == BlockShape(4, 3, 4)
    for parts, words in ((3, "2 groups of 6 outputs"), (8, "2 groups of 6 outputs")):
        with pytest.raises(ValueError, match=f"{words} do not divide into {parts} equal parts"):
            CutLayout(stacked, parts)
    with pytest.raises(ValueError, match=r"^6 outputs do not divide into 4 equal parts"):
        CutLayout(PlainLayout(module_with(w=(6, 4)), "w"), 4)


@pytest.mark.parametrize(("weight", "bias"), [(True, True), (True, False), (False, True)])
def test_a_bias_is_the_last_column(weight: bool, bias: bool) -> None:
    layer = nn.Linear(3, 4)
    layout = WeightAndBias(layer, weight=weight, bias=bias)
    assert layout.shape == BlockShape(1, 4, 3 * weight + bias)
    assert layout.multiplies == weight
    assert layout._row_entries == 3 * weight
    parts = {"weight": torch.randn(4, 3), "bias": torch.randn(4)}
    parts = {name: tensor for name, tensor in parts.items() if name in layout.parameters}
    matrix = layout.pack(parts)
    columns = [tensor.view(4, -1) for tensor in parts.values()]  # the weight first
    assert torch.equal(matrix, torch.cat(columns, 1)[None])
    unpacked = layout.unpack(matrix)
    assert unpacked.keys() == parts.keys()
    assert all(torch.equal(unpacked[name], tensor) for name, tensor in parts.items())


@pytest.mark.parametrize("joint", [None, True, False])
def test_a_bias_joins_its_weight_unless_it_is_a_block_of_its_own(joint: bool | None) -> None:
    both, settings = ("weight", "bias"), {} if joint is None else {"joint": joint}
    layer, attention = nn.Linear(2, 3), nn.MultiheadAttention(4, 2)
    (helper,) = LinearHelper.of(layer, both, **settings)
    assert tuple(helper.parameters) == (both if joint is not False else both[:1])
    assert LinearHelper.of(layer, (), **settings) == []
    (alone,) = LinearHelper.of(layer, ("bias",))
    assert tuple(alone.parameters) == ("bias",)
    names = AttentionHelper.names(attention)
    inner, outer = AttentionHelper.of(attention, names, **settings)
    sizes = [len(inner.parameters), len(outer.parameters)]
    cell = nn.LSTMCell(2, 3)
    sizes += [
        len(helper.parameters)
        for helper in RecurrentCellHelper.of(cell, RecurrentCellHelper.names(cell), **settings)
    ]
    assert sizes == [1 if joint is False else 2] * 4


def test_parameters_are_found_by_their_path() -> None:
    model = nn.Sequential(nn.Linear(2, 3, bias=False))
    assert parameter_of(model, "0.weight") is model[0].weight
    assert parameter_of(model[0], "weight") is model[0].weight
    assert parameter_of(model[0], "bias") is None
    assert parameter_of(model[0], "other") is None


# -- calls without a batch -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "shared", "size", "lacks"),
    [
        (1, 5, 3, True),
        (1, 5, 1, False),  # the model's batch is one sample
        (1, 5, 5, False),  # its positions may be the samples
        (1, 1, 3, False),  # the one row that a router sends
        (2, 5, 3, False),
    ],
)
def test_one_sample_of_several_positions_lacks_the_batch(
    batch: int, shared: int, size: int, lacks: bool
) -> None:
    helper = LinearHelper(nn.Linear(2, 2))
    assert helper.lacks_batch(batch, shared, size) == lacks
    assert not EmbeddingBagHelper(nn.EmbeddingBag(3, 2)).lacks_batch(batch, shared, size)


@pytest.mark.parametrize(
    ("batch", "shared", "size", "lacks"),
    [
        (6, 1, 3, True),  # [T], which all samples share
        (6, 1, 6, False),
        (6, 1, 1, False),
        (1, 6, 3, True),  # [1, T]
        (5, 5, 3, True),  # [T, T] of distances
        (5, 5, 5, False),
        (4, 2, 3, True),  # no multiple of the batch
        (6, 2, 3, False),  # several calls of one
        (6, 3, 3, False),
    ],
)
def test_indices_that_all_samples_share_lack_the_batch(
    batch: int, shared: int, size: int, lacks: bool
) -> None:
    helper = EmbeddingHelper(nn.Embedding(7, 2))
    assert helper.lacks_batch(batch, shared, size) == lacks


# -- sums ------------------------------------------------------------------------------------------


class Plain(LinearHelper):
    """Has rows alone: the moments are those of the base class."""

    input_moment = LayerHelper.input_moment


def helpers() -> dict[str, tuple[LayerHelper, tuple[Tensor, ...], Tensor]]:
    """Return helpers, the tensors of a call, and its output's gradient."""
    x = randn(3, 5, 4)
    linear = fill(nn.Sequential(nn.Linear(4, 2)))[0]
    conv = fill(nn.Sequential(nn.Conv2d(4, 6, 2, groups=2)))[0]
    table = nn.Embedding(7, 2, padding_idx=1).double()
    indices = torch.tensor([[0, 1, 3], [3, 3, 6]])
    bags = EmbeddingBagHelper(nn.EmbeddingBag(7, 2, mode="mean").double())
    g = randn(3, 5, 2, seed=1)
    images, of_images = randn(3, 4, 3, 3), randn(3, 6, 2, 2, seed=1)
    return {
        "linear": (LinearHelper(linear), (x,), g),
        "plain": (Plain(linear), (x,), g),
        "without bias": (Plain(linear, bias=False), (x,), g),
        "bias alone": (Plain(linear, weight=False), (x,), g),
        "convolution": (Conv2dHelper(conv), (images,), of_images),
        "convolution, bias alone": (Conv2dHelper(conv, weight=False), (images,), of_images),
        "embedding": (EmbeddingHelper(table), (indices,), randn(2, 3, 2, seed=1)),
        "bags": (bags, bags.inputs((indices,), {}), randn(2, 2, seed=1)),
    }


@pytest.mark.parametrize("few", [0, base.FEW])
@pytest.mark.parametrize("name", helpers())
def test_sums_go_on_from_a_total(name: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows and of means over positions; many rows are summed apart from the ones of a bias."""
    monkeypatch.setattr(base, "FEW", few)
    helper, inputs, gradient = helpers()[name]
    rows = helper.output_rows(gradient)
    is_diagonal = helper.counts_inputs

    def lower(matrix: Tensor) -> Tensor:
        return matrix if is_diagonal else matrix.tril()

    for kind, plain_rows in (
        ("input_moment", helper.block_rows(inputs, rows)),
        ("mean_moment", helper.mean_rows(inputs, rows)),
    ):
        plain = moment(plain_rows.double())
        if is_diagonal:
            plain = plain.diagonal(dim1=-2, dim2=-1)
        add: Any = getattr(helper, kind)
        compare(lower(add(inputs, rows)), lower(plain), kind)
        compare(lower(add(inputs, rows, None, 0.5)), lower(0.5 * plain), f"half of {kind}")
        total = torch.ones_like(plain)
        found = add(inputs, rows, total, 0.5)
        assert found.untyped_storage().data_ptr() == total.untyped_storage().data_ptr()
        compare(lower(found), lower(1 + 0.5 * plain), f"{kind}, added")
    plain = moment(rows)
    compare(helper.output_moment(rows).tril(), plain.tril(), "output_moment")
    total = torch.ones_like(plain)
    assert helper.output_moment(rows, total, 0.5) is total
    compare(total.tril(), (1 + 0.5 * plain).tril(), "output_moment, added")
    sums = helper.block_rows(inputs, rows).double().sum((1, 2))
    if not is_diagonal:
        compare(helper.input_sum(inputs, rows), sums, "input_sum")
    squares, (left, right) = (
        LayerHelper.squared_gradients(helper, inputs, rows),
        helper.sample_moments(inputs, rows),
    )
    compare(helper.squared_gradients(inputs, rows), squares, "squared_gradients")
    # Both traces are the sum of the squares of all samples' gradients.
    traces = [left.diagonal(dim1=-2, dim2=-1).sum(), squares.sum()]
    traces.append(right.sum() if is_diagonal else right.diagonal(dim1=-2, dim2=-1).sum())
    assert [float(trace) for trace in traces] == pytest.approx([float(squares.sum())] * 3)


def test_rows_and_samples_are_taken_by_their_index() -> None:
    helper, rows = LinearHelper(nn.Linear(4, 2)), randn(2, 3, 5, 4)
    index = torch.tensor([2, 0])
    assert torch.equal(helper.take_rows(rows, index, "sample"), rows[:, [2, 0]])
    places = torch.tensor([0, 7, 14])  # numbered sample by sample
    expected = torch.stack([rows[:, 0, 0], rows[:, 1, 2], rows[:, 2, 4]], 1)[:, :, None]
    assert torch.equal(helper.take_rows(rows, places, "row"), expected)


@pytest.mark.parametrize("groups", [1, 2])
def test_the_moment_of_rows(groups: int) -> None:
    rows = randn(groups, 3, 4, 5)
    assert torch.allclose(moment(rows), torch.einsum("gbsi,gbsj->gij", rows, rows))


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
    ],
)
def test_half_precision_is_summed_in_single(dtype: torch.dtype, wide: torch.dtype) -> None:
    assert widened(torch.ones(1, dtype=dtype)).dtype == wide


class Masking(LinearHelper):
    """Only some rows reach the parameters."""

    def mask(self, inputs: tuple[Tensor, ...], output_rows: Tensor) -> Tensor | None:
        return inputs[0][..., 0].unsqueeze(0) > 0


def test_rows_that_reach_a_group_are_counted() -> None:
    x = torch.tensor([[[1.0], [-1.0]], [[1.0], [1.0]], [[-1.0], [-1.0]]])
    rows = torch.ones(1, 3, 2, 2)
    counts = Masking(nn.Linear(1, 2)).group_rows((x,), rows)
    assert counts is not None
    assert counts.tolist() == [3]
    assert LinearHelper(nn.Linear(1, 2)).group_rows((x,), rows) is None
