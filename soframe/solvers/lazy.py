"""Solve a factor again only when it has changed.

The change since the last solve is estimated from a sketch: for a matrix S of r independent standard
normal columns, ``E |M S|_F^2 = r |M|_F^2``, so ``|F S - F_last S|_F / |F_last S|_F`` estimates the
relative change of the factor since the last solve, for r matrix-vector products instead of a
factorisation. The sketch of the last solve is second-order data, and is sent and saved as such.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.solvers.around import Around
from soframe.solvers.base import replace_groups, symmetric
from soframe.specs import Data, FactorSpec, TensorSpec

_COLUMNS = 8


@dataclass(frozen=True)
class Lazy(Around):
    """Skip the solve of groups whose factor has hardly changed since their last solve.

    The owner of a factor decides, and sends either the data of the last solve or new ones, with the
    sketch; the other ranks need no agreement. Owners that are not gradient workers keep no data,
    and always solve.

    Attributes:
        solver: The inner solver.
        tolerance: The largest change without a solve, relative to the factor's Frobenius norm, and
            to its share of the damping where the solver within damps factors.
    """

    tolerance: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tolerance >= 0:
            raise ValueError(f"Lazy: tolerance must not be negative, not {self.tolerance!r}")

    def tensors(self, factor: FactorSpec) -> dict[str, TensorSpec]:
        return {
            **self.solver.tensors(factor),
            "sketch": TensorSpec((factor.groups, factor.size, _COLUMNS)),
            "share": TensorSpec((factor.groups,)),
        }

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        reference = {"sketch": sketch(matrix), "share": damping.clone()}
        return {**self.solver.solve(matrix, damping), **reference}

    def solve_again(self, matrix: Tensor, damping: Tensor, last: Data) -> dict[str, Tensor]:
        now, before = sketch(matrix), last["sketch"]
        # Scaled to at most one, so that squares neither underflow nor overflow.
        scale = before.abs().amax((-2, -1), keepdim=True).clamp(min=torch.finfo(now.dtype).tiny)
        changes = torch.linalg.matrix_norm(now / scale - before / scale)
        small = changes <= self.tolerance * torch.linalg.matrix_norm(before / scale)
        if self.damps_factors:
            small &= (damping - last["share"]).abs() <= self.tolerance * last["share"]

        def solve(groups: Tensor) -> dict[str, Tensor]:
            before = {name: tensor[groups] for name, tensor in last.items()}
            data = self.solver.solve_again(matrix[groups], damping[groups], before)
            return {**data, "sketch": now[groups], "share": damping[groups]}

        return replace_groups(last, ~small, solve)


def sketch(matrix: Tensor) -> Tensor:
    """Multiply ``[groups, n, n]`` by fixed random vectors, ``[groups, n, 8]``."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    columns = torch.randn(
        matrix.shape[-1], _COLUMNS, generator=generator, dtype=torch.float64, device="cpu"
    )
    return symmetric(matrix) @ columns.to(matrix)
