"""A loss far above the last ones: the update before it is undone, once."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import soframe
from soframe.testing import compare
from soframe.trust_region.watch import WINDOW, LossWatch
from tests.curvature import half_square, randn
from tests.trust_region.kit import deep, vector


def watch(losses: list[float], limit: float | None = 1.5) -> LossWatch:
    own = LossWatch(limit)
    assert not any(own.rises(loss, undoable=True) for loss in losses)
    return own


def test_a_loss_is_held_against_the_largest_of_the_last_ones() -> None:
    own = watch([100.0, 4.0, *[1.0] * (WINDOW - 1)])
    assert not own.rises(6.0, undoable=True)
    assert not own.rises(9.0, undoable=True)
    assert own.rises(13.6, undoable=True)
    assert own.rises(13.6, undoable=True)  # it is not remembered
    assert not own.rises(13.6, undoable=False)  # it is
    assert not own.rises(13.6, undoable=True)


def test_a_few_losses_are_a_wider_limit_and_none_is_said_without_a_limit_or_a_scale() -> None:
    own = watch([1.0] * (WINDOW - 1))
    assert not own.rises(2.9, undoable=True)
    assert watch([1.0] * (WINDOW - 1)).rises(3.1, undoable=True)
    assert watch([1.0]).rises(3.1, undoable=True)
    assert not watch([]).rises(1000.0, undoable=True)
    watch([1.0] * WINDOW + [1000.0], limit=None)
    watch([-1.0] * WINDOW + [1000.0])
    assert watch([1.0] * WINDOW).rises(1.6, undoable=True)


@pytest.mark.parametrize("limit", [1.0, 0.5, math.nan])
def test_a_limit_is_above_one(limit: float) -> None:
    with pytest.raises(ValueError, match="max_increase must be above 1, or None, not"):
        soframe.TrustRegion(deep(), "squared-error", max_increase=limit)


def trained(
    steps: int, jump: int, resumed: int | None = None, **settings: Any
) -> tuple[list[Tensor], dict[str, int]]:
    """The parameters after each step, where from one on the targets are far away.

    Before ``resumed`` another model and optimizer take over from the state.
    """
    model, x = deep(), randn(16, 3)

    def made() -> soframe.TrustRegion:
        return soframe.TrustRegion(
            model,
            "squared-error",
            statistics=soframe.Statistics(fisher="type-2"),
            damping=0.1,
            **settings,
        )

    own, seen = made(), []
    for step in range(steps):
        if step == resumed:
            state = copy.deepcopy((model.state_dict(), own.state_dict()))
            own.close()
            model = deep()
            own = made()
            model.load_state_dict(state[0])
            own.load_state_dict(state[1])
        y = x + 100.0 * (step >= jump)
        own.step(lambda model=model, y=y: half_square(model(x), y))
        seen.append(vector(model))
    own.close()
    return seen, own.counters


def test_the_update_before_a_jump_is_undone_and_training_goes_on() -> None:
    jump = WINDOW + 2
    seen, counters = trained(jump + 4, jump)
    compare(seen[jump], seen[jump - 2], "parameters")
    assert counters["skipped_steps"] == 1
    for before, after in zip(seen[jump:], seen[jump + 1 :], strict=False):
        assert not torch.equal(before, after)


@pytest.mark.slow
def test_a_resumed_run_undoes_it_too() -> None:
    """At once: the last losses are part of the state."""
    jump = WINDOW + 2
    seen, _ = trained(jump + 2, jump)
    again, counters = trained(jump + 2, jump, resumed=jump)
    assert counters["skipped_steps"] == 1
    assert all(map(torch.equal, seen, again))


@pytest.mark.slow
def test_without_a_limit_nothing_is_undone() -> None:
    _, counters = trained(WINDOW + 6, WINDOW + 2, max_increase=None)
    assert counters["skipped_steps"] == 0
