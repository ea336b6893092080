"""Run a closure again with the same dropout masks, without side effects on buffers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn


def eagerly() -> AbstractContextManager[object]:
    """Return a context in which compiled modules run eagerly.

    A compiled graph cannot be differentiated twice.
    """
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


class RandomState:
    """The state of torch's random generators: on the CPU, and on some CUDA devices."""

    def __init__(self, devices: Sequence[int] = ()) -> None:
        self._devices = devices
        self._cpu = torch.get_rng_state()
        self._cuda = [torch.cuda.get_rng_state(device) for device in devices]

    def restore(self) -> None:
        """Restore the generators."""
        torch.set_rng_state(self._cpu)
        for device, state in zip(self._devices, self._cuda, strict=True):
            torch.cuda.set_rng_state(state, device)


def _devices(model: nn.Module) -> list[int]:
    if not torch.cuda.is_initialized():
        return []
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})


class Snapshot:
    """The random state and a model's buffers, to be restored into the same tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._random = RandomState(_devices(model))
        places = [module._buffers for module in model.modules()]
        self._places = [(place, dict(place)) for place in places]
        buffers = {id(b): b for place in places for b in place.values() if b is not None}
        self._buffers = [(b, b.clone()) for b in buffers.values()]

    def restore(self) -> None:
        """Restore both."""
        self._random.restore()
        for buffers, kept in self._places:
            buffers.update(kept)
        with torch.no_grad():
            for buffer, before in self._buffers:
                if not torch.equal(buffer, before):  # an expanded buffer cannot be written to
                    buffer.copy_(before)


class Replay:
    """The random state at which a closure ran first."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._devices = model, _devices(model)
        self._state = RandomState(self._devices)

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context with the random state of the first run and copies of the model's buffers.

        Afterwards both are restored.
        """
        places = [module._buffers for module in self._model.modules()]
        before = [dict(place) for place in places]
        copies = {id(b): b.clone() for each in places for b in each.values() if b is not None}
        with torch.random.fork_rng(self._devices):
            try:
                for place in places:
                    place.update({n: copies[id(b)] for n, b in place.items() if b is not None})
                self._state.restore()
                yield
            finally:
                for place, kept in zip(places, before, strict=True):
                    place.update(kept)
