"""The benchmark of predictions: sizes are held out, and their errors are relative."""

from __future__ import annotations

import pytest

from benchmarks.planned import held_out, overall


def test_every_other_size_is_predicted_by_its_neighbours() -> None:
    points = [(1.0, 1.0), (2.0, 4.0), (4.0, 16.0), (8.0, 32.0), (16.0, 256.0), (32.0, 1.0)]
    found = held_out(points)
    assert [one["size"] for one in found["held out"]] == [2.0, 8.0]
    assert [one["predicted"] for one in found["held out"]] == pytest.approx([4.0, 64.0])
    assert (found["median"], found["largest"]) == pytest.approx((0.5, 1.0))
    assert overall({"one": found}) == pytest.approx(0.5)


def test_two_sizes_hold_nothing_out() -> None:
    with pytest.raises(ValueError, match="pass a larger --budget"):
        held_out([(1.0, 1.0), (2.0, 4.0)])
