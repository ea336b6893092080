"""Layouts: how parameters become the gradient matrix of a block, and back.

A `LayerHelper` is a layout that also knows rows. A method that reads gradients alone needs a layout
and nothing else, and the plain one fits any parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple, Protocol

from torch import Tensor, nn


class BlockShape(NamedTuple):
    """The shape of a block's gradient matrix, bias column included."""

    groups: int
    out_features: int
    in_features: int


class Layout(Protocol):
    """How the parameters of a block become the matrix ``[groups, out, in]``."""

    @property
    def module(self) -> nn.Module:
        """The module whose parameters they are."""

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters, by their names in the module (dotted for those of a submodule)."""

    @property
    def shape(self) -> BlockShape:
        """The shape of the matrix."""

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """Return tensors of the parameters' shapes, by name, as the matrix."""

    def unpack(self, matrix: Tensor) -> Mapping[str, Tensor]:
        """Undo `pack`."""


class PlainLayout:
    """The layout of one parameter, of any shape: ``[1, shape[0], the rest]``.

    A scalar is ``[1, 1, 1]``, a vector ``[1, n, 1]``, and the weight of a convolution has a row for
    each output channel.

    Args:
        module: The module.
        name: The parameter's name in it.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        parameter = module._parameters[name]
        assert parameter is not None
        self.module, self._name, self._parameter = module, name, parameter
        rows = parameter.shape[0] if parameter.dim() > 0 else 1
        self.shape = BlockShape(1, rows, prod(parameter.shape[1:]))

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return {self._name: self._parameter}

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors[self._name].reshape(tuple(self.shape))

    def unpack(self, matrix: Tensor) -> Mapping[str, Tensor]:
        return {self._name: matrix.reshape(self._parameter.shape)}


class GroupedLayout(PlainLayout):
    """The layout of one parameter whose first dimension counts matrices that are side by side.

    ``[groups, out, in]`` is itself, and vectors ``[groups, n]`` are ``[groups, n, 1]``.

    Args:
        module: The module.
        name: The parameter's name in it; it has two dimensions or more.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module, name)
        groups, out, *others = self._parameter.shape
        self.shape = BlockShape(groups, out, prod(others))


class CutLayout:
    """A layout whose matrices are cut along the outputs into parts of one size, side by side.

    Packed projections are such matrices: of queries, keys and values in thirds, or each of their
    heads by itself. A method then has them as ``[parts, out / parts, in]``.

    Args:
        layout: The layout that is cut.
        parts: Into how many parts, those of all its groups together.

    Raises:
        ValueError: If the outputs do not divide into so many.
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
    """Return the parameter that a module has now; ``"out_proj.weight"`` is a submodule's."""
    if "." not in name:
        return module._parameters.get(name)
    path, _, last = name.rpartition(".")
    return module.get_submodule(path)._parameters.get(last)
