"""FOOF: the block of a layer as ``A ⊗ I``, from its inputs alone (Benzing, 2022).

This is K-FAC under the assumption that output gradients are uncorrelated with unit variance, or
gradient descent on the layer's outputs rather than on its weights (Benzing, 2022, section 4; the
*forward-only* Fisher of the curvlinops library). The output side has no factor, so nothing is
accumulated, solved, sent or saved for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from soframe.layers.base import BlockShape
from soframe.methods.base import MAX_SIZE, Addend, Call, Method
from soframe.methods.spectrum import Spectrum, kronecker
from soframe.registry import register
from soframe.solvers.base import Solver
from soframe.specs import FactorSpec, SecondOrder


@register("method", "foof")
@dataclass(frozen=True)
class FOOF(Method):
    """K-FAC's input factor A (expand setting), with the identity as the output factor.

    Attributes:
        max_size: The longest side whose factor is a matrix; a longer one has the factor's diagonal.
    """

    max_size: int = field(default=MAX_SIZE, repr=False)

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        return (FactorSpec("A", "right", shape.groups, shape.in_features).up_to(self.max_size),)

    def statistics(self, call: Call) -> Mapping[str, Addend]:
        if call.inputs is None:
            return {}
        return {"A": call.up_to(self.max_size).input_moment}

    def precondition(
        self, gradient: Tensor, data: SecondOrder, solver: Solver, damping: float
    ) -> Tensor:
        return solver.apply_right(gradient, right=data["A"], damping=damping)

    def spectrum(self, shape: BlockShape, data: SecondOrder) -> Spectrum:
        like = next(iter(data["A"].values()))
        ones = like.new_ones(shape.groups, shape.out_features)
        return kronecker({"values": ones}, data["A"])

    def forward_only(self) -> Method:
        return self
