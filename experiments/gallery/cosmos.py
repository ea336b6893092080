"""COSMOS: SOAP in the leading eigenvectors, Muon in the rest (Liu et al., 2025).

"COSMOS: A Hybrid Adaptive Optimizer for Memory-Efficient Training of LLMs", arXiv 2502.17410. With
the gradient G, ``[out, in]``, and U ``[in, r]``, the leading eigenvectors of a running average of
``G^T G``, which starts as those of the first::

    m <- b1 m + (1 - b1) G
    U <- qr(b2 U S + (1 - b2) G^T G U)        S <- U^T (b2 U' S U'^T + (1 - b2) G^T G) U
    v <- b2 v + (1 - b2) (G U)^2
    A = (m U / (1 - b1^t)) / sqrt((v + eps) / (1 - b2^t)) U^T
    B = NewtonSchulz(m - m U U^T), with entries of root mean square one
    update = A + gamma B, with entries of root mean square one

where U' is U before. The rank is at most half of the shorter side, so that there is a rest.

To reproduce: validation loss against tokens of LLaMA models of 130M to 1B parameters on C4, and
memory, beside Adam, Muon and SOAP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

import soframe
from experiments.gallery.swan import UnitEntries
from soframe.layers import BlockShape
from soframe.methods import Candidate, Direction, Given, Orthogonalise, WithoutFactors
from soframe.methods.momentum import second_moment


@soframe.register("method", "cosmos")
@dataclass(frozen=True)
class COSMOS(WithoutFactors):
    """Adam in a leading subspace and orthogonal momentum beside it, for hidden matrices.

    Attributes:
        betas: The decays of m, and of v and the second moment.
        gamma: The weight of the orthogonal part.
        rank: The largest dimension of the subspace.
        eps: Added to v.
    """

    bibtex = """\
@misc{liu2025cosmos,
  author = {Liu, Liming and Xu, Zhenghao and Zhang, Zixuan and Kang, Hao and Li, Zichong and Liang, Chen and Chen, Weizhu and Zhao, Tuo},
  title = {{COSMOS}: A Hybrid Adaptive Optimizer for Memory-Efficient Training of {LLMs}},
  year = {2025},
  eprint = {2502.17410},
  archiveprefix = {arXiv},
}
"""  # noqa: E501
    joint = False

    betas: tuple[float, float] = (0.95, 0.95)
    gamma: float = 0.2
    rank: int = 64
    eps: float = 1e-8

    def state(self, shape: BlockShape) -> Mapping[str, soframe.TensorSpec]:
        groups, out, into = shape
        rank = max(1, min(self.rank, out // 2, into // 2))
        shapes = {"mean": (out, into), "basis": (into, rank), "square": (out, rank)}
        shapes["moment"] = (rank, rank)
        return {name: soframe.TensorSpec((groups, *sizes)) for name, sizes in shapes.items()}

    def direct(self, step: Given) -> Direction:
        new, (first, second), count = step.incoming, self.betas, step.updates + 1
        mean = step.state["mean"].lerp(new, 1 - first)
        basis, moment = self._subspace(new, step)
        square = second_moment(step.state["square"], new @ basis, second)
        inside = mean @ basis  # [groups, out, rank]
        root = ((square + self.eps) / (1 - second**count)).sqrt()
        adaptive = inside / (1 - first**count) / root @ basis.mT
        outside = replace(step, incoming=mean - inside @ basis.mT)
        orthogonal = _unit(Orthogonalise().direct(outside).matrix, step)
        update = _unit(adaptive + self.gamma * orthogonal, step)
        state = {"mean": mean, "basis": basis, "square": square, "moment": moment}
        return Direction(update, state)

    def _subspace(self, new: Tensor, step: Given) -> tuple[Tensor, Tensor]:
        before, moment, beta = step.state["basis"], step.state["moment"], self.betas[1]
        if step.updates == 0:
            vectors = torch.linalg.eigh(new.mT @ new)[1]
            basis = vectors.flip(2)[..., : before.shape[2]].contiguous()  # the largest first
        else:
            product = beta * before @ moment + (1 - beta) * new.mT @ (new @ before)
            basis = torch.linalg.qr(product)[0]
        turned, projected = before.mT @ basis, new @ basis
        return basis, beta * turned.mT @ moment @ turned + (1 - beta) * projected.mT @ projected

    def unsuited(self, candidate: Candidate) -> str | None:
        return Orthogonalise().unsuited(candidate)


def _unit(matrix: Tensor, step: Given) -> Tensor:
    return UnitEntries().direct(replace(step, incoming=matrix)).matrix
