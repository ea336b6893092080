"""Merging of models that were trained apart, such as on several tasks, from one initialisation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from soframe.blocks import sharding
from soframe.curvature import Curvature
from soframe.products.vectors import Vector
from soframe.weights import covered


def merge(
    curvatures: Sequence[Curvature],
    *,
    damping: float,
    tolerance: float = 1e-5,
    iterations: int = 1000,
) -> dict[str, Tensor]:
    """Return weights that are as good as possible for all models, to second order.

    They minimise ``sum_i (w - w_i)^T C_i (w - w_i) + damping ||w - mean||^2``, with the weights w_i
    of each curvature's model and their plain mean (Matena and Raffel, 2022, with a diagonal
    Fisher). With a large damping that is the mean. Parameters without a block in every curvature
    take the plain mean; integers and buffers are not merged. Every rank must call.

    Args:
        curvatures: A fitted curvature of each model; the models have the same parameters.
        damping: Positive; a few mean eigenvalues, such as 3, to be chosen on held-out data.
        tolerance: The norm of the residual of conjugate gradients over its first one.
        iterations: At most so many; each multiplies by all curvatures and their inverses.

    Returns:
        Name -> ``[*shape]``, for ``model.load_state_dict(merged, strict=False)``.

    Raises:
        ValueError: If no curvature is passed, models differ, are sharded or the same, or the
            damping is not positive and finite.
        RuntimeError: If a curvature is not fitted, or the iterations do not suffice.
    """
    _require_alike(curvatures, damping)
    models = [dict(curvature.parts.model.named_parameters()) for curvature in curvatures]
    merged = {}
    for name, parameter in models[0].items():
        if not (parameter.is_floating_point() or parameter.is_complex()):
            continue  # such as quantised weights, which have no mean
        merged[name] = torch.stack([model[name].detach() for model in models]).mean(0)
    mean: dict[str, Tensor] = {}
    for name in covered(curvatures[0]):
        mean[name] = merged[name].to(torch.promote_types(merged[name].dtype, torch.float32))
    residual = _zeros(mean)
    for curvature, model in zip(curvatures, models, strict=True):
        moves = {name: model[name].detach() - mean[name] for name in mean}
        residual = _add(residual, curvature @ moves)
    system = _System(curvatures, damping)
    solution = _conjugate_gradients(system, residual, tolerance, iterations)
    for name, weight in _add(mean, solution).items():
        merged[name] = weight.to(merged[name].dtype)
    return merged


def _require_alike(curvatures: Sequence[Curvature], damping: float) -> None:
    """Raise a ValueError unless models and blocks are alike, and the damping is positive."""
    if not curvatures:
        raise ValueError("merge: pass a fitted curvature of each model")
    if not 0 < damping < math.inf:
        raise ValueError(f"merge: damping must be positive and finite, not {damping!r}")
    shapes: list[dict[str, torch.Size]] = []
    for curvature in curvatures:
        sharding.require_whole(covered(curvature).items(), "merge")
        named = curvature.parts.model.named_parameters()
        shapes.append({name: parameter.shape for name, parameter in named})
    if len({id(curvature.parts.model) for curvature in curvatures}) < len(curvatures):
        raise ValueError("merge: two curvatures share one model: fit each to a copy of its own")
    if shapes.count(shapes[0]) < len(shapes):
        raise ValueError("merge: the models differ in names or shapes of parameters: build alike")
    names = [covered(curvature).keys() for curvature in curvatures]
    if names.count(names[0]) < len(names):
        raise ValueError(
            "merge: the curvatures differ in parameters: pass the same layers=, skip= and method="
        )


class _System:
    """The matrix ``sum_i C_i + damping I``, and the mean of inverses of its terms."""

    def __init__(self, curvatures: Sequence[Curvature], damping: float) -> None:
        self._curvatures, self._damping = curvatures, damping
        share = damping / len(curvatures)
        self._inverses = [curvature.inverse(share) for curvature in curvatures]

    def times(self, vector: Vector) -> dict[str, Tensor]:
        """Multiply by the matrix."""
        total = {name: self._damping * tensor for name, tensor in vector.items()}
        for curvature in self._curvatures:
            total = _add(total, curvature @ vector)
        return total

    def precondition(self, vector: Vector) -> dict[str, Tensor]:
        """Multiply by the preconditioner, the inverse where all curvatures are the same."""
        total = _zeros(vector)
        for inverse in self._inverses:
            total = _add(total, inverse @ vector)
        return {name: tensor / len(self._inverses) ** 2 for name, tensor in total.items()}


def _conjugate_gradients(
    system: _System, residual: dict[str, Tensor], tolerance: float, iterations: int
) -> dict[str, Tensor]:
    """Solve ``system x = residual``, from zero."""
    solution = _zeros(residual)
    first = _dot(residual, residual)
    if first == 0:
        return solution
    preconditioned = system.precondition(residual)
    direction, product = preconditioned, _dot(residual, preconditioned)
    for _ in range(iterations):
        image = system.times(direction)
        length = product / _dot(direction, image)
        solution = _add(solution, direction, length)
        residual = _add(residual, image, -length)
        if _dot(residual, residual) <= tolerance**2 * first:
            return solution
        preconditioned = system.precondition(residual)
        previous, product = product, _dot(residual, preconditioned)
        direction = _add(preconditioned, direction, product / previous)
    raise RuntimeError(
        f"merge: {iterations} iterations do not reach the tolerance {tolerance:.0e}: raise the "
        f"damping or the tolerance"
    )


def _zeros(like: Vector) -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in like.items()}


def _add(first: Vector, second: Vector, scale: float = 1.0) -> dict[str, Tensor]:
    return {name: tensor + scale * second[name] for name, tensor in first.items()}


def _dot(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    products = [(tensor * second[name]).double().sum().cpu() for name, tensor in first.items()]
    return float(torch.stack(products).sum())
