"""Solve a factor again only when it has changed.

The change since the last solve is estimated from a sketch: for a matrix S of r independent standard
normal columns, ``E |M S|_F^2 = r |M|_F^2``, so ``|F S - F_last S|_F / |F_last S|_F`` tells how far
the factor is from that of the last solve, for r products with a vector instead of a factorisation.
The sketch of the last solve is second-order data: it travels, is saved and resumed with the rest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.solvers.base import Solver, whole
from soframe.specs import FactorSpec, TensorSpec

_COLUMNS = 8


@dataclass(frozen=True)
class Lazy(Solver):
    """A solver that keeps what it has of a factor that has hardly changed.

    The owner of a factor decides, at each of its solves, and hands on the data of the last solve or
    new ones; so there is nothing that ranks have to agree on, and as many bytes travel as ever, and
    a few more for the sketch. Owners that are no gradient workers have no last data, and always
    solve.

    Attributes:
        solver: The solver within.
        tolerance: The largest change, relative to the factor's Frobenius norm, and of the factor's
            share of the damping where the solver within damps factors, that is not worth a solve.
    """

    solver: Solver
    tolerance: float = 0.05

    def __post_init__(self) -> None:
        if not self.tolerance >= 0:
            raise ValueError(f"Lazy: tolerance must not be negative, not {self.tolerance!r}")
        object.__setattr__(self, "damps_factors", self.solver.damps_factors)
        object.__setattr__(self, "follows", self.solver.follows)
        object.__setattr__(self, "alone", self.solver.alone)

    def unsupported(self, factors: Sequence[FactorSpec]) -> str | None:
        """See `Solver.unsupported`: a diagonal is solved in no time, and has no sketch."""
        if (why := super().unsupported(factors)) is not None:
            return why
        return self.solver.unsupported(factors)

    def tensors(self, factor: FactorSpec) -> dict[str, TensorSpec]:
        """See `Solver.tensors`: the inner solver's, the sketch, and the share of the damping."""
        return {
            **self.solver.tensors(factor),
            "sketch": TensorSpec((factor.groups, factor.size, _COLUMNS)),
            "share": TensorSpec((factor.groups,)),
        }

    def shares(self, mean_traces: Sequence[Tensor], damping: float | Tensor) -> list[Tensor]:
        """See `Solver.shares`."""
        return self.solver.shares(mean_traces, damping)

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        """See `Solver.solve`."""
        reference = {"sketch": sketch(matrix), "share": damping.clone()}
        return {**self.solver.solve(matrix, damping), **reference}

    def solve_again(
        self, matrix: Tensor, damping: Tensor, last: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """See `Solver.solve_again`: the last data, if the factor is still nearly the same."""
        now, before = sketch(matrix), last["sketch"]
        # Norms of numbers that are at most one: squares of others may be zero or infinite.
        scale = before.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(now.dtype).tiny)
        changes = torch.linalg.matrix_norm(now / scale - before / scale)
        small = changes <= self.tolerance * torch.linalg.matrix_norm(before / scale)
        if self.damps_factors:
            small &= (damping - last["share"]).abs() <= self.tolerance * last["share"]
        if bool(small.all()):
            return dict(last)
        reference = {"sketch": now, "share": damping.clone()}
        return {**self.solver.solve_again(matrix, damping, last), **reference}

    def follow(self, matrix: Tensor, data: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """See `Solver.follow`."""
        return self.solver.follow(matrix, data)

    def usable(self, data: Mapping[str, Tensor]) -> bool:
        """See `Solver.usable`."""
        return self.solver.usable(data)

    def apply(
        self,
        gradient: Tensor,
        *,
        left: Mapping[str, Tensor],
        right: Mapping[str, Tensor],
        damping: float,
    ) -> Tensor:
        """See `Solver.apply`."""
        return self.solver.apply(gradient, left=left, right=right, damping=damping)

    def apply_right(
        self, gradient: Tensor, *, right: Mapping[str, Tensor], damping: float
    ) -> Tensor:
        """See `Solver.apply_right`."""
        return self.solver.apply_right(gradient, right=right, damping=damping)


def sketch(matrix: Tensor) -> Tensor:
    """Return the products of a factor with fixed random vectors.

    Args:
        matrix: ``[groups, n, n]``, of which the lower triangle is read.

    Returns:
        ``[groups, n, 8]``.
    """
    generator = torch.Generator(device="cpu").manual_seed(0)
    columns = torch.randn(
        matrix.shape[-1], _COLUMNS, generator=generator, dtype=torch.float64, device="cpu"
    )
    return whole(matrix) @ columns.to(matrix)
