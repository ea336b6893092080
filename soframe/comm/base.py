"""The backend: the few collectives that soframe needs, with a count of their bytes.

Ranks are numbers within the backend's own group. Every collective returns a handle at once;
``wait`` completes it. Every call is counted under its phase: the payload is the bytes of the tensor
that this rank gives or receives, not the messages of the engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from soframe.registry import register
from soframe.strategies.work import with_total
from soframe.tracing.phases import Phases

T = TypeVar("T")


class Handle:
    """A collective under way.

    Args:
        wait: A function that completes it; None if it is complete.
    """

    def __init__(self, wait: Callable[[], object] | None = None) -> None:
        self._wait = wait

    @property
    def done(self) -> bool:
        """Whether it is complete."""
        return self._wait is None

    def wait(self) -> None:
        """Complete the collective; a second call does nothing."""
        wait, self._wait = self._wait, None
        if wait is not None:
            wait()


def together(handles: Sequence[Handle]) -> Handle:
    """Return one handle for several collectives under way."""

    def wait() -> None:
        for handle in handles:
            handle.wait()

    return Handle(wait)


class Backend(ABC):
    """Collectives among the ranks of one group.

    A subclass implements ``prepare``, ``_all_reduce``, ``_broadcast`` and ``_all_gather``; it may
    override the other methods with faster forms of the same result.

    Attributes:
        rank: This process's rank in the group.
        world_size: The number of ranks.
        on_paper: Whether the other ranks are simulated, and this one represents all.
        overlap: Whether tensors travel while others are computed (`soframe.comm.fused`); the
            results are the same bit by bit, with less waiting and more memory in buffers.
        fused: Whether gradients for one rank each, and updates from there, travel in one
            reduce-scatter and one all-gather for all ranks together, instead of one reduction and
            one broadcast per rank. The bytes are the same; sums are, within rounding. The same on
            every rank.
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
        """The ranks of this group in the numbering of torch.distributed's default group."""
        return tuple(range(self.world_size))

    @property
    def alone(self) -> bool:
        """Whether no other process waits for this rank."""
        return self.world_size == 1 or self.on_paper

    @property
    def process_group(self) -> Any:
        """The process group of torch.distributed, or None."""
        return None

    # -- for implementations ----------------------------------------------------------------

    @abstractmethod
    def prepare(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Make the groups that will communicate by themselves.

        Args:
            groups: Sorted ranks of each; the same list on every rank.
        """

    @abstractmethod
    def _all_reduce(self, tensor: Tensor) -> Handle:
        """Sum a contiguous tensor over all ranks, in place."""

    @abstractmethod
    def _broadcast(self, tensor: Tensor, source: int, group: tuple[int, ...]) -> Handle:
        """Copy a contiguous tensor from a rank to the others of a group, in place."""

    @abstractmethod
    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every rank's contiguous tensor."""

    def _reduce(self, tensor: Tensor, destination: int, group: tuple[int, ...]) -> Handle:
        """Sum a contiguous tensor over a group into the destination's tensor.

        The other ranks' tensors are undefined afterwards. Only strategies that keep running factors
        on some ranks need it.

        Raises:
            NotImplementedError: If the backend has no reduction, and the group is not all ranks.
        """
        if len(group) == self.world_size:
            return self._all_reduce(tensor)
        raise NotImplementedError(
            f"{type(self).__name__} has no _reduce within a group of ranks, which this strategy "
            f"needs; implement it, or choose 'comm-opt', 'mem-opt' or 'hybrid-opt'"
        )

    def _reduce_scatter(self, flat: Tensor, sizes: Sequence[int]) -> Handle:
        """Sum a flat tensor over all ranks, each share into its own rank's tensor.

        The default reduces each share; an override must give the same result.

        Args:
            flat: ``[sum(sizes)]``, contiguous; shares of other ranks are undefined afterwards.
            sizes: The elements of each rank's share, in the order of ranks; may be 0.
        """
        return self._by_share(self._reduce, flat, sizes)

    def _all_gather_shares(self, flat: Tensor, sizes: Sequence[int]) -> Handle:
        """Fill in the shares of the other ranks of a flat tensor, in place.

        The default broadcasts each share; an override must give the same result. It takes the
        arguments of `_reduce_scatter`, with this rank's share filled in.
        """
        return self._by_share(self._broadcast, flat, sizes)

    def _by_share(
        self,
        start: Callable[[Tensor, int, tuple[int, ...]], Handle],
        flat: Tensor,
        sizes: Sequence[int],
    ) -> Handle:
        """Start a collective of all ranks for each rank's share of a flat tensor."""
        everyone, handles = tuple(range(self.world_size)), list[Handle]()
        for rank, share in enumerate(flat.split(list(sizes))):
            if len(share):
                handles.append(start(share, rank, everyone))
        return together(handles)

    def _all_to_all(
        self, flat: Tensor, gives: Sequence[int], takes: Sequence[int]
    ) -> tuple[Tensor, Handle]:
        """Send a share of a flat tensor to every rank, and receive one from every rank.

        By default every rank sends everything to all; an override must give the same result.

        Args:
            flat: ``[sum(gives)]``, contiguous.
            gives: The elements for each rank, in the order of ranks; 0 for this one.
            takes: The elements from each rank, in the same order.

        Returns:
            ``[sum(takes)]``, in the order of ranks, once the handle is complete.
        """
        plans = self._all_gather(torch.tensor(gives, device=flat.device))
        sizes = [plan.tolist() for plan in plans]
        padded = flat.new_zeros(max(map(sum, sizes)))
        padded[: len(flat)] = flat
        shares: list[Tensor] = []
        for sent, of_ranks in zip(self._all_gather(padded), sizes, strict=True):
            shares.append(sent[: sum(of_ranks)].split(of_ranks)[self.rank])
        return torch.cat(shares), Handle()

    def meet(self, what: str) -> None:  # noqa: B027 (optional)
        """Wait until every rank is here, if the engine can name the ones that miss ``what``."""

    def wire_device(self, device: torch.device) -> torch.device:
        """Return the device from which a tensor travels: its own if the engine can send from it."""
        return device

    # -- called by the phases; each counts its tensor under ``phase`` ----------------------------

    def all_reduce(self, tensor: Tensor, phase: str) -> Handle:
        """Sum a contiguous tensor over all ranks, in place."""
        if self.world_size == 1:
            return Handle()
        return self._enter(phase, tensor.nbytes, self._all_reduce, tensor)

    def reduce(
        self, tensor: Tensor, destination: int, group: tuple[int, ...], phase: str
    ) -> Handle:
        """Sum a contiguous tensor over a group of this rank, as `_reduce` does."""
        if len(group) == 1:
            return Handle()
        return self._enter(phase, tensor.nbytes, self._reduce, tensor, destination, group)

    def broadcast(self, tensor: Tensor, source: int, group: tuple[int, ...], phase: str) -> Handle:
        """Copy a contiguous tensor from a rank to the others of a group of this rank, in place."""
        if len(group) == 1:
            return Handle()
        return self._enter(phase, tensor.nbytes, self._broadcast, tensor, source, group)

    def reduce_scatter(self, flat: Tensor, sizes: Sequence[int], phase: str) -> Handle:
        """Sum each rank's share of a flat tensor, as `_reduce_scatter` does."""
        if self.world_size == 1:
            return Handle()
        return self._enter(phase, flat.nbytes, self._reduce_scatter, flat, sizes)

    def all_gather_shares(self, flat: Tensor, sizes: Sequence[int], phase: str) -> Handle:
        """Fill in the shares of the other ranks, as `_all_gather_shares` does."""
        if self.world_size == 1:
            return Handle()
        return self._enter(phase, flat.nbytes, self._all_gather_shares, flat, sizes)

    def all_to_all(
        self, flat: Tensor, gives: Sequence[int], takes: Sequence[int], phase: str
    ) -> tuple[Tensor, Handle]:
        """Exchange shares with every rank, as `_all_to_all` does; both directions are counted."""
        if self.world_size == 1:
            return flat, Handle()
        size = (len(flat) + sum(takes)) * flat.element_size()
        return self._enter(phase, size, self._all_to_all, flat, gives, takes)

    def all_gather(self, tensor: Tensor, phase: str) -> list[Tensor]:
        """Return every rank's contiguous tensor of one common shape."""
        if self.world_size == 1:
            return [tensor]
        return self._enter(phase, tensor.nbytes, self._all_gather, tensor)

    def traffic(self) -> dict[str, dict[str, int]]:
        """Return the bytes and calls of all collectives so far.

        Returns:
            Phase -> ``{"bytes", "calls"}``, and their sum under ``"total"``.
        """
        return with_total({phase: dict(count) for phase, count in self._traffic.items()})

    def _enter(
        self, phase: str, size: int, operation: Callable[..., T], tensor: Tensor, *arguments: Any
    ) -> T:
        """Count the bytes of a collective, and start it."""
        count = self._traffic.setdefault(phase, {"bytes": 0, "calls": 0})
        count["bytes"] += size
        count["calls"] += 1
        return operation(tensor, *arguments)


@register("backend", "single")
class SingleProcess(Backend):
    """A group of one rank: nothing travels."""

    def prepare(self, groups: Sequence[tuple[int, ...]]) -> None:
        """Make no groups."""

    def _all_reduce(self, tensor: Tensor) -> Handle:
        return Handle()

    def _broadcast(self, tensor: Tensor, source: int, group: tuple[int, ...]) -> Handle:
        return Handle()

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]  # of one rank, which all_gather does not ask
