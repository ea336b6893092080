"""The largest batches on a GPU: the search, the steps and the plans, without a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import soframe
from benchmarks import gpu_memory


@given(st.integers(0, 500), st.integers(0, 500))
def test_the_search_finds_the_largest_number_from_any_guess(limit: int, first: int) -> None:
    assert gpu_memory.most(lambda number: number <= limit, first) == limit


@pytest.mark.parametrize("curvature", [None, soframe.Statistics(offload=True)])
def test_turns_end_with_a_step_of_statistics_and_a_solve(
    curvature: soframe.Statistics | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved = []
    step = soframe.Preconditioner.step

    def recorded(own: soframe.Preconditioner) -> None:
        step(own)
        layer = own.metrics()["blocks"]["3"]["factors"]["A"]
        solved.append((layer["statistics_age"], layer["solve_age"]))

    monkeypatch.setattr(soframe.Preconditioner, "step", recorded)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10))
    seconds = gpu_memory.train(model, curvature, torch.randn(5, 3, 8, 8), 3)
    assert seconds > 0
    assert solved == ([] if curvature is None else [(0, 0), (1, 1), (0, 0)] * 2)


@pytest.mark.thorough
def test_curvature_takes_the_memory_of_images() -> None:
    cap = 4 * 2**30
    first, second = (gpu_memory.planned(c, cap) for c in (None, soframe.Statistics()))
    assert 0 < second < first
    assert gpu_memory.planned(None, 0) == 0
