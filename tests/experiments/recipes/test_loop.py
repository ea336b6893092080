"""The training loop of the recipes: runs, continuations, interrupts, the command line."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from experiments.batches import Batches
from experiments.launch import Place
from experiments.recipes import loop, pinn
from experiments.recipes.__main__ import main
from experiments.recipes.ranks import Interrupt
from soframe import checkpoint
from tests.distributed.harness import run_ranks
from tests.experiments.helpers import interrupt, is_alive
from tests.experiments.recipes import small

ROOT = Path(__file__).resolve().parents[3]
TINY = ["--points", "256", "--width", "8", "--batch-size", "256", "--device", "cpu"]


def last(folder):
    return checkpoint.read(checkpoint.latest(folder))


def assert_same(one, other, path="state"):
    """Compare states at any depth, to the bit."""
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        assert torch.equal(one, other), path
    elif isinstance(one, bytes):  # the state of a soframe.Optimizer
        states = (torch.load(io.BytesIO(each), weights_only=True) for each in (one, other))
        assert_same(*states, path)
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key, value in one.items():
            assert_same(value, other[key], f"{path}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), path
        for index, pair in enumerate(zip(one, other, strict=True)):
            assert_same(*pair, f"{path}[{index}]")
    elif not path.endswith(".seconds"):
        assert one == other, path


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.covering(together=1)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"base": None, "method": "soap"},
        {"optimizer": "adamw", "amp": "bf16", "clip": 0.1},
        {"amp": "fp16"},
    ],
    ids=["kfac", "soap", "adamw", "fp16"],
)
def test_a_resumed_run_ends_with_the_bits_of_one_that_was_not_interrupted(tmp_path, ranks, changes):
    # Steps 5 of 10: in the middle of an epoch, and between statistics and a solve.
    assert run_ranks(small.begin_then_resume, ranks, tmp_path, 5, changes) == [10] * ranks
    assert_same(last(tmp_path / "whole"), last(tmp_path / "parts"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("changes", [{"strategy": "mem-opt"}, {"base": None, "method": "soap"}])
def test_four_ranks_with_micro_batches_that_go_on_as_two_are_one(tmp_path, changes):
    settings = small.Settings(together=True, lr=0.01, output=tmp_path / "parts", **changes)
    alone = small.train_until(0, 1, replace(settings, output=tmp_path / "whole"), 10)
    run_ranks(small.train_until, 4, settings, 5)
    going_on = replace(settings, resume=True, accumulate=1, strategy="comm-opt")
    for weights in run_ranks(small.train_until, 2, going_on, 10):
        torch.testing.assert_close(weights, alone, rtol=0, atol=1e-9)


def batches(rank, ranks, workers=0):
    """The micro-batches of a rank, without a process group."""
    place = Place(rank, ranks, torch.device("cpu"))
    sets = small.data(small.Settings())
    shared = Batches(*sets, place, 8, accumulate=2, epochs=2, workers=workers)
    return [images for images, _ in shared.training(0)]


def test_ranks_and_workers_share_the_samples_of_one():
    alone = batches(0, 1)
    assert all(map(torch.equal, alone, batches(0, 1, workers=2)))
    together = [torch.cat(pair) for pair in zip(*(batches(r, 2) for r in range(2)), strict=True)]

    def sums(parts, step):
        return torch.cat(parts[2 * step : 2 * step + 2]).flatten(1).sum(1).sort().values

    for step in range(10):
        assert torch.equal(sums(alone, step), sums(together, step))
    first, second = (torch.cat(alone[begin : begin + 10]) for begin in (0, 10))
    assert not torch.allclose(*(part.flatten(1).sum(1) for part in (first, second)))  # the order
    # An image has one sum, however it is shifted: shifts are new in each epoch, for some at least.
    known = {round(float(image.sum()), 4): image for image in first}
    again = [known[key] for image in second if (key := round(float(image.sum()), 4)) in known]
    matched = [image for image in second if round(float(image.sum()), 4) in known]
    assert len(matched) > 30
    same = sum(map(torch.equal, again, matched))
    assert 0.1 * len(matched) < same < 0.6 * len(matched)  # a third, of three shifts


def test_figures_are_written_and_lines_after_a_checkpoint_are_cut_off(tmp_path):
    settings = small.Settings(output=tmp_path, steps=10)
    outcome = loop.run(small, settings)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [4, 8, 10]
    assert rows[-1]["loss"] == outcome.figures["loss"]
    described = json.loads((tmp_path / "run.json").read_text())
    assert described["settings"]["batch_size"] == 8
    assert torch.__version__.startswith(described["versions"]["torch"])  # without the build
    # The checkpoint of step 9 is the last but one: as if the run had been killed before the end.
    (tmp_path / "checkpoint-000004" / "state.pt").write_bytes(b"")
    with pytest.warns(UserWarning, match="checkpoint-000004"):
        loop.run(small, replace(settings, resume=True))
    again = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    for row in rows + again:
        del row["seconds"]
    assert again == rows


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "has checkpoints of another run: pass --resume"),
        ({"resume": True, "momentum": 0.5}, "begun with momentum=0.9: pass the same"),
        ({"output": Path("other"), "batch_size": 64}, "a batch of 64 exceeds the 44 samples"),
        ({"output": Path("other"), "batch_size": 7}, "cannot be split evenly over 1 rank"),
        ({"output": Path("other"), "processes": 2, "workers": 1}, "use torchrun"),
        ({"output": Path("other"), "lr": 1e30, "optimizer": "sgd"}, "the loss is nan at step 4"),
    ],
)
def test_refusals(tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    settings = small.Settings(output=tmp_path / "run", steps=4)
    if not {"output"} & set(changes):
        loop.run(small, settings)
    with pytest.raises(ValueError, match=re.escape(message)):
        loop.run(small, replace(settings, **changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"schedule": "linear"}, [1, 0.75, 0.5, 0.25]),
        ({"schedule": "constant"}, [1, 1, 1, 1]),
        ({"schedule": "root"}, [1, 0.75**0.5, 0.5**0.5, 0.5]),
        ({"schedule": "cosine"}, [1, 0.8536, 0.5, 0.1464]),
        ({"schedule": "milestones", "milestones": (1,)}, [1, 1, 0.1, 0.1]),
        ({"schedule": "constant", "warmup": 0.5}, [1 / 3, 2 / 3, 1, 1]),
    ],
)
def test_schedules(changes, expected):
    settings = small.Settings(**{"warmup": 0.0, **changes})
    found = [settings.factor(step, 4, step / 2) for step in range(4)]
    assert found == pytest.approx(expected, abs=1e-4)


def start(folder, *arguments, launcher=()):
    command = [sys.executable, *launcher, "-m", "experiments.recipes", "pinn", *TINY]
    command += ["--output", str(folder), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=environment, start_new_session=True, **pipes)


def wait_for_a_line(folder):
    path = folder / "metrics.jsonl"
    while not path.exists() or not path.read_text():
        time.sleep(0.02)


ENDLESS = {"steps": 10**6, "evaluate_every": 10, "tensorboard": False}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_step_and_a_second_one_raises(tmp_path, number, capsys):
    settings = small.Settings(output=tmp_path, **ENDLESS)
    before = signal.getsignal(number)

    def interrupt():
        wait_for_a_line(tmp_path)
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=interrupt, daemon=True)
    thread.start()
    outcome = loop.run(small, settings)
    thread.join()
    assert not outcome.finished
    assert f"interrupted after step {outcome.step} of 1000000; " in capsys.readouterr().out
    assert last(tmp_path)["step"] == outcome.step
    assert signal.getsignal(number) is before
    with Interrupt() as noted:
        os.kill(os.getpid(), signal.SIGINT)
        assert noted.asked
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


PAIR = ["--processes", "2", "--no-tensorboard", "--evaluate-every", "10", "--steps", "1000000"]


def resumable(folder):
    """Go on from the checkpoint by a step; return what the interrupted run has printed."""
    step = last(folder)["step"]
    settings = pinn.Settings(
        output=folder, points=256, width=8, batch_size=256, device="cpu", resume=True, **ENDLESS
    )
    run = loop.RecipeRun(pinn, settings, Place(0, 1, torch.device("cpu")))
    assert run.step == step
    run.take(1)
    return f"interrupted after step {step} of 1000000; the same command with --resume"


@pytest.mark.slow
@pytest.mark.distributed
def test_an_interrupt_leaves_a_checkpoint_that_resumes_and_no_rank(tmp_path):
    lines = tmp_path / "metrics.jsonl"
    thread, ranks = interrupt(lambda: lines.exists() and lines.read_text())
    assert main(["pinn", *TINY, "--output", str(tmp_path), *PAIR]) == 130
    thread.join()
    resumable(tmp_path)
    assert len(ranks) == 2
    assert not any(map(is_alive, ranks))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.thorough  # it imports torch twice
def test_ctrl_c_leaves_a_checkpoint_that_resumes_and_no_process(tmp_path):
    process = start(tmp_path, *PAIR)
    wait_for_a_line(tmp_path)
    os.killpg(process.pid, signal.SIGINT)  # to all of its processes, as a terminal does
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    deadline = time.monotonic() + 60
    while alive(process.pid):  # the server of the processes follows its parent
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert resumable(tmp_path) in out


def alive(group):
    """Whether a process of a group runs; one that has ended may stay a zombie of the system."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, of = stat.read_text().rpartition(")")[2].split()[:3]
        except (FileNotFoundError, ProcessLookupError):  # it has ended since
            continue
        if int(of) == group and state != "Z":
            return True
    return False


@pytest.mark.slow
@pytest.mark.thorough  # it imports torch three times
@pytest.mark.distributed
def test_torchrun_trains_as_any_other_ranks_do(tmp_path):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = start(tmp_path / "torchrun", "--steps", "6", "--no-tensorboard", launcher=launcher)
    settings = pinn.Settings(
        output=tmp_path / "ranks", steps=6, points=256, width=8, batch_size=256, tensorboard=False
    )
    run_ranks(small.train_pinn, 2, settings)
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert out.count("relative_l2") == 1  # of rank 0 alone
    assert_same(last(tmp_path / "torchrun"), last(tmp_path / "ranks"))


def test_help_shows_the_settings_and_errors_are_one_line(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["pinn", "--help"])
    assert ended.value.code == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "--points" in shown
    assert "half waves of the solution along each side" in shown
    assert main(["pinn", *TINY, "--output", str(tmp_path), "--batch-size", "257"]) == 1
    assert capsys.readouterr().err == "error: a batch of 257 exceeds the 256 samples\n"


@pytest.mark.slow
def test_pinn_solves_the_equation(tmp_path):
    settings = pinn.Settings(
        output=tmp_path, steps=80, waves=1, width=24, points=512, batch_size=128, tensorboard=False
    )
    settings = replace(settings, evaluate_every=80)
    assert loop.run(pinn, settings).figures["relative_l2"] < 0.05


def test_the_residual_of_the_solution_is_zero():
    class Exact(torch.nn.Module):
        def forward(self, points):
            return torch.sin(2 * torch.pi * points).prod(dim=1)

    train, _ = pinn.data(pinn.Settings(points=8))
    points, source, solution = (tensor.double() for tensor in train.tensors)
    with torch.no_grad():
        assert pinn.loss(Exact(), points, source, solution) < 1e-8
        assert pinn.loss(Exact(), points, -source, solution) > 100
