"""The backend: the few collectives that soframe needs, and the counting of what they carry.

Ranks are numbers within the backend's own group. Every collective returns at once with a handle;
``wait`` completes it. Every call is counted under the phase that it belongs to: its payload is the
bytes of the tensor that this rank gives or receives, whatever the engine sends for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from soframe.tracing.phases import Phases


class Handle:
    """A collective under way.

    Args:
        wait: Completes it; None if it is complete.
    """

    def __init__(self, wait: Callable[[], object] | None = None) -> None:
        self._wait = wait

    def wait(self) -> None:
        """Complete the collective."""
        if self._wait is not None:
            self._wait()
            self._wait = None


def together(handles: Sequence[Handle]) -> Handle:
    """Return one handle for several.

    Args:
        handles: Collectives under way.
    """

    def wait() -> None:
        for handle in handles:
            handle.wait()

    return Handle(wait)


class Backend(ABC):
    """Collectives among the ranks of one group.

    Attributes:
        rank: This process's rank in the group.
        world_size: The number of ranks.
        on_paper: Whether the other ranks exist on paper only; this one then speaks for all.
        overlap: Whether tensors travel while others are computed (`soframe.comm.tasks`); the
            results are the same bit by bit, with less waiting and more memory in buffers.
        fused: Whether gradients that go to one rank each, and come back from there, travel in one
            reduce-scatter and one all-gather for all ranks together; otherwise in a reduction to
            and a broadcast from each of them. The bytes are the same; sums are, within rounding.
            The same on every rank.
        phases: The phase that this rank is in.
    """

    rank: int = 0
    world_size: int = 1
    on_paper: bool = False
    overlap: bool = True
    fused: bool = False

    def __init__(self) -> None:
        self._traffic: dict[str, dict[str, int]] = {}
        self.phases = Phases()

    @property
    def global_ranks(self) -> tuple[int, ...]:
        """The ranks of this group, as torch.distributed's default group numbers them."""
        return tuple(range(self.world_size))

    @property
    def process_group(self) -> Any:
        """The process group of torch.distributed; None if there is none."""
        return None

    # -- what an implementation provides ------------------------------------------------------

    @abstractmethod
    def prepare(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Make the groups that will communicate by themselves.

        Args:
            groups: Sorted ranks of each; the same list on every rank.
        """

    @abstractmethod
    def _all_reduce(self, tensor: Tensor) -> Handle:
        """Add up a contiguous tensor over all ranks, in place."""

    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int, group: tuple[int, ...]) -> Handle:
        """Copy a contiguous tensor from a rank to the others of a group, in place."""

    @abstractmethod
    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's contiguous tensor."""

    def _reduce(self, tensor: Tensor, destination: int, group: tuple[int, ...]) -> Handle:
        """Add up a contiguous tensor over a group; the destination has the sum in its tensor.

        The others' tensors hold nothing of meaning afterwards. Only strategies that keep running
        factors on some ranks alone need it.

        Returns:
            The handle.

        Raises:
            NotImplementedError: If the backend has none, and the group is not all ranks.
        """
        if len(group) == self.world_size:
            return self._all_reduce(tensor)
        raise NotImplementedError(
            f"{type(self).__name__} has no _reduce within a group of ranks, which this strategy "
            f"needs; implement it, or choose 'comm-opt', 'mem-opt' or 'hybrid-opt'"
        )

    def _reduce_scatter(self, flat: Tensor, sizes: Sequence[int]) -> Handle:
        """Add up a flat tensor over all ranks, each share of it on one rank, in place.

        Here a reduction for each share: what an engine has for all of them at once must equal it.

        Args:
            flat: ``[sum(sizes)]``, contiguous; the shares of others hold nothing of meaning
                afterwards.
            sizes: The elements of each rank's share, in the order of ranks; perhaps none.

        Returns:
            The handle.
        """
        everyone = tuple(range(self.world_size))
        shares = [(rank, share) for rank, share in enumerate(flat.split(list(sizes))) if len(share)]
        return together([self._reduce(share, rank, everyone) for rank, share in shares])

    def _all_gather_shares(self, flat: Tensor, sizes: Sequence[int]) -> Handle:
        """Fill in the shares of the other ranks of a flat tensor, in place.

        Here a broadcast for each share: what an engine has for all of them at once must equal it.

        Args:
            flat: ``[sum(sizes)]``, contiguous, of which this rank's share is there.
            sizes: The elements of each rank's share, in the order of ranks; perhaps none.

        Returns:
            The handle.
        """
        everyone = tuple(range(self.world_size))
        shares = [(rank, share) for rank, share in enumerate(flat.split(list(sizes))) if len(share)]
        return together([self._broadcast(share, rank, everyone) for rank, share in shares])

    def _all_to_all(
        self, flat: Tensor, gives: Sequence[int], takes: Sequence[int]
    ) -> tuple[Tensor, Handle]:
        """Send a share of a flat tensor to every rank, and get one from every rank.

        Here every rank sends everything to all: what an engine has for this must equal it.

        Args:
            flat: ``[sum(gives)]``, contiguous.
            gives: The elements for each rank, in the order of ranks; none for this one.
            takes: The elements from each rank, likewise.

        Returns:
            ``[sum(takes)]``, in the order of ranks, once the handle is complete.
        """
        plans = self._all_gather(torch.tensor(gives, device=flat.device))
        sizes = [plan.tolist() for plan in plans]
        padded = flat.new_zeros(max(map(sum, sizes)))
        padded[: len(flat)] = flat
        shares = [
            every[: sum(plan)].split(plan)[self.rank]
            for every, plan in zip(self._all_gather(padded), sizes, strict=True)
        ]
        return torch.cat(shares), Handle()

    def meet(self, what: str) -> None:  # noqa: B027 (optional)
        """Wait until every rank is here, where the engine can name those that are missing.

        Args:
            what: What the ranks are about to do, for the error.
        """

    def wire_device(self, device: torch.device) -> torch.device:
        """Return where a tensor must live to travel.

        Args:
            device: Where it lives.

        Returns:
            ``device`` itself unless the engine cannot send from there.
        """
        return device

    # -- what the phases call -------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor, phase: str) -> Handle:
        """Add up a contiguous tensor over all ranks, in place.

        Args:
            tensor: The tensor.
            phase: The phase that it is counted under.

        Returns:
            The handle.
        """
        if self.world_size == 1:
            return Handle()
        self._count(phase, tensor)
        return self._all_reduce(tensor)

    def reduce(
        self, tensor: Tensor, destination: int, group: tuple[int, ...], phase: str
    ) -> Handle:
        """Add up a contiguous tensor over the ranks of a group, in place on one of them.

        Args:
            tensor: The tensor; on the other ranks it holds nothing of meaning afterwards.
            destination: The rank of the group that has the sum.
            group: Sorted ranks, this one among them.
            phase: The phase that it is counted under.

        Returns:
            The handle.
        """
        if len(group) == 1:
            return Handle()
        self._count(phase, tensor)
        return self._reduce(tensor, destination, group)

    def broadcast(self, tensor: Tensor, source: int, group: tuple[int, ...], phase: str) -> Handle:
        """Copy a contiguous tensor from a rank to the others of its group, in place.

        Args:
            tensor: The tensor.
            source: The rank that has it.
            group: Sorted ranks, this one among them.
            phase: The phase that it is counted under.

        Returns:
            The handle.
        """
        if len(group) == 1:
            return Handle()
        self._count(phase, tensor)
        return self._broadcast(tensor, source, group)

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], phase: str) -> Handle:
        """Add up a flat tensor over all ranks, each share of it on one rank, in place.

        Args:
            flat: ``[sum(sizes)]``, contiguous; afterwards this rank's share of it is the sum, and
                those of others hold nothing of meaning.
            sizes: The elements of each rank's share, in the order of ranks; perhaps none.
            phase: The phase that it is counted under.

        Returns:
            The handle.
        """
        if self.world_size == 1:
            return Handle()
        self._count(phase, flat)
        return self._reduce_scatter(flat, sizes)

    def all_gather_shares(self, flat: Tensor, sizes: Sequence[int], phase: str) -> Handle:
        """Fill in the shares of the other ranks of a flat tensor, in place.

        Args:
            flat: ``[sum(sizes)]``, contiguous, of which this rank's share is there.
            sizes: The elements of each rank's share, in the order of ranks; perhaps none.
            phase: The phase that it is counted under.

        Returns:
            The handle.
        """
        if self.world_size == 1:
            return Handle()
        self._count(phase, flat)
        return self._all_gather_shares(flat, sizes)

    def all_to_all(
        self, flat: Tensor, gives: Sequence[int], takes: Sequence[int], phase: str
    ) -> tuple[Tensor, Handle]:
        """Send a share of a flat tensor to every rank, and get one from every rank.

        What is counted is what this rank gives to others and what it takes from them.

        Args:
            flat: ``[sum(gives)]``, contiguous.
            gives: The elements for each rank, in the order of ranks; none for this one.
            takes: The elements from each rank, likewise.
            phase: The phase that it is counted under.

        Returns:
            ``[sum(takes)]``, in the order of ranks, once the handle is complete.
        """
        if self.world_size == 1:
            return flat, Handle()
        self._count(phase, flat, len(flat) + sum(takes))
        return self._all_to_all(flat, gives, takes)

    def all_gather(self, tensor: Tensor, phase: str) -> list[Tensor]:
        """Return every rank's contiguous tensor of one common shape.

        Args:
            tensor: This rank's.
            phase: The phase that it is counted under.

        Returns:
            One tensor per rank.
        """
        if self.world_size == 1:
            return [tensor]
        self._count(phase, tensor)
        return self._all_gather(tensor)

    def traffic(self) -> dict[str, dict[str, int]]:
        """Return what was carried so far.

        Returns:
            Phase -> ``{"bytes", "calls"}``, and their sum under ``"total"``.
        """
        phases = {phase: dict(count) for phase, count in self._traffic.items()}
        total = {key: sum(count[key] for count in phases.values()) for key in ("bytes", "calls")}
        return {**phases, "total": total}

    def _count(self, phase: str, tensor: Tensor, numel: int | None = None) -> None:
        count = self._traffic.setdefault(phase, {"bytes": 0, "calls": 0})
        count["bytes"] += (tensor.numel() if numel is None else numel) * tensor.element_size()
        count["calls"] += 1
