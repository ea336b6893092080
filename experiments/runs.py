"""Ways of training several runs, and kept runs: an interrupted benchmark resumes.

Each run is written to a file of its own once it is done. The file's name is a digest of everything
that decides the run: its settings, the number of processes, the version of torch, and a word for
all other dependencies, in a comparison `experiments.environment.sources`. Elsewhere, name another
folder after a change of the code.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

import torch

from experiments.config import RunConfig
from experiments.launch import Worker
from experiments.records import RunRecord, jsonable, read_json, write_json
from experiments.train import ALONE, WorkloadRun, numerics, run, train

Train = Callable[[Sequence[RunConfig]], Iterable[RunRecord]]
"""Trains runs, and yields their records in the same order."""


def trainer(processes: int = 1, at_once: int = 1) -> Train:
    """Return a function that trains runs of `processes` processes, `at_once` at a time.

    Raises:
        ValueError: If both numbers are above 1.
    """
    if processes > 1 and at_once > 1:
        raise ValueError(f"runs of {processes} processes are trained one at a time, not {at_once}")
    if processes > 1:
        return partial(map, partial(run, processes=processes))
    if at_once > 1:
        return partial(_in_pool, at_once)
    return partial(map, partial(train, ALONE))


def _in_pool(at_once: int, configs: Sequence[RunConfig]) -> Iterator[RunRecord]:
    with ProcessPoolExecutor(at_once, mp_context=get_context("spawn")) as pool:
        yield from pool.map(partial(train, ALONE), configs)


def race(
    configs: Sequence[RunConfig],
    *,
    turn: float = 2.0,
    on_turn: Callable[[Sequence[RunRecord]], None] = lambda records: None,
) -> list[RunRecord]:
    """Train in this process, one run at a time, in turns of so many seconds.

    Other work on the machine then slows all runs alike.

    Raises:
        ValueError: If the turn is not positive, or the numbers of threads differ.
    """
    if turn <= 0:
        raise ValueError(f"a turn must take a positive time, not {turn:g} s")
    threads = {config.threads for config in configs}
    if len(threads) != 1:
        raise ValueError(f"runs that are compared have one number of threads, not {threads}")
    with numerics(threads.pop()):
        every = [WorkloadRun(ALONE, config) for config in configs]
        while not all(run.finished() for run in every):
            for run in every:
                run.advance(run.rows[-1].seconds + turn)
            on_turn([run.record() for run in every])
        for run in every:
            run.close()
        return [run.record() for run in every]


def turns(
    worker: Worker, configs: Sequence[RunConfig], cycles: int, period: int, turn: int
) -> list[list[float]]:
    """Time steps of several runs, which take turns of so many steps.

    Args:
        worker: The place of this process.
        configs: The runs, with one number of threads.
        cycles: Periods that are timed.
        period: Steps after which all periodic work has been done.
        turn: Steps after which the next run goes on.

    Returns:
        For each run the mean seconds of a step, period by period.

    Raises:
        ValueError: If turns do not make up a period.
    """
    if period % turn:
        raise ValueError(f"turns of {turn} steps do not make up a period of {period}")
    with numerics(configs[0].threads):
        every = [WorkloadRun(worker, config) for config in configs]
        times = take_turns([run.take for run in every], cycles, period, turn)
        for run in every:
            run.close()
        return times


def take_turns(
    takes: Sequence[Callable[[int], float]], cycles: int, period: int, turn: int
) -> list[list[float]]:
    """Return the mean seconds of a step as `turns`, of functions that take so many steps."""
    for take in takes:
        take(turn)  # warms up, and solves for the first time
    times: list[list[float]] = [[] for _ in takes]
    for _ in range(cycles):
        seconds = [0.0 for _ in takes]
        for _ in range(period // turn):
            for index, take in enumerate(takes):
                seconds[index] += take(turn)
        for index, total in enumerate(seconds):
            times[index].append(total / period)
    return times


def digest(config: RunConfig, processes: int, word: str = "") -> str:
    """Return the name of a run's file: sixteen hexadecimal digits."""
    decided = [jsonable(config.as_dict()), processes, torch.__version__, word]
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]


def kept(
    configs: Sequence[RunConfig],
    folder: Path,
    *,
    train: Train | None = None,
    processes: int = 1,
    at_once: int = 1,
    word: str = "",
    tell: Callable[[RunRecord], None] = lambda record: None,
    on_kept: Callable[[int], None] = lambda number: None,
) -> list[RunRecord]:
    """Train the runs that are not in a folder yet, and return the records of all, in order.

    Args:
        configs: The runs.
        folder: The folder of their records.
        train: Trains runs; by default `trainer(processes, at_once)`.
        processes: Ranks that share each batch.
        at_once: Runs at a time.
        word: See `digest`.
        tell: Called with every new run.
        on_kept: Called with the number of runs that are in the folder already, if there are any.
    """
    train = train or trainer(processes, at_once)
    paths: list[Path] = []
    missing: dict[Path, RunConfig] = {}  # one that stands here twice is trained once
    number = 0
    for config in configs:
        path = folder / f"{digest(config, processes, word)}.json"
        paths.append(path)
        if path.exists():
            number += 1
        else:
            missing[path] = config
    if number > 0:
        on_kept(number)
    if missing:
        for path, record in zip(missing, train(list(missing.values())), strict=True):
            write_json(path, record.as_dict())
            tell(record)
    return [RunRecord.from_dict(read_json(path)) for path in paths]


def tell(record: RunRecord) -> None:
    """Print a trained run on the error output."""
    config, last = record.config, record.last
    start = f"{config.workload}, {config.label} {dict(config.method)}, lr {config.lr:g}"
    end = f"{last.step} steps, seed {config.seed}: "
    if last.accuracy is not None:
        end += f"accuracy {last.accuracy:.4f}, "
    print(f"{start}, {end}loss {last.loss:.4f}", file=sys.stderr, flush=True)


def ratios(times: Sequence[float], base: Sequence[float]) -> tuple[float, list[float]]:
    """Return the median ratio over the periods of `turns`, and the least and the largest."""
    shares = [seconds / plain for seconds, plain in zip(times, base, strict=True)]
    return statistics.median(shares), [min(shares), max(shares)]


def steps_to(target: float, losses: Mapping[int, float]) -> float | None:
    """Return the length of a run that ends with a loss, between those that were tried.

    Args:
        target: The loss.
        losses: Length -> last loss.

    Returns:
        The length; the shortest that was tried if it is below; None if none is.
    """
    lengths = sorted(losses)
    if losses[lengths[0]] <= target:
        return float(lengths[0])
    for short, long in pairwise(lengths):
        if losses[long] <= target < losses[short]:
            part = (losses[short] - target) / (losses[short] - losses[long])
            return short + part * (long - short)
    return None
