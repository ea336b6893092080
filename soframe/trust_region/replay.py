"""Run a closure again with the same dropout masks, without side effects on buffers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn


def eagerly() -> AbstractContextManager[object]:
    """Return a context in which compiled modules run eagerly: their graphs have one derivative."""
    if "torch._dynamo" not in sys.modules:  # nothing has been compiled
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


class Replay:
    """The state of torch's random generators, to run a closure again as it ran first."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._devices: list[int] = []
        if torch.cuda.is_initialized():
            places = (p.device for p in model.parameters())
            self._devices = sorted({place.index or 0 for place in places if place.type == "cuda"})
        self._cpu = torch.get_rng_state()
        self._cuda = [torch.cuda.get_rng_state(device) for device in self._devices]

    def restore_generators(self) -> None:
        """Restore the generators, on the CPU and on the CUDA devices of the model."""
        torch.set_rng_state(self._cpu)
        for device, state in zip(self._devices, self._cuda, strict=True):
            torch.cuda.set_rng_state(state, device)

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context with the first run's random state and copies of buffers; it restores both."""
        places = [module._buffers for module in self._model.modules()]
        before = [dict(place) for place in places]
        copies = {id(b): b.clone() for each in places for b in each.values() if b is not None}
        with torch.random.fork_rng(self._devices):
            try:
                for place in places:
                    place.update({n: copies[id(b)] for n, b in place.items() if b is not None})
                self.restore_generators()
                yield
            finally:
                for place, kept in zip(places, before, strict=True):
                    place.update(kept)


class Snapshot:
    """The random state and a model's buffers, to be restored into the same tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._random = Replay(model)
        places = [module._buffers for module in model.modules()]
        self._places = [(place, dict(place)) for place in places]
        buffers = {id(b): b for place in places for b in place.values() if b is not None}
        self._buffers = [(b, b.clone()) for b in buffers.values()]

    def restore(self) -> None:
        """Restore both."""
        self._random.restore_generators()
        for buffers, kept in self._places:
            buffers.update(kept)
        with torch.no_grad():
            for buffer, before in self._buffers:
                if not torch.equal(buffer, before):  # an expanded buffer cannot be written to
                    buffer.copy_(before)
