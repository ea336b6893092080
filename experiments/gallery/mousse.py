"""Mousse: Muon in the geometry of Shampoo's factors (Zhang et al., 2026).

"Mousse: Rectifying the Geometry of Muon with Curvature-Aware Preconditioning", arXiv 2603.09697.
With running averages L and R of ``G G^T`` and ``G^T G``, each over its mean eigenvalue, and the
momentum m, ``[out, in]``::

    O = NewtonSchulz(L^-p m R^-p)        Y = L^p O R^p        update = Y |O| / |Y|

Eigenvalues below ``floor`` count as ``floor``, since a factor of few gradients has zeros; the paper
adds a small number to the trace alone.

To reproduce: validation loss against steps of language models of 160M to 800M parameters, beside
Muon and SOAP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

import soframe
from soframe.layers import BlockShape
from soframe.methods import Candidate, Direction, Given, Method, Orthogonalise
from soframe.methods.graft import at_length
from soframe.methods.shampoo import gradient_factors, gradient_moments
from soframe.solvers import Eigen
from soframe.specs import FactorSpec, SecondOrder


@soframe.register("method", "mousse")
@dataclass(frozen=True)
class Mousse(Method):
    """The momentum, orthogonalised between tempered powers of its factors, for hidden matrices.

    Attributes:
        momentum: The decay of the momentum.
        factor_beta: The decay of the factors.
        power: The exponent p.
        floor: The least eigenvalue, relative to the mean.
    """

    bibtex = """\
@misc{zhang2026mousse,
  author = {Zhang, Yechen and Xing, Shuhao and Huang, Junhao and Lv, Kai and Zhou, Yunhua and Qiu, Xipeng and Guo, Qipeng and Chen, Kai},
  title = {{Mousse}: Rectifying the Geometry of {Muon} with Curvature-Aware Preconditioning},
  year = {2026},
  eprint = {2603.09697},
  archiveprefix = {arXiv},
}
"""  # noqa: E501
    joint = clipped = damped = False

    momentum: float = 0.95
    factor_beta: float = 0.95
    power: float = 0.125
    floor: float = 1e-6

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        return gradient_factors(shape, self.factor_beta)

    def observe(self, gradient: Tensor, data: SecondOrder) -> Mapping[str, Tensor]:
        return gradient_moments(gradient, "LR")

    def solver(self, factor: FactorSpec, default: soframe.Solver) -> soframe.Solver:
        return Eigen()

    def state(self, shape: BlockShape) -> Mapping[str, soframe.TensorSpec]:
        return {"momentum": soframe.TensorSpec(tuple(shape))}

    def direct(self, step: Given) -> Direction:
        momentum = self.momentum * step.state["momentum"] + step.incoming
        state = {"momentum": momentum}
        if not {"L", "R"} <= step.data.keys():
            return Direction(step.incoming.clone(), state)
        white = self._times(momentum, step.data, -self.power)
        orthogonal = Orthogonalise().direct(replace(step, incoming=white)).matrix
        return Direction(
            at_length(self._times(orthogonal, step.data, self.power), orthogonal), state
        )

    def _times(self, matrix: Tensor, data: SecondOrder, power: float) -> Tensor:
        """Return ``L^power X R^power``."""
        sides = []
        for name in ("L", "R"):
            values, vectors = data[name]["values"], data[name]["vectors"]
            mean = values.mean(1, keepdim=True)
            relative = (values / mean.where(mean > 0, 1.0)).clamp(min=self.floor)
            sides.append(vectors * relative.pow(power).unsqueeze(1) @ vectors.mT)
        left, right = sides
        return left @ matrix @ right

    def unsuited(self, candidate: Candidate) -> str | None:
        return Orthogonalise().unsuited(candidate)
