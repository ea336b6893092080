"""Scripts end as they say, close() or not, while what they have sent is still under way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.robustness.ending import TRAVELLING

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 90.0
ATTEMPTS = 3


def end(folder: Path, strategy: str, how: str, ranks: int) -> list[tuple[int, str, str]]:
    """The exit status, output and errors of each rank.

    Rarely (once in hundreds of scripts) a thread of Gloo's lets go of a tensor while the
    interpreter ends, and aborts it: https://github.com/pytorch/pytorch/issues/190489. So that is
    tried again, and an error if it happens every time.
    """
    for attempt in range(ATTEMPTS):
        (folder / str(attempt)).mkdir()
        found = end_once(folder / str(attempt), strategy, how, ranks)
        if not any(aborted_by_gloo(code, errors) for code, _, errors in found):
            break
    return found


def aborted_by_gloo(code: int, errors: str) -> bool:
    """Whether a rank ended as torch's issue says."""
    message = "terminate called without an active exception"
    return code == -signal.SIGABRT and message in errors


def end_once(folder: Path, strategy: str, how: str, ranks: int) -> list[tuple[int, str, str]]:
    """Do the same in one attempt."""
    words = [sys.executable, "-m", "tests.robustness.ending", str(folder / "store"), strategy, how]
    common = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": str(ranks)}
    common |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            words,
            cwd=ROOT,
            env={**common, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    found = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=TIMEOUT)
            found.append((process.returncode, output, errors))
    except subprocess.TimeoutExpired:
        pytest.fail(f"a rank did not end within {TIMEOUT:g} s", pytrace=False)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


@pytest.mark.parametrize(
    ("strategy", "how", "ranks", "status"),
    [
        ("comm-opt", "ends", 3, 0),
        ("sharded", "destroys the group", 2, 0),
        ("comm-opt", "raises", 2, 1),
    ],
)
def test_ranks_end_with_the_scripts_own_status(tmp_path, strategy, how, ranks, status):
    for code, output, errors in end(tmp_path, strategy, how, ranks):
        assert TRAVELLING in output
        assert code == status, errors
        assert ("ValueError: the script's own" in errors) == (how == "raises")
        assert errors.count("Traceback") == (how == "raises"), errors


def test_a_rank_whose_peer_has_gone_ends_with_an_error(tmp_path):
    (left, _, told), (gone, _, own) = end(tmp_path, "comm-opt", "one raises", 2)
    assert gone == 1
    assert "ValueError: the script's own" in own
    assert left == 1
    assert "RuntimeError" in told
