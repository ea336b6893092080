"""The benchmark of links: turns, and the rows of a rank."""

from pathlib import Path

import pytest

from benchmarks import links
from benchmarks.applications import TURN, in_turns
from experiments.launch import Worker, launch


def test_meters_are_read_around_the_turns_of_a_run():
    taken = []
    steps = [lambda: taken.append(1), lambda: taken.append(10)]
    added = in_turns(steps, [lambda: sum(taken), lambda: len(taken)], 2 * TURN, 3)
    assert added.shape == (3, 2, 2)
    assert (added[:, 0] == [1, 1]).all()
    assert (added[:, 1] == [10, 1]).all()
    # After the turns that warm up, runs alternate.
    assert taken[2 * TURN :] == [*[1] * TURN, *[10] * TURN] * 6


def of_detector(worker: Worker, folder: Path) -> dict[str, list[list[float]]]:
    links.SOLVE_EVERY = 2 * TURN  # in this process, which ends
    detector = links.APPLICATIONS["detector"]
    return links.timed(detector, detector.settings(1, folder), 1)


@pytest.mark.thorough
@pytest.mark.distributed
def test_rows_are_of_both_optimizers(tmp_path):
    (row, _) = launch(of_detector, 2)(tmp_path)
    base, kfac = row["ms"]
    assert 0 < base[0] < kfac[0]
    row["planned_ms"] = [10.0, 15.0]
    (line,) = links.lines({"2 hosts, 1 Gbit/s": {"detector, strong": row}})
    assert line[0] == "detector, strong, 2 hosts, 1 Gbit/s"
    assert line[3] == "1.50"


def test_weak_scaling_keeps_a_rank_s_batch():
    bert = links.APPLICATIONS["BERT"]
    baseline, kfac = bert.settings(4, Path())
    assert baseline.optimizer == "adamw"
    assert (kfac.optimizer, kfac.strategy, kfac.base) == ("soframe", "comm-opt", "adamw")
    assert baseline.batch_size == kfac.batch_size == 4 * bert.module.Settings().batch_size
