"""The exact quadratic model of a step, over all ranks; the first is held against the gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from soframe.comm import Backend
from soframe.comm.agreement import add_over_ranks, mean_over_ranks, require_no_failure
from soframe.derivatives.forward import Forward
from soframe.derivatives.twice import Direction
from soframe.trust_region.groups import slope_and_metric
from soframe.trust_region.quadratic import Quadratic, curvature_along

TOLERANCE = 0.05
"""Of the derivative along the gradient, which autocast may round to a few digits."""


@dataclass(frozen=True)
class Objective:
    """The objective at the parameters of now.

    Attributes:
        parameters: The parameters.
        gradients: Of the objective, over all ranks.
        decays: The weight decay of each parameter.
    """

    parameters: Sequence[nn.Parameter]
    gradients: Sequence[Tensor]
    decays: Sequence[float]


class ExactModel:
    """Quadratic models of the loss of a model.

    Args:
        backend: The ranks that it is of.
        isotropic: Whether the loss's Hessian in the output may be a multiple of the identity: see
            `soframe.trust_region.quadratic.curvature_along`.
    """

    def __init__(self, backend: Backend, *, isotropic: bool = False) -> None:
        self._backend, self._isotropic = backend, isotropic
        self._verified = False

    def along(
        self,
        objective: Objective,
        forwards: Sequence[Forward],
        directions: Sequence[Direction],
        *,
        damping: float,
    ) -> Quadratic:
        """Return the model along directions.

        Args:
            objective: The objective.
            forwards: This rank's forward passes, one per closure.
            directions: k directions.
            damping: The damping of all.

        Raises:
            RuntimeError: If derivatives along directions are not those that the gradient is of;
                looked at once.
        """
        if not self._verified:
            self._verify(objective, forwards)
            self._verified = True
        of_this_rank = torch.full(
            (len(directions), len(directions)), torch.nan, dtype=torch.float64, device="cpu"
        )
        with self._told_to_others() as error:
            of_this_rank = curvature_along(
                forwards,
                objective.parameters,
                directions,
                isotropic=self._isotropic,
            )
        curvature = self._mean(of_this_rank)
        self._require_no_failure(curvature, error)
        slope, metric, lengths = slope_and_metric(
            objective.gradients, directions, decays=objective.decays, damping=damping
        )
        return Quadratic(curvature + metric, slope, lengths)

    def _verify(self, objective: Objective, forwards: Sequence[Forward]) -> None:
        """Take the slope along the gradient forward: it is the gradient's square."""
        rows = zip(objective.gradients, objective.parameters, objective.decays, strict=True)
        direction = [g if decay == 0 else g - decay * p.detach() for g, p, decay in rows]
        sums = torch.zeros(3, dtype=torch.float64, device="cpu")
        with self._told_to_others() as error:
            for one in forwards:
                (tangents,) = one.jacobian_products(objective.parameters, [direction])
                for gradient, tangent in zip(one.gradients, tangents, strict=True):
                    g, t = gradient.detach().flatten().double(), tangent.flatten().double()
                    sums += torch.stack([g @ t, g.norm() * t.norm(), g.new_zeros(())]).cpu()
        if error:
            sums.fill_(math.nan)
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in direction]
        sums[2] = sum(float(norm) ** 2 for norm in norms)
        sums = self._mean(sums)
        self._require_no_failure(sums, error)
        slope, sizes, expected = sums.tolist()
        rounding = 1e3 * max(torch.finfo(g.dtype).eps for one in forwards for g in one.gradients)
        if abs(slope - expected) > TOLERANCE * expected + rounding * sizes:
            raise RuntimeError(
                f"the loss falls along its gradient by {slope:.4g}, and by {expected:.4g} as the "
                f"gradient itself has it: the gradient is not that of what the model computes. "
                f"Remove hooks that change gradients on the way, or pass reuse_activations=False, "
                f"which differentiates the gradient as it is"
            )

    @contextmanager
    def _told_to_others(self) -> Iterator[list[Exception]]:
        """Keep an error, since the other ranks wait for numbers: they get those that are none.

        Yields:
            Has the error at the end, if there is one.
        """
        errors: list[Exception] = []
        try:
            yield errors
        except Exception as error:
            errors.append(error)

    def _require_no_failure(self, numbers: Tensor, errors: Sequence[Exception]) -> None:
        """Raise on every rank if one has an error; asked only where numbers are not finite."""
        if bool(numbers.isfinite().all()):
            return
        (failed,) = add_over_ranks(self._backend, [float(bool(errors))])
        require_no_failure(self._backend, errors[0] if errors else None, failed)

    def _mean(self, tensor: Tensor) -> Tensor:
        return mean_over_ranks(self._backend, tensor)
