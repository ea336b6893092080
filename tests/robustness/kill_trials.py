"""Strike ranks at random points, under torchrun with restarts, and compare the end.

    python -m tests.robustness.kill_trials --trials 40 --json trials.json

Each trial trains on two ranks, with a checkpoint every 5 steps. One rank gets SIGKILL or SIGSTOP,
from outside at a random time or in the middle of a save. torchrun starts the ranks again, and they
go on from the last checkpoint that is whole. The weights at the end must be those of a run that
nobody disturbed, bit by bit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from tests.distributed.harness import run_ranks
from tests.robustness.elastic import Death, Plan, train

ROOT = Path(__file__).resolve().parents[2]
RANKS, RESTARTS = 2, 5
LIMIT = 600.0
STRATEGIES = ("comm-opt", "mem-opt", "hybrid-opt", "sharded")
STEPS, EVERY, PACE = 23, 5, 0.03
WITHIN = 0.1
"""Seconds in which a rank is struck from outside: some steps, perhaps a save."""


@dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
        number: Which.
        strategy: The strategy.
        sharded: Whether checkpoints are.
        death: Who is struck, and when; for "anywhere" ``share`` is the time after the step has
            begun, as a share of `WITHIN`.
    """

    number: int
    strategy: str
    sharded: bool
    death: Death

    @property
    def plan(self) -> Plan:
        return Plan(self.strategy, STEPS, EVERY, self.sharded, PACE)


@dataclass(frozen=True)
class Outcome:
    """What came of a trial.

    Attributes:
        trial: The trial.
        hit: Whether the rank was struck before it was done.
        resumed_at: The step at which the last start began; None if it did not end.
        equal: Whether the weights of all ranks are those of the undisturbed run, bit by bit.
        seconds: How long it took.
        output: What torchrun said, if the weights are not equal.
    """

    trial: Trial
    hit: bool
    resumed_at: int | None
    equal: bool
    seconds: float
    output: str = ""


def torchrun(
    ranks: int, restarts: int, folder: Path, plan: Plan, death: Death | None
) -> subprocess.CompletedProcess[str]:
    """Run the script to its end.

    Returns:
        The agent's status, and what all said.

    Raises:
        TimeoutError: If there is no end.
    """
    agent = _start(ranks, restarts, folder, plan, death)
    return subprocess.CompletedProcess(agent.args, *_finish(agent))


def _start(
    ranks: int, restarts: int, folder: Path, plan: Plan, death: Death | None
) -> subprocess.Popen[str]:
    told = json.dumps({"plan": asdict(plan), "death": None if death is None else asdict(death)})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts)]
    command += ["--monitor-interval", "0.1", "--shutdown-timeout", "3"]
    command += ["--local-addr", "127.0.0.1"]
    command += ["-m", "tests.robustness.elastic", str(folder), told]
    # NOTE: the agent's own store keeps the Gloo addresses of the workers that died, and those that
    # come after may connect to them; without it, rank 0 makes a new store each time.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    environment["OMP_NUM_THREADS"] = "1"
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def _finish(agent: subprocess.Popen[str]) -> tuple[int, str]:
    try:
        output, _ = agent.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        agent.terminate()  # the agent ends its workers
        output, _ = agent.communicate(timeout=30)
        raise TimeoutError(f"not finished in {LIMIT:g} s\n{output}") from None
    return agent.returncode, output


def _strike(agent: subprocess.Popen[str], folder: Path, death: Death) -> None:
    """Send the signal from outside, once the rank has said who it is and some time has passed."""
    while not (folder / "pid").exists():
        if agent.poll() is not None:
            return
        time.sleep(0.01)
    time.sleep(death.share * WITHIN)
    # By the file system, for the script looks there when it is started again.
    try:
        os.kill(int((folder / "pid").read_text()), death.number)
        (folder / "died").touch()
    except ProcessLookupError:
        return  # it was done: too late


def run_trial(trial: Trial, folder: Path, undisturbed: list[tuple[int, Tensor]] | None) -> Outcome:
    """Run one trial.

    Args:
        trial: The trial.
        folder: An empty folder.
        undisturbed: What `train` returned on each rank of a run that nobody disturbed; None to run
            it here.

    Returns:
        What came of it.
    """
    began = time.monotonic()
    if undisturbed is None:
        (folder / "whole").mkdir()
        undisturbed = run_ranks(train, RANKS, folder / "whole", trial.plan, timeout=LIMIT)
    (own := folder / "struck").mkdir()
    agent = _start(RANKS, RESTARTS, own, trial.plan, trial.death)
    try:
        if trial.death.where == "anywhere":
            _strike(agent, own, trial.death)
        status, output = _finish(agent)
    except TimeoutError as error:
        status, output = -1, str(error)
    resumed_at, equal = None, False
    if status == 0:
        ends = [torch.load(own / f"end-{RANKS}-{rank}.pt") for rank in range(RANKS)]
        resumed_at = ends[0][0]
        equal = all(
            torch.equal(weights, expected)
            for (_, weights), (_, expected) in zip(ends, undisturbed, strict=True)
        )
    seconds = time.monotonic() - began
    hit = (own / "died").exists()
    return Outcome(trial, hit, resumed_at, equal, seconds, "" if equal else output)


def trials(count: int, seed: int) -> list[Trial]:
    """Return trials that are drawn at random, half of them in a save."""
    draw = random.Random(seed)
    found = []
    for number in range(count):
        where = "save" if number % 2 else "anywhere"
        strike = signal.SIGKILL if number % 4 < 2 else signal.SIGSTOP
        step = draw.choice((10, 15, 20)) if where == "save" else draw.randrange(STEPS)
        death = Death(step, draw.randrange(RANKS), where, int(strike), draw.random())
        found.append(Trial(number, draw.choice(STRATEGIES), draw.random() < 0.5, death))
    return found


def _say(done: int, count: int, outcome: Outcome) -> None:
    if sys.stderr.isatty():
        death = outcome.trial.death
        what = f"{signal.Signals(death.number).name} {death.where}"
        print(f"\r{done}/{count} {what:<20}", end="", file=sys.stderr, flush=True)


def main() -> int:
    """Run the trials and say what came of them.

    Returns:
        0 if every trial ended with the undisturbed run's weights.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=1, help="trials that run side by side")
    parser.add_argument("--json", type=Path, help="where the outcomes go")
    given = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="kill-trials-") as root:
        drawn = trials(given.trials, given.seed)
        whole: dict[tuple[str, bool], list[tuple[int, Tensor]]] = {}
        for one in drawn:
            (folder := Path(root) / f"{one.number}").mkdir()
            kind = (one.strategy, one.sharded)
            if kind not in whole:
                (own := folder / "whole").mkdir()
                whole[kind] = run_ranks(train, RANKS, own, one.plan, timeout=LIMIT)

        def run(one: Trial) -> Outcome:
            folder = Path(root) / f"{one.number}"
            return run_trial(one, folder, whole[one.strategy, one.sharded])

        outcomes = []
        with ThreadPoolExecutor(given.at_once) as pool:
            for outcome in pool.map(run, drawn):
                outcomes.append(outcome)
                _say(len(outcomes), len(drawn), outcome)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    counts: Counter[tuple[str, str, str]] = Counter()
    for outcome in outcomes:
        death = outcome.trial.death
        how = "equal" if outcome.equal else "NOT EQUAL"
        how = how if outcome.hit else f"too late, {how}"
        counts[signal.Signals(death.number).name, death.where, how] += 1
    print(f"torch {torch.__version__}, Python {platform.python_version()}, seed {given.seed}")
    for (name, where, how), count in sorted(counts.items()):
        print(f"{name:8} {where:9} {how:20} {count:3}")
    resumed = Counter(outcome.resumed_at for outcome in outcomes)
    print("last start at step:", dict(sorted(resumed.items(), key=str)))
    for outcome in outcomes:
        if not outcome.equal:
            print(f"--- trial {outcome.trial}\n{outcome.output}")
    if given.json:
        given.json.write_text(json.dumps([asdict(outcome) for outcome in outcomes], indent=1))
    return 0 if all(outcome.equal for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
