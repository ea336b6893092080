"""Tuning, the same for every optimizer of every comparison, and its results.

Each optimizer gets as many trials on a seed of their own, and Optuna chooses their settings (by the
tree-structured Parzen estimator; Bergstra et al., 2011). Where the schedule is a cosine, its length
is a part of the trial's budget, and is searched for too. The winner is the setting that gets
furthest down the targets, and there the soonest, or else to the lowest loss.

Outcomes are kept in `tuned/*.json`, with every trial; `python -m experiments compare` keeps its own
beside its tables. Seeds that are reported must differ from the seed of tuning.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

from experiments.config import TRUST_REGIONS, UNTUNED_PEERS, RunConfig, method_of
from experiments.libraries import require
from experiments.records import RunRecord, jsonable, read_json, with_infinity, write_json
from experiments.train import ALONE, train
from experiments.workloads import workload

TUNING_SEED = 1000
FOLDER = Path(__file__).parent / "tuned"
DEMO = FOLDER / "demo.json"

Space = Mapping[str, Any]
"""By setting a range, uniform in the logarithm, or a list of choices. See `configure`."""

UNTUNED = "untuned"
BY_HAND = "set by hand, not tuned"

RATES: Mapping[str, float] = {
    "sgd": 0.01,
    "adamw": 1e-3,
    "kfac": 0.1,
    "ekfac": 0.1,
    "trust-region": 1.0,
    "stochastic-trust-region": 0.7,
    "soap": 3e-3,
    "muon": 0.02,
    "shampoo": 1e-3,
    "kfac-pytorch": 0.1,
    "oracle": 0.3,
    **dict.fromkeys(UNTUNED_PEERS, 1.0),  # which have their own
}
"""Learning rates without tuning."""

SCHEDULES: Sequence[float | None] = [None, 0.25, 0.5, 1.0]
"""Lengths of the cosine, in parts of a trial's budget; None for a constant rate."""

SPACES: Mapping[str, Space] = {
    "sgd": {"lr": (1e-3, 1e-1), "momentum": [0.9, 0.95, 0.98]},
    "adamw": {"lr": (5e-4, 1e-2), "betas": [(0.9, 0.99), (0.9, 0.999), (0.95, 0.95)]},
    "kfac": {
        "lr": (5e-2, 1.0),
        "momentum": [0.8, 0.9],
        "preconditioner.solver": ["eigen", "inverse"],
        "preconditioner.damping": (1e-4, 1e-2),
        "preconditioner.kl_clip": (1e-3, 1.0),
        "preconditioner.decay": [0.8, 0.9],
        "preconditioner.statistics_every": [5, 10],
        "preconditioner.solve_every": [10, 20],
    },
    "ekfac": {  # which adds the damping itself, where K-FAC adds its root to both factors
        "lr": (5e-2, 1.0),
        "momentum": [0.8, 0.9],
        "preconditioner.damping": (1e-2, 1.0),
        "preconditioner.kl_clip": (1e-3, 1.0),
        "preconditioner.decay": [0.8, 0.9],
        "preconditioner.statistics_every": [5, 10],
        "preconditioner.solve_every": [10, 20],
    },
    "soap": {
        "lr": (1e-3, 2e-2),
        "betas": [(0.95, 0.95), (0.9, 0.99)],
        "options.precondition_frequency": [5, 10],
    },
    "muon": {"lr": (5e-3, 1e-1), "momentum": [0.9, 0.95], "options.adamw_lr": (1e-3, 1e-2)},
    "shampoo": {
        "lr": (1e-4, 3e-3),
        "betas": [(0.9, 0.99), (0.9, 0.999)],
        "options.preconditioning_compute_steps": [10, 25],
    },
    "kfac-pytorch": {
        "lr": (5e-2, 1.0),
        "momentum": [0.8, 0.9],
        "options.damping": (1e-4, 1e-1),
        "options.kl_clip": (1e-4, 1e-1),
        "options.factor_decay": [0.8, 0.95],
        "options.factor_update_steps": [5, 10],
        "options.inv_update_steps": [10, 20],
    },
    "oracle": {"lr": (5e-2, 1.0), "momentum": [0.0, 0.9], "options.damping": (1e-3, 1e-1)},
}


@dataclass(frozen=True)
class Trial:
    """One setting, trained once.

    Attributes:
        settings: See `configure`.
        reached: The number of targets that it reached.
        seconds: To the lowest of them; None without any.
        step: The step at that time; None without any.
        loss: The lowest loss.
    """

    settings: Mapping[str, Any]
    reached: int
    seconds: float | None
    step: int | None
    loss: float

    @classmethod
    def of(cls, settings: Mapping[str, Any], record: RunRecord) -> Trial:
        """Return a run's numbers for comparison."""
        rows = [row for target in record.targets if (row := record.reached(target)) is not None]
        if not rows:
            return cls(settings, 0, None, None, record.best_loss)
        return cls(settings, len(rows), rows[-1].seconds, rows[-1].step, record.best_loss)

    @property
    def rank(self) -> tuple[int, float]:
        """Sorts trials, the best first."""
        if self.seconds is None:
            return 0, self.loss
        return -self.reached, self.seconds

    def __str__(self) -> str:
        reached = "none"
        if self.seconds is not None:
            reached = f"{self.reached}, {self.seconds:.1f} s"
        return f"loss {self.loss:.4g}, targets: {reached}; {dict(self.settings)}"


def budget(seconds: float | None, steps: int | None) -> str:
    """Return the budget of a run, in words."""
    return f"{steps} steps" if seconds is None else f"{seconds:g} s"


def _rate(trial: Trial) -> float:
    rate: float = trial.settings.get("lr", 0.0)
    return rate


@dataclass(frozen=True)
class Tuned:
    """The outcome for one optimizer on one workload.

    Attributes:
        targets: Losses to reach, descending.
        seconds: Seconds of training of a trial: of processor time, which other work stretches less.
        seed: Seed of the trials' runs and of the search.
        search: How the settings were found.
        trials: All of them, the best first.
        steps: Steps of a trial, where `seconds` is None.
    """

    targets: tuple[float, ...]
    seconds: float | None
    seed: int
    search: str
    trials: tuple[Trial, ...]
    steps: int | None = None

    @property
    def best(self) -> Trial:
        """The trial that was chosen."""
        return self.trials[0]

    @property
    def mark(self) -> str:
        """The number of trials and their length, and a best rate at an end, for tables."""
        mark = f"{len(self.trials)} trials of {budget(self.seconds, self.steps)}"
        rates = sorted(set(map(_rate, self.trials)))
        if len(rates) < 3:
            return mark
        if _rate(self.best) in rates[1:-1]:
            return mark
        return f"{mark} (rate at an end)"

    def soonest(self, target: float) -> Trial:
        """Return the trial that was at a target first, as far as is known; else the best.

        Raises:
            ValueError: If the target is not one that was tuned for.
        """
        if target not in self.targets:
            raise ValueError(f"no target {target:g}, but {self.targets}")
        number = self.targets.index(target) + 1
        there = [trial for trial in self.trials if trial.reached >= number]
        return min(there, key=lambda trial: trial.seconds or math.inf, default=self.best)

    def save(self, path: Path, workload_name: str, optimizer: str) -> None:
        """Write the outcome into a file of several."""
        every = read_json(path)
        every[f"{workload_name} {optimizer}"] = asdict(self)
        write_json(path, dict(sorted(every.items())))


def load(path: Path, workload_name: str, optimizer: str) -> Tuned:
    """Read an outcome.

    Raises:
        FileNotFoundError: If that optimizer was never tuned on that workload.
    """
    fields = read_json(path).get(f"{workload_name} {optimizer}")
    if fields is None:
        raise FileNotFoundError(f"{optimizer} was never tuned on {workload_name}: tune it first")
    trials = tuple(Trial(**with_infinity(trial)) for trial in fields["trials"])
    return Tuned(**{**fields, "targets": tuple(fields["targets"]), "trials": trials})


def tune(
    workload_name: str,
    optimizer: str,
    *,
    targets: Sequence[float],
    trials: int,
    seconds: float | None = None,
    steps: int | None = None,
    space: Space | None = None,
    seed: int = TUNING_SEED,
    trained: Callable[[RunConfig], RunRecord] = lambda config: train(ALONE, config),
    on_trial: Callable[[Trial], None] = lambda trial: print(f"  {trial}", flush=True),
    **fields: Any,
) -> Tuned:
    """Search for settings of one optimizer.

    Args:
        workload_name: The workload.
        optimizer: The optimizer.
        targets: Losses to reach, descending; none to search for the lowest loss.
        trials: How many.
        seconds: Seconds of training of a trial, of processor time.
        steps: Steps of a trial, instead.
        space: The settings; None for those of `space_of`. Without ``"schedule"``, the length of a
            cosine is one of `SCHEDULES`.
        seed: Seed of the runs and of the search.
        trained: Trains one trial.
        on_trial: Called after each trial.
        fields: Further fields of `RunConfig`, such as ``evaluate_every``.

    Raises:
        ValueError: If the optimizer needs no tuning.
    """
    optuna = require("optuna")
    # Failures and interrupts are raised, and need no second message.
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space = space or space_of(workload_name, optimizer)
    if space is None:
        raise ValueError(f"{optimizer} runs with its defaults: there is nothing to tune")
    if (seconds is None) == (steps is None):
        raise ValueError("a trial has a budget in seconds or in steps")
    space = {**space, "schedule": space.get("schedule", SCHEDULES)}
    finished: list[Trial] = []

    def objective(suggest: Any) -> float:
        drawn: dict[str, Any] = {}
        for name, values in space.items():
            if isinstance(values, tuple):
                drawn[name] = float(f"{suggest.suggest_float(name, *values, log=True):.2g}")
            else:
                drawn[name] = values[suggest.suggest_categorical(name, range(len(values)))]
        part = drawn.pop("schedule")
        timed: dict[str, Any] = {}
        if part is not None and steps is not None:
            drawn["schedule_steps"] = max(1, round(part * steps))
        elif part is not None and seconds is not None:
            timed = {"schedule_seconds": part * seconds}
        run: dict[str, Any] = {"targets": tuple(targets), "seconds": seconds, "steps": steps}
        run |= {"seed": seed, "clock": "cpu", **fields}
        record = trained(configure(workload_name, optimizer, {**drawn, **timed}, **run))
        if timed:
            # Kept in steps, which other machines and other loads repeat.
            length = timed["schedule_seconds"] * record.last.step / max(record.last.seconds, 1e-9)
            drawn["schedule_steps"] = max(1, round(float(f"{length:.2g}")))
        trial = Trial.of(drawn, record)
        finished.append(trial)
        on_trial(trial)
        if trial.seconds is None:
            return 1.0 + math.atan(trial.loss)  # in the order of the ranks, and finite
        return trial.seconds / (1.0 + trial.seconds) - 10.0 * trial.reached

    sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=max(1, trials // 2))
    optuna.create_study(sampler=sampler).optimize(objective, n_trials=trials)
    ordered = tuple(sorted(finished, key=lambda trial: trial.rank))
    search = f"Optuna {optuna.__version__}, TPE, {trials} trials"
    return Tuned(tuple(targets), seconds, seed, search, ordered, steps)


def space_of(workload_name: str, optimizer: str) -> Space | None:
    """Return the settings to search: the workload's, those of `SPACES`, or a method's rate."""
    space = workload(workload_name).spaces.get(optimizer) or SPACES.get(optimizer)
    if space is None and method_of(optimizer):
        rate = default_rate(optimizer)
        return {"lr": (rate / 10, rate * 10)}
    return space


def default_rate(optimizer: str) -> float:
    """Return the learning rate of an optimizer that was not tuned."""
    if method := method_of(optimizer):
        # Orthogonalised updates have lengths of their own; updates divided by roots have Adam's.
        return 0.02 if method.endswith("muon") else 0.003
    return RATES[optimizer]


def configure(
    workload_name: str, optimizer: str, settings: Mapping[str, Any], **fields: Any
) -> RunConfig:
    """Return the run of some settings.

    Args:
        workload_name: The workload.
        optimizer: The optimizer.
        settings: Fields of `RunConfig`; names with a dot are arguments, as in
            ``preconditioner.damping``. With the length of a schedule it is a cosine.
        fields: Further fields: the budget, the seed, ...

    Raises:
        ValueError: If a setting does not exist.
    """
    of_run: dict[str, Any] = {}
    arguments: dict[str, Any] = {"preconditioner": {}, "options": {}, "method": {}}
    known = {field.name for field in fields_of(RunConfig)}
    for name, value in settings.items():
        prefix, dot, argument = name.partition(".")
        if prefix not in (arguments if dot else known):
            raise ValueError(
                f"no such setting: {name!r} of {optimizer!r}; there are: "
                f"{', '.join(sorted(known))}; and arguments, such as preconditioner.damping, "
                f"options.solve_every, method.beta"
            )
        if dot:
            arguments[prefix][argument] = value
        else:
            of_run[name] = tuple(value) if isinstance(value, list) else value
    if of_run.get("schedule_steps") or of_run.get("schedule_seconds"):
        of_run["schedule"] = "cosine"
    return RunConfig(workload_name, optimizer, **{**arguments, **of_run, **fields})


def chosen(workload_name: str, optimizer: str, path: Path = DEMO) -> Mapping[str, Any]:
    """Return the tuned settings, or the fixed ones of an optimizer without tuning.

    Raises:
        FileNotFoundError: If that optimizer was never tuned on that workload.
    """
    if optimizer in TRUST_REGIONS or method_of(optimizer):
        return {"lr": default_rate(optimizer)}
    return load(path, workload_name, optimizer).best.settings


def settled(workload_name: str, optimizer: str, path: Path = DEMO) -> tuple[Mapping[str, Any], str]:
    """Return settings and a word on their origin: set by hand, tuned before, or untuned."""
    if by_hand := workload(workload_name).settings.get(optimizer):
        return by_hand, BY_HAND
    try:
        outcome = load(path, workload_name, optimizer)
    except FileNotFoundError:
        return {"lr": default_rate(optimizer)}, UNTUNED
    return outcome.best.settings, outcome.mark


def tuned(workload_name: str, optimizer: str, **fields: Any) -> RunConfig:
    """Return the run of an optimizer with the settings that tuning chose, where it needs any."""
    return configure(workload_name, optimizer, chosen(workload_name, optimizer), **fields)


def require_other_seed(seed: int) -> None:
    """Refuse to report the seed of tuning.

    Raises:
        ValueError: If it is that one.
    """
    if seed == TUNING_SEED:
        raise ValueError(f"seed {seed} is the one that settings were tuned on: choose another")


@dataclass(frozen=True)
class TriedRates:
    """Scores of a grid of learning rates, in a file: by setting, name and learning rate.

    Attributes:
        path: The file.
        highest: Whether the highest score is the best, as of accuracies; else the lowest.
    """

    path: Path
    highest: bool = False

    def scores(self, setting: str) -> dict[str, dict[str, float | None]]:
        """Return the scores under a setting; None for one that was not finite."""
        scores: dict[str, dict[str, float | None]] = read_json(self.path).get(setting, {})
        return scores

    def keep(self, setting: str, scores: Iterable[tuple[str, float, float]]) -> None:
        """Write scores of names and learning rates."""
        every = read_json(self.path)
        for name, lr, score in scores:
            every.setdefault(setting, {}).setdefault(name, {})[f"{lr:g}"] = jsonable(score)
        write_json(self.path, every)

    def best(self, lrs: Mapping[str, Sequence[float]], setting: str) -> dict[str, float]:
        """Return the best learning rate of each name.

        Args:
            lrs: By name, those that must have been tried, so that all are tuned alike.
            setting: The workload and the length of training.

        Raises:
            ValueError: If one has not been tried.
        """
        best, known = {}, self.scores(setting)
        for name, required in lrs.items():
            tried = known.get(name, {})
            if untried := [f"{lr:g}" for lr in required if f"{lr:g}" not in tried]:
                raise ValueError(
                    f"{name!r} was not tuned for {setting} at {', '.join(untried)}: add --tune"
                )
            finite = {lr: score for lr, score in tried.items() if score is not None}
            if not finite:
                finite = dict.fromkeys(tried, math.inf)  # all are as bad
            choose = max if self.highest else min
            best[name] = float(choose(finite, key=finite.__getitem__))
        return best
