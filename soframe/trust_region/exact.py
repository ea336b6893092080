"""The exact quadratic model of a step, over all ranks; the first is held against the gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from soframe.comm.agreement import add_over_ranks, mean_over_ranks, require_no_failure
from soframe.derivatives.forward import Forward, Outputs
from soframe.derivatives.jacobian import Direction, jacobian_products
from soframe.preconditioner import Preconditioner
from soframe.trust_region.groups import slope_and_metric
from soframe.trust_region.quadratic import Quadratic, curvature_along

TOLERANCE = 0.05
"""Of the derivative along the gradient, which autocast may round to a few digits."""


class ExactModel:
    """Quadratic models of the loss of a model.

    Args:
        model: The model.
        outputs: Its collector.
        preconditioner: Whose ranks and whose declared loss these are.
    """

    def __init__(self, model: nn.Module, outputs: Outputs, preconditioner: Preconditioner) -> None:
        self._model, self._outputs, self._preconditioner = model, outputs, preconditioner
        self._verified = False

    def along(
        self,
        forwards: Sequence[Forward],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        directions: Sequence[Direction],
        decays: Sequence[float],
        damping: float,
    ) -> Quadratic:
        """Return the model along directions.

        Args:
            forwards: This rank's forward passes, one per closure.
            parameters: The parameters.
            gradients: Of the objective, over all ranks.
            directions: k directions.
            decays: The weight decay of each parameter.
            damping: The damping of all.

        Raises:
            RuntimeError: If derivatives along directions are not those that the gradient is of;
                looked at once.
        """
        if not self._verified:
            self._verify(forwards, parameters, gradients, decays)
            self._verified = True
        loss = self._preconditioner.loss
        own = torch.full((len(directions), len(directions)), torch.nan, dtype=torch.float64)
        with self._told_to_others() as error:
            own = curvature_along(
                self._model,
                forwards,
                self._outputs,
                parameters,
                directions,
                isotropic=loss is not None and loss.isotropic,
            )
        curvature = self._mean(own)
        self._require_no_failure(curvature, error)
        slope, metric = slope_and_metric(gradients, directions, decays, damping)
        return Quadratic(curvature + metric, slope)

    def _verify(
        self,
        forwards: Sequence[Forward],
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        decays: Sequence[float],
    ) -> None:
        """Take the slope along the gradient forward: it is the gradient's square."""
        rows = zip(gradients, parameters, decays, strict=True)
        direction = [g if decay == 0 else g - decay * p.detach() for g, p, decay in rows]
        found = torch.zeros(3, dtype=torch.float64)
        with self._told_to_others() as error:
            for one in forwards:
                (tangents,) = jacobian_products(
                    self._model, one, self._outputs, parameters, [direction]
                )
                for gradient, tangent in zip(one.gradients, tangents, strict=True):
                    g, t = gradient.detach().flatten().double(), tangent.flatten().double()
                    found += torch.stack([g @ t, g.norm() * t.norm(), g.new_zeros(())]).cpu()
        if error:
            found.fill_(math.nan)
        norms = [torch.linalg.vector_norm(tensor, dtype=torch.float64) for tensor in direction]
        found[2] = sum(float(norm) ** 2 for norm in norms)
        found = self._mean(found)
        self._require_no_failure(found, error)
        slope, sizes, expected = found.tolist()
        rounding = 1e3 * max(torch.finfo(g.dtype).eps for one in forwards for g in one.gradients)
        if abs(slope - expected) > TOLERANCE * expected + rounding * sizes:
            raise RuntimeError(
                f"the loss falls along its gradient by {slope:.4g}, and by {expected:.4g} as the "
                f"gradient itself has it: the closure computes something else when it runs again. "
                f"Let it draw random numbers from torch's generators alone, and change nothing; "
                f"attention that drops out on CUDA needs torch.nn.attention.sdpa_kernel("
                f"SDPBackend.MATH) around it"
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
        backend = self._preconditioner.backend
        (failed,) = add_over_ranks(backend, [float(bool(errors))])
        require_no_failure(backend, errors[0] if errors else None, failed)

    def _mean(self, tensor: Tensor) -> Tensor:
        return mean_over_ranks(self._preconditioner.backend, tensor)
