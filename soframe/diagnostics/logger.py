"""Metrics for loggers: scalars every few steps, for TensorBoard or for a callback."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

from soframe.checks.values import require_integer
from soframe.diagnostics.metrics import scalars


@runtime_checkable
class Writer(Protocol):
    """A writer like `torch.utils.tensorboard.SummaryWriter`."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Write one number under a name."""


class ScalarLogger:
    """Writes the metrics of a preconditioner every few steps.

    ::

        logger = ScalarLogger(preconditioner, SummaryWriter("runs/one"), every=50)
        for inputs, targets in batches:
            ...
            preconditioner.step()
            optimizer.step()
            logger.step()

    The preconditioner then times its phases, and measures norms in the logged steps. If ``every``
    is a multiple of the interval of solves, solves have the same age in all logged steps: choose
    another number, such as 49, to see all ages.

    Args:
        source: A `soframe.Preconditioner`, or an optimizer that has one (`soframe.Optimizer`,
            `soframe.TrustRegion`).
        writer: An object with ``add_scalar(name, number, step)``; or a function of scalars by name
            and the step, as ``lambda scalars, step: run.log(scalars, step=step)``. None on ranks
            that do not write.
        every: Steps between two logged ones.
        spectra: Whether factors are decomposed at every logged step, see ``metrics``.
        all_ranks: Whether ranks exchange their metrics; then every rank has to call `step`.
            Otherwise the metrics of blocks that the writing rank does not hold are omitted.
        rank: The rank that writes. On the others `step` has no effect unless ``all_ranks`` is set.
        prefix: The prefix of names.

    Raises:
        ValueError: If ``rank`` does not exist, or ``every`` is no positive integer.
        TypeError: If ``writer`` is neither, on the rank that writes.
    """

    def __init__(
        self,
        source: Any,
        writer: Writer | Callable[[Mapping[str, float], int], object] | None,
        *,
        every: int = 50,
        spectra: bool = False,
        all_ranks: bool = False,
        rank: int = 0,
        prefix: str = "soframe/",
    ) -> None:
        self._measured = source if hasattr(source, "measure") else source.preconditioner
        self._source = source if hasattr(source, "metrics") else self._measured
        self._writer, self._every, self._prefix = writer, every, prefix
        self._spectra, self._all_ranks = spectra, all_ranks
        backend = self._measured.backend
        require_integer("ScalarLogger: every", every, 1)
        if rank not in range(backend.world_size):
            raise ValueError(f"rank={rank!r}, of {backend.world_size} rank(s)")
        self._writes = backend.rank == rank
        if self._writes and not isinstance(writer, Writer) and not callable(writer):
            raise TypeError(
                f"writer must have add_scalar(name, number, step), or be a function of scalars by "
                f"name and the step, not {writer!r}"
            )
        self._takes_part = self._writes or all_ranks
        if self._takes_part:
            self._measured.measure(norms=self._is_due(1), times=True)

    def _is_due(self, ahead: int) -> bool:
        """Return whether the step ``ahead`` of the last one is logged."""
        return bool((self._measured.steps + ahead) % self._every == 0)

    def step(self) -> None:
        """Write if the step is due; call it after every step, when parameters have moved.

        Raises:
            RuntimeError: See `soframe.Preconditioner.metrics`.
        """
        if not self._takes_part:
            return
        if self._is_due(0):
            metrics = self._source.metrics(spectra=self._spectra, all_ranks=self._all_ranks)
            if self._writes:
                self._write(scalars(metrics), self._measured.steps)
            # Times are counted from the last writing.
            self._measured.measure(times=True)
        self._measured.measure(norms=self._is_due(1))

    def _write(self, numbers: Mapping[str, float], step: int) -> None:
        named = {f"{self._prefix}{name}": number for name, number in numbers.items()}
        if isinstance(self._writer, Writer):
            for name, number in named.items():
                self._writer.add_scalar(name, number, step)
        elif callable(self._writer):
            self._writer(named, step)
