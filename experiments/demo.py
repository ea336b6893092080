"""The demonstration: benefit and cost of second-order preconditioning on this machine.

Two small workloads, every optimizer with the settings that one tuning protocol chose for it, K-FAC
under each of KAISA's distribution strategies. On the autoencoder K-FAC with a trust region joins
them, on the whole training set and with the library's defaults; it alone reaches the lower of the
targets. The last workload is a small transformer: AdamW, Muon, and a method composed of SOAP and
Muon, near the learning rates that `benchmarks/methods.py` found. All runs of a workload have the
same budget of training seconds, and end early once they reach the lowest target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from experiments.config import RunConfig
from experiments.records import RunRecord, verdict
from experiments.tuning import BY_HAND, require_other_seed, settled, tuned
from experiments.workloads import workload

#: Strategies that K-FAC is shown under.
STRATEGIES = ("comm-opt", "mem-opt", "hybrid-opt")

#: Each workload's share of the training seconds.
SHARES = {"digits-autoencoder": 0.66, "digits-cnn": 0.1, "byte-gpt": 0.24}

#: Other targets than the workload's: on the autoencoder one more, for the trust region.
TARGETS = {"digits-autoencoder": (0.3, 0.15, 0.05), "byte-gpt": (3.0, 2.6)}

#: Optimizers of the transformer, the composed method last; no schedule, as runs end by time.
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


def configurations(name: str, budget: float, seed: int) -> list[RunConfig]:
    """Return the runs of a workload, of one length, for a demonstration of so many seconds.

    Raises:
        ValueError: If the seed is the one that settings were tuned on, or if the budget is not
            positive.
    """
    require_other_seed(seed)
    if budget <= 0:
        raise ValueError(f"the budget must be positive, not {budget:g} s")
    targets, seconds = TARGETS.get(name), TRAINING * SHARES[name] * budget
    fields: dict[str, Any] = {"seed": seed, "targets": targets}
    if name == "byte-gpt":
        fields |= {"seconds": seconds / len(METHODS), "evaluate_every": 10}
        return [
            RunConfig(name, optimizer, **fields, **settings)
            for optimizer, settings in METHODS.items()
        ]
    fields["seconds"] = seconds / (2 + len(STRATEGIES) + (targets is not None))
    runs = [tuned(name, "sgd", **fields), tuned(name, "adamw", **fields)]
    runs += [tuned(name, "kfac", strategy=strategy, **fields) for strategy in STRATEGIES]
    return runs if targets is None else [*runs, tuned(name, "trust-region", **fields)]


def marked(records: Sequence[RunRecord]) -> list[RunRecord]:
    """Return the runs with the origin of their settings, so that untuned ones are marked."""
    runs = []
    for record in records:
        config, origin = record.config, BY_HAND
        if config.workload != "byte-gpt":
            _, origin = settled(config.workload, config.optimizer)
        runs.append(replace(record, settings_from=origin))
    return runs


def sentences(name: str, records: Sequence[RunRecord]) -> list[str]:
    """Return verdicts on the runs of a workload, and a note on strategies that coincide."""
    ran = {record.config.optimizer for record in records}
    if COMPOSED in ran:
        return [verdict(records, min(TARGETS[name]), COMPOSED)]
    lines = [verdict(records, min(workload(name).targets))]
    if "trust-region" in ran:
        lines.append(verdict(records, min(TARGETS[name]), "trust-region"))
    placed: dict[tuple[int, ...], list[str]] = {}
    for record in records:
        if record.config.optimizer == "kfac" and record.processes > 1:
            placed.setdefault(record.gradient_workers, []).append(record.config.strategy)
    for workers, strategies in placed.items():
        if len(strategies) > 1:
            numbers = "/".join(str(count) for count in sorted(set(workers)))
            lines.append(
                f"On {records[0].processes} processes {' and '.join(strategies)} are the same "
                f"placement: each block has {numbers} gradient worker(s)."
            )
    return lines
