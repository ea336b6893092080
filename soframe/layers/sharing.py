"""Inputs that several layers have in common: the queries, keys and values of attention, for one.

Their moment is the same matrix, and their calls complete one after another. So it is remembered
which input the last sum was made of; a layer that was called with the very same tensor takes it
over, for the price of an addition. No input is kept for that and nothing computed: it works where
the first sum consists of that call alone, as it does with one backward pass per step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from soframe.layers.base import LayerHelper


def content(tensors: Sequence[Tensor]) -> Hashable:
    """Return a key of the memory and version of tensors, valid while `memory` of them is held."""
    return tuple(
        (x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.stride(), x.dtype, x._version)
        for x in tensors
    )


def memory(tensors: Sequence[Tensor]) -> tuple[StorageWeakRef, ...]:
    """Return weak references to the storages, so that a freed address is not taken for theirs."""
    return tuple(StorageWeakRef(x.untyped_storage()) for x in tensors)


@dataclass(frozen=True)
class _Known:
    """A sum of one call."""

    key: Hashable
    memory: tuple[StorageWeakRef, ...]  # so that the key is nobody else's
    total: Tensor
    version: int
    scale: float


class SharedInputs:
    """Remembers the sum of the last call's inputs."""

    def __init__(self) -> None:
        self._known: _Known | None = None

    def add(
        self,
        helper: LayerHelper,
        inputs: tuple[Tensor, ...],
        output_rows: Tensor,
        total: Tensor | None,
        scale: float,
    ) -> Tensor:
        """Compute ``helper.input_moment``, or copy it from the call before; scale is not zero."""
        input_key = helper.input_key()
        if input_key is None:
            return helper.input_moment(inputs, output_rows, total, scale)
        key = (input_key, content(inputs), output_rows.dtype, output_rows.shape[:3])
        known = self._known
        # Whatever was written since then, to the input or to the sum, has changed its version.
        if known is not None and known.key == key and known.total._version == known.version:
            ratio = scale / known.scale
            return known.total * ratio if total is None else total.add_(known.total, alpha=ratio)
        self._known = None
        fresh = total is None
        total = helper.input_moment(inputs, output_rows, total, scale)
        if fresh:
            self._known = _Known(key, memory(inputs), total, total._version, scale)
        return total

    def forget(self) -> None:
        """Drop the last call."""
        self._known = None
