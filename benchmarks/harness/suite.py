"""Runs the suite of small problems: peers are tuned, the trust region is not.

Time is processor time of the steps, so that a busy machine slows nobody; data are drawn and losses
evaluated outside of it. Every peer has a grid of its learning rate under a cosine that ends with
the run, which goes on while its end is the best, then the best rate constant, and with a cosine of
half the time. AdamW's trial with the
lowest loss is its setting, and that loss the target of the other peers' trials: theirs is the trial
that is there first, or gets nearest. What was run is kept in JSON, so that an interrupted run goes
on.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import soframe
from harness.suite_problems import PROBLEMS, Task
from soframe.experiments.muon import MuonWithAdamW
from soframe.experiments.requirements import require

TRUST_REGION = "trust-region"
STOCHASTIC = "stochastic"
"""The trust region for mini-batches; it takes no part where every step has all data."""
OWN = (TRUST_REGION, STOCHASTIC)
"""Who has no learning rate."""
TUNED = Path(__file__).parent / "suite"
TUNING_SEED = 100
EVALUATIONS = 40
"""Of a mini-batch problem's loss, in a run's time."""

Setting = dict[str, Any]

RATES: Mapping[str, tuple[float, ...]] = {
    "adamw": (1e-3, 3e-3, 1e-2, 3e-2),
    "soap": (1e-3, 3e-3, 1e-2, 3e-2),
    "muon": (3e-3, 1e-2, 3e-2, 1e-1),
}
FURTHER = 3
"""How many more are tried of a grid whose end is the best."""
PEERS = tuple(RATES)
UNTUNED: Mapping[str, Setting] = {
    "prodigy": {},
    "prodigy-cosine": {"schedule": "cosine"},
    "dadapt-adam": {},
    "schedule-free": {},
    "adamw-default": {},
}
"""Peers with the defaults of their library: three find their rate themselves, one needs no
schedule, and the last is what nobody has tuned. Those without a schedule have the trust regions'
time, the other one has that of the tuned peers."""


@dataclass
class Curve:
    """What a run got to.

    Attributes:
        points: ``(seconds, step, loss)``, the first before any step.
        steps: How many it took.
        seconds: How long they took.
        error: Why there are no more, where the optimizer refused or failed.
        counters: What an optimizer counts of itself.
    """

    points: list[tuple[float, int, float]]
    steps: int = 0
    seconds: float = 0.0
    error: str | None = None
    counters: Mapping[str, int] | None = None

    @property
    def lowest(self) -> float:
        """The lowest loss that it got to."""
        finite = [loss for _, _, loss in self.points if math.isfinite(loss)]
        return min(finite, default=math.inf)

    def lowest_within(self, seconds: float) -> float:
        """The lowest loss that it got to within some time."""
        early = [loss for at, _, loss in self.points if at <= seconds and math.isfinite(loss)]
        return min(early, default=math.inf)

    def reached(self, target: float) -> tuple[float, int] | None:
        """After how many seconds and steps it was at a loss."""
        for seconds, step, loss in self.points:
            if loss <= target:
                return seconds, step
        return None

    def as_dict(self) -> dict[str, Any]:
        """Return what `of` reads."""
        return {
            "points": [[round(s, 4), n, loss] for s, n, loss in _records(self.points)],
            "steps": self.steps,
            "seconds": self.seconds,
            "error": self.error,
            "counters": self.counters,
        }

    @classmethod
    def of(cls, read: Mapping[str, Any]) -> Curve:
        """Return the curve that `as_dict` wrote."""
        points = [(float(s), int(n), float(loss)) for s, n, loss in read["points"]]
        rest = {key: read[key] for key in ("steps", "seconds", "error", "counters")}
        return cls(points, **rest)


def _records(points: Sequence[tuple[float, int, float]]) -> list[tuple[float, int, float]]:
    """Return where a loss was lower than ever, by a three-hundredth or at the end."""
    kept, best, last = list(points[:1]), math.inf, None
    for point in points[1:]:
        if point[2] < best:
            best, last = point[2], point
            if not abs(kept[-1][2] - best) <= abs(kept[-1][2]) / 300:
                kept.append(point)
                last = None
    return kept if last is None else [*kept, last]


def optimizer_of(name: str, task: Task, setting: Setting) -> torch.optim.Optimizer:
    """Return an optimizer of a task's model.

    Args:
        name: One of `OWN`, of `PEERS` or of `UNTUNED`.
        task: The task.
        setting: ``lr`` of a peer; of `OWN` what differs from its defaults, if anything.
    """
    if name == STOCHASTIC:
        return soframe.StochasticTrustRegion(task.model, **setting)
    if name == TRUST_REGION:
        return soframe.TrustRegion(
            task.model, task.loss, **{"full_batch": task.full_batch, **setting}
        )
    if name == "adamw":
        return torch.optim.AdamW(
            task.model.parameters(), setting["lr"], weight_decay=0.0, fused=True
        )
    if name == "muon":
        return MuonWithAdamW(task.model, setting["lr"], 0.95)
    if name == "adamw-default":
        return torch.optim.AdamW(task.model.parameters(), fused=True)
    (package,) = require("pytorch_optimizer")
    if name in UNTUNED:
        kinds = {"dadapt-adam": package.DAdaptAdam, "schedule-free": package.ScheduleFreeAdamW}
        found = kinds.get(name, package.Prodigy)(task.model.parameters())
        if name == "schedule-free":
            found.train()
        assert isinstance(found, torch.optim.Optimizer)
        return found
    made: torch.optim.Optimizer = package.SOAP(
        task.model.parameters(), lr=setting["lr"], betas=(0.95, 0.95), weight_decay=0.0
    )
    return made


def run(
    problem: str, optimizer: str, seed: int, seconds: float, setting: Setting
) -> Iterator[Curve]:
    """Train for some seconds, and yield after each step.

    Args:
        problem: Which.
        optimizer: Which.
        seed: Of the model, the data's order and random numbers.
        seconds: Of the processor.
        setting: The optimizer's; ``schedule`` is "constant", "cosine" or "half".

    Yields:
        The curve so far, always the same object; it is complete at the end.
    """
    task = PROBLEMS[problem].make(seed)
    torch.manual_seed(seed)
    random = torch.get_rng_state()  # others may run in turns with this one
    curve = Curve([(0.0, 0, float(task.evaluate()))])
    try:
        own = optimizer_of(optimizer, task, {k: v for k, v in setting.items() if k != "schedule"})
        length = {"cosine": seconds, "half": seconds / 2}.get(setting.get("schedule", ""))
        due = every = seconds / EVALUATIONS
        while curve.seconds < seconds:
            closure = next(task.closures)
            torch.set_rng_state(random)
            if length is not None:
                part = min(1.0, curve.seconds / length)
                for group in own.param_groups:
                    first = group.setdefault("initial_lr", group["lr"])
                    group["lr"] = first * (0.5 + 0.5 * math.cos(math.pi * part))
            start = time.process_time()
            if optimizer in OWN:
                loss: torch.Tensor = own.step(closure)  # type: ignore[assignment, arg-type]
            else:
                own.zero_grad()
                loss = closure()
                loss.backward()
                own.step()
            took = time.process_time() - start
            random = torch.get_rng_state()
            if task.full_batch:  # the loss before the step, which was there before its seconds
                curve.points.append((curve.seconds, curve.steps, float(loss.detach())))
            curve.seconds += took
            curve.steps += 1
            if not task.full_batch and curve.seconds >= due:
                due = curve.seconds + every
                curve.points.append((curve.seconds, curve.steps, evaluated(task, own)))
            yield curve
        curve.points.append((curve.seconds, curve.steps, evaluated(task, own)))
        curve.counters = dict(getattr(own, "counters", {}))
    except Exception as error:  # a table says that an optimizer refuses a problem, and why
        curve.error = f"{type(error).__name__}: {error}"
        yield curve


def evaluated(task: Task, optimizer: torch.optim.Optimizer) -> float:
    """Return the loss over all data, of the averaged iterates where an optimizer has them.

    Args:
        task: The task.
        optimizer: Its optimizer.
    """
    torch.manual_seed(0)
    with averaged(optimizer):
        return float(task.evaluate())


@contextmanager
def averaged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Put an optimizer's averaged iterates in place, if it has them, and take them away after.

    Args:
        optimizer: One of ours, of torch, or of pytorch_optimizer: of these the schedule-free ones
            have a mode of evaluation.
    """
    modes: Any = optimizer if hasattr(optimizer, "eval") else None
    own = optimizer if isinstance(optimizer, soframe.StochasticTrustRegion) else None
    with own.averaged() if own else nullcontext():
        if modes:
            modes.eval()
        yield
        if modes:
            modes.train()


def race(
    problem: str, seed: int, runs: Mapping[str, tuple[float, Setting]], turn: float = 0.25
) -> dict[str, Curve]:
    """Let optimizers take turns on a problem.

    Args:
        problem: Which.
        seed: Of all.
        runs: For each optimizer its seconds and its setting.
        turn: Seconds after which the next one goes on.

    Returns:
        The curve of each.
    """
    found: dict[str, Curve] = {}
    todo = {name: run(problem, name, seed, *settings) for name, settings in runs.items()}
    while todo:
        for name, steps in list(todo.items()):
            end = time.process_time() + turn
            while time.process_time() < end:
                curve = next(steps, None)
                if curve is None:
                    del todo[name]
                    break
                found[name] = curve
    return found


def tune(
    problem: str, seconds: float, trials: dict[str, list[Any]], save: Callable[[], None]
) -> None:
    """Try settings of the peers.

    Args:
        problem: Which.
        seconds: Of each trial.
        trials: For each peer what was tried so far, ``[setting, lowest, points]``; it grows.
        save: Called after each trial.
    """

    def attempt(peer: str, setting: Setting) -> None:
        known = trials.setdefault(peer, [])
        if any(setting == tried for tried, *_ in known):
            return
        (curve,) = race(problem, TUNING_SEED, {peer: (seconds, setting)}).values()
        known.append([setting, curve.lowest, curve.as_dict()["points"]])
        save()

    for peer in PEERS:
        for lr in RATES[peer]:
            attempt(peer, {"lr": lr, "schedule": "cosine"})
        for _ in range(FURTHER):
            lrs = sorted({setting["lr"] for setting, *_ in trials[peer]})
            best = best_of(peer, trials)["lr"]
            if best == lrs[-1]:
                attempt(peer, {"lr": float(f"{math.sqrt(10) * best:.0e}"), "schedule": "cosine"})
            elif best == lrs[0]:
                attempt(peer, {"lr": float(f"{best / math.sqrt(10):.0e}"), "schedule": "cosine"})
        best = best_of(peer, trials)["lr"]
        for schedule in ("constant", "half"):
            attempt(peer, {"lr": best, "schedule": schedule})


def best_of(peer: str, trials: Mapping[str, Sequence[Any]]) -> Setting:
    """Return the setting of AdamW that got lowest, or of others that is soonest at its loss.

    Args:
        peer: The peer.
        trials: See `tune`.
    """
    lowest = min(trials["adamw"], key=lambda trial: trial[1])
    target = resolved(lowest[1])

    def key(trial: Any) -> tuple[float, float]:
        _, loss, points = trial
        reached = next((at for at, _, there in points if there <= target), None)
        return (1.0, loss) if reached is None else (0.0, reached)

    setting: Setting = (lowest if peer == "adamw" else min(trials[peer], key=key))[0]
    return setting


class Results:
    """What was run of a problem, in two files of JSON: trials, and reported runs.

    Args:
        problem: Which.
        seconds: Of a run; results of others are not read.
        runs: The folder of reported runs.
        tuned: The folder of trials.
    """

    def __init__(self, problem: str, seconds: float, runs: Path, tuned: Path = TUNED) -> None:
        self.problem, self.seconds = problem, seconds
        self._runs, self._tuned = runs / f"{problem}.json", tuned / f"{problem}.json"
        self.trials: dict[str, list[Any]] = _read(self._tuned, seconds)
        self.curves: dict[str, dict[str, Curve]] = {
            name: {seed: Curve.of(curve) for seed, curve in each.items()}
            for name, each in _read(self._runs, seconds).items()
        }

    def save(self) -> None:
        """Write both files."""
        # Points of trials are not kept for ever: they only choose among settings.
        _write(self._tuned, self.seconds, self.trials)
        curves = {
            name: {seed: curve.as_dict() for seed, curve in each.items()}
            for name, each in self.curves.items()
        }
        _write(self._runs, self.seconds, curves)

    def complete(self, seeds: Sequence[int], optimizers: Sequence[str], longer: float) -> None:
        """Tune and run whatever is missing.

        Args:
            seeds: Of the report.
            optimizers: Who takes part.
            longer: How many times a peer's time those of `OWN` have.
        """
        optimizers = entrants(self.problem, optimizers)
        if any(peer in PEERS for peer in optimizers):
            tune(self.problem, self.seconds, self.trials, self.save)
        for seed in seeds:
            missing = {
                name: self._entry(name, longer)
                for name in optimizers
                if str(seed) not in self.curves.get(name, {})
            }
            for name, curve in race(self.problem, seed, missing).items():
                self.curves.setdefault(name, {})[str(seed)] = curve
                self.save()

    def _entry(self, name: str, longer: float) -> tuple[float, Setting]:
        """Return an optimizer's seconds and its setting."""
        if name in PEERS:
            return self.seconds, best_of(name, self.trials)
        setting = UNTUNED.get(name, {})
        return self.seconds * (1.0 if "schedule" in setting else longer), setting


def entrants(problem: str, optimizers: Sequence[str]) -> list[str]:
    """Return those who take part in a problem.

    Args:
        problem: Which.
        optimizers: Who would.
    """
    full = PROBLEMS[problem].make(0).full_batch
    return [name for name in optimizers if not (full and name == STOCHASTIC)]


def _read(path: Path, seconds: float) -> dict[str, Any]:
    if not path.exists():
        return {}
    read = json.loads(path.read_text(encoding="utf-8"))
    return dict(read["results"]) if read["seconds"] == seconds else {}


def _write(path: Path, seconds: float, results: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"seconds": seconds, "results": results}) + "\n"
    other = path.with_suffix(".part")
    other.write_text(text, encoding="utf-8")
    other.replace(path)  # so that what is interrupted leaves the last file whole


@dataclass(frozen=True)
class Row:
    """How one optimizer fared on a problem, over seeds.

    Attributes:
        problem: Which.
        optimizer: Which.
        ratios: Of each seed the time to the target over AdamW's own; None if it never was there.
        steps: Likewise, steps.
        lowest: Of each seed the lowest loss.
        targets: Of each seed AdamW's lowest loss, see `resolved`.
        error: Why it did not run, if so.
    """

    problem: str
    optimizer: str
    ratios: tuple[float | None, ...]
    steps: tuple[int | None, ...]
    lowest: tuple[float, ...]
    targets: tuple[float, ...]
    error: str | None

    def all_within(self, times: float) -> bool:
        """Whether every seed reached the target within so many times AdamW's time."""
        return all(ratio is not None and ratio <= times for ratio in self.ratios)


def resolved(loss: float) -> float:
    """Return a loss, or what single precision tells from zero where that is more.

    Of classes that are far apart every loss of a sample rounds to zero: a mean of zero says no more
    than that it is below the rounding of one.
    """
    return max(loss, torch.finfo(torch.float32).eps) if loss >= 0 else loss


def rows(results: Results, seeds: Sequence[int], optimizers: Sequence[str]) -> list[Row]:
    """Return a row for each optimizer.

    Args:
        results: Of a problem.
        seeds: Which.
        optimizers: Which.
    """
    made = []
    base = [results.curves["adamw"][str(seed)] for seed in seeds]
    targets = [resolved(curve.lowest) for curve in base]
    own = [curve.reached(target) for curve, target in zip(base, targets, strict=True)]
    for name in entrants(results.problem, optimizers):
        curves = [results.curves[name][str(seed)] for seed in seeds]
        times = [curve.reached(target) for curve, target in zip(curves, targets, strict=True)]
        ratios = [
            None if one is None or other is None else one[0] / other[0]
            for one, other in zip(times, own, strict=True)
        ]
        error = next((curve.error for curve in curves if curve.error), None)
        steps = tuple(None if one is None else one[1] for one in times)
        lowest = tuple(curve.lowest for curve in curves)
        made.append(Row(results.problem, name, tuple(ratios), steps, lowest, tuple(targets), error))
    return made
