import dataclasses

import pytest

from soframe.experiments import tuning
from soframe.experiments.demo import configurations
from soframe.experiments.tuning import OPTIMIZERS, WORKLOADS
from soframe.experiments.workloads import workload
from tests.harness.helpers import require_one_protocol


def test_settings_become_a_configuration():
    settings = {
        "lr": 0.5,
        "betas": [0.8, 0.9],
        "preconditioner.damping": 0.03,
        "schedule_steps": 300,
    }
    config = tuning.configure("digits-cnn", "kfac", settings, seconds=2.0, seed=3)
    assert (config.lr, config.betas, config.seconds, config.seed) == (0.5, (0.8, 0.9), 2.0, 3)
    assert config.preconditioner == {"damping": 0.03}
    assert config.schedule == "cosine"
    constant = tuning.configure("digits-cnn", "sgd", {"lr": 1.0, "schedule_steps": None}, steps=2)
    assert constant.schedule == "constant"


@pytest.mark.parametrize("name", WORKLOADS)
def test_stored_outcomes_obey_one_protocol(name):
    outcomes = [tuning.load(name, optimizer) for optimizer in OPTIMIZERS]
    assert len({outcome.protocol for outcome in outcomes}) == 1
    protocol = outcomes[0].protocol
    assert (protocol.workload, protocol.seed) == (name, tuning.TUNING_SEED)
    assert protocol.targets == workload(name).targets
    for outcome, optimizer in zip(outcomes, OPTIMIZERS, strict=True):
        assert outcome.optimizer == optimizer
        require_one_protocol(outcome)
    with pytest.raises(FileNotFoundError, match=f"muon was never tuned on {name}"):
        tuning.load(name, "muon")


def test_the_demo_runs_tuned_settings_with_equal_budgets_on_another_seed():
    configs = configurations("digits-autoencoder", budget=90.0, seed=0)
    assert [c.label for c in configs] == [
        "SGD",
        "AdamW",
        "K-FAC, comm-opt",
        "K-FAC, mem-opt",
        "K-FAC, hybrid-opt",
        "K-FAC, trust region",
    ]
    assert {c.targets for c in configs} == {(0.3, 0.15, 0.05)}
    assert configs[-1].options == {}
    assert len({c.seconds for c in configs}) == 1
    plain = {dataclasses.replace(c, strategy="mem-opt") == configs[3] for c in configs[2:5]}
    assert plain == {True}
    with pytest.raises(ValueError, match="tuned on"):
        configurations("digits-autoencoder", budget=90.0, seed=tuning.TUNING_SEED)
    with pytest.raises(ValueError, match="budget must be positive"):
        configurations("digits-autoencoder", budget=0.0, seed=0)


def test_names_of_optimizers_are_checked():
    assert tuning.optimizers([]) == OPTIMIZERS
    assert tuning.optimizers(["kfac"]) == ("kfac",)
    known = "sgd, adamw, kfac, trust-region, stochastic-trust-region"
    with pytest.raises(ValueError, match=f"no optimizer 'lion'; there are: {known}"):
        tuning.optimizers(["lion"])


@pytest.mark.parametrize(("name", "lr"), [("trust-region", 1.0), ("stochastic-trust-region", 0.7)])
def test_trust_regions_need_no_tuning(name, lr):
    config = tuning.tuned("digits-cnn", name, steps=3)
    assert (config.lr, config.options, config.schedule) == (lr, {}, "constant")
