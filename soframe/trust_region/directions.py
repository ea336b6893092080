"""The directions of a step, and what each of them is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soframe.derivatives.twice import Direction

PRECONDITIONED = "preconditioned"
"""What a readout calls the parts of the preconditioned gradient."""

STEEPEST = "steepest descent"
"""Those of parameters that no method has."""

LAST = "last update"
"""Those of the last update."""


@dataclass(frozen=True)
class NamedDirections:
    """Directions, and what a readout calls each of them.

    Attributes:
        tensors: k directions; each has a tensor for each parameter, or None where it leaves one.
        names: k names.
    """

    tensors: Sequence[Direction] = ()
    names: Sequence[str] = ()

    def __add__(self, further: NamedDirections) -> NamedDirections:
        """Return these and further ones, in this order."""
        return NamedDirections([*self.tensors, *further.tensors], [*self.names, *further.names])

    def without_last(self) -> NamedDirections:
        """Return those that are not of the last update, which come at the end."""
        count = sum(name != LAST for name in self.names)
        return NamedDirections(self.tensors[:count], self.names[:count])
