"""Elementwise methods: Adam, SGD, and the diagonal of the Fisher.

They apply to any parameter. States have the shape of the gradient matrix, ``[groups, out, in]``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from soframe.checks.values import require_numbers
from soframe.kernels.samples import squared_gradients
from soframe.layers.layout import BlockShape
from soframe.methods.base import Call, Direction, Given, Method, WithoutFactors
from soframe.methods.momentum import Momentum, require_beta, second_moment
from soframe.methods.spectrum import Spectrum
from soframe.registry import register
from soframe.solvers.eigen import quotient
from soframe.specs import VALUE, FactorSpec, SecondOrder, TensorSpec


@register("method", "adamw")
@dataclass(frozen=True)
class AdamW(WithoutFactors):
    """Adam's update (Kingma and Ba, 2015, algorithm 1), without weight decay.

    With ``x`` the input of the stage, at its update number t::

        m <- b1 m + (1 - b1) x        v <- b2 v + (1 - b2) x^2
        update = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    Decoupled weight decay (Loshchilov and Hutter, 2019) acts on the parameters: it belongs to
    `soframe.Optimizer`, or to the optimizer that follows the preconditioner.

    Attributes:
        betas: The decays of m and v, each in ``[0, 1)``.
        eps: Added to the root in the denominator.
    """

    elementwise = True
    options: ClassVar[Mapping[str, str]] = {"betas": "betas", "eps": "eps"}

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def __post_init__(self) -> None:
        require_beta("AdamW", "betas", self.betas)
        require_eps("AdamW", self.eps)

    def state(self, shape: BlockShape) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(tuple(shape)) for name in ("mean", "square")}

    def direct(self, step: Given) -> Direction:
        new, (first, second) = step.incoming, self.betas
        mean = step.state["mean"].lerp(new, 1 - first)
        square = second_moment(step.state["square"], new, second)
        count = step.updates + 1
        # The correction of the mean is in the root: one pass less.
        scale = 1 - first**count
        root = square.sqrt().mul_(scale / math.sqrt(1 - second**count)).add_(self.eps * scale)
        return Direction(torch.div(mean, root, out=root), {"mean": mean, "square": square})


@register("method", "sgd")
@dataclass(frozen=True)
class SGD(WithoutFactors):
    """The gradient itself, or its classical momentum as in ``torch.optim.SGD``.

    Attributes:
        momentum: The decay of the sum of gradients; 0 for no momentum.
        nesterov: Whether the update is Nesterov's, see `Momentum`.

    Raises:
        ValueError: If the momentum is not in ``[0, 1)``, or zero with ``nesterov=True``.
    """

    elementwise = True
    options: ClassVar[Mapping[str, str]] = {"momentum": "momentum"}

    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        require_beta("SGD", "momentum", self.momentum)
        if self.nesterov and not self.momentum:
            raise ValueError("SGD: nesterov=True needs a momentum: pass momentum=0.9, for example")

    def state(self, shape: BlockShape) -> Mapping[str, TensorSpec]:
        return self._momentum.state(shape) if self.momentum else {}

    def settings(self) -> dict[str, Any]:
        return super().settings() if self.momentum else {}

    def direct(self, step: Given) -> Direction:
        if not step.state:
            return Direction(step.incoming.clone())
        return self._momentum.direct(step)  # also with a momentum that a param group sets to 0

    @property
    def _momentum(self) -> Momentum:
        return Momentum(self.momentum, self.nesterov, averaged=False)


@register("method", "diagonal")
@dataclass(frozen=True)
class Diagonal(Method):
    """The diagonal of the chosen Fisher: the update is ``g / (diag(F) + damping)``.

    Its factor ``[groups, out, in]`` is the mean over samples of the squared sample gradients, each
    summed over the positions at which the sample uses the weights (Amari et al., 2019; for the
    empirical Fisher, Dangel et al., 2020, call it the second moment). A Fisher with several
    columns, such as type-2, adds up the squares of its columns. A module that is called several
    times in one backward pass has a gradient for each call; products between calls are left out.
    """

    scalings = ("fisher",)

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        groups, out, into = shape
        return (FactorSpec("diagonal", "both", groups, out, kind="elementwise", columns=into),)

    def statistics(self, call: Call) -> Mapping[str, Tensor]:
        if call.inputs is None:
            return {}
        rows = call.helper.block_rows(call.inputs, call.output_rows)
        return {"diagonal": squared_gradients(rows, call.output_rows)}

    def direct(self, step: Given) -> Direction:
        if "diagonal" not in step.data:
            return Direction(step.incoming.clone())
        return Direction(quotient(step.incoming, step.data["diagonal"][VALUE] + step.damping))

    def spectrum(self, shape: BlockShape, data: SecondOrder) -> Spectrum:
        return Spectrum(data["diagonal"][VALUE])


def require_eps(method: str, eps: float) -> None:
    """Raise ValueError unless eps is a positive number."""
    require_numbers(method, eps=eps)
    if not 0 < eps < math.inf:
        raise ValueError(f"{method}: eps must be positive, not {eps!r}")
