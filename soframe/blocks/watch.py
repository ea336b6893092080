"""Watches a model for parameters and modules that change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from operator import attrgetter, methodcaller

from torch import nn

from soframe.blocks import sharding

_PROPERTIES = attrgetter("requires_grad", "dtype", "device")
_KEYS, _VALUES = methodcaller("keys"), methodcaller("values")


class Watch:
    """Compares the parameters of a model with the registered ones."""

    def __init__(self, model: nn.Module) -> None:
        self._slots: list[Mapping[str, nn.Parameter | None]] = []
        self._children: list[Mapping[str, nn.Module | None]] = []
        for module in model.modules():
            self._slots.append(module._parameters)
            self._children.append(module._modules)
        self._sharded = sharding.sharded_modules(model)
        self._seen = self._look(self.parameters())
        self.forgets = False

    def _look(self, parameters: Sequence[nn.Parameter]) -> tuple[object, ...]:
        # By name, too: pruning renames a parameter, and computes the weight from it from then on.
        names = list(map(list, map(_KEYS, self._slots)))  # TorchScript's iterate over none
        ids = list(map(id, parameters))
        children = list(map(id, chain.from_iterable(map(_VALUES, self._children))))
        properties = list(map(_PROPERTIES, parameters))
        return names, ids, properties, children, sharding.zero_count(parameters)

    def parameters(self) -> list[nn.Parameter]:
        """Return the current parameters of the registered modules, without walking the model."""
        if self._sharded:
            sharding.reshard(self._sharded)  # parameters gathered for a pass are not compared
        slots = chain.from_iterable(map(_VALUES, self._slots))
        return [parameter for parameter in slots if parameter is not None]

    def forget(self) -> None:
        """Let blocks be made anew, without their state."""
        self.forgets = True

    def changed(self, parameters: Sequence[nn.Parameter] | None = None) -> bool:
        """Return whether parameters, modules or the owner of the gradients have changed.

        The current `parameters` may be passed, if they are known.
        """
        if parameters is None:
            parameters = self.parameters()
        return self.forgets or self._look(parameters) != self._seen
