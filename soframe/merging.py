"""Merging of models that were trained apart, such as on several tasks, from one initialisation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, cg
from torch import Tensor

from soframe.blocks import sharding
from soframe.checks.numbers import is_number, require_integer
from soframe.curvature import Curvature
from soframe.products.operator import Operator
from soframe.products.vectors import Coordinates


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
        damping: Positive, in the units of the curvature; a few mean eigenvalues, such as 3, to be
            chosen on held-out data.
        tolerance: The norm of the residual of conjugate gradients over its first one.
        iterations: At most so many; each multiplies by all curvatures and their inverses, on
            their devices, and keeps its vectors in float64 on the CPU.

    Returns:
        Name -> ``[*shape]``, for ``model.load_state_dict(merged, strict=False)``, with the model
        inside of its wrapper: ``strict=False`` would pass over the other names of a compiled model.

    Raises:
        ValueError: If no curvature is passed, models differ, are sharded or the same, or the
            damping or the number of iterations is not positive and finite.
        RuntimeError: If a curvature is not fitted, or the iterations do not suffice.
    """
    _require_alike(curvatures)
    require_integer("merge: iterations", iterations, 1)
    damping = _positive(damping)
    models = [dict(curvature.parts.model.named_parameters()) for curvature in curvatures]
    merged = _mean(models)
    mean: dict[str, Tensor] = {}
    for name in curvatures[0].parameters:
        mean[name] = merged[name].to(torch.promote_types(merged[name].dtype, torch.float32))
    inverses = [curvature.inverse(damping / len(models)) for curvature in curvatures]
    coordinates = inverses[0].coordinates
    # The inverse where all curvatures are the same.
    preconditioner = _sum_of(inverses, coordinates, 1 / len(models) ** 2, 0.0)
    residual = np.zeros(coordinates.size)
    for curvature, model in zip(curvatures, models, strict=True):
        moves = {name: (model[name].detach() - mean[name]).double().cpu() for name in mean}
        residual += coordinates.flat(curvature @ moves).numpy()
    if not np.isfinite(residual).all():
        raise ValueError("merge: the weights of a model or a curvature are not finite")
    system = _sum_of(curvatures, coordinates, 1.0, damping)
    solution, is_open = cg(system, residual, rtol=tolerance, maxiter=iterations, M=preconditioner)
    if is_open:
        raise RuntimeError(
            f"merge: {iterations} iterations do not reach the tolerance {tolerance:.0e}: raise the "
            f"damping or the tolerance"
        )
    for name, move in coordinates.unflat(torch.from_numpy(solution)).items():
        merged[name] = (mean[name] + move.to(mean[name])).to(merged[name].dtype)
    return merged


def _positive(damping: float) -> float:
    """Return a damping, perhaps in a tensor; raise a ValueError unless it is positive."""
    if not (is_number(damping) and 0 < damping < math.inf):
        raise ValueError(
            f"merge: damping must be a positive and finite number, not {damping!r}: pass a few "
            f"mean eigenvalues, 3 * curvature.trace() / len(curvature.eigenvalues())"
        )
    return float(damping)


def _mean(models: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return the plain mean of the weights of models, without quantised ones."""
    means: dict[str, Tensor] = {}
    for name, parameter in models[0].items():
        if parameter.dtype.is_floating_point or parameter.dtype.is_complex:
            means[name] = torch.stack([model[name].detach() for model in models]).mean(0)
    return means


def _sum_of(
    matrices: Sequence[Curvature] | Sequence[Operator],
    coordinates: Coordinates,
    scale: float,
    damping: float,
) -> Any:
    """Return ``scale sum(matrices) + damping I``, for vectors in float64."""

    def multiply(entries: Any) -> Any:
        vector = coordinates.unflat(torch.from_numpy(entries))
        products = [coordinates.flat(matrix @ vector) for matrix in matrices]
        return scale * torch.stack(products).sum(0).numpy() + damping * entries

    size = coordinates.size
    return LinearOperator((size, size), matvec=multiply, dtype=np.float64)


def _require_alike(curvatures: Sequence[Curvature]) -> None:
    """Raise a ValueError unless models and blocks are alike."""
    if not curvatures:
        raise ValueError("merge: pass a fitted curvature of each model")
    shapes: list[dict[str, torch.Size]] = []
    for curvature in curvatures:
        sharding.require_whole(curvature.parameters.items(), "merge")
        named = curvature.parts.model.named_parameters()
        shapes.append({name: parameter.shape for name, parameter in named})
    if len({id(curvature.parts.model) for curvature in curvatures}) < len(curvatures):
        raise ValueError("merge: two curvatures share one model: fit each to a copy of its own")
    if shapes.count(shapes[0]) < len(shapes):
        raise ValueError("merge: the models differ in names or shapes of parameters: build alike")
    names = [curvature.parameters.keys() for curvature in curvatures]
    if names.count(names[0]) < len(names):
        raise ValueError(
            "merge: the curvatures differ in parameters: pass the same layers=, skip= and method="
        )
