"""A cache of input moments: layers with a common input, such as Q, K and V, share its moment.

Their calls complete one after another. The cache holds the last sum and a key of its input tensor;
a layer with the same input adds the cached sum instead of computing it. No input is kept alive. The
cache is used if the first sum consists of that call alone, as with one backward pass per step.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from soframe.layers.base import Inputs, LayerHelper

Memory = tuple[StorageWeakRef, ...]
"""Weak references to the storages of tensors."""


def content(tensors: Sequence[Tensor]) -> tuple[Hashable, Memory]:
    """Return a key of the memory and version of tensors, valid while the references are held."""
    key: list[Hashable] = []
    memory: list[StorageWeakRef] = []
    for x in tensors:
        storage, place = x.untyped_storage(), (x.storage_offset(), x.shape, x.stride())
        key.append((storage._cdata, place, x.dtype, x._version))
        memory.append(StorageWeakRef(storage))  # so that a freed address is not a cache hit
    return tuple(key), tuple(memory)


@dataclass
class _Known:
    """The cached sum of one call."""

    key: Hashable
    memory: Memory  # keeps the addresses in the key from being reused
    total: Tensor
    version: int
    scale: float


@dataclass(eq=False)
class SharedInputs:
    """Caches the input moment of the last call."""

    _known: _Known | None = field(default=None, init=False)

    def add(
        self,
        helper: LayerHelper,
        inputs: Inputs,
        output_rows: Tensor,
        total: Tensor | None,
        scale: float,
        *,
        fresh: bool,
    ) -> Tensor:
        """Compute ``helper.input_moment``, or add the cached one; scale must not be zero.

        ``fresh`` is whether ``total`` is still empty: None or zeros.
        """
        input_key = helper.input_key()
        if input_key is None:
            return helper.input_moment(inputs, output_rows, total, scale)
        inputs_key, memory = content(inputs)
        key = (input_key, inputs_key, output_rows.dtype, output_rows.shape[:3])
        known, self._known = self._known, None
        # A write to the input or to the sum since then has changed its version.
        if known is not None and known.key == key and known.total._version == known.version:
            ratio = scale / known.scale
            if total is None:
                total = known.total * ratio
            else:
                total.add_(known.total, alpha=ratio)
            # Slices of one stack have one version, which this write has changed.
            if fresh or known.total._version == known.version:
                known.version, self._known = known.total._version, known
            return total
        total = helper.input_moment(inputs, output_rows, total, scale)
        if fresh:
            self._known = _Known(key, memory, total, total._version, scale)
        return total
