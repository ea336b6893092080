"""Comparisons: workloads in files, resuming, tuning, and the files of results."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.utils.data import default_collate
from typer.testing import CliRunner, Result

import soframe
from experiments import compare, environment, train, tuning, workloads
from experiments.__main__ import app
from experiments.workloads import of_module, workload
from soframe.registry import KINDS
from soframe.settings import defaults
from tests.experiments.helpers import descendants, interrupt, is_alive

ROOT = Path(__file__).resolve().parents[2]

TENSORS = """
import torch
from torch import nn

title = "Lines & 100%"
batch_size = 10
targets = (0.9,)
evaluate_every = 2
classifies = True

def model():
    return nn.Linear(3, 4)

def data():
    inputs = torch.randn(50, 3)
    classes = inputs.argmax(1)
    return (inputs[:40], classes[:40]), (inputs[40:], classes[40:])

def loss(model, inputs, classes):
    return nn.functional.cross_entropy(model(inputs), classes)
"""
DATASETS = """
from torch.utils.data import Dataset

class Items(Dataset):
    def __init__(self, tensors):
        self.tensors = tensors

    def __len__(self):
        return len(self.tensors[0])

    def __getitem__(self, i):
        return self.tensors[0][i], int(self.tensors[1][i])

tensors = data

def data():
    return tuple(map(Items, tensors()))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.py").write_text(TENSORS)
    (tmp_path / "items.py").write_text(TENSORS + DATASETS)
    return tmp_path


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Train in this process, and return the names of the runs in order."""
    ran: list[str] = []

    def run(config, *, processes, on_progress):
        ran.append(f"{config.optimizer} {config.seed}")
        record = train.train(dataclasses.replace(train.ALONE, send=on_progress), config)
        return dataclasses.replace(record, processes=processes)

    monkeypatch.setattr(compare.train, "run", run)
    return ran


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save no figures, which takes longer than the training."""
    monkeypatch.setattr(compare.display, "save", lambda figure, path: path)


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


CLOCKS = ((1, "cpu"), (2, "wall"))
SHORT = ("--workload", "lines.py", "--optimizers", "sgd,kfac", "--steps", 4, "--output", "out")


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("undrawn")
def test_tensors_and_datasets_on_one_and_two_processes_follow_one_trajectory(folder: Path) -> None:
    found = {}
    for name in ("lines", "items"):
        options = ["--optimizers", "kfac", "--seeds", "1", "--processes", "1,2", "--steps", 4]
        result = invoke("--workload", f"{name}.py", *options, "--output", "out", "--json")
        assert result.exit_code == 0, result.output
        assert result.stderr == ""
        for run in json.loads(result.stdout)["runs"]:
            found[name, run["processes"]] = run
    losses = {key: [row["loss"] for row in run["rows"]] for key, run in found.items()}
    first = losses["lines", 1]
    assert first[0] > first[-1]
    assert losses["items", 1] == first
    assert losses["lines", 2] == pytest.approx(first, rel=1e-5)
    assert losses["items", 2] == losses["lines", 2]
    assert [row["step"] for row in found["items", 2]["rows"]] == [0, 2, 4]
    clocks = {key: run["config"]["clock"] for key, run in found.items()}
    assert clocks == {
        (name, count): clock for name in ("lines", "items") for count, clock in CLOCKS
    }
    assert found["lines", 2]["sent_bytes_per_step"]["gradients"] == 4 * (3 * 4 + 4)


@pytest.mark.slow
def test_results_are_written_in_every_format(folder: Path, here: list[str]) -> None:
    result = invoke(*SHORT, "--seeds", "1,2")
    assert result.exit_code == 0, result.output
    assert here == ["sgd 1", "kfac 1", "sgd 2", "kfac 2"]
    out = folder / "out"
    content = json.loads((out / "lines.json").read_text())
    assert list(content["files"].values()) == [f"out/lines.{each}" for each in compare.SUFFIXES]
    assert {path.name for path in out.iterdir()} == {
        "runs",
        *(f"lines.{each}" for each in compare.SUFFIXES),
    }
    assert (out / "lines.png").read_bytes().startswith(b"\x89PNG")
    assert (out / "lines.pdf").read_bytes().startswith(b"%PDF")
    assert "<svg" in (out / "lines.svg").read_text()
    for text in ((out / "lines.md").read_text(), result.stdout):
        assert text.count("untuned") == 2
        assert "K-FAC, comm-opt" in text
    assert r"Lines \& 100\%: held-out loss" in (out / "lines.tex").read_text()
    assert len((out / "lines.csv").read_text().splitlines()) == 1 + 4 * 3
    # The legend; matplotlib keeps texts as comments.
    assert "<!-- SGD (untuned) -->" in (out / "lines.svg").read_text()
    last = [run["rows"][-1]["loss"] for run in content["runs"] if run["label"] == "SGD"]
    heads, first = content["table"]["heads"], content["table"]["rows"][0]
    assert first[heads.index("last loss")]["mean"] == pytest.approx(sum(last) / 2)


@pytest.mark.usefixtures("undrawn")
def test_a_run_goes_on_when_it_has_reached_its_targets(folder: Path, here: list[str]) -> None:
    del here
    (folder / "lines.py").write_text(TENSORS.replace("targets = (0.9,)", "targets = (100.0, 50.0)"))
    result = invoke(*SHORT, "--seeds", "1", "--json")
    assert result.exit_code == 0, result.output
    for run in json.loads(result.stdout)["runs"]:
        assert [row["step"] for row in run["rows"]] == [0, 2, 4]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_json_has_true_settings_versions_commit_and_hardware(
    folder: Path, here: list[str]
) -> None:
    assert invoke(*SHORT, "--seeds", "3").exit_code == 0
    content = json.loads((folder / "out" / "lines.json").read_text())
    sgd, kfac = content["runs"]
    (group,) = sgd["settings"]["groups"]
    # The last two are torch's defaults, which no configuration has.
    wanted = {"lr": 0.01, "momentum": 0.9, "nesterov": True, "dampening": 0, "maximize": False}
    assert group.items() >= wanted.items()
    assert "preconditioner" not in sgd["settings"]
    own = kfac["settings"]["preconditioner"]
    assert own["solver"].startswith("Inverse(")
    assert str(defaults(soframe.Preconditioner)["damping"]) in own["damping"]
    around = kfac["environment"]
    assert torch.__version__.startswith(around["versions"]["torch"])  # without the build
    assert around["versions"].keys() >= {"python", "soframe", "numpy", "scipy"}
    assert around["hardware"]["cores"] == len(os.sched_getaffinity(0))
    git = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    assert around["commit"] == (done.stdout.strip() or None)
    assert around["command"]
    assert content["source"]["sha256"] == workload("lines.py").digest


def test_there_is_no_commit_outside_of_a_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    (tmp_path / "inner").mkdir()
    monkeypatch.setattr(environment, "ROOT", tmp_path / "inner")  # the repository is another's
    found = environment.environment(1)
    assert found["commit"] is found["dirty"] is None


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_command_goes_on_until_the_file_changes(folder: Path, here: list[str]) -> None:
    first = invoke(*SHORT, "--seeds", "1", "--json")
    assert here == ["sgd 1", "kfac 1"]
    here.clear()
    again = invoke(*SHORT, "--seeds", "1,2", "--json")
    assert here == ["sgd 2", "kfac 2"]
    runs = json.loads(again.stdout)["runs"]
    assert [runs[0], runs[2]] == json.loads(first.stdout)["runs"]
    here.clear()
    (folder / "lines.py").write_text(TENSORS.replace("randn", "rand"))
    assert invoke(*SHORT, "--seeds", "1").exit_code == 0
    assert here == ["sgd 1", "kfac 1"]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_command_goes_on_until_a_module_of_the_file_changes(
    folder: Path, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    (folder / "parts_of_lines.py").write_text("SCALE = 1.0\n")
    text = TENSORS.replace("import torch", "import torch\nfrom parts_of_lines import SCALE", 1)
    (folder / "lines.py").write_text(text.replace("model(inputs),", "SCALE * model(inputs),"))
    kept = f"are taken from {Path('out', 'runs')}, of the same settings, sources and versions"

    def compared() -> list[dict[str, object]]:
        result = invoke(*SHORT, "--seeds", "1", "--json")
        assert (kept in result.stderr) == (not here), result.stderr
        return json.loads(result.stdout)["runs"]

    before = compared()
    here.clear()
    assert compared() == before
    assert here == []
    (folder / "parts_of_lines.py").write_text("SCALE = 50.0\n")
    del sys.modules["parts_of_lines"]  # as in a process of its own
    workloads._imported.cache_clear()
    after = compared()
    assert here == ["sgd 1", "kfac 1"]
    for run, kept_run in zip(after, before, strict=True):
        assert run["rows"][0]["loss"] > 10 * kept_run["rows"][0]["loss"]
    del sys.modules["parts_of_lines"]


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_all_optimizers_are_tuned_alike_and_trials_are_kept(
    folder: Path, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("optuna")
    with (folder / "lines.py").open("a") as file:
        file.write('spaces = {"kfac": {"lr": (0.05, 0.5)}}\n')
    options = ["--optimizers", "sgd,kfac,soframe:soap", "--seeds", "1", "--tune", 3]
    result = invoke(*SHORT, *options, "--json")
    assert result.exit_code == 0, result.output
    content = json.loads(result.stdout)
    assert content["tuning"].keys() == {"sgd", "kfac", "soframe:soap"}
    for run, outcome in zip(content["runs"], content["tuning"].values(), strict=True):
        assert run["settings_from"].startswith("3 trials of 4 steps")
        assert len(outcome["trials"]) == 3
        assert run["config"]["lr"] == outcome["trials"][0]["settings"]["lr"]
    assert content["tuning"]["kfac"]["trials"][0]["settings"].keys() <= {"lr", "schedule_steps"}
    assert len(list((folder / "out" / "trials").iterdir())) == 9
    seeds = {json.loads(p.read_text())["config"]["seed"] for p in folder.glob("out/trials/*")}
    assert seeds == {tuning.TUNING_SEED}

    def trained(worker, config):
        raise AssertionError("a trial was trained again")

    monkeypatch.setattr(tuning, "train", trained)
    monkeypatch.setattr(train, "train", trained)
    monkeypatch.setattr("experiments.runs.train", trained)
    again = json.loads(invoke(*SHORT, *options, "--json").stdout)
    assert again["runs"] == content["runs"]


@pytest.mark.usefixtures("undrawn")
def test_settings_that_are_known_are_marked(folder: Path, here: list[str]) -> None:
    with (folder / "lines.py").open("a") as file:
        file.write('settings = {"sgd": {"lr": 0.5, "momentum": 0.0}}\n')
    runs = json.loads(invoke(*SHORT, "--seeds", "1", "--json").stdout)["runs"]
    assert [run["settings_from"] for run in runs] == ["set by hand, not tuned", "untuned"]
    assert (runs[0]["config"]["lr"], runs[0]["config"]["momentum"]) == (0.5, 0.0)
    assert [run["tuned"] for run in runs] == [False, False]
    # The demonstration's search: 16, 4 and 1 trials.
    settings, mark = tuning.settled("digits-cnn", "sgd")
    assert mark == "21 trials of 10 s"
    assert settings == tuning.load(tuning.DEMO, "digits-cnn", "sgd").best.settings
    assert tuning.settled("digits-cnn", "soframe:muon") == ({"lr": 0.02}, "untuned")


@pytest.mark.slow
def test_a_seed_that_diverges_is_shown(folder: Path, here: list[str]) -> None:
    text = TENSORS.replace("model(inputs), classes)", "model(inputs) * scale(model), classes)")
    text += "\ndef scale(model):\n    return float('inf') if model.training and lost else 1.0\n"
    text += "lost = False\n"
    text = text.replace("return nn.Linear(3, 4)", "global lost; lost = torch.initial_seed() == 2\n")
    text = text.replace("lost = torch.initial_seed() == 2\n", LOST)
    (folder / "lines.py").write_text(text)
    result = invoke(*SHORT, "--seeds", "1,2", "--optimizers", "sgd")
    assert result.exit_code == 0, result.output
    lines = (folder / "out" / "lines.md").read_text().splitlines()
    assert "1 of 2" in lines[4]
    assert "(1/2)" in lines[4]
    assert "<!-- SGD (untuned), 1 of 2 diverged -->" in (folder / "out" / "lines.svg").read_text()


LOST = """lost = torch.initial_seed() == 2
    return nn.Linear(3, 4)
"""

OWN = """
import dataclasses
import soframe
from soframe.methods import SOAP

@soframe.register("method", "soap_x")
@dataclasses.dataclass(frozen=True)
class Own(SOAP):
    pass

@soframe.register("strategy", "own_opt")
class OwnStrategy(soframe.strategies.MemOpt):
    pass
"""


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "experiments", "compare", *map(str, arguments)]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.usefixtures("undrawn")
def test_methods_and_strategies_that_a_file_registers_run_on_two_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("method", "strategy"):  # what is registered here ends with the test
        monkeypatch.setattr(KINDS[kind], "_components", dict(KINDS[kind]._components))
    (folder / "lines.py").write_text(TENSORS + OWN)
    own = ["--optimizers", "soframe:soap_x", "--strategies", "own_opt", "--processes", 2]
    options = [*SHORT, *own, "--seeds", "1,2"]
    monkeypatch.setattr(sys, "orig_argv", command(*options))
    done = invoke(*options)
    assert (done.exit_code, done.stderr) == (0, ""), done.stdout
    assert r"soap\_x, own\_opt & untuned" in (folder / "out" / "lines.tex").read_text()
    content = json.loads((folder / "out" / "lines.json").read_text())
    assert content["environment"]["command"].endswith(
        "-m experiments compare --workload lines.py --optimizers sgd,kfac --steps 4 --output out "
        "--optimizers soframe:soap_x --strategies own_opt --processes 2 --seeds 1,2"
    )


def interrupted_here(options: list[object], kept: Path) -> tuple[int, str, str, set[int]]:
    """Interrupt a command in this process; return its status, its output and its processes."""
    thread, children = interrupt(lambda: list(kept.glob("*.json")))
    result = invoke(*options)
    thread.join()
    return result.exit_code, result.stdout, result.stderr, children


def started(options: list[object]) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command(*options), env=environment, text=True, **pipes)


def interrupted_apart(options: list[object], kept: Path) -> tuple[int, str, str, set[int]]:
    """Interrupt a command in a process of its own."""
    process = started(options)
    while process.poll() is None and not list(kept.glob("*.json")):
        time.sleep(0.01)
    children = {*descendants(process.pid)}
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=120)
    return process.returncode, out, error, children


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    "interrupted", [interrupted_here, pytest.param(interrupted_apart, marks=pytest.mark.thorough)]
)
def test_an_interrupt_keeps_finished_runs_and_the_command_goes_on(
    folder: Path, interrupted: Callable[..., tuple[int, str, str, set[int]]]
) -> None:
    slow = TENSORS.replace("import torch", "import time\nimport torch", 1)
    slow = slow.replace(
        "    return nn.functional", "    time.sleep(0.05)\n    return nn.functional"
    )
    (folder / "lines.py").write_text(slow)
    options = [*SHORT, "--optimizers", "sgd,adamw", "--seeds", "1,2"]
    kept = folder / "out" / "runs"
    status, out, error, children = interrupted(options, kept)
    assert status == 130
    assert out == ""
    assert error == "interrupted: finished runs are kept in out, and the same command goes on\n"
    assert children
    deadline = time.monotonic() + 30
    while any(map(is_alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_alive, children))
    before = {path: path.stat().st_mtime_ns for path in kept.glob("*.json")}
    assert 1 <= len(before) < 4
    assert not (folder / "out" / "lines.json").exists()
    if interrupted is interrupted_here:
        status = invoke(*options).exit_code
    else:  # modules that are imported here are of the code that decides a run
        process = started(options)
        process.communicate(timeout=120)
        status = process.returncode
    assert status == 0
    assert len(list(kept.glob("*.json"))) == 4
    assert before == {path: path.stat().st_mtime_ns for path in before}


def module(**functions: object) -> ModuleType:
    made = ModuleType("recipes.made")
    made.__file__ = "/made.py"
    vars(made).update(functions)
    return made


def tensors(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(length, 2), torch.zeros(length)


def whole(**changes: Callable[..., object]) -> ModuleType:
    functions = {
        "model": lambda: nn.Linear(2, 1),
        "data": lambda: (tensors(5), tensors(3)),
        "loss": lambda model, inputs, targets: model(inputs).sum(),
    }
    return module(**(functions | changes))


def test_a_module_becomes_a_workload() -> None:
    found = of_module(whole())
    assert (found.title, found.batch_size, found.targets) == ("made", 64, ())
    assert (found.loss_name, found.classifies, found.held_out) == ("held-out loss", False, True)
    assert of_module(module(**vars(whole()), targets=[0.1, 0.5])).targets == (0.5, 0.1)
    first, again, other = (found.make(seed, torch.float32).model for seed in (1, 1, 2))
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    wide = of_module(whole(model=lambda n: nn.Linear(2, n), data=lambda n: (tensors(n),) * 2), 7)
    assert wide.make(0, torch.float32).model.out_features == 7


@pytest.mark.parametrize("constant", ["settings", "spaces"])
def test_settings_of_an_unknown_optimizer_are_refused(folder: Path, constant: str) -> None:
    path = folder / "misnamed.py"
    path.write_text(f'{TENSORS}\n{constant} = {{"soap-muon": {{"lr": 0.1}}}}\n')
    with pytest.raises(
        ValueError, match=r"no optimizer 'soap-muon'; there are: .*did you mean soframe:soap-muon"
    ):
        workload(str(path))


def test_unknown_settings_are_refused_and_a_space_may_fix_the_schedule(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"no such setting: 'learning_rate' of 'sgd'; .* lr,"):
        tuning.configure("digits-cnn", "sgd", {"learning_rate": 0.1}, steps=2)
    with pytest.raises(ValueError, match=r"no such setting: 'conditioner.damping'"):
        tuning.configure("digits-cnn", "kfac", {"lr": 0.1, "conditioner.damping": 0.1}, steps=2)
    path = folder / "fixed.py"
    path.write_text(f'{TENSORS}\nspaces = {{"sgd": {{"lr": (0.01, 0.1), "schedule": [1.0]}}}}\n')
    found = tuning.tune(
        str(path), "sgd", targets=(), steps=2, trials=3, on_trial=lambda trial: None
    )
    assert [trial.settings["schedule_steps"] for trial in found.trials] == [2, 2, 2]


def test_a_recipe_is_a_workload() -> None:
    made = workload("recipe:pinn")
    assert made.batch_size == 256
    task = made.make(0, torch.float32)
    batch = default_collate([task.train[index] for index in range(4)])
    assert [len(each) for each in batch] == [4, 4, 4]
    assert task.loss(task.model, *batch).item() > 0
    with pytest.raises(ValueError, match="no recipe 'gpt5'; there are: resnet32, "):
        workload("recipe:gpt5")


def test_examples_are_the_same_for_all_seeds_and_leave_the_caller_s_randomness() -> None:
    def data():
        return (torch.randn(4, 2), torch.zeros(4)), tensors(2)

    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    tasks = [of_module(whole(data=data)).make(seed, torch.float32) for seed in (1, 2)]
    assert torch.equal(tasks[0].train[0], tasks[1].train[0])
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("name", ["model", "data", "loss"])
def test_a_missing_function_is_named_with_its_file(folder: Path, name: str) -> None:
    (folder / "lines.py").write_text(TENSORS.replace(f"def {name}(", "def other("))
    result = invoke(*SHORT)
    assert result.exit_code == 1
    call = {"model": "model()", "data": "data()", "loss": "loss(model, *batch)"}[name]
    assert result.stderr == f"error: {folder / 'lines.py'} has no function {call}\n"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": lambda: 3}, r"/made\.py: model\(\) must return an nn\.Module, not int"),
        ({"data": lambda: tensors(5)}, r"/made\.py: data\(\) must return \(train, test\)"),
        ({"data": lambda: ((torch.zeros(3), torch.zeros(4)), tensors(3))}, "of one length"),
        ({"data": lambda: (tensors(5), None)}, "or a map-style dataset"),
    ],
)
def test_what_the_functions_return_is_checked(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        of_module(whole(**changes)).make(0, torch.float32)
    with pytest.raises(ValueError, match="decides the types of its tensors"):
        of_module(whole()).make(0, torch.float64)


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_the_guide_s_file_and_command_give_the_guide_s_table(
    tmp_path: Path, here: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "guides" / "comparing.md").read_text()
    code, shell, latex = (
        re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)[0]
        for kind in ("python", "sh", "latex")
    )
    (tmp_path / "perceptron.py").write_text(code)
    words = shlex.split(shell.replace("\\\n", " ").replace("--tune 8 ", ""))
    assert words[:4] == ["python", "-m", "experiments", "compare"]
    result = invoke(*words[4:], "--steps", 2, "--seeds", "1,2")
    assert result.exit_code == 0, result.output
    written = (tmp_path / "runs" / "perceptron" / "perceptron.tex").read_text()
    lines = latex.splitlines()
    assert "\n".join(lines[:5]) in written
    names = [line.partition(" & ")[0] for line in lines[5:8]]
    assert names == re.findall(r"^([^&\n]*) & untuned &", written, re.MULTILINE)
