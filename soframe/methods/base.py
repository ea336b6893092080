"""The method: which factors a block has, what a call adds to them, how they precondition.

A method sees one call of one layer at a time, as rows, and adds plain sums to the statistics; how
sums and counts become averages is `soframe.methods.scaling`. At the end of the step it is given
the gradient as a matrix ``[groups, out, in]`` and the second-order data of the block's factors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from soframe.kernels.gram import add_moment, zeros
from soframe.layers.base import BlockShape, LayerHelper
from soframe.layers.sharing import SharedInputs
from soframe.solvers.base import Solver
from soframe.specs import FactorSpec, SecondOrder

Addend = Callable[[Tensor | None, float], Tensor]
"""Adds to a sum in place, times a multiplier, and returns it; makes a sum where there is none."""


@dataclass(frozen=True)
class Call:
    """One call of a layer whose output received a gradient.

    Attributes:
        helper: The helper of the module that was called.
        inputs: The tensors that it was called with; None where they were counted before and only
            the output gradients are new.
        output_rows: ``[groups, batch, shared, out]`` in the factors' dtype, as the loss left them.
        shared: Knows the moments of inputs that other layers have in common; None for nothing.
    """

    helper: LayerHelper
    inputs: tuple[Tensor, ...] | None
    output_rows: Tensor
    shared: SharedInputs | None = None

    def input_moment(self, total: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Add ``scale`` times the sum of ``a a^T``: an `Addend`.

        Args:
            total: What is added to, in place: ``[groups, in, in]``; None for zeros.
            scale: The multiplier.

        Returns:
            The sum, of which the lower triangle counts.
        """
        assert self.inputs is not None
        if self.shared is None or scale == 0:
            return self.helper.input_moment(self.inputs, self.output_rows, total, scale)
        return self.shared.add(self.helper, self.inputs, self.output_rows, total, scale)

    def output_moment(self, total: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Add ``scale`` times the sum of ``g g^T``: an `Addend`.

        Args:
            total: What is added to, in place: ``[groups, out, out]``; None for zeros.
            scale: The multiplier.

        Returns:
            The sum, of which the lower triangle counts.
        """
        return self.helper.output_moment(self.output_rows, total, scale)

    def mean_input_moment(self, total: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Add ``scale`` times the sum over samples of ``a a^T``, with means over positions.

        Args:
            total: See `input_moment`.
            scale: See `input_moment`.

        Returns:
            See `input_moment`.
        """
        assert self.inputs is not None
        rows = self.helper.mean_rows(self.inputs, self.output_rows)
        if total is None:
            total = zeros(len(rows), rows.shape[3], rows)
        add_moment(total, rows, scale)
        return total

    def summed_output_moment(self, total: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Add ``scale`` times the sum over samples of ``g g^T``, with sums over positions.

        Args:
            total: See `output_moment`.
            scale: See `output_moment`.

        Returns:
            See `output_moment`.
        """
        return self.helper.output_moment(self.output_rows.sum(2, keepdim=True), total, scale)


class Method(ABC):
    """A curvature approximation.

    Attributes:
        reduces: Whether all positions of a sample make one row, so that a call has as many rows as
            samples.
    """

    reduces: ClassVar[bool] = False

    @abstractmethod
    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        """Return the factors of a block.

        Args:
            shape: The shape of the block's gradient matrix.

        Returns:
            The factors, in a fixed order.
        """

    @abstractmethod
    def statistics(self, call: Call) -> Mapping[str, Tensor | Addend]:
        """Return what a call adds to each factor: plain sums over samples and positions.

        Args:
            call: The call.

        Returns:
            For each factor a tensor of its shape, or, to save that tensor, a function that adds to
            a sum in place, such as ``call.output_moment``. It is called at once, if this rank
            contributes to the factor. Of either, the lower triangle counts. For factors of the
            outputs' side alone where the call has no inputs.
        """

    @abstractmethod
    def precondition(
        self, gradient: Tensor, data: SecondOrder, solver: Solver, damping: float
    ) -> Tensor:
        """Return the preconditioned gradient.

        Args:
            gradient: ``[groups, out, in]``.
            data: The second-order data of each factor.
            solver: The solver that made the data.
            damping: The damping of this step.

        Returns:
            ``[groups, out, in]``, in a new tensor.
        """

    def forward_only(self) -> Method:
        """Return this method without the factor of the outputs, which is the identity then.

        Raises:
            ValueError: If it has no such form.
        """
        raise ValueError(f"{self!r} has no form for fisher='forward-only'; K-FAC has")
