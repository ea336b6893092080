"""Dion: momentum, orthonormalised by one power iteration in each step (Ahn et al., 2025).

"Dion: Distributed Orthonormalized Updates", arXiv 2504.05295, algorithm 1. With the gradient G,
``[out, in]``, a buffer M and the right factor Q, ``[in, r]``, of the step before::

    B = M + G        P = orthonormal(B Q)        R = B^T P
    M <- B - (1 - momentum) P R^T                Q <- R, with columns of length one
    update = sqrt(out / in) P Q^T

The part of B that the update takes leaves the buffer, so that a low rank r loses nothing. P and Q
are sent, ``r (out + in)`` numbers, where that is less than the update; the strategy decides which
ranks compute them, not the paper's sharded algorithm.

To reproduce: validation loss against steps and time of language models of 160M to 3B parameters,
by rank fraction, beside Muon and AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import soframe
from soframe.layers import BlockShape
from soframe.methods import Candidate, Direction, Given, Orthogonalise, WithoutFactors


@soframe.register("method", "dion")
@dataclass(frozen=True)
class Dion(WithoutFactors):
    """Low-rank orthonormal updates with error feedback, for hidden matrices.

    Attributes:
        momentum: The part of the update that stays in the buffer.
        rank_fraction: The rank over the shorter side, above 0 and at most 1.
    """

    bibtex = """\
@misc{ahn2025dion,
  author = {Ahn, Kwangjun and Xu, Byron and Abreu, Natalie and Fan, Ying and Magakyan, Gagik and Sharma, Pratyusha and Zhan, Zheng and Langford, John},
  title = {{Dion}: Distributed Orthonormalized Updates},
  year = {2025},
  eprint = {2504.05295},
  archiveprefix = {arXiv},
}
"""  # noqa: E501
    joint = False

    momentum: float = 0.95
    rank_fraction: float = 1.0

    def state(self, shape: BlockShape) -> Mapping[str, soframe.TensorSpec]:
        factors = self._factors(shape)
        return {"buffer": soframe.TensorSpec(tuple(shape)), "right": factors["right"]}

    def parcel(self, shape: BlockShape) -> Mapping[str, soframe.TensorSpec]:
        factors = self._factors(shape)
        size = sum(factor.packed_numel for factor in factors.values())
        return factors if size < math.prod(shape) else {}

    def _factors(self, shape: BlockShape) -> dict[str, soframe.TensorSpec]:
        groups, out, into = shape
        rank = math.ceil(self.rank_fraction * min(out, into))
        shapes = {"left": (groups, out, rank), "right": (groups, into, rank)}
        return {name: soframe.TensorSpec(sizes) for name, sizes in shapes.items()}

    def opened(self, parcel: Mapping[str, Tensor]) -> Tensor:
        left, right = parcel["left"], parcel["right"]
        return math.sqrt(left.shape[1] / right.shape[1]) * left @ right.mT

    def direct(self, step: Given) -> Direction:
        buffer = step.state["buffer"] + step.incoming
        right = step.state["right"] if step.updates else started(step.state["right"])
        left = torch.linalg.qr(buffer @ right)[0]  # [groups, out, rank]
        product = buffer.mT @ left  # [groups, in, rank]
        lengths = torch.linalg.vector_norm(product, dim=1, keepdim=True)
        # A buffer of low rank leaves columns of rounding errors, which are no directions.
        rounding = 100 * torch.finfo(product.dtype).eps * lengths.amax(2, keepdim=True)
        right = torch.where(lengths > rounding, product / lengths, 0.0)
        buffer = buffer - (1 - self.momentum) * left @ product.mT
        parcel = {"left": left, "right": right}
        return Direction(self.opened(parcel), {"buffer": buffer, "right": right}, parcel)

    def effort(self, shape: BlockShape) -> float:
        return Orthogonalise().effort(shape)

    def unsuited(self, candidate: Candidate) -> str | None:
        return Orthogonalise().unsuited(candidate)


def started(right: Tensor) -> Tensor:
    """Return orthonormal columns, ``[groups, in, rank]``, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(right.shape[1:], generator=generator, dtype=torch.float64)
    basis: Tensor = torch.linalg.qr(drawn)[0]
    return basis.to(right).expand_as(right)
