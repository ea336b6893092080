"""IKFAC: K-FAC without inverses, on the diagonal blocks of its factors (Lin et al., 2024).

"Structured Inverse-Free Natural Gradient Descent: Memory-Efficient and Numerically-Stable KFAC",
arXiv 2312.05705, section 3. With K-FAC's moments U of a layer's inputs and V of its output
gradients, roots K and C of their inverses are moved along the curvature, from the identity::

    M = (K^T U K + damping K^T K - I) / 2        K <- K (I - rate / max(1, |M|) M)

and C with V; the update is ``C C^T G K K^T``. Of the paper's structures these are block diagonals,
without the Riemannian momentum of SINGD, whose factors read each other's traces.

To reproduce: test error and memory of transformers and CNNs in bfloat16 beside KFAC and AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import soframe
from soframe.layers import BlockShape
from soframe.methods import Call, Direction, Given, Method
from soframe.specs import VALUE, FactorKind, FactorSpec


@dataclass(frozen=True)
class Roots(FactorKind):
    """Roots of the inverses of a moment's diagonal blocks, ``[groups, blocks, side, side]``."""

    longest: int
    damping: float

    def shape(self, factor: FactorSpec) -> tuple[int, ...]:
        side = max(side for side in range(1, self.longest + 1) if factor.size % side == 0)
        return (factor.groups, factor.size // side, side, side)

    def start(self, factor: FactorSpec) -> Tensor:
        return torch.eye(self.shape(factor)[-1]).expand(self.shape(factor))

    def average(self, running: Tensor, statistics: Tensor, rate: Tensor) -> Tensor:
        eye = torch.eye(running.shape[-1]).to(running)
        move = (running.mT @ (statistics + self.damping * eye) @ running - eye) / 2
        norm = torch.linalg.vector_norm(move, dim=(1, 2, 3), keepdim=True)
        return torch.sub(running, rate / norm.clamp(min=1) * (running @ move))


@soframe.register("method", "ikfac")
@dataclass(frozen=True)
class IKFAC(Method):
    """K-FAC by roots of blocks: up to ``size`` rows each, damped by ``ridge``, at rate ``beta``."""

    bibtex = """\
@inproceedings{lin2024structured,
  author = {Lin, Wu and Dangel, Felix and Eschenhagen, Runa and Neklyudov, Kirill and Kristiadi, Agustinus and Turner, Richard and Makhzani, Alireza},
  title = {Structured Inverse-Free Natural Gradient Descent: Memory-Efficient and Numerically-Stable {KFAC}},
  booktitle = {International Conference on Machine Learning},
  year = {2024},
  eprint = {2312.05705},
  archiveprefix = {arXiv},
}
"""  # noqa: E501
    damped = False

    beta: float = 0.05
    size: int = 32
    ridge: float = 1e-3

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        groups, out, into = shape
        kind, decay = Roots(self.size, self.ridge), 1 - self.beta
        inputs = FactorSpec("K", "right", groups, into, kind=kind, decay=decay)
        return inputs, FactorSpec("C", "left", groups, out, kind=kind, decay=decay)

    def statistics(self, call: Call) -> Mapping[str, Tensor]:
        inputs, outputs = self.factors(BlockShape(*call.helper.shape))
        moments = {"C": moment(call.output_rows, outputs)}
        if call.inputs is not None:
            rows = call.helper.block_rows(call.inputs, call.output_rows)
            moments["K"] = moment(rows, inputs)
        return moments

    def direct(self, step: Given) -> Direction:
        if not {"K", "C"} <= step.data.keys():
            return Direction(step.incoming.clone())
        columns = applied(step.data["K"][VALUE], step.incoming)
        return Direction(applied(step.data["C"][VALUE], columns.mT).mT.contiguous())


def moment(rows: Tensor, factor: FactorSpec) -> Tensor:
    cut = rows.unflatten(3, factor.shape[1:3])  # [groups, batch, shared, blocks, side]
    return torch.einsum("gnski,gnskj->gkij", cut, cut)


def applied(root: Tensor, rows: Tensor) -> Tensor:
    cut = rows.unflatten(2, root.shape[1:3])  # [groups, rows, blocks, side]
    return torch.einsum("gtki,gkij,gklj->gtkl", cut, root, root).flatten(2)
