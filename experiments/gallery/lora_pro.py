"""LoRA-Pro: an adapter's two updates together follow the whole gradient (Wang et al., 2025).

"LoRA-Pro: Are Low-Rank Adapters Properly Optimized?", arXiv 2407.18242, algorithm 1, without Adam.
Of a weight ``W + s B A``, with gradients G_A and G_B of A, ``[r, in]``, and B, ``[out, r]``, the
updates whose effect ``s B U_A + s U_B A`` is nearest to the gradient of the whole weight are::

    U_A = (B^T B)^-1 G_A / s^2 + X A
    U_B = (I - B (B^T B)^-1 B^T) G_B (A A^T)^-1 / s^2 - B X

of which X makes them nearest to G_A and G_B::

    B^T B X + X A A^T = -(B^T B)^-1 G_A A^T / s^2

One block has both parameters: B and the transpose of A. They must not be sharded.

To reproduce: accuracy of T5 on GLUE, and of Llama 2 on GSM8K, beside LoRA and full fine-tuning.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

import soframe
from soframe.layers import BlockShape
from soframe.methods import Candidate, Direction, Given, WithoutFactors


class Pair:
    """The layout ``[2, max(out, in), r]`` of A and B: B and A^T, with rows of zeros."""

    def __init__(self, module: nn.Module, names: tuple[str, str]) -> None:
        self.module, self.names = module, names
        self.parameters: Mapping[str, nn.Parameter] = {n: module.get_parameter(n) for n in names}
        self._sizes = self.parameters[names[1]].shape[0], self.parameters[names[0]].shape[1]
        self.shape = BlockShape(2, max(self._sizes), self.parameters[names[0]].shape[0])

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        sides = tensors[self.names[1]], tensors[self.names[0]].T
        return torch.stack([pad(side, (0, 0, 0, self.shape[1] - len(side))) for side in sides])

    def unpack(self, matrix: Tensor) -> Mapping[str, Tensor]:
        out, into = self._sizes
        return {self.names[0]: matrix[1, :into].T, self.names[1]: matrix[0, :out]}


@soframe.register("method", "lora-pro")
@dataclass(frozen=True)
class LoRAPro(WithoutFactors):
    """Gradient descent on an adapter, along the gradient of the whole weight.

    Attributes:
        scale: The multiplier s of the product.
        eps: Added to diagonals: B starts as zeros.
        names: The names of A and B in the module of an adapter.
    """

    bibtex = """\
@inproceedings{wang2025lorapro,
  author = {Wang, Zhengbo and Liang, Jian and He, Ran and Wang, Zilei and Tan, Tieniu},
  title = {{LoRA-Pro}: Are Low-Rank Adapters Properly Optimized?},
  booktitle = {International Conference on Learning Representations},
  year = {2025},
  eprint = {2407.18242},
  archiveprefix = {arXiv},
}
"""
    scale: float = 1.0
    eps: float = 1e-8
    names: tuple[str, str] = ("lora_A.weight", "lora_B.weight")

    def layouts(self, module: nn.Module) -> Sequence[Pair]:
        children = [name.partition(".")[0] for name in self.names]
        return [Pair(module, self.names)] if all(hasattr(module, n) for n in children) else []

    def unsuited(self, candidate: Candidate) -> str | None:
        return None if len(candidate.parameters) == 2 else "it is no pair of an adapter"

    def direct(self, step: Given) -> Direction:
        up, down = step.weights().unflatten(0, (-1, 2)).unbind(1)  # B, A^T: [blocks, n, r]
        up_gradient, down_gradient = step.incoming.unflatten(0, (-1, 2)).unbind(1)
        ridge = self.eps * torch.eye(up.shape[2]).to(up)
        ups, downs = up.mT @ up, down.mT @ down  # B^T B and A A^T
        inverse = torch.linalg.inv(ups + ridge) / self.scale**2
        moved = down_gradient @ inverse  # [blocks, in, r]
        free = solved(ups + ridge, downs + ridge, -moved.mT @ down)
        outside = up_gradient - self.scale**2 * up @ (inverse @ (up.mT @ up_gradient))
        outside = outside @ torch.linalg.inv(downs + ridge) / self.scale**2
        updates = [outside - up @ free, moved + down @ free.mT]
        return Direction(torch.stack(updates, 1).flatten(0, 1))


def solved(first: Tensor, second: Tensor, target: Tensor) -> Tensor:
    (values, vectors), (shifts, columns) = torch.linalg.eigh(first), torch.linalg.eigh(second)
    turned = vectors.mT @ target @ columns / (values.unsqueeze(2) + shifts.unsqueeze(1))
    return torch.matmul(vectors @ turned, columns.mT)
