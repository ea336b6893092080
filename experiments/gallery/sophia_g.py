"""Sophia-G: momentum over the diagonal of the Fisher, clipped by entry (Liu et al., 2024).

"Sophia: A Scalable Stochastic Second-order Optimizer for Language Model Pre-training", arXiv
2305.14342, with the Gauss-Newton-Bartlett estimator. With a running average h of the diagonal::

    m <- b1 m + (1 - b1) G        update = clip(m / max(scale h, eps), -1, 1)

The paper estimates h from B times the square of the mean gradient for targets that are drawn from
the model. Here h is the mean of the squares of the samples' gradients, which has the same
expectation and less variance: pass ``fisher="monte-carlo"`` for these targets, and
``statistics_every=10``. Of ``fisher="empirical"`` it is another method.

To reproduce: validation loss against steps of GPT models of 125M to 1.5B parameters: Adam's in half
of the steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

import soframe
from soframe.layers import BlockShape
from soframe.methods import Diagonal, Direction, Given
from soframe.specs import VALUE, FactorSpec


@soframe.register("method", "sophia-g")
@dataclass(frozen=True)
class SophiaG(Diagonal):
    """Momentum over the diagonal of the chosen Fisher, with entries of one at most.

    Attributes:
        betas: The decays of m and h.
        scale: Multiplies h; the smaller, the more entries are clipped.
        eps: The least denominator.
    """

    bibtex = """\
@inproceedings{liu2024sophia,
  author = {Liu, Hong and Li, Zhiyuan and Hall, David and Liang, Percy and Ma, Tengyu},
  title = {{Sophia}: A Scalable Stochastic Second-order Optimizer for Language Model Pre-training},
  booktitle = {International Conference on Learning Representations},
  year = {2024},
  eprint = {2305.14342},
  archiveprefix = {arXiv},
}
"""
    clipped = damped = False

    betas: tuple[float, float] = (0.96, 0.99)
    scale: float = 0.05
    eps: float = 1e-12

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        (factor,) = super().factors(shape)
        return (replace(factor, decay=self.betas[1]),)

    def state(self, shape: BlockShape) -> Mapping[str, soframe.TensorSpec]:
        return {"mean": soframe.TensorSpec(tuple(shape))}

    def direct(self, step: Given) -> Direction:
        mean = step.state["mean"].lerp(step.incoming, 1 - self.betas[0])
        if "diagonal" in step.data:
            curvature = step.data["diagonal"][VALUE]
        else:
            curvature = torch.zeros_like(mean)
        denominator = (self.scale * curvature).clamp(min=self.eps)
        return Direction((mean / denominator).clamp(-1, 1), {"mean": mean})
