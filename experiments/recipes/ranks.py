"""The ranks of a recipe's run, and the interrupts that they agree on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import torch
import torch.distributed as dist

from experiments.launch import Place
from experiments.recipes.common import Common

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def group(settings: Common) -> Iterator[Place]:
    """Join the ranks of torchrun, or of a process group that is there already."""
    device = device_of(settings)
    begun = dist.is_initialized()
    if not begun and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    if not dist.is_initialized():
        yield Place(0, 1, device)
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    # Flags and checksums should not wait for the GPU.
    control = dist.new_group(backend="gloo") if device.type == "cuda" else None
    yield Place(dist.get_rank(), dist.get_world_size(), device, control)
    if not begun:
        dist.barrier()  # no rank may leave while another still reads from it
        dist.destroy_process_group()


def device_of(settings: Common) -> torch.device:
    if settings.device != "auto":
        return torch.device(settings.device)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Interrupt:
    """Notes interrupts while it is entered; a second one, of a process alone, raises as usual.

    Args:
        act: Called at the first.
        all_of_them: Whether later ones are noted, too: torchrun passes each on once more.
    """

    def __init__(self, act: Callable[[], None] | None = None, *, all_of_them: bool = False) -> None:
        self.asked, self._act, self._all = False, act, all_of_them

    def _note(self, received: int, frame: FrameType | None) -> None:
        if self._act is not None and not self.asked:
            self._act()
        self.asked = True
        if not self._all:
            self._restore()

    def __enter__(self) -> Interrupt:
        # Ranks of `launch` ignore SIGINT: their parent passes it on as SIGTERM.
        handled = [s for s in SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
        self._before = {taken: signal.signal(taken, self._note) for taken in handled}
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _restore(self) -> None:
        for taken, handler in self._before.items():
            signal.signal(taken, handler)


def agreed(asked: bool, place: Place) -> bool:
    """Return whether any rank was interrupted; a call for every rank."""
    if place.size == 1:
        return asked
    flag = torch.tensor(int(asked))
    dist.all_reduce(flag, dist.ReduceOp.MAX, group=place.control)
    return bool(flag)
