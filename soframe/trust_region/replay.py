"""Run a closure again with the same dropout masks, without side effects on buffers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

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
        self._devices: list[int] = []
        if torch.cuda.is_initialized():
            places = (p.device for p in model.parameters())
            self._devices = sorted({place.index or 0 for place in places if place.type == "cuda"})
        self._cpu = torch.get_rng_state()
        self._cuda = [torch.cuda.get_rng_state(device) for device in self._devices]
        self._places = [module._buffers for module in model.modules()]
        self._buffers = _copies(self._places)

    def restore_generators(self) -> None:
        """Restore the generators, on the CPU and on the CUDA devices of the model."""
        torch.set_rng_state(self._cpu)
        for device, state in zip(self._devices, self._cuda, strict=True):
            torch.cuda.set_rng_state(state, device)

    @contextmanager
    def again(self) -> Iterator[None]:
        """A context with the first run's random state and buffers; it restores both."""
        before = [dict(place) for place in self._places]
        with torch.random.fork_rng(self._devices):
            try:
                for place, kept in zip(self._places, _copies(self._buffers), strict=True):
                    place.update(kept)
                self.restore_generators()
                yield
            finally:
                for place, kept in zip(self._places, before, strict=True):
                    place.update(kept)


def _copies(places: Sequence[Buffers]) -> list[Buffers]:
    """Return modules' buffers by name, cloned; modules that share one share its clone."""
    buffers = {id(b): b for place in places for b in place.values()}
    clones = {key: None if b is None else b.clone() for key, b in buffers.items()}
    return [{name: clones[id(b)] for name, b in place.items()} for place in places]


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
