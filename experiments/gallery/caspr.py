"""CASPR: Shampoo's factors combined by a Kronecker sum (Duvvuri et al., 2024).

"Combining Axes Preconditioners through Kronecker Approximation for Deep Learning", ICLR 2024. With
running averages L and R of ``G G^T`` and ``G^T G``, and the momentum X, ``[out, in]``::

    J = (L^(-1/4) X + X R^(-1/4)) / 2        update = (L^(-1/4) J + J R^(-1/4)) / 2

which is ``(L^(-1/2) X + 2 L^(-1/4) X R^(-1/4) + X R^(-1/2)) / 4``, Shampoo's update being the
middle term. It is a chain: momentum, this stage, and the length of Adam's update by grafting.

To reproduce: validation loss against steps of a language model on C4, and of the graph network on
OGBG-molpcba, beside Shampoo and Adam.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

import soframe
from soframe.layers import BlockShape
from soframe.methods import Candidate, Chain, Direction, Given, Graft, Method, Momentum
from soframe.methods.shampoo import gradient_factors, gradient_moments
from soframe.solvers import Root
from soframe.specs import FactorSpec, SecondOrder


@dataclass(frozen=True)
class KroneckerSum(Method):
    """The square of the mean of both one-sided preconditioners: a stage.

    Attributes:
        decay: The decay of the factors.
        epsilon: Added to eigenvalues, relative to the largest, see `soframe.solvers.Root`.
        max_size: The longest side of a matrix; longer ones are skipped.
    """

    joint = clipped = damped = False

    decay: float = 0.999
    epsilon: float = 1e-6
    max_size: int = 8192

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        return gradient_factors(shape, self.decay)

    def observe(self, gradient: Tensor, data: SecondOrder) -> Mapping[str, Tensor]:
        return gradient_moments(gradient, "LR")

    def solver(self, factor: FactorSpec, default: soframe.Solver) -> soframe.Solver:
        return Root(-1 / 4, self.epsilon)

    def direct(self, step: Given) -> Direction:
        if not {"L", "R"} <= step.data.keys():
            return Direction(step.incoming.clone())
        left, right = step.data["L"]["root"], step.data["R"]["root"]
        half = (left @ step.incoming + step.incoming @ right) / 2
        return Direction((left @ half + half @ right) / 2)

    def unsuited(self, candidate: Candidate) -> str | None:
        too_long = max(candidate.shape[1:]) > self.max_size
        return f"a side is longer than max_size={self.max_size}" if too_long else None


@soframe.register("method", "caspr")
@dataclass(frozen=True, init=False)
class CASPR(Chain):
    """Momentum, preconditioned along both axes and their sum, at the length of Adam's update.

    Args:
        momentum: The decay of the momentum.
        decay: The decay of the factors.
        epsilon: Added to eigenvalues, relative to the largest.
    """

    bibtex = """\
@inproceedings{duvvuri2024caspr,
  author = {Duvvuri, Sai Surya and Devvrit, Fnu and Anil, Rohan and Hsieh, Cho-Jui and Dhillon, Inderjit S.},
  title = {Combining Axes Preconditioners through {K}ronecker Approximation for Deep Learning},
  booktitle = {International Conference on Learning Representations},
  year = {2024},
}
"""  # noqa: E501

    def __init__(
        self, momentum: float = 0.9, *, decay: float = 0.999, epsilon: float = 1e-6
    ) -> None:
        stage = KroneckerSum(decay, epsilon)
        super().__init__((Momentum(momentum, nesterov=True), stage, Graft("adamw")))
