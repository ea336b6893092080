"""Learning rates that were tried, and what came of each: a file for each benchmark."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from soframe.experiments.compare import jsonable

Scores = dict[str, dict[str, float | None]]
"""By name and learning rate; None for one that was not finite."""


@dataclass(frozen=True)
class TriedRates:
    """What tuning of learning rates found.

    Attributes:
        path: The file.
        highest: Whether the highest score is the best, as of accuracies; else the lowest.
    """

    path: Path
    highest: bool = False

    def scores(self, setting: str) -> Scores:
        """Return what was found under a setting.

        Args:
            setting: What is trained, and for how long.
        """
        return self._all().get(setting, {})

    def keep(self, setting: str, scores: Iterable[tuple[str, float, float]]) -> None:
        """Write what was found.

        Args:
            setting: What was trained, and for how long.
            scores: Of names and learning rates.
        """
        everything = self._all()
        for name, lr, score in scores:
            everything.setdefault(setting, {}).setdefault(name, {})[f"{lr:g}"] = score
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(jsonable(everything), indent=1)
        self.path.write_text(text + "\n", encoding="utf-8")

    def best(self, lrs: Mapping[str, Sequence[float]], setting: str) -> dict[str, float]:
        """Return the learning rates that tuning found best.

        Args:
            lrs: By name, those that must have been tried, so that all are tuned alike.
            setting: What is trained, and for how long.

        Raises:
            ValueError: If one of them was not tried.
        """
        scores = self.scores(setting)
        worst = -math.inf if self.highest else math.inf
        chosen = {}
        for name, rates in lrs.items():
            tried = scores.get(name, {})
            if untried := [f"{lr:g}" for lr in rates if f"{lr:g}" not in tried]:
                raise ValueError(
                    f"{name!r} was not tuned for {setting} at {', '.join(untried)}: add --tune"
                )
            finite = {lr: worst if score is None else score for lr, score in tried.items()}
            choose = max if self.highest else min
            chosen[name] = float(choose(finite, key=finite.__getitem__))
        return chosen

    def _all(self) -> dict[str, Scores]:
        if not self.path.exists():
            return {}
        everything: dict[str, Scores] = json.loads(self.path.read_text(encoding="utf-8"))
        return everything
