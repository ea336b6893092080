import dataclasses
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import soframe
from soframe.experiments import train as training
from soframe.experiments.config import RunConfig, from_dict
from soframe.experiments.launch import launch
from soframe.experiments.optimizers import build_optimizer, schedule_factor
from soframe.experiments.train import run, train
from soframe.methods import Chain, Momentum, Shampoo
from tests.experiments.helpers import SILENT, lose_statistics

SGD = RunConfig("digits-autoencoder", "sgd", lr=0.002, steps=6, evaluate_every=2, dtype="float64")
CONFIGS = {
    "sgd": SGD,
    "adamw": SGD.but(optimizer="adamw", lr=1e-3),
    "kfac": SGD.but(optimizer="kfac", lr=0.1, preconditioner={"damping": 0.01, "kl_clip": 1e-3}),
    "soframe:muon": SGD.but(optimizer="soframe:muon", options={"auxiliary_lr": 1e-3}),
}


def losses(record):
    return [row.loss for row in record.rows]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", CONFIGS)
def test_the_same_seed_gives_the_same_trajectory(optimizer):
    config = CONFIGS[optimizer]
    first, again = train(SILENT, config), train(SILENT, config)
    other = train(SILENT, config.but(seed=1))
    assert losses(first) == losses(again)
    assert losses(first)[1:] != losses(other)[1:]
    assert [row.step for row in first.rows] == [0, 2, 4, 6]
    assert losses(first)[-1] < losses(first)[0]


@pytest.mark.slow
def test_optimizers_differ_and_start_at_the_same_loss():
    runs = [losses(train(SILENT, config)) for config in CONFIGS.values()]
    starts, ends = {run[0] for run in runs}, {run[-1] for run in runs}
    assert len(starts) == 1
    assert len(ends) == len(CONFIGS)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("workload", "optimizer"),
    [
        ("digits-autoencoder", "sgd"),
        ("digits-cnn", "sgd"),
        ("digits-autoencoder", "kfac"),
        ("digits-autoencoder", "soframe:muon"),
    ],
)
def test_two_processes_follow_the_trajectory_of_one(workload, optimizer):
    config = CONFIGS[optimizer].but(workload=workload, batch_size=64)
    if optimizer != "sgd":
        config = config.but(strategy="mem-opt")
    alone, shared = train(SILENT, config), run(config, processes=2)
    assert losses(shared) == pytest.approx(losses(alone), rel=1e-9)
    assert [row.accuracy for row in shared.rows] == [row.accuracy for row in alone.rows]
    # The record of two processes says what was sent; that of one, that nothing was.
    assert alone.sent_bytes_per_step == {}
    assert shared.sent_bytes_per_step["gradients"] == 8 * shared.parameters
    assert len(shared.curvature_bytes) == 2
    assert (sum(shared.curvature_bytes) > 0) == (optimizer != "sgd")
    if optimizer != "sgd":
        assert set(shared.gradient_workers) == {1}
        assert set(shared.sent_bytes_per_step) > {"gradients"}


@pytest.mark.slow
def test_a_run_stops_at_its_lowest_target(monkeypatch):
    record = train(SILENT, SGD)
    target = losses(record)[2]
    problem = dataclasses.replace(training.workload(SGD.workload), targets=(2 * target, target))
    monkeypatch.setattr(training, "workload", lambda name: problem)
    assert [row.step for row in train(SILENT, SGD).rows] == [0, 2, 4]
    assert [row.step for row in train(SILENT, SGD.but(stop_at_target=False)).rows] == [0, 2, 4, 6]


class Clock:
    """Advances by one second whenever it is read."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


@pytest.fixture
def _clock(monkeypatch):
    monkeypatch.setattr(training.time, "perf_counter", Clock())


@pytest.mark.usefixtures("_clock")
def test_seconds_count_steps_only_and_end_the_run():
    # Each step reads the clock twice for forward and backward, twice for the rest: two seconds.
    record = train(SILENT, SGD.but(steps=None, seconds=7.0))
    assert [(row.step, row.seconds) for row in record.rows] == [(0, 0.0), (2, 4.0), (4, 8.0)]
    assert record.milliseconds_per_step == 2000.0


def test_there_is_a_record_before_the_first_step():
    record = training.Run(SILENT, SGD).record()
    assert [row.step for row in record.rows] == [0]
    assert math.isnan(record.milliseconds_per_step)


@pytest.mark.slow
def test_a_run_that_diverges_ends():
    record = train(SILENT, SGD.but(lr=1e6, steps=1000))
    assert not math.isfinite(record.rows[-1].loss)
    assert record.rows[-1].step < 1000


def test_progress_is_told_at_every_evaluation():
    heard = []
    record = train(dataclasses.replace(SILENT, send=heard.append), SGD)
    assert [progress.row for progress in heard] == list(record.rows[1:])
    assert [progress.fraction for progress in heard] == pytest.approx([1 / 3, 2 / 3, 1])


def test_every_example_is_seen_once_an_epoch_whatever_the_number_of_ranks():
    def batches(rank, world_size):
        worker = dataclasses.replace(SILENT, rank=rank, world_size=world_size)
        state = training.Run.__new__(training.Run)
        state.worker, state.config, state.batch_size = worker, SGD, 500
        state.data = training.workload(SGD.workload).data(0, torch.float64)
        iterator = state._batches()
        return [next(iterator).inputs for _ in range(3)]

    whole = batches(0, 1)
    assert [len(batch) for batch in whole] == [500, 500, 500]
    assert len(torch.unique(torch.cat(whole), dim=0)) == 1500  # no two digits are equal
    for batch, *parts in zip(whole, batches(0, 2), batches(1, 2), strict=True):
        assert [len(part) for part in parts] == [250, 250]
        together = torch.cat(parts)
        assert torch.equal(torch.unique(together, dim=0), torch.unique(batch, dim=0))


def test_the_trust_region_is_told_whether_a_step_has_all_examples():
    own = SGD.but(optimizer="trust-region", workload="digits-autoencoder", lr=1.0)
    run = training.Run(SILENT, own)
    assert run.optimizer._full_batch
    first, second = next(run.batches), next(run.batches)
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(first.inputs, run.data.train.inputs)
    run.close()
    some = training.Run(SILENT, own.but(batch_size=500))
    assert not some.optimizer._full_batch
    some.close()


@pytest.mark.slow
def test_a_run_goes_on_from_a_step_that_the_next_one_undoes():
    own = SGD.but(optimizer="trust-region", lr=1e200, steps=7, evaluate_every=1)
    record = train(SILENT, own)
    assert record.rows[-1].step == 7
    assert not math.isfinite(record.rows[1].loss)


def test_numerics_are_put_back():
    denormal = torch.full((1,), 1e-310, dtype=torch.float64)
    before = torch.get_num_threads()
    torch.set_flush_denormal(False)
    with training.numerics(threads=before + 1):
        assert torch.get_num_threads() == before + 1
        assert (denormal * 1.0).item() == 0.0
    assert torch.get_num_threads() == before
    assert (denormal * 1.0).item() == 1e-310


def test_tensorboard_events_are_the_rows(tmp_path):
    record = train(SILENT, SGD, tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    written = [(event.step, event.value) for event in events.Scalars("loss/training")]
    assert [step for step, _ in written] == [2, 4, 6]
    assert [value for _, value in written] == pytest.approx(losses(record)[1:], rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"batch_size": 2000}, "exceeds the 1797"), ({"workload": "mnist"}, "no workload 'mnist'")],
)
def test_impossible_runs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        train(SILENT, SGD.but(**changes))


def test_a_batch_must_split_evenly():
    message = "a batch of 5 cannot be split evenly over 2 processes"
    with pytest.raises(ValueError, match=message):
        run(SGD.but(batch_size=5), processes=2)
    with pytest.raises(ValueError, match=message):
        train(dataclasses.replace(SILENT, world_size=2), SGD.but(batch_size=5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "lion"}, "no optimizer 'lion'; there are: sgd, adamw, kfac"),
        ({"optimizer": "soframe:lion"}, "between them: adamw, blocked, diagonal"),
        ({"schedule": "line"}, "no schedule 'line'; there are: constant, cosine, linear"),
        ({"steps": None}, "needs a budget"),
        ({"steps": None, "seconds": 1.0, "schedule": "cosine"}, "needs its length"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"batch_size": -1}, "batch_size must be positive"),
        ({"clock": "sun"}, "no clock 'sun'; there are: wall, cpu"),
        ({"dtype": "float16"}, "no dtype 'float16'; there are: float32, float64"),
        ({"seconds": float("nan")}, "seconds must be positive, not nan"),
        ({"preconditioner": {"damping": 1.0}}, "sgd takes no preconditioner"),
        ({"options": {"eps": 1.0}}, "sgd takes no options"),
        ({"optimizer": "kfac", "options": {"damping": 1.0}}, "kfac takes no options"),
        ({"optimizer": "muon", "method": {"momentum": 0.9}}, "muon takes no method"),
        ({"optimizer": "kfac", "modules": "^0$"}, "kfac takes no modules"),
    ],
)
def test_impossible_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SGD.but(**changes)


def test_a_configuration_survives_json():
    config = CONFIGS["kfac"].but(betas=(0.8, 0.9))
    assert from_dict(json.loads(json.dumps(config.as_dict()))) == config


def test_the_line_falls_from_one_to_zero():
    config = SGD.but(schedule="linear", schedule_steps=100)
    factors = [schedule_factor(config, step) for step in (0, 25, 100, 150)]
    assert factors == pytest.approx([1.0, 0.75, 0.0, 0.0])


def test_the_cosine_falls_from_one_to_zero():
    config = SGD.but(schedule="cosine", schedule_steps=100)
    factors = [schedule_factor(config, step) for step in (0, 50, 100, 150)]
    assert factors == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert schedule_factor(SGD, 3) == 1.0


@pytest.mark.slow
def test_the_schedule_reaches_the_optimizer_and_the_kl_clip():
    """Where the clip acts, the learning rate cancels: only a falling bound ends in smaller steps.

    At the last step of a cosine both are almost zero, so that the loss hardly moves.
    """
    config = CONFIGS["kfac"].but(
        preconditioner={"damping": 0.01, "kl_clip": 1e-6}, momentum=0.0, steps=20, evaluate_every=1
    )
    constant = losses(train(SILENT, config))
    cosine = losses(train(SILENT, config.but(schedule="cosine")))
    moved = [abs(run[-1] - run[-2]) / abs(run[1] - run[0]) for run in (constant, cosine)]
    assert moved[1] < 0.05 * moved[0]


@pytest.mark.parametrize(
    ("optimizer", "processes", "changes", "expected"),
    [
        ("trust-region", 1, {}, 1797),
        ("trust-region", 2, {}, 1796),
        ("trust-region", 2, {"batch_size": 64}, 64),
        ("kfac", 2, {}, 500),
    ],
)
def test_the_trust_region_takes_the_whole_training_set(optimizer, processes, changes, expected):
    config = SGD.but(optimizer=optimizer, **changes)
    assert training._batch_size(config, processes) == expected


def test_curves_report_the_whole_squared_error():
    config = SGD.but(workload="curves")
    state = training.Run(SILENT, config)
    images = state.data.train.inputs
    expected = (state.model(images) - images).square().sum(1).mean().item()
    assert state.rows[0].loss == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_the_transformer_reports_the_loss_on_held_out_modules():
    state = training.Run(SILENT, SGD.but(workload="byte-gpt", dtype="float32"))
    test = state.data.test
    with torch.no_grad():
        logits = state.model(test.inputs)
    expected = torch.nn.functional.cross_entropy(logits, test.targets).item()
    assert state.rows[0].loss == pytest.approx(expected, rel=1e-5)
    assert state.rows[0].accuracy is None


def test_ranks_draw_their_own_random_numbers():
    def drawn(rank, seed):
        worker = dataclasses.replace(SILENT, rank=rank)
        state = training.Run(worker, SGD.but(seed=seed)).random_state
        generator = torch.Generator()
        generator.set_state(state)
        return torch.rand(1, generator=generator).item()

    assert len({drawn(rank, seed) for rank in (0, 1, 2) for seed in (0, 1)}) == 6
    assert drawn(1, 0) == drawn(1, 0)


@pytest.mark.slow
def test_evaluations_use_running_statistics_and_leave_them_alone():
    state = training.Run(SILENT, SGD.but(workload="cluttered-digits:60", batch_size=20))
    state.take(2)
    assert len(state.step_seconds) == 2
    before = {name: value.clone() for name, value in state.model.named_buffers()}
    row = state._evaluate(2)
    assert state.model.training
    for name, value in state.model.named_buffers():
        assert torch.equal(value, before[name])
    test = state.data.test
    with torch.no_grad():
        state.model.eval()
        logits = state.model(test.inputs)
    expected = torch.nn.functional.cross_entropy(logits, test.targets).item()
    assert row.loss == pytest.approx(expected, rel=1e-9)
    assert row.accuracy == (logits.argmax(1) == test.targets).double().mean().item()


@pytest.mark.slow
@pytest.mark.parametrize("workload", ["digits-cnn", "cluttered-digits:60"])
def test_evaluations_in_parts_are_those_of_the_whole(workload, monkeypatch):
    config = SGD.but(workload=workload, batch_size=20)
    whole = training.Run(SILENT, config).rows[0]
    monkeypatch.setattr(training, "_AT_ONCE", 7)
    parts = training.Run(SILENT, config).rows[0]
    assert parts.loss == pytest.approx(whole.loss, rel=1e-12)
    assert parts.accuracy == whole.accuracy


@pytest.mark.slow
@pytest.mark.distributed
def test_ranks_evaluate_with_the_running_statistics_of_the_first():
    config = SGD.but(workload="cluttered-digits:60", batch_size=20)
    for row in launch(lose_statistics, 2)(config):
        assert math.isfinite(row.loss)


def test_targets_of_a_run_come_before_the_workload_s():
    first = losses(train(SILENT, SGD))[1]
    record = train(SILENT, SGD.but(targets=(2 * first, first)))
    assert record.targets == (2 * first, first)
    assert [row.step for row in record.rows] == [0, 2]


def test_the_stochastic_trust_region_is_evaluated_at_its_average():
    config = SGD.but(
        optimizer="stochastic-trust-region", lr=0.5, weight_decay=0.01, batch_size=64, steps=3
    )
    state = training.Run(SILENT, config.but(options={"model_every": 2}))
    assert state.optimizer._every == 2
    assert state.optimizer.param_groups[0]["lr"] == 0.5
    assert state.optimizer.param_groups[0]["weight_decay"] == 0.01
    state.take(3)
    iterates = [p.detach().clone() for p in state.model.parameters()]
    with state.optimizer.averaged():
        expected = state._sums(state.data.train)[0].item() / len(state.data.train)
    at_iterates = state._sums(state.data.train)[0].item() / len(state.data.train)
    assert state._evaluate(3).loss == pytest.approx(state.problem.scale * expected, rel=1e-12)
    assert expected != pytest.approx(at_iterates, rel=1e-6)
    assert all(torch.equal(p, q) for p, q in zip(state.model.parameters(), iterates, strict=True))
    record = state.record()
    assert record.curvature_bytes == (0,)
    assert record.config.label == "Stochastic trust region"
    state.close()


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_share_a_stochastic_trust_region():
    config = RunConfig(
        "digits-autoencoder",
        "stochastic-trust-region",
        lr=0.7,
        steps=3,
        evaluate_every=1,
        batch_size=64,
        dtype="float64",
    )
    alone, shared = train(SILENT, config), run(config, processes=2)
    assert losses(shared) == pytest.approx(losses(alone), rel=1e-9)
    assert losses(alone)[-1] < losses(alone)[0]


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_share_a_trust_region():
    """Both ranks draw their own targets, so that the step is near that of one process, not it."""
    config = RunConfig(
        "digits-autoencoder", "trust-region", lr=1.0, steps=3, evaluate_every=1, dtype="float64"
    )
    exact = config.but(batch_size=64, options={"fisher": "type-2"})
    alone, shared = train(SILENT, exact), run(exact, processes=2)
    assert losses(shared) == pytest.approx(losses(alone), rel=1e-6)
    assert shared.sent_bytes_per_step["gradients"] > 0
    assert losses(run(config.but(batch_size=64), processes=2))[-1] < losses(shared)[0]


def test_weight_decay_and_options_reach_the_peers():
    pytest.importorskip("pytorch_optimizer")
    config = SGD.but(lr=0.03, betas=(0.8, 0.9), weight_decay=0.1)
    soap = config.but(optimizer="soap", options={"precondition_frequency": 3})
    shampoo = config.but(optimizer="shampoo", options={"preconditioning_compute_steps": 7})
    model = training.workload(SGD.workload).model(0, torch.float64)
    (group,) = build_optimizer(model, soap).param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.03, (0.8, 0.9), 0.1)
    assert group["precondition_frequency"] == 3
    built = build_optimizer(model, shampoo)
    assert (built.preconditioning_compute_steps, built.graft_type) == (7, 3)
    assert built.param_groups[0]["moving_average_for_momentum"]
    assert built.param_groups[0]["betas"] == (0.8, 0.9)


def test_the_published_soap_and_soframe_s_share_a_model_with_adamw_alike():
    """Within some modules they are SOAP; the first gradient makes a basis alone there."""
    pytest.importorskip("pytorch_optimizer")
    theirs = SGD.but(optimizer="soap", lr=0.02, betas=(0.95, 0.95), modules="^[24]$")
    with pytest.raises(ValueError, match=r"pass options\['adamw_lr'\]"):
        training.Run(SILENT, theirs)
    with pytest.raises(ValueError, match="pass modules="):
        training.Run(SILENT, theirs.but(modules=None, options={"adamw_lr": 0.01}))
    theirs = theirs.but(options={"adamw_lr": 0.01})
    options = {"auxiliary_lr": 0.01, "statistics_every": 1}
    pair = [training.Run(SILENT, theirs.but(optimizer="soframe:soap", options=options))]
    pair.append(training.Run(SILENT, theirs))
    groups = [(g["lr"], len(g["params"])) for g in pair[1].optimizer.param_groups]
    assert groups == [(0.02, 4), (0.01, 12)]
    starts = {name: p.detach().clone() for name, p in pair[0].model.named_parameters()}
    for _ in range(2):
        for one in pair:
            one.take(1)
    own, other = (dict(one.model.named_parameters()) for one in pair)
    for name, start in starts.items():
        moves = [each[name].detach() - start for each in (own, other)]
        if name in ("2.weight", "4.weight"):
            # Of the gradient's null space any basis is one.
            assert float(moves[1].norm()) == pytest.approx(float(moves[0].norm()), rel=0.05)
        else:
            torch.testing.assert_close(*moves)
    pair[0].close()


def test_stages_of_a_chain_are_named_with_their_arguments():
    config = SGD.but(
        optimizer="soframe:momentum+shampoo+graft",
        method={"momentum": {"beta": 0.5}, "shampoo": {"decay": 0.9}},
    )
    model = training.workload(SGD.workload).model(0, torch.float64)
    method = build_optimizer(model, config).preconditioner.blocks[0].method
    assert method == Chain((Momentum(0.5), Shampoo(decay=0.9), "graft"))
    with pytest.raises(ValueError, match="arguments of 'muon', which is no stage"):
        build_optimizer(model, config.but(method={"muon": {}}))
    with pytest.raises(ValueError, match="or several as stages with"):
        config.but(optimizer="soframe:momentum+lion")


FAULTS = """
import resource
import torch
from soframe.experiments.train import _warm_up

_warm_up()
for turn in range(8):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    several = [torch.zeros(512_000) for _ in range(8)]
    del several
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print(faults)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="of glibc's allocator")
def test_freed_memory_is_kept_for_the_next_step():
    """Else each of its pages, 4000 here, is asked for again."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    environment["PYTHONPATH"] = str(Path(soframe.__file__).parents[1])
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 400
