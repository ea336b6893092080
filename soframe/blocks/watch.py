"""Watches a model for parameters and modules that change."""

from __future__ import annotations

from operator import attrgetter

from torch import nn

from soframe.blocks import sharding

_PROPERTIES = attrgetter("requires_grad", "dtype", "device")


class Watch:
    """Compares the parameters of a model with the registered ones."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._slots = [module._parameters for module in modules]
        self._children = [module._modules for module in modules]
        self._sharded = sharding.sharded_modules(model)
        self._seen = self._look()
        self.forgets = False

    def _look(self) -> tuple[object, ...]:
        parameters = self.parameters()
        # By name, too: pruning renames a parameter, and computes the weight from it from then on.
        names = [list(slots.keys()) for slots in self._slots]
        ids = list(map(id, parameters))
        children: list[int] = []
        for slots in self._children:
            children += map(id, slots.values())
        properties = list(map(_PROPERTIES, parameters))
        return names, ids, properties, children, sharding.zero_count(parameters)

    def parameters(self) -> list[nn.Parameter]:
        """Return the current parameters of the registered modules, without walking the model."""
        if self._sharded:
            sharding.reshard(self._sharded)  # parameters gathered for a pass are not compared
        parameters: list[nn.Parameter] = []
        for slots in self._slots:
            parameters += [p for p in slots.values() if p is not None]
        return parameters

    def forget(self) -> None:
        """Let blocks be made anew, without their state."""
        self.forgets = True

    def changed(self) -> bool:
        """Return whether parameters, modules or the owner of the gradients have changed."""
        return self.forgets or self._look() != self._seen
