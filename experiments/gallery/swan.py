"""SWAN: the gradient with standardised rows, whitened; no state (Ma et al., 2024).

"SWAN: SGD with Normalization and Whitening Enables Stateless LLM Training", arXiv 2412.13148. With
the gradient G, ``[out, in]``::

    X = rows of G less their means, over their standard deviations
    Y = (X X^T)^(-1/2) X        update = Y |X| / |Y|

It is a chain: the first line, the nearest semi-orthogonal matrix, which is Y, and its length: the
rows of X have length ``sqrt(in)``. The iterations are Polar Express's, not the paper's.

To reproduce: perplexity of LLaMA models of 60M to 1.3B parameters on C4 at the memory of SGD; the
two largest reach Adam's with half the tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

import soframe
from soframe.methods import Chain, Direction, Given, Orthogonalise, WithoutFactors


@dataclass(frozen=True)
class StandardiseRows(WithoutFactors):
    """Rows less their means, over their standard deviations: a stage."""

    joint = False

    def direct(self, step: Given) -> Direction:
        centred = step.incoming - step.incoming.mean(2, keepdim=True)
        deviation = centred.square().mean(2, keepdim=True).sqrt()
        return Direction(centred / deviation.where(deviation > 0, 1.0))


@dataclass(frozen=True)
class UnitEntries(WithoutFactors):
    """The input at a root mean square of one, in each group: a stage."""

    joint = False

    def direct(self, step: Given) -> Direction:
        norm = torch.linalg.matrix_norm(step.incoming, keepdim=True)  # [groups, 1, 1]
        length = math.sqrt(math.prod(step.incoming.shape[1:]))
        return Direction(step.incoming * (length / norm.where(norm > 0, 1.0)))


@soframe.register("method", "swan")
@dataclass(frozen=True, init=False)
class SWAN(Chain):
    """The gradient, standardised and whitened, for hidden matrices.

    Args:
        steps: The Newton-Schulz iterations.
    """

    bibtex = """\
@inproceedings{ma2025swan,
  author = {Ma, Chao and Gong, Wenbo and Scetbon, Meyer and Meeds, Edward},
  title = {{SWAN}: {SGD} with Normalization and Whitening Enables Stateless {LLM} Training},
  booktitle = {Proceedings of the 42nd International Conference on Machine Learning},
  year = {2025},
  eprint = {2412.13148},
  archiveprefix = {arXiv},
}
"""

    def __init__(self, steps: int = 8) -> None:
        whiten = Orthogonalise(steps, "polar-express")
        super().__init__((StandardiseRows(), whiten, UnitEntries()))
