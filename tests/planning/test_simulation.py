"""Simulated steps: on 4,096 ranks, too, they are finite, and shards need less memory."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks import simulation
from benchmarks.simulation import STRATEGIES, draw, fixed_memory, largest_batch, simulate
from soframe.planning.workloads import WORKLOADS, Workload
from tests.planning.kit import GPU, dense

RANKS = (8, 64, 4096)


@pytest.fixture(scope="module")
def points() -> list[dict[str, Any]]:
    """Plans of some layers for each number of ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(WORKLOADS, "tiny", tiny())
        return [simulate("tiny", ranks, 2, GPU) for ranks in RANKS]


def tiny() -> Workload:
    return Workload(
        "tiny",
        partial(dense, 12, 40, 40, 24, 10),
        lambda batch: (torch.empty(batch, 12, device="meta"),),
        2,
        "made up for tests",
    )


def test_times_are_finite_and_above_sgd(points: list[dict[str, Any]]) -> None:
    for point in points:
        assert list(point["strategies"]) == list(STRATEGIES)
        assert 0 < point["sgd"] < math.inf
        for row in point["strategies"].values():
            assert point["sgd"] < row["seconds"] < math.inf
            assert row["ratio"] == pytest.approx(row["seconds"] / point["sgd"])
            assert 0 < row["held"] < row["memory"]
        least = min(row["seconds"] for row in point["strategies"].values())
        assert point["strategies"][point["fastest"]]["seconds"] == least
        assert point["strategies"][point["fastest exact"]]["exact"]


def test_only_shards_need_less_memory_on_more_ranks(points: list[dict[str, Any]]) -> None:
    held = {name: [point["strategies"][name]["held"] for point in points] for name in STRATEGIES}
    assert len(set(held["comm-opt"])) == 1
    for name in ("mem-opt", "sharded, all ranks", "sharded, 4 ranks"):
        assert held[name] == sorted(held[name], reverse=True), name
        assert held[name][-1] < held["comm-opt"][-1], name


def test_strong_scaling_ends_at_one_sample_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def only(model: str, ranks: int, batch: int, hardware: object) -> dict[str, int]:
        return {"ranks": ranks, "batch": batch}

    monkeypatch.setattr(simulation, "simulate", only)
    found = simulation.scaling("resnet50", (64, 4096, 8192), GPU)
    assert [(one["ranks"], one["batch"]) for one in found["strong"]] == [(64, 64), (4096, 1)]
    assert [one["batch"] for one in found["weak"]] == [32, 32, 32]


def test_a_cap_leaves_whole_samples() -> None:
    assert [largest_batch(cap, 10, 3) for cap in (9, 12, 13, 18)] == [0, 0, 1, 2]
    with pytest.raises(ValueError, match="has no memory"):
        fixed_memory("resnet50", GPU)


def test_plots_are_marked(points: list[dict[str, Any]]) -> None:
    pytest.importorskip("matplotlib")
    drawn = draw({"tiny": {"weak": points, "strong": points}}, GPU.name)
    assert drawn.get_suptitle().startswith("Simulation")
    assert len(drawn.axes) == 2
    tables = [
        simulation.time_table("tiny", "weak", points, GPU.name),
        simulation.memory_table({"tiny": {"weak": points}}),
    ]
    assert all(str(table.title).startswith("Simulation") for table in tables)
    assert [table.row_count for table in tables] == [len(RANKS)] * 2
