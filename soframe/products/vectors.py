"""Vectors over the parameters of a model: tensors by name, or gradient matrices by block.

A vector is a dict, as from ``named_parameters``: the name of each parameter that has a block and is
trained, and a tensor ``[..., *shape]``. Leading dimensions are several vectors, the same for all
names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from soframe.blocks import sharding
from soframe.blocks.block import Block
from soframe.blocks.report import FROZEN, Report

Vector = Mapping[str, Tensor]
Matrices = Mapping[Block, Tensor]
"""The gradient matrices ``[..., groups, out, in]`` of a vector, by block."""


class Coordinates:
    """The names and shapes of the parameters of a curvature, in the order of the model.

    Blocks that are not among the ``trained`` ones have names, and no part in vectors.
    """

    def __init__(
        self, model: nn.Module, blocks: Sequence[Block], trained: Sequence[Block], report: Report
    ) -> None:
        name_of = {parameter: name for name, parameter in model.named_parameters()}
        self.names: dict[Block, dict[str, str]] = {}  # by the names in the block
        # Why the other parameters have no part in vectors.
        self.left_out = {row.parameter: row.reason for row in report if row.block is None}
        for block in blocks:
            self.names[block] = {key: name_of[p] for key, p in block.parameters.items()}
            self.left_out.update(dict.fromkeys(self.names[block].values(), FROZEN))
        self._trained = trained
        covered: set[nn.Parameter] = set()
        for block in trained:
            covered.update(block.parameters.values())
            for name in self.names[block].values():
                del self.left_out[name]
        self.shapes = {name: p.shape for p, name in name_of.items() if p in covered}

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """Return the parameters of a model that vectors have, by name, in its order."""
        return {name: p for name, p in model.named_parameters() if name in self.shapes}

    @property
    def size(self) -> int:
        """The number of entries of a vector."""
        return sum(self._sizes)

    @property
    def _sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes.values()]

    @property
    def lost(self) -> dict[str, str]:
        """The parameters of `left_out` that are neither frozen nor skipped by the user."""
        lost: dict[str, str] = {}
        for name, reason in self.left_out.items():
            if reason != FROZEN and "skipped by " not in reason:
                lost[name] = reason
        return lost

    def leading(self, vector: Vector) -> torch.Size:
        """Return the leading dimensions of a vector; raise if names or shapes do not fit."""
        if not isinstance(vector, Mapping):
            raise TypeError(f"a vector is a dict of tensors by name, not a {type(vector).__name__}")
        if (problem := self._misnamed(vector)) is not None:
            raise ValueError(problem)
        leading = torch.Size()
        for number, (name, shape) in enumerate(self.shapes.items()):
            if (what := _unlike_entries(vector[name])) is not None:
                raise TypeError(f"{name}: a vector has dense tensors of real floats, not {what}")
            actual = vector[name].shape
            common, leading = leading, actual[: max(0, len(actual) - len(shape))]
            if actual != leading + shape:
                raise ValueError(
                    f"{name} has the shape {list(shape)}, and the vector {list(actual)}: pass "
                    f"[..., *shape]"
                )
            if number > 0 and leading != common:
                raise ValueError(
                    f"{name} has the leading dimensions {list(leading)}, and the names before it "
                    f"{list(common)}: pass the same for all"
                )
        return leading

    def _misnamed(self, vector: Vector) -> str | None:
        """Return a problem with the names of a vector, or None."""
        unknown: list[str] = []
        for name in vector:
            if name not in self.shapes:
                unknown.append(f"{name} ({self.left_out.get(name, 'no parameter')})")
        if unknown:
            return (
                f"the curvature has no block for {', '.join(unknown)}: leave these names out of "
                f"the vector, or give them a block (layers='all', skip=())"
            )
        if missing := [name for name in self.shapes if name not in vector]:
            return (
                f"the vector lacks {', '.join(missing)}: it has a tensor for each parameter that "
                f"has a block; pass zeros where it is zero"
            )
        return None

    def matrices(self, vector: Vector) -> dict[Block, Tensor]:
        """Return the gradient matrices of a vector, see `leading`, in the dtype of their blocks."""
        leading = self.leading(vector)
        matrices = {}
        for block in self._trained:
            if 0 in leading:  # from no entries a layout could infer no sizes
                shape = leading + block.shape
                matrices[block] = torch.empty(shape, dtype=block.dtype, device=block.device)
                continue
            names = self.names[block]
            tensors: dict[str, Tensor] = {}
            for key, name in names.items():
                tensor = sharding.whole(vector[name]).detach()
                tensors[key] = tensor.reshape(-1, *self.shapes[name])  # [vectors, *shape]
            packed: Tensor = torch.vmap(block.layout.pack)(tensors)
            matrix = packed.to(device=block.device, dtype=block.dtype)
            matrices[block] = matrix.reshape(leading + block.shape)
        return matrices

    def vector(self, matrices: Matrices, like: Vector | None = None) -> dict[str, Tensor]:
        """Undo `matrices`, in the dtypes and on the devices of another vector, if one is passed."""
        tensors: dict[str, Tensor] = {}
        for block, matrix in matrices.items():
            leading = matrix.shape[:-3]
            unpacked: Mapping[str, Tensor] = torch.vmap(block.layout.unpack)(
                matrix.reshape(-1, *block.shape)
            )
            for key, tensor in unpacked.items():
                name = self.names[block][key]
                tensors[name] = tensor.reshape(leading + self.shapes[name])
                if like is not None:
                    # A DTensor is multiplied whole, and its product is a plain tensor.
                    of = like[name]
                    tensors[name] = tensors[name].to(device=of.device, dtype=of.dtype)
        return {name: tensors[name] for name in self.shapes}

    def flat(self, vector: Vector) -> Tensor:
        """Concatenate the entries of vectors ``[..., *shape]``: ``[..., size]``."""
        leading = self.leading(vector)
        rows = [vector[name].reshape(*leading, s.numel()) for name, s in self.shapes.items()]
        return torch.cat(rows, -1)

    def unflat(self, entries: Tensor) -> dict[str, Tensor]:
        """Undo `flat`."""
        vector: dict[str, Tensor] = {}
        parts = entries.split(self._sizes, -1)
        for (name, shape), part in zip(self.shapes.items(), parts, strict=True):
            vector[name] = part.reshape(part.shape[:-1] + shape)
        return vector


def _unlike_entries(values: Any) -> str | None:
    """Return what values are, unless they can be entries of a vector."""
    if not torch.is_tensor(values):
        return type(values).__name__
    if not values.is_floating_point():
        return str(values.dtype)
    if values.layout != torch.strided:
        return str(values.layout)
    if values.is_meta:
        return "meta"
    return None


def total(tensors: Sequence[Tensor]) -> Tensor:
    """Sum tensors of blocks, whose dtypes and devices may differ."""
    result = tensors[0]
    for tensor in tensors[1:]:
        result = result + tensor.to(result)
    return result
