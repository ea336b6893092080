"""Statistics in turns: balanced, one update per layer and interval, each layer's factors exact."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from soframe.blocks.window import Cost
from soframe.layers import LinearHelper
from soframe.layers.base import LayerHelper
from soframe.preconditioner import Preconditioner
from soframe.schedules import WarmInterval
from soframe.solvers import Inverse
from soframe.strategies import all_turns, turns
from soframe.strategies.plan import window
from tests.curvature import blocks, closing, fill, preconditioner, randn
from tests.examples import examples
from tests.test_refresh import placed

SIZES = st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(0, 50), st.integers(0, 20))


@given(
    blocks_=st.lists(SIZES, max_size=12), every=st.integers(1, 6), solve_every=st.integers(1, 18)
)
@settings(max_examples=examples(60))
def test_no_turn_costs_much_more_than_another(
    blocks_: list[tuple[int, int, int, int]], every: int, solve_every: int
) -> None:
    """Blocks of one group have one input, and take their statistics together."""
    sizes = [(out, into) for out, into, _, _ in blocks_]
    rows, groups = [r for _, _, r, _ in blocks_], [str(g) for _, _, _, g in blocks_]
    found = all_turns(placed(sizes), every, solve_every, rows, groups)
    assert found == all_turns(placed(sizes, ranks=3), every, solve_every, rows, groups)
    solve_costs = [out**3 + into**3 for out, into in sizes]
    follow = solve_every % every == 0
    jobs: dict[str, list[int]] = {}
    for index, name in enumerate(groups):
        jobs.setdefault(name, []).append(index)
    loads, costs = [0.0] * every, []
    for first, *others in jobs.values():
        turn = found.statistics[first]
        assert all(found.statistics[other] == turn for other in others)
        cost = float(rows[first] * sizes[first][1] ** 2)
        cost += sum(rows[i] * sizes[i][0] ** 2 for i in (first, *others))
        if follow:
            cost += sum(solve_costs[i] for i in (first, *others)) * every / solve_every
        loads[turn] += cost
        costs.append(cost)
    assert max(loads) <= bound(costs, every)
    if not follow:
        assert found.solves == turns(placed(sizes), solve_every)
        return
    for turn in range(every):
        mine = [index for index, own in enumerate(found.statistics) if own == turn]
        assert all(found.solves[index] % every == turn for index in mine)
        visits = [0.0] * solve_every
        for index in mine:
            visits[found.solves[index]] += solve_costs[index]
        assert max(visits) <= bound([solve_costs[i] for i in mine], solve_every // every)


def bound(costs: Sequence[float], bins: int) -> float:
    """Graham's (1969)."""
    return (sum(costs) / bins + (1 - 1 / bins) * max(costs, default=0)) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("rows", "inputs", "every", "expected"),
    [
        ((8, 8, 8, 8), "abcd", (4, 4), ((0, 1, 2, 3), (0, 1, 2, 3))),
        ((8, 8, 8, 8), "abab", (2, 4), ((0, 1, 0, 1), (0, 1, 2, 3))),
        ((1, 1, 1, 99), "abcd", (2, 2), ((1, 1, 1, 0), (1, 1, 1, 0))),
        ((1, 1, 1, 99), "abcd", (2, 3), ((1, 1, 1, 0), (0, 1, 2, 0))),
        ((1, 1, 1, 99), "abcd", (1, 4), ((0, 0, 0, 0), (0, 1, 2, 3))),
        # What has one input is less than twice one of them, 384 to 416.
        ((8, 8, 13, 1), "aabc", (2, 3), ((1, 1, 0, 1), (0, 1, 2, 0))),
        # With its solve one is twice each of the others; without, it is more than all of them.
        ((10, 3, 3, 3), "abcd", (2, 2), ((0, 1, 1, 0), (0, 1, 1, 0))),
        ((10, 3, 3, 3), "abcd", (2, 3), ((0, 1, 1, 1), (0, 1, 2, 0))),
    ],
)
def test_turns(rows: Any, inputs: str, every: Any, expected: Any) -> None:
    found = all_turns(placed([(4, 4)] * 4), *every, rows, list(inputs))
    assert (found.statistics, found.solves) == expected


# -- through the preconditioner --------------------------------------------------------------


class Heads(nn.Module):
    """Queries and keys of one moment, a module that is called twice, two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(3, 4, bias=bias) for bias in (True, True, False))
        self.again = nn.Linear(4, 4)
        self.wide = nn.Linear(4, 9)
        self.one, self.other = nn.Linear(9, 2), nn.Linear(9, 5)

    def forward(self, x: Tensor, other: bool) -> Tensor:
        x = (self.q(x) * self.k(x) + self.v(x)).tanh()
        x = self.wide(self.again(self.again(x).tanh())).tanh()
        return (self.other if other else self.one)(x)


NAMES = ["q", "k", "v", "again", "wide", "one", "other"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, LayerHelper]]:
    """The moments that are computed: which, and of which layer."""
    found: list[tuple[str, LayerHelper]] = []
    for name in ("input_moment", "output_moment"):
        plain = getattr(LinearHelper, name)

        def spy(self: LayerHelper, *args: Any, plain: Any = plain, name: str = name) -> Tensor:
            found.append((name, self))
            return plain(self, *args)

        monkeypatch.setattr(LinearHelper, name, spy)
    return found


Between = Callable[[int, nn.Module], object]


def train(
    steps: int, calls: list[tuple[str, LayerHelper]], between: Between | None = None, **options: Any
) -> tuple[Preconditioner, list[set[str]], list[dict[str, int]]]:
    """The blocks that took statistics at each step, and how many moments were computed.

    The weights stay what they are; the second micro-batch does not reach the first one's head.
    """
    model = fill(Heads())
    own = preconditioner(model, solver=Inverse(), decay=0.7, **options)
    due, counts = [], []
    with closing(own):
        for step in range(steps):
            if between is not None:
                between(step, model)
            calls.clear()
            model.zero_grad()
            for index, size in enumerate((4, 6)):
                x = randn(size, 2, 3, seed=2 * step + index)
                model(x, other=index == 1).square().mean().backward()
            own.step()
            names = {module: name for name, module in model.named_modules()}
            due.append({names[helper.module] for _, helper in calls})
            counts.append({n: [c for c, _ in calls].count(n) for n in {c for c, _ in calls}})
    return own, due, counts


def freeze(step: int, model: nn.Module) -> None:
    if step == 6:
        model.wide.requires_grad_(False)  # type: ignore[union-attr]
    if step == 11:
        model.wide.requires_grad_(True)  # type: ignore[union-attr]


@pytest.mark.parametrize("every", [(3, 6), (4, 6), (2, 2)], ids=str)
def test_every_layer_takes_statistics_once_in_any_interval(
    every: tuple[int, int], calls: list[Any]
) -> None:
    interval, solve_every = every
    options = {"statistics_every": interval, "solve_every": solve_every, "stagger": True}
    own, due, _ = train(14, calls, **options)
    assert due[0] == set(NAMES)
    for step in range(1, 14 - interval + 1):
        window = due[step : step + interval]
        assert sorted(itertools.chain(*window)) == sorted(NAMES)
    rows = [blocks(own)[name].window.cost.rows for name in NAMES]
    # Two positions; `again` is called twice, each head in one of the two passes.
    assert rows == [20, 20, 20, 40, 20, 8, 12]
    inputs = [blocks(own)[name].window.cost.input_of for name in NAMES]
    assert inputs == ["q", "q", "v", *NAMES[3:]]  # without a bias it is another moment
    its = all_turns(own.placement, *every, rows, inputs).statistics
    for step in range(1, 14):
        expected = {n for n, turn in zip(NAMES, its, strict=True) if turn == step % interval}
        assert due[step] == expected, step


def test_blocks_that_take_no_statistics_leave_the_others_their_turns() -> None:
    model = fill(nn.Sequential(*(nn.Linear(3, 3) for _ in range(4))))
    own = preconditioner(
        model, method={"[012]": "kfac"}, auxiliary="adamw", statistics_every=3, stagger=True
    )
    due = []
    with closing(own):
        for step in range(7):
            model.zero_grad()
            model(randn(4, 3, seed=step)).square().mean().backward()
            due.append(sorted(block.name for block in own._statistics.due))
            own.step()
    assert due[0] == ["0", "1", "2"]
    for step in range(1, 5):
        assert sorted(itertools.chain(*due[step : step + 3])) == ["0", "1", "2"]
        assert len(due[step]) == 1


def test_the_moment_of_a_common_input_is_computed_once_at_its_turn(calls: list[Any]) -> None:
    model = fill(Heads())
    options = {"statistics_every": 3, "solve_every": 6, "stagger": True}
    seen = 0
    with closing(preconditioner(model, **options)) as own:
        for step in range(7):
            calls.clear()
            model.zero_grad()
            model(randn(4, 2, 3, seed=step), other=False).square().mean().backward()
            own.step()
            inputs = [helper for name, helper in calls if name == "input_moment"]
            attention = {blocks(own)[name].layout for name in "qk"}
            taken = len(attention.intersection(inputs))
            assert taken in (0, 1)
            seen += taken
    assert seen == 3  # step 0, and two turns


@pytest.mark.slow
@pytest.mark.parametrize("between", [None, freeze], ids=["as it is", "a layer freezes and thaws"])
def test_factors_are_those_of_an_unstaggered_run_at_their_turns(
    between: Between | None, calls: list[Any]
) -> None:
    steps = 16
    options = {"statistics_every": 3, "solve_every": 6}
    own, due, _ = train(steps, calls, between, **options, stagger=True)
    assert any(len(taken) < len(NAMES) for taken in due)
    for turn in {tuple(name in taken for taken in due) for name in NAMES}:
        alike = [name for name in NAMES if tuple(name in taken for taken in due) == turn]
        every = {
            "statistics_every": lambda step, turn=turn: (
                1 if turn[step : step + 1] == (True,) else step + 1
            )
        }
        plain, _, _ = train(steps, calls, between, **{**options, **every})
        for name in alike:
            mine, other = blocks(own)[name], blocks(plain)[name]
            assert mine.mass == other.mass
            for factor in mine.factors:
                one, two = mine.running.matrix(factor), other.running.matrix(factor)
                assert torch.equal(one.tril(), two.tril()), (name, factor.name)


def test_a_frozen_layer_leaves_the_others_their_turns(calls: list[Any]) -> None:
    options = {"statistics_every": 3, "solve_every": 6, "stagger": True}
    _, due, _ = train(11, calls, freeze, **options)
    # Without a parameter `wide` has no block; what the others cost is known still.
    assert all(due[step] for step in range(7, 10))
    assert sorted(itertools.chain(*due[7:10])) == sorted({*NAMES} - {"wide"})


def test_inputs_are_kept_and_sums_made_of_layers_whose_turn_it_is() -> None:
    model = fill(Heads())
    options = {"statistics_every": 3, "solve_every": 6, "stagger": True}
    with closing(preconditioner(model, **options)) as own:
        for step in range(5):
            model.zero_grad()
            saved: list[Tensor] = []

            def pack(tensor: Tensor, saved: list[Tensor] = saved) -> Tensor:
                saved.append(tensor)
                return tensor

            x = randn(4, 2, 3, seed=step).requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = model(x, other=False).square().mean()
            loss.backward()
            due = {block.name for block in own._statistics.due}
            # Autograd keeps the input for itself as well, for each of q, k and v.
            kept = sum(tensor.data_ptr() == x.data_ptr() for tensor in saved)
            assert kept == 3 + 2 * ("q" in due) + ("v" in due)
            planned = window(own.placement.pairs, 0, due - {"other"})
            assert own.memory_usage()["statistics"] == planned
            own.step()


def test_a_forward_pass_of_another_window_counts_for_nobody() -> None:
    """It was called when nobody kept its inputs, and its gradient arrives at its turn."""
    found = []
    for late in (False, True):
        model = fill(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
        before: list[Tensor] = []
        with closing(preconditioner(model, statistics_every=2, stagger=True)) as own:
            for step in range(5):
                model.zero_grad()
                model(randn(4, 3, seed=step)).square().mean().backward()
                if late:
                    for loss in before:
                        loss.backward()
                    before = [model(randn(9, 3, seed=step)).square().mean()]
                own.step()
            rows = [block.window.cost.rows for block in own._blocks]
            assert (len(own._statistics.due), rows) == (1, [4, 4])
            found.append([block.running.matrix(f) for block in own._blocks for f in block.factors])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one.tril(), two.tril())


def test_intervals_may_change(calls: list[Any]) -> None:
    own, due, _ = train(
        20, calls, statistics_every=WarmInterval(4, steps=6), solve_every=4, stagger=True
    )
    # Until the interval is longer than a step nothing has to be known of their cost.
    assert due[:6] == [set(NAMES)] * 6
    assert due[6:8] == [set(), set()]
    assert due[8] == set(NAMES)
    assert all(block.window.cost.rows > 0 for block in own._blocks)
    for step in range(9, 17):
        assert sorted(itertools.chain(*due[step : step + 4])) == sorted(NAMES)


def test_statistics_that_are_lost_at_first_are_taken_again_by_all() -> None:
    model = fill(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    with closing(preconditioner(model, statistics_every=2, stagger=True)) as own:
        found = []
        for step in range(4):
            x = randn(4, 3, seed=step)
            model(x * float("inf") if step == 0 else x).square().mean().backward()
            found.append(len(own._statistics.due))
            own.step()
            model.zero_grad()
        assert found == [2, 2, 1, 1]
        assert own.counters["skipped_statistics"] == 1


def test_a_resumed_run_is_staggered_from_the_next_interval() -> None:
    model = fill(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))

    def run(own: Preconditioner, steps: range) -> list[int]:
        found = []
        for step in steps:
            model.zero_grad()
            model(randn(4, 3, seed=step)).square().mean().backward()
            found.append(len(own._statistics.due))
            own.step()
        return found

    with closing(preconditioner(model, statistics_every=3)) as own:
        assert run(own, range(4)) == [2, 0, 0, 2]
        saved = own.state_dict()
    with closing(preconditioner(model, statistics_every=3, stagger=True)) as own:
        own.load_state_dict(saved)
        assert run(own, range(4, 10)) == [0, 0, 2, 1, 0, 1]


@pytest.mark.parametrize(
    ("method", "rows", "masked", "learned"),
    [
        ("kfac", 1.0, False, 20),
        ("kfac", 1.0, True, 11),
        ("kfac", 0.5, True, 6),
        ("kfac-reduce", 1.0, False, 4),
        ("kfac-reduce", 6, False, 2),  # whole samples
    ],
)
def test_what_statistics_cost_is_the_rows_that_are_drawn(
    method: str, rows: float, masked: bool, learned: int
) -> None:
    model = fill(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    options = {"method": method, "rows": rows, "statistics_every": 3, "solve_every": 3}
    with closing(preconditioner(model, stagger=True, **options)) as own:
        mask = torch.arange(20).view(4, 5) < 11
        if masked:
            own.count(rows=mask)
        (model(randn(4, 5, 3)) * mask.unsqueeze(2)).square().mean().backward()
        own.step()
        assert [block.window.cost.rows for block in own._blocks] == [learned, learned]


@pytest.mark.parametrize("of_k", [1, 3])
def test_ranks_that_disagree_on_a_common_input_share_none(
    of_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the mean of what they say is the number of a block."""
    model = fill(Heads())

    def two_ranks(backend: Any, own: list[float], phase: str) -> list[float]:
        """On the other q has an input of its own, and k has one, or that of another block."""
        where = [of_k if name == "k" else i for i, name in enumerate(NAMES)]
        rows = own[: len(NAMES)]
        other = [2 * n * i**power for power in range(3) for n, i in zip(rows, where, strict=True)]
        return [a + b for a, b in zip(own, other, strict=True)]

    monkeypatch.setattr("soframe.solving.refresh.add_over_ranks", two_ranks)
    with closing(preconditioner(model, statistics_every=3, stagger=True)) as own:
        model(randn(4, 2, 3), other=False).square().mean().backward()
        own.step()
        assert [blocks(own)[name].window.cost.input_of for name in "qkv"] == ["q", "k", "v"]
        assert blocks(own)["q"].window.cost.rows == 24
        assert blocks(own)["other"].window.cost == Cost()


@pytest.mark.parametrize("fisher", ["monte-carlo", "type-2"])
def test_probed_fishers_take_no_turns(fisher: str) -> None:
    options = {"fisher": fisher, "loss": "cross-entropy"}
    with pytest.raises(ValueError, match=f"fisher='{fisher}' would send .* pass stagger='solves'"):
        preconditioner(fill(nn.Linear(2, 2)), stagger=True, **options)
    preconditioner(fill(nn.Linear(2, 2)), stagger="solves", **options).close()
