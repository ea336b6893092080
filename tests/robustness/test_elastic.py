"""Ranks are killed; torchrun starts them again, as many or fewer, and training goes on."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed.harness import run_ranks
from tests.robustness.elastic import SAVE_EVERY, Death, train

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 200.0


def torchrun(
    ranks: int, restarts: int, folder: Path, strategy: str, death: Death | None
) -> subprocess.CompletedProcess[str]:
    told = "" if death is None else json.dumps(asdict(death))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    command += ["--monitor-interval", "0.1", "--local-addr", "127.0.0.1"]
    command += ["-m", "tests.robustness.elastic", str(folder), strategy, told]
    # NOTE: the agent's own store keeps the Gloo addresses of the workers that died, and those that
    # come after may connect to them; without it, rank 0 makes a new store each time.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    agent = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = agent.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        agent.terminate()  # the agent ends its workers
        output, _ = agent.communicate(timeout=30)
        pytest.fail(f"not finished in {TIMEOUT:g} s\n{output}", pytrace=False)
    return subprocess.CompletedProcess(command, agent.returncode, output)


def ends(folder: Path, ranks: int) -> list[tuple[int, Tensor]]:
    return [torch.load(folder / f"end-{ranks}-{rank}.pt") for rank in range(ranks)]


@pytest.mark.parametrize(
    ("strategy", "death"),
    [
        ("comm-opt", Death(6, 1, "solve")),
        ("sharded", Death(5, 1, "backward")),
    ],
    ids=["comm-opt in a solve", "sharded before the step"],
)
def test_a_killed_rank_costs_the_steps_since_the_last_checkpoint(tmp_path, strategy, death):
    (whole := tmp_path / "whole").mkdir()
    undisturbed = run_ranks(train, 2, whole, strategy, timeout=60)
    (folder := tmp_path / "killed").mkdir()
    done = torchrun(2, 1, folder, strategy, death)
    assert done.returncode == 0, done.stdout
    assert (folder / "died").exists()
    assert f"-{int(signal.SIGKILL)}" in done.stdout  # the agent says how its worker ended
    for (first, weights), (_, expected) in zip(ends(folder, 2), undisturbed, strict=True):
        assert first == SAVE_EVERY
        assert torch.equal(weights, expected)


def test_fewer_ranks_go_on_from_the_checkpoint(tmp_path):
    strategy = "sharded"
    (folder := tmp_path / "ranks").mkdir()
    done = torchrun(4, 0, folder, strategy, Death(5, 2, "backward"))
    assert done.returncode != 0
    assert (folder / "died").exists()
    (alone := tmp_path / "alone").mkdir()
    shutil.copy(folder / "last.pt", alone)
    first, expected = train(0, 1, alone, strategy)
    assert first == SAVE_EVERY
    done = torchrun(2, 0, folder, strategy, None)
    assert done.returncode == 0, done.stdout
    for began, weights in ends(folder, 2):
        assert began == SAVE_EVERY
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
