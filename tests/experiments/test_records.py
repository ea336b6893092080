"""Records: targets, verdicts, and what survives JSON."""

import json
import math

import pytest

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
    assert cells[-2:] == [["1.51 KiB"] * 2, ["2 KiB"] * 2]
    figure = loss_curves(workload("digits-autoencoder"), runs)
    left, right = figure.axes
    assert list(left.lines[0].get_xdata()) == [0, 10, 20, 30, 40]
    assert list(right.lines[0].get_xdata()) == [0.0, 0.5, 1.0, 1.5, 2.0]
    assert left.get_ylim()[1] == pytest.approx(9.0)  # what diverges leaves the panel
    assert save(figure, tmp_path / "plots" / "a.png").read_bytes().startswith(b"\x89PNG")
