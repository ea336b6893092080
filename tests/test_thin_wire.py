"""The thin wire is what it says, and nothing of it is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import thin_wire

SCRIPT = Path(thin_wire.__file__)
SMALL = ["--ranks", "2", "--width", "48", "--layers", "1", "--solve-every", "4"]
TWO = ["--strategies", thin_wire.DDP_ALONE, "comm-opt"]


def start(*options: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *options],
        env={**os.environ, "PYTHONPATH": str(SCRIPT.parents[1]), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def namespaces(maker: int) -> list[str]:
    told = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in told.stdout.splitlines() if line.startswith(f"wire{maker}-")]


def test_where_it_may_not_it_says_so():
    process = start(PATH="/nowhere")
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, "")
    assert errors.startswith("thin_wire: skipped, ")


REASON = thin_wire.why_not()
allowed = pytest.mark.skipif(REASON is not None, reason=f"thin wire: {REASON}")


@allowed
@pytest.mark.slow
@pytest.mark.distributed
def test_what_leaves_the_link_is_what_the_strategies_send():
    process = start(*SMALL, *TWO, "--gbit", "1", "--json")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert namespaces(process.pid) == []
    (found,) = json.loads(output).values()
    alone, comm = found[thin_wire.DDP_ALONE], found["comm-opt"]
    assert alone["curvature_mb"] == 0
    assert comm["curvature_mb"] > 0
    # Two ranks exchange: each sends what it has; headers and acknowledgements come on top.
    assert alone["sent_mb"] > 48 * 49 * 4 / 1e6
    more = comm["sent_mb"] - alone["sent_mb"]
    assert comm["curvature_mb"] / 2 < more < 2 * comm["curvature_mb"]


@allowed
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_ended_leaves_no_namespace(how):
    process = start(*SMALL, "--cycles", "10000")
    while len(namespaces(process.pid)) < 3 and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(how)
    process.wait(timeout=60)
    if how == signal.SIGKILL:
        assert namespaces(process.pid)
        thin_wire.remove_leftovers()  # as the next run does
    process.communicate(timeout=60)
    assert namespaces(process.pid) == []
