"""Layer groups: the quadratic model chooses a coefficient of each direction for each of them.

A block-diagonal curvature has no interaction of layers, so a step that suits the first layers may
be too long or too short for the others. The exact model has it: with the update of each layer group
as a direction of its own, its minimum has a length for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from soframe.trust_region.twice import Direction


def group_of_each(
    model: nn.Module, parameters: Sequence[nn.Parameter], count: int
) -> dict[nn.Parameter, int]:
    """Divide a model into its last layer, and the others in ``count - 1`` runs of equal length."""
    if count < 1:
        raise ValueError(f"layer_groups must be a positive integer, not {count!r}")
    if count == 1:
        return dict.fromkeys(parameters, 0)
    # With fewer layers than groups every layer is a group.
    *inner, last = layers_of(model, parameters)
    numbers: dict[nn.Parameter, int] = {}
    for number, layer in enumerate(inner):
        numbers.update(dict.fromkeys(layer, number * (count - 1) // len(inner)))
    return numbers | dict.fromkeys(last, count - 1)


def layers_of(model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Return the parameters of each module, in the model's order; a shared one is in its first."""
    remaining = set(parameters)
    layers: list[list[nn.Parameter]] = []
    for module in model.modules():
        layer = [p for p in module.parameters(recurse=False) if p in remaining]
        remaining.difference_update(layer)
        if layer:
            layers.append(layer)
    return layers


class LayerGroups:
    """The layer group of each trained parameter, by its number."""

    def __init__(self, model: nn.Module, count: int, parameters: Sequence[nn.Parameter]) -> None:
        self._model, self._count = model, count
        self.numbers = group_of_each(model, parameters, count)

    def follow(self, parameters: Sequence[nn.Parameter]) -> None:
        """Recompute the groups if the set of trained parameters has changed."""
        if set(parameters) != set(self.numbers):
            self.numbers = group_of_each(self._model, parameters, self._count)

    def split(self, parameters: Sequence[nn.Parameter], direction: Direction) -> list[Direction]:
        """Return the nonzero parts of a direction, one for each layer group."""
        parts: dict[int, list[Tensor | None]] = {}
        for index, (parameter, tensor) in enumerate(zip(parameters, direction, strict=True)):
            if tensor is not None:
                part = parts.setdefault(self.numbers[parameter], [None] * len(parameters))
                part[index] = tensor
        return [parts[number] for number in sorted(parts)]
