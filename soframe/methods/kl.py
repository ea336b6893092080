"""KL-Shampoo and KL-SOAP: each factor is weighted by the inverse of the other (Lin et al., 2025).

Model the averaged gradient G, ``[out, in]``, as a draw from a Gaussian with mean 0 and covariance
``L ⊗ R``, L of the rows and R of the columns. The Kullback-Leibler divergence between this Gaussian
and one with the second moment of G is minimal for ("Understanding and Improving Shampoo and SOAP
via Kullback-Leibler Minimization", arXiv 2509.03378, claim 2)

    L = E[G R^-1 G^T] / in        R = E[G^T L^-1 G] / out

and the running averages that converge to it are (equation 5), both with the current inverses,

    L <- b L + (1 - b) G R^-1 G^T / in        R <- b R + (1 - b) G^T L^-1 G / out

where Shampoo has the identity in place of the inverses. They start from ``start`` times the
identity without bias correction, as the eigenvalues in the authors' code start from 0.1: a
bias-corrected average of few gradients would be singular, and its inverse unbounded.

If the other side has no factor, a factor is the average of ``G G^T / in`` or ``G^T G / out``, which
is optimal with the identity on the other side (claim 1).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from soframe.layers.layout import BlockShape
from soframe.methods.base import Method
from soframe.methods.shampoo import Roots, Shampoo, gradient_moments
from soframe.methods.soap import SOAP, factor_names, into_basis
from soframe.registry import register
from soframe.solvers.base import Solver
from soframe.solvers.basis import Basis
from soframe.solvers.root import Root
from soframe.specs import VALUE, FactorSpec, SecondOrder

EIGENVALUES = {"L": "L_values", "R": "R_values"}
"""Matrix factor of KL-SOAP -> the factor that holds its eigenvalues."""


def weighted_moments(
    gradient: Tensor, names: Collection[str], roots: Roots, start: float
) -> dict[str, Tensor]:
    """Compute ``G R^-1 G^T / in`` and ``G^T L^-1 G / out`` from roots P of inverses ``P P^T``."""
    _, out, into = gradient.shape
    divisors = {"L": float(into), "R": float(out)}
    for name, other in (("L", "R"), ("R", "L")):
        if other in names and other not in roots:
            divisors[name] *= start
    moments = gradient_moments(gradient, names, roots)
    return {name: moment.div_(divisors[name]) for name, moment in moments.items()}


@register("method", "kl-shampoo")
@dataclass(frozen=True)
class KLShampoo(Shampoo):
    """Shampoo whose factors are weighted by each other's inverse; it needs no ``graft``.

    The update of X ``[groups, out, in]`` is ``L^(-1/2) X R^(-1/2)``. The inverses in the statistics
    are the squares of the roots of the last solve: one step old if ``solve_every`` is 1, up to
    ``solve_every`` steps otherwise.

    Attributes:
        decay: The decay of the factors per step.
        power: -1/2, or None for the same: the square of the root must be the inverse.
        epsilon: Added to eigenvalues, relative to the largest, in the roots and thus the inverses.
        start: The multiple of the identity from which the factors start.
    """

    observes_with_data = True

    decay: float = 0.95
    graft: Any = None
    start: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.power not in (None, -0.5):
            raise ValueError(
                f"KLShampoo: power must be -1/2, whose square is the inverse that the factors are "
                f"weighted with, not {self.power!r}; method='shampoo' takes others"
            )
        _require_start("KLShampoo", self.start)

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        return tuple(replace(factor, start=self.start) for factor in super().factors(shape))

    def observe(self, gradient: Tensor, data: SecondOrder) -> Mapping[str, Tensor]:
        roots = {name: data[name]["root"] for name in self._names if name in data}
        return weighted_moments(gradient, self._names, roots, self.start)

    @property
    def _root(self) -> Root:
        return Root(-0.5, self.epsilon)


@register("method", "kl-soap")
@dataclass(frozen=True)
class KLSOAP(SOAP):
    """SOAP in the eigenbasis of factors that are weighted by each other's inverse.

    If both sides have a factor, their eigenvalues l and r are running averages in the current
    basis, which may be older than the factors, as in the paper::

        l <- b l + (1 - b) diag(Q_L^T G R^-1 G^T Q_L) / in       R^-1 = Q_R diag(1/r) Q_R^T
        r <- b r + (1 - b) diag(Q_R^T G^T L^-1 G Q_R) / out      L^-1 = Q_L diag(1/l) Q_L^T

    ``epsilon`` times the largest eigenvalue is added before they are inverted. New bases keep the
    order of their columns, so l, r and v need no permutation.

    Attributes:
        epsilon: Added to eigenvalues before they are inverted, relative to the factor's largest.
        start: The initial eigenvalues.
        carry: How v is transferred to a new basis, see `SOAP`; ``"permute"`` leaves it unchanged.
    """

    observes_with_data = True

    epsilon: float = 1e-6
    start: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_start("KLSOAP", self.start)
        if not 0 <= self.epsilon < math.inf:
            raise ValueError(f"KLSOAP: epsilon must not be negative, not {self.epsilon!r}")

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        matrices = super().factors(shape)
        if len(matrices) < len(EIGENVALUES):
            return matrices
        factors = list(matrices)
        for factor in matrices:
            name = EIGENVALUES[factor.name]
            factors.append(replace(factor, name=name, kind="vector", start=self.start))
        return tuple(factors)

    def of_kernel(self, positions: int) -> Method:
        del positions  # the statistics are of matrices
        return self

    def observe(self, gradient: Tensor, data: SecondOrder) -> Mapping[str, Tensor]:
        names = factor_names(self, gradient.shape)
        roots: dict[str, Tensor] = {}
        values: dict[str, Tensor] = {}
        if set(EIGENVALUES.values()) <= set(names):
            if "L" in data and "R" in data:
                left, right = self._inverse_root(data, "L"), self._inverse_root(data, "R")
                roots["L"] = data["L"]["vectors"] * left.unsqueeze(-2)
                roots["R"] = data["R"]["vectors"] * right.unsqueeze(-2)
                turned = into_basis(gradient, data)
                values["L_values"] = (turned * right.unsqueeze(-2)).square().mean(-1)
                values["R_values"] = (turned * left.unsqueeze(-1)).square().mean(-2)
            else:
                _, out, into = gradient.shape
                for name, size in (("L_values", out), ("R_values", into)):
                    values[name] = gradient.new_full((len(gradient), size), self.start)
        return {**weighted_moments(gradient, names, roots, self.start), **values}

    def solver(self, factor: FactorSpec, default: Solver) -> Solver | None:
        del default
        if factor.kind == "vector":
            return None
        return Basis(ordered=False)

    def _inverse_root(self, data: SecondOrder, name: str) -> Tensor:
        """Compute the inverse roots of a factor's eigenvalues, ``[groups, n]``."""
        values = data[EIGENVALUES[name]][VALUE]
        values = values + self.epsilon * values.amax(-1, keepdim=True)
        return torch.where(values > 0, values, 1.0).rsqrt().where(values > 0, 0.0)


def _require_start(method: str, start: float) -> None:
    if not 0 < start < math.inf:
        raise ValueError(f"{method}: start must be positive and finite, not {start!r}")
