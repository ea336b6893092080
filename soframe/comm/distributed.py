"""torch.distributed, with the engine of the process group: Gloo, NCCL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from soframe.comm.base import Backend, Handle, together
from soframe.registry import register


@register("backend", "torch")
class TorchDistributed(Backend):
    """The ranks of a process group.

    Args:
        group: The process group; None for the default one. Only its members may build this.
        meet_timeout: How long ``meet`` waits for the other ranks, in seconds (Gloo).
        overlap: See `Backend`.
        fused: See `Backend`; None for what suits the engine: fused on NCCL alone.

    Raises:
        RuntimeError: If torch.distributed is not initialised.
        ValueError: If this process is not a member of ``group``, or ``fused`` is asked for on
            another engine than Gloo and NCCL.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        meet_timeout: float = 300.0,
        overlap: bool = True,
        fused: bool | None = None,
    ) -> None:
        super().__init__()
        self.overlap = overlap
        if not dist.is_available() or not dist.is_initialized():
            raise RuntimeError(
                "backend 'torch': torch.distributed is not initialised; call "
                "torch.distributed.init_process_group first, or pass backend='single'"
            )
        default = group if group is not None else dist.group.WORLD
        assert default is not None
        self._group = default
        self.rank = dist.get_rank(self._group)
        if self.rank < 0:
            raise ValueError("backend 'torch': this process is not a member of the given group")
        self.world_size = dist.get_world_size(self._group)
        self._engine = str(dist.get_backend(self._group))
        self.fused = self._engine == "nccl" if fused is None else fused
        if self.fused and self._engine not in ("gloo", "nccl"):
            raise ValueError(
                f"backend 'torch': fused=True is for Gloo and NCCL, and this process group's "
                f"engine is {self._engine!r}; pass fused=False"
            )
        self._global_ranks = dist.get_process_group_ranks(self._group)
        self._everyone = tuple(range(self.world_size))
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {self._everyone: self._group}
        self._made: set[tuple[int, ...]] = {self._everyone}
        self._meet_timeout = timedelta(seconds=meet_timeout)

    def prepare(self, groups: Sequence[tuple[int, ...]]) -> None:
        """See `Backend.prepare`."""
        if self.world_size != dist.get_world_size():
            # NOTE: torch makes groups in a part of the world only if their members have made
            # equally many before (their names count them), which overlapping groups have not. So
            # the backend sends from rank to rank there, see `_broadcast`.
            return
        for ranks in groups:
            if ranks in self._made:
                continue
            self._made.add(ranks)
            # Every rank of the world takes part, a member or not.
            members = [self._global_ranks[rank] for rank in ranks]
            made = dist.new_group(members, backend=self._engine)
            if self.rank in ranks:
                assert isinstance(made, dist.ProcessGroup)
                self._groups[ranks] = made

    def wire_device(self, device: torch.device) -> torch.device:
        """See `Backend.wire_device`."""
        if self._engine == "nccl" and device.type != "cuda":
            return torch.device("cuda", torch.cuda.current_device())
        return device

    def meet(self, what: str) -> None:
        """See `Backend.meet`.

        Raises:
            RuntimeError: If a rank does not come (Gloo names it; NCCL leaves it to its watchdog).
        """
        if self._engine != "gloo":
            return
        try:
            dist.monitored_barrier(self._group, timeout=self._meet_timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(f"{what} must be called by every rank: {error}") from error

    def _all_reduce(self, tensor: Tensor) -> Handle:
        return _handle(dist.all_reduce(tensor, group=self._group, async_op=True))

    def _reduce(self, tensor: Tensor, destination: int, group: tuple[int, ...]) -> Handle:
        target = self._global_ranks[destination]
        if group in self._groups:
            return _handle(dist.reduce(tensor, target, group=self._groups[group], async_op=True))
        if self.rank != destination:
            return _handle(dist.isend(tensor, target, self._group))
        others = [self._global_ranks[rank] for rank in group if rank != destination]
        parts = [torch.empty_like(tensor) for _ in others]
        receipts = [
            _handle(dist.irecv(part, origin, self._group))
            for part, origin in zip(parts, others, strict=True)
        ]

        def wait() -> None:
            for receipt, part in zip(receipts, parts, strict=True):
                receipt.wait()
                tensor.add_(part)

        return Handle(wait)

    def _broadcast(self, tensor: Tensor, source: int, group: tuple[int, ...]) -> Handle:
        origin = self._global_ranks[source]
        if group in self._groups:
            return _handle(dist.broadcast(tensor, origin, self._groups[group], async_op=True))
        if self.rank != source:
            return _handle(dist.irecv(tensor, origin, self._group))
        others = [self._global_ranks[rank] for rank in group if rank != source]
        return together([_handle(dist.isend(tensor, rank, self._group)) for rank in others])

    # NOTE: Shares differ in size. Padding them to the largest would multiply what travels (six
    # times for ResNet-50 on 64 ranks), so `reduce_scatter_single` is out. NCCL's forms with lists
    # take what is uneven as one group of reductions or broadcasts. Gloo's all-gather refuses it,
    # and its reduce-scatter is slow; an all-to-all carries as much, and is the fastest there is.

    def _reduce_scatter(self, flat: Tensor, sizes: Sequence[int]) -> Handle:
        shares = flat.split(list(sizes))
        own = shares[self.rank]
        if self._engine != "gloo":
            total = torch.empty_like(own)
            work = dist.reduce_scatter(total, list(shares), group=self._group, async_op=True)
            return _then(work, lambda: own.copy_(total))
        parts = own.new_empty(self.world_size, len(own))
        takes = [len(own)] * self.world_size
        work = dist.all_to_all_single(
            parts.view(-1), flat, takes, list(sizes), group=self._group, async_op=True
        )
        return _then(work, lambda: torch.sum(parts, dim=0, out=own))

    def _all_gather_shares(self, flat: Tensor, sizes: Sequence[int]) -> Handle:
        shares = list(flat.split(list(sizes)))
        own = shares[self.rank]
        if self._engine != "gloo":
            return _handle(dist.all_gather(shares, own, group=self._group, async_op=True))
        gives = [len(own)] * self.world_size
        copies = own.repeat(self.world_size)
        return _handle(
            dist.all_to_all_single(
                flat, copies, list(sizes), gives, group=self._group, async_op=True
            )
        )

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in self._everyone]
        dist.all_gather(gathered, tensor, group=self._group)
        return gathered


def _handle(work: dist.Work | None) -> Handle:
    return Handle(work.wait if work is not None else None)


def _then(work: dist.Work | None, follow: Callable[[], object]) -> Handle:
    """Return the handle of a collective after which something is left to do."""

    def wait() -> None:
        _handle(work).wait()
        follow()

    return Handle(wait)


def leave_gradients(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]  # torch's stubs leave it out
) -> torch.futures.Future[Tensor]:
    """A communication hook of DistributedDataParallel that leaves every rank its own gradients.

    For ``Preconditioner(gradients="local")``, which averages them itself::

        model.register_comm_hook(None, soframe.comm.leave_gradients)

    Args:
        state: Not used.
        bucket: The gradients of a bucket.

    Returns:
        The same gradients.
    """
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


# NOTE: DistributedDataParallel compares annotations with classes, and these are strings.
leave_gradients.__annotations__.clear()
