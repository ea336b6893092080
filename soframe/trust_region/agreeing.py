"""What the ranks of a trust region agree on after their passes: a loss, and what is one for all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from soframe.blocks.home import GradientHome
from soframe.comm import Backend
from soframe.comm.agreement import (
    add_over_ranks,
    fingerprint,
    require_common,
    require_no_failure,
)

GRADIENTS = "the sum of the bits of all gradients"
"""The name under which gradients are compared."""

HINT = (
    ". If it is the gradients: every rank must have the mean of all ranks' gradients, so wrap the "
    "model in DistributedDataParallel, and let the closure call the wrapper"
)

_OWN = 4
"""Numbers that come first: the loss, whether a rank raises, and a fingerprint."""


def agree(
    backend: Backend,
    loss: float,
    error: Exception | None,
    *,
    common: Callable[[], Mapping[str, object]],
    further: Sequence[float] = (),
) -> tuple[float, list[float]]:
    """Agree with all ranks on a loss, on who raises, and on what must be the same.

    Args:
        backend: The backend.
        loss: This rank's.
        error: What this rank is about to raise.
        common: Returns what must be the same, by name; what it raises is told to all, too.
        further: Numbers to be added up over ranks.

    Returns:
        The mean loss, and the sums of the further numbers.

    Raises:
        Exception: On every rank: the error of this one, or that another has one, or what differs.
    """
    mine: Mapping[str, object] = {}
    try:
        mine = common()
    except Exception as raised:  # whatever it is: the other ranks wait, and must be told
        error = error or raised
    sums = add_over_ranks(backend, [loss, float(error is not None), *fingerprint(mine), *further])
    require_no_failure(backend, error, sums[1])
    require_common(backend, mine, sums[2:_OWN], HINT)
    return sums[0] / backend.world_size, sums[_OWN:]


def gradients_in_common(
    backend: Backend, home: GradientHome, parameters: Sequence[nn.Parameter]
) -> dict[str, object]:
    """Return what ranks with the same gradients have in common; nothing where there is one rank.

    Args:
        backend: The backend.
        home: Where the gradients live.
        parameters: The parameters, after the backward passes.
    """
    if backend.world_size == 1 or backend.on_paper:
        return {}
    dense = [g.to_dense() if g.is_sparse else g for g in home.of(parameters)]
    return {GRADIENTS: total_of_bits(dense)}


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def total_of_bits(tensors: Sequence[Tensor]) -> int:
    """Return the sum of the elements of dense tensors, their bits read as integers."""
    sums = [_sum_of_bits(tensor) for tensor in tensors]
    by_device = [[one for one in sums if one.device == d] for d in {one.device for one in sums}]
    return sum(sum(torch.stack(group).tolist()) for group in by_device)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    """Return a scalar int64, which may have overflown, on the tensor's device."""
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    flat = plain.detach().contiguous().reshape(-1)
    return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)
