"""What the ranks compare before they trust each other's collectives.

A rank whose model, choices or settings differ would enter other collectives than its peers, and
all would wait for ever. So the ranks exchange digests first, and a rank that cannot even start
says so before it raises.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import zip_longest
from typing import TypeVar

import torch
from torch import Tensor

from soframe.comm.base import Backend
from soframe.registry import describe
from soframe.strategies.placement import Placement

_SIZE = hashlib.sha256().digest_size


UNLIKE = (
    "the names of what ranks compare differ, or the backend adds up inexactly: what its all_reduce "
    "and all_gather return must be the exact sum, and the exact bytes"
)
"""What differs where no value does."""

_TOLD = 8
"""How many differences between ranks a message names."""

STARTING = "building a Preconditioner"
"""What ranks are about to do when they first meet."""


def compare_ranks(
    backend: Backend, placement: Placement, settings: str, *, first: bool = True
) -> None:
    """Check that all ranks would execute the same placement under the same settings.

    Args:
        backend: The backend.
        placement: This rank's placement.
        settings: Everything else that has to be the same, as text, a setting in each line.
        first: Whether this is where the ranks first meet; otherwise they come from a step.

    Raises:
        ValueError: On every rank, if they would not, or if one of them cannot start.
    """
    problem = (
        "differs from rank 0's: models, skipped or frozen layers, methods or strategies are not "
        "the same on every rank (where ranks have the stages of a pipeline, pass pipeline=). This "
        "rank's:"
    )
    if others := compare_settings(backend, placement.digest, settings, first=first):
        raise ValueError(f"the placement of rank(s) {others} {problem}\n{placement}")


def compare_settings(
    backend: Backend, digest: bytes, settings: str, *, first: bool = True
) -> list[int]:
    """Check that all ranks have the same settings, and compare a digest of what else they have.

    Args:
        backend: The backend.
        digest: Of what else this rank has, 32 bytes.
        settings: As text, a setting in each line.
        first: Whether this is where the ranks first meet; otherwise they come from a step.

    Returns:
        The ranks whose digest differs from rank 0's.

    Raises:
        ValueError: On every rank, if settings differ where digests do not, or if a rank cannot
            start.
    """
    mine = digest + hashlib.sha256(settings.encode()).digest()
    digests = _exchange(backend, mine, "start", first=first)
    failed = [rank for rank, digest in enumerate(digests) if not any(digest)]
    if failed:
        texts = gather_texts(backend, "", "start")
        said = "; ".join(f"rank {rank}: {texts[rank]}" for rank in failed)
        raise ValueError(f"rank(s) {failed} could not start. {said}")
    if others := _differing(digests, slice(_SIZE)):
        return others
    if others := _differing(digests, slice(_SIZE, None)):
        everyones = [text.splitlines() for text in gather_texts(backend, settings, "start")]
        first_other = everyones[others[0]]
        differing = [
            f"rank {others[0]} has {theirs}, rank 0 has {ours}"
            for theirs, ours in zip_longest(first_other, everyones[0], fillvalue="nothing")
            if theirs != ours
        ]
        raise ValueError(
            f"the settings of rank(s) {others} differ from rank 0's; they must be the same on "
            f"every rank: {'; '.join(differing)}"
        )
    return []


def say_failed(backend: Backend, error: BaseException, *, first: bool = True) -> None:
    """Tell the ranks that wait in `compare_ranks` that this one cannot start, and why.

    Args:
        backend: The backend.
        error: This rank's error.
        first: See `compare_ranks`.
    """
    digests = _exchange(backend, bytes(2 * _SIZE), "start", first=first)
    if not all(any(digest) for digest in digests):
        gather_texts(backend, describe_error(error), "start")


def describe_error(error: BaseException) -> str:
    """Return an error in one line.

    Args:
        error: The error.
    """
    return f"{type(error).__name__}: {error}"


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
    mine = bytes(_SIZE) if state is None else hashlib.sha256(state.encode()).digest()
    digests = _exchange(backend, mine, "state")
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


def add_over_ranks(backend: Backend, numbers: Sequence[float], phase: str = "agree") -> list[float]:
    """Add up a few numbers over the ranks, in float64.

    Args:
        backend: The backend.
        numbers: This rank's, equally many on every rank.
        phase: The phase that they are counted under.

    Returns:
        The sums, the same on every rank.
    """
    vector = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    vector = vector.to(backend.wire_device(vector.device))
    backend.all_reduce(vector, phase).watch()
    sums: list[float] = vector.tolist()
    return sums


@dataclass(frozen=True)
class Poll:
    """What a rank says before each step; added up over ranks, what all of them say together.

    Every field is a number or a list of numbers, equally long on every rank, so that one collective
    carries them all.

    Attributes:
        failed: Whether this rank is about to raise an error instead of taking the step.
        changed: Whether parameters or modules of the model have changed.
        bad_gradient: Whether a gradient is not finite.
        large: Whether gradients are so large that products with them may not be finite.
        bad_statistics: Whether the statistics of the window are not finite.
        common: The fingerprint of what has to be the same on every rank, see `fingerprint`.
        weights: What this rank's statistics weigh.
        present: Which gradients this rank has, where gradients are local.
        rebuilt: Under a pipeline, whether any stage's model has changed.
        waits: Whether this rank still solves in the background, where that matters.
        reached: Which blocks its backward passes have reached, see `soframe.gradients.effect`.
    """

    failed: float
    changed: float
    bad_gradient: float
    large: float
    bad_statistics: float
    common: Sequence[float]
    weights: Sequence[float] = ()
    present: Sequence[float] = ()
    rebuilt: Sequence[float] = ()
    waits: Sequence[float] = ()
    reached: Sequence[float] = ()

    def over_ranks(self, backend: Backend) -> Poll:
        """Return the sums over all ranks, which are the same on every rank.

        Args:
            backend: The backend.
        """
        mine = {field.name: getattr(self, field.name) for field in fields(self)}
        flat: list[float] = []
        for value in mine.values():
            flat += [value] if isinstance(value, float) else value
        sums = iter(add_over_ranks(backend, flat))
        added = {
            name: next(sums) if isinstance(value, float) else [next(sums) for _ in value]
            for name, value in mine.items()
        }
        return Poll(**added)  # type: ignore[arg-type]  # each as it was


def fingerprint(common: Mapping[str, object]) -> list[float]:
    """Return two numbers whose sums over ranks tell whether all ranks have the same.

    A hash h of 20 bits and its square: by the inequality of Cauchy and Schwarz W times the sum of
    squares equals the square of the sum only where all W ranks have the same h. Both sums are exact
    in float64 for up to 4096 ranks.

    Args:
        common: What has to be the same, by name.

    Returns:
        ``[h, h^2]``.
    """
    digest = hashlib.sha256(describe(dict(common)).encode()).digest()
    number = int.from_bytes(digest[:4], "big") % 2**20
    return [float(number), float(number**2)]


def require_common(
    backend: Backend,
    common: Mapping[str, object],
    sums: Sequence[float],
    hints: Mapping[str, str] | None = None,
) -> None:
    """Check that what has to be the same on every rank is the same.

    Args:
        backend: The backend.
        common: What has to be the same, by name, as this rank has it.
        sums: The sums over ranks of its `fingerprint`.
        hints: What to do where something differs, by what its name begins with.

    Raises:
        ValueError: On every rank, if it is not; the message names what differs and the ranks.
    """
    total, squares = map(int, sums)
    # On paper there are no other ranks, and sums are this rank's own.
    if backend.on_paper or squares * backend.world_size == total**2:
        return
    mine = {name: describe(value) for name, value in common.items()}
    everyones = [json.loads(text) for text in gather_texts(backend, json.dumps(mine))]
    problems = {}
    for name in mine:
        values = [said.get(name) for said in everyones]
        others = [rank for rank, value in enumerate(values) if value != values[0]]
        if others:
            problems[name] = f"rank(s) {others} have {values[others[0]]}, rank 0 has {values[0]}"
    told = [f"{name}: {problem}" for name, problem in problems.items()]
    if len(told) > _TOLD:
        told[_TOLD:] = [f"and {len(told) - _TOLD} more"]
    hints = hints or {}
    advice = [hint for start, hint in hints.items() if any(n.startswith(start) for n in problems)]
    differs = "; ".join(told or [UNLIKE])
    error = ValueError(
        "these must be the same on every rank, and are not; no gradient was changed. "
        + ". ".join([differs, *advice])
    )
    told_all(error)
    raise error


def require_no_failure(backend: Backend, error: BaseException | None, failed: float) -> None:
    """Raise on every rank if one is about to raise, so that none waits for it in vain.

    Args:
        backend: The backend.
        error: This rank's, if it has one.
        failed: The number of ranks that have one.

    Raises:
        BaseException: This rank's own error.
        RuntimeError: On the other ranks; the message has the first error of each rank.
    """
    if failed == 0:
        return
    text = "" if error is None else describe_error(error)
    texts = gather_texts(backend, text)
    if error is None:
        said = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(texts) if text)
        error = RuntimeError(f"another rank cannot take this step, so none does. {said}")
    told_all(error)
    raise error


_TOLD_ALL = "Every rank has raised for this."

_Raised = TypeVar("_Raised", bound=BaseException)


def told_all(error: _Raised) -> _Raised:
    """Return an error, marked as one for which every rank raises: nobody waits for this one.

    Args:
        error: The error.
    """
    if not _is_told(error):
        error.add_note(_TOLD_ALL)
    return error


def _is_told(error: BaseException) -> bool:
    return _TOLD_ALL in getattr(error, "__notes__", ())


@contextmanager
def not_unnoticed(*backends: Backend | None) -> Iterator[None]:
    """Let the other ranks learn of what one raises between collectives that all of them enter.

    Nothing travels for it: a rank that raises leaves a note, and those that wait for it read that.

    Args:
        *backends: Those that the ranks wait in; None for none.

    Yields:
        Nothing.
    """
    try:
        yield
    except Exception as error:  # whatever it is: the other ranks wait, and must be told
        if not _is_told(error):
            for backend in backends:
                if backend is not None:
                    backend.give_up(describe_error(error))
        raise


def gather_texts(backend: Backend, mine: str, phase: str = "agree") -> list[str]:
    """Return every rank's text; every rank must call.

    Args:
        backend: The backend.
        mine: This rank's text.
        phase: The phase that it is counted under.

    Returns:
        One text for each rank.
    """
    data = mine.encode()
    length = torch.tensor([len(data)], device="cpu")
    length = length.to(backend.wire_device(length.device))
    lengths = [int(each) for each in backend.all_gather(length, phase)]
    padded = data.ljust(max(1, *lengths), b"\0")
    texts = _exchange(backend, padded, phase)
    return [text[:size].decode() for text, size in zip(texts, lengths, strict=True)]


def add_up(backend: Backend, tensor: Tensor) -> Tensor:
    """Add up a small tensor over the ranks.

    Args:
        backend: The backend.
        tensor: This rank's; it may be overwritten.

    Returns:
        The sum, on the tensor's device.
    """
    with backend.phases("agree"):
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


def _exchange(backend: Backend, mine: bytes, phase: str, *, first: bool = False) -> list[bytes]:
    tensor = torch.tensor(list(mine), dtype=torch.uint8, device="cpu")
    tensor = tensor.to(backend.wire_device(tensor.device))
    if first:
        return [bytes(t.tolist()) for t in backend.assemble(tensor, phase, STARTING)]
    return [bytes(t.tolist()) for t in backend.all_gather(tensor, phase)]


def _differing(digests: Sequence[bytes], where: slice) -> list[int]:
    return [rank for rank, digest in enumerate(digests) if digest[where] != digests[0][where]]
