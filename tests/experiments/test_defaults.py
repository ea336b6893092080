"""The defaults help with nothing tuned but the optimizer's learning rate (docs/benchmarks)."""

import pytest

from experiments.config import RunConfig
from experiments.train import ALONE, run, train

TARGETS = {"digits-autoencoder": (350, 0.15), "digits-cnn": (80, 0.01)}

# Not reached any more, as docs/decisions/016-clips-bound-updates.md says.
LOW = pytest.mark.xfail(strict=True, reason="a tenth of the rate is a tenth of the step")
SLOWER = pytest.mark.xfail(strict=True, reason="0.168 to 0.179 with the safe damping and clips")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workload", "lr"),
    [
        pytest.param("digits-autoencoder", 0.01, marks=[pytest.mark.thorough, LOW]),
        pytest.param("digits-autoencoder", 0.1, marks=[pytest.mark.thorough, SLOWER]),
        pytest.param("digits-cnn", 0.01, marks=[pytest.mark.thorough, LOW]),
        ("digits-cnn", 0.1),
    ],
)
def test_two_lines_reach_the_target(workload: str, lr: float) -> None:
    steps, target = TARGETS[workload]
    config = RunConfig(workload, "kfac", lr=lr, momentum=0.9, steps=steps, seed=2000)
    assert config.preconditioner == {}
    record = train(ALONE, config)
    assert min(row.loss for row in record.rows) <= target


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.thorough
def test_two_lines_reach_the_target_under_ddp() -> None:
    """On the workload of fewer steps: the others follow the trajectory of one process."""
    steps, target = TARGETS["digits-cnn"]
    config = RunConfig("digits-cnn", "kfac", lr=0.1, momentum=0.9, steps=steps, seed=2000)
    assert config.preconditioner == {}
    record = run(config, processes=2)
    assert min(row.loss for row in record.rows) <= target
