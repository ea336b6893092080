"""Runs pytest as often as it is asked to, each time in a process that has its libraries already.

    python tests/mutation/runner.py LIBRARY...

Each line of standard input is a job, and each line of standard output pytest's exit code, or null
if it did not end in time. Importing torch takes longer than most tests of a mutant; the project
itself is imported anew in each process, as it is broken in another way each time.
"""

import contextlib
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def serve(libraries: Sequence[str]) -> None:
    """Import the libraries, and answer every job until standard input ends."""
    # The folder of this file, in which the project's modules would not be found by their names.
    sys.path = [path for path in sys.path if Path(path) != Path(__file__).parent]
    for name in libraries:
        with contextlib.suppress(ImportError):  # what is not installed, tests skip
            importlib.import_module(name)
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        job = json.loads(line)
        process = os.fork()
        if process == 0:
            run(Path(job["root"]), job["tests"])
        answers.write(f"{json.dumps(wait(process, job['timeout']))}\n")
        answers.flush()


def wait(process: int, timeout: float) -> int | None:
    """Wait for a process and return its exit code; None if it was killed, it took so long."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(process, signal.SIGKILL)  # the ranks that it has started, too
    os.waitpid(process, 0)
    return None


def run(root: Path, tests: list[str]) -> None:
    """Be pytest on `tests` in the project at `root`, in silence, and end."""
    os.setsid()
    silence = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(silence, stream)
    os.chdir(root)
    os.environ |= {"PYTHONPATH": str(root), "HYPOTHESIS_PROFILE": "verdict"}
    # Of two ways in which a file was broken within a second, the compiled one may be the other.
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(root))
    import pytest

    code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *tests])
    os._exit(int(code))


if __name__ == "__main__":
    serve(sys.argv[1:])
