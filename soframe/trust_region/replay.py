"""Run a closure again with the same dropout masks, without side effects on buffers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from soframe.capture.wrapper import running_wrapper

Buffers = dict[str, Tensor | None]
"""The buffers of one module, by name."""


def eagerly() -> AbstractContextManager[object]:
    """Return a context in which compiled modules run eagerly: their graphs have one derivative."""
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


class Replay:
    """The state of random generators and copies of buffers, to run a closure as it ran first."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._wrapper: DistributedDataParallel | None = None  # around the model in the first run
        self._broadcasts = True
        self._devices: list[int] = []
        if torch.cuda.is_initialized():
            self._devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
        self._cpu = torch.get_rng_state()
        self._cuda = [torch.cuda.get_rng_state(device) for device in self._devices]
        self._places = [module._buffers for module in model.modules()]
        self._tensors = list(map(dict, self._places))
        self._buffers = _copies(self._places)

    @contextmanager
    def first(self) -> Iterator[None]:
        """A context for the first run, which notes whether buffers are broadcast before it.

        DistributedDataParallel does that, unless its last pass was without gradients.
        """

        def note(module: nn.Module, args: object) -> None:
            handle.remove()
            self._wrapper = running_wrapper()
            if self._wrapper is not None:
                self._broadcasts = self._wrapper.require_forward_param_sync

        handle = self._model.register_forward_pre_hook(note)
        try:
            yield
        finally:
            handle.remove()

    def restore(self) -> None:
        """Restore both, buffers into the same tensors."""
        self._restore_generators()
        for place, tensors, kept in zip(self._places, self._tensors, self._buffers, strict=True):
            place.update(tensors)
            for name, before in kept.items():
                buffer = tensors[name]
                if buffer is None or before is None:  # both, or neither
                    continue
                if not torch.equal(buffer, before):  # an expanded buffer cannot be written to
                    with torch.no_grad():
                        buffer.copy_(before)

    def _restore_generators(self) -> None:
        torch.set_rng_state(self._cpu)
        for device, state in zip(self._devices, self._cuda, strict=True):
            torch.cuda.set_rng_state(state, device)

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context with the first run's random state and buffers; it restores both."""
        before = list(map(dict, self._places))
        with self._wrapped_as_before(), torch.random.fork_rng(self._devices):
            try:
                for place, kept in zip(self._places, _copies(self._buffers), strict=True):
                    place.update(kept)
                self._restore_generators()
                yield
            finally:
                for place, kept in zip(self._places, before, strict=True):
                    place.update(kept)

    @contextmanager
    def _wrapped_as_before(self) -> Iterator[None]:
        """A context in which buffers are broadcast as in the first run, and no reduction begins.

        A closure may turn gradients on, and the wrapper would then wait for a backward pass.
        """
        wrapper = self._wrapper
        if wrapper is None:
            yield
            return
        broadcasts, reduces = wrapper.require_forward_param_sync, wrapper.require_backward_grad_sync
        wrapper.require_forward_param_sync = self._broadcasts
        wrapper.require_backward_grad_sync = False
        try:
            yield
        finally:
            wrapper.require_forward_param_sync = broadcasts
            wrapper.require_backward_grad_sync = reduces


def _copies(places: Sequence[Buffers]) -> list[Buffers]:
    """Return modules' buffers by name, cloned; modules that share one share its clone."""
    clones: dict[int, Tensor | None] = {}
    copies: list[Buffers] = []
    for place in places:
        copy: Buffers = {}
        for name, buffer in place.items():
            if id(buffer) not in clones:
                clones[id(buffer)] = None if buffer is None else buffer.clone()
            copy[name] = clones[id(buffer)]
        copies.append(copy)
    return copies
