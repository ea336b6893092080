"""The outputs of a model that show the samples of a batch, ``[samples, ...]``.

A backward pass that starts with other gradients of these outputs, zeros or powers of two for each
sample, tells samples apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from soframe.blocks import sharding
from soframe.capture.root import common, tensors_in


def heads_in(outputs: Any) -> Sequence[Tensor]:
    """Return the outputs that have a graph, of a dict or dataclass, too."""
    heads = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    if any(map(sharding.is_distributed, heads)):
        raise ValueError(
            "loss(model, batch) returns outputs that are DTensors: return output.full_tensor(), "
            "and make the loss of it"
        )
    return heads


def samples_in(heads: Sequence[Tensor]) -> int:
    """Return the number of samples of heads ``[samples, ...]``; 0 for others."""
    return common({len(head) for head in heads}) or 0


@contextmanager
def changed(heads: Sequence[Tensor], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let backward passes go on with other gradients of these outputs."""
    # A change is made twice where an output is made of another one.
    handles = [head.register_hook(change) for head in heads]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
