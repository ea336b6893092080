"""What a method of one's own returns is what it has said, and lies in memory of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import soframe
from soframe.methods import Blocked, Chain, Direction, Given, Method
from soframe.settings import grouped
from soframe.specs import VALUE, FactorSpec, TensorSpec
from soframe.testing import check_method
from tests.distributed.harness import run_ranks

Returned = Callable[[Any], Any]


@dataclass(frozen=True)
class Written(Method):
    """A method whose methods are given, so that each case is a line."""

    directs: Returned
    states: Returned = lambda shape: {"m": TensorSpec(tuple(shape))}
    has: Returned = lambda shape: ()
    observes: Returned = lambda gradient: {}
    takes: Returned = lambda call: {}
    refreshes_after: bool = False
    clipped: bool = True

    joint = False
    damped = False
    starts_at_once = True

    def factors(self, shape):
        return self.has(shape)

    def statistics(self, call):
        return self.takes(call)

    def observe(self, gradient, data):
        return self.observes(gradient)

    def solver(self, factor, default):
        return None

    def state(self, shape):
        return self.states(shape)

    def direct(self, given: Given) -> Direction:
        return self.directs(given)


def of_gradient(shape):
    groups, out, into = shape
    return (
        FactorSpec("f", "both", groups, out, kind="elementwise", columns=into, reads="gradient"),
    )


def of_calls(shape):
    return (FactorSpec("f", "left", shape[0], shape[1], kind="diagonal"),)


def trained(method: Method, **settings: Any) -> list[Tensor]:
    """Return the weights after some steps of gradients that are kept in place."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    settings = {"statistics_every": 1, "kl_clip": None, **settings}
    optimizer = soframe.Optimizer(net, method, lr=0.1, **grouped(settings))
    for _ in range(3):
        x = torch.randn(5, 3, dtype=torch.float64)
        optimizer.zero_grad(set_to_none=False)
        net(x).square().mean().backward()
        optimizer.step()
    return list(net.parameters())


def averaged(given: Given, copy: bool) -> Direction:
    mean = given.state["m"] * 0.9 + given.incoming
    return Direction(mean.clone() if copy else mean, {"m": mean})


def previous(given: Given, copy: bool) -> Direction:
    last = given.incoming.clone() if copy else given.incoming
    return Direction(given.incoming - 0.5 * given.state["m"], {"m": last})


def passed(given: Given, copy: bool) -> Direction:
    if VALUE in given.data.get("f", {}):
        return Direction(given.incoming / (given.data["f"][VALUE].sqrt() + 1e-8))
    return Direction(given.incoming.clone() if copy else given.incoming)


def ahead(given: Given, copy: bool) -> Direction:
    del copy
    return Direction(given.incoming + given.data["f"][VALUE])


@pytest.mark.parametrize(
    ("directs", "others"),
    [
        (averaged, {}),
        (previous, {}),
        (passed, {"has": of_gradient, "observes": torch.square, "refreshes_after": True}),
        (ahead, {"has": of_gradient}),
    ],
    ids=["the state is the direction", "the state is the gradient", "passed on", "observed"],
)
def test_what_shares_memory_is_as_good_as_a_copy(directs: Any, others: dict[str, Any]) -> None:
    """Clips scale directions, steps overwrite gradients and averages go on, each in place."""
    weights = []
    for copy in (True, False):

        def observes(gradient: Tensor, copy: bool = copy) -> dict[str, Tensor]:
            of = others.get("observes", torch.Tensor.clone if copy else lambda tensor: tensor)
            return {"f": of(gradient)} if "has" in others else {}

        method = Written(
            lambda given, copy=copy: directs(given, copy), **{**others, "observes": observes}
        )
        weights.append(trained(method, norm_clip=0.05))
    for one, other in zip(*weights, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("directs", "error", "words"),
    [
        (lambda g: g.incoming, TypeError, "must return soframe.methods.Direction"),
        (lambda g: Direction(g.incoming[0]), ValueError, "a matrix of shape"),
        (lambda g: Direction(g.incoming.float()), ValueError, "float32.* must have .*float64"),
        (lambda g: Direction(g.incoming, {"n": g.incoming}), ValueError, "a state 'n'"),
        (lambda g: Direction(g.incoming, {"m": g.incoming.sum()}), ValueError, "a state 'm' of"),
        (lambda g: Direction(g.incoming, {"m": g.incoming.half()}), ValueError, "a state 'm' of"),
    ],
)
def test_directions_that_are_none(directs: Returned, error: type[Exception], words: str) -> None:
    """At the first update, and by the check."""
    with pytest.raises(error, match=words):
        trained(Written(directs))


@pytest.mark.parametrize(
    ("directs", "words"),
    [
        (lambda g: Direction(g.state["m"].add_(1)), "the state 'm' in place"),
        (lambda g: Direction(g.incoming.mul_(2)), "the gradient in place"),
    ],
)
def test_the_check_sees_what_is_changed_in_place(directs: Returned, words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        check_method(Written(directs), ranks=())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"has": of_gradient, "observes": lambda g: {"x": g}}, r"observe\(\) returned no statist"),
        ({"has": of_gradient, "observes": lambda g: {"f": g[:, :1]}}, r"observe\(\).* of shape"),
        ({"has": of_calls, "takes": lambda call: {}}, r"statistics\(\) returned no statistics"),
        ({"has": of_calls, "takes": lambda c: {"f": c.output_rows[:, 0]}}, r"statistics\(\).* of"),
        ({"has": lambda s: of_calls(s) * 2}, "a name twice"),
        ({"states": lambda shape: {"m": TensorSpec(())}}, r"such as TensorSpec\(\(1,\)\)"),
        ({"states": lambda shape: {"m": tuple(shape)}}, "must be a TensorSpec"),
    ],
)
def test_what_else_it_may_say_and_not_keep(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        trained(Written(lambda given: Direction(given.incoming), **settings))


class Named(Written):
    def solver(self, factor, default):
        return "eigen"


@pytest.mark.parametrize(
    ("kind", "has", "words"),
    [
        (Written, lambda shape: of_gradient(shape)[0], r"must return a tuple, as \(FactorSpec"),
        (Named, of_gradient, "must return a Solver, not 'eigen'"),
    ],
)
def test_declarations_of_another_type(kind: type[Written], has: Returned, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        trained(kind(lambda given: Direction(given.incoming), has=has))


@pytest.mark.parametrize("within", [lambda m: Chain((m, "momentum")), lambda m: Blocked(m, 4)])
@pytest.mark.parametrize(
    "settings",
    [
        {"has": lambda shape: of_gradient(shape) if shape[1] > 2 else ()},
        {"states": lambda shape: {"m": TensorSpec(tuple(shape))} if shape[1] > 2 else {}},
    ],
)
def test_names_that_only_some_shapes_have(
    settings: dict[str, Any], within: Callable[[Method], Method]
) -> None:
    method = Written(lambda given: Direction(given.incoming), **settings)
    with pytest.raises(ValueError, match="only for blocks of some shapes"):
        trained(within(method))


@pytest.mark.parametrize("rebased", [{"n": torch.zeros(1)}, {"m": torch.zeros(1)}])
def test_a_state_in_new_data_is_as_it_was(rebased: dict[str, Tensor]) -> None:
    soap = type("Rebased", (soframe.methods.SOAP,), {"rebase": lambda *_: rebased})
    with pytest.raises(ValueError, match=r"rebase\(\) returned"):
        check_method(soap(), ranks=(), solve_every=1)


@dataclass(frozen=True)
class OfAllGroups(Method):
    """It takes the norm of all groups together, which is that of blocks beside each other too."""

    joint = clipped = damped = False

    def factors(self, shape):
        return ()

    def direct(self, given: Given) -> Direction:
        return Direction(given.incoming / given.incoming.norm())


def test_the_check_tells_what_is_made_of_all_groups_together() -> None:
    with pytest.raises(AssertionError, match="an instance for each layer"):
        check_method(OfAllGroups(), ranks=())


@dataclass(frozen=True)
class Late(soframe.methods.SOAP):
    """SOAP; from its third update on, something has a wrong shape on the last rank."""

    wrong: str = "matrix"

    def _cut(self, what: str, tensor: Tensor, late: bool) -> Tensor:
        last = not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1
        return tensor[..., :1] if late and last and what == self.wrong else tensor

    def direct(self, given: Given) -> Direction:
        found, late = super().direct(given), given.updates >= 2
        state = {name: self._cut("state", tensor, late) for name, tensor in found.state.items()}
        return Direction(self._cut("matrix", found.matrix, late), state)

    def observe(self, gradient: Tensor, data: Any) -> Any:
        found = super().observe(gradient, data)
        late = bool(data) and float(gradient.abs().max()) > 1e6
        return {name: self._cut("statistics", tensor, late) for name, tensor in found.items()}


def of_late(rank: int, ranks: int, wrong: str, strategy: str) -> list[str]:
    """The errors of each of five steps; the gradients of the third and later are large."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    own = soframe.Preconditioner(model, Late(wrong=wrong), lr=0.1, strategy=strategy, solve_every=1)
    errors = []
    for step in range(5):
        model.zero_grad()
        scale = 1e9 if step > 1 else 1.0
        (model(torch.ones(2, 4).double()).square().mean() * scale).backward()
        try:
            own.step()
        except (RuntimeError, ValueError) as error:
            errors.append(str(error))
    return errors


@pytest.mark.parametrize("wrong", ["matrix", "state", "statistics"])
def test_a_wrong_shape_is_an_error_at_any_step(wrong: str) -> None:
    errors = of_late(0, 1, wrong, "comm-opt")
    assert errors
    assert all("of shape" in error for error in errors)


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["comm-opt", "sharded"])
@pytest.mark.parametrize("wrong", ["matrix", "state", "statistics"])
@pytest.mark.covering(together=1)
def test_a_wrong_shape_on_one_rank_is_an_error_on_all(wrong: str, strategy: str) -> None:
    """None of them waits for a tensor that another one cannot send."""
    first, second = run_ranks(of_late, 2, wrong, strategy, group_timeout=20.0)
    assert first
    assert second
    assert "of shape" in second[0]
    assert "rank" in first[0]
