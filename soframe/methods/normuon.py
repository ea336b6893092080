"""NorMuon: Muon with normalised rows (Li et al., 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from soframe.layers.layout import BlockShape
from soframe.methods.adam import require_eps
from soframe.methods.base import Direction, Given, WithoutFactors
from soframe.methods.chain import Chain
from soframe.methods.graft import norms
from soframe.methods.momentum import require_beta
from soframe.methods.orthogonal import Muon
from soframe.registry import register
from soframe.specs import TensorSpec


@register("method", "normalise-rows")
@dataclass(frozen=True)
class NormaliseRows(WithoutFactors):
    """Divide rows by their running root mean squares, and keep the matrix norm: a stage.

    NorMuon's stage after `Orthogonalise` (Li et al., 2025, algorithm 1). With ``x`` the input of
    the stage, rows i and columns j::

        v_i <- b v_i + (1 - b) mean_j x_ij^2        y_ij = x_ij / (sqrt(v_i) + eps)
        update = y |x| / |y|

    The paper sets the length to ``0.2 sqrt(out in)``, which ``MatchRMS("rms")`` gives to an
    orthogonal matrix. v needs no bias correction, since a common factor cancels in the length.

    Attributes:
        beta: The decay of v.
        eps: Added to the root in the denominator.
    """

    joint = False

    beta: float = 0.95
    eps: float = 1e-8

    def __post_init__(self) -> None:
        require_beta("NormaliseRows", "beta", self.beta)
        require_eps("NormaliseRows", self.eps)

    def state(self, shape: BlockShape) -> Mapping[str, TensorSpec]:
        groups, out, _ = shape
        return {"rows": TensorSpec((groups, out, 1))}

    def direct(self, step: Given) -> Direction:
        matrix = step.incoming  # [groups, out, in]
        # Norms of rows are enough, so that the matrix is multiplied once.
        lengths = torch.linalg.vector_norm(matrix, dim=-1, keepdim=True)  # [groups, out, 1]
        squares = step.state["rows"] * self.beta
        squares.addcmul_(lengths, lengths, value=(1 - self.beta) / matrix.shape[-1])
        roots = squares.sqrt().add_(self.eps)
        # Divided rows are all zero only if the matrix is.
        divided = norms(lengths / roots).clamp_(min=torch.finfo(matrix.dtype).tiny)
        return Direction(matrix * (norms(lengths) / divided / roots), {"rows": squares})


@register("method", "normuon")
@dataclass(frozen=True, init=False)
class NorMuon(Muon):
    """Momentum, orthogonalised, with normalised rows, scaled by the shape (Li et al., 2025).

    Vectors, embeddings and the head are skipped: use ``auxiliary="adamw"`` for them.

    Args:
        momentum: The decay of `Momentum`.
        row_beta: The decay of `NormaliseRows`.
        **settings: As for `Muon`; the scale of the paper is ``"rms"``.
    """

    def __init__(self, momentum: float = 0.95, *, row_beta: float = 0.95, **settings: Any) -> None:
        super().__init__(momentum, **settings)
        average, orthogonalise, match_rms = self.stages
        Chain.__init__(self, (average, orthogonalise, NormaliseRows(row_beta), match_rms))
