"""MARS-M: Muon of gradients whose variance is reduced (Liu, Yuan and Gu, 2025).

"MARS-M: When Variance Reduction Meets Matrices", arXiv 2510.21800, in its approximate form, which
takes the gradient of the step before in place of a second pass over the batch::

    c = G + scaling b / (1 - b) (G - G_before)        c <- c / max(1, |c|)
    m <- b m + (1 - b) c
    update = 0.2 sqrt(max(out, in)) NewtonSchulz(m)

It is a chain: the corrected momentum and Muon's last stages. |c| is the norm of each matrix.

To reproduce: losses of language models and of image classifiers against steps, beside Muon, AdamW
and MARS-AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

import soframe
from soframe.layers import BlockShape
from soframe.methods import Chain, Direction, Given, MatchRMS, Orthogonalise, WithoutFactors


@dataclass(frozen=True)
class CorrectedMomentum(WithoutFactors):
    """The running mean of gradients, each corrected by its change, of norm one at most: a stage.

    Attributes:
        beta: The decay of the mean.
        scaling: The weight of the correction.
    """

    joint = False

    beta: float = 0.95
    scaling: float = 0.025

    def state(self, shape: BlockShape) -> Mapping[str, soframe.TensorSpec]:
        return {name: soframe.TensorSpec(tuple(shape)) for name in ("mean", "before")}

    def direct(self, step: Given) -> Direction:
        new = step.incoming
        before = step.state["before"] if step.updates else new
        weight = self.scaling * self.beta / (1 - self.beta)
        corrected = new + weight * (new - before)
        norm = torch.linalg.matrix_norm(corrected, keepdim=True)  # [groups, 1, 1]
        mean = step.state["mean"].lerp(corrected / norm.clamp(min=1), 1 - self.beta)
        return Direction(mean.clone(), {"mean": mean, "before": new.clone()})


@soframe.register("method", "mars-muon")
@dataclass(frozen=True, init=False)
class MARSMuon(Chain):
    """Variance-reduced momentum, orthogonalised, at AdamW's size, for hidden matrices.

    Args:
        beta: The decay of the momentum.
        scaling: The weight of the correction.
        steps: The Newton-Schulz iterations.
    """

    bibtex = """\
@misc{liu2025marsm,
  author = {Liu, Yifeng and Yuan, Angela and Gu, Quanquan},
  title = {{MARS-M}: When Variance Reduction Meets Matrices},
  year = {2025},
  eprint = {2510.21800},
  archiveprefix = {arXiv},
}
"""

    def __init__(self, beta: float = 0.95, *, scaling: float = 0.025, steps: int = 5) -> None:
        momentum = CorrectedMomentum(beta, scaling)
        super().__init__((momentum, Orthogonalise(steps), MatchRMS("rms")))
