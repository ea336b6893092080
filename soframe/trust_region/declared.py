"""Holding the declared loss against the closure's: most mistakes here are ones of scale."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from soframe.losses.base import Loss
from soframe.losses.sum import SumLoss
from soframe.trust_region.forward import Forward


def mismatch(declared: Loss | None, forwards: Sequence[Forward]) -> str | None:
    """Compare the curvature of the closure's loss with that of the declared one.

    Args:
        declared: The declared loss.
        forwards: The forward passes of a step, one per closure.

    Returns:
        How they differ and what to do; None if they agree.

    Raises:
        TypeError: If there are several outputs, and the declared loss is no sum over them.
    """
    assert declared is not None
    forward = forwards[0]
    outputs = [output.detach() for output in forward.outputs]
    generator = torch.Generator(outputs[0].device).manual_seed(0)  # the user's stays as it is
    tangents = [
        torch.randn(output.shape, generator=generator, dtype=output.dtype, device=output.device)
        for output in outputs
    ]
    expected = _inner(tangents, _hessian_products(declared, outputs, tangents))
    samples = len(outputs[0])
    actual = _inner(tangents, forward.hessian_product(tangents)) * samples * len(forwards)
    # Saturated outputs leave a curvature that is all rounding, which says nothing of a scale.
    rounding = 16 * torch.finfo(outputs[0].dtype).eps
    noise = rounding * _inner(tangents, tangents)
    if math.isclose(actual, expected, rel_tol=max(1e-3, rounding), abs_tol=noise):
        return None
    times = actual / expected if expected else math.inf
    return (
        f"the closure's loss has {times:.4g} times the curvature of loss={declared!r}, as a "
        f"mean over {samples} samples and {len(forwards)} closure(s); declare the loss "
        f"that the closure returns"
    )


def require_agreement(problem: str | None, others: float) -> None:
    """Raise on every rank if the losses disagree on one, so that none waits for it in vain.

    Args:
        problem: What `mismatch` returned on this rank.
        others: On how many ranks there is a problem, this one included.

    Raises:
        ValueError: If there is any.
    """
    if problem is not None:
        raise ValueError(problem)
    if others:
        raise ValueError(
            f"the closure's loss is not the declared one on {others:.0f} other rank(s): see their "
            f"own error"
        )


def require_only_through(
    outputs: Sequence[Tensor], loss: Tensor, parameters: Sequence[nn.Parameter]
) -> None:
    """Check that a loss depends on the parameters through the model's outputs alone.

    Args:
        outputs: The model's outputs.
        loss: The loss.
        parameters: The parameters.

    Raises:
        RuntimeError: If it does not: such a term has no place in the model of the loss.
    """
    own = {id(parameter) for parameter in parameters}
    seen = {None, *(output.grad_fn for output in outputs)}
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node in seen:
            continue
        assert node is not None
        seen.add(node)
        if id(getattr(node, "variable", None)) in own:
            raise RuntimeError(
                "the closure's loss depends on parameters other than through the model's output; "
                "decay weights with weight_decay="
            )
        todo += [following for following, _ in node.next_functions]


def _inner(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    return sum(float((a * b).sum()) for a, b in zip(one, other, strict=True))


def _hessian_products(
    declared: Loss, outputs: Sequence[Tensor], vectors: Sequence[Tensor]
) -> Sequence[Tensor]:
    if len(outputs) == 1:
        return [declared.hessian_product(outputs[0], vectors[0])]
    if not isinstance(declared, SumLoss):
        raise TypeError(
            f"the model returns {len(outputs)} tensors: declare a soframe.losses.SumLoss with a "
            f"Term for each (output=0, 1, ...) rather than {declared!r}"
        )
    return declared.hessian_products(outputs, vectors)
