"""The window of a block: what the calls since the last step have added up to on this rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from soframe.methods.base import Addend
from soframe.methods.scaling import Counts


@dataclass(frozen=True)
class Cost:
    """What the statistics of a block cost, as seen in the last window in which ranks asked.

    Attributes:
        rows: The rows that they were made of, over all ranks; 0 if nobody has asked.
        input_of: The name of the first block that was called with the same input.
    """

    rows: int = 0
    input_of: str = ""


class Window:
    """The sums and counts of a block since the last step.

    Attributes:
        sums: The statistics, by factor: of matrices the lower triangles.
        counts: What the sums count.
        gathered: The factors that take statistics in this window, if the block does.
        rows: How many rows are drawn for the sums, whether this rank contributes to them or not.
        cost: What the statistics cost; it outlives the window.

    Args:
        gathered: See the attribute.
    """

    def __init__(self, gathered: frozenset[str]) -> None:
        self.cost = Cost()
        self.begin(gathered)

    def begin(self, gathered: frozenset[str]) -> None:
        """Begin anew, with nothing.

        Args:
            gathered: The factors that take statistics, if the block does.
        """
        self.sums: dict[str, Tensor] = {}
        self.counts, self.rows = Counts(), 0
        self.gathered = gathered

    def add(self, name: str, moment: Tensor | Addend, multiplier: float) -> None:
        """Add what a call brings to the sum of a factor.

        Args:
            name: The factor.
            moment: A tensor of the factor's shape, or what adds to a sum in place.
            multiplier: What it is multiplied by.
        """
        total = self.sums.get(name)
        if not isinstance(moment, Tensor):
            self.sums[name] = moment(total, multiplier)
        elif total is None:
            self.sums[name] = moment * multiplier
        else:
            total.add_(moment, alpha=multiplier)

    def spend(self, rows: int) -> None:
        """Count the rows that are drawn of a call.

        Args:
            rows: How many.
        """
        self.rows += rows

    def take(self, name: str) -> Tensor | None:
        """Return the sum of a factor, which the window has no longer; None where it has none.

        Args:
            name: The factor.
        """
        return self.sums.pop(name, None)

    def drop(self, name: str) -> None:
        """Let a factor take no statistics in what is left of the window, and forget what it took.

        Args:
            name: The factor.
        """
        self.gathered -= {name}
        self.sums.pop(name, None)

    def learn(self, cost: Cost) -> None:
        """Keep what the statistics cost.

        Args:
            cost: The cost, the same on every rank.
        """
        self.cost = cost

    def continue_from(self, before: Window, keep: Callable[[str, Tensor], Tensor]) -> None:
        """Go on with the window of a former block of the same parameters.

        Args:
            before: Its window, which is used up.
            keep: Returns what is left of a factor's sum, given its name and the sum.
        """
        self.counts, self.rows = before.counts, before.rows
        self.gathered, self.cost = before.gathered, before.cost
        self.sums = {name: keep(name, total) for name, total in before.sums.items()}
