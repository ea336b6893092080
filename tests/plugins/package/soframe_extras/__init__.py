"""One component of every kind, as another package would write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import soframe
from soframe.methods import KFAC
from soframe.specs import TensorSpec
from soframe.strategies import BlockPlacement
from soframe.trust_region import DampingPolicy


class Scale(nn.Module):
    """Multiplies every feature by a weight: a linear layer with a row of one per group."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


@soframe.register("layer", Scale)
class ScaleHelper(soframe.LayerHelper):
    """Each feature is a group with one input and one output."""

    @property
    def groups(self) -> int:
        return self.module.weight.numel()

    def input_rows(self, *inputs: Tensor) -> Tensor:
        return inputs[0].T[:, :, None, None]

    def output_rows(self, grad_output: Tensor) -> Tensor:
        return grad_output.T[:, :, None, None]


class HalfKFAC(KFAC):
    """Half of what K-FAC gives."""

    def precondition(self, gradient, data, solver, damping):
        return super().precondition(gradient, data, solver, damping) / 2


class DenseInverse(soframe.Solver):
    """Plain inverses with the whole damping each; no dataclass, no repr of its own."""

    def tensors(self, factor):
        return {"inverse": TensorSpec(factor.shape)}

    def solve(self, matrix, damping):
        return {
            "inverse": torch.linalg.inv(
                matrix + torch.diag_embed(damping[:, None].expand(matrix.shape[:2]))
            )
        }

    def apply(self, gradient, *, left, right, damping):
        return left["inverse"] @ gradient @ right["inverse"]


class LastRank(soframe.Strategy):
    """The last rank does everything."""

    def place(self, work, ranks):
        last = ranks - 1
        blocks = tuple(
            BlockPlacement(b.name, (last,) * len(b.factors), (last,), (last,) * ranks) for b in work
        )
        return soframe.Placement("last-rank", ranks, tuple(work), blocks)


class Quiet(soframe.comm.SingleProcess):
    """One process."""


class TwiceSquared(soframe.Loss):
    """The squared error, summed over features: twice the identity."""

    def hessian_product(self, outputs, vectors):
        return 2 * vectors

    def half_factor(self, outputs):
        for feature in range(outputs.shape[1]):
            column = torch.zeros_like(outputs)
            column[:, feature] = 2**0.5
            yield column


class Halving(DampingPolicy):
    """Half as much at every step."""

    def at(self, step):
        return 0.5**step
