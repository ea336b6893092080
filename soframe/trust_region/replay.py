"""Running a closure again without leaving a trace: the same dropout masks, no moved buffers."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

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

    def equals(self, other: RandomState | None) -> bool:
        """Return whether no number was drawn between the two.

        Args:
            other: A state of the same devices.
        """
        if other is None:
            return False
        return all(map(torch.equal, self._states, other._states))

    def restore(self) -> None:
        """Draw from here on."""
        cpu, *cuda = self._states
        torch.set_rng_state(cpu)
        for device, state in zip(self._devices, cuda, strict=True):
            torch.cuda.set_rng_state(state, device)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Come back to it after this context.

        Yields:
            Nothing.
        """
        try:
            yield
        finally:
            self.restore()


def eagerly() -> AbstractContextManager[object]:
    """Return a context in which compiled modules run as they are written.

    A compiled graph is no torch function that could be noted, and has no forward-mode derivative.
    """
    if "torch._dynamo" not in sys.modules:  # nobody has compiled anything
        return nullcontext()
    stance: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance


def random_devices(model: nn.Module) -> list[int]:
    """Return the CUDA devices of a model.

    Args:
        model: The model.
    """
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})


class Replay:
    """The random state at which a closure ran first.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._devices = random_devices(model)
        self._state = RandomState(self._devices)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Set the random state back, and give the model copies of its buffers meanwhile.

        Yields:
            Nothing.
        """
        slots = [
            (module._buffers, name, buffer)
            for module in self._model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        copies: dict[int, Tensor] = {id(b): b.clone() for _, _, b in slots}
        with RandomState(self._devices).kept():
            self._state.restore()
            try:
                for buffers, name, buffer in slots:
                    buffers[name] = copies[id(buffer)]
                yield
            finally:
                for buffers, name, buffer in slots:
                    buffers[name] = buffer
