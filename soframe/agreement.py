"""What the ranks compare before they trust each other's collectives.

A rank whose model, choices or settings differ would enter other collectives than its peers, and
all would wait for ever. So the ranks exchange digests first, and a rank that cannot even start
says so before it raises.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from soframe.comm.base import Backend
from soframe.strategies.placement import Placement

_SIZE = hashlib.sha256().digest_size


def compare_ranks(backend: Backend, placement: Placement, settings: str) -> None:
    """Check that all ranks would execute the same placement under the same settings.

    Args:
        backend: The backend.
        placement: This rank's placement.
        settings: Everything else that has to be the same, as text.

    Raises:
        ValueError: On every rank, if they would not.
    """
    own = placement.digest + hashlib.sha256(settings.encode()).digest()
    digests = _exchange(backend, own, "start")
    failed = [rank for rank, digest in enumerate(digests) if not any(digest)]
    if failed:
        raise ValueError(f"rank(s) {failed} could not start; the reason is in their own error")
    where = slice(_SIZE)
    if others := _differing(digests, where):
        raise ValueError(
            f"the placement of rank(s) {others} differs from rank 0's: models, skipped or frozen "
            f"layers, methods or strategies are not the same on every rank. This rank's:\n"
            f"{placement}"
        )
    if others := _differing(digests, slice(_SIZE, None)):
        raise ValueError(
            f"the settings of rank(s) {others} differ from rank 0's; they must be the same on "
            f"every rank. This rank's:\n{settings}"
        )


def say_failed(backend: Backend) -> None:
    """Tell the ranks that wait in `compare_ranks` that this one cannot start.

    Args:
        backend: The backend.
    """
    _exchange(backend, bytes(2 * _SIZE), "start")


def agree_on_state(backend: Backend, state: str | None) -> None:
    """Check that all ranks are about to load the same state.

    Ranks that went on from different steps would enter different collectives.

    Args:
        backend: The backend.
        state: What must be the same on every rank, as text; None if this rank cannot load its
            state, and is about to raise.

    Raises:
        ValueError: On every rank that can load its own, if another cannot or has another.
    """
    own = bytes(_SIZE) if state is None else hashlib.sha256(state.encode()).digest()
    digests = _exchange(backend, own, "state")
    if state is None:
        return
    failed = [rank for rank, digest in enumerate(digests) if not any(digest)]
    if failed:
        raise ValueError(
            f"rank(s) {failed} could not load the state, so nothing was loaded on any rank; the "
            f"reason is in their own error"
        )
    if others := _differing(digests, slice(None)):
        raise ValueError(
            f"rank(s) {others} and rank 0 would go on from different states: load the same "
            f"checkpoint on every rank"
        )


def mean_over_ranks(backend: Backend, tensor: Tensor) -> Tensor:
    """Return the mean of a small tensor over the ranks.

    Args:
        backend: The backend.
        tensor: The tensor of this rank.
    """
    return add_up(backend, tensor.clone()) / backend.world_size


def add_over_ranks(backend: Backend, own: Sequence[float], phase: str = "agree") -> list[float]:
    """Add up a few numbers over the ranks, in float64.

    Args:
        backend: The backend.
        own: This rank's numbers, equally many on every rank.
        phase: The phase that they are counted under.

    Returns:
        The sums, the same on every rank.
    """
    vector = torch.tensor(own, dtype=torch.float64)
    vector = vector.to(backend.wire_device(vector.device))
    backend.all_reduce(vector, phase).wait()
    sums: list[float] = vector.tolist()
    return sums


def add_parts(backend: Backend, *parts: Sequence[float]) -> list[list[float]]:
    """Add up several lists of numbers over the ranks, all in one collective.

    Args:
        backend: The backend.
        *parts: This rank's, each as long on every rank.

    Returns:
        The sums of each, the same on every rank.
    """
    sums = iter(add_over_ranks(backend, [number for part in parts for number in part]))
    return [[next(sums) for _ in part] for part in parts]


def add_up(backend: Backend, tensor: Tensor) -> Tensor:
    """Add up a small tensor over the ranks.

    Args:
        backend: The backend.
        tensor: This rank's; it may be overwritten.

    Returns:
        The sum, on the tensor's device.
    """
    total = tensor.to(backend.wire_device(tensor.device))
    backend.all_reduce(total, "agree").wait()
    return total.to(tensor.device)


def require_all_ranks(backend: Backend, changes: float) -> None:
    """Check that a model has changed on every rank, if on any.

    Args:
        backend: The backend.
        changes: The number of ranks on which it has.

    Raises:
        RuntimeError: If it has on some only.
    """
    if changes < backend.world_size:
        raise RuntimeError(
            f"parameters were frozen, thawed or replaced on {changes:.0f} of "
            f"{backend.world_size} ranks: change the model on every rank alike"
        )


def _exchange(backend: Backend, own: bytes, phase: str) -> list[bytes]:
    tensor = torch.tensor(list(own), dtype=torch.uint8)
    tensor = tensor.to(backend.wire_device(tensor.device))
    return [bytes(t.tolist()) for t in backend.all_gather(tensor, phase)]


def _differing(digests: Sequence[bytes], where: slice) -> list[int]:
    return [rank for rank, digest in enumerate(digests) if digest[where] != digests[0][where]]
