"""The training loop: the same runs again, on any number of processes, and what is measured."""

import dataclasses
import itertools
import json
import math
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

import soframe
from experiments import train as training
from experiments.batches import Batches
from experiments.config import RunConfig
from experiments.data import size, take
from experiments.launch import Place
from experiments.libraries import import_kfac_pytorch
from experiments.loop import seed_draws
from experiments.optimizers import build_optimizer, schedule_factor
from experiments.train import ALONE, WorkloadRun, run, train
from soframe.methods import Chain, Momentum, Shampoo

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
def test_the_same_seed_gives_the_same_trajectory_and_optimizers_differ():
    configs = {name: config.but(evaluate_every=6) for name, config in CONFIGS.items()}
    found = {name: losses(train(ALONE, config)) for name, config in configs.items()}
    again = {name: losses(train(ALONE, config)) for name, config in configs.items()}
    assert found == again
    assert len({each[0] for each in found.values()}) == 1
    assert len({each[-1] for each in found.values()}) == len(CONFIGS)
    assert all(each[-1] < each[0] for each in found.values())
    other = losses(train(ALONE, configs["sgd"].but(seed=1)))
    assert other[1:] != found["sgd"][1:]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("workload", "optimizer"),
    [
        ("digits-cnn", "sgd"),
        ("digits-autoencoder", "kfac"),
        ("digits-autoencoder", "stochastic-trust-region"),
    ],
)
def test_two_processes_follow_the_trajectory_of_one(workload, optimizer):
    trust = SGD.but(optimizer=optimizer) if optimizer not in CONFIGS else CONFIGS[optimizer]
    config = trust.but(workload=workload, batch_size=64, evaluate_every=6)
    if optimizer == "kfac":
        config = config.but(strategy="mem-opt")
    alone, shared = train(ALONE, config), run(config, processes=2)
    assert losses(shared) == pytest.approx(losses(alone), rel=1e-9)
    assert [row.accuracy for row in shared.rows] == [row.accuracy for row in alone.rows]
    assert alone.sent_bytes_per_step == {}
    assert shared.sent_bytes_per_step["gradients"] == 8 * shared.parameters
    assert len(shared.curvature_bytes) == 2
    assert (sum(shared.curvature_bytes) > 0) == (optimizer == "kfac")
    if optimizer == "kfac":
        assert set(shared.gradient_workers) == {1}
        assert set(shared.sent_bytes_per_step) > {"gradients"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "workload",
    ["digits-autoencoder", pytest.param("mnist-autoencoder", marks=pytest.mark.thorough)],
)
def test_the_oracle_steps_along_the_exact_direction(workload):
    options = {"damping": 0.1, "iterations": 5, "tolerance": 1e-3}
    config = SGD.but(
        workload=workload, optimizer="oracle", options=options, lr=0.1, momentum=0.5, steps=2
    )
    found = WorkloadRun(ALONE, config)
    model, loss = found.workload.make(config.seed, torch.float64).model, found.task.loss
    oracle = soframe.testing.Oracle(model, lr=0.1, momentum=0.5, **options)
    for batch in itertools.islice(found.job.batches.training(0), 2):
        oracle.step(lambda batch=batch: loss(model, *batch))
    found.advance()
    for parameter, expected in zip(found.model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(parameter, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.distributed
def test_the_oracle_refuses_several_processes():
    config = SGD.but(optimizer="oracle", options={"damping": 0.1})
    with pytest.raises(ValueError, match="oracle has the matrix of one process's batch"):
        run(config, processes=2)


def test_preconditioned_optimizers_have_the_method_of_their_name():
    run_of_ekfac = WorkloadRun(ALONE, CONFIGS["kfac"].but(optimizer="ekfac"))
    assert run_of_ekfac.settings["preconditioner"]["method"].startswith("EKFAC")
    run_of_ekfac.close()


@pytest.mark.slow
def test_kfac_pytorch_stands_in_front_of_the_same_sgd():
    try:
        package = import_kfac_pytorch()
    except ImportError:
        pytest.skip("kfac-pytorch is not installed")
    config = SGD.but(optimizer="kfac-pytorch", lr=0.05, options={"damping": 0.1}, steps=2)
    found = WorkloadRun(ALONE, config)
    task = found.workload.make(config.seed, torch.float64)
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    preconditioner = package.KFACPreconditioner(task.model, lr=0.05, damping=0.1)
    for batch in itertools.islice(found.job.batches.training(0), 2):
        optimizer.zero_grad()
        task.loss(task.model, *batch).backward()
        preconditioner.step()
        optimizer.step()
    found.advance()
    for parameter, expected in zip(found.model.parameters(), task.model.parameters(), strict=True):
        assert torch.equal(parameter, expected)


@pytest.mark.slow
def test_a_run_stops_at_its_lowest_target():
    first = losses(train(ALONE, SGD))[1]
    record = train(ALONE, SGD.but(targets=(2 * first, first)))
    assert record.targets == (2 * first, first)
    assert [row.step for row in record.rows] == [0, 2]
    record = train(ALONE, SGD.but(targets=(2 * first, first), stop_at_target=False))
    assert [row.step for row in record.rows] == [0, 2, 4, 6]


class Clock:
    """Advances by one second whenever it is read."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


@pytest.mark.slow
def test_seconds_count_steps_only_and_end_the_run(monkeypatch):
    # Each step reads the clock twice for forward and backward, twice for the rest: two seconds.
    monkeypatch.setattr(training.time, "perf_counter", Clock())
    heard = []
    worker = dataclasses.replace(ALONE, send=heard.append)
    record = train(worker, SGD.but(steps=None, seconds=7.0))
    assert [(row.step, row.seconds) for row in record.rows] == [(0, 0.0), (2, 4.0), (4, 8.0)]
    assert record.milliseconds_per_step == 2000.0
    assert [progress.row for progress in heard] == list(record.rows[1:])
    assert [progress.fraction for progress in heard] == pytest.approx([4 / 7, 1])
    timed = train(ALONE, SGD.but(steps=None, seconds=7.0, evaluate_seconds=3.0))
    assert [row.seconds for row in timed.rows] == [0.0, 4.0, 8.0]


@pytest.mark.slow
def test_a_run_that_diverges_ends_unless_its_last_step_can_be_undone():
    record = train(ALONE, SGD.but(lr=1e6, steps=1000))
    assert not math.isfinite(record.last.loss)
    assert record.last.step < 1000
    own = SGD.but(optimizer="trust-region", lr=1e200, steps=2, evaluate_every=1)
    record = train(ALONE, own)
    assert record.last.step == 2
    assert not math.isfinite(record.rows[1].loss)


def test_every_example_is_seen_once_an_epoch_whatever_the_number_of_ranks():
    task = training.workload(SGD.workload).make(0, torch.float64)

    def batches(rank, ranks):
        place = Place(rank, ranks, torch.device("cpu"))
        iterator = Batches(task.train, None, place, 500).training(0)
        return [next(iterator)[0] for _ in range(3)]

    whole = batches(0, 1)
    assert len(torch.unique(torch.cat(whole), dim=0)) == 1500  # no two digits are equal
    for batch, *parts in zip(whole, batches(0, 2), batches(1, 2), strict=True):
        assert [len(part) for part in parts] == [250, 250]
        together = torch.cat(parts)
        assert torch.equal(torch.unique(together, dim=0), torch.unique(batch, dim=0))


def test_a_dataset_s_items_are_collated_in_the_order_of_tensors():
    place = Place(1, 2, torch.device("cpu"))
    tensors = (torch.arange(12.0), torch.arange(12) * 2)
    of_items = Batches(TensorDataset(*tensors), None, place, 4, accumulate=2, steps=5, seed=3)
    of_tensors = Batches(tensors, None, place, 4, accumulate=2, steps=5, seed=3)
    pairs = list(zip(of_items.training(1), of_tensors.training(1), strict=True))
    assert len(pairs) == 8  # the micro-batches of steps 1 to 4
    for items, taken in pairs:
        assert all(map(torch.equal, items, taken))
    shares = (b.shares(b.train, 5) for b in (of_items, of_tensors))
    assert [[len(part[0]) for part in share] for share in shares] == [[5, 1], [5, 1]]


def test_the_trust_region_takes_all_examples_and_is_told_so():
    own = SGD.but(optimizer="trust-region", lr=1.0)
    state = WorkloadRun(ALONE, own)
    assert state.optimizer._full_batch
    first, second = itertools.islice(state.job.batches.training(0), 2)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[0], state.task.train[0])
    state.worker = dataclasses.replace(ALONE, world_size=2)
    assert state._batch_size(1797) == 1796
    state.close()
    some = WorkloadRun(ALONE, own.but(batch_size=500))
    assert not some.optimizer._full_batch
    some.close()


def test_numerics_are_put_back():
    denormal = torch.full((1,), 1e-310, dtype=torch.float64)
    before = torch.get_num_threads()
    torch.set_flush_denormal(False)
    with training.numerics(threads=before + 1):
        assert torch.get_num_threads() == before + 1
        assert (denormal * 1.0).item() == 0.0
    assert torch.get_num_threads() == before
    assert (denormal * 1.0).item() == 1e-310


@pytest.mark.parametrize(
    ("changes", "processes", "message"),
    [
        ({"batch_size": 2000}, 1, "exceeds the 1797"),
        ({"workload": "mnist"}, 1, "no workload 'mnist'; there are: digits-autoencoder"),
        ({"batch_size": 5}, 2, "a batch of 5 cannot be split evenly over 2 rank"),
    ],
)
def test_impossible_runs_are_refused(changes, processes, message):
    worker = dataclasses.replace(ALONE, world_size=processes)
    with pytest.raises(ValueError, match=message):
        train(worker, SGD.but(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": "lion"}, "no optimizer 'lion'; there are: sgd, adamw, kfac"),
        ({"optimizer": "soframe:lion"}, "between them: adamw, blocked, diagonal"),
        ({"schedule": "line"}, "no schedule 'line'; there are: constant, cosine, linear"),
        ({"steps": None}, "needs a budget"),
        ({"steps": None, "seconds": 1.0, "schedule": "cosine"}, "needs its length"),
        ({"steps": None, "seconds": 1.0, "warmup": 0.1}, "needs its length"),
        ({"warmup": 1.0}, "a fraction of the schedule"),
        ({"seconds": float("nan")}, "seconds must be positive, not nan"),
        ({"preconditioner": {"damping": 1.0}}, "sgd takes no preconditioner"),
        ({"optimizer": "kfac", "options": {"damping": 1.0}}, "kfac takes no options"),
        ({"optimizer": "adamw", "strategy": "mem-opt"}, "adamw takes no strategy"),
    ],
)
def test_impossible_configurations_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        SGD.but(**changes)


def test_a_configuration_survives_json():
    config = CONFIGS["kfac"].but(betas=(0.8, 0.9))
    assert RunConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config


def test_schedules_fall_from_one_to_zero():
    line = SGD.but(schedule="linear", schedule_steps=100)
    factors = [schedule_factor(line, step) for step in (0, 25, 100, 150)]
    assert factors == pytest.approx([1.0, 0.75, 0.0, 0.0])
    cosine = SGD.but(schedule="cosine", schedule_seconds=4.0)
    factors = [schedule_factor(cosine, 1, seconds) for seconds in (0.0, 2.0, 4.0, 5.0)]
    assert factors == pytest.approx([1.0, 0.5, 0.0, 0.0])
    assert schedule_factor(SGD, 3) == 1.0
    grown = line.but(warmup=0.2)
    factors = [schedule_factor(grown, step) for step in (0, 9, 20, 60, 100)]
    assert factors == pytest.approx([1 / 21, 10 / 21, 1.0, 0.5, 0.0])


@pytest.mark.slow
def test_the_schedule_reaches_the_optimizer_and_the_kl_clip():
    """Where the clip acts, the learning rate cancels: only a falling bound shortens steps."""
    config = CONFIGS["kfac"].but(
        preconditioner={"damping": 0.01, "kl_clip": 1e-6}, momentum=0.0, steps=10, evaluate_every=1
    )
    constant = losses(train(ALONE, config))
    cosine = losses(train(ALONE, config.but(schedule="cosine")))
    moved = [abs(run[-1] - run[-2]) / abs(run[1] - run[0]) for run in (constant, cosine)]
    assert moved[1] < 0.05 * moved[0]


def test_curves_report_the_whole_squared_error():
    state = WorkloadRun(ALONE, SGD.but(workload="curves"))
    images = state.task.train[0]
    expected = (state.model(images) - images).square().sum(1).mean().item()
    assert state.rows[0].loss == pytest.approx(expected, rel=1e-12)


def test_ranks_draw_their_own_random_numbers():
    def drawn(rank, seed, step=0):
        seed_draws(seed, step, rank)
        return torch.rand(1).item()

    with torch.random.fork_rng(devices=[]):
        assert len({drawn(rank, seed) for rank in (0, 1, 2) for seed in (0, 1)}) == 6
        assert drawn(1, 0) == drawn(1, 0) != drawn(1, 0, step=1)


@pytest.mark.slow
def test_evaluations_use_running_statistics_in_parts_and_leave_them_alone(monkeypatch):
    state = WorkloadRun(ALONE, SGD.but(workload="cluttered-digits:60", batch_size=20))
    state.take(2)
    assert len(state.step_seconds) == 2
    before = {name: value.clone() for name, value in state.model.named_buffers()}
    monkeypatch.setattr(training, "AT_ONCE", 7)
    row = state.evaluate()
    assert state.model.training
    for name, value in state.model.named_buffers():
        assert torch.equal(value, before[name])
    inputs, classes = state.task.test
    with torch.no_grad():
        state.model.eval()
        logits = state.model(inputs)
    expected = torch.nn.functional.cross_entropy(logits, classes).item()
    assert row.loss == pytest.approx(expected, rel=1e-9)
    assert row.accuracy == pytest.approx((logits.argmax(1) == classes).double().mean().item())


@pytest.mark.slow
def test_the_stochastic_trust_region_is_evaluated_at_its_average():
    config = SGD.but(optimizer="stochastic-trust-region", lr=0.5, batch_size=64, steps=3)
    state = WorkloadRun(ALONE, config)
    state.take(3)
    iterates = [p.detach().clone() for p in state.model.parameters()]

    def loss():
        with torch.no_grad():
            return float(state.task.loss(state.model, *state.task.train))

    with state.optimizer.averaged():
        expected = loss()
    assert state.evaluate().loss == pytest.approx(expected, rel=1e-12)
    assert expected != pytest.approx(loss(), rel=1e-6)
    assert all(torch.equal(p, q) for p, q in zip(state.model.parameters(), iterates, strict=True))
    state.close()


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.thorough
def test_two_processes_share_a_trust_region():
    """Both ranks draw their own targets, so that the step is near that of one process, not it."""
    config = SGD.but(optimizer="trust-region", lr=1.0, steps=3, evaluate_every=1)
    exact = config.but(batch_size=64, options={"fisher": "type-2"})
    alone, shared = train(ALONE, exact), run(exact, processes=2)
    assert losses(shared) == pytest.approx(losses(alone), rel=1e-6)
    assert shared.sent_bytes_per_step["gradients"] > 0


def build(config, dtype=torch.float64):
    model = training.workload(config.workload).make(0, dtype).model
    return build_optimizer(model, config, "squared-error", full_batch=False)


def test_weight_decay_and_options_reach_the_peers():
    pytest.importorskip("pytorch_optimizer")
    config = SGD.but(lr=0.03, betas=(0.8, 0.9), weight_decay=0.1)
    soap = config.but(optimizer="soap", options={"precondition_frequency": 3})
    shampoo = config.but(optimizer="shampoo", options={"preconditioning_compute_steps": 7})
    (group,) = build(soap).param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.03, (0.8, 0.9), 0.1)
    assert group["precondition_frequency"] == 3
    built = build(shampoo)
    assert (built.preconditioning_compute_steps, built.graft_type) == (7, 3)
    assert built.param_groups[0]["moving_average_for_momentum"]


def test_the_published_soap_and_soframe_s_share_a_model_with_adamw_alike():
    """Within some modules they are SOAP; the first gradient makes a basis alone there."""
    pytest.importorskip("pytorch_optimizer")
    theirs = SGD.but(optimizer="soap", lr=0.02, betas=(0.95, 0.95), modules="^[24]$")
    with pytest.raises(ValueError, match="give both"):
        WorkloadRun(ALONE, theirs)
    theirs = theirs.but(options={"adamw_lr": 0.01})
    options = {"auxiliary_lr": 0.01, "statistics_every": 1}
    pair = [
        WorkloadRun(ALONE, theirs.but(optimizer="soframe:soap", options=options)),
        WorkloadRun(ALONE, theirs),
    ]
    starts = {name: p.detach().clone() for name, p in pair[0].model.named_parameters()}
    for one in pair:
        one.take(2)
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
    method = build(config).preconditioner.blocks[0].method
    assert method == Chain((Momentum(0.5), Shampoo(decay=0.9), "graft"))
    with pytest.raises(ValueError, match="arguments of 'muon', which is no stage"):
        build(config.but(method={"muon": {}}))


def test_examples_are_taken_together():
    inputs, targets = take((torch.arange(4), torch.arange(4) * 2), torch.tensor([3, 1]))
    assert (inputs.tolist(), targets.tolist()) == ([3, 1], [6, 2])
    items = [(torch.arange(2.0) + i, i) for i in range(4)]  # a map-style dataset
    assert size(items) == size((torch.zeros(4, 2), torch.zeros(4))) == 4


FAULTS = """
import resource
import torch
from experiments.train import _warm_up

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
@pytest.mark.thorough
def test_freed_memory_is_kept_for_the_next_step():
    """Else each of its pages, 4000 here, is asked for again."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_"))}
    environment["PYTHONPATH"] = str(Path(soframe.__file__).parents[1])
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 400
