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


@pytest.mark.slow
@pytest.mark.thorough
def test_a_worker_leaves_no_thread_of_its_group(tmp_path):
    """One would abort the process now and then, should it need Python while that ends."""
    if not Path("/proc/self/task").exists():
        pytest.skip("it counts threads by Linux's /proc")
    sent, answer = tmp_path / "sent", tmp_path / "answer.json"
    sent.write_text("0")
    script = f"""
import os, sys
from pathlib import Path
from benchmarks import thin_wire

thin_wire.SENT = Path({str(sent)!r})
sys.argv += {[*SMALL[2:], "--strategies", *TWO[1:]]!r} + ["--worker", {str(answer)!r}]
thin_wire.main()
print([Path("/proc/self/task", task, "comm").read_text() for task in os.listdir("/proc/self/task")])
"""
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={
            **os.environ,
            **rendezvous,
            "PYTHONPATH": str(SCRIPT.parents[1]),
            "OMP_NUM_THREADS": "1",
            "RANK": "0",
            "WORLD_SIZE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert set(json.loads(answer.read_text())) == set(TWO[1:])
    assert "gloo" not in done.stdout, done.stdout


REASON = thin_wire.why_not()
allowed = pytest.mark.skipif(REASON is not None, reason=f"thin wire: {REASON}")


@allowed
@pytest.mark.slow
@pytest.mark.thorough
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


def test_a_mean_over_cycles_is_that_of_all_steps():
    """What is under way after a step, 5, arrives in the next; a solve, 100, waits for its own."""
    steady, under_way, solve = 20.0, 5.0, 100.0
    first, last = steady - under_way, steady + under_way + solve
    cycle = [first, *[steady] * 8, last]
    expected = sum(cycle) / 10
    assert thin_wire.over_cycles([(x,) for x in cycle + cycle], 10, 0) == pytest.approx([expected])
    for between in (2, 4):
        run = [first, *[steady] * (between - 1), last]
        rows = [(x, 2 * x) for x in run + run]
        found = thin_wire.over_cycles(rows, between + 1, 9 - between)
        assert found == pytest.approx([expected, 2 * expected])


@allowed
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.thorough
def test_what_is_complete_is_shown_when_a_run_is_ended():
    process = start(*SMALL, *TWO, "--gbit", "10", "1", "0.1", "--json")
    assert process.stderr is not None
    told = []
    for line in process.stderr:
        if "Gbit/s, " in line:
            told.append(line.split(":")[0])
        if told and told[-1].startswith("1 "):
            break
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143
    assert told == [f"10 Gbit/s, {name}" for name in TWO[1:]] + [f"1 Gbit/s, {TWO[1]}"]
    found = json.loads(output)
    assert set(found["10"]) == set(TWO[1:])
    assert "0.1" not in found
    assert namespaces(process.pid) == []


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
