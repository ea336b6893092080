"""MKOR: K-FAC's inverses, kept by rank-one updates (Mozaffari et al., 2023).

"MKOR: Momentum-Enabled Kronecker-Factor-Based Optimizer Using Rank-1 Updates", arXiv 2306.01685.
With the means a of a layer's inputs and g of its output gradients over the batch, both factors are
running averages of outer products, ``F <- b F + (1 - b) v v^T``, of which only the inverse J is
kept, by Sherman and Morrison's formula::

    J <- (J - (1 - b) J v v^T J / (b + (1 - b) v^T J v)) / b
    J <- keep J + (1 - keep) I,  if an entry of J is above ``limit``
    Y = J_g G J_a        Y <- Y |G| / |Y|

and the update is the momentum of Y. Ranks send two vectors for each layer. It takes one rank-one
update at each step, so ``statistics_every`` must be 1. The paper's hybrid, which ends with a method
of the first order, is not here.

To reproduce: pre-training loss of BERT-Large against steps and time beside LAMB and KAISA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import soframe
from soframe.layers import BlockShape
from soframe.methods import Chain, Direction, Eva, Given, Momentum
from soframe.methods.graft import at_length
from soframe.specs import VALUE, FactorSpec


@dataclass(frozen=True)
class RankOne(Eva):
    """The gradient times both inverses, at its own length: a stage.

    Attributes:
        beta: The decay of the factors.
        limit: The largest entry of an inverse before it is brought nearer to the identity.
        keep: The weight of an inverse that is too large.
    """

    clipped = damped = False

    beta: float = 0.95
    limit: float = 2.0
    keep: float = 0.9

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        return tuple(replace(factor, decay=0.0) for factor in super().factors(shape))

    def state(self, shape: BlockShape) -> Mapping[str, soframe.TensorSpec]:
        groups, out, into = shape
        sides = (("left", out), ("right", into))  # less the identity, so that they start as it
        return {k: soframe.TensorSpec((groups, n, n), symmetric=True) for k, n in sides}

    def direct(self, step: Given) -> Direction:
        if not {"a", "g"} <= step.data.keys():
            return Direction(step.incoming.clone())
        left = self._updated(step.state["left"], step.data["g"][VALUE])
        right = self._updated(step.state["right"], step.data["a"][VALUE])
        update = at_length(left @ step.incoming @ right, step.incoming)
        return Direction(update, {"left": left - eye(left), "right": right - eye(right)})

    def _updated(self, offset: Tensor, vector: Tensor) -> Tensor:
        inverse = offset + eye(offset)  # [groups, n, n]
        product = inverse @ vector.unsqueeze(2)  # [groups, n, 1]
        curvature = self.beta + (1 - self.beta) * (vector.unsqueeze(1) @ product)
        inverse = (inverse - (1 - self.beta) * product @ product.mT / curvature) / self.beta
        too_large = inverse.abs().amax((1, 2), keepdim=True) > self.limit
        return torch.where(too_large, inverse.lerp(eye(inverse), 1 - self.keep), inverse)


def eye(matrix: Tensor) -> Tensor:
    return torch.eye(matrix.shape[-1]).to(matrix).expand_as(matrix)


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
