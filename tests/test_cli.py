"""The command line: run as a user runs it where processes, streams or exits matter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import soframe
from soframe.experiments.commands import app
from soframe.registry import KINDS

ROOT = Path(soframe.__file__).parents[1]


def soframe_command(*arguments, cwd, timeout=240):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("FORCE_COLOR", None)
    return subprocess.run(
        [sys.executable, "-m", "soframe", *map(str, arguments)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@pytest.fixture
def invoke(tmp_path, monkeypatch):
    """Runs a command in this process, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield lambda *arguments: CliRunner().invoke(app, [str(item) for item in arguments])
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def succeeded(result):
    code = (
        result.returncode if isinstance(result, subprocess.CompletedProcess) else result.exit_code
    )
    assert code == 0, result.stderr
    return result.stdout


def failed(result, message):
    assert result.exit_code == 1, result.stdout
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.slow
@pytest.mark.distributed
def test_the_demo_prints_json_only_and_draws_every_workload(tmp_path, invoke):
    out = succeeded(invoke("demo", "--json", "--budget", 0.2, "--output", "plots"))
    read = json.loads(out)
    assert (read["processes"], read["seed"]) == (2, 0)
    names = ["digits-autoencoder", "digits-cnn", "byte-gpt"]
    assert [part["workload"] for part in read["workloads"]] == names
    transformer = read["workloads"].pop()
    assert [run["label"] for run in transformer["runs"]] == ["AdamW", "muon", "soap-muon"]
    for part in read["workloads"]:
        assert (tmp_path / part["plot"]).read_bytes().startswith(b"\x89PNG")
        assert part["summary"]
        labels = [run["label"] for run in part["runs"]]
        assert labels[:2] == ["SGD", "AdamW"]
        strategies = [f"K-FAC, {name}" for name in ("comm-opt", "mem-opt", "hybrid-opt")]
        assert labels[2:5] == strategies
        own = ["K-FAC, trust region"] if part["workload"] == "digits-autoencoder" else []
        assert labels[5:] == own
        for run in part["runs"]:
            check_run(run)


def check_run(run):
    """What a run says of itself is consistent."""
    summary, rows = run["summary"], run["rows"]
    assert summary["final_loss"] == rows[-1]["loss"]
    assert summary["bytes_per_step"] == pytest.approx(sum(run["sent_bytes_per_step"].values()))
    assert summary["curvature_bytes"] == max(run["curvature_bytes"])
    own = run["config"]["optimizer"] in ("kfac", "trust-region")
    assert (summary["curvature_bytes"] > 0) == own
    for hit in summary["targets"]:
        first = next((row for row in rows if row["loss"] <= hit["target"]), None)
        assert hit["step"] == (first and first["step"])
        assert hit["seconds"] == (first and first["seconds"])


@pytest.mark.slow
@pytest.mark.distributed
def test_train_prints_a_table_and_no_progress_off_a_terminal(invoke):
    arguments = ["--optimizer", "kfac", "--lr", 0.1, "--kl-clip", 0, "--damping", 1, "--steps", 5]
    result = invoke("train", *arguments, "--processes", 2)
    out = succeeded(result)
    assert "K-FAC, comm-opt" in out
    assert "not reached" in out
    assert "\x1b" not in out
    assert "\r" not in out
    assert result.stderr == ""


@pytest.mark.slow
def test_the_options_of_train_reach_the_run(tmp_path, invoke):
    arguments = {
        "--workload": "digits-cnn",
        "--optimizer": "kfac",
        "--lr": 0.01,
        "--momentum": 0.5,
        "--weight-decay": 0.1,
        "--schedule": "cosine",
        "--schedule-steps": 9,
        "--strategy": "mem-opt",
        "--solver": "inverse",
        "--damping": 0.5,
        "--decay": 0.7,
        "--kl-clip": 0.25,
        "--statistics-every": 2,
        "--solve-every": 4,
        "--steps": 3,
        "--batch-size": 64,
        "--seed": 5,
        "--tensorboard": "events",
    }
    flat = [item for pair in arguments.items() for item in pair]
    run = json.loads(succeeded(invoke("train", "--json", *flat)))
    check_run(run)
    config = run["config"]
    own = ("workload", "optimizer", "lr", "momentum", "weight_decay", "schedule", "schedule_steps")
    for name in (*own, "strategy", "steps", "batch_size", "seed"):
        assert config[name] == arguments[f"--{name.replace('_', '-')}"], name
    assert config["preconditioner"] == {
        "solver": "inverse",
        "damping": 0.5,
        "decay": 0.7,
        "kl_clip": 0.25,
        "statistics_every": 2,
        "solve_every": 4,
    }
    assert [row["step"] for row in run["rows"]] == [0, 3]
    assert list((tmp_path / "events").iterdir())
    failed(invoke("train", "--json", *flat), "events has the events of another run")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--optimizer", "adamw", "--momentum", 0.5), "--momentum is of sgd and kfac"),
        (("--optimizer", "sgd", "--solver", "eigen"), "sgd takes no preconditioner"),
        (("--optimizer", "sgd", "--schedule-steps", 9), "--schedule-steps is of --schedule"),
        (("--optimizer", "adamw", "--strategy", "mem-opt"), "adamw has no strategy"),
        (("--optimizer", "trust-region", "--kl-clip", 1), "trust-region chooses its own kl_clip"),
        (
            ("--optimizer", "stochastic-trust-region", "--solver", "eigen"),
            "stochastic-trust-region has no preconditioner, and so no solver",
        ),
    ],
)
def test_options_without_effect_are_refused(invoke, arguments, message):
    failed(invoke("train", "--lr", 0.1, "--steps", 1, *arguments), message)


@pytest.mark.slow
def test_compare_runs_each_optimizer_and_strategy(tmp_path, invoke):
    names = "adamw,kfac,soframe:muon"
    options = ["--optimizers", names, "--strategies", "comm-opt,mem-opt", "--seconds", 0.2]
    out = succeeded(invoke("compare", "--json", *options))
    read = json.loads(out)
    labels = [run["label"] for run in read["runs"]]
    assert labels == ["AdamW", "K-FAC, comm-opt", "K-FAC, mem-opt", "muon"]
    assert (tmp_path / "runs/compare/digits-autoencoder.png").exists()


def test_components_are_those_of_the_registry(invoke):
    read = json.loads(succeeded(invoke("components", "--json")))
    assert list(read) == list(KINDS)
    assert set(read["strategy"]) == set(soframe.available("strategy"))
    table = succeeded(invoke("components"))
    for name in (*read["solver"], *read["strategy"], "torch.nn.modules.linear.Linear"):
        assert name in table


MODELS = """
from torch import nn

def make():
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))

class Model(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 3))

instance = nn.Sequential(nn.Linear(5, 6))
number = 3

def with_argument(width):
    return nn.Linear(width, 1)

def text():
    return "model"

def empty():
    return nn.Sequential(nn.LayerNorm(2))
"""


@pytest.fixture
def models(tmp_path, invoke):
    (tmp_path / "mymodels.py").write_text(MODELS)
    (tmp_path / "broken.py").write_text("import soframe_does_not_exist")
    (tmp_path / "raises.py").write_text("1 / 0")
    return invoke


def test_inspect_shows_every_parameter_and_the_placement(models):
    arguments = ["mymodels:make", "--world-size", 4, "--strategy", "mem-opt"]
    out = succeeded(models("inspect", *arguments))
    assert "4 of 6 parameters in 2 block(s)" in out
    assert "1.weight" in out
    assert "placement 'mem-opt' on 4 rank(s)" in out


def test_inspect_as_json_has_every_parameter_and_every_rank(models):
    arguments = ["mymodels:make", "--world-size", 2, "--strategy", "mem-opt", "--json"]
    read = json.loads(succeeded(models("inspect", *arguments)))
    assert [(row["parameter"], row["block"]) for row in read["parameters"]] == [
        ("0.weight", "0"),
        ("0.bias", "0"),
        ("1.weight", None),
        ("1.bias", None),
        ("2.weight", "2"),
        ("2.bias", "2"),
    ]
    assert read["strategy"] == "mem-opt"
    assert [set(block["owners"]) for block in read["blocks"].values()] == [{"A", "G"}, {"A", "G"}]
    (first,), (second,) = (block["gradient_workers"] for block in read["blocks"].values())
    assert {first, second} == {0, 1}
    assert read["blocks"]["0"]["sources"] == [first, first]
    assert len(read["ranks"]) == 2
    # Each rank has the factors of one layer, and the data of their solver: in single precision.
    assert read["ranks"][first]["factors"] >= 4 * (5**2 + 8**2)
    assert all(rank["total"] == sum(rank.values()) - rank["total"] for rank in read["ranks"])


def test_inspect_shows_layers_of_every_kind(models):
    out = succeeded(models("inspect", "mymodels:make", "--all-layers"))
    assert "6 of 6 parameters in 3 block(s)" in out


@pytest.mark.parametrize(("path", "shape"), [("Model", "3x3"), ("instance", "6x5")])
def test_inspect_takes_classes_and_models(models, path, shape):
    assert shape in succeeded(models("inspect", f"mymodels:{path}"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["mymodels"], "'mymodels' is not MODULE:CALLABLE"),
        (["nowhere:make"], "there is no module 'nowhere'"),
        (["broken:make"], "could not be imported: No module named 'soframe_does_not_exist'"),
        (["raises:make"], "importing module 'raises' raised ZeroDivisionError"),
        (["mymodels:absent"], "there is no 'absent' in module 'mymodels'"),
        (["mymodels:number"], "is no callable but a int"),
        (["mymodels:with_argument"], "missing 1 required positional argument: 'width'"),
        (["mymodels:text"], "returned a str, not a torch.nn.Module"),
        (["mymodels:empty"], "there is nothing to precondition"),
        (["mymodels:make", "--strategy", "best-opt"], "no strategy 'best-opt'; registered: "),
        (["mymodels:make", "--world-size", "0"], "the world size must be at least 1, not 0"),
    ],
)
def test_inspect_says_what_is_wrong(models, arguments, message):
    failed(models("inspect", *arguments), message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--workload", "mnist"], "no workload 'mnist'; there are: digits-autoencoder"),
        (["train", "--optimizer", "lion"], "no optimizer 'lion'; there are: sgd"),
        (["compare", "--optimizers", "sgd,sgd"], "--optimizers has 'sgd' more than once"),
        (
            ["compare", "--strategies", "mem-opt,comm-opt,mem-opt"],
            "--strategies has 'mem-opt' more than once",
        ),
        (["compare", "--optimizers", "sgd,soap"], "soframe:METHOD; did you mean soframe:soap?"),
        (["train", "--optimizer", "sgd", "--workload", "byte-gpt"], "byte-gpt sgd; or pass --lr"),
        (["demo", "--seed", "1000"], "seed 1000 is the one that settings were tuned on"),
        (["train", "--strategy", "best-opt"], "no strategy 'best-opt'; there are: comm-opt"),
        (
            ["compare", "--optimizers", "sgd", "--strategies", "mem-opt"],
            "--strategies mem-opt is of kfac, which is not among --optimizers sgd",
        ),
        (["metrics", "."], "Is a directory: '.'"),
        (
            ["train", "--optimizer", "sgd", "--lr", "1", "--batch-size", "5", "--processes", "2"],
            "a batch of 5 cannot be split evenly over 2 processes",
        ),
    ],
)
def test_what_a_user_can_put_right_is_one_line(invoke, arguments, message):
    failed(invoke(*arguments), message)


@pytest.mark.slow
def test_what_a_process_of_the_run_refuses_is_one_line(invoke):
    failed(invoke("train", "--solver", "best"), "error: no solver 'best'; registered: ")


def test_the_version(invoke):
    assert succeeded(invoke("--version")) == f"soframe {soframe.__version__}\n"


@pytest.mark.slow
def test_an_error_leaves_with_one_line_and_no_traceback(tmp_path):
    result = soframe_command("train", "--workload", "mnist", cwd=tmp_path)
    assert result.returncode == 1
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: no workload 'mnist'")


@pytest.mark.slow
@pytest.mark.parametrize("module", ["typer", pytest.param("sklearn", marks=pytest.mark.thorough)])
def test_a_missing_library_is_named_with_what_to_install(tmp_path, module):
    distribution = {"sklearn": "scikit-learn"}.get(module, module)
    code = (
        "import sys; sys.modules[sys.argv[1]] = None\n"
        "from soframe.experiments.requirements import *\n"
        "try: require('json', sys.argv[1])\n"
        "except MissingLibraryError as error: print(error)\n"
        "sys.argv = ['soframe', '--help']\n"
        "import soframe.cli; soframe.cli.main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, module],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    said = f"missing: {distribution}. Install what the experiments need with: pip install 'soframe"
    assert said in result.stdout
    needed_at_once = module == "typer"
    assert result.returncode == int(needed_at_once)
    assert (f"soframe: {said}" in result.stderr) == needed_at_once
