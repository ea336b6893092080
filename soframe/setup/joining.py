"""Inputs that end on one rank before they end on another: `torch.distributed.algorithms.join`.

Within ``with Join([model, preconditioner]):`` a rank that has no more data takes part in the steps
of the others: DistributedDataParallel shadows its collectives, and the preconditioner takes a step
without gradients and without statistics, as any rank without data does. Gradients are divided by
all ranks, joined or not, as DistributedDataParallel does by default.

A joined rank never sees what DistributedDataParallel averages. So it cannot be a gradient worker
that others wait for: either every rank is one (``comm-opt``), or soframe averages the gradients
itself (``gradients="local"``), and brings them to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from soframe.blocks.home import GradientHome
from soframe.comm.base import Backend
from soframe.strategies.placement import Placement


def notify(preconditioner: Joinable) -> None:
    """Tell ranks that have joined that this one takes another step; nothing outside of ``Join``.

    Args:
        preconditioner: The preconditioner, which takes the step.
    """
    work = Join.notify_join_context(preconditioner)
    if work is not None:
        work.wait()


def check(
    backend: Backend,
    placement: Placement,
    *,
    local: bool,
    scaled: bool,
    everybody: bool,
    staged: bool = False,
    divide_by_initial_world_size: bool = True,
) -> None:
    """Check that ranks may run out of data apart from each other.

    Args:
        backend: The backend.
        placement: Who preconditions what.
        local: Whether gradients are each rank's own.
        scaled: Whether a ``GradScaler`` is in use.
        everybody: Whether the loss is a mean over the samples of all ranks.
        staged: Whether the ranks have stages of a pipeline.
        divide_by_initial_world_size: What DistributedDataParallel is told.

    Raises:
        ValueError: If they may not; it is the same on every rank.
    """
    everyone = tuple(range(placement.world_size))
    if staged:
        raise ValueError(
            "Join does not go with pipeline=: a schedule runs every stage in every step; let the "
            "copies of the model have equally many batches"
        )
    if any(work.shards for work in placement.work):
        raise ValueError(
            "Join does not go with fully_shard, a tensor-parallel plan or DeepSpeed's ZeRO, which "
            "need every rank in every pass: let ranks have equally many batches"
        )
    apart = [b.block for b in placement.blocks if tuple(sorted(b.gradient_workers)) != everyone]
    if backend.process_group is None:
        raise ValueError(f"Join needs backend='torch', and this one is {type(backend).__name__}")
    if apart and not local:
        raise ValueError(
            f"strategy {placement.strategy!r} has block {apart[0]!r} preconditioned on some ranks "
            f"for the others, and a rank that has joined has no averaged gradient: pass "
            f"strategy='comm-opt', or gradients='local'"
        )
    kept = [work.name for work in placement.work if work.state or not work.only_captured]
    if kept and not local:
        raise ValueError(
            f"block {kept[0]!r} has a method that keeps a state, or takes statistics of averaged "
            f"gradients, and a rank that has joined has no averaged gradient: its state would fall "
            f"behind the others'; pass gradients='local'"
        )
    if scaled:
        raise ValueError("Join does not go with grad_scaler=: a joined rank unscales no gradient")
    if not divide_by_initial_world_size and (local or everybody):
        setting = "gradients='local'" if local else "loss_average='global'"
        raise ValueError(f"{setting} divides by all ranks: divide_by_initial_world_size=True")


class Shadow(JoinHook):
    """What a rank without further data does while others take steps.

    Args:
        model: The model, unwrapped.
        home: Where its gradients live.
        backend: The backend.
        take_step: Takes part in a step of the others.
        sync: Whether the parameters of this rank are brought up to date in the end.
    """

    def __init__(
        self,
        model: nn.Module,
        home: GradientHome,
        backend: Backend,
        take_step: Callable[[], None],
        *,
        sync: bool,
    ) -> None:
        self._model, self._home, self._backend = model, home, backend
        self._take_step, self._sync = take_step, sync

    @torch.no_grad()
    def main_hook(self) -> None:
        """Take part in a step, without gradients."""
        with _no_gradients(self._model.parameters(), self._home):
            self._take_step()

    @torch.no_grad()
    def post_hook(self, is_last_joiner: bool) -> None:
        """Take over the parameters and buffers of a rank that took all steps.

        Args:
            is_last_joiner: Whether this is one.
        """
        if not self._sync:
            return
        backend, model = self._backend, self._model
        device = backend.wire_device(torch.device("cpu"))
        mine = torch.tensor([int(is_last_joiner)], device=device)
        source = [int(last) for last in backend.all_gather(mine, "join")].index(1)
        everyone = tuple(range(backend.world_size))
        for tensor in (*model.parameters(), *model.buffers()):
            flat = tensor.detach().contiguous().to(backend.wire_device(tensor.device))
            backend.broadcast(flat, source, everyone, "join").wait()
            tensor.copy_(flat)


@contextmanager
def _no_gradients(parameters: Iterable[nn.Parameter], home: GradientHome) -> Iterator[None]:
    """Put gradients away: those of this rank's last step are none of the others' steps."""
    kept = [(parameter, home.read(parameter)) for parameter in parameters]
    for parameter, _ in kept:
        home.clear(parameter)
    try:
        yield
    finally:
        for parameter, gradient in kept:
            home.put(parameter, gradient)
