"""K-FAC: the block of a layer as the Kronecker product ``A ⊗ G`` (Martens and Grosse, 2015).

A is the second moment of the layer's inputs, G is the second moment of its output gradients. With
weight sharing every position is treated as a sample of its own (*expand*: Eschenhagen et al.,
2023), which for convolutions is KFC (Grosse and Martens, 2016), or the positions of a sample are
reduced to one row (*reduce*).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from soframe.layers.base import BlockShape
from soframe.methods.base import MAX_SIZE, Addend, Call, Method
from soframe.methods.foof import FOOF
from soframe.methods.spectrum import Spectrum, kronecker
from soframe.registry import register
from soframe.solvers.base import Solver
from soframe.solvers.scaled import Rooted
from soframe.specs import FactorSpec, SecondOrder


@register("method", "kfac")
@dataclass(frozen=True)
class KFAC(Method):
    """Kronecker-factored approximate curvature, expand setting.

    The update of X ``[groups, out, in]`` is ``(A ⊗ G + damping I)^-1 X``, exactly or with factored
    damping, as the solver defines it (Martens and Grosse, 2015, sections 3 and 6.3).

    Attributes:
        max_size: The longest side whose factor is a matrix; a longer one has the factor's diagonal.
    """

    # Not in the text by which states are compared: they load if their factors have the same shapes.
    max_size: int = field(default=MAX_SIZE, repr=False)

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        return (
            FactorSpec("A", "right", shape.groups, shape.in_features).up_to(self.max_size),
            FactorSpec("G", "left", shape.groups, shape.out_features).up_to(self.max_size),
        )

    def statistics(self, call: Call) -> Mapping[str, Addend]:
        call = call.up_to(self.max_size)
        moments: dict[str, Addend] = {"G": call.output_moment}
        if call.inputs is not None:
            moments["A"] = call.input_moment
        return moments

    def precondition(
        self, gradient: Tensor, data: SecondOrder, solver: Solver, damping: float
    ) -> Tensor:
        return solver.apply(gradient, left=data["G"], right=data["A"], damping=damping)

    def spectrum(self, shape: BlockShape, data: SecondOrder) -> Spectrum:
        return kronecker(data["G"], data["A"])

    # Not of a subclass, which defines another curvature.

    def forward_only(self) -> Method:
        return FOOF(self.max_size) if type(self) is KFAC else super().forward_only()

    def tied(self) -> Method | None:
        return TiedKFAC(self.max_size) if type(self) is KFAC else None


@dataclass(frozen=True)
class TiedKFAC(Method):
    """K-FAC of a table that is an embedding and a head: one Kronecker product for all uses.

    Over uses u and positions t of samples n, with the outer product ``W = g a^T`` of each,

        L = (1/N) sum W W^T / in        R = (1/N) sum W^T W / out

    are the partial traces of ``(1/N) sum (a a^T) ⊗ (g g^T)``, and the block is ``L ⊗ R / m`` with
    their mean trace m: as in K-FAC, products between positions and between uses are left out. The
    sides trade places between uses, so no sum of A and sum of G would do. R is a diagonal.
    """

    scalings = ("fisher",)

    max_size: int = field(default=MAX_SIZE, repr=False)

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        groups, out, into = shape
        return (
            FactorSpec("L", "left", groups, out, reads="both").up_to(self.max_size),
            FactorSpec("R", "right", groups, into, reads="both", kind="diagonal"),
        )

    def statistics(self, call: Call) -> Mapping[str, Tensor]:
        if call.inputs is None:
            return {}
        _, batch, shared, _ = call.rows.shape
        if shared > 1:  # every position is a sample of its own
            inputs = tuple(x.reshape(batch * shared, -1) for x in call.inputs)
            call = replace(call, inputs=inputs, rows=call.rows.flatten(1, 2).unsqueeze(2))
        left, right = call.up_to(self.max_size).sample_moments()
        _, out, into = call.helper.shape
        return {"L": left / into, "R": right / out}

    def solver(self, factor: FactorSpec, default: Solver) -> Solver:
        return Rooted(default)

    def precondition(
        self, gradient: Tensor, data: SecondOrder, solver: Solver, damping: float
    ) -> Tensor:
        return solver.apply(gradient, left=data["L"], right=data["R"], damping=damping)

    def spectrum(self, shape: BlockShape, data: SecondOrder) -> Spectrum:
        return kronecker(data["L"], data["R"])


@register("method", "kfac-reduce")
@dataclass(frozen=True)
class KFACReduce(KFAC):
    """Kronecker-factored approximate curvature, reduce setting (Eschenhagen et al., 2023, 3.3).

    ``A = E[a a^T]`` and ``G = E[g g^T]``, with ``a`` the mean of a sample's inputs over positions
    and ``g`` the sum of its output gradients over positions. It is exact for a linear layer whose
    outputs are averaged, where *expand* is not, and an approximation if positions have losses of
    their own. Each sample is one row, so moments over T positions cost T times less; a module that
    is called several times has one row for each call.

    Attributes:
        max_size: The longest side whose factor is a matrix, see `KFAC`.
    """

    reduces: ClassVar[bool] = True

    def statistics(self, call: Call) -> Mapping[str, Addend]:
        call = call.up_to(self.max_size)
        moments: dict[str, Addend] = {"G": call.summed_output_moment}
        if call.inputs is not None:
            moments["A"] = call.mean_input_moment
        return moments
