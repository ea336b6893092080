"""The comparison on ordinary problems: its counts, and the defaults on four of the problems."""

import math
from pathlib import Path

import pytest

from benchmarks import ordinary
from benchmarks.ordinary import Cell, Record, Score
from benchmarks.ordinary_problems import LATER, OPEN, UNSEEN


def record(
    held_out: list[float], contender: str = "sgd", lr: float | None = 0.1, seed: int = 0
) -> Record:
    seconds = [float(number + 1) for number in range(len(held_out))]
    cell = Cell("friedman1", contender, lr, "constant", seed)
    return Record(cell, 1.0, held_out, [0.5] * len(held_out), seconds)


def score(own: list[list[float]], base: list[list[float]]) -> Score:
    """Compare one problem at rates 0.1, 0.01, ..., a seed each."""
    rates = [10.0**-number for number in range(1, 1 + len(own))]
    return ordinary.score(
        [record(losses, "kfac", lr) for losses, lr in zip(own, rates, strict=True)],
        [record(losses, "sgd", lr) for losses, lr in zip(base, rates, strict=True)],
    )


def test_a_run_is_behind_by_more_than_a_twentieth_of_the_gain() -> None:
    # The base gains 0.8: 0.24 is level, 0.25 is behind, and the lowest loss counts, not the last.
    assert score([[0.9, 0.24, 0.9]], [[0.9, 0.5, 0.2]]).behind == 0
    assert score([[0.9, 0.25, 0.9]], [[0.9, 0.5, 0.2]]).behind == 1
    # Rates are compared with their own: the second is behind, though the first is ahead of both.
    assert score([[0.1], [0.6]], [[0.2], [0.5]]).behind == 1


@pytest.mark.parametrize("end", [1.6, math.inf, math.nan])
def test_a_run_diverges_where_its_base_does_not(end: float) -> None:
    assert score([[0.5, end]], [[0.5, 0.5]]).diverged == 1
    assert score([[0.5, end]], [[0.5, end]]).diverged == 0
    assert score([[0.5, 1.4]], [[0.5, 0.5]]).diverged == 0


def test_gains_and_steps_are_those_of_the_best_rates() -> None:
    found = score([[0.3, 0.2, 0.1], [0.2, 0.2, 0.2]], [[0.9, 0.9, 0.6], [0.9, 0.5, 0.3]])
    assert (found.best, found.base) == (0.1, 0.3)
    assert found.gain == pytest.approx(0.7 / 0.9)
    assert (found.steps, found.time) == (pytest.approx(1 / 3), pytest.approx(1 / 3))
    assert score([[0.4]], [[0.3]]).steps == math.inf


def test_a_run_at_a_rate_of_its_own_is_beside_the_best_of_its_base() -> None:
    own = [record([0.4], "soframe: recommend", None)]
    base = [record([0.9], lr=0.1), record([0.3], lr=0.01)]
    assert ordinary.score(own, base).behind == 1
    assert ordinary.score(own, base[:1]).behind == 0


def test_runs_are_kept_and_a_broken_one_says_why(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    cells = [
        Cell("diabetes", "sgd", 0.03, "constant", 0),
        Cell("diabetes", "sgd", -1.0, "constant", 0),  # a rate that torch refuses
    ]
    first = ordinary.kept(cells, file, processes=1)
    assert first[0].lowest < first[0].start
    assert first[1].error.startswith("ValueError")
    assert first[1].diverged
    text = file.read_text(encoding="utf-8")
    again = ordinary.kept(cells, file, processes=1)
    assert file.read_text(encoding="utf-8") == text
    assert again[0] == first[0]


def test_what_is_recommended_for_a_recurrent_net_trains() -> None:
    """Its states are outputs of the model, too."""
    found = ordinary.run(Cell("gru", "soframe: recommend", None, "constant", 0), steps=15)
    assert not found.error
    assert found.lowest < found.start


@pytest.mark.parametrize("end", [0.3, 1.6])
def test_the_short_comparison_prints_its_columns_and_fails_where_k_fac_diverges(
    end: float, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kept(cells: list[Cell], file: Path, processes: int) -> list[Record]:
        found = []
        for cell in cells:
            held_out = [0.5, 0.4] if cell.contender == "sgd" else [0.2, end]
            found.append(Record(cell, 1.0, held_out, [0.9, 0.7], [1.0, 4.0]))
        return found

    monkeypatch.setattr(ordinary, "kept", kept)
    monkeypatch.setattr("sys.argv", ["ordinary", "--short"])
    assert ordinary.main() == (end > 1.5)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    (head,) = (line for line in lines if line[:1] == ["problem"])
    rows = [line for line in lines if line[:1] and line[0] in ordinary.SHORT]
    assert [row[0] for row in rows] == list(ordinary.SHORT)
    runs = 6 if end > 1.5 else 0  # of two rates and three schedules
    expected = {"diverged": runs, "behind": 0, "best": 0.2, "base": 0.4, "gain": 0.75}
    expected |= {"steps": 0.5, "time": 0.25, "end": end, "train": 0.7}
    for row in rows:
        numbers = dict(zip(head[1:], map(float, row[1:]), strict=True))
        assert numbers == pytest.approx(expected)


def test_no_problem_is_in_two_sets() -> None:
    assert len(OPEN) >= 20
    assert len(UNSEEN) == 8
    assert len(ordinary.PROBLEMS) == len(OPEN) + len(UNSEEN) + len(LATER)


@pytest.mark.parametrize("name", [*UNSEEN, *LATER])
def test_muon_takes_a_step_on_it(name: str) -> None:
    """Muon tells layers apart by their kind."""
    record = ordinary.run(Cell(name, "muon", 0.006, "constant", 0), steps=1)
    assert math.isfinite(record.start)
    assert not record.error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rates", "steps"),
    [(1, 100), pytest.param(2, ordinary.STEPS, marks=pytest.mark.thorough)],
)
def test_the_readme_s_k_fac_does_not_lose_to_sgd(rates: int, steps: int, tmp_path: Path) -> None:
    """The highest rates and three schedules, on problems on which earlier defaults diverged."""
    problems = [name for name in ordinary.SHORT if name != "autoencoder"]
    names = ["sgd", "soframe: Preconditioner"]
    cells = ordinary.cells_of(problems, names, [0], rates=rates, steps=steps)
    _, scores = ordinary.tables(ordinary.kept(cells, tmp_path / "runs.jsonl", processes=1))
    found = scores["soframe: Preconditioner"]
    assert sum(own.diverged for own in found.values()) == 0
    # 569 patients are overfitted within a few steps: docs/benchmarks/ordinary.md.
    assert sum(own.behind for name, own in found.items() if name != "breast-cancer") <= 1
    assert max(own.gain for own in found.values()) < 1.1
