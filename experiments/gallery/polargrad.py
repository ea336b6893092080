"""PolarGrad: Muon at the nuclear norm of the momentum (Lau, Long and Su, 2025).

"PolarGrad: A Class of Matrix-Gradient Optimizers from a Unifying Preconditioning Perspective",
arXiv 2505.21799, momentum first. With the polar decomposition ``m = U H`` of the momentum::

    m <- b m + (1 - b) G        update = tr(H) U,  tr(H) = <m, U>

so that the update vanishes with the gradient, unlike Muon's. The iterations are Polar Express's.

To reproduce: losses of the paper's matrix problems (quadratic regression, logistic regression,
low-rank completion) against steps, where Muon with a constant rate stalls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import soframe
from soframe.layers import BlockShape
from soframe.methods import Direction, Given, Orthogonalise
from soframe.methods.orthogonal import Coefficients


@soframe.register("method", "polargrad")
@dataclass(frozen=True)
class PolarGrad(Orthogonalise):
    """The orthogonal factor of the momentum, times its nuclear norm, for hidden matrices.

    Attributes:
        beta: The decay of the momentum.
    """

    bibtex = """\
@misc{lau2025polargrad,
  author = {Lau, Tim Tsz-Kit and Long, Qi and Su, Weijie},
  title = {{PolarGrad}: A Class of Matrix-Gradient Optimizers from a Unifying Preconditioning Perspective},
  year = {2025},
  eprint = {2505.21799},
  archiveprefix = {arXiv},
}
"""  # noqa: E501

    steps: int = 8
    coefficients: Coefficients = "polar-express"
    beta: float = 0.95

    def state(self, shape: BlockShape) -> Mapping[str, soframe.TensorSpec]:
        return {"momentum": soframe.TensorSpec(tuple(shape))}

    def direct(self, step: Given) -> Direction:
        momentum = step.state["momentum"].lerp(step.incoming, 1 - self.beta)
        nearest = super().direct(replace(step, incoming=momentum)).matrix
        nuclear = (momentum * nearest).sum((1, 2), keepdim=True)  # [groups, 1, 1]
        return Direction(nuclear * nearest, {"momentum": momentum})
