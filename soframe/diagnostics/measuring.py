"""What steps measure, and what is remembered of the last one, until `metrics` is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from soframe.blocks.placed import PlacedBlocks
from soframe.checks.numbers import require_flag
from soframe.diagnostics import metrics
from soframe.diagnostics.metrics import Spectra, Taken, Timing
from soframe.tracing.phases import Phases


class Measuring:
    """Measures what it was told to, in each step; by default nothing.

    Args:
        phases: The phases of this rank, which may be timed.

    Attributes:
        norms: Whether the coming step takes norms.
        last: The last step as it was taken; None before the first.
    """

    def __init__(self, phases: Phases) -> None:
        self._phases, self._timed_from = phases, 0
        self.norms = False
        self.last: Taken | None = None

    def choose(
        self, *, norms: bool | None, times: bool | None, placed: PlacedBlocks, steps: int
    ) -> None:
        """Choose what is measured from the next step on; see `soframe.Preconditioner.measure`.

        Args:
            norms: Whether norms are taken; None to leave it so.
            times: Whether phases are timed, from zero; None to leave it so.
            placed: All blocks; their devices are timed too.
            steps: Completed steps.
        """
        if norms is not None:
            require_flag("norms", norms)
            self.norms = norms
        if times is not None:
            require_flag("times", times)
            self._timed_from = steps
            if times:
                devices = {block.device.type for block, _ in placed}
                self._phases.start_clock(device="cuda" in devices)
            else:
                self._phases.stop_clock()

    def note(self, taken: Taken | None) -> None:
        """Remember a step; None to forget the last one, which was another run's."""
        self.last = taken

    def redamped(self, damping: float) -> None:
        """Remember that the last step's directions were made once more, with another damping."""
        if self.last is not None:
            self.last = replace(self.last, damping=damping, norms=None)

    def collect(
        self,
        placed: PlacedBlocks,
        *,
        steps: int,
        counters: Mapping[str, int],
        spectra: Spectra,
        all_ranks: bool,
    ) -> dict[str, Any]:
        """Return the metrics; see `soframe.diagnostics.metrics.collect`."""
        timed = steps - self._timed_from if self._phases.timed else None
        return metrics.collect(
            placed,
            steps=steps,
            taken=self.last,
            counters=counters,
            timing=Timing(timed, self._phases.seconds()),
            spectra=spectra,
            all_ranks=all_ranks,
        )
