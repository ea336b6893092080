"""MKOR: K-FAC's inverses, kept by rank-one updates (Mozaffari et al., 2023).

"MKOR: Momentum-Enabled Kronecker-Factor-Based Optimizer Using Rank-1 Updates", arXiv 2306.01685.
With the means a of a layer's inputs and g of its output gradients over the batch, both factors are
running averages of outer products, ``F <- b F + (1 - b) v v^T``, of which only the inverse J is
kept, by Sherman and Morrison's formula::

    J <- (J - (1 - b) J v v^T J / (b + (1 - b) v^T J v)) / b
    J <- keep J + (1 - keep) I,  if an entry of J is above ``limit``
    Y = J_g G J_a        Y <- Y |G| / |Y|

and the update is the momentum of Y. J is the running factor, and v its statistics: ranks send two
vectors for each layer. The paper's hybrid, which ends with a method of the first order, is not
here.

To reproduce: pre-training loss of BERT-Large against steps and time beside LAMB and KAISA.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

import soframe
from soframe.layers import BlockShape
from soframe.methods import Chain, Direction, Eva, Given, Momentum
from soframe.methods.graft import at_length
from soframe.specs import VALUE, FactorKind, FactorSpec


@dataclass(frozen=True)
class Inverse(FactorKind):
    """The inverse of a running average of outer products, of mean vectors ``[groups, n]``."""

    limit: float = 2.0
    keep: float = 0.9

    def shape(self, factor: FactorSpec) -> tuple[int, ...]:
        return (factor.groups, factor.size)

    def running_shape(self, factor: FactorSpec) -> tuple[int, ...]:
        return (factor.groups, factor.size, factor.size)

    def start(self, factor: FactorSpec) -> Tensor:
        return torch.eye(factor.size).repeat(factor.groups, 1, 1)

    def average(self, running: Tensor, statistics: Tensor, rate: Tensor) -> Tensor:
        vector = statistics.unsqueeze(2)  # [groups, n, 1]
        product = running @ vector
        curvature = 1 - rate + rate * (vector.mT @ product)  # [groups, 1, 1]
        inverse = (running - rate * product @ product.mT / curvature) / (1 - rate)
        too_large = inverse.abs().amax((1, 2), keepdim=True) > self.limit
        eye = torch.eye(inverse.shape[-1]).to(inverse).expand_as(inverse)
        return torch.where(too_large, inverse.lerp(eye, 1 - self.keep), inverse)


@dataclass(frozen=True)
class RankOne(Eva):
    """The gradient times both inverses, at its own length: a stage.

    Attributes:
        beta: The decay of the factors.
    """

    clipped = damped = False

    beta: float = 0.95

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        vectors = super().factors(shape)
        return tuple(replace(vector, kind=Inverse(), decay=self.beta) for vector in vectors)

    def direct(self, step: Given) -> Direction:
        if not {"a", "g"} <= step.data.keys():
            return Direction(step.incoming.clone())
        outputs, inputs = step.data["g"][VALUE], step.data["a"][VALUE]
        return Direction(at_length(outputs @ step.incoming @ inputs, step.incoming))


@soframe.register("method", "mkor")
@dataclass(frozen=True, init=False)
class MKOR(Chain):
    """K-FAC by rank-one inverses, of the loss's own gradients, with momentum."""

    bibtex = """\
@inproceedings{mozaffari2023mkor,
  author = {Mozaffari, Mohammad and Li, Sikan and Zhang, Zhao and Dehnavi, Maryam Mehri},
  title = {{MKOR}: Momentum-Enabled {K}ronecker-Factor-Based Optimizer Using Rank-1 Updates},
  booktitle = {Advances in Neural Information Processing Systems},
  year = {2023},
  eprint = {2306.01685},
  archiveprefix = {arXiv},
}
"""

    def __init__(self, momentum: float = 0.9, *, beta: float = 0.95) -> None:
        super().__init__((RankOne(beta), Momentum(momentum, averaged=False)))
