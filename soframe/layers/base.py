"""The layer helper: how the tensors of one type of module become rows and matrices.

Rows are ``[groups, batch, shared, features]``: ``groups`` are independent sub-layers of one module
(the groups of a convolution; 1 otherwise), ``batch`` the samples, ``shared`` the positions at
which one sample uses the same weights (sequence, space), ``features`` the inputs of a weight row.
A layer's gradient is the matrix ``[groups, out, in]``; the bias, if it is part of the block, is the
last input column, and its input is one.

A helper must implement ``input_rows`` and ``output_rows``; everything else has a default that is
computed from them. ``input_moment`` and ``output_moment`` add to a sum in place and may be
overridden by a faster version, which ``soframe.testing.check_layer_helper`` compares with the plain
one. Helpers never scale: ``soframe/methods/scaling.py`` does.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from soframe.kernels import devices
from soframe.kernels.gram import add_bias, add_moment, add_squares, new_sum, widened, with_ones
from soframe.kernels.samples import sample_moments, squared_gradients
from soframe.layers.layout import BlockShape, WeightAndBias
from soframe.specs import FactorSpec

__all__ = ["FEW", "BlockShape", "InnerCall", "Inputs", "LayerHelper", "Unit", "moment", "widened"]

Unit = Literal["row", "sample"]
"""The parts of a call that can be selected: single rows, or whole samples."""

Inputs = tuple[Tensor, ...]
"""The input tensors of a call."""


@dataclass(frozen=True)
class InnerCall:
    """A product inside a module, found in the autograd graph of the module's output.

    Attributes:
        edge: The graph edge of its output.
        read: Returns its inputs, from the tensors that the graph saved for the backward pass.
        like: Returns tensors with the shapes, dtypes and devices of the inputs, without memory of
            their own: for a checkpointed graph, which saves nothing until it is recomputed.
        arrange: Transforms the gradient of its output into the argument of
            `LayerHelper.output_rows`.
    """

    edge: GradientEdge
    read: Callable[[], Inputs]
    like: Callable[[], Inputs]
    arrange: Callable[[Tensor], Tensor]


FEW = 2**15
"""Up to so many numbers, rows are copied, with ones for the bias; of more it is summed apart."""


_OF_INPUTS = {"input_rows", "block_rows", "input_moment"}


class LayerHelper(WeightAndBias, ABC):
    """The base class of layer helpers: how one module's tensors become rows and matrices.

    Methods with ``inputs`` and ``output_rows`` get the tensors of one call, and the rows of its
    output gradient.

    Args:
        module: The module.
        weight: Whether the weight is part of the block (False if it is frozen).
        bias: Whether the bias is part of the block.
        keys: The names of the weight and of the bias in the module.

    Attributes:
        module: The module.
        weight: The weight, if it is part of the block, else None.
        bias: The bias, if it is part of the block, else None.
        unit: The parts of a call that ``take_inputs`` and ``take_rows`` can select: ``"row"``,
            ``"sample"``, or None, the default, if a call cannot be split.
        routes: Whether its rows may be of any samples, in any order: `Curvature.gradients` finds
            the samples by more backward passes.
        transposed: Whether the weight is stored with its inputs first. The gradient matrix has its
            outputs first in any case; `shape`, `to_matrix` and `from_matrix` do not follow.
        widens: Whether its moments accept rows in half precision, for one group
            (`soframe.kernels.halves.widens`), and `input_moment` reads nothing but the shape and
            the dtype of ``output_rows``. It is read from the class itself and not inherited, since
            a subclass may override the moments.
    """

    unit: ClassVar[Unit | None] = None
    routes: ClassVar[bool] = False
    widens: ClassVar[bool] = False
    _rowless: ClassVar[frozenset[str]] = frozenset({"input_key"})  # methods without `input_rows`

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        defined = vars(cls).keys()
        # What a base class computes without its rows is not true of others.
        if "_rowless" not in defined and _OF_INPUTS & defined:
            for name in cls._rowless - defined:
                setattr(cls, name, getattr(LayerHelper, name))

    # -- required ---------------------------------------------------------------------------

    @abstractmethod
    def input_rows(self, *inputs: Tensor) -> Tensor:
        """Return the rows that the weight multiplies, without the bias column.

        Args:
            *inputs: The input tensors of the call, in the order of ``forward``'s parameters.

        Returns:
            ``[groups, batch, shared, in_features]``, without the bias feature, in the inputs'
            dtype.
        """

    @abstractmethod
    def output_rows(self, grad_output: Tensor) -> Tensor:
        """Return the rows of the gradient of the module's output.

        Args:
            grad_output: The gradient, of the output's shape.

        Returns:
            ``[groups, batch, shared, out_features]``, with rows in the order of ``input_rows``.
        """

    # -- defaults ---------------------------------------------------------------------------

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        """Return the reason why this helper does not support a module, or None if it does.

        Returns:
            The reason, for the registration report.
        """
        if not isinstance(module._parameters.get("weight"), nn.Parameter):
            if not hasattr(module, "weight"):
                return "it has no weight; for other names override unsupported(), names() and of()"
            return "its weight is not a parameter of its own (parametrised or computed)"
        if any(p is not None and p.is_complex() for p in module._parameters.values()):
            return "complex parameters are not supported"
        extra = sorted(set(module._parameters) - {"weight", "bias"})
        if extra:
            return f"it has parameters that {cls.__name__} does not know: {', '.join(extra)}"
        return None

    @classmethod
    def of(
        cls, module: nn.Module, trained: Collection[str], *, joint: bool = True
    ) -> Sequence[LayerHelper]:
        """Return the helpers of a module, one for each block.

        Args:
            module: The module; `unsupported` returned None for it.
            trained: The names of the parameters to put into blocks, dotted for submodules. Blocks
                without any of them are left out.
            joint: Whether a bias joins the block of its weight.

        Returns:
            By default one, for ``weight`` and ``bias``.
        """
        weight, bias = "weight" in trained, "bias" in trained and joint
        if not (weight or bias):
            return []
        return [cls(module, weight=weight, bias=bias)]

    @classmethod
    def names(cls, module: nn.Module) -> tuple[str, ...]:
        """Return the names of the parameters that this helper can put into blocks.

        Returns:
            By default the module's own ``weight`` and ``bias``. Names of a submodule's parameters
            are dotted; the submodule then has no blocks of its own.
        """
        registered = module._parameters
        return tuple(name for name in ("weight", "bias") if registered.get(name) is not None)

    @property
    def part(self) -> str:
        """The suffix that distinguishes this block from others of its module; empty by default."""
        return ""

    def factor(self, spec: FactorSpec) -> FactorSpec:
        """Adapt a factor of the method to this layer.

        Returns:
            By default the same spec. An embedding makes the factor of its inputs diagonal; a layer
            whose groups see different rows averages over group rows.
        """
        return spec

    @cached_property
    def counts_inputs(self) -> bool:
        """Whether the moments of its inputs are diagonals, as with indices; see `factor`."""
        return self.factor(FactorSpec("A", "right", 1, 1)).kind == "diagonal"

    def mask(self, inputs: Inputs, output_rows: Tensor) -> Tensor | None:
        """Return a mask of the rows that reach the parameters of each group.

        Called if `factor` sets ``mean_over="group rows"``. The other rows' gradients are excluded
        from the statistics of a group.

        Returns:
            ``[groups, batch, shared]``, bool; None, the default, if all rows reach all groups.
        """
        del inputs, output_rows
        return None

    def group_rows(self, inputs: Inputs, output_rows: Tensor) -> Tensor | None:
        """Count the rows that reach each group.

        Returns:
            ``[groups]``, by default the counts of `mask`; None if all rows reach all groups.
        """
        mask = self.mask(inputs, output_rows)
        return None if mask is None else mask.sum((1, 2))

    def observe(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Sequence[InnerCall] | None:
        """Find the products inside a module that use the block's parameters.

        Args:
            args: Positional arguments of the module's call.
            kwargs: Its keyword arguments.
            output: Its return value, with the autograd graph.

        Returns:
            The products; None, the default, if the block belongs to the module's own call, whose
            output is one tensor.
        """
        del args, kwargs, output
        return None

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        """Return the input tensors of a call, positional or by keyword.

        Args:
            args: Positional arguments of the call.
            kwargs: Keyword arguments of the call.

        Returns:
            The tensors in the order of ``forward``'s parameters.
        """
        if kwargs:
            args = tuple(self._signature.bind(*args, **kwargs).arguments.values())
        return tuple(value for value in args if isinstance(value, Tensor))

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.module.forward)

    def lacks_batch(self, batch: int, shared: int, size: int) -> bool:
        """Return whether a call has no batch dimension, so that all samples share its rows.

        Args:
            batch: The samples of the call, as `output_rows` gives them.
            shared: Its positions.
            size: The number of samples of the model's batch.

        Returns:
            By default True for ``[1, positions, ...]`` in a batch of several samples. A single row
            without positions may be the only one that a router sends to an expert.
        """
        return batch == 1 < shared and size not in (1, shared)

    def block_rows(self, inputs: Inputs, output_rows: Tensor) -> Tensor:
        """Return the input rows of the block: rows of the weight, with ones appended for the bias.

        Returns:
            ``[groups, batch, shared, in]`` in the dtype of ``output_rows``.

        Raises:
            ValueError: If the shapes of `input_rows` and ``output_rows`` do not match.
        """
        ones = output_rows.new_ones(()).expand(*output_rows.shape[:3], 1)
        if not self.multiplies:
            return ones
        rows = self.weight_rows(inputs, output_rows)
        return rows if self.bias is None else torch.cat([rows, ones], dim=3)

    def weight_rows(self, inputs: Inputs, output_rows: Tensor) -> Tensor:
        """Return the rows of `block_rows` that the weight multiplies; it raises the same errors."""
        rows = self.input_rows(*inputs)
        if rows.dtype != output_rows.dtype:
            rows = rows.to(output_rows.dtype)
        if rows.shape == (*output_rows.shape[:3], self._row_entries):
            return rows
        if rows.shape[:3] != output_rows.shape[:3]:
            raise ValueError(
                f"{type(self).__name__}: input_rows gives [groups, batch, shared] = "
                f"{tuple(rows.shape[:3])} and output_rows {tuple(output_rows.shape[:3])}; "
                f"they must be equal"
            )
        raise ValueError(
            f"{type(self).__name__}: input_rows gives rows {tuple(rows.shape)}, and a row of the "
            f"weight has {self._row_entries}: override shape, to_matrix, from_matrix if it is not "
            f"[out, in]; if its shape changed, put a new nn.Parameter in its place"
        )

    def sample_rows(self, inputs: Inputs, output_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows whose products over positions are the gradients of samples.

        Returns:
            ``[groups, batch, shared, out]`` and ``[groups, batch, shared, in]``, with the sides of
            the gradient matrix; by default ``output_rows`` and `block_rows`. For one-hot rows the
            latter may be their indices, ``[1, batch, shared, 1]``, integers.
        """
        return output_rows, self.block_rows(inputs, output_rows)

    def take_inputs(self, inputs: Inputs, index: Tensor, unit: Unit) -> Inputs:
        """Select samples or rows from the inputs of a call.

        Args:
            inputs: The tensors of the call.
            index: Indices of samples, or of rows numbered sample by sample.
            unit: The unit of ``index``. A helper whose ``unit`` is ``"row"`` must support both.

        Returns:
            The tensors of a smaller call. By default samples are selected from all of them.
        """
        del unit
        return tuple(x[index] for x in inputs)

    def take_rows(self, output_rows: Tensor, index: Tensor, unit: Unit) -> Tensor:
        """Select samples or rows from the output gradients of a call, as `take_inputs`.

        Returns:
            ``[groups, samples, shared, out]``, or ``[groups, rows, 1, out]``.
        """
        if unit == "sample":
            return output_rows[:, index]
        return output_rows.flatten(1, 2)[:, index].unsqueeze(2)

    def mean_rows(self, inputs: Inputs, output_rows: Tensor) -> Tensor:
        """Return the input rows of the block, averaged over the positions of a sample.

        Returns:
            ``[groups, batch, 1, in]`` in the dtype of ``output_rows``.
        """
        ones = output_rows.new_ones(()).expand(*output_rows.shape[:2], 1, 1)
        if not self.multiplies:
            return ones
        means = self._weight_means(inputs, output_rows)
        return means if self.bias is None else torch.cat([means, ones], dim=3)

    def _weight_means(self, inputs: Inputs, output_rows: Tensor) -> Tensor:
        return self.weight_rows(inputs, output_rows).mean(2, keepdim=True)

    def squared_gradients(self, inputs: Inputs, output_rows: Tensor) -> Tensor:
        """Return the sum over samples of their elementwise squared gradients.

        Called if `factor` makes the input factor diagonal, with output rows in any basis; otherwise
        methods use the rows, rotated into a basis.

        Returns:
            ``[groups, out, in]``; by default computed from `block_rows`.
        """
        return squared_gradients(self.block_rows(inputs, output_rows), output_rows)

    def sample_moments(self, inputs: Inputs, output_rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums over samples of ``W W^T`` and ``W^T W``, with the sample's gradient W.

        Returns:
            ``[groups, out, out]`` and ``[groups, in, in]``; the second is its diagonal
            ``[groups, in]`` if `factor` makes factors of the input side diagonal.
        """
        diagonal = (False, self.counts_inputs)
        return sample_moments(self.block_rows(inputs, output_rows), output_rows, diagonal)

    def input_sum(self, inputs: Inputs, output_rows: Tensor) -> Tensor:
        """Return the sum of the input rows of the block over batch and positions.

        Returns:
            ``[groups, in]`` in the dtype of ``output_rows``.
        """
        return self.block_rows(inputs, output_rows).sum((1, 2))

    def row_views(self, inputs: Inputs, output_rows: Tensor) -> Tensor | None:
        """Return views of `weight_rows`, in any shape; None if `input_moment` is of other rows."""
        if type(self).input_moment is not LayerHelper.input_moment or not self.multiplies:
            return None
        return self.weight_rows(inputs, output_rows)

    def input_key(self) -> Hashable | None:
        """Return the settings on which `input_moment` depends, in addition to its tensors.

        Returns:
            A key. The moment of an input tensor is computed once for all layers with equal keys
            (`soframe.layers.sharing`). None, the default, disables this; it is None again in a
            subclass that overrides `input_rows`, `block_rows` or `input_moment` alone, whose other
            moments are computed from rows.
        """
        return None

    # -- fast paths: an override needs a test that compares it with the plain version ---------

    def input_moment(
        self, inputs: Inputs, output_rows: Tensor, total: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        """Return ``total`` plus ``scale`` times the sum of ``a a^T`` over batch and positions.

        Args:
            inputs: The tensors of the call.
            output_rows: The rows of the same call's output gradient, in the factors' dtype.
            total: The sum to add to in place, ``[groups, in, in]``; None for zeros.
            scale: The multiplier.

        Returns:
            ``[groups, in, in]`` in the dtype of ``output_rows``, or in float32 if that is half
            precision. Only the lower triangle is defined. ``[groups, in]``, the diagonal, if
            `factor` makes it one.
        """
        if self.counts_inputs:
            dtype = widened(output_rows).dtype
            return add_squares(total, self.block_rows(inputs, output_rows), scale, dtype)
        rows = None
        if self.multiplies:
            rows = self.weight_rows(inputs, output_rows)
            if self.bias is None:
                return add_moment(total, rows, scale)
            if rows.numel() <= FEW or devices.on_gpu(rows):
                return add_moment(total, with_ones(rows), scale)
        # The row of the bias is a sum, apart from the moment of the other rows.
        groups, batch, shared, _ = output_rows.shape
        beta = 1.0
        if total is None:
            like = widened(output_rows)
            total, beta = new_sum(groups, self.shape[2], like, zero=False), 0.0
        if rows is None:
            sums = total.new_zeros(groups, 0)
        else:
            add_moment(total[:, :-1, :-1], rows, scale, beta)
            sums = rows.sum((1, 2), dtype=total.dtype)
        add_bias(total, sums, batch * shared, scale, beta)
        return total

    def mean_moment(
        self, inputs: Inputs, output_rows: Tensor, total: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        """Return ``total`` plus ``scale`` times the sum of ``a a^T`` over samples, of `mean_rows`.

        For arguments and result see `input_moment`.
        """
        rows = self.mean_rows(inputs, output_rows)
        if self.counts_inputs:
            return add_squares(total, rows, scale)
        return add_moment(total, rows, scale)

    def output_moment(
        self, output_rows: Tensor, total: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        """Return ``total`` plus ``scale`` times the sum of ``g g^T`` over batch and positions.

        For arguments and result see `input_moment`. Rows that are a view of an image, channels
        first or last, are not copied.
        """
        return add_moment(total, output_rows, scale)


def moment(rows: Tensor) -> Tensor:
    """Return the plain moment ``[groups, in, in]`` of rows ``[groups, batch, shared, in]``."""
    flat = rows.flatten(1, 2)
    if flat.shape[0] == 1:
        return (flat[0].T @ flat[0]).unsqueeze(0)
    return flat.transpose(1, 2) @ flat
