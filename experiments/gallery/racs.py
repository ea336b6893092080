"""RACS: the gradient over sizes of its rows and columns (Gong et al., 2025).

"Towards Efficient Optimizer Design for LLM via Structured Fisher Approximation with a Low-Rank
Extension", arXiv 2502.07752, row and column scaled SGD. With the gradient G, ``[out, in]``, and
``iterations`` times from ``q = 1``, for the best ``diag(s) ⊗ diag(q)`` to its second moment::

    s_j = sum_i q_i G_ij^2 / |q|^2        q_i = sum_j s_j G_ij^2 / |s|^2

and with running averages of both, at the length ``|Y|`` that may grow by ``growth`` in a step::

    Y_ij = G_ij / sqrt(q_i s_j)        l <- min(|Y|, growth l)        update = scale l Y / |Y|

To reproduce: perplexity of LLaMA models on C4 against steps, up to 1B parameters, at the memory
of SGD.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import soframe
from soframe.layers import BlockShape
from soframe.methods import Candidate, Direction, Given, WithoutFactors

_TINY = 1e-30


@soframe.register("method", "racs")
@dataclass(frozen=True)
class RACS(WithoutFactors):
    """SGD with scaled rows and columns, for matrices.

    Attributes:
        beta: The decay of s and q.
        iterations: The fixed-point iterations of a step.
        growth: The largest growth of the update's length in a step.
        scale: Multiplies the update.
    """

    bibtex = """\
@misc{gong2025racs,
  author = {Gong, Wenbo and Scetbon, Meyer and Ma, Chao and Meeds, Edward},
  title = {Towards Efficient Optimizer Design for {LLM} via Structured {F}isher Approximation with a Low-Rank Extension},
  year = {2025},
  eprint = {2502.07752},
  archiveprefix = {arXiv},
}
"""  # noqa: E501
    joint = False

    beta: float = 0.9
    iterations: int = 5
    growth: float = 1.01
    scale: float = 0.05

    def state(self, shape: BlockShape) -> Mapping[str, soframe.TensorSpec]:
        groups, out, into = shape
        return {
            "rows": soframe.TensorSpec((groups, out, 1)),
            "columns": soframe.TensorSpec((groups, 1, into)),
            "length": soframe.TensorSpec((groups, 1, 1)),
        }

    def direct(self, step: Given) -> Direction:
        rows, columns = self._sizes(step.gradient.square())
        rows = step.state["rows"].lerp(rows, 1 - self.beta)
        columns = step.state["columns"].lerp(columns, 1 - self.beta)
        scaled = step.incoming / (rows * columns + _TINY).sqrt()
        norm = torch.linalg.matrix_norm(scaled, keepdim=True)
        most = self.growth * step.state["length"] if step.updates else norm
        length = torch.minimum(norm, most)
        update = scaled * (self.scale * length / norm.where(norm > 0, 1.0))
        return Direction(update, {"rows": rows, "columns": columns, "length": length})

    def _sizes(self, squares: Tensor) -> tuple[Tensor, Tensor]:
        """Return q ``[groups, out, 1]`` and s ``[groups, 1, in]``."""
        rows = torch.ones_like(squares[:, :, :1])
        for _ in range(self.iterations):
            columns = rows.mT @ squares / (rows.square().sum(1, keepdim=True) + _TINY)
            rows = squares @ columns.mT / (columns.square().sum(2, keepdim=True) + _TINY)
        return rows, columns

    def unsuited(self, candidate: Candidate) -> str | None:
        is_vector = min(candidate.shape[1:]) == 1
        return "a vector has no rows and columns" if is_vector else None
