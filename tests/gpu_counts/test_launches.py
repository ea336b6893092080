"""Operators and waits of a training step at full size on a GPU, as a fake one counts them.

GPT-2 of 124 million parameters and ResNet-50; see `benchmarks/launches.py`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.fake_gpu.guard import unavailable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

ROOT = Path(__file__).parents[2]

# The most operators and waits of a step.
BOUNDS = {
    "gpt2": {
        "muon": {"plain": (313, 1)},
        "adamw": {"plain": (263, 1)},
        "soap": {"plain": (568, 1), "solve": (600, 10)},
        "soap-muon": {"plain": (637, 1), "solve": (600, 10)},
        "kfac": {"plain": (201, 1), "statistics": (1289, 2), "solve": (600, 10)},
    },
    "resnet50": {"kfac": {"plain": (201, 1), "statistics": (1109, 2), "solve": (1000, 30)}},
}


@pytest.mark.parametrize("network", BOUNDS)
def test_operators_and_waits(network: str, tmp_path: Path) -> None:
    bounds, path = BOUNDS[network], tmp_path / "counts.json"
    # In a process of its own: the fake GPU has to be there before torch is.
    command = [sys.executable, "-m", "benchmarks.launches", network, *bounds, "--json", str(path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    missed = [
        f"{one['method']}, {kind}: {one['steps'][kind]['operators']} operators (at most "
        f"{operators}), {one['steps'][kind]['waits']} waits (at most {waits})"
        for one in json.loads(path.read_text())
        for kind, (operators, waits) in bounds[one["method"]].items()
        if one["steps"][kind]["operators"] > operators or one["steps"][kind]["waits"] > waits
    ]
    assert not missed, f"{network}: {'; '.join(missed)}\n{ended.stdout}"
