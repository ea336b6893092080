"""MuonEq: Muon of momentum whose rows have one length (Chang et al., 2026).

"MuonEq: Balancing Before Orthogonalization with Lightweight Equilibration", arXiv 2603.28254, its
default, which balances rows. With the gradient G, ``[out, in]``::

    m <- b m + (1 - b) G        X_i = m_i / sqrt(|m_i|^2 + eps) for each row i
    update = 0.2 sqrt(max(out, in)) NewtonSchulz(X)

It is a chain: momentum, rows, and Muon's last stages.

To reproduce: validation perplexity against steps of LLaMA2 models of 130M to 1B parameters on C4,
beside Muon.
"""

from __future__ import annotations

from dataclasses import dataclass

import soframe
from soframe.methods import Chain, Direction, Given, MatchRMS, Momentum, Orthogonalise
from soframe.methods import WithoutFactors as Stage


@dataclass(frozen=True)
class BalanceRows(Stage):
    """The input with rows of length one: a stage.

    Attributes:
        eps: Added to the squared lengths.
    """

    joint = False

    eps: float = 1e-30

    def direct(self, step: Given) -> Direction:
        squares = step.incoming.square().sum(2, keepdim=True)  # [groups, out, 1]
        return Direction(step.incoming * (squares + self.eps).rsqrt())


@soframe.register("method", "muon-eq")
@dataclass(frozen=True, init=False)
class MuonEq(Chain):
    """Momentum with balanced rows, orthogonalised, at AdamW's size, for hidden matrices.

    Args:
        beta: The decay of the momentum.
        steps: The Newton-Schulz iterations.
    """

    bibtex = """\
@misc{chang2026muoneq,
  author = {Chang, Da and Shi, Qiankun and Zhang, Lvgang and Li, Yu and Zhang, Ruijie and Lu, Yao and Liu, Yongxiang and Yuan, Ganzhao},
  title = {{MuonEq}: Balancing Before Orthogonalization with Lightweight Equilibration},
  year = {2026},
  eprint = {2603.28254},
  archiveprefix = {arXiv},
}
"""  # noqa: E501

    def __init__(self, beta: float = 0.95, *, steps: int = 5) -> None:
        super().__init__((Momentum(beta), BalanceRows(), Orthogonalise(steps), MatchRMS("rms")))
