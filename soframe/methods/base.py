"""The method: the factors of a block, their statistics, and the update of its gradient.

Statistics come from the calls of a layer, as plain sums over rows (`Method.statistics`), or from
the averaged gradient at the step (`Method.observe`). `soframe.methods.scaling` turns sums and
counts into averages. `Method.direct` takes the gradient as a matrix ``[groups, out, in]``, the
second-order data of the block's factors and the state of the method, and returns the update and
the new state.

A method object holds settings only, no tensors: one instance serves many blocks, several of them in
one batch. `soframe.methods.chain.Chain` composes methods; each is then a stage.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from soframe.kernels.gram import add_squares, takes_one_product
from soframe.kernels.samples import sample_moments
from soframe.layers.base import FEW, LayerHelper, widened
from soframe.layers.layout import BlockShape, Layout
from soframe.layers.sharing import SharedInputs
from soframe.methods.spectrum import Spectrum
from soframe.solvers.base import Solver
from soframe.specs import FactorSpec, SecondOrder, State, TensorSpec

MAX_SIZE = 8192
"""The longest side that has a matrix as its factor: 256 MB in float32, and minutes of a CPU."""

SMALL = (BlockShape(1, 1, 1), BlockShape(1, 1, 2), BlockShape(1, 2, 1), BlockShape(1, 2, 2))
"""Shapes from which the names of factors and states are read by default."""

Addend = Callable[[Tensor | None, float], Tensor]
"""``(total, scale)``: add ``scale`` times a sum to ``total`` in place; None makes a new tensor. Of
matrices only the lower triangle is defined."""


@dataclass(frozen=True)
class Call:
    """One call of a layer whose output received a gradient.

    Attributes:
        helper: The helper of the module that was called.
        inputs: The input tensors; None if they were counted before and only the output gradients
            are new, as in the later columns of a type-2 Fisher.
        rows: Output gradients ``[groups, batch, shared, out]`` as backward computed them: means,
            weights and a loss scale are not undone.
        dtype: The dtype of the factors.
        shared: Cache of input moments that several layers use; None without one.
        data: The second-order data of the block, for factors whose statistics need them.
        widens: Whether products of ``rows`` of half precision are accumulated in float32, which is
            as exact as products of ``output_rows`` and much faster.
        first: Whether the sums have nothing of the block in this window yet.
        max_size: The longest side whose moments are matrices ``[groups, n, n]``; the moments of a
            longer one are their diagonals ``[groups, n]``, see `FactorSpec.up_to`.
    """

    helper: LayerHelper
    inputs: tuple[Tensor, ...] | None
    rows: Tensor
    dtype: torch.dtype
    shared: SharedInputs | None = None
    data: SecondOrder = field(default_factory=dict)
    widens: bool = False
    first: bool = False
    max_size: float = math.inf

    @cached_property
    def output_rows(self) -> Tensor:
        """The output gradients in the dtype of the factors."""
        return self.rows if self.rows.dtype == self.dtype else self.rows.to(self.dtype)

    def up_to(self, max_size: float) -> Call:
        """Return this call with another ``max_size``: itself where that makes no difference."""
        if max(self.helper.shape) <= min(max_size, self.max_size):
            return self
        return replace(self, max_size=max_size)

    @property
    def _long(self) -> tuple[bool, bool]:
        """Whether moments of outputs, and of inputs, are diagonals in this call."""
        if self.max_size == math.inf:
            return False, False
        _, out, into = self.helper.shape
        # An embedding makes the diagonal itself, of indices.
        right = into > self.max_size and not self.helper.counts_inputs
        return out > self.max_size, right

    def input_moment(self, total: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Add ``scale`` times the sum of ``a a^T``: an `Addend` of ``[groups, in, in]``."""
        assert self.inputs is not None
        if self._long[1]:
            rows = self.helper.block_rows(self.inputs, self.output_rows)
            return add_squares(total, rows, scale, widened(rows).dtype)
        if not self.widens:
            rows = self.output_rows
        elif all(x.dtype == self.rows.dtype for x in self.inputs[:1]):  # no inputs: a bias alone
            rows = self.rows
        else:  # the helper reads their shape and dtype alone: see `LayerHelper.widens`
            rows = self.rows.new_empty((), dtype=self.dtype).expand(self.rows.shape)
        if self.shared is None or scale == 0:
            return self.helper.input_moment(self.inputs, rows, total, scale)
        fresh = total is None or self.first
        return self.shared.add(self.helper, self.inputs, rows, total, scale, fresh=fresh)

    def output_moment(self, total: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Add ``scale`` times the sum of ``g g^T``: an `Addend` of ``[groups, out, out]``."""
        rows = self.rows if self.widens else self.output_rows
        if self._long[0]:
            return add_squares(total, rows, scale, widened(rows).dtype)
        return self.helper.output_moment(rows, total, scale)

    def mean_input_moment(self, total: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Add ``scale`` times the sum of ``a a^T``, ``a`` a sample's mean over positions."""
        assert self.inputs is not None
        if self._long[1]:
            rows = self.helper.mean_rows(self.inputs, self.output_rows)
            return add_squares(total, rows, scale, widened(rows).dtype)
        return self.helper.mean_moment(self.inputs, self.output_rows, total, scale)

    def summed_output_moment(self, total: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Add ``scale`` times the sum of ``g g^T``, ``g`` a sample's sum over positions."""
        rows = self.output_rows.sum(2, keepdim=True)
        if self._long[0]:
            return add_squares(total, rows, scale, widened(rows).dtype)
        return self.helper.output_moment(rows, total, scale)

    def sample_moments(self) -> tuple[Tensor, Tensor]:
        """Return the sums over samples of ``W W^T`` and ``W^T W``, with the sample's gradient W.

        Returns:
            ``[groups, out, out]`` and ``[groups, in, in]``, or their diagonals.
        """
        assert self.inputs is not None
        if self.helper.counts_inputs or not any(self._long):
            left, right = self.helper.sample_moments(self.inputs, self.output_rows)
            if self._long[0]:
                left = left.diagonal(dim1=-2, dim2=-1)
            return left, right
        rows = self.helper.block_rows(self.inputs, self.output_rows)
        return sample_moments(rows, self.output_rows, diagonal=self._long)


def few_rows(addend: Addend, factor: FactorSpec) -> tuple[Tensor, int] | None:
    """Return the rows of whose plain moment an addend is, without ones for a bias.

    Views of them, ``[groups, batch, ...]``, and their number; None if many, or other statistics.
    """
    function = getattr(addend, "__func__", None)
    if function not in (Call.input_moment, Call.output_moment) or factor.kind != "psd":
        return None
    call: Call = addend.__self__  # type: ignore[attr-defined]  # of a bound method
    groups, batch, shared, width = call.rows.shape
    count, numbers = batch * shared, batch * shared * factor.size  # of a group
    are_few = numbers * groups <= max(prod(factor.shape), FEW)
    if call.widens or not (are_few and takes_one_product(factor.size, numbers)):
        return None
    views: Tensor | None = None
    if function is Call.input_moment:
        assert call.inputs is not None
        views = call.helper.row_views(call.inputs, call.output_rows)
    elif type(call.helper).output_moment is LayerHelper.output_moment and width == factor.size:
        views = call.output_rows
    return None if views is None else (views, count)


def _no_weights() -> Tensor:
    raise ValueError("this step has gradients without weights")


@dataclass(frozen=True)
class Given:
    """The inputs of `Method.direct` at one step.

    Attributes:
        gradient: The averaged gradient, ``[groups, out, in]`` in the factors' dtype.
        incoming: The output of the previous stage, of the same shape; the gradient itself for the
            first stage.
        data: Second-order data by factor and tensor name. A factor without a solver has its value
            as ``data[name]["value"]``; a factor that was not solved yet is missing.
        state: The state of the method for this block, by name; zeros before the first update.
        updates: The number of updates before this one.
        solver: The solver that the user chose. It made the data of all factors for which
            `Method.solver` does not return another one.
        damping: The damping of this step.
        weights: Returns the parameters as a matrix like the gradient; it raises a ValueError if
            they are sharded.
    """

    gradient: Tensor
    incoming: Tensor
    data: SecondOrder
    state: State
    updates: int
    solver: Solver
    damping: float
    weights: Callable[[], Tensor] = _no_weights


@dataclass(frozen=True)
class Direction:
    """The result of `Method.direct`: the update of a gradient, and the new state.

    Attributes:
        matrix: The update, ``[groups, out, in]``, in a tensor of its own.
        state: The new state, in new tensors: the step may still be skipped, so the old tensors must
            not change. A missing name keeps its old tensor.
        parcel: The tensors that `Method.parcel` declares.
    """

    matrix: Tensor
    state: State = field(default_factory=dict)
    parcel: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """A block that a method may accept or reject (`Method.unsuited`).

    Attributes:
        name: The name of the module, or of the parameter.
        module: The module.
        parameters: The names of its parameters within the module.
        shape: The shape of the gradient matrix.
        last: Whether it is a head, or has an embedding's weight; see `soframe.blocks.heads`.
    """

    name: str
    module: nn.Module
    parameters: tuple[str, ...]
    shape: BlockShape
    last: bool = False


class Method(ABC):
    """The base class of methods: how the gradient of a block is preconditioned.

    A stateless method implements `factors`, `statistics` or `observe`, and `precondition`; a
    stateful one implements `state` and `direct` in place of `precondition`. `direct` must be
    deterministic: several ranks may compute the same update.

    Attributes:
        reduces: True if the positions of a sample are reduced to one row, so that a call has as
            many rows as samples.
        joint: True if a weight and its bias are one block, False if each is a block of its own.
        clipped: True if the clips scale its updates. Set False if the length of the update is part
            of the method's definition, as for Adam and Muon, rather than the length of a Newton
            step.
        damped: True if it reads `Given.damping` itself, in addition to the solver. If no method
            does, passing ``damping=`` is an error.
        starts_at_once: True if it computes updates before the first solve of its factors.
        refreshes_after: True if statistics of the averaged gradient and solves follow the update of
            the step, rather than precede it.
        observes_with_data: True if `observe` needs the block's second-order data. It gets none
            before the first solve; if data are lost later, for example because a loaded state was
            made by another solver, `observe` is not called until the next solve.
        empirical_only: True if its statistics of calls are defined only for gradients of the loss
            itself, not for targets drawn from the model or columns of a type-2 Fisher.
        elementwise: True if each entry of its update and its states depends on that entry alone,
            and it has no factors: blocks of any shapes then share a stack, as one long vector
            ``[entries, 1, 1]``. A subclass with a `direct` of its own declares it anew.
        scalings: The conventions of `soframe.methods.scaling` under which it is defined.
        options: The attributes that a param group of `soframe.Optimizer` may change from step to
            step, by their names there. Only `direct` reads the changed values.
        auxiliary_ratio: The learning rate of an auxiliary AdamW over this method's, where a
            `soframe.Optimizer` is given the latter alone.
    """

    reduces: ClassVar[bool] = False
    joint: bool = True
    clipped: bool = True
    damped: bool = True
    starts_at_once: bool = False
    refreshes_after: bool = False
    observes_with_data: bool = False
    empirical_only: bool = False
    elementwise: bool = False
    scalings: ClassVar[tuple[str, ...]] = ("fisher", "kaisa")
    auxiliary_ratio: float = 1.0
    options: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if "direct" in vars(cls) and "elementwise" not in vars(cls):
            cls.elementwise = False
        # An update of its own belongs to another curvature.
        if {"direct", "precondition"} & vars(cls).keys() and "spectrum" not in vars(cls):
            cls.spectrum = Method.spectrum  # type: ignore[method-assign]

    def settings(self) -> dict[str, Any]:
        """Return the settings that a param group may change, by their names there."""
        return {name: getattr(self, attribute) for name, attribute in self.options.items()}

    def with_settings(self, settings: Mapping[str, Any]) -> Method:
        """Return this method with other values of some of its `settings`.

        Args:
            settings: Values by their names in a param group; others are left out.

        Returns:
            This method if nothing differs, else a new one, with the same factors and states.

        Raises:
            ValueError: If a value is out of range, or needs a state that this method lacks.
        """
        now = self.settings()
        new = {k: v for k, v in settings.items() if k in now and v != now[k]}
        if not new:
            return self
        changed: Method = replace(cast(Any, self), **{self.options[k]: v for k, v in new.items()})
        if not changed.state_names() <= self.state_names():
            raise ValueError(f"{self!r} keeps no state for {new}: build the method with it")
        return changed

    def _declare_as(self, inner: Method) -> None:
        """Copy the declarations of an inner method; self is a frozen dataclass."""
        for name in DECLARED:
            object.__setattr__(self, name, getattr(inner, name))

    @abstractmethod
    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        """Return the factors of a block.

        Returns:
            The factors, in a fixed order.
        """

    def statistics(self, call: Call) -> Mapping[str, Tensor | Addend]:
        """Return the contribution of a call to each factor: plain sums over samples and positions.

        Returns:
            For each factor that is captured from calls, a tensor of the factor's shape or an
            `Addend` such as ``call.output_moment``, which saves that tensor: it is called
            immediately, and only if this rank contributes to the factor. Only the lower triangle
            of matrices is read. If ``call.inputs`` is None, return the factors of the output side
            only. By default nothing.
        """
        del call
        return {}

    def observe(self, gradient: Tensor, data: SecondOrder) -> Mapping[str, Tensor]:
        """Return the statistics of the averaged gradient, once per step.

        Called on the block's gradient workers, which hold its second-order data under every
        strategy.

        Args:
            gradient: ``[groups, out, in]``.
            data: The second-order data of the last solve, and the values of factors without a
                solver, ``data[name]["value"]``; empty before the first solve.

        Returns:
            For each factor with ``reads="gradient"`` a tensor of its shape; by default nothing.
        """
        del gradient, data
        return {}

    def state(self, shape: BlockShape) -> Mapping[str, TensorSpec]:
        """Return the state tensors of a block, such as momentum buffers; by default none.

        Returns:
            Names and shapes, ``[groups, ...]``. The tensors have the dtype of the factors, start
            as zeros, live on the gradient workers, and are saved and moved like second-order data.
        """
        del shape
        return {}

    def parcel(self, shape: BlockShape) -> Mapping[str, TensorSpec]:
        """Return the tensors that are sent in place of an update, such as its low-rank factors.

        Of sharded parameters it is sent where it has fewer numbers than a rank's part of the
        update, and the parts of the update otherwise. A `Chain` sends its update.

        Returns:
            Names and shapes, ``[groups, ...]``; by default none, and the update is sent.
        """
        del shape
        return {}

    def opened(self, parcel: Mapping[str, Tensor]) -> Tensor:
        """Return the update ``[groups, out, in]`` of a parcel, on each rank that has received it.

        It equals `Direction.matrix`.

        Raises:
            NotImplementedError: If the method has a `parcel` and does not override this.
        """
        raise NotImplementedError(f"{type(self).__name__} has a parcel() and no opened()")

    def direct(self, step: Given) -> Direction:
        """Compute the update of a block and the new state.

        Returns:
            The update, a deterministic function of ``step``; by default the result of
            `precondition`, without a state.
        """
        return Direction(self.precondition(step.incoming, step.data, step.solver, step.damping))

    def precondition(
        self, gradient: Tensor, data: SecondOrder, solver: Solver, damping: float
    ) -> Tensor:
        """Precondition a gradient; for methods without a state, in place of `direct`.

        Args:
            gradient: ``[groups, out, in]``.
            data: The second-order data of each factor.
            solver: The solver that made the data.
            damping: The damping of this step.

        Returns:
            ``[groups, out, in]``, in a new tensor.

        Raises:
            NotImplementedError: If a method overrides neither `direct` nor this.
        """
        raise NotImplementedError(f"{type(self).__name__} has neither direct() nor precondition()")

    def rebase(self, state: State, old: SecondOrder, new: SecondOrder) -> State:
        """Transform the state into the basis of new second-order data, before their first use.

        Args:
            state: The state.
            old: The second-order data in whose basis it is.
            new: The second-order data that replace them.

        Returns:
            The tensors that change, by name; by default none.
        """
        del state, old, new
        return {}

    def solver(self, factor: FactorSpec, default: Solver) -> Solver | None:
        """Return the solver of a factor.

        Args:
            factor: The factor.
            default: The solver that the user chose.

        Returns:
            A solver, or None if the factor is used as it is. By default the user's solver for
            matrices and diagonals, and None for vectors and elementwise factors.

        Raises:
            ValueError: If the method cannot use the user's solver.
        """
        return default if factor.kind in ("psd", "diagonal") else None

    def unsuited(self, candidate: Candidate) -> str | None:
        """Return the reason why this method skips a block, or None if it accepts it.

        Returns:
            The reason, which stands in the registration report; by default None.
        """
        del candidate
        return None

    def layouts(self, module: nn.Module) -> Sequence[Layout]:
        """Return the blocks of several parameters, such as of the sister layers of an adapter.

        Of methods of gradients alone, which otherwise take each parameter by itself. A block whose
        parameters are frozen, shared or in another block in part is left out.

        Args:
            module: Any module of the model; its submodules' parameters have dotted names.

        Returns:
            A layout for each block; by default none.
        """
        del module
        return ()

    def effort(self, shape: BlockShape) -> float:
        """Return the FLOPs of an update up to a constant, by which placements balance updates.

        Returns:
            The cost in the unit in which a solve costs ``groups n^3``: by default 0 for methods
            with captured factors, whose solves dominate, and otherwise the cost of a product with
            a square matrix of the smaller side, ``groups out in min(out, in)``.
        """
        factors = self.factors(shape)
        if any(factor.captured for factor in factors):
            return 0.0
        groups, out, into = shape
        return float(groups * out * into * min(out, into))

    @property
    def captures(self) -> bool:
        """Whether any of its factors is captured from calls."""
        factors = self.factors(BlockShape(1, 2, 2))
        if isinstance(factors, FactorSpec):
            raise TypeError(f"{self!r}: factors() must return a tuple, as (FactorSpec(...),)")
        return any(factor.captured for factor in factors)

    @property
    def rebases(self) -> bool:
        """Whether its state is kept in the basis of its second-order data, see `rebase`."""
        is_overridden = type(self).rebase is not Method.rebase
        return is_overridden and bool(self.state_names()) and bool(self.factor_names())

    def factor_names(self) -> frozenset[str]:
        """Return the names of its factors, over blocks of all shapes."""
        names: set[str] = set()
        for shape in SMALL:
            names.update(factor.name for factor in self.factors(shape))
        return frozenset(names)

    def state_names(self) -> frozenset[str]:
        """Return the names of its state tensors, over blocks of all shapes."""
        return frozenset(itertools.chain.from_iterable(map(self.state, SMALL)))

    def of_kernel(self, positions: int) -> Method:
        """Return the method of a convolution's weight, ``[groups, out, channels * positions]``.

        Args:
            positions: The number of neighbouring columns that belong to one input channel, above 1.

        Returns:
            By default this method, for which the weight is a matrix. `SOAP` returns one for which
            it is a tensor of three dimensions.
        """
        del positions
        return self

    def forward_only(self) -> Method:
        """Return this method with the identity as the output factor, for the forward-only Fisher.

        K-FAC returns `FOOF`.

        Raises:
            ValueError: If the method has no such form; this is the default.
        """
        raise ValueError(f"{self!r} has no form for fisher='forward-only'; K-FAC has")

    def spectrum(self, shape: BlockShape, data: SecondOrder) -> Spectrum:
        """Return the curvature of a block by its eigenvalues, for `soframe.Curvature`.

        Args:
            shape: The shape of the gradient matrix.
            data: The second-order data, as for `direct`.

        Returns:
            The spectrum of the undamped curvature; products add a damping to its eigenvalues.

        Raises:
            NotImplementedError: If the method defines no curvature; this is the default.
        """
        raise NotImplementedError(f"{type(self).__name__} has no spectrum()")

    def tied(self) -> Method | None:
        """Return the method of a table that is the weight of an embedding and of its head.

        Returns:
            A method whose factors add up moments of both sides, since each is inputs for one use
            and outputs for the other. By default None: such a table has no block.
        """
        return None


DECLARED = tuple(name for name in Method.__annotations__ if name != "options")
"""The attributes by which a method declares its properties, see `Method`."""


class WithoutFactors(Method):
    """The base class of methods without factors, whose updates have a length of their own."""

    clipped = False
    damped = False
    starts_at_once = True

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        return ()

    def effort(self, shape: BlockShape) -> float:
        return entries(shape)


def entries(shape: BlockShape) -> float:
    """Return the number of entries: the FLOPs of an elementwise method."""
    return float(prod(shape))
