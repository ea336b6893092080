"""The solver: decompose or invert factors, and apply the result to gradients.

The result for a factor, its second-order data, is a set of named tensors. A solver declares their
names and shapes, and strategies and comm move them by these alone. All matrices are
``[groups, n, n]`` and symmetric. Groups are independent; a stack has the groups of many blocks.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from soframe.kernels.devices import memory_of
from soframe.specs import Data, FactorSpec, TensorSpec

LinAlgError: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[attr-defined]  # untyped


class Solver(ABC):
    """The base class of solvers: from factors to second-order data, and their application.

    A solver implements `tensors`, `solve` and `apply`; everything else has a default.

    Attributes:
        damps_factors: True if `solve` adds the damping to each factor (its share, see `shares`),
            False if `apply` adds it to their product.
        follows: True if `follow` updates data between solves.
        diagonals: True if diagonal factors ``[groups, n]`` are supported, in addition to matrices
            ``[groups, n, n]``.
    """

    damps_factors: ClassVar[bool] = False
    follows: bool = False
    diagonals: bool = False

    @property
    def continues(self) -> bool:
        """Whether a solve starts from the last data, by default if `solve_again` is overridden."""
        return type(self).solve_again is not Solver.solve_again

    def unsupported(self, factors: Sequence[FactorSpec]) -> str | None:
        """Return the reason why this solver does not support a block, or None if it does.

        Args:
            factors: The factors of the block.

        Returns:
            The reason and a remedy, for the error at construction. By default diagonal factors are
            unsupported, unless ``diagonals`` is set.
        """
        diagonal = [factor.name for factor in factors if factor.kind == "diagonal"]
        if not diagonal or self.diagonals:
            return None
        return (
            f"it takes no diagonal factors, as {', '.join(diagonal)} is; choose one that does for "
            f"this block, for example solver={{'<its name>': 'eigen', '.*': ...}}, skip the "
            f"module, or give a method such as KFAC a larger max_size, if that is why"
        )

    @abstractmethod
    def tensors(self, factor: FactorSpec) -> dict[str, TensorSpec]:
        """Return the names and shapes of the second-order data of a factor.

        Returns:
            The specs by name, in the order in which the tensors are sent.
        """

    @abstractmethod
    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        """Compute the second-order data of a factor, independently for each group.

        A failed group may be marked by NaN in its data instead of an error, so that the host does
        not wait for the device.

        Args:
            matrix: ``[groups, n, n]``, positive semi-definite up to rounding, or ``[groups, n]``
                for a diagonal factor. Only the lower triangle may be read.
            damping: ``[groups]``, the factor's share of the damping.

        Returns:
            The tensors that `tensors` declares, in the dtype of ``matrix``, in new memory.

        Raises:
            torch.linalg.LinAlgError: If the factorisation of a group fails.
        """

    def solve_again(self, matrix: Tensor, damping: Tensor, last: Data) -> dict[str, Tensor]:
        """Compute the second-order data of a factor from the data of its last solve.

        For warm-started iterations; by default calls `solve`. Owners that are not gradient workers
        keep no second-order data, and call `solve`.

        Args:
            matrix: ``[groups, n, n]`` or ``[groups, n]``, as for `solve`.
            damping: ``[groups]``, the factor's share of the damping.
            last: The data of the last solve, perhaps with another damping; must not be changed.

        Returns:
            The tensors that `tensors` declares, as from `solve`.
        """
        del last
        return self.solve(matrix, damping)

    def follow(self, matrix: Tensor, data: Data) -> dict[str, Tensor] | None:
        """Update second-order data from the current factor between two solves.

        Called after statistics on every gradient worker, if all of them hold the factor; the result
        must be deterministic, so that they agree.

        Args:
            matrix: The current factor, ``[groups, n, n]`` or ``[groups, n]``.
            data: Its second-order data; must not be changed.

        Returns:
            The tensors that change, in new memory; None, the default, to keep the data of the last
            solve.
        """
        del matrix, data
        return None

    def usable(self, data: Data) -> bool | Tensor:
        """Check finite second-order data, for example for underflow, which would zero gradients.

        Args:
            data: The result of `solve`, in the dtype in which it is kept.

        Returns:
            A bool, or a boolean vector ``[groups]``: False if the solve counts as failed. By
            default True.
        """
        del data
        return True

    @abstractmethod
    def apply(self, gradient: Tensor, *, left: Data, right: Data, damping: float) -> Tensor:
        """Multiply a gradient by ``(left ⊗ right + damping I)^-1``.

        Args:
            gradient: ``[groups, out, in]``.
            left: Second-order data of the output factor ``[groups, out, out]``.
            right: Second-order data of the input factor ``[groups, in, in]``.
            damping: The damping of this step; ignored by solvers with ``damps_factors``.

        Returns:
            ``[groups, out, in]``, in a new tensor.
        """

    def apply_right(self, gradient: Tensor, *, right: Data, damping: float) -> Tensor:
        """Multiply a gradient by ``(I ⊗ right + damping I)^-1``: `apply` without a left factor.

        By default the identity is solved and applied like any other factor; override this to leave
        it out.

        Args:
            gradient: ``[groups, out, in]``.
            right: Second-order data of the input factor ``[groups, in, in]``; with
                ``damps_factors`` solved with the whole damping.
            damping: The damping of this step.

        Returns:
            ``[groups, out, in]``, in a new tensor.
        """
        groups, out, _ = gradient.shape
        eye = torch.eye(out, dtype=gradient.dtype, device=gradient.device).repeat(groups, 1, 1)
        left = self.solve(eye, gradient.new_zeros(groups))
        return self.apply(gradient, left=left, right=right, damping=damping)

    def shares(self, mean_traces: Sequence[Tensor], damping: float | Tensor) -> list[Tensor]:
        """Split the damping between the factors of a block; `solve` is given the shares.

        Args:
            mean_traces: ``[groups]`` for each factor of the block: its trace divided by its size.
            damping: The damping of this step; ``[groups]`` if it differs by group.

        Returns:
            ``[groups]`` for each factor; NaN if the scales of the factors are out of the solver's
            range. By default the whole damping for each, which is exact for a block with one factor
            and the identity.
        """
        return [torch.ones_like(trace) * damping for trace in mean_traces]


def solve_stack(
    solver: Solver,
    matrices: Tensor,
    damping: Tensor,
    last: Data | None = None,
    *,
    dtype: torch.dtype | None = None,
    errors: list[str] | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """Solve a stack of factors, without a host synchronisation of its own.

    Solvers may synchronise: eigendecompositions check for convergence, and iterations (`Lazy`,
    `OrthogonalIteration`, `NewtonSchulz`) test a residual, once per call.

    Args:
        solver: The solver.
        matrices: ``[groups, n, n]``, or diagonals ``[groups, n]``.
        damping: ``[groups]``, the share of each; a share of NaN marks a failure.
        last: The data of the last solve of all groups, if this rank holds them.
        dtype: The dtype of the returned data; by default that of ``matrices``.
        errors: Takes the errors of groups whose factorisation fails.

    Returns:
        The second-order data ``[groups, ...]``, and a boolean vector ``[groups]`` on the device:
        False for failed groups, whose data are undefined (see `retry`).
    """
    try:
        if last:
            solved = solver.solve_again(matrices, damping, last)
        else:
            solved = solver.solve(matrices, damping)
    except LinAlgError as error:
        solved = _apart(solver, matrices, damping, error, [] if errors is None else errors)
    data: dict[str, Tensor] = {}
    largest: list[Tensor] = []
    for name, solution in solved.items():
        # The same layout on every rank: products with other strides round differently.
        tensor = solution.to(dtype or matrices.dtype).contiguous()
        if memory_of(tensor) == memory_of(matrices):
            tensor = tensor.clone()  # the factor changes in place at the next statistics
        data[name] = tensor
        # One number for each group: NaN or infinite where any entry is.
        largest.append(_largest(tensor, len(matrices)))
    if not (largest and solver.damps_factors):  # else the damping is in the data
        largest.append(damping)
    good = functools.reduce(torch.maximum, largest) < math.inf
    usable = _usable(solver, data, len(matrices))
    if usable is not True:
        good = good & usable
    return data, good


@dataclass(frozen=True, eq=False)
class Problem:
    """Factors to be solved, side by side: the arguments of `solve_stack`."""

    solver: Solver
    matrices: Tensor
    damping: Tensor
    last: Data = field(default_factory=dict)

    def joins(self, other: Problem) -> bool:
        """Return whether both can be solved by one call."""
        a, b = self.matrices, other.matrices
        if (a.shape[1:], a.dtype, a.device) != (b.shape[1:], b.dtype, b.device):
            return False
        settings = (self.damping.dtype, self.last.keys(), self.solver)
        return settings == (other.damping.dtype, other.last.keys(), other.solver)


def solve_stacks(problems: Sequence[Problem]) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Solve factors of many stacks, by one call for each size.

    Returns:
        The result of `solve_stack` for each.
    """
    together: list[list[int]] = []
    for number, problem in enumerate(problems):
        for numbers in together:
            if problems[numbers[0]].joins(problem):
                numbers.append(number)
                break
        else:
            together.append([number])
    results: dict[int, tuple[dict[str, Tensor], Tensor]] = {}
    for numbers in together:
        alike = [problems[number] for number in numbers]
        if len(alike) == 1:
            problem = alike[0]
            solved = solve_stack(problem.solver, problem.matrices, problem.damping, problem.last)
            results[numbers[0]] = solved
        else:
            results.update(zip(numbers, _together(alike), strict=True))
    return [results[number] for number in range(len(problems))]


def _together(problems: Sequence[Problem]) -> list[tuple[dict[str, Tensor], Tensor]]:
    """Solve factors of one size by one call."""
    first = problems[0]
    last: dict[str, Tensor] = {}
    for name in first.last:
        last[name] = torch.cat([problem.last[name] for problem in problems])
    matrices = [problem.matrices for problem in problems]
    damping = torch.cat([problem.damping for problem in problems])
    data, good = solve_stack(first.solver, torch.cat(matrices), damping, last)
    sizes = list(map(len, matrices))
    parts: list[dict[str, Tensor]] = [{} for _ in problems]
    for name, tensor in data.items():
        for part, piece in zip(parts, _pieces(tensor, sizes), strict=True):
            part[name] = piece
    return list(zip(parts, good.split(sizes), strict=True))


def _pieces(tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Return copies of parts of a tensor: stacks keep their data for different times."""
    if len(tensor) != sum(sizes):
        return list(itertools.repeat(tensor, len(sizes)))  # each fails the check of its shape
    split: Any = torch.split_with_sizes_copy  # in torch's stub it returns None
    pieces: Sequence[Tensor] = split(tensor, sizes)
    return pieces


def retry(
    solver: Solver, matrices: Tensor, damping: Tensor, data: Data, failed: Sequence[int]
) -> tuple[dict[str, Tensor], dict[int, str]]:
    """Solve failed groups again in float64, from scratch.

    Args:
        solver: The solver.
        matrices: ``[groups, n, n]`` or ``[groups, n]``, as for `solve_stack`.
        damping: ``[groups]``, as for `solve_stack`.
        data: The data that `solve_stack` returned.
        failed: The indices of the failed groups.

    Returns:
        The data with the new results in place, in the dtype of ``matrices``, and the reason for
        each group that failed again, by its index.
    """
    if not failed:
        return dict(data), {}
    groups, errors = torch.tensor(failed, device=matrices.device), list[str]()
    dtype, shares = matrices.dtype, damping[groups].double()
    doubles = matrices[groups].double()
    new, good = solve_stack(solver, doubles, shares, dtype=dtype, errors=errors)
    reasons: dict[int, str] = {}
    for number, (group, is_good) in enumerate(zip(failed, good.tolist(), strict=True)):
        if not is_good:
            group_data = {name: tensor[number] for name, tensor in new.items()}
            reasons[group] = _reason(group_data, shares[number], dtype, errors)
    return {n: tensor.index_copy(0, groups, new[n]) for n, tensor in data.items()}, reasons


def _apart(
    solver: Solver, matrices: Tensor, damping: Tensor, error: Exception, errors: list[str]
) -> dict[str, Tensor]:
    """Call a solver that has raised group by group, with NaN for groups that fail."""
    if len(matrices) == 1:
        errors.append(str(error))
        kind: Literal["psd", "diagonal"] = "psd" if matrices.dim() == 3 else "diagonal"
        specs = solver.tensors(FactorSpec("", "left", 1, matrices.shape[-1], kind=kind))
        return {name: matrices.new_full(spec.shape, math.nan) for name, spec in specs.items()}
    parts = []
    for matrix, share in zip(matrices.split(1), damping.split(1), strict=True):
        try:
            parts.append(solver.solve(matrix, share))
        except LinAlgError as group_error:
            parts.append(_apart(solver, matrix, share, group_error, errors))
    data: dict[str, Tensor] = {}
    for name in parts[0]:
        data[name] = torch.cat([part[name] for part in parts])
    return data


def _largest(tensor: Tensor, groups: int) -> Tensor:
    """Return the largest absolute value of each group, ``[groups]``; NaN if any entry is."""
    norm: Tensor
    if tensor.shape[:1] != (groups,):
        norm = torch.linalg.vector_norm(tensor, math.inf)
        return norm.expand(groups)
    norm = torch.linalg.vector_norm(tensor.reshape(groups, -1), math.inf, dim=1)
    return norm


def _usable(solver: Solver, data: Data, groups: int) -> bool | Tensor:
    """Call `Solver.usable`; if it returns one False for several groups, call it group by group."""
    usable = solver.usable(data)
    if isinstance(usable, Tensor) or usable or groups == 1:
        return usable
    usable_groups: list[bool] = []
    for group in range(groups):
        group_data = {name: tensor[group : group + 1] for name, tensor in data.items()}
        usable_groups.append(bool(solver.usable(group_data)))
    return torch.tensor(usable_groups, device=next(iter(data.values())).device)


def _reason(data: Data, damping: Tensor, dtype: torch.dtype, errors: Sequence[str]) -> str:
    if errors:
        return errors[-1]
    if not bool(damping.isfinite().all()):
        return (
            f"its eigenvalues times those of the other factor are beyond {dtype}: scale the loss, "
            f"or pass Statistics(dtype=torch.float64)"
        )
    if all(bool(tensor.isfinite().all()) for tensor in data.values()):
        return f"{dtype} cannot hold the result: its scale is out of range"
    return "the result is not finite: the damped factor is not positive-definite"


def replace_groups(
    data: Data, chosen: Tensor, solve: Callable[[Tensor], Data]
) -> dict[str, Tensor]:
    """Replace the data of the groups in a mask ``[groups]``; synchronises with the device once."""
    groups = chosen.nonzero().flatten()
    if not len(groups):
        return dict(data)
    new = solve(groups)
    return {name: tensor.index_copy(0, groups, new[name]) for name, tensor in data.items()}


def mean_trace(matrix: Tensor) -> Tensor:
    """Compute trace divided by size, ``[groups]``, of matrices or of diagonals ``[groups, n]``."""
    diagonal = matrix.diagonal(dim1=-2, dim2=-1) if matrix.dim() == 3 else matrix
    return diagonal.mean(-1, dtype=torch.float64).to(diagonal.dtype)  # the sum may overflow


def symmetric(matrix: Tensor) -> Tensor:
    """Return the full symmetric matrices ``[groups, n, n]``, given their lower triangles."""
    return matrix.tril() + matrix.tril(-1).mT
