"""Records: targets, verdicts, and what survives JSON."""

import json
import math

import pytest

from experiments import demo
from experiments.config import RunConfig
from experiments.display import comparison, loss_curves, save
from experiments.records import RunRecord, jsonable, verdict
from experiments.workloads import workload
from tests.experiments.helpers import record

KFAC = RunConfig("digits-autoencoder", "kfac", lr=0.1, steps=40)


def test_a_target_is_reached_at_the_first_evaluation_at_or_below_it():
    run = record()
    assert run.reached(1.0).step == 20
    assert run.reached(0.4).step == 40
    assert run.reached(0.3) is None
    assert run.best_loss == 0.4


def test_a_record_survives_json_and_infinite_losses_too():
    run = record(losses=(3.0, math.inf), config=KFAC, gradient_workers=(1, 2))
    text = json.dumps(jsonable(run.as_dict()), allow_nan=False)
    assert RunRecord.from_dict(json.loads(text)) == run
    assert jsonable({"a": (1, [math.nan], {2: -math.inf})}) == {"a": [1, [None], {"2": None}]}


@pytest.mark.parametrize(
    ("kfac", "sgd", "expected"),
    [
        (
            (3.0, 0.4),
            (3.0, 2.0, 0.4),
            "took 20 steps and 1.0 s: K-FAC needed 2.0 times fewer steps and about as much time.",
        ),
        ((3.0, 0.4), (3.0, 2.0), "; no first-order run reached it within the budget."),
        ((3.0, 2.0), (3.0, 0.4), "SGD did, after 10 steps and 0.5 s."),
        ((3.0, 2.0), (3.0, 2.0), "Neither K-FAC, comm-opt nor a first-order run reached"),
    ],
)
def test_the_verdict_follows_the_figures(kfac, sgd, expected):
    runs = [record(losses=sgd), record(losses=kfac, config=KFAC, seconds=1.0)]
    assert verdict(runs, 0.5).endswith(expected) or verdict(runs, 0.5).startswith(expected)


def test_the_verdict_takes_the_fastest_first_order_run_and_the_first_strategy():
    adamw = RunConfig("digits-autoencoder", "adamw", lr=0.1, steps=40)
    other = KFAC.but(strategy="mem-opt")
    runs = [
        record(losses=(3.0, 2.0, 0.4)),
        record(losses=(3.0, 2.0, 0.4), seconds=0.1, config=adamw),
        record(losses=(3.0, 0.4), config=KFAC),
        record(losses=(3.0, 0.4), seconds=0.01, config=other),
    ]
    assert "AdamW, took 20 steps and 0.2 s: K-FAC needed 2.0 times fewer steps" in verdict(
        runs, 0.5
    )
    assert "K-FAC, comm-opt took 10 steps" in verdict(runs, 0.5)
    with pytest.raises(ValueError, match="a verdict on muon needs a run of it"):
        verdict(runs, 0.5, "muon")


@pytest.mark.slow
def test_the_table_and_the_plot_show_every_run(tmp_path):
    runs = [record(), record(losses=(3.0, 99.0, math.inf), config=KFAC)]
    table = comparison(workload("digits-autoencoder"), runs)
    cells = [list(column.cells) for column in table.columns]
    assert cells[0] == ["SGD", "K-FAC, comm-opt"]
    assert cells[1:3] == [["20 / 1.0", "not reached"], ["40 / 2.0", "not reached"]]
    assert cells[-2:] == [["1.55 kB"] * 2, ["2.05 kB"] * 2]
    figure = loss_curves(workload("digits-autoencoder"), runs)
    left, right = figure.axes
    assert list(left.lines[0].get_xdata()) == [0, 10, 20, 30, 40]
    assert list(right.lines[0].get_xdata()) == [0.0, 0.5, 1.0, 1.5, 2.0]
    targets = [f"{target:g}" for target in workload("digits-autoencoder").targets]
    assert [text.get_text() for text in right.texts] == targets
    assert left.get_ylim()[1] == pytest.approx(9.0)  # what diverges leaves the panel
    assert save(figure, tmp_path / "plots" / "a.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_against_seconds_runs_to_the_end_of_the_slowest_contender():
    fast, slow = record(seconds=0.1), record(config=KFAC, seconds=0.7)
    figure = loss_curves(workload("digits-autoencoder"), [fast, slow])
    left, right = figure.axes
    assert right.get_xlim() == (0.0, pytest.approx(2.8))
    ends = [line.get_xdata()[-1] for line in right.lines[:3]]
    assert ends == pytest.approx([0.4, 2.8, 2.8])
    held = right.lines[1]  # the faster contender's last loss
    assert list(held.get_xdata()) == pytest.approx([0.4, 2.8])
    assert list(held.get_ydata()) == [0.4, 0.4]
    assert len(left.lines) == len(right.lines) - 1  # nothing is held against steps


def test_what_was_not_tuned_is_marked_beside_what_was():
    tuned = record(settings_from="8 trials of 4 s")
    runs = [tuned, record(config=KFAC, settings_from="untuned")]
    table = comparison(workload("digits-autoencoder"), runs)
    assert list(table.columns[0].cells) == ["SGD", "K-FAC, comm-opt †"]
    assert "†: not tuned" in table.title
    figure = loss_curves(workload("digits-autoencoder"), runs)
    texts = [text.get_text() for text in figure.axes[1].get_legend().get_texts()]
    assert texts == ["SGD", "K-FAC, comm-opt (not tuned)"]
    alike = comparison(workload("digits-autoencoder"), runs[1:])
    assert list(alike.columns[0].cells) == ["K-FAC, comm-opt"]
    assert "†" not in alike.title


def test_the_demonstration_says_where_its_settings_are_from():
    tuned = RunConfig("digits-autoencoder", "sgd", lr=0.1, steps=40)
    own, other = demo.marked(
        [record(config=tuned), record(config=tuned.but(optimizer="trust-region"))]
    )
    assert own.tuned
    assert other.settings_from == "untuned"
