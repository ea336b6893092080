"""Conda: Adam with squares in the singular basis of its momentum (Wang et al., 2025).

"Conda: Column-Normalized Adam for Training Large Language Models Faster", arXiv 2509.24218. With
the gradient G, ``[out, in]``, and the left singular vectors U of the momentum, which are refreshed
every ``every`` updates::

    m <- b1 m + (1 - b1) G        v <- b2 v + (1 - b2) (U^T G)^2
    update = U ((U^T m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps))

For a tall matrix these are the right singular vectors, on the other side, so that U is square.

To reproduce: loss against steps of LLaMA models: AdamW's in a half to two fifths of the steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

import soframe
from soframe.layers import BlockShape
from soframe.methods import Direction, Given, WithoutFactors
from soframe.methods.momentum import second_moment


@soframe.register("method", "conda")
@dataclass(frozen=True)
class Conda(WithoutFactors):
    """Adam whose squares are kept in the singular basis of the momentum; vectors have Adam.

    Attributes:
        betas: The decays of m and v.
        eps: Added to the root in the denominator.
        every: Updates between two singular value decompositions.
    """

    bibtex = """\
@misc{wang2025conda,
  author = {Wang, Junjie and Zhou, Pan and Dong, Yiming and Li, Huan and Li, Jia and Zhou, Xun and Lao, Qicheng and Fang, Cong and Lin, Zhouchen},
  title = {{Conda}: Column-Normalized {Adam} for Training Large Language Models Faster},
  year = {2025},
  eprint = {2509.24218},
  archiveprefix = {arXiv},
}
"""  # noqa: E501
    joint = False

    betas: tuple[float, float] = (0.9, 0.99)
    eps: float = 1e-8
    every: int = 50

    def state(self, shape: BlockShape) -> Mapping[str, soframe.TensorSpec]:
        groups, out, into = shape
        short = min(out, into)
        return {
            "mean": soframe.TensorSpec((groups, out, into)),
            "square": soframe.TensorSpec((groups, short, max(out, into))),
            "basis": soframe.TensorSpec((groups, short, short)),
        }

    def direct(self, step: Given) -> Direction:
        first, second = self.betas
        mean = step.state["mean"].lerp(step.incoming, 1 - first)
        is_tall = mean.shape[1] > mean.shape[2]
        wide, new = (mean.mT, step.incoming.mT) if is_tall else (mean, step.incoming)
        basis = step.state["basis"]
        if step.updates % self.every == 0:
            basis = torch.linalg.svd(wide, full_matrices=False)[0]  # [groups, short, short]
        square = second_moment(step.state["square"], basis.mT @ new, second)
        count = step.updates + 1
        root = square.sqrt() / math.sqrt(1 - second**count) + self.eps
        update = basis @ ((basis.mT @ wide) / (1 - first**count) / root)
        state = {"mean": mean, "square": square, "basis": basis}
        return Direction(update.mT.contiguous() if is_tall else update, state)

    def effort(self, shape: BlockShape) -> float:
        groups, out, into = shape
        return float(groups * out * into * min(out, into))
