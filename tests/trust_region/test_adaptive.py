"""The preconditioner's own damping: which dampings are tried, and that the best one is kept."""

import copy
import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from soframe.losses import CrossEntropy
from soframe.solvers import Inverse
from soframe.testing import compare
from soframe.trust_region import AdaptiveDamping
from soframe.trust_region.proposals import Proposal, Proposer
from tests.curvature import fill, half_square, randn
from tests.trust_region.kit import classes_of, deep, trust_region, vector


def test_it_begins_with_the_policy_s_and_moves_among_neighbours() -> None:
    damping = AdaptiveDamping(ratio=4.0, interval=3, spread=100.0, low=0.1, high=8.0)
    assert damping.trial(0) == []  # nobody has asked yet
    assert damping.at(2.0, 2) == [2.0, 2.0]
    assert damping.at(7.0, 2) == [2.0, 2.0]
    assert damping.trial(0) == [0.5, 0.5]  # down first
    damping.choose([True, False], 0)
    assert damping.at(7.0) == [0.5, 2.0]
    assert damping.trial(1) == damping.trial(2) == []
    assert damping.trial(3) == [0.125, 8.0]  # the one ahead, and the other one
    damping.choose([True, True], 3)
    assert damping.trial(6) == [0.1, 2.0]  # not beyond its bounds, and back from the upper
    damping.choose([True, False], 6)
    assert damping.trial(9) == [0.4, 2.0]
    again = AdaptiveDamping(ratio=4.0, interval=3, spread=100.0, low=0.1, high=8.0)
    again.load(damping.state())
    assert again.at(5.0) == [0.1, 8.0]
    assert again.trial(9) == [0.4, 2.0]
    again.load({})
    assert again.at(50.0) == [8.0]


def test_no_damping_goes_far_from_the_others() -> None:
    """One that is never chosen follows them."""
    damping = AdaptiveDamping(ratio=4.0, interval=1, longest=1, spread=4.0)
    damping.at(1.0, 3)
    for step in range(6):
        damping.choose([True, False, True], step)
        now = damping.at(0.0)
        assert now[0] == now[2] == pytest.approx(4.0 ** -(step + 1))
        assert now[1] == pytest.approx(4.0**-step)
    alone = AdaptiveDamping(ratio=4.0, interval=1, longest=1, spread=1.0)
    alone.at(1.0)
    alone.choose([True], 0)
    assert alone.at(0.0) == pytest.approx([0.25])


def test_all_go_back_where_one_has_no_solution() -> None:
    damping = AdaptiveDamping(ratio=4.0, interval=1, longest=1, high=8.0)
    damping.at(1.0, 3)
    damping.choose([True, True, False], 0)
    assert damping.at(0.0) == [0.25, 0.25, 1.0]
    before = damping.state()
    damping.retreat([False, False, False])
    assert damping.state() == before
    damping.retreat([False, True, True])
    assert damping.at(0.0) == [1.0, 1.0, 4.0]
    assert damping.trial(1) == [0.25, 4.0, 8.0]  # up where there was none


@dataclass(frozen=True)
class Brittle(Inverse):
    """Solves no inputs' factor of the last layer of `deep` with a damping below 1e-4."""

    def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
        if len(matrix[0]) == 5 and float(damping.min()) < 0.99e-2:
            raise torch.linalg.LinAlgError("too small")
        return super().solve(matrix, damping)


@pytest.mark.slow
def test_dampings_stay_where_factors_can_be_solved() -> None:
    """Trials go below, are not taken, and where statistics make a solve fail dampings go back."""
    model, x = deep(), randn(16, 3)
    own = AdaptiveDamping(ratio=10.0, interval=1, longest=1, spread=1e6)
    optimizer = soframe.TrustRegion(
        model,
        "squared-error",
        damping=1e-2,
        preconditioner_damping=own,
        solver=Brittle(split="sqrt"),
        statistics_every=1,
        solve_every=1,
    )

    def step() -> list[float]:
        optimizer.step(lambda: half_square(model(x), x))
        return optimizer._damping_within.at(0.0)

    first, last = zip(*(step() for _ in range(12)), strict=True)
    assert optimizer.preconditioner.counters["failed_solves"] > 0
    assert min(first) < 0.99e-4 < min(last) < 1.01e-4
    assert max(last[-6:]) < 1e-1  # a trial that failed sends nobody back
    optimizer._damping_within._now = [1e-7, 1e-7]  # as if the statistics had grown
    assert step() == pytest.approx([1e-6, 1e-6])
    assert [step() for _ in range(3)][-1][1] > 0.99e-4
    optimizer.close()


@pytest.mark.parametrize("solved", [True, False])
def test_what_was_not_solved_is_not_taken(monkeypatch: pytest.MonkeyPatch, solved: bool) -> None:
    """However much the model promises of it: its data are of another damping."""
    model, x = deep(), randn(16, 3)
    own = AdaptiveDamping(ratio=10.0, interval=1, longest=1)
    propose = Proposer.propose

    def proposed(proposals: Proposer, *args: Any, **options: Any) -> list[Proposal]:
        first, *trials = propose(proposals, *args, **options)
        if solved:
            return [first, *trials]
        return [first, *(dataclasses.replace(one, failed=[True, True]) for one in trials)]

    monkeypatch.setattr(Proposer, "propose", proposed)
    optimizer = soframe.TrustRegion(
        model, "squared-error", damping=1.0, preconditioner_damping=own, solver="inverse"
    )
    dampings = []
    for _ in range(4):
        optimizer.step(lambda: half_square(model(x), x))
        dampings += optimizer._damping_within.at(0.0)
    optimizer.close()
    assert (len(set(dampings)) > 1) == solved


def test_what_stays_is_tried_on_both_sides_in_turn() -> None:
    damping = AdaptiveDamping(ratio=2.0, interval=1, longest=1)
    damping.at(1.0, 2)
    tried = []
    for step, taken in enumerate(([False, False], [False, True], [False, True], [True, False])):
        tried.append(damping.trial(step))
        damping.choose(taken, step)
    assert tried == [[0.5, 0.5], [2.0, 2.0], [0.5, 4.0], [2.0, 8.0]]
    assert damping.trial(4) == [4.0, 2.0]


def test_trials_become_rare_where_all_dampings_stay() -> None:
    damping = AdaptiveDamping(ratio=2.0, interval=2, longest=8)
    damping.at(1.0, 2)
    trials = []
    for moved in (True, False, True, False, False, False, True, True):
        step = next(s for s in range(1000) if damping.trial(s))
        assert damping.trial(step + 5) == damping.trial(step)
        again = AdaptiveDamping(ratio=2.0, interval=2, longest=8)
        again.load(damping.state())
        assert again.state() == damping.state()
        damping = again
        damping.choose([False, moved], step)
        trials.append(step)
    waits = [after - before for before, after in itertools.pairwise(trials)]
    assert waits == [2, 4, 2, 4, 8, 8, 4]


@pytest.mark.parametrize(
    "settings",
    [
        {"ratio": 1.0},
        {"interval": 0},
        {"interval": 4, "longest": 3},
        {"spread": 0.5},
        {"low": 0.0},
        {"low": 2.0, "high": 1.0},
    ],
    ids=str,
)
def test_settings_out_of_range(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"needs .*AdaptiveDamping"):
        AdaptiveDamping(**settings)


class Floorless(CrossEntropy):
    """Every promise is taken as it is."""

    @property
    def floor(self) -> Any:
        """See `Loss.floor`."""
        return None


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
@pytest.mark.slow
def test_the_dampings_that_promise_most_are_kept(solver: str) -> None:
    """Of each of two parts, against four optimizers, each with one choice of dampings."""
    model = deep()
    adaptive = AdaptiveDamping(ratio=5.0, interval=3, longest=3, spread=25.0)
    settings = {"solver": solver, "solve_every": 3, "max_increase": None}
    own = trust_region(model, Floorless(), 0.01, preconditioner_damping=adaptive, **settings)
    kept, ways, moves = [0.01, 0.01], [-1, -1], set()
    for step in range(4):
        x, y = classes_of(step)
        if step % 3 == 0:
            promised = {}
            tried = [damping * 5.0**way for damping, way in zip(kept, ways, strict=True)]
            for taken in itertools.product((False, True), repeat=2):
                other = copy.deepcopy(model)
                fixed = trust_region(other, Floorless(), 0.01, solver=solver, max_increase=None)
                fixed.load_state_dict(own.state_dict() | {"damping": fixed.damping.state()})
                chosen = [b if new else a for new, a, b in zip(taken, kept, tried, strict=True)]
                fixed._proposer._dampings = lambda chosen=chosen: chosen  # type: ignore[method-assign]
                fixed.step(lambda: F.cross_entropy(other(x), y))  # noqa: B023
                promised[taken] = (fixed.last["predicted"], vector(other), fixed)
            taken = min(promised, key=lambda choice: promised[choice][0])
            moves.add(taken)
            ways = [way if second else -way for way, second in zip(ways, taken, strict=True)]
            pairs = zip(taken, kept, tried, strict=True)
            kept = [after if second else before for second, before, after in pairs]
        own.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
        if step % 3 == 0:
            predicted, weights, fixed = promised[taken]
            assert own.last["predicted"] == pytest.approx(predicted, rel=1e-9)
            compare(vector(model), weights, f"parameters after step {step}")
        assert own._damping_within.at(0.0) == pytest.approx(kept)
        # What the layers are preconditioned with until the next solve is of the dampings kept.
        for mine, theirs in zip(
            own.preconditioner.blocks, fixed.preconditioner.blocks, strict=True
        ):
            for factor, tensors in theirs.second_order.items():
                for name, tensor in tensors.items():
                    compare(mine.second_order[factor][name], tensor, f"{factor} {name}")
    assert len(moves) > 1


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_a_block_s_damping_within_is_as_if_all_had_it(solver: str) -> None:
    """Whether it counts where factors are solved or where they are applied, and in no batch."""
    x, y = classes_of(0)
    found: dict[tuple[float | None, ...], list[Tensor]] = {}
    for dampings in ((None, None), (0.3, 0.7), (0.3, 0.3), (0.7, 0.7)):
        model = fill(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)))
        own = soframe.Preconditioner(model, damping=0.7, solver=solver, lr=0.1, kl_clip=None)
        for block, damping in zip(own.blocks, dampings, strict=True):
            block.damp(damping)
        F.cross_entropy(model(x), y).backward()
        own.step()
        found[dampings] = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    for number in range(4):
        compare(found[None, None][number], found[0.7, 0.7][number], "the preconditioner's")
        same = found[0.3, 0.3] if number < 2 else found[0.7, 0.7]
        compare(found[0.3, 0.7][number], same[number], "each its own")
    assert not torch.allclose(found[0.3, 0.3][0], found[0.7, 0.7][0])


@pytest.mark.parametrize("where", [0, 1], ids=["the direction of now", "the one that is tried"])
def test_a_trial_that_overflows_is_not_taken_and_not_repeated_at_once(
    where: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = deep()
    damping = AdaptiveDamping(interval=4)
    own = trust_region(model, "cross-entropy", solver="inverse", preconditioner_damping=damping)
    x, y = classes_of(0)
    own.step(lambda: F.cross_entropy(model(x), y))
    propose, data = own._proposer.propose, []

    def overflowing(*args: Any, **settings: Any) -> list[Proposal]:
        made = propose(*args, **settings)
        if len(made) == 2:
            data.append(made[0].solved)
            infinite = [[t if t is None else t / 0 for t in part] for part in made[where].parts]
            made[where] = dataclasses.replace(made[where], parts=infinite)
        return made

    monkeypatch.setattr(own._proposer, "propose", overflowing)
    damping = own._damping_within
    before = damping.state()["now"]
    steps = 1
    while not data:
        own.step(lambda: F.cross_entropy(model(x), y))
        steps += 1
    assert steps > 2
    assert own.counters["skipped_steps"] == (where == 0)
    assert damping.state()["now"] == before
    assert all(b.second_order == data[0][b.name].data for b in own.preconditioner.blocks)
    assert damping.trial(steps) == []
    own.step(lambda: F.cross_entropy(model(x), y))
    assert own.counters["skipped_steps"] == (where == 0)
