"""Agreement of all ranks after the passes of a step: the loss, errors, and common settings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from soframe.comm import Backend
from soframe.comm.agreement import (
    add_over_ranks,
    fingerprint,
    require_common,
    require_no_failure,
)

GRADIENTS = "the sum of the bits of all gradients"

HINT = (
    ". If it is the gradients: every rank must have the mean of all ranks' gradients, so wrap the "
    "model in DistributedDataParallel, and let the closure call the wrapper"
)

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def agree(
    backend: Backend,
    loss: float,
    error: Exception | None,
    *,
    common: Callable[[], Mapping[str, object]],
    further: Sequence[float] = (),
) -> tuple[float, list[float]]:
    """Return the mean loss over ranks, and the sums of further numbers; if one rank raises, all do.

    ``error`` is this rank's error, or None; ``common`` returns by name the values that must be
    equal on every rank.
    """
    mine: Mapping[str, object] = {}
    try:
        mine = common()
    except Exception as raised:  # the other ranks wait in the all-reduce below
        error = error or raised
    told = [loss, float(error is not None), *fingerprint(mine)]
    sums = add_over_ranks(backend, [*told, *further])
    require_no_failure(backend, error, sums[1])
    require_common(backend, mine, sums[2 : len(told)], HINT)
    return sums[0] / backend.world_size, sums[len(told) :]


def gradients_in_common(backend: Backend, gradients: Sequence[Tensor]) -> dict[str, object]:
    """Return a checksum of gradients that all ranks must share; nothing on a single rank."""
    if backend.world_size == 1 or backend.on_paper:
        return {}
    bits = (g.contiguous().view(_INTEGERS[g.itemsize]).sum(dtype=torch.int64) for g in gradients)
    return {GRADIENTS: sum(int(one) for one in bits)}
