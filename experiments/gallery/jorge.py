"""Jorge: Shampoo's inverse roots by a series, without decompositions (Singh et al., 2023).

"Jorge: Approximate Preconditioning for GPU-efficient Second-order Optimization", arXiv 2310.12298.
With the gradient G, ``[out, in]``, the left preconditioner L approximates an inverse fourth root of
a running average of ``G G^T``, whose decay is chosen at each step so that a binomial series of
the second order converges::

    X = L^4 G G^T,  n = |X|
    L <- ((n + 1) / n)^(1/4) L (I - X / (4 n) + 5 X^2 / (32 n^2))

and so R with ``G^T G``, from ``eps^(-1/4) I``. The update is the running mean of ``L G R``, at
the length of classical momentum.

To reproduce: accuracy of ResNet-50 and mAP of Mask R-CNN against epochs and time, beside SGD,
AdamW and Shampoo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import soframe
from soframe.layers import BlockShape
from soframe.methods import Candidate, Direction, Given, WithoutFactors
from soframe.methods.graft import at_length


@soframe.register("method", "jorge")
@dataclass(frozen=True)
class Jorge(WithoutFactors):
    """Approximate Shampoo at the length of SGD with momentum.

    Attributes:
        momentum: The decay of both momenta.
        eps: The eigenvalue of the factors at the start.
        max_size: The longest side of a matrix; longer ones are skipped.
    """

    bibtex = """\
@misc{singh2023jorge,
  author = {Singh, Siddharth and Sating, Zachary and Bhatele, Abhinav},
  title = {{Jorge}: Approximate Preconditioning for {GPU}-efficient Second-order Optimization},
  year = {2023},
  eprint = {2310.12298},
  archiveprefix = {arXiv},
}
"""
    joint = False

    momentum: float = 0.9
    eps: float = 1e-6
    max_size: int = 4096

    def state(self, shape: BlockShape) -> Mapping[str, soframe.TensorSpec]:
        groups, out, into = shape
        return {
            "left": soframe.TensorSpec((groups, out, out)),
            "right": soframe.TensorSpec((groups, into, into)),
            "mean": soframe.TensorSpec((groups, out, into)),
            "sum": soframe.TensorSpec((groups, out, into)),
        }

    def direct(self, step: Given) -> Direction:
        gradient, state = step.gradient, step.state
        left = self._updated(state["left"], gradient @ gradient.mT, step.updates)
        right = self._updated(state["right"], gradient.mT @ gradient, step.updates)
        mean = state["mean"].lerp(left @ step.incoming @ right, 1 - self.momentum)
        total = self.momentum * state["sum"] + step.incoming
        new_state = {"left": left, "right": right, "mean": mean, "sum": total}
        return Direction(at_length(mean, total), new_state)

    def _updated(self, root: Tensor, moment: Tensor, updates: int) -> Tensor:
        eye = torch.eye(root.shape[-1]).to(root)
        if updates == 0:
            root = self.eps ** (-1 / 4) * eye.expand_as(root)
        product = torch.linalg.matrix_power(root, 4) @ moment
        norm = torch.linalg.matrix_norm(product, keepdim=True)  # [groups, 1, 1]
        scaled = product / norm.where(norm > 0, 1.0)
        series = eye - scaled / 4 + 5 / 32 * scaled @ scaled
        growth = ((norm + 1) / norm.where(norm > 0, 1.0)) ** (1 / 4)
        renewed: Tensor = growth * root @ series
        return renewed

    def unsuited(self, candidate: Candidate) -> str | None:
        too_long = max(candidate.shape[1:]) > self.max_size
        return f"a side is longer than max_size={self.max_size}" if too_long else None
