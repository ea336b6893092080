"""The track: bisection, the ranking, and the command at toy size."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kendalltau, spearmanr

from benchmarks import track
from experiments.config import RunConfig
from experiments.tuning import TriedRates

ROOT = Path(__file__).resolve().parents[2]


@given(data=st.data(), count=st.integers(1, 12))
def test_bisection_finds_the_first_length_that_reaches(data: st.DataObject, count: int) -> None:
    first = data.draw(st.integers(0, count - 1))
    least = data.draw(st.integers(0, count))  # count: none does
    asked: list[int] = []

    def reaches(index: int) -> bool:
        asked.append(index)
        return index >= least

    track.bracket(reaches, count, first)
    assert len(asked) == len(set(asked)) <= 6
    assert (least in asked) == (least < count)
    assert least == 0 or least - 1 in asked


def losses_of(lengths: dict[str, float]) -> track.Losses:
    """Runs whose loss is 2 at a length of their own, and falls with the steps."""

    def losses(configs: Sequence[RunConfig]) -> list[float]:
        return [
            2.0
            - (config.steps - lengths[config.optimizer]) / 1000
            + (0.01 if config.seed else -0.01)
            for config in configs
        ]

    return losses


def test_a_ranking_stands_beside_the_public_one() -> None:
    lengths = {
        "soframe:muon": 200.0,
        "soframe:soap-muon": 150.0,
        "soframe:normuon": 205.0,
        "soframe:newton-muon": 230.0,
        "adamw": 1000.0,
    }
    lrs = dict.fromkeys(track.ENTRIES, 0.02)
    names = ["soap-muon", "normuon", "muon", "newton-muon", "adamw"]
    found = track.report(
        names,
        lrs=lrs,
        steps=200,
        seeds=[0, 1],
        target=None,
        losses=losses_of(lengths),
    )
    rows = found["rows"]
    assert found["target"] == pytest.approx(2.0)
    assert rows["soap-muon"]["steps"] == pytest.approx(150)
    assert rows["soap-muon"]["of_muon"] == pytest.approx(0.75)
    assert rows["newton-muon"]["steps"] == pytest.approx(230)
    assert rows["adamw"]["steps"] is None
    assert {name: row["place"] for name, row in rows.items()} == {
        "soap-muon": 1,
        "muon": 2,
        "normuon": 3,
        "newton-muon": 4,
        "adamw": 5,
    }
    assert [rows[name]["public_place"] for name in names] == [1, 2, 2, 4, 5]
    assert 0.9 < found["agreement"]["spearman"] < 1
    table = track.table(found)
    assert next(iter(table.columns[1].cells)) == "soap-muon"
    assert list(table.columns[3].cells)[-1] == "> 400"
    # Muon's own steps, where the target is somebody's.
    other = track.report(
        ["muon"], lrs=lrs, steps=200, seeds=[0, 1], target=2.03, losses=losses_of(lengths)
    )
    assert other["rows"]["muon"]["steps"] == pytest.approx(170)
    assert other["agreement"] is None


def test_figures_of_methods_are_ranked_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = {
        "muon": {"lr": 0.03, "steps": 300.0, "losses": {"300": [2.0]}},
        "soap-muon, short sides": {"lr": 0.03, "steps": 200.0, "losses": {"240": [1.9]}},
        "soap-muon": {"lr": 0.04, "steps": 225.0, "losses": {"210": [2.1], "240": [1.9]}},
        "adamw, all parameters": {"lr": 0.004, "steps": None, "losses": {"300": [2.6]}},
    }
    figures = {"target": 2.0, "seeds": [0], "torch": "2", "rows": rows}
    path = tmp_path / "methods.json"
    path.write_text(json.dumps(figures))
    found = track.of_methods(figures)
    assert {name: row["place"] for name, row in found["rows"].items()} == {
        "soap-muon": 1,
        "muon": 2,
        "adamw": 3,
    }
    assert found["agreement"]["spearman"] == pytest.approx(1.0)
    assert found["rows"]["soap-muon"]["of_muon"] == 0.75
    track.main(figures=path, output=tmp_path / "out.json", as_json=True)
    assert json.loads(capsys.readouterr().out)["longest"] == 300
    del rows["muon"]
    with pytest.raises(ValueError, match="no row of muon"):
        track.of_methods(figures)


def test_trials_of_tuning_are_ranked_by_their_losses() -> None:
    trials = {
        "muon": {"0.01": 2.2, "0.02": 2.0},
        "soap-normuon": {"0.01": 1.0},
        "newton-muon": {"0.04": 1.95},
        "adamw, all parameters": {"0.004": 2.6, "0.008": 2.7},
    }
    found = track.of_trials(trials)
    assert {
        name: (row["place"], row["loss"], row["lr"]) for name, row in found["rows"].items()
    } == {
        "muon": (2, 2.0, 0.02),
        "newton-muon": (1, 1.95, 0.04),
        "adamw": (3, 2.6, 0.004),
    }
    assert found["agreement"]["spearman"] == pytest.approx(0.5)
    table = track.table(found)
    assert list(table.columns[3].cells) == ["1.950", "2.000", "2.600"]
    with pytest.raises(ValueError, match="no method of the public track"):
        track.of_trials({"soap-normuon": {"0.01": 1.0}})


def test_the_stored_trials_are_ranked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored = track.FOLDER / "learning-rates" / "byte-gpt.json"
    track.main(figures=stored, output=tmp_path / "track.json", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert set(found["rows"]) == set(track.ENTRIES)
    agreement = found["agreement"]
    # As docs/benchmarks/methods.md has them, which claims no order.
    assert round(agreement["spearman"], 2) == 0.14
    assert agreement["spearman_interval"][0] < 0 < agreement["spearman_interval"][1]
    page = (ROOT / "docs" / "benchmarks" / "methods.md").read_text(encoding="utf-8")
    assert track.sentence(agreement) in " ".join(page.split())


@given(scores=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=3, max_size=5))
@settings(max_examples=8, deadline=None)
def test_correlations_are_scipy_s_and_chance_counts_all_orders(
    scores: list[tuple[int, int]],
) -> None:
    here, there = map(list, zip(*scores, strict=True))
    if len(set(here)) == 1 or len(set(there)) == 1:
        return
    found = track.Agreement.of([float("inf") if x == 5 else x for x in here], there)
    rho, tau = spearmanr(here, there).statistic, kendalltau(here, there).statistic
    assert found.spearman == pytest.approx(rho)
    assert found.kendall == pytest.approx(tau)
    for low, high in (found.spearman_interval, found.kendall_interval):
        assert -1 - 1e-9 <= low <= high <= 1 + 1e-9
    others = [spearmanr(order, there).statistic for order in itertools.permutations(here)]
    assert found.chance == pytest.approx(sum(x >= rho - 1e-9 for x in others) / len(others))


def test_a_bootstrap_of_agreeing_orders_is_at_one() -> None:
    found = track.Agreement.of(range(6), range(6))
    assert found.spearman_interval == found.kendall_interval == (1.0, 1.0)
    assert found.chance == pytest.approx(1 / 720)
    opposite = track.Agreement.of(range(6), range(6, 0, -1))
    assert (opposite.spearman, opposite.kendall, opposite.chance) == (-1.0, -1.0, 1.0)


def test_a_protocol_reaches_the_runs_and_has_rates_of_its_own(tmp_path: Path) -> None:
    protocol = track.Protocol(warmup=0.1, batch_size=32)
    config = track.configuration("soap", 0.002, 50, 3, protocol)
    assert (config.warmup, config.batch_size, config.modules) == (0.1, 32, track.WITHIN)
    rates = TriedRates(tmp_path / "rates.json")
    track.tune(["muon"], 50, rates, lambda configs: [c.lr for c in configs], protocol)
    assert set(rates.scores("50 steps, warm-up 0.1, batches of 32")) == {"muon"}
    assert rates.scores(track.USUAL.setting(50)) == {}
