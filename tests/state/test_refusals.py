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
from soframe.solvers import Solver
from soframe.specs import FactorSpec
from tests.distributed.training import Case, Run
from tests.state.test_resume import equal

State = dict[str, Any]
CASE = Case({"solve_every": 2})


def make() -> Run:
    run = Run(CASE)
    for step in range(3):
        run.step(step)
    return run


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


def poison(tensor: torch.Tensor) -> torch.Tensor:
    tensor.view(-1)[-1] = float("nan")
    return tensor


def wrap(blocks: State) -> State:
    return {f"_orig_mod.{name}": block for name, block in blocks.items()}


HEAD = ("blocks", "head")
DATA = (*HEAD, "second_order")
BROKEN: dict[str, tuple[Callable[[State], None], str]] = {
    **{
        f"no {key}": (drop(key), f"truncated: it lacks {key}")
        for key in ("step", "owed_statistics", "scaling", "counters", "blocks")
    },
    "no format": (drop("format"), "not the state of a soframe.Preconditioner"),
    "no version": (drop("version"), "has version None"),
    **{
        f"no {key} of a block": (drop(*HEAD, key), f"truncated: block 'head' lacks {key}")
        for key in ("shape", "method", "solver", "mass", "factors", "second_order")
    },
    "no block": (drop(*HEAD), r"lacks \['head'\] and has nothing"),
    "names of wrappers": (change("blocks", to=wrap), r"same layers.*checkpoint\.seal\(state\)"),
    "no factor": (drop(*HEAD, "factors", "A"), "truncated: block 'head' has factors"),
    "no factors": (change(*HEAD, "factors", to={}), "truncated: block 'head' has factors"),
    "no data of a factor": (drop(*DATA, "A"), "truncated: second-order data of block 'head'"),
    "no tensor": (drop(*DATA, "A", "values"), "truncated: second-order data of block 'head'"),
    "other format": (change("format", to="torch"), "not the state of a soframe.Preconditioner"),
    "other version": (
        change("version", to=1),
        "has version 1; this soframe reads versions 2 to 4",
    ),
    "other scaling": (change("scaling", to="kaisa"), "made with scaling='kaisa', not 'fisher'"),
    "other method": (change(*HEAD, "method", to="Other()"), "was made by Other()"),
    "other shape": (change(*HEAD, "shape", to=[1, 3, 7]), r"shape \[1, 3, 7\] in the state and"),
    "factor shape": (
        change(*HEAD, "factors", "A", to=lambda t: t[:, :-1]),
        r"factor A of block 'head' is \(1, 20\), not a tensor of shape \(1, 21\)",
    ),
    "factor type": (change(*HEAD, "factors", "A", to="x"), "is str, not a tensor"),
    "data shape": (change(*DATA, "G", "values", to=lambda t: t[0]), "values of factor G of block"),
    "nan in a factor": (change(*HEAD, "factors", "G", to=poison), "factor G .* is not finite"),
    "nan in data": (change(*DATA, "A", "vectors", to=poison), "vectors of .* is not finite"),
    "nan mass": (change(*HEAD, "mass", to=float("nan")), "mass of block 'head' is nan"),
    "mass type": (change(*HEAD, "mass", to="1"), "mass of block 'head' is '1'"),
    "negative step": (change("step", to=-1), "step is -1"),
    "step type": (change("step", to=2.5), "step is 2.5"),
    "counters type": (change("counters", to=[1]), "counters is list, not a dict"),
    "counter type": (change("counters", "failed_solves", to="many"), "'failed_solves' is 'many'"),
    "solvers type": (change(*HEAD, "solvers", to="x"), "solvers of block 'head' is 'x'"),
    "blocks type": (change("blocks", to=[]), "blocks is list, not a dict"),
    "block type": (change(*HEAD, to=3), "block 'head' is int, not a dict"),
    "factors type": (change(*HEAD, "factors", to=[]), "factors of block 'head' is list"),
    "data type": (change(*DATA, to=None), "second-order data of block 'head' is NoneType"),
    "data of a factor type": (change(*DATA, "A", to=1), "second-order data of block 'head' is int"),
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


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_state_is_refused_and_changes_nothing(name):
    breaking, reason = BROKEN[name]
    good = copy.deepcopy(make().preconditioner.state_dict())
    run = Run(CASE)
    run.step(7)
    run.preconditioner.load_state_dict(copy.deepcopy(good))
    run.step(3)
    breaking(good)
    assert_refused(run, good, reason)


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
            nn.Sequential(*layers), kl_clip=None, **{"statistics_every": 1, **options}
        )

    state = build((4, 3)).state_dict()
    with pytest.raises(ValueError, match=reason):
        build(widths, **options).load_state_dict(state)


class Late(KFAC):
    """Is solved after the direction, as SOAP is, by the user's solver."""

    refreshes_after = True


@pytest.mark.parametrize(("stage", "refused"), [(SOAP(), True), (Momentum(), False)])
def test_what_is_kept_in_bases_does_not_outlive_them(stage: Method, refused: bool) -> None:
    """The solver of one stage changes, and with it the data of all stages are gone."""
    settings: dict[str, Any] = {"method": Chain((Late(), stage)), "kl_clip": None}
    model = nn.Linear(3, 2)
    own = Preconditioner(model, solver="eigen", statistics_every=1, solve_every=1, **settings)
    for step in range(3):
        model.zero_grad()
        model(torch.eye(3) + step).square().mean().backward()
        own.step()
    state = own.state_dict()
    own.close()
    other = Preconditioner(model, solver="inverse", statistics_every=1, solve_every=1, **settings)
    if refused:
        with pytest.raises(ValueError, match=r"solved by Eigen.*lies in the bases of the last sol"):
            other.load_state_dict(state)
    else:
        other.load_state_dict(state)
    other.close()


def after_a_step(model: nn.Module, method: Method) -> tuple[State, dict[str, Any]]:
    """Return the state after a step with ``solver="eigen"``, and the other settings."""
    settings: dict[str, Any] = {"method": method, "kl_clip": None, "statistics_every": 1}
    own = Preconditioner(model, solver="eigen", **settings)
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
    other = Preconditioner(model, solver=solver, **settings)
    other.load_state_dict(state)
    assert [block.solved for block in other.blocks] == [solved]
    other.close()


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_what_methods_keep_is_checked_whatever_the_solver_is(solver: str) -> None:
    model = nn.Linear(3, 2)
    state, settings = after_a_step(model, Chain(("momentum", "kfac")))
    for block in state["blocks"].values():
        block["state"].clear()
    other = Preconditioner(model, solver=solver, **settings)
    with pytest.raises(ValueError, match=r"truncated: block 'Linear' keeps \[\]"):
        other.load_state_dict(seal(state))
    other.close()
