"""Checks of a backend's collectives, and of weights, between the ranks of a run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from soframe.comm.agreement import add_over_ranks, gather_json
from soframe.comm.base import Backend, Handle
from soframe.setup.choosing import choose_backend
from soframe.state import checksums

_EXACT = (torch.uint8, torch.int64, torch.float64)
_FLOATS = (torch.float64, torch.float32, torch.bfloat16)


def check_backend(backend: Backend) -> None:
    """Check the collectives of a backend; every rank must call.

    Integers and float64 (statuses and counts are sums of float64 numbers) must arrive exactly;
    float32 and bfloat16 may be rounded, to about two digits, but all ranks, the source included,
    must end with the same bits, since weights drift apart else. Collectives are started together
    and waited for in the reverse order. Groups are all ranks, and all ranks but one. A backend
    without reductions within a group passes.

    Args:
        backend: The backend, on this rank.

    Raises:
        AssertionError: On every rank, if a result is wrong on any.
    """
    rank, everyone = backend.rank, tuple(range(backend.world_size))
    # All ranks, and all but one of them.
    groups = [everyone, *filter(None, itertools.combinations(everyone, len(everyone) - 1))]
    backend.prepare(groups)
    check = _Check(backend)
    for dtype in (torch.uint8, torch.int64, *_FLOATS):
        numbers = _numbers(backend.world_size, dtype)
        gathered = torch.cat(backend.all_gather(numbers[rank].clone(), "check"))
        check.add(_Open(f"all_gather of {dtype}", everyone, gathered, numbers.flatten()))
    check.wait()
    for dtype in _FLOATS:
        numbers = _numbers(backend.world_size, dtype)
        local = numbers[rank].clone()
        handle = backend.all_reduce(local, "check")
        check.add(_Open(f"all_reduce of {dtype}", everyone, local, _total(numbers), handle))
        for group in groups:
            for source in group:
                check.pair(group, source, numbers)
        check.shares(numbers)
        check.all_to_all(numbers)
        check.wait()
    check.conclude()


@dataclass(frozen=True)
class _Open:
    """A collective under way, with its expected result."""

    name: str
    group: tuple[int, ...]  # whose results must be alike
    result: Tensor
    expected: Tensor | None  # None if not on this rank
    handle: Handle | None = None


class _Check:
    """Collectives under way with their expected results, and the problems so far."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._open: list[_Open] = []
        self._problems: list[str] = []

    def add(self, collective: _Open) -> None:
        self._open.append(collective)

    def pair(self, group: tuple[int, ...], source: int, numbers: Tensor) -> None:
        """Broadcast within a group from a rank of it, and reduce to that rank."""
        backend, rank = self._backend, self._backend.rank
        what = f"of {numbers.dtype} in {group}"
        name = f"broadcast {what} from rank {source}"
        local = numbers[rank].clone()
        if rank not in group:  # it enters the comparison of bits alone
            self.add(_Open(name, group, local, None))
            return
        handle = backend.broadcast(local, source, group, "check")
        self.add(_Open(name, group, local, numbers[source], handle))
        local = numbers[rank].clone()
        try:
            handle = backend.reduce(local, source, group, "check")
        except NotImplementedError:
            return  # the strategies that need it are refused by name
        expected = _total(numbers[list(group)]) if rank == source else None
        self.add(_Open(f"reduce {what} to rank {source}", (source,), local, expected, handle))

    def shares(self, numbers: Tensor) -> None:
        """Gather uneven shares of one tensor, and reduce a tensor to such shares."""
        backend, rank, dtype = self._backend, self._backend.rank, numbers.dtype
        everyone = tuple(range(backend.world_size))
        sizes = [(3 * r + 2) % 5 for r in everyone]  # 0 for rank 1
        joined = torch.cat([row[:size] for row, size in zip(numbers, sizes, strict=True)])
        flat = torch.zeros_like(joined)
        flat.split(sizes)[rank].copy_(joined.split(sizes)[rank])
        handle = backend.all_gather_shares(flat, sizes, "check")
        self.add(_Open(f"all_gather_shares of {dtype}", everyone, flat, joined, handle))
        local = numbers[rank, : sum(sizes)].clone()
        handle = backend.reduce_scatter(local, sizes, "check")
        share = local.split(sizes)[rank]
        expected = _total(numbers[:, : sum(sizes)]).split(sizes)[rank]
        self.add(_Open(f"reduce_scatter of {dtype}", (rank,), share, expected, handle))

    def all_to_all(self, numbers: Tensor) -> None:
        """Send r + s elements from each rank r to each rank s, and nothing to itself."""
        backend, rank = self._backend, self._backend.rank
        ranks = torch.arange(backend.world_size)
        sizes = (ranks.unsqueeze(1) + ranks).fill_diagonal_(0)  # by sender and receiver
        parts = []
        for row, sends in zip(numbers, sizes.tolist(), strict=True):
            parts.append(row[: sum(sends)].split(sends)[rank])
        sends, receives = sizes[rank].tolist(), sizes[:, rank].tolist()
        sent = numbers[rank, : sum(sends)].clone()
        received, handle = backend.all_to_all(sent, sends, receives, "check")
        if backend.world_size > 1:
            name = f"all_to_all of {numbers.dtype}"
            self.add(_Open(name, (rank,), received, torch.cat(parts), handle))

    def wait(self) -> None:
        """Wait for the collectives, the last one first, and compare their results."""
        collectives, self._open = self._open, []
        for collective in reversed(collectives):
            if collective.handle is not None:
                collective.handle.wait()
        for collective in collectives:
            self._compare(collective)

    def _compare(self, collective: _Open) -> None:
        """Compare a result with the expected one, and its bits with those on other ranks."""
        name, group = collective.name, collective.group
        result, expected = collective.result, collective.expected
        if expected is not None and not _near(result, expected):
            self._problems.append(f"{name} gives {result.tolist()}, not {expected.tolist()}")
        if len(group) > 1:
            bits = self._backend.all_gather(result.view(torch.uint8), "check")
            if different := [r for r in group if not torch.equal(bits[r], bits[group[0]])]:
                self._problems.append(
                    f"{name}: rank(s) {different} have other bits than rank {group[0]}; let "
                    f"every rank, the source too, go on with the numbers that were sent"
                )

    def conclude(self) -> None:
        """Raise on every rank if there is a problem on any."""
        (failed,) = add_over_ranks(self._backend, [float(bool(self._problems))], "check")
        if self._problems or failed:
            name = type(self._backend).__name__
            listed = "; ".join(self._problems) or "wrong on another rank, see its own error"
            raise AssertionError(f"{name}, rank {self._backend.rank}: {listed}")


def _numbers(ranks: int, dtype: torch.dtype) -> Tensor:
    """Return random numbers of each rank, ``[ranks, 64]``."""
    generator = torch.Generator().manual_seed(0)
    if dtype in (torch.float32, torch.bfloat16):
        return torch.randn(ranks, 64, generator=generator).to(dtype)
    # Sums of a few thousand such numbers are exact in float64, in any order.
    high = 256 if dtype == torch.uint8 else 2**40
    return torch.randint(high, (ranks, 64), generator=generator).to(dtype)


def _total(numbers: Tensor) -> Tensor:
    return numbers.double().sum(0).to(numbers.dtype)


def _near(got: Tensor, expected: Tensor) -> bool:
    if got.dtype in _EXACT:
        return torch.equal(got, expected)
    return got.dtype == expected.dtype and torch.allclose(got, expected, rtol=0.02, atol=0.05)


def compare_weights(model: nn.Module, backend: Backend | None = None) -> None:
    """Compare the parameters of all ranks, bit by bit; every rank must call.

    Checksums travel, so a call every few hundred steps costs little. It is meant for models that
    every rank holds whole.

    Args:
        model: The model.
        backend: The ranks to compare; None for all ranks of torch.distributed.

    Raises:
        RuntimeError: On every rank, if parameters differ; the message has their names.
    """
    backend = choose_backend(backend, model)
    local_sums = {name: checksums.of_tensor(p) for name, p in model.named_parameters()}
    sums_of_ranks = gather_json(backend, local_sums)
    names = []
    for name, checksum in local_sums.items():
        if any(sums.get(name) != checksum for sums in sums_of_ranks):
            names.append(name)
    if names:
        raise RuntimeError(f"weights differ between ranks: {', '.join(names)}")
