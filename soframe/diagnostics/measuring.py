"""The measurements of steps, kept until `metrics` is called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from soframe.blocks.placed import PlacedBlocks
from soframe.diagnostics import metrics
from soframe.diagnostics.metrics import Spectra, Taken
from soframe.tracing.phases import Phases


class Measuring:
    """Measures norms and the times of phases if enabled; off by default."""

    def __init__(self, phases: Phases) -> None:
        self._phases, self._timed_from = phases, 0
        self.norms = False  # of the coming step
        self.last: Taken | None = None

    def choose(
        self, *, norms: bool | None, times: bool | None, placed: PlacedBlocks, steps: int
    ) -> None:
        """Choose the measurements from the next step on; None leaves a choice as it is."""
        if norms is not None:
            self.norms = norms
        if times is not None:
            self._timed_from = steps
            if times:
                devices = {block.device.type for block, _ in placed}
                self._phases.start_clock(device="cuda" in devices)
            else:
                self._phases.stop_clock()

    def note(self, taken: Taken | None) -> None:
        """Keep a step; None to forget the last one."""
        self.last = taken

    def redamped(self, damping: float) -> None:
        """Update the last step, whose updates were recomputed with another damping."""
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
            timed_steps=timed,
            seconds=self._phases.seconds(),
            spectra=spectra,
            all_ranks=all_ranks,
        )
