"""The demonstration: what second-order preconditioning brings, and what it costs, on this machine.

Two small workloads, every optimizer with the settings that one tuning protocol chose for it, K-FAC
under each of KAISA's distribution strategies. On the autoencoder K-FAC with a trust region joins
them, on the whole training set and with the library's defaults, and there is a lower target, to
which it leads. The last workload is a small transformer: AdamW, Muon, and a method that is composed
of SOAP and Muon, near the learning rates that `benchmarks/methods.py` found. All runs of a workload
have the same budget of training seconds, and end early once they reach the lowest target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from soframe.experiments import plots
from soframe.experiments.compare import STRATEGIES, Comparison, Watch, compare
from soframe.experiments.config import RunConfig
from soframe.experiments.records import RunRecord, verdict
from soframe.experiments.tuning import TUNING_SEED, tuned
from soframe.experiments.workloads import workload

#: The workloads, and each one's share of the training seconds.
SHARES = {"digits-autoencoder": 0.66, "digits-cnn": 0.1, "byte-gpt": 0.24}

#: Where the trust region takes part, and the targets there: the workload's, and one for it.
TARGETS = {"digits-autoencoder": (0.3, 0.15, 0.05), "byte-gpt": (3.0, 2.6)}

#: What trains the transformer, the composed method last; without a schedule, as runs end by time.
COMPOSED = "soframe:soap-muon"
_AUXILIARY = {"auxiliary_lr": 0.008}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"lr": 0.004, "betas": (0.9, 0.95)},
    "soframe:muon": {"lr": 0.02, "options": _AUXILIARY},
    COMPOSED: {
        "lr": 0.02,
        "method": {"max_ratio": 4.0},
        "options": {**_AUXILIARY, "statistics_every": 1, "solve_every": 5},
    },
}

#: The part of the budget that is spent training if no run ends early. The rest is for starting
#: processes, evaluations and plots.
TRAINING = 0.7


@dataclass(frozen=True)
class Part:
    """What one workload showed.

    Attributes:
        comparison: The runs.
        plot: The image.
        sentences: What the figures say, in words.
    """

    comparison: Comparison
    plot: Path
    sentences: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """The part, ready for JSON."""
        return {
            **self.comparison.as_dict(),
            "plot": str(self.plot),
            "summary": list(self.sentences),
        }


def configurations(name: str, budget: float, seed: int) -> list[RunConfig]:
    """The runs of one workload.

    Args:
        name: The workload.
        budget: Seconds for the whole demonstration.
        seed: Of the runs.

    Returns:
        SGD, AdamW, K-FAC under each strategy and, on some workloads, with a trust region; on the
        transformer AdamW, Muon and a composed method; all with the same budget.

    Raises:
        ValueError: If the seed is the one that settings were tuned on, or if the budget is not
            positive.
    """
    if seed == TUNING_SEED:
        raise ValueError(f"seed {seed} is the one that settings were tuned on: choose another")
    if budget <= 0:
        raise ValueError(f"the budget must be positive, not {budget:g} s")
    targets = TARGETS.get(name)
    if name == "byte-gpt":
        seconds = TRAINING * SHARES[name] * budget / len(METHODS)
        return [
            RunConfig(
                name,
                optimizer,
                seconds=seconds,
                seed=seed,
                targets=targets,
                evaluate_every=10,
                **settings,
            )
            for optimizer, settings in METHODS.items()
        ]
    runs = 2 + len(STRATEGIES) + (targets is not None)
    seconds = TRAINING * SHARES[name] * budget / runs
    fields: dict[str, Any] = {"seconds": seconds, "seed": seed, "targets": targets}
    configs = [
        tuned(name, "sgd", **fields),
        tuned(name, "adamw", **fields),
        *(tuned(name, "kfac", strategy=strategy, **fields) for strategy in STRATEGIES),
    ]
    if targets is not None:
        configs.append(tuned(name, "trust-region", **fields))
    return configs


def run(
    *,
    budget: float,
    processes: int,
    seed: int,
    output: Path,
    watch: Callable[[str, Sequence[str]], AbstractContextManager[Watch]],
    show: Callable[[Part], None],
) -> list[Part]:
    """Runs the demonstration.

    Args:
        budget: Seconds for everything, about.
        processes: How many ranks share each batch.
        seed: Of the runs.
        output: The folder of the plots.
        watch: From the title of a workload and the labels of its runs to a context that watches
            them.
        show: Called with each part as soon as it is there.

    Returns:
        One part for each workload.
    """
    # Everything that can be wrong with the arguments is known before the first run.
    plans = {name: configurations(name, budget, seed) for name in SHARES}
    parts = []
    for name, configs in plans.items():
        labels = [config.label for config in configs]
        with watch(workload(name).title, labels) as watcher:
            comparison = compare(configs, processes=processes, watch=watcher)
        figure = plots.loss_curves(workload(name), comparison.records, TARGETS.get(name))
        plot = plots.save(figure, output / f"{name}.png")
        part = Part(comparison, plot, sentences(name, comparison.records))
        parts.append(part)
        show(part)
    return parts


def sentences(name: str, records: Sequence[RunRecord]) -> tuple[str, ...]:
    """What the figures of a workload say.

    Args:
        name: The workload.
        records: Its runs.

    Returns:
        The verdicts on speed, and a note where strategies coincide on so few ranks.
    """
    if any(record.config.optimizer == COMPOSED for record in records):
        return (verdict(records, min(TARGETS[name]), COMPOSED),)
    said = [verdict(records, min(workload(name).targets))]
    if any(record.config.optimizer == "trust-region" for record in records):
        said.append(verdict(records, min(TARGETS[name]), "trust-region"))
    placed: dict[tuple[int, ...], list[str]] = {}
    for record in records:
        if record.config.optimizer == "kfac" and record.processes > 1:
            placed.setdefault(record.gradient_workers, []).append(record.config.strategy)
    for workers, strategies in placed.items():
        if len(strategies) > 1:
            each = "/".join(str(count) for count in sorted(set(workers)))
            said.append(
                f"On {records[0].processes} processes {' and '.join(strategies)} are the same "
                f"placement: each block has {each} gradient worker(s)."
            )
    return tuple(said)
