"""Which Fisher: whose output gradients make the statistics.

- ``"empirical"``: those of the loss itself, from the user's backward pass. It costs nothing, and is
  no curvature: it vanishes where the model fits its data (Kunstner et al., 2019).
- ``"monte-carlo"``: those at targets drawn from the model's predictive distribution, unbiased for
  the true Fisher. One more backward pass per sample, to the layers' outputs only.
- ``"type-2"``: the columns of a square root of the loss's Hessian, exact (Eschenhagen et al., 2023,
  section 2.1). One more backward pass per column.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from soframe.losses.base import Loss

Kind = Literal["empirical", "monte-carlo", "type-2"]
KINDS_OF_FISHER: tuple[Kind, ...] = ("empirical", "monte-carlo", "type-2")


@dataclass(frozen=True)
class Fisher:
    """A Fisher and what it needs.

    Attributes:
        kind: ``"empirical"``, ``"monte-carlo"`` or ``"type-2"``.
        loss: The loss; not needed by the empirical Fisher.
        samples: Samples per datum of the Monte-Carlo Fisher.
        generator: Their source of randomness; None for torch's.
    """

    kind: Kind = "empirical"
    loss: Loss | None = None
    samples: int = 1
    generator: torch.Generator | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS_OF_FISHER:
            names = ", ".join(map(repr, KINDS_OF_FISHER))
            raise ValueError(f"fisher must be one of {names}, not {self.kind!r}")
        if self.kind != "empirical" and self.loss is None:
            raise ValueError(f"fisher={self.kind!r} needs loss=, for example loss='cross-entropy'")
        if self.samples < 1:
            raise ValueError(f"Fisher: samples must be at least 1, not {self.samples}")

    def vectors(self, outputs: Tensor) -> Iterator[tuple[Tensor, float]]:
        """Yield gradients in the outputs whose weighted outer products add up to the Hessian.

        Args:
            outputs: ``[N, ...]``.

        Yields:
            ``[N, ...]`` and a weight. Exactly for type-2, in expectation for Monte-Carlo.
        """
        assert self.loss is not None
        detached = outputs.detach()
        if self.kind == "type-2":
            for column in self.loss.half_factor(detached):
                yield column, 1.0
            return
        for _ in range(self.samples):
            yield self.loss.sample(detached, self.generator), 1.0 / self.samples
