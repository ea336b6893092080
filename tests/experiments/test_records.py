import json
import math

import pytest

from soframe.experiments.compare import Comparison, compare, jsonable
from soframe.experiments.config import RunConfig, from_dict
from soframe.experiments.records import summarise, verdict
from soframe.experiments.tables import comparison, format_bytes
from soframe.experiments.workloads import workload
from tests.experiments.helpers import record


def test_a_target_is_reached_at_the_first_evaluation_at_or_below_it():
    run = record(losses=(3.0, 1.0, 1.5, 0.9, 0.5))
    assert run.reached(1.0).step == 10
    assert run.reached(0.95).step == 30
    assert run.reached(0.5).seconds == 2.0
    assert run.reached(0.49) is None


def test_the_summary_holds_the_recorded_figures():
    line = summarise(record())
    assert [(hit.target, hit.step, hit.seconds) for hit in line.targets] == [
        (1.0, 20, 1.0),
        (0.5, 40, 2.0),
    ]
    assert (line.final_loss, line.final_step, line.final_seconds) == (0.4, 40, 2.0)
    assert line.bytes_per_step == 1548.0
    assert line.curvature_bytes == 2048


def test_the_json_of_a_record_is_the_record():
    run = record(targets=(1.0, 0.1))
    read = json.loads(json.dumps(jsonable(run.as_dict()), allow_nan=False))
    assert from_dict(read["config"]) == run.config
    assert read["rows"][2] == {"step": 20, "seconds": 1.0, "loss": 0.9, "accuracy": None}
    assert read["summary"]["targets"] == [
        {"target": 1.0, "step": 20, "seconds": 1.0},
        {"target": 0.1, "step": None, "seconds": None},
    ]


def test_json_has_no_infinities_at_any_depth():
    value = {"a": (1.0, math.inf), "b": [{"c": math.nan}], 3: "x"}
    assert jsonable(value) == {"a": [1.0, None], "b": [{"c": None}], "3": "x"}


def cells_of(table):
    return [list(column.cells) for column in table.columns]


def test_the_table_says_what_was_recorded():
    targets = workload("digits-autoencoder").targets
    reached = record(losses=(3.0, max(targets), min(targets)), targets=targets)
    missed = record(
        "kfac", losses=(3.0, max(targets), 5.0), targets=targets, sent_bytes_per_step={}
    )
    columns = cells_of(comparison(workload("digits-autoencoder"), [reached, missed]))
    assert columns == [
        ["SGD", "K-FAC, comm-opt"],
        ["10 / 0.5", "10 / 0.5"],
        ["20 / 1.0", "not reached"],
        [f"{min(targets):.3g}", "5"],
        ["50.0", "50.0"],
        ["1.51 KiB", "-"],
        ["2 KiB", "2 KiB"],
    ]


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "-"),
        (1023, "1.02e+03 B"),
        (1024, "1 KiB"),
        (5 * 2**20, "5 MiB"),
        (2**40, "1.02e+03 GiB"),
    ],
)
def test_sizes_have_a_unit(size, text):
    assert format_bytes(size) == text


FAST, SLOW, NEVER = (3.0, 0.4), (3.0, 2.0, 2.0, 2.0, 0.4), (3.0, 2.0)


@pytest.mark.parametrize(
    ("kfac", "sgd", "kfac_seconds", "expected"),
    [
        (FAST, SLOW, 0.5, "K-FAC needed 4.0 times fewer steps and 4.0 times less time."),
        (FAST, SLOW, 4.0, "K-FAC needed 4.0 times fewer steps and 2.0 times more time."),
        (SLOW, FAST, 0.5, "K-FAC needed 4.0 times more steps and 4.0 times more time."),
        (FAST, SLOW, 2.03, "4.0 times fewer steps and about as much time."),
        (FAST, NEVER, 0.5, "took 10 steps and 0.5 s; no first-order run reached it"),
        (
            NEVER,
            FAST,
            0.5,
            "K-FAC, comm-opt did not reach a training loss of 0.5 within the budget; SGD",
        ),
        (
            NEVER,
            NEVER,
            0.5,
            "Neither K-FAC, comm-opt nor a first-order run reached a training loss of 0.5",
        ),
    ],
)
def test_the_verdict_follows_the_figures(kfac, sgd, kfac_seconds, expected):
    records = [record("sgd", sgd), record("kfac", kfac, seconds=kfac_seconds)]
    assert expected in verdict(records, 0.5)


def test_the_verdict_takes_the_fastest_first_order_run_and_the_first_strategy():
    records = [
        record("sgd", SLOW),
        record("adamw", FAST, seconds=1.0),
        record("kfac", SLOW),
        record("kfac", FAST, seconds=0.1),
    ]
    said = verdict(records, 0.5)
    assert "K-FAC, comm-opt took 40 steps and 2.0 s" in said
    assert "AdamW, took 10 steps and 1.0 s" in said


def test_a_verdict_needs_a_run_of_kfac():
    with pytest.raises(ValueError, match="needs a run of it"):
        verdict([record("sgd")], 0.5)
    with pytest.raises(ValueError, match="trust-region needs a run of it"):
        verdict([record("kfac"), record("sgd")], 0.5, "trust-region")


def test_a_verdict_on_the_trust_region_leaves_the_other_kfac_out():
    records = [record("sgd", SLOW), record("kfac", FAST), record("trust-region", FAST)]
    said = verdict(records, 0.5, "trust-region")
    assert said.startswith("To a training loss of 0.5, K-FAC, trust region took 10 steps and 0.5 s")
    assert "the fastest first-order run, SGD, took 40 steps" in said


@pytest.mark.parametrize("muon", ["muon", "soframe:muon"])
def test_a_verdict_on_another_method_does_not_pass_muon_over(muon):
    """Muon has no curvature, and may be the fastest."""
    records = [
        record("adamw", NEVER),
        record(muon, FAST, seconds=0.2),
        record("soframe:soap-muon", FAST),
    ]
    said = verdict(records, 0.5, "soframe:soap-muon")
    assert f"the fastest first-order run, {records[1].config.label}, took 10 steps and" in said
    assert "soap-muon needed about as many steps and 2.5 times more time" in said


def test_a_verdict_calls_a_trust_region_without_kfac_by_its_name():
    records = [record("sgd", SLOW), record("stochastic-trust-region", FAST)]
    said = verdict(records, 0.5, "stochastic-trust-region")
    assert "Stochastic trust region took 10 steps" in said
    assert ": Stochastic trust region needed 4.0 times fewer steps" in said
    assert "K-FAC" not in said


def test_a_comparison_is_of_one_workload():
    configs = [
        RunConfig(name, "sgd", lr=0.1, steps=1) for name in ("digits-autoencoder", "digits-cnn")
    ]
    with pytest.raises(ValueError, match="one workload"):
        compare(configs)
    with pytest.raises(ValueError, match="one workload"):
        compare([])


def test_a_comparison_lists_its_runs_in_order():
    runs = (record("kfac"), record("sgd"))
    read = Comparison("digits-autoencoder", runs).as_dict()
    assert [run["label"] for run in read["runs"]] == ["K-FAC, comm-opt", "SGD"]
    assert read["targets"] == [1.0, 0.5]
