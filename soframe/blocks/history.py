"""At which steps factors took statistics, and from which steps their second-order data come."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_EVENTS = ("statistics", "solves")


class History:
    """What `soframe.Preconditioner.metrics` counts staleness from: the same on every rank.

    It is handed on from placement to placement, so that a model which changes keeps it, and is part
    of the state.

    Attributes:
        step: The step under way or, between steps, the last one; None before the first.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._at: dict[str, dict[tuple[str, str], int]] = {kind: {} for kind in _EVENTS}

    def begin(self, step: int) -> None:
        """Begin a step.

        Args:
            step: Completed steps.
        """
        self.step = step

    def took_statistics(self, block: str, factors: Iterable[str]) -> None:
        """Take note that statistics of this step have entered running factors.

        Args:
            block: The block's name.
            factors: The factors' names.
        """
        if self.step is not None:
            self._at["statistics"].update({(block, name): self.step for name in factors})

    def solved(self, block: str, factor: str, since: int | None) -> None:
        """Take note that second-order data of a factor are in use from now on.

        Args:
            block: The block's name.
            factor: The factor's name.
            since: The step whose running factor was solved, which is earlier than this one where it
                was solved in the background.
        """
        if since is not None:
            self._at["solves"][block, factor] = since

    def statistics_age(self, block: str, factor: str) -> int | None:
        """Return how many steps ago a factor took statistics; None if that is not known.

        Args:
            block: The block's name.
            factor: The factor's name.

        Returns:
            0 where it was in the last step.
        """
        return self._age("statistics", block, factor)

    def solve_age(self, block: str, factor: str) -> int | None:
        """Return how old the second-order data of a factor are; None if that is not known.

        Args:
            block: The block's name.
            factor: The factor's name.

        Returns:
            Steps since that from whose running factor they were made: 0 for the last one.
        """
        return self._age("solves", block, factor)

    def _age(self, kind: str, block: str, factor: str) -> int | None:
        at = self._at[kind].get((block, factor))
        return None if at is None or self.step is None else self.step - at

    # -- state ------------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return what `load` needs: kind -> block -> factor -> step."""
        by_kind: dict[str, dict[str, dict[str, int]]] = {kind: {} for kind in _EVENTS}
        for kind, steps in self._at.items():
            for (block, factor), step in steps.items():
                by_kind[kind].setdefault(block, {})[factor] = step
        return by_kind

    def load(self, state: Mapping[str, Any], step: int) -> None:
        """Go on from a state; ages that it does not have are not known.

        Args:
            state: What `state` returned, or nothing.
            step: Completed steps.
        """
        self.step = step - 1 if step > 0 else None
        self._at = {
            kind: {
                (block, factor): at
                for block, factors in state.get(kind, {}).items()
                for factor, at in factors.items()
            }
            for kind in _EVENTS
        }
