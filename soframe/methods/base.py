"""The method: which factors a block has, what becomes of its gradient, what is kept for that.

A method that reads calls sees one call of one layer at a time, as rows, and adds plain sums to the
statistics (`Method.statistics`); one that reads gradients is given the averaged gradient at the
step (`Method.observe`). How sums and counts become averages is `soframe.methods.scaling`. Then it
is given the gradient as a matrix ``[groups, out, in]``, the second-order data of the block's
factors and its own state, and returns a direction and a new state (`Method.direct`).

A method keeps nothing in itself: one instance serves many blocks, some of them at once. Methods
are chained by `soframe.methods.chain.Chain`; each is then a stage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor, nn

from soframe.layers.base import LayerHelper
from soframe.layers.layout import BlockShape
from soframe.layers.sharing import SharedInputs
from soframe.solvers.base import Solver
from soframe.specs import FactorSpec, SecondOrder, TensorSpec

SMALL = tuple(BlockShape(1, out, into) for out in (1, 2) for into in (1, 2))
"""Of these a method tells the names that it uses, unless it says them itself."""

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
        data: The second-order data of the block, for factors whose statistics need them.
        halves: ``output_rows`` in half precision, where moments of such rows are as exact, and much
            faster; None elsewhere.
    """

    helper: LayerHelper
    inputs: tuple[Tensor, ...] | None
    output_rows: Tensor
    shared: SharedInputs | None = None
    data: SecondOrder = field(default_factory=dict)
    halves: Tensor | None = None

    def input_moment(self, total: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Add ``scale`` times the sum of ``a a^T``: an `Addend`.

        Args:
            total: What is added to, in place: ``[groups, in, in]``; None for zeros.
            scale: The multiplier.

        Returns:
            The sum, of which the lower triangle counts.
        """
        assert self.inputs is not None
        rows = self.output_rows
        # A block of a bias alone has no inputs.
        if self.halves is not None and all(x.dtype == self.halves.dtype for x in self.inputs[:1]):
            rows = self.halves
        if self.shared is None or scale == 0:
            return self.helper.input_moment(self.inputs, rows, total, scale)
        return self.shared.add(self.helper, self.inputs, rows, total, scale)

    def output_moment(self, total: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Add ``scale`` times the sum of ``g g^T``: an `Addend`.

        Args:
            total: What is added to, in place: ``[groups, out, out]``; None for zeros.
            scale: The multiplier.

        Returns:
            The sum, of which the lower triangle counts.
        """
        rows = self.output_rows if self.halves is None else self.halves
        return self.helper.output_moment(rows, total, scale)

    def mean_input_moment(self, total: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Add ``scale`` times the sum over samples of ``a a^T``, with means over positions.

        Args:
            total: See `input_moment`.
            scale: See `input_moment`.

        Returns:
            See `input_moment`.
        """
        assert self.inputs is not None
        return self.helper.mean_moment(self.inputs, self.output_rows, total, scale)

    def summed_output_moment(self, total: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Add ``scale`` times the sum over samples of ``g g^T``, with sums over positions.

        Args:
            total: See `output_moment`.
            scale: See `output_moment`.

        Returns:
            See `output_moment`.
        """
        return self.helper.output_moment(self.output_rows.sum(2, keepdim=True), total, scale)


@dataclass(frozen=True)
class Given:
    """What a method makes a direction of.

    Attributes:
        gradient: The averaged gradient, ``[groups, out, in]`` in the factors' dtype.
        incoming: What the stage before has made of it; the gradient itself for the first.
        data: The second-order data of the factors that are solved, and the values of those that are
            not, ``data[name]["value"]``. A factor that has no data yet is missing.
        state: What the method keeps for the block, by name: zeros before the first update.
        updates: How many updates there were.
        solver: The user's solver, which made the data of factors for which the method chooses none.
        damping: The damping of this step.
    """

    gradient: Tensor
    incoming: Tensor
    data: SecondOrder
    state: Mapping[str, Tensor]
    updates: int
    solver: Solver
    damping: float


@dataclass(frozen=True)
class Direction:
    """What a method makes of a gradient.

    Attributes:
        matrix: ``[groups, out, in]``, in a tensor that is not the gradient's.
        state: The state after the update, in new tensors: the old ones stay as they are, since the
            update may be given up. A name that is missing keeps its tensor.
    """

    matrix: Tensor
    state: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """A block that a method may take or leave.

    Attributes:
        name: The name of the module, or of the parameter.
        module: The module.
        parameters: The names of the parameters in it.
        shape: The shape of the gradient matrix.
        last: Whether it is the model's head: tied to an embedding, or else the last Linear.
    """

    name: str
    module: nn.Module
    parameters: tuple[str, ...]
    shape: BlockShape
    last: bool = False


DECLARED = (
    "reduces",
    "joint",
    "clipped",
    "damped",
    "starts_at_once",
    "refreshes_after",
    "observes_with_data",
    "empirical_only",
    "scalings",
)
"""What a method says of itself by attributes, see `Method`."""


class Method(ABC):
    """What becomes of the gradient of a block.

    Attributes:
        reduces: Whether all positions of a sample make one row, so that a call has as many rows as
            samples.
        joint: Whether a weight and its bias are one block, rather than one each.
        clipped: Whether the clips scale its directions: so it is for those that have the length of
            a Newton step, not for those whose length is part of their definition.
        damped: Whether it reads the damping itself (`Given.damping`), beside what the solver makes
            of it. Where no method does, ``damping=`` is an error.
        starts_at_once: Whether it makes directions before its factors are solved.
        refreshes_after: Whether statistics of the averaged gradient, and the solves of its factors,
            come after the direction of the step.
        observes_with_data: Whether statistics of the averaged gradient are made with the block's
            second-order data. Before the first solve there are none; where data are lost later,
            such as those of a state that another solver has made, `observe` waits for the next.
        empirical_only: Whether its statistics of calls are defined for the loss's own output
            gradients alone, and not for those of targets that the model draws, nor for columns of a
            type-2 Fisher.
        scalings: The conventions of `soframe.methods.scaling` under which it is defined.
    """

    reduces: ClassVar[bool] = False
    joint: bool = True
    clipped: bool = True
    damped: bool = True
    starts_at_once: bool = False
    refreshes_after: bool = False
    observes_with_data: bool = False
    empirical_only: bool = False
    scalings: ClassVar[tuple[str, ...]] = ("fisher", "kaisa")

    def _declare_as(self, inner: Method) -> None:
        """Declare what another method declares, for a frozen method that is made around it."""
        for name in DECLARED:
            object.__setattr__(self, name, getattr(inner, name))

    @abstractmethod
    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        """Return the factors of a block.

        Args:
            shape: The shape of the block's gradient matrix.

        Returns:
            The factors, in a fixed order.
        """

    def statistics(self, call: Call) -> Mapping[str, Tensor | Addend]:
        """Return what a call adds to each factor: plain sums over samples and positions.

        Args:
            call: The call.

        Returns:
            For each factor that is made of calls a tensor of its shape, or, to save that tensor, a
            function that adds to a sum in place, such as ``call.output_moment``. It is called at
            once, if this rank contributes to the factor. Of matrices the lower triangle counts.
            For factors of the outputs' side alone where the call has no inputs. By default nothing.
        """
        del call
        return {}

    def observe(self, gradient: Tensor, data: SecondOrder) -> Mapping[str, Tensor]:
        """Return the statistics of the averaged gradient, once in a step.

        It is called on gradient workers, which have the block's data under every strategy.

        Args:
            gradient: ``[groups, out, in]``.
            data: The second-order data of the block, of its last solve, and the values of factors
                that are not solved, ``data[name]["value"]``; nothing before the first solve.

        Returns:
            For each factor with ``reads="gradient"`` a tensor of its shape; by default nothing.
        """
        del gradient, data
        return {}

    def state(self, shape: BlockShape) -> Mapping[str, TensorSpec]:
        """Return what the method keeps for a block from step to step; by default nothing.

        Args:
            shape: The shape of the block's gradient matrix.

        Returns:
            Names and shapes, ``[groups, ...]``. The tensors have the dtype of the factors, begin
            with zeros, live on the gradient workers, and are saved and moved like second-order
            data.
        """
        del shape
        return {}

    def direct(self, given: Given) -> Direction:
        """Return what becomes of the gradient.

        Args:
            given: What there is to make it of.

        Returns:
            The direction, which is the same whenever ``given`` is; by default that of
            ``precondition``.
        """
        direction = self.precondition(given.incoming, given.data, given.solver, given.damping)
        return Direction(direction)

    def precondition(
        self, gradient: Tensor, data: SecondOrder, solver: Solver, damping: float
    ) -> Tensor:
        """Return the preconditioned gradient, for methods without a state.

        Args:
            gradient: ``[groups, out, in]``.
            data: The second-order data of each factor.
            solver: The solver that made the data.
            damping: The damping of this step.

        Returns:
            ``[groups, out, in]``, in a new tensor.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither direct() nor precondition()")

    def rebase(
        self, state: Mapping[str, Tensor], old: SecondOrder, new: SecondOrder
    ) -> Mapping[str, Tensor]:
        """Return the state in new second-order data, before the first direction with these.

        Args:
            state: The state.
            old: The data that it was kept with.
            new: The data that take their place.

        Returns:
            The tensors that change, by name; by default none.
        """
        del state, old, new
        return {}

    def solver(self, factor: FactorSpec, default: Solver) -> Solver | None:
        """Return who solves a factor.

        Args:
            factor: The factor.
            default: The solver that the user chose.

        Returns:
            A solver; None for a factor that is used as it is. By default the user's, for matrices
            and diagonals.
        """
        return default if factor.kind in ("psd", "diagonal") else None

    def unsuited(self, candidate: Candidate) -> str | None:
        """Return why a block is none for this method, or None if it is.

        Args:
            candidate: The block.

        Returns:
            The reason for the registration report; by default None.
        """
        del candidate
        return None

    def effort(self, shape: BlockShape) -> float:
        """Return the operations of a direction up to a constant, where they are to be balanced.

        Args:
            shape: The shape of the block's gradient matrix.

        Returns:
            ``groups n^3`` in the units of a solve: by default those of a product with the smaller
            side, for methods that read no calls; 0 for others, whose solves count.
        """
        factors = self.factors(shape)
        if any(factor.captured for factor in factors):
            return 0.0
        groups, out, into = shape
        return float(groups * out * into * min(out, into))

    @property
    def captures(self) -> bool:
        """Whether it has factors that are made of calls."""
        return any(factor.captured for factor in self.factors(BlockShape(1, 2, 2)))

    @property
    def rebases(self) -> bool:
        """Whether what it keeps lies in bases that are its second-order data, see `rebase`."""
        own = type(self).rebase is not Method.rebase
        return own and bool(self.state_names()) and bool(self.factor_names())

    def factor_names(self) -> frozenset[str]:
        """Return the names of its factors, of blocks of any shape."""
        return frozenset(factor.name for shape in SMALL for factor in self.factors(shape))

    def state_names(self) -> frozenset[str]:
        """Return the names of what it keeps, for blocks of any shape."""
        return frozenset(name for shape in SMALL for name in self.state(shape))

    def forward_only(self) -> Method:
        """Return this method without the factor of the outputs, which is the identity then.

        Raises:
            ValueError: If it has no such form.
        """
        raise ValueError(f"{self!r} has no form for fisher='forward-only'; K-FAC has")
