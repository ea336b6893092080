"""The preconditioner's own damping: which dampings are tried, and that the best one is kept."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from soframe.testing import compare
from soframe.trust_region import AdaptiveDamping, Quadratic
from tests.trust_region.kit import classes_of, deep, trust_region, vector


def test_it_begins_with_the_policy_s_and_moves_among_neighbours() -> None:
    damping = AdaptiveDamping(ratio=4.0, interval=3, low=0.1, high=8.0)
    assert damping.neighbours(0) == []  # nobody has asked yet
    assert damping.at(2.0) == 2.0
    assert damping.at(7.0) == 2.0
    assert damping.neighbours(0) == [0.5, 8.0]
    damping.choose(0.5, 0)
    assert damping.neighbours(1) == damping.neighbours(2) == []
    assert damping.at(7.0) == 0.5
    assert damping.neighbours(3) == [0.125]  # the one ahead
    damping.choose(0.125, 3)
    assert damping.neighbours(6) == [0.1]
    damping.choose(0.1, 6)
    assert damping.neighbours(9) == [0.4]  # itself is tried anyway, and nothing is ahead
    again = AdaptiveDamping(ratio=4.0, interval=3, low=0.1, high=8.0)
    again.load(damping.state())
    assert again.at(5.0) == 0.1
    again.load({})
    assert again.at(50.0) == 8.0


def test_trials_become_rare_where_the_damping_stays() -> None:
    damping = AdaptiveDamping(ratio=2.0, interval=2, longest=8)
    damping.at(1.0)
    trials = []
    # To: where each trial goes, as a power of the ratio.
    for to, tried in (
        (-1, (-1, 1)),
        (-2, (-2,)),
        (-2, (-3,)),
        (-1, (-3, -1)),
        (0, (0,)),
        (0, (1,)),
        (0, (-1, 1)),
        (0, (-1, 1)),
        (1, (-1, 1)),
        (1, (2,)),
    ):
        step = next(s for s in range(1000) if damping.neighbours(s))
        assert damping.neighbours(step) == [2.0**power for power in tried]
        assert damping.neighbours(step + 5) == damping.neighbours(step)
        again = AdaptiveDamping(ratio=2.0, interval=2, longest=8)
        again.load(damping.state())
        assert again.state() == damping.state()
        damping = again
        damping.choose(2.0**to, step)
        trials.append(step)
    waits = [after - before for before, after in itertools.pairwise(trials)]
    # On its way; kept; on its way back; kept, kept, kept; up.
    assert waits == [2, 2, 4, 2, 2, 4, 8, 8, 4]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ratio": 1.0}, "ratio must be above 1, not 1.0"),
        ({"interval": 0}, "interval must be at least 1, not 0"),
        ({"interval": 4, "longest": 3}, r"longest must be at least interval \(4\), not 3"),
        ({"low": 0.0}, "needs 0 < low < high"),
        ({"low": 2.0, "high": 1.0}, "needs 0 < low < high, not 2.0, 1.0"),
    ],
    ids=str,
)
def test_settings_out_of_range(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"AdaptiveDamping: {message}"):
        AdaptiveDamping(**settings)


def test_the_best_model_is_chosen_with_all_that_is_no_choice() -> None:
    # Alone the second would be best; with the third direction beside it, the first is.
    curvature = torch.diag(torch.tensor([1.0, 1.0, 1.0], dtype=torch.float64))
    curvature[1, 2] = curvature[2, 1] = 0.9
    model = Quadratic(curvature, torch.tensor([-1.0, -1.1, -1.0], dtype=torch.float64))
    best, chosen = model.best_with_one_of([range(1), range(1, 2)])
    assert best == 0
    compare(chosen.curvature, torch.eye(2, dtype=torch.float64), "curvature")
    compare(chosen.slope, torch.tensor([-1.0, -1.0], dtype=torch.float64), "slope")
    alone = Quadratic(model.curvature[:2, :2], model.slope[:2])
    assert alone.best_with_one_of([range(1), range(1, 2)])[0] == 1


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_the_damping_that_promises_most_is_kept(solver: str) -> None:
    """Against three optimizers, each with one of the dampings."""
    model = deep()
    adaptive = AdaptiveDamping(ratio=5.0, interval=3, longest=3)
    own = trust_region(
        model,
        "cross-entropy",
        0.01,
        solver=solver,
        solve_every=3,
        preconditioner_damping=adaptive,
    )
    kept, moved = 0.01, 0.0
    for step in range(4):
        x, y = classes_of(step)
        if step % 3 == 0:
            promised = {}
            around = [kept * 5**moved] if moved else [kept / 5, kept * 5]
            for damping in (kept, *around):
                other = copy.deepcopy(model)
                fixed = trust_region(
                    other,
                    "cross-entropy",
                    0.01,
                    solver=solver,
                    preconditioner_damping=damping / 0.01,
                )
                fixed.load_state_dict(own.state_dict() | {"damping": fixed.damping.state()})
                fixed.step(lambda: F.cross_entropy(other(x), y))  # noqa: B023
                promised[damping] = (fixed.last["predicted"], vector(other), fixed)
            last, kept = kept, min(promised, key=lambda damping: promised[damping][0])
            moved = float((kept > last) - (kept < last))
        own.step(lambda x=x, y=y: F.cross_entropy(model(x), y))
        if step % 3 == 0:
            predicted, weights, fixed = promised[kept]
            assert own.last["predicted"] == pytest.approx(predicted, rel=1e-9)
            compare(vector(model), weights, f"parameters after step {step}")
        assert adaptive.at(0.0) == kept
        # What the layers are preconditioned with until the next solve is of the damping kept.
        for mine, theirs in zip(
            own.preconditioner._blocks, fixed.preconditioner._blocks, strict=True
        ):
            for factor, tensors in theirs.second_order.items():
                for name, tensor in tensors.items():
                    compare(mine.second_order[factor][name], tensor, f"{factor} {name}")
    assert kept != 0.01
