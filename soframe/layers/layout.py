"""Layouts: how parameters become the gradient matrix of a block, and back.

A `LayerHelper` is a layout that also provides rows. Methods that read only gradients need just a
layout, and `PlainLayout` fits any parameter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

_BIAS = re.compile(r"b\d*|.*bias.*")
"""Names of two-dimensional parameters that are a vector for each matrix of a stack."""


class BlockShape(NamedTuple):
    """The shape of a block's gradient matrix, bias column included."""

    groups: int
    out_features: int
    in_features: int


class Layout(Protocol):
    """How the parameters of a block become the matrix ``[groups, out, in]``."""

    @property
    def module(self) -> nn.Module:
        """The module that has the parameters."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters, by their names in the module (dotted for a submodule)."""

    @property
    def shape(self) -> BlockShape:
        """The shape of the matrix."""

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Pack tensors of the parameters' shapes, by name, into ``[groups, out, in]``."""

    def unpack(self, matrix: Tensor) -> Mapping[str, Tensor]:
        """Undo `pack`."""


class WeightAndBias:
    """The layout of a module's weight and bias, its last column; see `LayerHelper`."""

    transposed: ClassVar[bool] = False

    def __init__(
        self,
        module: nn.Module,
        *,
        weight: bool = True,
        bias: bool = True,
        keys: tuple[str, str] = ("weight", "bias"),
    ) -> None:
        self.module = module
        self._keys = keys
        self._full_weight, self.bias = map(module._parameters.get, keys)
        self.weight = self._full_weight
        if not weight:
            self.weight = None
        if not bias:
            self.bias = None

    @cached_property
    def multiplies(self) -> bool:
        """Whether a parameter of the block multiplies the inputs; False for a bias only."""
        return self.weight is not None or any(name != self._keys[1] for name in self.parameters)

    @cached_property
    def groups(self) -> int:
        """The number of equal parts of the outputs, for the default `shape` and packing."""
        return 1

    @cached_property
    def shape(self) -> BlockShape:
        """The shape of the block's gradient matrix."""
        no_weight = f"{type(self).__name__}: pass the weight's name to keys=, or override shape"
        assert self._full_weight is not None, no_weight
        rows = self._full_weight.shape[0]
        return self._shape(self.groups, rows // self.groups, self._full_weight.numel() // rows)

    def _shape(self, groups: int, out: int, into: int) -> BlockShape:
        """Return the shape of a block, with the columns of the weight and the bias that it has."""
        columns = int(self.bias is not None)
        if self.weight is not None:
            columns += into
        return BlockShape(groups, out, columns)

    @cached_property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters of the block, by their name in the module."""
        named = zip(self._keys, (self.weight, self.bias), strict=True)
        return {name: p for name, p in named if p is not None}

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Pack tensors by the names of `parameters` into ``[groups, out, in]``, as `to_matrix`."""
        weight, bias = map(tensors.get, self._keys)
        return self.to_matrix(weight, bias)

    def unpack(self, matrix: Tensor) -> Mapping[str, Tensor]:
        """Undo `pack`: return views of the matrix in the shapes of the parameters, by name."""
        named = zip(self._keys, self.from_matrix(matrix), strict=True)
        return {name: tensor for name, tensor in named if tensor is not None}

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Pack tensors of the shapes of weight and bias into the block's matrix.

        Either is None if it is not part of the block; the matrix ``[groups, out, in]`` is a view of
        ``weight`` if the block has no bias.
        """
        columns = []
        if weight is not None:
            columns.append(weight.reshape(self.groups, weight.shape[0] // self.groups, -1))
        if bias is not None:
            columns.append(bias.reshape(self.groups, -1, 1))
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=2)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """Undo `to_matrix`: return views in the shapes of weight and bias, or None for either."""
        weight, bias = None, None
        if self.bias is not None:
            bias, matrix = matrix[:, :, -1].reshape(self.bias.shape), matrix[:, :, :-1]
        if self.weight is not None:
            weight = self._weight_of(matrix)
        return weight, bias

    def _weight_of(self, matrix: Tensor) -> Tensor:
        """Return a matrix without bias column, ``[groups, out, in]``, in the weight's shape."""
        assert self.weight is not None
        return matrix.reshape(self.weight.shape)

    @cached_property
    def _row_entries(self) -> int:
        """The entries of a row of the weight."""
        return self.shape[2] - (self.bias is not None)


class PlainLayout:
    """The layout ``[1, shape[0], rest]`` of one parameter; a scalar is ``[1, 1, 1]``.

    A complex parameter is the vector of its real and imaginary parts, ``[1, 2 entries, 1]``.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        parameter = module._parameters[name]
        assert parameter is not None
        self.module, self._name, self._parameter = module, name, parameter
        self.parameters: Mapping[str, nn.Parameter] = {name: parameter}
        rows = parameter.shape[0] if parameter.dim() > 0 else 1
        self.shape = BlockShape(1, rows, prod(parameter.shape[1:]))
        if parameter.is_complex():
            self.shape = BlockShape(1, 2 * parameter.numel(), 1)

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        tensor = tensors[self._name]
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor)
        return tensor.reshape(tuple(self.shape))

    def unpack(self, matrix: Tensor) -> Mapping[str, Tensor]:
        shape = self._parameter.shape
        if self._parameter.is_complex():
            pairs = matrix.to(self._parameter.dtype.to_real()).reshape(*shape, 2)
            return {self._name: torch.complex(*pairs.unbind(-1))}
        return {self._name: matrix.reshape(shape)}


class GroupedLayout(PlainLayout):
    """The layout ``[groups, out, in]`` of a parameter that stacks matrices, or vectors (in = 1)."""

    def __init__(self, module: nn.Module, name: str, *, vectors: bool = False) -> None:
        super().__init__(module, name)
        shape = tuple(self._parameter.shape)
        if vectors:
            shape += (1,)
        *groups, out, into = shape
        self.shape = BlockShape(prod(groups), out, into)


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def plain_layout(module: nn.Module, name: str) -> Layout:
    """Return the layout of one parameter by its own shape, for methods that read gradients alone.

    The last two of three or more dimensions are a matrix, and the first ones groups (experts,
    heads), but for parameters behind a parametrization, and for the kernels of convolutions, whose
    matrix is ``[groups, out, channels * positions]``.
    """
    parameter = module._parameters[name]
    assert parameter is not None
    plain = PlainLayout(module, name)
    if parameter.is_complex():
        return plain
    if _stacks(module, parameter):
        return GroupedLayout(module, name)
    if isinstance(module, _CONVOLUTIONS) and parameter.dim() > 2 and module.groups > 1:
        return CutLayout(plain, module.groups)
    if _stacks_vectors(module, name, parameter):
        return GroupedLayout(module, name, vectors=True)
    return plain


def positions_of(module: nn.Module, layout: Layout) -> int:
    """Return how many neighbouring columns belong to each input channel of a convolution.

    One for other modules, for kernels of one position, and for layers of one channel.
    """
    if not isinstance(module, _CONVOLUTIONS):
        return 1
    channels, positions = module.in_channels // module.groups, prod(module.kernel_size)
    if channels == 1 or layout.shape[2] != channels * positions:
        return 1
    return positions


def _stacks_vectors(module: nn.Module, name: str, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a bias for each of a stack of matrices."""
    if parameter.dim() != 2 or _BIAS.fullmatch(name) is None:
        return False
    for stack in module.parameters(recurse=False):
        if _stacks(module, stack) and len(stack) == len(parameter):
            return True
    return False


def _stacks(module: nn.Module, parameter: nn.Parameter) -> bool:
    """Return whether a parameter is a stack of matrices."""
    if parameter.dim() < 3 or isinstance(module, ParametrizationList):
        return False
    if any(hasattr(module, setting) for setting in ("kernel_size", "stride", "padding")):
        return False  # a convolution, of torch or home-made
    # One group is a table for all samples, such as positions [1, T, features].
    return parameter.shape[:-2].numel() > 1 and min(parameter.shape[-2:]) > 1


class CutLayout:
    """A layout split along the outputs into equal parts, ``[parts, groups * out / parts, in]``.

    For fused weights such as Q, K and V, or their heads; ``parts`` counts all groups. Raises a
    ValueError if the outputs are not divisible.
    """

    def __init__(self, layout: Layout, parts: int) -> None:
        groups, out, into = layout.shape
        if parts % groups or out % (parts // groups):
            rows = f"{groups} groups of {out}" if groups > 1 else str(out)
            raise ValueError(f"{rows} outputs do not divide into {parts} equal parts")
        self._layout = layout
        self.shape = BlockShape(parts, groups * out // parts, into)

    @property
    def module(self) -> nn.Module:
        return self._layout.module

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return self._layout.parameters

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return self._layout.pack(tensors).reshape(tuple(self.shape))

    def unpack(self, matrix: Tensor) -> Mapping[str, Tensor]:
        return self._layout.unpack(matrix.reshape(tuple(self._layout.shape)))


def parameter_of(module: nn.Module, name: str) -> nn.Parameter | None:
    """Return the current parameter of a module, or of a submodule (``"out_proj.weight"``)."""
    path, _, last = name.rpartition(".")
    # TorchScript has neither get_submodule() nor get().
    if path:
        module = module.get_submodule(path)
    if last not in module._parameters:
        return None
    return module._parameters[last]
