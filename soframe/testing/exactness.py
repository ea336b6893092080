"""The error of a preconditioner's curvature on small networks, against the dense one.

Two measures, for each block with the exact curvature ``F`` of the same data (`dense_fisher`):

- The relative error of the method's matrix ``C``, ``|C - F|_F / |F|_F``, where ``(C + damping
  I)^-1`` is its map of gradients to updates.
- The cosine between its update and the exact natural gradient ``(F + damping I)^-1 g``, for each
  block with its own ``F``, and over all blocks with the whole ``F``.

Sources: the measures of Martens and Grosse (2015, section 6.3) and of George et al. (2018), whose
theorem states that EKFAC's matrix is at least as near to ``F`` as K-FAC's of the same basis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from soframe.blocks.block import Block
from soframe.estimate.gradients import Gradient
from soframe.preconditioner import Preconditioner
from soframe.solvers.base import LinAlgError
from soframe.testing.dense import Kind, Loss, Reduction, dense_fisher, flat, sample_gradients

_LINEAR = 1e-6
"""The largest relative deviation of a method's map from a linear one."""


@dataclass(frozen=True)
class BlockError:
    """The distance of a block's matrix from the exact one.

    Attributes:
        frobenius: ``|C - F|_F``.
        relative: The same over ``|F|_F``; infinite if F is zero and C is not.
        trace_ratio: ``tr(C) / tr(F)``, one if the scale is right.
    """

    frobenius: float
    relative: float
    trace_ratio: float


@dataclass(frozen=True)
class Cosines:
    """Cosines between updates and the exact natural gradient.

    Attributes:
        blocks: By block name, the cosine with the natural gradient of the block alone.
        block_diagonal: The same over all blocks together: with the exact curvature of each block,
            and zero between blocks.
        full: The cosine with the natural gradient of all their parameters together.
    """

    blocks: Mapping[str, float]
    block_diagonal: float
    full: float


def implied_curvature(preconditioner: Preconditioner, name: str) -> Tensor:
    """Return the matrix of a block's method, without damping, from its map of unit vectors.

    ``P`` is the method's map of the unit vectors, with the second-order data of the last solve and
    the damping of the coming step; the matrix is ``P^-1 - damping I``. For a solver that splits the
    damping over factors (``inverse``) it includes the terms that this adds.

    Args:
        preconditioner: A preconditioner on one process.
        name: The name of the block.

    Returns:
        ``[P, P]``, float64, over the flattened parameters of the block in its order.

    Raises:
        ValueError: If the block does not exist or is not solved yet, the preconditioner has several
            ranks, its damping is not a number, or the method's map is not linear, or singular.
    """
    block = _block(preconditioner, name)
    units = torch.eye(sum(_sizes(block)), dtype=block.dtype, device=block.device)
    columns = torch.stack([_directed(preconditioner, block, unit) for unit in units], 1)
    columns = columns.double()
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(len(units), generator=generator, dtype=torch.float64).to(columns)
    expected = columns @ probe
    directed = _directed(preconditioner, block, probe.to(block.dtype)).double()
    tolerance = max(_LINEAR, 1e2 * torch.finfo(block.dtype).eps)
    if not float((directed - expected).norm()) <= tolerance * float(expected.norm()):
        raise ValueError(
            f"{name}: what {block.method!r} makes of gradients is not linear in them, so it stands "
            f"for no matrix; natural_gradient_cosines takes any method"
        )
    damping = block.damped_with(preconditioner.damping)
    try:
        inverse: Tensor = torch.linalg.inv(columns)
    except LinAlgError as error:
        raise ValueError(
            f"{name}: {block.method!r} maps some gradients to zero: no matrix is its inverse"
        ) from error
    identity = torch.eye(len(inverse), dtype=inverse.dtype, device=inverse.device)
    return inverse - damping * identity


def block_errors(
    preconditioner: Preconditioner,
    model: nn.Module,
    inputs: Any,
    loss: Loss,
    targets: Any = None,
    *,
    kind: Kind = "empirical",
    reduction: Reduction = "mean",
) -> dict[str, BlockError]:
    """Return the distance of each block's matrix from the exact curvature of some data.

    It takes ``O(P^3)`` time and the memory of ``[P, P]`` for a block of P parameters. The
    preconditioner is on one process, and its factors were made of the same data, or are to
    generalise from others. `dense_fisher` describes the other arguments: pass
    ``kind="type-2"`` for the generalised Gauss-Newton matrix, the Fisher of losses that are
    log-likelihoods.

    Returns:
        Name of the block -> its error.

    Raises:
        ValueError: See `implied_curvature` and `dense_fisher`.
    """
    errors: dict[str, BlockError] = {}
    for block in preconditioner.blocks:
        curvature = implied_curvature(preconditioner, block.name)
        fisher = dense_fisher(
            model,
            inputs,
            loss,
            targets,
            parameters=_names(model, block),
            kind=kind,
            reduction=reduction,
        )
        error, size = float((curvature - fisher).norm()), float(fisher.norm())
        relative = float("inf") if error else 0.0
        if size > 0:
            relative = error / size
        trace, exact_trace = float(curvature.trace()), float(fisher.trace())
        trace_ratio = trace / exact_trace if exact_trace != 0 else float("nan")
        errors[block.name] = BlockError(error, relative, trace_ratio)
    return errors


def natural_gradient_cosines(
    preconditioner: Preconditioner,
    model: nn.Module,
    inputs: Any,
    loss: Loss,
    targets: Any = None,
    *,
    damping: float | None = None,
    kind: Kind = "empirical",
    reduction: Reduction = "mean",
) -> Cosines:
    """Return the cosines of the last step's updates with the exact natural gradient.

    Call it after ``preconditioner.step()``, before the parameters move or their gradients, which
    hold the updates, are cleared. It takes ``O(P^3)`` time and the memory of ``[P, P]`` for P
    parameters in all. The preconditioner is on one process, ``inputs`` are the step's batch, and
    ``damping`` damps the exact solve, None for each block's in the last step. `dense_fisher`
    describes the other arguments.

    Returns:
        The cosines; 0 if an update or a natural gradient is zero.

    Raises:
        ValueError: If no step was taken, the preconditioner has several ranks, its damping is not a
            number, or see `dense_fisher`.
    """
    metrics = preconditioner.metrics()
    every: list[str] = []
    for block in preconditioner.blocks:
        every += _names(model, block)
    data = {"parameters": every, "kind": kind, "reduction": reduction}
    damped = dense_fisher(model, inputs, loss, targets, **data)  # type: ignore[arg-type]
    gradients = sample_gradients(model, inputs, loss, targets, parameters=every)
    gradient = gradients.mean(0) if reduction == "mean" else gradients.sum(0)
    update, natural = torch.empty_like(gradient), torch.empty_like(gradient)
    cosines: dict[str, float] = {}
    start = 0
    for block in preconditioner.blocks:
        _require_alone(preconditioner, block)
        if metrics["step"] == 0:
            raise ValueError("there is no update yet: call step() before")
        block_damping = damping
        if damping is None:
            block_damping = metrics["blocks"][block.name]["damping"]
        if block_damping is None:  # the method reads none
            block_damping = block.damped_with(preconditioner.damping)
        part = slice(start, start + sum(_sizes(block)))
        start = part.stop
        damped[part, part].diagonal().add_(block_damping)
        update[part] = flat(_gradient(block, p) for p in block.parameters.values())
        natural[part] = torch.linalg.solve(damped[part, part], gradient[part])
        cosines[block.name] = _cosine(update[part], natural[part])
    return Cosines(
        blocks=cosines,
        block_diagonal=_cosine(update, natural),
        full=_cosine(update, torch.linalg.solve(damped, gradient)),
    )


def _block(preconditioner: Preconditioner, name: str) -> Block:
    blocks = {block.name: block for block in preconditioner.blocks}
    if name not in blocks:
        raise ValueError(f"there is no block {name!r}; there are {', '.join(blocks)}")
    block = blocks[name]
    _require_alone(preconditioner, block)
    if not block.solved:
        raise ValueError(f"{name} has no second-order data yet: take a step before")
    return block


def _require_alone(preconditioner: Preconditioner, block: Block) -> None:
    if preconditioner.world_size > 1:
        raise ValueError(
            "the dense curvature is that of all data, which one of several ranks does not have: "
            "measure on one process, with the state of the run"
        )
    if block.relatively_damped:
        raise ValueError(
            f"{block.name}: its damping is relative, no number that a dense matrix could have: "
            f"pass damping= a number to the Preconditioner"
        )


def _names(model: nn.Module, block: Block) -> list[str]:
    """Return the names of a block's parameters in a model, in the block's order."""
    names = {p: name for name, p in model.named_parameters()}
    if not names.keys() >= set(block.parameters.values()):
        raise ValueError("the preconditioner is of another model: pass the model that it was given")
    return [names[parameter] for parameter in block.parameters.values()]


def _sizes(block: Block) -> list[int]:
    return [parameter.numel() for parameter in block.parameters.values()]


def _directed(preconditioner: Preconditioner, block: Block, vector: Tensor) -> Tensor:
    """Return a block's update for a gradient, both flattened over its parameters."""
    parts: dict[str, Tensor] = {}
    vectors = vector.split(_sizes(block))
    for (name, parameter), part in zip(block.parameters.items(), vectors, strict=True):
        parts[name] = part.view_as(parameter)
    matrix = block.stack.join([block.layout.pack(parts)])
    gradients = {block.stack: Gradient((block.member,), matrix)}
    (update,) = preconditioner.curvature.direct(gradients, preconditioner.damping)
    matrices = update.unpacked()[block]
    return flat(matrices[name] for name in block.parameters)


def _gradient(block: Block, parameter: nn.Parameter) -> Tensor:
    gradient = block.home.read(parameter)
    if gradient is None:
        return torch.zeros_like(parameter).flatten().detach()
    return gradient.detach().to_dense().flatten()


def _cosine(first: Tensor, second: Tensor) -> float:
    lengths = float(first.norm()) * float(second.norm())
    return float(first @ second) / lengths if lengths > 0 else 0.0
