"""SinkGD: the gradient with rows and columns of one length; no state (Scetbon et al., 2025).

"Gradient Multi-Normalization for Stateless and Scalable LLM Training", arXiv 2502.06742. With the
gradient G, ``[out, in]``, in the manner of Sinkhorn ``iterations`` times::

    X <- sqrt(in) X, rows of length one        X <- sqrt(out) X, columns of length one

so that the root mean square of the update is one.

To reproduce: perplexity of LLaMA models of 60M to 1B parameters on C4 at the memory of SGD.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

import soframe
from soframe.methods import Candidate, Direction, Given, WithoutFactors


@soframe.register("method", "sinkgd")
@dataclass(frozen=True)
class SinkGD(WithoutFactors):
    """The gradient with normalised rows and columns, for matrices.

    Attributes:
        iterations: How often rows, then columns, are normalised.
    """

    bibtex = """\
@misc{scetbon2025sinkgd,
  author = {Scetbon, Meyer and Ma, Chao and Gong, Wenbo and Meeds, Edward},
  title = {Gradient Multi-Normalization for Stateless and Scalable {LLM} Training},
  year = {2025},
  eprint = {2502.06742},
  archiveprefix = {arXiv},
}
"""
    joint = False

    iterations: int = 5

    def direct(self, step: Given) -> Direction:
        matrix = step.incoming
        for _ in range(self.iterations):
            matrix = normalised(normalised(matrix, 2), 1)
        return Direction(matrix)

    def unsuited(self, candidate: Candidate) -> str | None:
        is_vector = min(candidate.shape[1:]) == 1
        return "a vector has no rows and columns" if is_vector else None


def normalised(matrix: Tensor, dim: int) -> Tensor:
    """Return rows (``dim=2``) or columns (1) whose entries have a root mean square of one."""
    norm = torch.linalg.vector_norm(matrix, dim=dim, keepdim=True)
    scale: Tensor = math.sqrt(matrix.shape[dim]) / norm.where(norm > 0, 1.0)
    return matrix * scale
