"""The commands of `python -m experiments`."""

import json
import re

import pytest
from typer.testing import CliRunner

from experiments import demo
from experiments.__main__ import app
from experiments.config import RunConfig
from tests.experiments.helpers import record


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, [str(item) for item in arguments])


@pytest.mark.slow
@pytest.mark.thorough
def test_the_demo_prints_json_only_and_draws_every_workload(tmp_path, invoke, monkeypatch):
    monkeypatch.setattr(demo, "STRATEGIES", demo.STRATEGIES[:1])
    monkeypatch.setattr(demo, "SHARES", {"digits-autoencoder": 0.7, "byte-gpt": 0.3})
    arguments = ["--json", "--budget", 0.2, "--processes", 1, "--output", "plots"]
    result = invoke("demo", *arguments)
    assert result.exit_code == 0, result.output
    parts = {part["workload"]: part for part in json.loads(result.stdout)["workloads"]}
    assert {name: [run["label"] for run in part["runs"]] for name, part in parts.items()} == {
        "digits-autoencoder": ["SGD", "AdamW", "K-FAC, comm-opt", "K-FAC, trust region"],
        "byte-gpt": ["AdamW", "muon", "soap-muon"],
    }
    for part in parts.values():
        assert (tmp_path / part["plot"]).read_bytes().startswith(b"\x89PNG")
        assert part["summary"]


def test_strategies_that_coincide_are_named():
    kfac = RunConfig("digits-autoencoder", "kfac", lr=0.1, steps=40)
    placed = {"comm-opt": (2, 2), "mem-opt": (1, 1), "hybrid-opt": (1, 1)}
    runs = [
        record(config=kfac.but(strategy=name), gradient_workers=workers)
        for name, workers in placed.items()
    ]
    assert demo.sentences("digits-autoencoder", [record(), *runs])[-1] == (
        "On 2 processes mem-opt and hybrid-opt are the same placement: each block has 1 gradient "
        "worker(s)."
    )


@pytest.mark.slow
def test_the_settings_of_train_reach_the_run(invoke):
    settings = ["momentum=0.5", "schedule=cosine", "preconditioner.solver=inverse", "batch_size=64"]
    flat = [item for setting in settings for item in ("--set", setting)]
    own = ["--workload", "digits-cnn", "--lr", 0.01, "--steps", 3, "--seed", 5]
    result = invoke("train", "--json", *own, *flat)
    assert result.exit_code == 0, result.output
    config = json.loads(result.stdout)["config"]
    expected = {"momentum": 0.5, "schedule": "cosine", "batch_size": 64, "lr": 0.01, "seed": 5}
    assert config | expected == config
    assert config["preconditioner"] == {"solver": "inverse"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--workload", "mnist"], "mnist"),
        (["train", "--optimizer", "lion"], "no optimizer 'lion'; there are: sgd"),
        (
            ["train", "--optimizer", "sgd", "--workload", "byte-gpt"],
            "sgd was never tuned on byte-gpt",
        ),
        (["demo", "--seed", "1000"], "seed 1000 is the one that settings were tuned on"),
        (
            ["train", "--set", "strategy=best-opt"],
            "no strategy 'best-opt'; there are: auto, comm-opt",
        ),
        (["train", "--set", "speed=3"], "no such setting: .*speed"),
        (["train", "--set", "speed"], "--set takes NAME=VALUE, not 'speed'"),
        (["compare", "--optimizers", "sgd", "--strategies", "mem-opt"], "--strategies is of kfac"),
        (["compare", "--optimizers", "sgd,soaq"], "no optimizer 'soaq'; there are: sgd"),
        (["compare", "--seeds", "1,1000"], "seed 1000 is the one that settings were tuned on"),
        (
            ["compare", "--seeds", "1;2"],
            "--seeds takes numbers from 0, separated by commas, not '1;2'",
        ),
        (["compare", "--processes", "0"], "--processes takes numbers from 1, separated by commas"),
        (
            ["compare", "--processes", "1,3"],
            "a batch of 500 cannot be split evenly over 3 processes",
        ),
        (["compare", "--strategies", "best-opt"], "no strategy 'best-opt'; there are: auto"),
        (["compare", "--seconds", 1, "--steps", 2], "seconds or in steps, not both"),
        (["compare", "--workload", "no.py"], "no workload 'no.py': there is no such file"),
    ],
)
def test_what_a_user_can_put_right_is_one_line(invoke, arguments, message):
    result = invoke(*arguments)
    assert result.exit_code == 1, result.stdout
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert re.search(message, result.stderr)


@pytest.mark.slow
def test_what_a_process_of_the_run_refuses_is_one_line(invoke):
    result = invoke("train", "--set", "preconditioner.solver=best")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: no solver 'best'; registered: ")
