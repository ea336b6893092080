"""One tuning protocol for every optimizer of every benchmark.

Each optimizer gets the same number of trials on a seed of their own: a Latin hypercube of settings,
by successive halving (Jamieson and Talwalkar, 2016). Each rung trains the best settings of the last
one anew, for longer. Where the schedule is a cosine, it ends with the rung, so that the rungs are
also a search over its length. The winner is the setting that gets furthest down the targets, and
there the soonest, in whichever rung.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from harness.runs import ALONE
from harness.search import SPACES, WEIGHT_DECAY, Choice, Range
from soframe.experiments.config import OptimizerName
from soframe.experiments.records import RunRecord
from soframe.experiments.train import train
from soframe.experiments.tuning import Protocol, Trial, Tuned, configure

#: The part of a trial's budget in which its steps are timed, to know how many a cosine may have.
_TIMING = 0.1


def draw(optimizer: OptimizerName, protocol: Protocol) -> list[dict[str, Any]]:
    """The settings that the first rung tries: the same for the same seed.

    Args:
        optimizer: Whose search space to draw from.
        protocol: How many, and the seed.

    Returns:
        Settings, with a name in the place of the schedule's length.

    Raises:
        ValueError: If the optimizer needs no tuning.
    """
    if optimizer not in SPACES:
        raise ValueError(f"{optimizer} runs with its defaults: there is nothing to tune")
    generator = random.Random(f"{protocol.seed} {protocol.workload} {optimizer}")
    space: dict[str, Range | Choice] = dict(SPACES[optimizer])
    if protocol.workload in WEIGHT_DECAY:
        space["weight_decay"] = WEIGHT_DECAY[protocol.workload]
    count, _ = protocol.rungs[0]
    columns = {name: values.draws(generator, count) for name, values in space.items()}
    return [{name: column[i] for name, column in columns.items()} for i in range(count)]


def tune(
    optimizer: OptimizerName,
    protocol: Protocol,
    on_trial: Callable[[Trial], None] = lambda trial: None,
    **fields: Any,
) -> Tuned:
    """Runs the protocol for one optimizer.

    Args:
        optimizer: What to tune.
        protocol: How.
        on_trial: Called after each trial.
        fields: Further fields of `RunConfig`, such as ``evaluate_every``.

    Returns:
        The outcome.
    """
    drawn = draw(optimizer, protocol)
    survivors = list(range(len(drawn)))
    trials: list[Trial] = []
    for count, share in protocol.rungs:
        budget = share * protocol.seconds
        rung: list[Trial] = []
        for index in survivors[:count]:
            trial: dict[str, Any] = {
                "targets": protocol.targets,
                "seconds": budget,
                "seed": protocol.seed,
                "clock": "cpu",
                **fields,
            }
            settings = _timed(protocol.workload, optimizer, drawn[index], trial)
            record = train(ALONE, configure(protocol.workload, optimizer, settings, **trial))
            rung.append(judge(index, budget, settings, record))
            on_trial(rung[-1])
        trials += rung
        survivors = [trial.draw for trial in sorted(rung, key=lambda trial: trial.rank)]
    return Tuned(protocol, optimizer, tuple(sorted(trials, key=lambda trial: trial.rank)))


def _timed(
    workload_name: str,
    optimizer: OptimizerName,
    drawn: Mapping[str, Any],
    fields: Mapping[str, Any],
) -> dict[str, Any]:
    """Replaces the name of a schedule by its length: the steps that fit in the budget."""
    settings = {name: value for name, value in drawn.items() if name != "schedule"}
    if drawn["schedule"] == "constant":
        return {**settings, "schedule_steps": None}
    trial = {**fields, "seconds": _TIMING * fields["seconds"], "stop_at_target": False}
    last = train(ALONE, configure(workload_name, optimizer, settings, **trial)).rows[-1]
    steps = fields["seconds"] / max(last.seconds, 1e-9) * last.step
    return {**settings, "schedule_steps": max(1, int(float(f"{steps:.2g}")))}


def judge(draw_index: int, budget: float, settings: Mapping[str, Any], record: RunRecord) -> Trial:
    """Reduces a run to what tuning compares.

    Args:
        draw_index: Which of the drawn settings it is.
        budget: Seconds of training.
        settings: As in `Trial.settings`.
        record: The run.

    Returns:
        The trial.
    """
    rows = [row for target in record.targets if (row := record.reached(target)) is not None]
    losses = [row.loss for row in record.rows if math.isfinite(row.loss)]
    return Trial(
        draw=draw_index,
        budget=budget,
        settings=settings,
        reached=len(rows),
        seconds=rows[-1].seconds if rows else None,
        step=rows[-1].step if rows else None,
        loss=min(losses) if losses else math.inf,
    )


def holds_up(chosen: Trial, best: Trial, tolerance: float) -> bool:
    """Whether a chosen setting is within a tolerance of the best of a rerun.

    Args:
        chosen: The stored choice, run again.
        best: The best trial of the rerun.
        tolerance: The factor by which its seconds may exceed the best one's where both reached as
            many targets; its loss, where neither reached any.

    Returns:
        Whether it is.
    """
    if best.seconds is None:
        return chosen.seconds is not None or chosen.loss <= tolerance * best.loss
    if chosen.seconds is None or chosen.reached != best.reached:
        return chosen.reached > best.reached
    return chosen.seconds <= tolerance * best.seconds


def show(trial: Trial) -> None:
    """Print what came of a trial."""
    print(f"  {describe(trial)}", flush=True)


def describe(trial: Trial) -> str:
    """Say in a line what came of a trial."""
    reached = "none" if trial.step is None else f"{trial.reached}, {trial.seconds:.1f} s"
    return f"{trial.budget:g} s: loss {trial.loss:.4g}, targets: {reached}; {dict(trial.settings)}"
