"""The base class of solvers that wrap another solver."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from soframe.registry import KINDS
from soframe.solvers.base import Solver
from soframe.specs import Data, FactorSpec, TensorSpec


@dataclass(frozen=True)
class Around(Solver):
    """Delegates to an inner solver; a subclass overrides the methods that it changes.

    Attributes:
        solver: The inner solver; or its name or class.
    """

    solver: Solver

    def __post_init__(self) -> None:
        object.__setattr__(self, "solver", KINDS["solver"].build(self.solver, Solver))
        for name in ("damps_factors", "follows"):
            object.__setattr__(self, name, getattr(self.solver, name))

    def unsupported(self, factors: Sequence[FactorSpec]) -> str | None:
        return super().unsupported(factors) or self.solver.unsupported(factors)

    def tensors(self, factor: FactorSpec) -> dict[str, TensorSpec]:
        return self.solver.tensors(factor)

    def shares(self, mean_traces: Sequence[Tensor], damping: float | Tensor) -> list[Tensor]:
        return self.solver.shares(mean_traces, damping)

    def follow(self, matrix: Tensor, data: Data) -> dict[str, Tensor] | None:
        return self.solver.follow(matrix, data)

    def usable(self, data: Data) -> bool | Tensor:
        return self.solver.usable(data)

    def apply(self, gradient: Tensor, *, left: Data, right: Data, damping: float) -> Tensor:
        return self.solver.apply(gradient, left=left, right=right, damping=damping)

    def apply_right(self, gradient: Tensor, *, right: Data, damping: float) -> Tensor:
        return self.solver.apply_right(gradient, right=right, damping=damping)
