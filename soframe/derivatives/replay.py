"""Running a closure again without leaving a trace: the same dropout masks, no moved buffers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn


class RandomState:
    """The state of torch's random generators.

    Args:
        devices: Of those CUDA devices, besides the CPU's.
    """

    def __init__(self, devices: Sequence[int] = ()) -> None:
        self._devices = devices
        self._states = [
            torch.get_rng_state(),
            *(torch.cuda.get_rng_state(device) for device in devices),
        ]

    def restore(self) -> None:
        """Draw from here on."""
        cpu, *cuda = self._states
        torch.set_rng_state(cpu)
        for device, state in zip(self._devices, cuda, strict=True):
            torch.cuda.set_rng_state(state, device)


def eagerly() -> AbstractContextManager[object]:
    """Return a context in which compiled modules run as they are written.

    A compiled graph is no torch function that could be noted, and cannot be differentiated twice.
    """
    if "torch._dynamo" not in sys.modules:  # nobody has compiled anything
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


@contextmanager
def exchanged(places: Sequence[dict[str, Any]], others: Mapping[int, Tensor]) -> Iterator[None]:
    """Put other tensors where a model's modules keep theirs.

    Args:
        places: Each module's parameters, or buffers.
        others: By the ``id`` of the tensor that they stand for.

    Yields:
        Nothing.
    """
    before = [dict(place) for place in places]
    try:
        for place in places:
            place.update({n: others[id(t)] for n, t in place.items() if id(t) in others})
        yield
    finally:
        for place, kept in zip(places, before, strict=True):
            place.update(kept)


def random_devices(model: nn.Module) -> list[int]:
    """Return the CUDA devices of a model.

    Args:
        model: The model.
    """
    if not torch.cuda.is_initialized():  # then no parameter is on one: a few calls less per layer
        return []
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})


class Snapshot:
    """The random state, and a model's buffers, to go back to.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._random = RandomState(random_devices(model))
        places = [module._buffers for module in model.modules()]
        self._places = [(place, dict(place)) for place in places]
        buffers = {id(b): b for place in places for b in place.values() if b is not None}
        self._buffers = [(b, b.clone()) for b in buffers.values()]

    def restore(self) -> None:
        """Go back, in the same tensors."""
        self._random.restore()
        for buffers, kept in self._places:
            buffers.update(kept)
        with torch.no_grad():
            for buffer, before in self._buffers:
                if not torch.equal(buffer, before):  # what is expanded is not written to
                    buffer.copy_(before)


class Replay:
    """The random state at which a closure ran first.

    Args:
        model: The model.

    Attributes:
        devices: The CUDA devices of the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.devices = random_devices(model)
        self._state = RandomState(self.devices)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Set the random state back, and give the model copies of its buffers meanwhile.

        Yields:
            Nothing.
        """
        buffers = [module._buffers for module in self._model.modules()]
        copies = {id(b): b.clone() for each in buffers for b in each.values() if b is not None}
        with torch.random.fork_rng(self.devices), exchanged(buffers, copies):
            self._state.restore()
            yield
