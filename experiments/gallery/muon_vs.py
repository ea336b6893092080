"""Muon-VS: Muon of momentum over the deviation of gradients from it (Li, Fan and Li, 2026).

"Variance-Adaptive Muon: Accelerating LLM Pretraining with NSR-Modulated and Variance-Scaled
Momentum", arXiv 2601.14603, its variance-scaled form. With the gradient G, ``[out, in]``::

    c <- b c + b (1 - b) (m - G)^2        m <- b m + (1 - b) G
    X = (G + b / (1 - b) m / (1 - b^t)) / sqrt(c / (1 - b^t) + eps)
    update = sqrt(max(1, out / in)) NewtonSchulz(X)

It is a chain: X, and Muon's last stages. The paper leaves the scale of the last line to the rate.

To reproduce: validation loss against steps of GPT-2 and LLaMA models, beside Muon.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import soframe
from soframe.layers import BlockShape
from soframe.methods import Chain, Direction, Given, MatchRMS, Orthogonalise, WithoutFactors


@dataclass(frozen=True)
class OverDeviation(WithoutFactors):
    """Nesterov's momentum over the running deviation of its inputs: a stage.

    Attributes:
        beta: The decay of momentum and variance.
        eps: Added to the variance.
    """

    elementwise = True

    beta: float = 0.95
    eps: float = 1e-8

    def state(self, shape: BlockShape) -> Mapping[str, soframe.TensorSpec]:
        return {name: soframe.TensorSpec(tuple(shape)) for name in ("mean", "variance")}

    def direct(self, step: Given) -> Direction:
        new, before, beta = step.incoming, step.state["mean"], self.beta
        weight = beta * (1 - beta)
        variance = (beta * step.state["variance"]).addcmul(before - new, before - new, value=weight)
        mean = before.lerp(new, 1 - beta)
        correction = 1 - beta ** (step.updates + 1)
        ahead = new + beta / (1 - beta) * mean / correction
        update = ahead / (variance / correction + self.eps).sqrt()
        return Direction(update, {"mean": mean, "variance": variance})


@soframe.register("method", "muon-vs")
@dataclass(frozen=True, init=False)
class MuonVS(Chain):
    """Momentum over its deviation, orthogonalised, for hidden matrices.

    Args:
        beta: The decay of momentum and variance.
        eps: Added to the variance.
        steps: The Newton-Schulz iterations.
    """

    bibtex = """\
@misc{li2026muonvs,
  author = {Li, Jingru and Fan, Yibo and Li, Huan},
  title = {Variance-Adaptive {Muon}: Accelerating {LLM} Pretraining with {NSR}-Modulated and Variance-Scaled Momentum},
  year = {2026},
  eprint = {2601.14603},
  archiveprefix = {arXiv},
}
"""  # noqa: E501

    def __init__(self, beta: float = 0.95, *, eps: float = 1e-8, steps: int = 5) -> None:
        super().__init__((OverDeviation(beta, eps), Orthogonalise(steps), MatchRMS()))
