"""Directions in parts: the quadratic model chooses a coefficient for each run of layers.

A block-diagonal curvature knows nothing of how layers act together, so a step that suits the first
layers may be too long or too short for the others. The exact model knows: given the direction of
each part as a direction of its own, its minimum has a length for each. A part's tangents begin at
its first layer, so late parts cost little: the last layer, which nothing follows, is always one.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from numbers import Integral

from torch import Tensor, nn

from soframe.derivatives.twice import Direction


def part_of_each(
    model: nn.Module, parameters: Sequence[nn.Parameter], parts: int
) -> dict[nn.Parameter, int]:
    """Cut a model into runs of layers: the last layer, and the others in runs of equal numbers.

    Args:
        model: The model; its layers are the modules that have some of the parameters themselves, in
            the order in which it lists them.
        parameters: The parameters.
        parts: How many runs, 1 for the whole model; with fewer layers every layer is one.

    Returns:
        The number of the run of each parameter; a parameter that layers share is in the first's.

    Raises:
        ValueError: If ``parts`` is no positive integer.
    """
    given: object = parts
    if isinstance(given, bool) or not isinstance(given, Integral) or given < 1:
        raise ValueError(f"parts must be a positive integer, not {parts!r}")
    if parts == 1:
        return dict.fromkeys(parameters, 0)
    wanted = set(parameters)
    layers: list[list[nn.Parameter]] = []
    for module in model.modules():
        layer = [p for p in module.parameters(recurse=False) if p in wanted]
        wanted.difference_update(layer)
        if layer:
            layers.append(layer)
    *others, last = layers
    numbers = {p: n * (parts - 1) // len(others) for n, layer in enumerate(others) for p in layer}
    return numbers | dict.fromkeys(last, parts - 1)


class Parts:
    """The runs of a model's layers, as long as its parameters are the same.

    Args:
        model: The model.
        count: How many.
        parameters: Those that are trained.

    Attributes:
        numbers: The number of the run of each parameter.
    """

    def __init__(self, model: nn.Module, count: int, parameters: Sequence[nn.Parameter]) -> None:
        self._model, self._count = model, count
        self.numbers = part_of_each(model, parameters, count)

    def follow(self, parameters: Sequence[nn.Parameter]) -> bool:
        """Cut the model anew if other parameters are trained now.

        Args:
            parameters: Those that are trained.

        Returns:
            Whether they are others.
        """
        others = set(parameters) != set(self.numbers)
        if others:
            self.numbers = part_of_each(self._model, parameters, self._count)
        return others


def split(direction: Direction, numbers: Sequence[int]) -> list[Direction]:
    """Return the parts of a direction, which add up to it.

    Args:
        direction: The direction.
        numbers: To which part each of its tensors belongs.

    Returns:
        A direction for every part that is not zero.
    """
    parts: list[Direction] = []
    for number in sorted(set(numbers)):
        rows = zip(direction, numbers, strict=True)
        part = [tensor if of_tensor == number else None for tensor, of_tensor in rows]
        if any(tensor is not None for tensor in part):
            parts.append(part)
    return parts


def uncovered(
    parameters: Sequence[nn.Parameter],
    gradients: Sequence[Tensor],
    covered: Collection[nn.Parameter],
) -> list[Direction]:
    """Return the direction of steepest descent of what has no curvature, if there is such.

    Args:
        parameters: The parameters.
        gradients: Their gradients.
        covered: Those with curvature.

    Returns:
        One direction, or none.
    """
    rows = zip(parameters, gradients, strict=True)
    direction = [None if p in covered else -gradient for p, gradient in rows]
    return [direction] if any(tensor is not None for tensor in direction) else []
