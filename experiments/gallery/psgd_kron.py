"""PSGD-Kron: a Kronecker-factored preconditioner that whitens gradients (Li, 2024).

Xi-Lin Li, "Stochastic Hessian Fittings with Lie Groups", arXiv 2402.11858. The preconditioner is
``P = Q_L^2 ⊗ Q_R^2``, and P G should have the second moment of white noise. In the quadratic form
of the inverse-free fits, with ``A = Q_L^2 G Q_R^2``, ``[out, in]``, and so for the right side::

    l = |A A^T|_2 + in                 l_L <- max(l, b l_L + (1 - b) l)
    E = rate / (2 l_L) (A A^T - in I)  Q_L <- (I - E) Q_L (I - E)

The update is ``Q_L^2 m Q_R^2`` with a running mean m. Left out of the author's implementation: a
lower bound in place of the spectral norm, noise on G, and rescaling of Q_L against Q_R.

To reproduce: the paper's comparison of losses of fits, and of a transformer's training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

import soframe
from soframe.layers import BlockShape
from soframe.methods import Candidate, Direction, Given, WithoutFactors


@soframe.register("method", "psgd-kron")
@dataclass(frozen=True)
class PSGDKron(WithoutFactors):
    """Momentum, whitened by a preconditioner that is fitted to the gradients.

    Attributes:
        beta: The decay of the momentum.
        rate: The step length of the fit.
        bound_beta: The decay of ``l_L`` and ``l_R``, which bound the curvature of the fit.
        max_size: The longest side of a matrix; longer ones are skipped.
    """

    bibtex = """\
@misc{li2024psgd,
  author = {Li, Xi-Lin},
  title = {Stochastic {H}essian Fittings with {L}ie Groups},
  year = {2024},
  eprint = {2402.11858},
  archiveprefix = {arXiv},
}
"""
    joint = False

    beta: float = 0.9
    rate: float = 0.1
    bound_beta: float = 0.9
    max_size: int = 4096

    def state(self, shape: BlockShape) -> Mapping[str, soframe.TensorSpec]:
        groups, out, into = shape
        return {
            "momentum": soframe.TensorSpec((groups, out, into)),
            "left": soframe.TensorSpec((groups, out, out), symmetric=True),
            "right": soframe.TensorSpec((groups, into, into), symmetric=True),
            "left_bound": soframe.TensorSpec((groups, 1, 1)),
            "right_bound": soframe.TensorSpec((groups, 1, 1)),
        }

    def direct(self, step: Given) -> Direction:
        gradient, state = step.gradient, dict(step.state)
        if step.updates == 0:
            # So that the fourth moment of the first P G is one.
            scale = (gradient.pow(4).mean((1, 2), keepdim=True) + 1e-36) ** (-1 / 16)
            for side in ("left", "right"):
                state[side] = scale * torch.eye(state[side].shape[-1]).to(gradient)
        white = preconditioned(gradient, state)  # [groups, out, in]
        for side, rows in (("left", white), ("right", white.mT)):
            state[side], state[f"{side}_bound"] = self._fitted(
                state[side], state[f"{side}_bound"], rows
            )
        state["momentum"] = state["momentum"].lerp(step.incoming, 1 - self.beta)
        return Direction(preconditioned(state["momentum"], state), state)

    def _fitted(self, root: Tensor, bound: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        moment = rows @ rows.mT
        eye = torch.eye(root.shape[-1]).to(root)
        length = torch.linalg.eigvalsh(moment)[:, -1, None, None] + rows.shape[-1]
        bound = torch.maximum(length, bound.lerp(length, 1 - self.bound_beta))
        factor = eye - self.rate / (2 * bound) * (moment - rows.shape[-1] * eye)
        root = factor @ root @ factor
        return (root + root.mT) / 2, bound

    def unsuited(self, candidate: Candidate) -> str | None:
        too_long = max(candidate.shape[1:]) > self.max_size
        return f"a side is longer than max_size={self.max_size}" if too_long else None


def preconditioned(matrix: Tensor, state: Mapping[str, Tensor]) -> Tensor:
    left, right = state["left"], state["right"]
    return left @ (left @ matrix @ right) @ right
