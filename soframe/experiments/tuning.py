"""The settings that tuning chose for the optimizers of the experiments.

`benchmarks/harness/tuning.py` is the protocol that chooses, the same for every optimizer of every
benchmark; what it chose for the workloads of the demonstration, with every trial, is kept in
`tuned/*.json` beside this file, and `benchmarks/tune.py` repeats it. Seeds that are reported must
differ from the seed of tuning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import soframe
from soframe.experiments import outcomes
from soframe.experiments.config import OWN, OptimizerName, RunConfig, method_of

#: The seed of every tuning run: of no reported one.
TUNING_SEED = 1000

#: Where the outcomes are kept.
FOLDER = Path(__file__).parent / "tuned"

#: The workloads of the demonstration, where `OPTIMIZERS` are tuned.
WORKLOADS = ("digits-autoencoder", "digits-cnn")

#: What is tuned for the demonstration, in the order of tables.
OPTIMIZERS: tuple[OptimizerName, ...] = ("sgd", "adamw", "kfac")

#: What runs without any tuning, and with what.
UNTUNED: Mapping[OptimizerName, Mapping[str, Any]] = {
    "trust-region": {"lr": 1.0},
    "stochastic-trust-region": {"lr": 0.7},
}


@dataclass(frozen=True)
class Protocol:
    """How optimizers are tuned on a workload: the same for each of them.

    Attributes:
        workload: The name of the workload.
        targets: Losses to reach, descending.
        seconds: Of training, for a trial of the last rung; of processor time, which a busy machine
            stretches less.
        rungs: How many trials, and each one's share of the seconds.
        seed: Of the trials' runs and of the search.
    """

    workload: str
    targets: tuple[float, ...]
    seconds: float
    rungs: tuple[tuple[int, float], ...] = ((8, 0.25), (4, 0.5), (1, 1.0))
    seed: int = TUNING_SEED


@dataclass(frozen=True)
class Trial:
    """One setting, trained for one rung.

    Attributes:
        draw: Which of the drawn settings it is.
        budget: Seconds of training.
        settings: Fields of `RunConfig`; names with a dot are arguments of the optimizer.
        reached: How many of the targets.
        seconds: To the lowest of those; None if there is none.
        step: Likewise, in steps.
        loss: The lowest loss.
    """

    draw: int
    budget: float
    settings: Mapping[str, Any]
    reached: int
    seconds: float | None
    step: int | None
    loss: float

    @property
    def rank(self) -> tuple[int, float]:
        """Sorts trials, the best first."""
        if self.seconds is not None:
            return (-self.reached, self.seconds)
        return (0, self.loss if math.isfinite(self.loss) else math.inf)


@dataclass(frozen=True)
class Tuned:
    """The outcome for one optimizer on one workload.

    Attributes:
        protocol: How it was found.
        optimizer: Of what.
        trials: All of them, the best first.
    """

    protocol: Protocol
    optimizer: OptimizerName
    trials: tuple[Trial, ...]

    @property
    def best(self) -> Trial:
        """The trial that was chosen."""
        return self.trials[0]

    def soonest(self, target: float) -> Trial:
        """The trial that was at a target first, as far as is known.

        Args:
            target: One of the protocol's.

        Returns:
            Of those that were there the one that needed least time to its lowest target; if there
            is none, the best.

        Raises:
            ValueError: If the target is another one.
        """
        if target not in self.protocol.targets:
            raise ValueError(f"no target {target:g}, but {self.protocol.targets}")
        wanted = self.protocol.targets.index(target) + 1
        there = [trial for trial in self.trials if trial.reached >= wanted]
        return min(there, key=lambda trial: trial.seconds or math.inf, default=self.best)

    def save(self, folder: Path = FOLDER) -> Path:
        """Writes the outcome as JSON.

        Args:
            folder: Where; made if needed.

        Returns:
            The path of the file.
        """
        return outcomes.write(folder, self.protocol.workload, self.optimizer, self)


def load(workload_name: str, optimizer: str, folder: Path = FOLDER, *, command: str = "") -> Tuned:
    """Reads an outcome.

    Args:
        workload_name: The workload.
        optimizer: The optimizer.
        folder: Where the outcomes are.
        command: What would make one; `benchmarks/tune.py` if empty.

    Returns:
        The outcome.

    Raises:
        FileNotFoundError: If that optimizer was never tuned on that workload.
    """
    command = command or f"python benchmarks/tune.py {workload_name} {optimizer}"
    fields = outcomes.read(folder, workload_name, optimizer, command)
    protocol = dict(fields["protocol"])
    protocol["targets"] = tuple(protocol["targets"])
    protocol["rungs"] = tuple((count, share) for count, share in protocol["rungs"])
    return Tuned(
        protocol=Protocol(**protocol),
        optimizer=fields["optimizer"],
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
    of_run: dict[str, Any] = {}
    arguments: dict[str, Any] = {"preconditioner": {}, "options": {}, "method": {}}
    for name, value in settings.items():
        prefix, dot, argument = name.partition(".")
        if dot:
            arguments[prefix][argument] = value
        else:
            of_run[name] = tuple(value) if isinstance(value, list) else value
    if of_run.get("schedule_steps") is not None:
        of_run["schedule"] = "cosine"
    of_run.update(fields)
    return RunConfig(workload=workload_name, optimizer=optimizer, **arguments, **of_run)


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
            hint = f"; did you mean {OWN}{name}?" if name in soframe.available("method") else ""
            raise ValueError(
                f"no optimizer {name!r}; there are: {', '.join(known)}, {OWN}METHOD{hint}"
            )
        if name.startswith(OWN):
            method_of(name)
    return tuple(names) or OPTIMIZERS
