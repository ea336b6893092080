"""Readouts of the trust region's steps: as data, as TensorBoard's scalars, and as a plot.

``TrustRegion(..., on_step=...)`` calls with a `Readout` after each step::

    history = soframe.trust_region.History()
    optimizer = soframe.TrustRegion(model, loss="mse", on_step=history)
    ...
    history.plot("run.png")
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from soframe.diagnostics.logger import Writer


@dataclass(frozen=True)
class Readout:
    """Inputs, predictions and results of one step.

    Attributes:
        step: Completed steps before it.
        loss: Before the update, over all ranks.
        damping: The policy's.
        preconditioner_dampings: One for each layer group.
        coefficients: The coefficients of the directions in the update; empty without an update.
        directions: The kinds of these directions: ``"preconditioned"``, ``"steepest descent"`` of
            parameters without a block, or ``"last update"``; one for each layer group.
        predicted: The predicted change of the objective; None without an update.
        change: The measured change in the step that was judged: this one, or with ``full_batch``
            the one before; None if none was judged.
        ratio: ``change`` over the predicted change.
        undone: The reason why an update was undone, or none was made; None otherwise.
        notes: Further messages.
    """

    step: int
    loss: float
    damping: float
    preconditioner_dampings: tuple[float, ...] = ()
    coefficients: tuple[float, ...] = ()
    predicted: float | None = None
    change: float | None = None
    ratio: float | None = None
    undone: str | None = None
    notes: tuple[str, ...] = ()
    directions: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the readout as plain data, for JSON or a table."""
        return asdict(self)

    def line(self) -> str:
        """Return the readout in one line, for a log."""
        numbers = {"change": self.change, "predicted": self.predicted, "ratio": self.ratio}
        parts = [f"step {self.step}: loss {self.loss:.6g}"]
        for name, value in numbers.items():
            if value is not None:
                parts.append(f"{name} {value:.3g}")
        parts.append(f"damping {self.damping:.3g}")
        if self.undone:
            parts.append(f"undone: {self.undone}")
        parts += self.notes
        return ", ".join(parts)


PRECONDITIONED, STEEPEST, LAST = "preconditioned", "steepest descent", "last update"
"""The names of directions: of blocks, of parameters without one, and the momentum."""

OnStep = Callable[[Readout], object]
"""Called with the readout of each step, on every rank."""


class History(list[Readout]):
    """Keeps the readouts of all steps, in a list; pass it as ``on_step``."""

    def __call__(self, readout: Readout) -> None:
        """Append a readout."""
        self.append(readout)

    def plot(self, path: str | Path) -> None:
        """Write a figure: losses, dampings, ratios and undone updates over the steps.

        Args:
            path: The file, of a format that matplotlib writes.

        Raises:
            ImportError: If matplotlib is not installed.
        """
        try:
            figures: Any = importlib.import_module("matplotlib.figure")
        except ImportError as error:
            raise ImportError("History.plot needs matplotlib: pip install matplotlib") from error
        figure = figures.Figure(figsize=(7, 7.5), layout="constrained")
        loss, damping, ratio = figure.subplots(3, sharex=True)
        self._plot_losses(loss)
        _plot(damping, self, "damping", label="of the model")
        self._plot_dampings(damping)
        damping.set(ylabel="damping", yscale="log")
        judged = [n for n in self if n.ratio is not None and math.isfinite(n.ratio)]
        _plot(ratio, judged, "ratio", ".")
        ratio.set(ylabel="reduction ratio", xlabel="step", ylim=(-1.0, 3.0))
        for axes in (loss, damping):
            axes.legend(fontsize="small")
        figure.savefig(path)

    def _plot_losses(self, axes: Any) -> None:
        undone = [readout for readout in self if readout.undone is not None]
        is_positive = all(readout.loss > 0 for readout in self)
        _plot(axes, self, "loss")
        _plot(axes, undone, "loss", "rx", label="undone")
        axes.set(ylabel="loss", yscale="log" if is_positive else "linear")

    def _plot_dampings(self, axes: Any) -> None:
        """Draw the preconditioner's dampings, a curve for each layer group."""
        curves: list[tuple[list[int], list[float]]] = []
        for readout in self:
            for number, damping in enumerate(readout.preconditioner_dampings):
                if number == len(curves):
                    curves.append(([], []))
                steps, dampings = curves[number]
                steps.append(readout.step)
                dampings.append(damping)
        for number, (steps, dampings) in enumerate(curves):
            label = f"of the preconditioner, layer group {number}"
            axes.plot(steps, dampings, "--", label=label)


def _plot(axes: Any, readouts: Sequence[Readout], name: str, *style: str, **options: str) -> None:
    """Draw an attribute of readouts over the steps."""
    values = [getattr(readout, name) for readout in readouts]
    axes.plot([readout.step for readout in readouts], values, *style, **options)


class Scalars:
    """Writes readouts as scalars of TensorBoard; pass it as ``on_step``, on one rank only.

    Args:
        writer: A ``SummaryWriter``.
        prefix: The prefix of every tag.
    """

    def __init__(self, writer: Writer, prefix: str = "trust_region/") -> None:
        self._writer, self._prefix = writer, prefix

    def __call__(self, readout: Readout) -> None:
        """Write the numbers of a step, and 1 as ``undone`` if an update was undone."""
        scalars: dict[str, float | None] = {}
        for name in ("loss", "damping", "predicted", "change", "ratio"):
            scalars[name] = getattr(readout, name)
        scalars["undone"] = float(readout.undone is not None)
        for name in ("preconditioner_dampings", "coefficients"):
            for number, value in enumerate(getattr(readout, name)):
                scalars[f"{name}/{number}"] = value
        for name, value in scalars.items():
            if value is not None and math.isfinite(value):
                self._writer.add_scalar(self._prefix + name, value, readout.step)
