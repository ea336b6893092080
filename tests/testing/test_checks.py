"""The checks for parts that users write: soframe's own pass them, broken ones do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soframe.layers import Conv2dHelper, LinearHelper
from soframe.layers.base import Unit
from soframe.registry import describe
from soframe.solvers import Eigen, Inverse, NewtonSchulz, OrthogonalIteration, Solver
from soframe.specs import FactorSpec
from soframe.strategies import (
    BlockWork,
    CommOpt,
    HybridOpt,
    MemOpt,
    OwnerLocal,
    Placement,
    Sharded,
    Strategy,
)
from soframe.testing import check_layer_helper, check_solver, check_strategy

LAYERS = {
    "linear": (lambda: nn.Linear(4, 3), (5, 4)),
    "linear, no bias": (lambda: nn.Linear(4, 3, bias=False), (5, 4)),
    "linear, positions": (lambda: nn.Linear(4, 3), (5, 2, 3, 4)),
    "conv": (lambda: nn.Conv2d(3, 4, 3), (2, 3, 6, 5)),
    "conv, all settings": (
        lambda: nn.Conv2d(4, 6, (3, 2), (2, 1), (2, 1), (1, 2), 2, True, "circular"),
        (2, 4, 7, 6),
    ),
    "conv, depthwise": (lambda: nn.Conv2d(4, 4, 3, padding="same", groups=4), (2, 4, 5, 5)),
}


@pytest.mark.parametrize("case", LAYERS)
def test_own_layer_helpers_pass(case: str) -> None:
    make, shape = LAYERS[case]
    check_layer_helper(make(), torch.randn(shape))


class Swapped(Conv2dHelper):
    def input_rows(self, *inputs: Tensor) -> Tensor:
        return super().input_rows(*inputs).flip(3)


class Averaged(LinearHelper):
    def input_rows(self, *inputs: Tensor) -> Tensor:
        return super().input_rows(*inputs) / inputs[0].shape[0]


class WrongFastPath(LinearHelper):
    def output_moment(
        self, output_rows: Tensor, total: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        return super().output_moment(output_rows, total, 2 * scale)


class ForgetsTheTotal(LinearHelper):
    def input_moment(self, inputs: tuple[Tensor, ...], output_rows: Tensor, *_: Any) -> Tensor:
        return super().input_moment(inputs, output_rows)


class MixedSamples(LinearHelper):
    def input_rows(self, *inputs: Tensor) -> Tensor:
        return super().input_rows(*inputs).flatten(1, 2).unsqueeze(1)

    def output_rows(self, grad_output: Tensor) -> Tensor:
        return super().output_rows(grad_output).flatten(1, 2).unsqueeze(1)


class LosesBias(LinearHelper):
    def from_matrix(self, matrix: Tensor) -> tuple[Tensor | None, Tensor | None]:
        return super().from_matrix(matrix)[0], None


class PacksTwice(LinearHelper):
    """Unpacks what it has packed, and its rows make what it packs."""

    def input_rows(self, *inputs: Tensor) -> Tensor:
        return 2 * super().input_rows(*inputs)

    def to_matrix(self, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return super().to_matrix(None if weight is None else 2 * weight, bias)

    def from_matrix(self, matrix: Tensor) -> tuple[Tensor | None, Tensor | None]:
        weight, bias = super().from_matrix(matrix)
        return None if weight is None else weight / 2, bias


class Remembering(nn.Linear):
    """Leaves what it was called with on itself."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.detach()
        return super().forward(x)


class ReadsTheLastCall(LinearHelper):
    """Right where every call is followed by its backward pass."""

    unit = None

    def input_rows(self, *inputs: Tensor) -> Tensor:
        seen = getattr(self.module, "seen", None)
        assert isinstance(seen, Tensor)
        return super().input_rows(seen)


def test_a_helper_that_reads_what_the_last_call_left_is_found() -> None:
    module, x = Remembering(4, 3), torch.randn(5, 2, 4)
    check_layer_helper(module, x, helper=LinearHelper)
    with pytest.raises(AssertionError, match="the first of two calls: gradient of sample 0"):
        check_layer_helper(module, x, helper=ReadsTheLastCall)


@pytest.mark.parametrize(
    ("helper", "message"),
    [
        (PacksTwice, "sum of squares after pack"),
        (Averaged, "gradient of sample 0"),
        (WrongFastPath, "fast output_moment"),
        (ForgetsTheTotal, "fast input_moment, added"),
        (MixedSamples, "keep the batch"),
        (LosesBias, "loses the bias"),
    ],
)
def test_a_wrong_linear_helper_is_found(helper: type[LinearHelper], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_layer_helper(nn.Linear(4, 3), torch.randn(5, 2, 4), helper=helper)


def test_a_permuted_convolution_is_found() -> None:
    with pytest.raises(AssertionError, match="gradient of sample"):
        check_layer_helper(nn.Conv2d(2, 3, 2), torch.randn(2, 2, 4, 4), helper=Swapped)


class Renamed(nn.Module):
    """A linear layer whose parameter has a name of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel.T


class Kernel(LinearHelper):
    """Right in all that it says."""

    name = "kernel"

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.weight = self._full_weight = module.get_parameter("kernel")

    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        return None

    @classmethod
    def names(cls, module: nn.Module) -> tuple[str, ...]:
        return ("kernel",)

    @classmethod
    def of(cls, module: nn.Module, trained: Any, *, joint: bool = True) -> list[LinearHelper]:
        return [cls(module)] if "kernel" in trained else []

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return {self.name: self.weight}

    def pack(self, tensors: Mapping[str, Tensor]) -> Tensor:
        return tensors[self.name].unsqueeze(0)

    def unpack(self, matrix: Tensor) -> Mapping[str, Tensor]:
        return {self.name: matrix[0]}


class CallsItWeight(Kernel):
    name = "weight"


class Nameless(LinearHelper):
    @classmethod
    def unsupported(cls, module: nn.Module) -> str | None:
        return None


class Twice(Kernel):
    @classmethod
    def of(cls, module: nn.Module, trained: Any, *, joint: bool = True) -> list[LinearHelper]:
        return 2 * super().of(module, trained, joint=joint)


class TakesTheFirst(Kernel):
    def take_inputs(
        self, inputs: tuple[Tensor, ...], index: Tensor, unit: Unit
    ) -> tuple[Tensor, ...]:
        return super().take_inputs(inputs, torch.zeros_like(index), unit)


class CountsOneRow(Kernel):
    """Its rows are right, and the number of them that it tells is not."""

    def group_rows(self, inputs: tuple[Tensor, ...], output_rows: Tensor) -> Tensor:
        return torch.ones(1)

    def factor(self, spec: FactorSpec) -> FactorSpec:
        return replace(spec, mean_over="group rows") if spec.mean_over == "rows" else spec


def test_parameters_may_have_any_name() -> None:
    check_layer_helper(Renamed(), torch.randn(5, 2, 4), helper=Kernel)


@pytest.mark.parametrize(
    ("helper", "message"),
    [
        (CallsItWeight, "not all of them trained"),
        (Nameless, r"names\(\) gives no parameter"),
        (Twice, "blocks share a parameter"),
        (TakesTheFirst, "take_inputs, by sample"),
        (CountsOneRow, "G of a Preconditioner"),
    ],
)
def test_a_wrong_helper_of_other_names_is_found(helper: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_layer_helper(Renamed(), torch.randn(5, 2, 4), helper=helper)


def test_the_batch_may_be_any_dimension() -> None:
    norm = nn.LayerNorm(3)
    x = torch.randn(4, 5, 3)
    check_layer_helper(norm, x)
    with pytest.raises(AssertionError, match="keep the batch"):
        check_layer_helper(norm, x, batch_dim=1)
    attention = nn.MultiheadAttention(4, 2)
    rows = torch.randn(5, 3, 4)
    check_layer_helper(attention, rows, rows, rows, batch_dim=1)
    with pytest.raises(AssertionError, match="keep the batch"):
        check_layer_helper(attention, rows, rows, rows)


def test_a_module_without_helper_is_refused() -> None:
    with pytest.raises(ValueError, match="no layer helper is registered for PReLU"):
        check_layer_helper(nn.PReLU(), torch.randn(2, 3))


@pytest.mark.parametrize(
    "solver",
    [
        Eigen(),
        Eigen(follows=True),
        Inverse(),
        Inverse(split="sqrt"),
        Inverse(split="full"),
        OrthogonalIteration(),
        NewtonSchulz(),
    ],
    ids=repr,
)
@pytest.mark.slow
def test_own_solvers_pass(solver: Solver) -> None:
    check_solver(solver)


@dataclass(frozen=True)
class FewSteps(Inverse):
    """Newton-Schulz steps of a fixed number: approximate by design."""

    steps: int = 8

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        if matrix.dim() == 2:
            return super().solve(matrix, damping)
        eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype)
        damped = matrix + damping[:, None, None] * eye
        inverse = eye / torch.linalg.matrix_norm(damped)[:, None, None]
        for _ in range(self.steps):
            inverse = 2 * inverse - inverse @ damped @ inverse
        return {"inverse": (inverse + inverse.mT) / 2}


class Rounded(Inverse):
    """Inverses in three digits, whose residual is large where the condition is."""

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        data = super().solve(matrix, damping)
        return {name: tensor.bfloat16().to(tensor.dtype) for name, tensor in data.items()}


STATED: dict[str, Any] = {"conditions": (1.0, 100.0), "dampings": (1.0, 1e-2)}


def test_a_solver_may_be_approximate_by_design() -> None:
    check_solver(FewSteps(), tolerance=0.01, **STATED)
    check_solver(Rounded(), tolerance=0.02)
    for solver in (FewSteps(), Rounded()):
        with pytest.raises(AssertionError, match="relative error"):
            check_solver(solver, **STATED)


class Uphill(Inverse):
    """Off by three tenths, along the gradient: an ill-conditioned slope is no more than that."""

    def apply(self, gradient: Tensor, **data: Any) -> Tensor:
        result = super().apply(gradient, **data)
        return result - 0.3 * gradient * (result.norm() / gradient.norm())


@pytest.mark.parametrize(
    ("solver", "stated", "message"),
    [
        (FewSteps(steps=3), {"tolerance": 0.1, **STATED}, "relative error .* > 1.0e-01"),
        (Uphill(), {"tolerance": 0.5}, "not a descent direction"),
    ],
    ids=["three steps", "uphill"],
)
def test_an_approximate_solver_keeps_its_tolerance(
    solver: Solver, stated: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        check_solver(solver, **stated)


def test_a_tolerance_is_below_one() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        check_solver(Inverse(), tolerance=1.0)


class IgnoresDamping(Eigen):
    def apply(self, gradient: Tensor, **data: Any) -> Tensor:
        return super().apply(gradient, **{**data, "damping": 1e-12})


class SwapsSides(Inverse):
    def apply(
        self,
        gradient: Tensor,
        *,
        left: Mapping[str, Tensor],
        right: Mapping[str, Tensor],
        damping: float,
    ) -> Tensor:
        return right["inverse"] @ gradient.mT @ left["inverse"]


class InPlace(Eigen):
    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        data = super().solve(matrix, damping)
        matrix.zero_()
        return data


class WrongSpec(Eigen):
    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        data = super().solve(matrix, damping)
        return {"values": data["values"], "vectors": data["vectors"]}


class SwallowsNaN(Eigen):
    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        return super().solve(matrix.nan_to_num(1.0), damping)


class Stale(Inverse):
    """Returns what it has, whatever has become of the factor."""

    def solve_again(
        self, matrix: Tensor, damping: Tensor, last: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in last.items()}


class Doubling(Inverse):
    def solve_again(
        self, matrix: Tensor, damping: Tensor, last: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        return {name: 2 * tensor for name, tensor in self.solve(matrix, damping).items()}


class KeepsTheBasis(Eigen):
    """Right as long as the factor does not turn."""

    def solve_again(
        self, matrix: Tensor, damping: Tensor, last: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        vectors = last["vectors"]
        values = (vectors * (matrix @ vectors)).sum(-2)
        return {"vectors": vectors.clone(), "values": values.clamp(min=0)}


class WritesIntoTheLast(Eigen):
    def solve_again(
        self, matrix: Tensor, damping: Tensor, last: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        data = self.solve(matrix, damping)
        for name, tensor in last.items():
            tensor.copy_(data[name])
        return data


class HardlyDamps(Inverse):
    def shares(self, mean_traces: Sequence[Tensor], damping: float | Tensor) -> list[Tensor]:
        shares = super().shares(mean_traces, damping)
        return shares if len(shares) == 1 else [share / 100 for share in shares]


class DampsOneOfTwo(Inverse):
    """Enough beside the identity, and not beside a small factor."""

    def shares(self, mean_traces: Sequence[Tensor], damping: float | Tensor) -> list[Tensor]:
        whole = Solver.shares(self, mean_traces, damping)
        return [whole[0], *(1e-12 * share for share in whole[1:])]


class FollowsUnasked(Eigen):
    """It has the method, and does not say so."""

    def follow(self, matrix: Tensor, data: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        return Eigen(follows=True).follow(matrix, data)


class FollowsTooFar(Eigen):
    def follow(self, matrix: Tensor, data: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        return {"values": data["values"] + matrix.diagonal(dim1=1, dim2=2)}


class FollowsInPlace(Eigen):
    def follow(self, matrix: Tensor, data: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        return {"values": data["values"].mul_(1.01)}


class FollowsAnotherName(Eigen):
    def follow(self, matrix: Tensor, data: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        return {"eigenvalues": data["values"].clone()}


@pytest.mark.parametrize(
    ("solver", "message"),
    [
        (FollowsUnasked(), "`follows` is false"),
        (FollowsTooFar(follows=True), "relative error"),
        (FollowsInPlace(follows=True), "follow changes the data"),
        (FollowsAnotherName(follows=True), "follow.. makes {'eigenvalues'}"),
        (HardlyDamps(), "add .* to their block, and the damping is 100"),
        (DampsOneOfTwo(), "factors 100 I and 0.01 I add"),
        (Stale(), "solved again after 0.1 of the factors: .*relative error"),
        (Doubling(), "solved again after 0.8 of the factors: .*relative error"),
        (KeepsTheBasis(), "solved again in another basis: .*relative error"),
        (WritesIntoTheLast(), "solve_again changes the last data"),
        (IgnoresDamping(), "relative error"),
        (SwapsSides(), "shape|relative error"),
        (InPlace(), "changes the factor"),
        (WrongSpec(), r"tensors\(\) announces .*, solve\(\) returns "),
        (SwallowsNaN(), "NaNs gives finite"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Solver) else "",
)
def test_a_wrong_solver_is_found(solver: Solver, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_solver(solver)


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    [
        Sharded(group=2, deferred=True, wire="bfloat16"),
        *(
            pytest.param(strategy, marks=pytest.mark.thorough)
            for strategy in (
                HybridOpt(),
                OwnerLocal(),
                CommOpt(colocate=False),
                CommOpt(),
                MemOpt(),
                HybridOpt(gradient_workers=1),
                HybridOpt(gradient_workers=0.75, colocate=False),
                Sharded(),
                Sharded(group=None, deferred=True, colocate=True),
            )
        ),
    ],
    ids=describe,  # the repr of a cost function has an address, which differs between workers
)
def test_own_strategies_pass(strategy: Strategy) -> None:
    check_strategy(strategy)


@dataclass(frozen=True)
class Shifting(Strategy):
    """Its answer depends on how often it was asked."""

    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        placement = MemOpt().place(work, ranks)
        return replace(placement, notes=(str(object()),))


class OwnsNowhere(Strategy):
    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        placement = MemOpt().place(work, ranks)
        blocks = tuple(replace(b, owners=(ranks, ranks)) for b in placement.blocks)
        return replace(placement, blocks=blocks)


class TwoOwners(Strategy):
    """Takes for granted that blocks have two factors."""

    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        placement = MemOpt().place(work, ranks)
        blocks = tuple(replace(b, owners=(0, 0)) for b in placement.blocks)
        return replace(placement, blocks=blocks)


class ForgetsWork(Strategy):
    def place(self, work: Sequence[BlockWork], ranks: int) -> Placement:
        return CommOpt().place(work[:1], ranks)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (Shifting(), "pure function"),
        (OwnsNowhere(), "an owner is not a rank"),
        (ForgetsWork(), "other work"),
        (TwoOwners(), "'foof'.*one owner per factor"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Strategy) else "",
)
@pytest.mark.slow
def test_a_wrong_strategy_is_found(strategy: Strategy, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_strategy(strategy)
