"""The solver: what a factor becomes, and how that multiplies a gradient.

Second-order data is a named set of tensors per factor. A solver says which it makes and in which
shapes; strategies and comm move them without knowing what they are. All matrices are
``[groups, n, n]`` and symmetric.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from soframe.specs import FactorSpec, TensorSpec

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # untyped


class SolveFailedError(RuntimeError):
    """A factor that could not be solved, in its own precision nor in float64."""


class Solver(ABC):
    """Turns factors into second-order data and applies them.

    Attributes:
        damps_factors: Whether the damping is added to each factor by ``solve`` (its share, see
            ``shares``) rather than to their product by ``apply``.
        follows: Whether ``follow`` does anything.
        alone: Whether solving changes settings of the whole process for a while, so that nothing
            else is to be computed meanwhile.
        diagonals: Whether it takes diagonal factors, which are given as ``[groups, n]`` in place of
            ``[groups, n, n]``.
    """

    damps_factors: ClassVar[bool] = False
    follows: bool = False
    alone: ClassVar[bool] = False
    diagonals: bool = False

    @property
    def continues(self) -> bool:
        """Whether a solve starts from the last one's data, as where ``solve_again`` has a body."""
        return type(self).solve_again is not Solver.solve_again

    def unsupported(self, factors: Sequence[FactorSpec]) -> str | None:
        """Return why this solver cannot serve the factors of a block, or None if it can.

        Args:
            factors: The factors.

        Returns:
            The reason and a remedy, for the error when the block is built. By default that it takes
            no diagonals, where there are some.
        """
        diagonal = [factor.name for factor in factors if factor.kind == "diagonal"]
        if not diagonal or self.diagonals:
            return None
        return (
            f"it takes no diagonal factors, as {', '.join(diagonal)} is; choose one that does for "
            f"this block, for example solver={{'<its name>': 'eigen', '.*': ...}}, or skip the "
            f"module"
        )

    @abstractmethod
    def tensors(self, factor: FactorSpec) -> dict[str, TensorSpec]:
        """Return what ``solve`` makes of a factor.

        Args:
            factor: The factor.

        Returns:
            The tensors by name, in the order in which they travel.
        """

    @abstractmethod
    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        """Return the second-order data of a factor.

        Args:
            matrix: ``[groups, n, n]``, positive semi-definite up to rounding; or of a diagonal
                factor ``[groups, n]``.
            damping: ``[groups]``, the factor's share of the damping.

        Returns:
            The tensors that ``tensors`` announces, in the dtype of ``matrix``.

        Raises:
            torch.linalg.LinAlgError: If the factorisation fails.
        """

    def solve_again(
        self, matrix: Tensor, damping: Tensor, last: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the second-order data of a factor that has been solved before.

        For iterations that start where the last ones ended; by default there is nothing to gain.
        Owners that are no gradient workers keep no second-order data, and call ``solve``.

        Args:
            matrix: See ``solve``.
            damping: See ``solve``.
            last: The data of the last solve, perhaps of another damping; not to be changed.

        Returns:
            See ``solve``.
        """
        del last
        return self.solve(matrix, damping)

    def follow(self, matrix: Tensor, data: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """Return the tensors that change because the factor has, between two solves.

        It is called after statistics, on gradient workers, where all of them hold the factor. They
        must all find the same.

        Args:
            matrix: The factor as it is now, ``[groups, n, n]``.
            data: Its second-order data, not to be changed.

        Returns:
            Some of the tensors, anew; None, the default, to keep the data of the last solve.
        """
        del matrix, data
        return None

    def usable(self, data: Mapping[str, Tensor]) -> bool:
        """Return whether second-order data that are finite may be used.

        What underflows is finite, and would turn gradients to zero.

        Args:
            data: What ``solve`` has made, in the dtype in which it is kept.

        Returns:
            False to have the factor count as one that cannot be solved. By default True.
        """
        del data
        return True

    @abstractmethod
    def apply(
        self,
        gradient: Tensor,
        *,
        left: Mapping[str, Tensor],
        right: Mapping[str, Tensor],
        damping: float,
    ) -> Tensor:
        """Return ``(left ⊗ right + damping)^-1`` times the gradient.

        Args:
            gradient: ``[groups, out, in]``.
            left: Second-order data of the factor of the outputs, ``[groups, out, out]``.
            right: Second-order data of the factor of the inputs, ``[groups, in, in]``.
            damping: The damping of this step; solvers that damp when they solve ignore it.

        Returns:
            ``[groups, out, in]``, in a new tensor.
        """

    def apply_right(
        self, gradient: Tensor, *, right: Mapping[str, Tensor], damping: float
    ) -> Tensor:
        """Return ``(I ⊗ right + damping)^-1`` times the gradient: ``apply`` with no left factor.

        By default the identity is solved and applied like any other factor; a solver that can
        leave it out overrides this.

        Args:
            gradient: ``[groups, out, in]``.
            right: Second-order data of the factor of the inputs, ``[groups, in, in]``, solved with
                the whole damping where the solver damps when it solves.
            damping: The damping of this step.

        Returns:
            ``[groups, out, in]``, in a new tensor.
        """
        groups, out, _ = gradient.shape
        eye = torch.eye(out, dtype=gradient.dtype, device=gradient.device).repeat(groups, 1, 1)
        left = self.solve(eye, gradient.new_zeros(groups))
        return self.apply(gradient, left=left, right=right, damping=damping)

    def shares(self, mean_traces: Sequence[Tensor], damping: float | Tensor) -> list[Tensor]:
        """Return each factor's share of the damping, for ``solve``.

        Args:
            mean_traces: ``[groups]`` for each factor of the block: its trace over its size.
            damping: The damping of this step; ``[groups]`` where each group has one of its own.

        Returns:
            ``[groups]`` for each factor. By default the whole damping: so it has to be for a
            block of one factor, of which the other is the identity.

        Raises:
            SolveFailedError: If the factors' scales are such that the solver cannot serve them.
        """
        return [torch.ones_like(trace) * damping for trace in mean_traces]


def solve_safely(
    solver: Solver, matrix: Tensor, damping: Tensor, last: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], bool]:
    """Solve a factor; where that fails, once more in float64, from the start.

    Args:
        solver: The solver.
        matrix: ``[groups, n, n]``.
        damping: ``[groups]``.
        last: The data of its last solve, if it had one and they are here.

    Returns:
        The second-order data in the dtype of ``matrix``, and whether float64 was needed.

    Raises:
        SolveFailedError: If it fails in float64 too, or gives something that is not finite.
        RuntimeError: If it changes the factor in place.
    """
    reason = "the result is not finite"
    for dtype in dict.fromkeys((matrix.dtype, torch.float64)):
        version = matrix._version
        try:
            if last and dtype == matrix.dtype:
                data = solver.solve_again(matrix, damping, last)
            else:
                data = solver.solve(matrix.to(dtype), damping.to(dtype))
        except LinAlgError as error:
            reason = str(error)
            continue
        finally:
            if matrix._version != version:
                raise RuntimeError(
                    f"{solver!r}: solve() has changed the factor in place, and it is a running "
                    f"average that goes on: return new tensors, such as of matrix + damping * eye"
                )
        data = separate(data, matrix)
        if all(map(_finite, data.values())):
            if solver.usable(data):
                return data, dtype != matrix.dtype
            reason = f"{matrix.dtype} cannot hold the result: its scale is out of range"
    raise SolveFailedError(reason)


def separate(data: Mapping[str, Tensor], matrix: Tensor) -> dict[str, Tensor]:
    """Return second-order data in the factor's dtype, contiguous, in memory that is not its own.

    The factor changes in place at the next statistics, and its data do not. One layout on every
    rank, whoever solved: products of other strides have other bits.
    """
    data = {name: tensor.to(matrix.dtype).contiguous() for name, tensor in data.items()}
    return {n: t.clone() if _same_memory(t, matrix) else t for n, t in data.items()}


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _finite(tensor: Tensor) -> bool:
    # A sum is the fastest pass, by far; only what has none that is finite is looked at closely.
    return math.isfinite(float(tensor.sum())) or bool(tensor.isfinite().all())


def mean_trace(matrix: Tensor) -> Tensor:
    """Return the trace over the size.

    Args:
        matrix: ``[groups, n, n]``, or a diagonal ``[groups, n]``.

    Returns:
        ``[groups]``.
    """
    return mean_of(matrix.diagonal(dim1=-2, dim2=-1) if matrix.dim() == 3 else matrix)


def mean_of(diagonal: Tensor) -> Tensor:
    """Return the mean of the entries of a diagonal.

    Args:
        diagonal: ``[groups, n]``.

    Returns:
        ``[groups]``, finite where the entries are: the sum, which may not be, is taken in float64.
    """
    return diagonal.mean(-1, dtype=torch.float64).to(diagonal.dtype)


def whole(matrix: Tensor) -> Tensor:
    """Return symmetric matrices, from their lower triangles.

    Factorisations read one triangle; products need both.

    Args:
        matrix: ``[groups, n, n]``.
    """
    return matrix.tril() + matrix.tril(-1).mT
