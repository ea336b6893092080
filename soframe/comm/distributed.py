"""torch.distributed, with the engine of the process group: Gloo, NCCL."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from soframe.comm.base import Backend, Handle, together
from soframe.comm.ending import WORKS
from soframe.registry import register


@register("backend", "torch")
class TorchDistributed(Backend):
    """The ranks of a process group.

    The group is referenced weakly: a strong reference would keep ``destroy_process_group`` from
    ending its threads.

    Args:
        group: The process group, or a ``DeviceMesh`` of all ranks that train the model, such as the
            ranks of one stage of a pipeline; None for the default group. Only its members may
            construct the backend; for a slice of a mesh of several dimensions every rank must.
        meet_timeout: Seconds for which ``meet`` waits for the other ranks under Gloo.
        overlap: See `Backend`.
        fused: See `Backend`; None for the engine's choice: True on NCCL alone.

    Raises:
        RuntimeError: If torch.distributed is not initialised.
        ValueError: If this process is not a member of ``group``, or ``fused`` is True on another
            engine than Gloo and NCCL.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | DeviceMesh | None = None,
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
                "torch.distributed.init_process_group first, or pass Distribution(backend='single')"
            )
        if isinstance(group, DeviceMesh):
            group = group_of(group)
        default = group or dist.group.WORLD
        assert default is not None
        if dist.get_rank(default) < 0:
            raise ValueError("backend 'torch': this process is not a member of the given group")
        self.rank, self.world_size = dist.get_rank(default), dist.get_world_size(default)
        self._everyone = tuple(range(self.world_size))
        self._groups = {self._everyone: weakref.ref(default)}  # with this rank
        # A group that was made without a backend has one engine for each type of device.
        pairs = str(dist.get_backend_config(self._group)).split(",")
        self._engines = dict(pair.split(":") for pair in pairs)
        engines = set(self._engines.values())
        self.fused = "nccl" in engines if fused is None else fused
        if self.fused and not engines <= {"gloo", "nccl"}:
            raise ValueError(
                f"backend 'torch': fused=True is for Gloo and NCCL, and this process group's "
                f"engine is {', '.join(map(repr, sorted(engines)))}; pass fused=False"
            )
        self._global_ranks = dist.get_process_group_ranks(self._group)
        self._made: set[tuple[int, ...]] = {self._everyone}  # the groups that all ranks have made
        self._meet_timeout = timedelta(seconds=meet_timeout)

    def prepare(self, groups: Sequence[tuple[int, ...]]) -> None:
        if self.world_size != dist.get_world_size():
            # NOTE: in a part of the world torch makes groups only if their members have made
            # equally many before (names count them), which overlapping groups have not. There the
            # backend sends from rank to rank, see `_broadcast`.
            return
        for ranks in groups:
            if ranks in self._made:
                continue
            self._made.add(ranks)
            # Every rank of the world calls `new_group`, a member or not.
            members = [self._global_ranks[rank] for rank in ranks]
            group = dist.new_group(members, backend=dist.get_backend(self._group))
            if self.rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                self._groups[ranks] = weakref.ref(group)

    @property
    def global_ranks(self) -> tuple[int, ...]:
        return tuple(self._global_ranks)

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self._group

    @property
    def _group(self) -> dist.ProcessGroup:
        return self._group_of(self._everyone)

    def _group_of(self, ranks: tuple[int, ...]) -> dist.ProcessGroup:
        """Return the process group of some ranks, which torch.distributed holds."""
        group = self._groups[ranks]()
        try:
            if group is None:
                raise ValueError("the process group is no longer referenced")
            dist.get_backend(group)
        except ValueError as error:  # destroyed, but referenced elsewhere
            raise RuntimeError(
                "the process group that this preconditioner was built for has been destroyed; "
                "build the preconditioner anew, after torch.distributed.init_process_group"
            ) from error
        return group

    def wire_device(self, device: torch.device) -> torch.device:
        if device.type not in self._engines and "cuda" in self._engines:
            return torch.device("cuda", torch.cuda.current_device())
        return device

    def meet(self, what: str) -> None:
        """Wait for all ranks; only a group of Gloo has a barrier that names the missing ones."""
        if dist.get_backend(self._group) != "gloo":
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
            among = self._group_of(group)
            return _handle(dist.reduce(tensor, target, group=among, async_op=True))
        if self.rank != destination:
            return _handle(dist.isend(tensor, target, self._group))
        handles: list[Handle] = []
        for rank in group:
            if rank != destination:
                part = torch.empty_like(tensor)
                work = dist.irecv(part, self._global_ranks[rank], self._group)
                handles.append(_then(_handle(work), partial(tensor.add_, part)))
        return together(handles)

    def _broadcast(self, tensor: Tensor, source: int, group: tuple[int, ...]) -> Handle:
        origin = self._global_ranks[source]
        if group in self._groups:
            among = self._group_of(group)
            return _handle(dist.broadcast(tensor, origin, group=among, async_op=True))
        if self.rank != source:
            return _handle(dist.irecv(tensor, origin, self._group))
        handles: list[Handle] = []
        for rank in group:
            if rank != source:
                work = dist.isend(tensor, self._global_ranks[rank], self._group)
                handles.append(_handle(work))
        return together(handles)

    # NOTE: Shares differ in size. Padding them to the largest would multiply the traffic (six
    # times for ResNet-50 on 64 ranks), so `reduce_scatter_single` is out. NCCL's forms with lists
    # run uneven shares as one group of reductions or broadcasts. Gloo's all-gather refuses them,
    # and its reduce-scatter is slow; an all-to-all carries as much and is fastest.

    def _reduce_scatter(self, flat: Tensor, sizes: Sequence[int]) -> Handle:
        shares = flat.split(list(sizes))
        share = shares[self.rank]
        if self._engines.get(flat.device.type) != "gloo":
            total = torch.empty_like(share)
            work = dist.reduce_scatter(total, list(shares), group=self._group, async_op=True)
            return _then(_handle(work), lambda: share.copy_(total))
        received = share.new_empty(self.world_size, len(share))
        takes = list(itertools.repeat(len(share), self.world_size))
        work = dist.all_to_all_single(
            received.view(-1), flat, takes, list(sizes), group=self._group, async_op=True
        )
        return _then(_handle(work), lambda: torch.sum(received, dim=0, out=share))

    def _all_gather_shares(self, flat: Tensor, sizes: Sequence[int]) -> Handle:
        shares = list(flat.split(list(sizes)))
        share = shares[self.rank]
        if self._engines.get(flat.device.type) != "gloo":
            return _handle(dist.all_gather(shares, share, group=self._group, async_op=True))
        gives = list(itertools.repeat(len(share), self.world_size))
        copies = share.repeat(self.world_size)
        return _handle(
            dist.all_to_all_single(
                flat, copies, list(sizes), gives, group=self._group, async_op=True
            )
        )

    def _all_to_all(
        self, flat: Tensor, gives: Sequence[int], takes: Sequence[int]
    ) -> tuple[Tensor, Handle]:
        taken = flat.new_empty(sum(takes))
        work = dist.all_to_all_single(
            taken, flat, list(takes), list(gives), group=self._group, async_op=True
        )
        return taken, _handle(work)

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        gathered = list(map(torch.empty_like, itertools.repeat(tensor, self.world_size)))
        _handle(dist.all_gather(gathered, tensor, group=self._group, async_op=True)).wait()
        return gathered


def group_of(mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the process group of all ranks of a mesh: the default one if these are all ranks."""
    if mesh.size() == dist.get_world_size():
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    if mesh.ndim > 1:
        mesh = mesh._flatten()
    return mesh.get_group()


def _handle(work: dist.Work | None) -> Handle:
    """Return the handle of a started work, which is held until it has been waited for."""
    if work is None:
        return Handle()
    begun: dist.Work = work
    WORKS.begin(begun)

    def wait() -> None:
        begun.wait()
        WORKS.end(begun)

    return Handle(wait)


def _then(before: Handle, afterwards: Callable[[], object]) -> Handle:
    """Return the handle of a collective that ends with a further action."""

    def wait() -> None:
        before.wait()
        afterwards()

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


# NOTE: DistributedDataParallel compares annotations with classes; with postponed evaluation they
# are strings.
leave_gradients.__annotations__.clear()
