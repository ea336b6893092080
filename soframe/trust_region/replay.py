"""Running a closure again without leaving a trace: the same dropout masks, no moved buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class Replay:
    """The random state at which a closure ran first.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._devices = sorted(
            {p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"}
        )
        self._cpu = torch.get_rng_state()
        self._cuda = [torch.cuda.get_rng_state(device) for device in self._devices]

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
        with torch.random.fork_rng(self._devices):
            torch.set_rng_state(self._cpu)
            for device, state in zip(self._devices, self._cuda, strict=True):
                torch.cuda.set_rng_state(state, device)
            try:
                for buffers, name, buffer in slots:
                    buffers[name] = copies[id(buffer)]
                yield
            finally:
                for buffers, name, buffer in slots:
                    buffers[name] = buffer
