"""Operators and waits of a training step at full size on a GPU, as a fake one counts them.

GPT-2 of 124 million parameters, or three of its layers, and ResNet-50; see
`benchmarks/launches.py`.
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
        "muon": {"plain": (80, 0)},
        "adamw": {"plain": (10, 0)},
        "soap": {"statistics": (92, 1), "solve": (360, 2)},
        # A stack has two operators more than under "muon", which shorten its updates.
        "soap-muon": {"statistics": (99, 1), "solve": (178, 2)},
        "soap-normuon": {"statistics": (135, 1), "solve": (214, 2)},
        "kfac": {"plain": (46, 0), "statistics": (233, 1), "solve": (371, 2)},
    },
    # A layer has 16 operators in a step with statistics: one more in each exceeds these.
    "gpt2 --layers 3": {
        "adamw": {"plain": (10, 0)},
        "kfac": {"plain": (46, 0), "statistics": (89, 1), "solve": (209, 2)},
        "muon": {"plain": (80, 0)},
    },
    "resnet50": {"kfac": {"plain": (98, 0), "statistics": (450, 1), "solve": (699, 2)}},
}


@pytest.mark.parametrize(
    ("network", "methods"),
    [
        ("gpt2 --layers 3", ("adamw", "kfac")),
        pytest.param(
            "gpt2",
            ("muon", "adamw", "soap", "soap-muon", "soap-normuon", "kfac"),
            marks=pytest.mark.thorough,
        ),
        pytest.param("resnet50", ("kfac",), marks=pytest.mark.thorough),
    ],
)
def test_operators_and_waits(network: str, methods: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "counts.json"
    bounds = {method: BOUNDS[network][method] for method in methods}
    # In a process of its own: the fake GPU has to be there before torch is.
    name, *options = network.split()
    command = [sys.executable, "-m", "benchmarks.launches", name, *bounds, *options]
    command += ["--json", str(path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    missed = {}
    for one in json.loads(path.read_text()):
        for kind, most in bounds[one["method"]].items():
            found = one["steps"][kind]["operators"], one["steps"][kind]["waits"]
            if found[0] > most[0] or found[1] > most[1]:
                missed[f"{network} {one['method']} {kind}"] = f"{found}, at most {most}"
    assert not missed, ended.stdout
