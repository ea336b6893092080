"""A chain gives every stage its own part, and what the stage before has made of the gradient."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.layers.layout import BlockShape
from soframe.methods import FOOF, KFAC, Chain, Direction, Given, KFACReduce, Method, Momentum
from soframe.methods.base import Candidate
from soframe.registry import describe
from soframe.solvers import Eigen, Inverse, Solver
from soframe.specs import VALUE, FactorSpec, SecondOrder, TensorSpec
from tests.curvature import closing, fill, gradient_matrix, put_gradients, randn
from tests.methods import stages

SHAPE = BlockShape(1, 2, 3)


@dataclass(frozen=True)
class Counted(Method):
    """Adds its number times the averaged gradient; counts, and sums gradients in a factor."""

    clipped = False
    number: float = 1.0
    at_once: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "starts_at_once", self.at_once)

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        first = FactorSpec(
            "sum", "both", *shape[:2], kind="elementwise", reads="gradient", columns=shape[2]
        )
        later = FactorSpec(
            "later",
            "both",
            *shape[:2],
            kind="elementwise",
            reads="gradient",
            columns=shape[2],
            needs=("sum",),
        )
        return (first, later)

    def observe(self, gradient: Tensor, data: SecondOrder) -> Mapping[str, Tensor]:
        before = data["sum"][VALUE] if "sum" in data else torch.zeros_like(gradient)
        return {"sum": self.number * gradient, "later": before}

    def state(self, shape: BlockShape) -> Mapping[str, TensorSpec]:
        return {"count": TensorSpec((shape.groups,))}

    def direct(self, given: Given) -> Direction:
        matrix = given.incoming + self.number * given.gradient
        return Direction(matrix, {"count": given.state["count"] + self.number})

    def rebase(
        self, state: Mapping[str, Tensor], old: SecondOrder, new: SecondOrder
    ) -> Mapping[str, Tensor]:
        return {"count": state["count"] + old["sum"][VALUE] - new["sum"][VALUE]}

    def solver(self, factor: FactorSpec, default: Solver) -> Solver | None:
        assert factor.name in ("sum", "later"), factor
        assert set(factor.needs) <= {"sum"}
        return Inverse() if self.number > 2 else None


def given(chain: Method, names: tuple[str, ...]) -> Given:
    gradient = randn(*SHAPE)
    return Given(
        gradient=gradient,
        incoming=gradient,
        data={name: {VALUE: randn(1)} for name in names},
        state={name: torch.zeros(spec.shape) for name, spec in chain.state(SHAPE).items()},
        updates=0,
        solver=Eigen(),
        damping=0.1,
    )


def test_stages_use_their_own_names() -> None:
    chain = Chain((Counted(1.0), Counted(3.0), Momentum()))
    names = [factor.name for factor in chain.factors(SHAPE)]
    assert names == ["0.sum", "0.later", "1.sum", "1.later"]
    assert [factor.needs for factor in chain.factors(SHAPE)] == [(), ("0.sum",), (), ("1.sum",)]
    assert list(chain.state(SHAPE)) == ["0.count", "1.count", "momentum"]
    solvers = [chain.solver(factor, Eigen()) for factor in chain.factors(SHAPE)]
    assert solvers == [None, None, Inverse(), Inverse()]
    alone = Chain((Counted(), Momentum()))
    assert [factor.name for factor in alone.factors(SHAPE)] == ["sum", "later"]


def test_a_stage_has_the_gradient_and_what_came_before() -> None:
    chain = Chain((Counted(1.0), Counted(3.0)))
    own = given(chain, ("0.sum", "1.sum"))
    made = chain.direct(own)
    assert torch.equal(made.matrix, own.gradient + own.gradient + 3 * own.gradient)
    assert {name: float(value) for name, value in made.state.items()} == {
        "0.count": 1.0,
        "1.count": 3.0,
    }
    seen = chain.observe(own.gradient, {"1.sum": {VALUE: torch.ones(*SHAPE)}})
    assert torch.equal(seen["1.sum"], 3 * own.gradient)
    assert [float(seen[name].sum()) for name in ("0.later", "1.later")] == [0.0, 6.0]
    old = {"0.sum": {VALUE: torch.tensor([5.0])}, "1.sum": {VALUE: torch.tensor([7.0])}}
    new = {"0.sum": {VALUE: torch.tensor([1.0])}, "1.sum": {VALUE: torch.tensor([1.0])}}
    moved = chain.rebase(made.state, old, new)
    assert {name: float(v) for name, v in moved.items()} == {"0.count": 5.0, "1.count": 9.0}


def test_a_stage_without_data_passes_its_input_on() -> None:
    chain = Chain((Counted(1.0), Counted(3.0), Counted(7.0, at_once=True)))
    own = given(chain, ("1.sum",))  # what needs others is not waited for
    made = chain.direct(own)
    assert torch.equal(made.matrix, own.gradient + 3 * own.gradient + 7 * own.gradient)
    assert set(made.state) == {"1.count", "2.count"}
    waiting = Chain((Counted(1.0),))
    step = given(waiting, ())
    found = waiting.direct(step)
    assert torch.equal(found.matrix, step.gradient)
    assert found.matrix is not step.gradient  # an update may be changed in place
    assert not found.state


def test_what_a_chain_is_follows_from_its_stages() -> None:
    chain = Chain((KFAC(), Chain(("momentum", Momentum(0.5)))))
    assert chain.stages == (KFAC(), Momentum(), Momentum(0.5))
    assert (chain.joint, chain.clipped, chain.starts_at_once) == (True, False, True)
    assert (chain.captures, chain.refreshes_after, chain.reduces) == (True, False, False)
    assert Chain((KFAC(),)).clipped
    assert not Chain(("muon",)).joint
    assert Chain((KFACReduce(), "momentum")).reduces
    assert Chain((KFAC(), "momentum")).forward_only() == Chain((FOOF(), "momentum"))
    assert describe(Chain(("momentum",))) == f"Chain(stages=({Momentum()!r},))"
    assert Chain(("momentum",)) != Chain((Momentum(0.5),))
    assert chain.effort(SHAPE) == 12
    head = Candidate("head", nn.Linear(3, 2), ("weight",), SHAPE, last=True)
    assert Chain(("momentum",)).unsuited(head) is None
    assert "head" in str(Chain(("momentum", "orthogonalise")).unsuited(head))


@dataclass(frozen=True)
class After(Counted):
    """Is refreshed after the update."""

    refreshes_after = True


@dataclass(frozen=True)
class Kaisa(Method):
    """Is defined under one scaling alone."""

    scalings = ("kaisa",)

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        return ()


@dataclass(frozen=True)
class Fisher(Kaisa):
    """Likewise, under another."""

    scalings = ("fisher",)


def test_stages_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Chain(())
    with pytest.raises(TypeError, match=r"sequence of methods: pass \('kfac',\)"):
        Chain("kfac")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="after the update"):
        Chain((After(), Counted()))
    assert Chain((After(), "momentum")).refreshes_after
    with pytest.raises(ValueError, match="as one row"):
        Chain((KFAC(), KFACReduce()))
    with pytest.raises(ValueError, match="scaling"):
        Chain((Kaisa(), Fisher()))
    assert Chain((Kaisa(), "momentum")).scalings == ("kaisa",)
    with pytest.raises(TypeError, match="a method is"):
        Chain((3,))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "stages_", [("orthogonalise", "match-rms"), ("match-rms", "orthogonalise")]
)
def test_the_auxiliary_rate_is_the_least_of_the_stages(stages_: tuple[str, str]) -> None:
    """AdamW's rate is a fifth of the spectral one, and equals that of an orthogonal matrix."""
    model = fill(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    with closing(soframe.Optimizer(model, Chain(stages_), lr=0.1)) as own:
        rates = {group["method"].partition(":")[0]: group["lr"] for group in own.param_groups}
    assert rates.pop("auxiliary") == pytest.approx(0.02)
    assert list(rates.values()) == [0.1]


def test_curvature_then_momentum() -> None:
    """K-FAC's direction enters the momentum, once data are there and every step after."""
    model = fill(nn.Sequential(nn.Linear(3, 2)))
    alone = fill(nn.Sequential(nn.Linear(3, 2)))
    buffer = torch.zeros(1, 2, 4, dtype=torch.float64)
    chain = Chain((KFAC(), Momentum(0.5, averaged=False)))
    with (
        closing(stages.preconditioner(model, chain)) as own,
        closing(stages.preconditioner(alone, "kfac")) as plain,
    ):
        for number in range(3):
            for net, one in ((model, own), (alone, plain)):
                net(randn(4, 3, seed=number)).square().mean().backward()
                put_gradients(net, seed=number)
                one.step()
            buffer = gradient_matrix(plain.blocks[0]) + 0.5 * buffer
            torch.testing.assert_close(
                gradient_matrix(own.blocks[0]), buffer, rtol=1e-12, atol=1e-14
            )
