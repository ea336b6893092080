"""NorMuon: Muon whose rows have one size (Li et al., 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from soframe.layers.layout import BlockShape
from soframe.methods.adam import require_eps
from soframe.methods.base import Direction, Given, Method
from soframe.methods.chain import Chain
from soframe.methods.momentum import Momentum, entries, require_beta
from soframe.methods.orthogonal import RMS, Coefficients, Orthogonal
from soframe.registry import register
from soframe.specs import FactorSpec, TensorSpec


@register("method", "normalise-rows")
@dataclass(frozen=True)
class NormaliseRows(Method):
    """Rows over their running root mean squares, at the norm that they had: a stage.

    NorMuon's stage after `Orthogonalise` (Li et al., 2025, algorithm 1). With ``x`` what it is
    given, of rows i and columns j::

        v_i <- b v_i + (1 - b) mean_j x_ij^2        y_ij = x_ij / (sqrt(v_i) + eps)
        direction = y |x| / |y|

    The paper gives the direction the length ``0.2 sqrt(out in)``: that of ``MatchRMS("rms")`` after
    a matrix that is orthogonal. The length takes away what a correction of bias would do.

    Attributes:
        beta: What v keeps of its past.
        eps: Is added to the root.

    Raises:
        ValueError: If a setting is out of range.
    """

    joint = False
    clipped = False
    damped = False
    starts_at_once = True

    beta: float = 0.95
    eps: float = 1e-8

    def __post_init__(self) -> None:
        require_beta("NormaliseRows", "beta", self.beta)
        require_eps("NormaliseRows", self.eps)

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        del shape
        return ()

    def state(self, shape: BlockShape) -> Mapping[str, TensorSpec]:
        groups, out, _ = shape
        return {"rows": TensorSpec((groups, out, 1))}

    def direct(self, given: Given) -> Direction:
        matrix = given.incoming
        squares = given.state["rows"].lerp(matrix.square().mean(-1, keepdim=True), 1 - self.beta)
        rows = matrix / (squares.sqrt() + self.eps)
        wanted, length = (
            torch.linalg.vector_norm(one, dim=(-2, -1), keepdim=True) for one in (matrix, rows)
        )
        return Direction(rows * (wanted / length.where(length > 0, 1.0)), {"rows": squares})

    def effort(self, shape: BlockShape) -> float:
        return entries(shape)


@register("method", "normuon")
@dataclass(frozen=True, init=False)
class NorMuon(Chain):
    """Momentum, orthogonalised, with rows of one size, at the scale of the shape.

    Vectors, embeddings and the head are not for it: give them to ``auxiliary="adamw"``.

    Args:
        momentum: See `Momentum`.
        nesterov: See `Momentum`.
        row_beta: See `NormaliseRows`.
        scale: See `MatchRMS`; the paper's is ``"rms"``.
        steps: See `Orthogonalise`.
        coefficients: See `Orthogonalise`.
        dtype: See `Orthogonalise`.
    """

    def __init__(
        self,
        momentum: float = 0.95,
        *,
        nesterov: bool = True,
        row_beta: float = 0.95,
        scale: RMS = "spectral",
        steps: int = 5,
        coefficients: Coefficients = "muon",
        dtype: str | None = None,
    ) -> None:
        end = Orthogonal(scale, steps, coefficients, dtype)
        rows = NormaliseRows(row_beta)
        super().__init__((Momentum(momentum, nesterov), *end.stages(rows)))
