"""A state that does not fit is refused with a reason, and nothing has changed then."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from soframe import Preconditioner
from soframe.checkpoint import seal
from soframe.methods import KFAC, SOAP, Chain, Method, Momentum
from soframe.settings import grouped
from soframe.solvers import Solver
from soframe.specs import FactorSpec
from tests import kit
from tests.distributed.training import Case, Run
from tests.state.test_resume import equal

State = dict[str, Any]
CASE = Case({"solve_every": 2})


def make() -> Run:
    return Run(CASE).train(range(3))


def change(*path: str, to: Any) -> Callable[[State], None]:
    def apply(state: State) -> None:
        for key in path[:-1]:
            state = state[key]
        state[path[-1]] = to(state[path[-1]]) if callable(to) else to

    return apply


def drop(*path: str) -> Callable[[State], None]:
    def apply(state: State) -> None:
        for key in path[:-1]:
            state = state[key]
        del state[path[-1]]

    return apply


HEAD = ("blocks", "head")
# What a state says after it was changed, with new checksums.
BROKEN: dict[str, tuple[Callable[[State], None], str]] = {
    "no step": (drop("step"), "truncated: it lacks step"),
    "no format": (drop("format"), "not the state of a soframe.Preconditioner"),
    "no block": (drop(*HEAD), r"lacks \['head'\] and has nothing"),
    "no factor": (drop(*HEAD, "factors", "A"), "damaged: head/factors/A is missing"),
    "no data": (drop(*HEAD, "second_order", "A", "inverse"), "head/second_order/A/inverse is miss"),
    "other scaling": (change("scaling", to="kaisa"), "made with scaling='kaisa', not 'fisher'"),
    "other method": (change(*HEAD, "method", to="Other()"), "was made by Other()"),
    "other shape": (change(*HEAD, "shape", to=[1, 3, 7]), r"shape \[1, 3, 7\] in the state and"),
    "factor shape": (
        change(*HEAD, "factors", "A", to=lambda t: t[:, :-1]),
        r"head/factors/A is torch.float64, \(1, 20\), not .* tensor of shape \(1, 21\)",
    ),
}


def everything(run: Run) -> State:
    return {
        "state": copy.deepcopy(run.preconditioner.state_dict()),
        "weights": run.weights(),
        "memory": run.preconditioner.memory_usage(),
    }


def assert_refused(run: Run, state: Any, reason: str) -> None:
    before = everything(run)
    with pytest.raises(ValueError, match=reason):
        run.preconditioner.load_state_dict(state)
    assert equal(everything(run), before)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_state_is_refused_and_changes_nothing(name):
    breaking, reason = BROKEN[name]
    good = copy.deepcopy(make().preconditioner.state_dict())
    run = Run(CASE)
    run.step(7)
    run.preconditioner.load_state_dict(copy.deepcopy(good))
    run.step(3)
    breaking(good)
    assert_refused(run, seal(good), reason)


@pytest.mark.parametrize("foreign", [None, [], {}, {"state": {}}, nn.Linear(1, 1).state_dict()])
def test_foreign_things_are_refused(foreign):
    assert_refused(make(), foreign, r"not the state of a soframe\.Preconditioner")


def test_a_refusal_leaves_the_window_under_way_alone():
    run, plain = make(), make()

    def try_to_load(run: Run) -> None:
        with pytest.raises(ValueError, match="not the state"):
            run.preconditioner.load_state_dict({})

    run.step(3, try_to_load)
    plain.step(3)
    assert torch.equal(run.weights(), plain.weights())


@pytest.mark.parametrize(
    ("widths", "options", "reason"),
    [
        ((4, 3, 2), {}, r"lacks \['1'\] and has nothing besides"),
        ((5, 3), {}, r"block '0' has shape \[1, 3, 5\] in the state and \[1, 3, 6\] in the model"),
        ((4, 3), {"scaling": "kaisa"}, "made with scaling='fisher', not 'kaisa'"),
    ],
)
def test_a_state_of_something_else_is_refused(widths, options, reason):
    def build(widths: tuple[int, ...], **options: Any) -> Preconditioner:
        layers = [nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)]  # noqa: RUF007
        return Preconditioner(
            nn.Sequential(*layers), kl_clip=None, **grouped({"statistics_every": 1, **options})
        )

    state = build((4, 3)).state_dict()
    with pytest.raises(ValueError, match=reason):
        build(widths, **options).load_state_dict(state)


class Late(KFAC):
    """Is solved after the update, as SOAP is, by the user's solver."""

    refreshes_after = True


@pytest.mark.parametrize(("stage", "refused"), [(SOAP(), True), (Momentum(), False)])
def test_what_is_kept_in_bases_does_not_outlive_them(stage: Method, refused: bool) -> None:
    """The solver of one stage changes, and with it the data of all stages are gone."""
    settings: dict[str, Any] = {"method": Chain((Late(), stage)), "kl_clip": None}
    model = nn.Linear(3, 2)
    own = Preconditioner(
        model, solver="eigen", statistics_every=1, solve_every=1, **grouped(settings)
    )
    kit.train(model, lambda net, step: net(torch.eye(3) + step).square().mean(), range(3), own)
    state = own.state_dict()
    own.close()
    other = Preconditioner(
        model, solver="inverse", statistics_every=1, solve_every=1, **grouped(settings)
    )
    if refused:
        with pytest.raises(ValueError, match=r"solved by Eigen.*is in the bases of the last solve"):
            other.load_state_dict(state)
    else:
        other.load_state_dict(state)
    other.close()


def after_a_step(model: nn.Module, method: Method) -> tuple[State, dict[str, Any]]:
    """Return the state after a step with ``solver="eigen"``, and the other settings."""
    settings: dict[str, Any] = {"method": method, "kl_clip": None, "statistics_every": 1}
    own = Preconditioner(model, solver="eigen", **grouped(settings))
    model(torch.ones(2, 3)).square().mean().backward()
    own.step()
    state = own.state_dict()
    own.close()
    return state, settings


class Deriving(KFAC):
    """Has a solver of its own, made of the user's."""

    def solver(self, factor: FactorSpec, default: Solver) -> Solver:
        return copy.copy(default)


@pytest.mark.parametrize(("solver", "solved"), [("eigen", True), ("inverse", False)])
def test_data_of_a_solver_that_a_method_has_made_of_the_users(solver: str, solved: bool) -> None:
    model = nn.Linear(3, 2)
    state, settings = after_a_step(model, Deriving())
    other = Preconditioner(model, solver=solver, **grouped(settings))
    other.load_state_dict(state)
    assert [block.solved for block in other.blocks] == [solved]
    other.close()
