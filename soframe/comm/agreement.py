"""Agreement between ranks, so that they enter the same collectives and fail together.

At construction ranks compare a digest of model, placement and settings. Before each step one small
all-reduce sums their status; an error on one rank is then raised on all.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from soframe.comm.base import Backend
from soframe.registry import describe
from soframe.strategies.placement import Placement

_SIZE = hashlib.sha256().digest_size
_FAILED = bytes(2 * _SIZE)  # sent in place of digests

# -- at construction ---------------------------------------------------------------------------


def compare_ranks(backend: Backend, placement: Placement, settings: str) -> None:
    """Raise a ValueError on all ranks if placements or settings differ, or one cannot start."""
    if differing := compare_settings(backend, placement.digest, settings):
        raise ValueError(
            f"the placement of rank(s) {differing} differs from rank 0's: models, skipped or "
            f"frozen layers, methods or strategies are not the same on every rank (where ranks "
            f"have the stages of a pipeline, pass Distribution(pipeline=...)). This rank's:\n"
            f"{placement}"
        )


def compare_settings(backend: Backend, digest: bytes, settings: str) -> list[int]:
    """Return the ranks with another digest than rank 0's; raise if settings alone differ."""
    digests = _gather_bytes(backend, digest + hashlib.sha256(settings.encode()).digest(), "start")
    if failed := [rank for rank, digest in enumerate(digests) if digest == _FAILED]:
        texts = gather_texts(backend, "", "start")
        raise ValueError(f"rank(s) {failed} could not start. {by_rank(texts)}")
    if ranks := _differing([digest[:_SIZE] for digest in digests]):
        return ranks
    if ranks := _differing(digests):
        texts = gather_texts(backend, settings, "start")
        differing: list[str] = []
        lines = (texts[ranks[0]].splitlines(), texts[0].splitlines())
        for theirs, ours in zip_longest(*lines, fillvalue="nothing"):
            if theirs != ours:
                differing.append(f"rank {ranks[0]} has {theirs}, rank 0 has {ours}")
        raise ValueError(
            f"the settings of rank(s) {ranks} differ from rank 0's; they must be the same on "
            f"every rank: {'; '.join(differing)}"
        )
    return []


def say_failed(backend: Backend, error: BaseException) -> None:
    """Send this rank's error to the ranks in `compare_settings`, so that they raise too."""
    digests = _gather_bytes(backend, _FAILED, "start")
    if any(digest != _FAILED for digest in digests):
        gather_texts(backend, describe_error(error), "start")


def describe_error(error: BaseException | None) -> str:
    """Return an error and its notes in one line; nothing for None."""
    if error is None:
        return ""
    return "; ".join((f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())))


def agree_on_state(backend: Backend, state: str | None) -> None:
    """Raise if another rank has no state (None, it is about to raise) or another one, as text."""
    failed = bytes(_SIZE)
    digest = failed if state is None else hashlib.sha256(state.encode()).digest()
    digests = _gather_bytes(backend, digest, "state")
    if state is None:
        return
    if ranks := [rank for rank, digest in enumerate(digests) if digest == failed]:
        raise ValueError(
            f"rank(s) {ranks} could not load the state, so nothing was loaded on any rank; the "
            f"reason is in their own error"
        )
    if differing := _differing(digests):
        raise ValueError(
            f"rank(s) {differing} and rank 0 would continue from different states: load the same "
            f"checkpoint on every rank"
        )


# -- in each step ------------------------------------------------------------------------------


def fingerprint(common: Mapping[str, object]) -> list[float]:
    """Return ``[h, h^2]`` for a hash h of 20 bits, to be summed over ranks."""
    # By the Cauchy-Schwarz inequality W times the sum of squares equals the square of the sum only
    # if all W ranks have the same h. Both sums are exact in float64 for up to 4096 ranks.
    digest = hashlib.sha256(describe(dict(common)).encode()).digest()
    number = int.from_bytes(digest[:4], "big") % 2**20
    return [float(number), float(number**2)]


def require_common(
    backend: Backend, common: Mapping[str, object], sums: Sequence[float], hint: str = ""
) -> None:
    """Raise a ValueError on all ranks if their `fingerprint` differs, with names and ranks."""
    total, squares = map(int, sums)
    # A backend on paper has no other ranks; the sums are this rank's own.
    if backend.on_paper or squares * backend.world_size == total**2:
        return
    descriptions = {name: describe(value) for name, value in common.items()}
    of_ranks = gather_json(backend, descriptions)
    problems = []
    for name in descriptions:
        values = [descriptions_of_rank.get(name) for descriptions_of_rank in of_ranks]
        if ranks := _differing(values):
            problems.append(
                f"{name}: rank(s) {ranks} have {values[ranks[0]]}, rank 0 has {values[0]}"
            )
    differs = "; ".join(problems) or "the backend's all_reduce does not return the exact sum"
    raise ValueError(
        f"these must be the same on every rank, and are not; no gradient was changed. "
        f"{differs}{hint}"
    )


def require_no_failure(backend: Backend, error: BaseException | None, failed: float) -> None:
    """Raise on every rank if any is about to raise: its own error, or a RuntimeError with all."""
    if failed == 0:
        return
    texts = gather_texts(backend, describe_error(error))
    if error is not None:
        raise error
    raise RuntimeError(f"another rank cannot take this step, so none does. {by_rank(texts)}")


def require_all_ranks(backend: Backend, changes: float) -> None:
    """Raise a RuntimeError if a model has changed on some ranks only."""
    if changes < backend.world_size:
        raise RuntimeError(
            f"parameters were frozen, thawed or replaced on {changes:.0f} of "
            f"{backend.world_size} ranks: change the model on every rank alike"
        )


# -- small collectives -------------------------------------------------------------------------


def add_over_ranks(backend: Backend, numbers: Sequence[float], phase: str = "agree") -> list[float]:
    """Sum a few numbers over the ranks, in float64."""
    return start_sum(backend, numbers, torch.float64, phase)()


def start_sum(
    backend: Backend, numbers: Sequence[float], dtype: torch.dtype, phase: str = "agree"
) -> Callable[[], list[float]]:
    """Start to sum a few numbers over the ranks; return a function that waits for the sums."""
    if backend.world_size == 1:
        return lambda: list(numbers)
    vector = torch.tensor(numbers, dtype=dtype, device="cpu")
    vector = vector.to(backend.wire_device(vector.device))
    handle = backend.all_reduce(vector, phase)

    def finish() -> list[float]:
        handle.wait()
        sums: list[float] = vector.tolist()
        return sums

    return finish


def add_tensor_over_ranks(backend: Backend, tensor: Tensor) -> Tensor:
    """Return the sum of a small tensor over ranks, on its device; the input may be overwritten."""
    with backend.phases("agree"):
        total = tensor.to(backend.wire_device(tensor.device))
        backend.all_reduce(total, "agree").wait()
        return total.to(tensor.device)


def gather_texts(backend: Backend, text: str, phase: str = "agree") -> list[str]:
    """Return every rank's text; a collective of all ranks."""
    data = text.encode()
    length = torch.tensor([len(data)], device="cpu")
    length = length.to(backend.wire_device(length.device))
    lengths: list[int] = torch.cat(backend.all_gather(length, phase)).tolist()
    texts = _gather_bytes(backend, data.ljust(max(1, *lengths), b"\0"), phase)
    return [text[:size].decode() for text, size in zip(texts, lengths, strict=True)]


def gather_json(backend: Backend, value: object, phase: str = "agree") -> list[Any]:
    """Return every rank's value of plain data; a collective of all ranks."""
    return list(map(json.loads, gather_texts(backend, json.dumps(value), phase)))


def by_rank(texts: Sequence[str], of: str = "") -> str:
    """Return the texts that are not empty, in one line with their ranks."""
    return "; ".join(f"rank {rank}{of}: {text}" for rank, text in enumerate(texts) if text)


def _gather_bytes(backend: Backend, data: bytes, phase: str) -> list[bytes]:
    tensor = torch.tensor(list(data), dtype=torch.uint8, device="cpu")
    tensor = tensor.to(backend.wire_device(tensor.device))
    return [bytes(t.tolist()) for t in backend.all_gather(tensor, phase)]


def _differing(values: Sequence[object]) -> list[int]:
    """Return the ranks whose value differs from rank 0's."""
    return [rank for rank, value in enumerate(values) if value != values[0]]
