"""Runs that are kept: an interrupted benchmark goes on where it was.

Each run is written to a file of its own once it is done. Its name is a digest of everything that
decides the run: its configuration, the number of processes, the version of torch, and a word for
what else it depends on. After a change of the code, name another folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from soframe.experiments.compare import jsonable
from soframe.experiments.config import RunConfig
from soframe.experiments.launch import Worker
from soframe.experiments.records import Row, RunRecord
from soframe.experiments.train import Run, numerics, run, train

ALONE = Worker(rank=0, world_size=1, send=lambda message: None)


@dataclass(frozen=True)
class Kept:
    """What is kept of a run.

    Attributes:
        rows: Its evaluations; a loss that was not finite is infinite.
        milliseconds_per_step: The median.
        sent_bytes_per_step: By purpose, of the rank that sends most.
        curvature_bytes: Of each rank.
    """

    rows: tuple[Row, ...]
    milliseconds_per_step: float
    sent_bytes_per_step: dict[str, float]
    curvature_bytes: tuple[int, ...]

    @property
    def last(self) -> Row:
        """The last evaluation."""
        return self.rows[-1]


def digest(config: RunConfig, processes: int, word: str = "") -> str:
    """Name a run.

    Args:
        config: The run.
        processes: How many ranks share each batch.
        word: What else it depends on.

    Returns:
        Sixteen hexadecimal digits.
    """
    decided = [jsonable(config.as_dict()), processes, torch.__version__, word]
    return hashlib.sha256(json.dumps(decided, sort_keys=True).encode()).hexdigest()[:16]


def kept(
    configs: Sequence[RunConfig],
    folder: Path,
    *,
    processes: int = 1,
    at_once: int = 1,
    word: str = "",
    tell: Callable[[RunConfig, Kept], None] = lambda config, found: None,
) -> list[Kept]:
    """Train what has not been trained yet.

    Args:
        configs: The runs.
        folder: Where they are kept.
        processes: How many ranks share each batch.
        at_once: How many runs at a time, where each has one process.
        word: See `digest`.
        tell: Called with every run that was trained.

    Returns:
        What is kept of each, in their order.

    Raises:
        ValueError: If several runs at a time are asked for, of several processes.
    """
    if processes > 1 and at_once > 1:
        raise ValueError(f"runs of {processes} processes are trained one at a time, not {at_once}")
    paths = [folder / f"{digest(config, processes, word)}.json" for config in configs]
    missing = {
        path: config
        for path, config in zip(paths, configs, strict=True)
        if not path.exists()  # one that stands here twice is trained once
    }
    folder.mkdir(parents=True, exist_ok=True)

    def keep(path: Path, found: Kept) -> None:
        content = {"config": missing[path].as_dict(), "processes": processes, "kept": asdict(found)}
        part = path.with_suffix(".part")
        part.write_text(json.dumps(jsonable(content), indent=1) + "\n", encoding="utf-8")
        part.replace(path)  # an interrupt leaves no half of a file
        tell(missing[path], found)

    if processes > 1:
        for path, config in missing.items():
            keep(path, _of(run(config, processes=processes, timeout=24 * 3600.0)))
    elif at_once == 1:
        for path, config in missing.items():
            keep(path, _trained(config))
    elif missing:
        with ProcessPoolExecutor(at_once, mp_context=get_context("spawn")) as pool:
            under_way: dict[Future[Kept], Path] = {
                pool.submit(_trained, config): path for path, config in missing.items()
            }
            for done in as_completed(under_way):
                keep(under_way[done], done.result())
    return [_read(path) for path in paths]


def _trained(config: RunConfig) -> Kept:
    return _of(train(ALONE, config))


def _of(record: RunRecord) -> Kept:
    return Kept(
        rows=record.rows,
        milliseconds_per_step=record.milliseconds_per_step,
        sent_bytes_per_step=dict(record.sent_bytes_per_step),
        curvature_bytes=record.curvature_bytes,
    )


def _read(path: Path) -> Kept:
    fields = json.loads(path.read_text(encoding="utf-8"))["kept"]
    rows = [
        Row(**{**row, "loss": float("inf") if row["loss"] is None else row["loss"]})
        for row in fields["rows"]
    ]
    return Kept(
        rows=tuple(rows),
        milliseconds_per_step=fields["milliseconds_per_step"],
        sent_bytes_per_step=fields["sent_bytes_per_step"],
        curvature_bytes=tuple(fields["curvature_bytes"]),
    )


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
    for short, long in zip(lengths, lengths[1:], strict=False):  # noqa: RUF007
        if losses[long] <= target < losses[short]:
            part = (losses[short] - target) / (losses[short] - losses[long])
            return short + part * (long - short)
    return None


def turns(
    worker: Worker, configs: Sequence[RunConfig], cycles: int, period: int, turn: int
) -> list[list[float]]:
    """Time steps of several runs, which take turns.

    Args:
        worker: The place of this process.
        configs: The runs, with one number of threads.
        cycles: How many periods each is timed for.
        period: Steps after which everything that is not done at every step has been done.
        turn: Steps after which the next run goes on.

    Returns:
        For each run the mean seconds of a step, period by period.

    Raises:
        ValueError: If turns do not make up a period.
    """
    if period % turn:
        raise ValueError(f"turns of {turn} steps do not make up a period of {period}")
    with numerics(configs[0].threads):
        every = [Run(worker, config) for config in configs]
        times: list[list[float]] = [[] for _ in configs]
        for one in every:
            one.take(turn)  # warms up, and solves for the first time
        for _ in range(cycles):
            seconds = [0.0 for _ in every]
            for _ in range(period // turn):
                for index, one in enumerate(every):
                    seconds[index] += one.take(turn)
            for index, total in enumerate(seconds):
                times[index].append(total / period)
        for one in every:
            one.close()
        return times
