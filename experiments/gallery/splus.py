"""SPlus: signs in Shampoo's eigenbasis (Frans, Levine and Abbeel, 2025).

"A Stable Whitening Optimizer for Efficient Neural Network Training", arXiv 2506.07254. With the
gradient G, ``[out, in]``, and the eigenvectors Q_L and Q_R of running averages of ``G G^T`` and
``G^T G``::

    m <- b1 m + (1 - b1) G
    update = 2 / (out + in) Q_L sign(Q_L^T m Q_R) Q_R^T

A vector has no factors: its update is ``constant sign(m)``. Bases follow the factors by one QR in
each solve, as in SOAP, where the paper decomposes anew: of a factor of few gradients rounding would
choose the null space, and the signs in it. The paper evaluates a running average of the weights,
which `torch.optim.swa_utils.AveragedModel` keeps beside any optimizer.

To reproduce: loss against steps of the paper's three Transformer tasks (language, images,
diffusion), where SPlus reaches Adam's validation loss in 44 % of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import soframe
from soframe.layers import BlockShape
from soframe.methods import Direction, Given, Method
from soframe.methods.shampoo import gradient_factors, gradient_moments
from soframe.solvers import Basis
from soframe.specs import FactorSpec, SecondOrder


@soframe.register("method", "splus")
@dataclass(frozen=True)
class SPlus(Method):
    """The sign of the momentum in a slowly changing eigenbasis.

    Attributes:
        beta: The decay of the momentum.
        factor_beta: The decay of the factors.
        constant: The size of the entries of a vector's update.
    """

    bibtex = """\
@misc{frans2025splus,
  author = {Frans, Kevin and Levine, Sergey and Abbeel, Pieter},
  title = {A Stable Whitening Optimizer for Efficient Neural Network Training},
  year = {2025},
  eprint = {2506.07254},
  archiveprefix = {arXiv},
}
"""
    joint = clipped = damped = False

    beta: float = 0.9
    factor_beta: float = 0.999
    constant: float = 0.001

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        _, out, into = shape
        return gradient_factors(shape, self.factor_beta) if min(out, into) > 1 else ()

    def observe(self, gradient: Tensor, data: SecondOrder) -> Mapping[str, Tensor]:
        return gradient_moments(gradient, "LR" if min(gradient.shape[1:]) > 1 else "")

    def solver(self, factor: FactorSpec, default: soframe.Solver) -> soframe.Solver:
        return Basis(ordered=False)

    def state(self, shape: BlockShape) -> Mapping[str, soframe.TensorSpec]:
        return {"momentum": soframe.TensorSpec(tuple(shape))}

    def direct(self, step: Given) -> Direction:
        momentum = step.state["momentum"].lerp(step.incoming, 1 - self.beta)
        if "L" not in step.data:
            return Direction(self.constant * signs(momentum), {"momentum": momentum})
        left, right = step.data["L"]["vectors"], step.data["R"]["vectors"]
        turned = signs(left.mT @ momentum @ right)  # [groups, out, in], in the basis
        scale = 2 / sum(momentum.shape[1:])
        return Direction(scale * left @ turned @ right.mT, {"momentum": momentum})


def signs(matrix: Tensor) -> Tensor:
    """Return signs; zero where an entry is a rounding error of the largest of its group."""
    sizes = matrix.abs()
    rounding = 100 * torch.finfo(matrix.dtype).eps * sizes.amax((1, 2), keepdim=True)
    return torch.where(sizes > rounding, matrix.sign(), 0.0)
