"""Training scripts that end while something still travels, or just after, without closing anything.

    python -m tests.robustness.ending RUNS

counts how many of so many runs on four ranks are aborted when their interpreters end, in turn with
soframe and without. Gloo's threads can do that to any script (`soframe.comm.ending` says how).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from tests.distributed.training import Case, Run, backward, make_net, mean_over

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 300.0
STEPS = 3
TRAVELLING = "statistics are under way"
PLAIN = "without soframe"


@dataclass(frozen=True)
class End:
    """How a rank ended.

    Attributes:
        status: Its exit status, or minus the signal.
        output: What it printed.
        errors: What it printed as errors.
    """

    status: int
    output: str
    errors: str

    @property
    def aborted(self) -> bool:
        """Whether a thread aborted the interpreter that was ending."""
        message = "terminate called without an active exception"
        return self.status == -signal.SIGABRT and message in self.errors


def run_script(folder: Path, strategy: str, how: str, ranks: int) -> list[End]:
    """Run the script in fresh processes, and return how each rank ended."""
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
            found.append(End(process.returncode, output, errors))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return found


def count(runs: int) -> dict[str, int]:
    """Return how many scripts had a rank that was aborted, of so many of each kind."""
    aborted = {PLAIN: 0, "comm-opt": 0, "mem-opt": 0}
    for _ in range(runs):
        for strategy in aborted:
            with tempfile.TemporaryDirectory() as folder:
                ends = run_script(Path(folder), strategy, "ends", 4)
            aborted[strategy] += any(end.aborted for end in ends)
    return aborted


def script(store: str, strategy: str, how: str) -> None:
    """What each rank runs."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    stored = dist.FileStore(store, ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=stored, rank=rank, world_size=ranks)
    case = Case({"strategy": strategy, "statistics_every": 1, "solve_every": 10})
    if strategy == PLAIN:
        model = make_net()
        for step in range(STEPS):
            backward(model, case, step, rank, ranks, mean_over())
        return
    run = Run(case, rank, ranks, average=mean_over()).train(range(STEPS))
    if any(stack.pending for stack in run.preconditioner.curvature.placed.stacks):
        print(TRAVELLING, flush=True)
    if how == "raises" or (how == "one raises" and rank == 1):
        raise ValueError("the script's own")
    if how == "one raises":
        run.step(STEPS)  # with one that has gone
    if how == "destroys the group":
        dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) == 2:
        for kind, times in count(int(sys.argv[1])).items():
            print(f"{kind}: {times} of {sys.argv[1]} scripts aborted")
    else:
        script(*sys.argv[1:])
