"""Muon^2: Muon of momentum over the roots of running squares (Liu et al., 2026).

"Muon$^2$: Boosting Muon via Adaptive Second-Moment Preconditioning", arXiv 2604.09967. With the
gradient G, ``[out, in]``::

    m <- b1 m + (1 - b1) G        v <- b2 v + (1 - b2) G^2
    update = sqrt(max(1, out / in)) NewtonSchulz(m / sqrt(v + eps))

It is a chain: the quotient, whose scale is immaterial, and Muon's last stages, with three
iterations in place of five, as the quotient's singular values are closer together.

To reproduce: validation loss against steps of GPT and LLaMA models of 60M to 1.3B parameters, by
the number of iterations, beside Muon.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import soframe
from soframe.layers import BlockShape
from soframe.methods import Chain, Direction, Given, MatchRMS, Orthogonalise, WithoutFactors
from soframe.methods.momentum import second_moment


@dataclass(frozen=True)
class Quotient(WithoutFactors):
    """The momentum over the roots of running squares, without bias correction: a stage.

    Attributes:
        betas: The decays of m and v.
        eps: Added to v.
    """

    elementwise = True

    betas: tuple[float, float] = (0.95, 0.95)
    eps: float = 1e-8

    def state(self, shape: BlockShape) -> Mapping[str, soframe.TensorSpec]:
        return {name: soframe.TensorSpec(tuple(shape)) for name in ("mean", "square")}

    def direct(self, step: Given) -> Direction:
        mean = step.state["mean"].lerp(step.incoming, 1 - self.betas[0])
        square = second_moment(step.state["square"], step.incoming, self.betas[1])
        update = mean / (square + self.eps).sqrt()
        return Direction(update, {"mean": mean, "square": square})


@soframe.register("method", "muon-squared")
@dataclass(frozen=True, init=False)
class MuonSquared(Chain):
    """Adam's quotient, orthogonalised, for hidden matrices.

    Args:
        betas: The decays of m and v.
        eps: Added to v.
        steps: The Newton-Schulz iterations.
    """

    bibtex = """\
@misc{liu2026muonsquared,
  author = {Liu, Ziyue and Zhang, Ruijie and Wang, Zhengyang and Zhao, Yequan and Su, Yupeng and Yang, Zi and Zhang, Zheng},
  title = {{Muon$^2$}: Boosting {Muon} via Adaptive Second-Moment Preconditioning},
  year = {2026},
  eprint = {2604.09967},
  archiveprefix = {arXiv},
}
"""  # noqa: E501

    def __init__(
        self, betas: tuple[float, float] = (0.95, 0.95), *, eps: float = 1e-8, steps: int = 3
    ) -> None:
        super().__init__((Quotient(betas, eps), Orthogonalise(steps), MatchRMS()))
