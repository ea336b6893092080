"""Checks of a backend's collectives, and of weights, between the ranks of a run."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from soframe.comm.agreement import add_over_ranks, gather_texts
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
    groups = [everyone, *(tuple(r for r in everyone if r != out) for out in everyone)]
    groups = [group for group in groups if group]
    backend.prepare(groups)
    check = _Check(backend)
    for dtype in (torch.uint8, torch.int64, *_FLOATS):
        each = [_numbers(r, dtype) for r in everyone]
        gathered = torch.cat(backend.all_gather(each[rank].clone(), "check"))
        check.add(f"all_gather of {dtype}", everyone, gathered, torch.cat(each))
    check.wait()
    for dtype in _FLOATS:
        each = [_numbers(r, dtype) for r in everyone]
        sizes = [(3 * r + 2) % 5 for r in everyone]  # uneven, and 0 for rank 1
        whole = torch.cat([one[:size] for one, size in zip(each, sizes, strict=True)])
        sums = [_total([one[: sum(sizes)] for one in each]).split(sizes)[r] for r in everyone]
        mine = each[rank].clone()
        handle = backend.all_reduce(mine, "check")
        check.add(f"all_reduce of {dtype}", everyone, mine, _total(each), handle)
        for group in groups:
            for source in group:
                check.pair(group, source, each)
        flat = torch.zeros_like(whole)
        flat.split(sizes)[rank].copy_(whole.split(sizes)[rank])
        handle = backend.all_gather_shares(flat, sizes, "check")
        check.add(f"all_gather_shares of {dtype}", everyone, flat, whole, handle)
        mine = each[rank][: sum(sizes)].clone()
        handle = backend.reduce_scatter(mine, sizes, "check")
        share = mine.split(sizes)[rank]
        check.add(f"reduce_scatter of {dtype}", (rank,), share, sums[rank], handle)
        # Rank r sends r + s elements to rank s, and nothing to itself.
        gives = [[(r + s) * (r != s) for s in everyone] for r in everyone]
        sent = [one[: sum(own)].split(own) for one, own in zip(each, gives, strict=True)]
        taken = torch.cat([parts[rank] for parts in sent])
        got, handle = backend.all_to_all(
            torch.cat(sent[rank]), gives[rank], [own[rank] for own in gives], "check"
        )
        if len(everyone) > 1:
            check.add(f"all_to_all of {dtype}", (rank,), got, taken, handle)
        check.wait()
    check.conclude()


class _Check:
    """Collectives under way with their expected results, and the problems so far."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._open: list[tuple[str, tuple[int, ...], Tensor, Tensor | None, Handle]] = []
        self._problems: list[str] = []

    def add(
        self,
        name: str,
        group: tuple[int, ...],
        got: Tensor,
        expected: Tensor | None,
        handle: Handle | None = None,
    ) -> None:
        """Add a collective whose results must be alike on a group; None if not on this rank."""
        self._open.append((name, group, got, expected, handle or Handle()))

    def pair(self, group: tuple[int, ...], source: int, each: Sequence[Tensor]) -> None:
        """Broadcast within a group from a rank of it, and reduce to that rank."""
        backend, rank = self._backend, self._backend.rank
        what = f"of {each[0].dtype} in {group}"
        mine, handle = each[rank].clone(), None
        if rank in group:
            handle = backend.broadcast(mine, source, group, "check")
        expected = each[source] if rank in group else None
        self.add(f"broadcast {what} from rank {source}", group, mine, expected, handle)
        mine, handle = each[rank].clone(), None
        try:
            if rank in group:
                handle = backend.reduce(mine, source, group, "check")
        except NotImplementedError:
            return  # the strategies that need it are refused by name
        expected = _total([each[r] for r in group]) if rank == source else None
        self.add(f"reduce {what} to rank {source}", (source,), mine, expected, handle)

    def wait(self) -> None:
        """Wait for the collectives, the last one first, and compare their results."""
        entries, self._open = self._open, []
        for *_, handle in reversed(entries):
            handle.wait()
        for name, group, got, expected, _ in entries:
            if expected is not None and not _near(got, expected):
                self._problems.append(f"{name} gives {got.tolist()}, not {expected.tolist()}")
            if len(group) > 1:
                bits = self._backend.all_gather(got.view(torch.uint8), "check")
                if others := [r for r in group if not torch.equal(bits[r], bits[group[0]])]:
                    self._problems.append(
                        f"{name}: rank(s) {others} have other bits than rank {group[0]}; let every "
                        f"rank, the source too, go on with the numbers that were sent"
                    )

    def conclude(self) -> None:
        """Raise on every rank if there is a problem on any."""
        (failed,) = add_over_ranks(self._backend, [float(bool(self._problems))], "check")
        if self._problems or failed:
            name = type(self._backend).__name__
            listed = "; ".join(self._problems) or "wrong on another rank, see its own error"
            raise AssertionError(f"{name}, rank {self._backend.rank}: {listed}")


def _numbers(rank: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    if dtype in (torch.float32, torch.bfloat16):
        return torch.randn(64, generator=generator).to(dtype)
    # Sums of a few thousand such numbers are exact in float64, in any order.
    high = 256 if dtype == torch.uint8 else 2**40
    return torch.randint(high, (64,), generator=generator).to(dtype)


def _total(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack(list(tensors)).double().sum(0).to(tensors[0].dtype)


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
    backend = choose_backend(backend)
    mine = {name: checksums.of_tensor(p) for name, p in model.named_parameters()}
    every = [json.loads(text) for text in gather_texts(backend, json.dumps(mine))]
    if names := [name for name in mine if any(own.get(name) != mine[name] for own in every)]:
        raise RuntimeError(f"weights differ between ranks: {', '.join(names)}")
