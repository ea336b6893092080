"""Layouts: how parameters become the gradient matrix of a block, and back.

A `LayerHelper` is a layout that also provides rows. Methods that read only gradients need just a
layout, and `PlainLayout` fits any parameter.
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


class PlainLayout:
    """The layout ``[1, shape[0], rest]`` of one parameter; a scalar is ``[1, 1, 1]``."""

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
    """The layout ``[groups, out, in]`` of a parameter that stacks matrices, or vectors (in = 1)."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module, name)
        groups, out, *others = self._parameter.shape
        self.shape = BlockShape(groups, out, prod(others))


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
    if "." not in name:
        return module._parameters.get(name)
    path, _, last = name.rpartition(".")
    return module.get_submodule(path)._parameters.get(last)
