"""One tuning protocol for every optimizer, and the settings that it chose.

Each optimizer gets the same number of trials, drawn from its own search space by a seeded random
search, each with the same budget of training seconds on the same tuning seed. The best trial is
the one that reaches the workload's lowest target in the fewest seconds; where none does, the one
with the lowest training loss. Seeds that are reported must differ from the tuning seed. The
outcome, with every trial, is kept in `tuned/*.json` beside this file, and `benchmarks/tune.py`
repeats it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from soframe.experiments import outcomes
from soframe.experiments.config import OWN, OptimizerName, RunConfig, method_of
from soframe.experiments.records import RunRecord
from soframe.experiments.train import run
from soframe.experiments.workloads import workload

#: The seed of every tuning run: of no reported one.
TUNING_SEED = 1000

#: Where the outcomes are kept.
FOLDER = Path(__file__).parent / "tuned"

Draw = Callable[[random.Random], Any]


def log_uniform(low: float, high: float) -> Draw:
    """Draws from a range, uniformly in the logarithm.

    Args:
        low: The lower end, positive.
        high: The upper end.

    Returns:
        What draws a value, rounded to two digits: what is reported is what was run.
    """

    def draw(generator: random.Random) -> float:
        value = math.exp(generator.uniform(math.log(low), math.log(high)))
        return float(f"{value:.2g}")

    return draw


def choice(*values: Any) -> Draw:
    """Draws one of the values, all alike."""
    return partial(_choose, values)


def _choose(values: Sequence[Any], generator: random.Random) -> Any:
    return generator.choice(values)


#: Schedules are the same for all: constant, or a cosine of some length in steps.
_SCHEDULES = choice(None, 300, 600, 1200)

#: Search spaces. Names with a dot are arguments of the preconditioner.
SPACES: Mapping[OptimizerName, Mapping[str, Draw]] = {
    "sgd": {
        "lr": log_uniform(1e-3, 1e-1),
        "momentum": choice(0.9, 0.95, 0.98),
        "schedule_steps": _SCHEDULES,
    },
    "adamw": {
        "lr": log_uniform(5e-4, 1e-2),
        "betas": choice((0.9, 0.99), (0.9, 0.999)),
        "schedule_steps": _SCHEDULES,
    },
    "kfac": {
        "lr": log_uniform(5e-2, 1.0),
        "momentum": choice(0.8, 0.9),
        "preconditioner.solver": choice("eigen", "inverse"),
        "preconditioner.damping": log_uniform(1e-4, 1e-2),
        "preconditioner.kl_clip": log_uniform(5e-5, 1e-3),
        "preconditioner.decay": choice(0.8, 0.9),
        "preconditioner.statistics_every": choice(5, 10),
        "preconditioner.solve_every": choice(10, 20),
        "schedule_steps": _SCHEDULES,
    },
}


#: The workloads that are tuned if none is named: those of the demonstration.
WORKLOADS = ("digits-autoencoder", "digits-cnn")

#: What has a search space here, in the order of tables.
OPTIMIZERS: tuple[OptimizerName, ...] = tuple(SPACES)

#: What runs without any tuning, and with what.
UNTUNED: Mapping[OptimizerName, Mapping[str, Any]] = {"trust-region": {"lr": 1.0}}


@dataclass(frozen=True)
class Protocol:
    """How optimizers are tuned on a workload: the same for each of them.

    Attributes:
        workload: The name of the workload.
        trials: For each optimizer.
        seconds: Of training, for each trial; of processor time, which a busy machine stretches
            less.
        seed: Of the trials' runs and of the search.
    """

    workload: str
    trials: int = 16
    seconds: float = 10.0
    seed: int = TUNING_SEED


@dataclass(frozen=True)
class Trial:
    """One setting and what came of it.

    Attributes:
        settings: Fields of `RunConfig`; names with a dot are arguments of the preconditioner.
        seconds: To the lowest target; None if it was not reached.
        step: Likewise, in steps.
        loss: The lowest training loss.
    """

    settings: Mapping[str, Any]
    seconds: float | None
    step: int | None
    loss: float

    @property
    def rank(self) -> tuple[int, float]:
        """Sorts trials, the best first."""
        if self.seconds is not None:
            return (0, self.seconds)
        return (1, self.loss if math.isfinite(self.loss) else math.inf)


@dataclass(frozen=True)
class Tuned:
    """The outcome for one optimizer on one workload.

    Attributes:
        protocol: How it was found.
        optimizer: Of what.
        target: The training loss to reach.
        trials: All of them, the best first.
    """

    protocol: Protocol
    optimizer: OptimizerName
    target: float
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The trial that was chosen."""
        return self.trials[0]

    def save(self, folder: Path = FOLDER) -> Path:
        """Writes the outcome as JSON.

        Args:
            folder: Where; made if needed.

        Returns:
            The path of the file.
        """
        return outcomes.write(folder, self.protocol.workload, self.optimizer, self)


def load(workload_name: str, optimizer: str, folder: Path = FOLDER) -> Tuned:
    """Reads an outcome.

    Args:
        workload_name: The workload.
        optimizer: The optimizer.
        folder: Where the outcomes are.

    Returns:
        The outcome.

    Raises:
        FileNotFoundError: If that optimizer was never tuned on that workload.
    """
    command = f"python benchmarks/tune.py {workload_name} {optimizer}"
    fields = outcomes.read(folder, workload_name, optimizer, command)
    return Tuned(
        protocol=Protocol(**fields["protocol"]),
        optimizer=fields["optimizer"],
        target=fields["target"],
        trials=tuple(Trial(**trial) for trial in fields["trials"]),
    )


def configure(
    workload_name: str, optimizer: OptimizerName, settings: Mapping[str, Any], **fields: Any
) -> RunConfig:
    """The run of some settings.

    Args:
        workload_name: The workload.
        optimizer: The optimizer.
        settings: As in `Trial.settings`.
        fields: Further fields of `RunConfig`: the budget, the seed, ...

    Returns:
        The configuration.
    """
    own: dict[str, Any] = {}
    arguments: dict[str, Any] = {"preconditioner": {}, "options": {}, "method": {}}
    for name, value in settings.items():
        prefix, dot, argument = name.partition(".")
        if dot:
            arguments[prefix][argument] = value
        else:
            own[name] = tuple(value) if isinstance(value, list) else value
    if own.get("schedule_steps") is not None:
        own["schedule"] = "cosine"
    own.update(fields)
    return RunConfig(workload=workload_name, optimizer=optimizer, **arguments, **own)


def tuned(workload_name: str, optimizer: OptimizerName, **fields: Any) -> RunConfig:
    """The run of an optimizer with the settings that tuning chose, where it needs any.

    Args:
        workload_name: The workload.
        optimizer: The optimizer.
        fields: Further fields of `RunConfig`: the budget, the seed, ...

    Returns:
        The configuration.
    """
    return configure(workload_name, optimizer, chosen(workload_name, optimizer), **fields)


def chosen(workload_name: str, optimizer: OptimizerName) -> Mapping[str, Any]:
    """What tuning chose, or what runs without it.

    Args:
        workload_name: The workload.
        optimizer: The optimizer.

    Returns:
        Settings, as in `Trial.settings`.
    """
    if optimizer in UNTUNED:
        return UNTUNED[optimizer]
    if method := method_of(optimizer):
        # What orthogonalises has steps of its own length; what divides by roots has Adam's.
        return {"lr": 0.02 if method.endswith("muon") else 0.003}
    return load(workload_name, optimizer).best.settings


def draw(optimizer: OptimizerName, trials: int, seed: int) -> list[dict[str, Any]]:
    """The settings to try: the same for the same seed.

    Args:
        optimizer: Whose search space to draw from.
        trials: How many settings.
        seed: Of the search.

    Returns:
        Settings, as in `Trial.settings`.

    Raises:
        ValueError: If the optimizer needs no tuning.
    """
    if optimizer not in SPACES:
        raise ValueError(f"{optimizer} runs with its defaults: there is nothing to tune")
    generator = random.Random(f"{seed} {optimizer}")
    space = SPACES[optimizer]
    return [{name: sample(generator) for name, sample in space.items()} for _ in range(trials)]


def tune(
    optimizer: OptimizerName,
    protocol: Protocol,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> Tuned:
    """Runs the protocol for one optimizer.

    Args:
        optimizer: What to tune.
        protocol: How.
        on_trial: Called after each trial.

    Returns:
        The outcome.
    """
    target = min(workload(protocol.workload).targets)
    trials = []
    for settings in draw(optimizer, protocol.trials, protocol.seed):
        trials.append(_try(optimizer, settings, protocol, target))
        on_trial(trials[-1])
    return Tuned(protocol, optimizer, target, tuple(sorted(trials, key=lambda t: t.rank)))


def _try(
    optimizer: OptimizerName, settings: Mapping[str, Any], protocol: Protocol, target: float
) -> Trial:
    budget = {"seconds": protocol.seconds, "clock": "cpu"}
    config = configure(protocol.workload, optimizer, settings, seed=protocol.seed, **budget)
    return judge(settings, run(config), target)


def judge(settings: Mapping[str, Any], record: RunRecord, target: float) -> Trial:
    """Reduces a run to what tuning compares.

    Args:
        settings: What was tried.
        record: What came of it.
        target: The training loss to reach.

    Returns:
        The trial.
    """
    hit = record.reached(target)
    losses = [row.loss for row in record.rows if math.isfinite(row.loss)]
    return Trial(
        settings=settings,
        seconds=hit.seconds if hit else None,
        step=hit.step if hit else None,
        loss=min(losses) if losses else math.inf,
    )


def holds_up(chosen: Trial, best: Trial, tolerance: float) -> bool:
    """Whether a chosen setting is within a tolerance of the best of a rerun.

    Args:
        chosen: The stored choice, run again.
        best: The best trial of the rerun.
        tolerance: The factor by which its seconds (its loss, where the best of the rerun does not
            reach the target either) may exceed the best one's.

    Returns:
        Whether it is.
    """
    if best.seconds is not None:
        return chosen.seconds is not None and chosen.seconds <= tolerance * best.seconds
    return chosen.seconds is not None or chosen.loss <= tolerance * best.loss


def optimizers(names: Sequence[str]) -> tuple[OptimizerName, ...]:
    """Checks names of optimizers.

    Args:
        names: From a command line; none for all that are tuned.

    Returns:
        The names.

    Raises:
        ValueError: If one does not exist.
    """
    for name in names:
        known = (*OPTIMIZERS, *UNTUNED)
        if name not in known and not name.startswith(OWN):
            raise ValueError(f"no optimizer {name!r}; there are: {', '.join(known)}, {OWN}METHOD")
        if name.startswith(OWN):
            method_of(name)
    return tuple(names) or OPTIMIZERS
