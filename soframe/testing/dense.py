"""Exact curvature by plain autograd: the reference for every approximation in soframe.

Everything here is one loop over samples in float64: slow, and short enough to be checked by eye. It
imports torch alone and shares no line with the code under test.

For samples ``n = 1..N`` with network output ``f_n`` of ``K`` elements and loss ``l_n``, the block
of the ``P`` chosen parameters is::

    F = (1/N) sum_n J_n^T H_n J_n        J_n = d f_n / d theta            [K, P]
    empirical:  H_n = g_n g_n^T,         g_n = d l_n / d f_n              [K]
    type-2:     H_n = d^2 l_n / d f_n^2                                   [K, K]

The sample axis is the first axis of every tensor in ``inputs`` and ``targets``; all other axes of
the output (positions, channels) belong to the sample. Sample ``n`` is evaluated as a batch of one,
so ``l_n = loss(model(inputs[n:n+1]), targets[n:n+1])``. A Monte-Carlo Fisher is the empirical one
on targets drawn from the model.

A vector over parameters concatenates their flattened values, in the order in which they are named;
``soframe.testing.layer_blocks`` reorders it into a layer's gradient matrix.

Sources: Martens, "New insights and perspectives on the natural gradient method" (2020), sections 5
and 8; the names "type-2" and "empirical" follow Eschenhagen et al., "Kronecker-factored approximate
curvature for modern neural network architectures" (2023), and Dangel et al. (2025).
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

Loss = Callable[..., Tensor]
Kind = Literal["empirical", "type-2"]
Reduction = Literal["mean", "sum"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def dense_fisher(
    model: nn.Module,
    inputs: Any,
    loss: Loss,
    targets: Any = None,
    *,
    parameters: Sequence[str] | None = None,
    kind: Kind = "empirical",
    reduction: Reduction = "mean",
) -> Tensor:
    """Return the exact Fisher (empirical) or generalised Gauss-Newton (type-2) block.

    The model is left as it was: parameters, buffers, ``.grad`` and modes do not change, and hooks
    (a preconditioner's, for example) do not fire. Only its values count, in float64.

    Args:
        model: Any network; for ``type-2`` it must return one tensor, of any shape.
        inputs: A tensor ``[N, ...]``, a tuple of arguments or a mapping of keyword arguments.
        loss: ``loss(output, targets)``, or ``loss(output)`` if ``targets`` is None.
        targets: A tensor ``[N, ...]`` or a nest of such tensors.
        parameters: Names, in the order of the block; by default every trainable parameter, in the
            order of ``model.named_parameters()``.
        kind: The choice of ``H_n`` (see the module's docstring).
        reduction: The loss's reduction over samples. ``"mean"`` divides the sum over samples by N,
            ``"sum"`` does not: either way the block is the curvature of the given loss.

    Returns:
        The block ``[P, P]``, float64, on the model's device.

    Raises:
        ValueError: If a parameter is named twice; if sample axes differ; if the loss of the batch
            is not the declared reduction of the losses of its samples (batch norm in training mode,
            dropout, a weighted or masked mean, a wrong ``reduction``), because the formula above is
            then not the loss's curvature.
        TypeError: If the output is not one tensor and ``kind`` is ``"type-2"``.
    """
    names = _resolve(model, parameters)
    loss = _double_loss(loss)
    samples = _count(inputs, targets)
    size = sum(model.get_parameter(name).numel() for name in names)
    device = next(model.parameters()).device
    block = torch.zeros(size, size, dtype=torch.float64, device=device)
    total, scale = 0.0, 0.0
    for n in range(samples):
        output, leaves = _forward(model, names, _sample(inputs, n))
        target = _sample(targets, n)
        if kind == "empirical":
            value = _value(loss, output, target)
            gradient = _flat_gradient(value, leaves)
            block += torch.outer(gradient, gradient)
        else:
            if not isinstance(output, Tensor):
                raise TypeError(f"type-2 needs one output tensor, got {type(output).__name__}")
            value, hessian = _output_hessian(loss, output, target)
            jacobian = torch.stack([_flat_gradient(o, leaves) for o in output.flatten()])
            block += jacobian.T @ hessian @ jacobian
        total += float(value.detach())
        scale += abs(float(value.detach()))
    if reduction == "mean":
        block /= samples
        total, scale = total / samples, scale / samples
    batch_output, _ = _forward(model, [], _map(double, inputs))
    batch = float(_value(loss, batch_output, _map(double, targets)).detach())
    # Written so that a NaN fails.
    if not abs(batch - total) <= 1e-7 * scale:
        raise ValueError(
            f"the loss of the batch is {batch:.9g}, the {reduction} of its samples' losses "
            f"{total:.9g}: either they are combined in another way (batch norm in training mode, "
            "dropout, a masked or weighted mean), or the reduction declared is not the loss's"
        )
    return block


def sample_gradients(
    model: nn.Module,
    inputs: Any,
    loss: Loss,
    targets: Any = None,
    *,
    parameters: Sequence[str] | None = None,
) -> Tensor:
    """Return the gradient of every sample's own loss, one backward pass each.

    `dense_fisher` describes arguments and errors; here no reduction, and so no batch loss, is
    checked. The mean over the first axis is the gradient of a mean loss.

    Returns:
        The gradients ``[N, P]``, float64.
    """
    names = _resolve(model, parameters)
    loss = _double_loss(loss)
    rows = []
    for n in range(_count(inputs, targets)):
        output, leaves = _forward(model, names, _sample(inputs, n))
        rows.append(_flat_gradient(_value(loss, output, _sample(targets, n)), leaves))
    return torch.stack(rows)


def _resolve(model: nn.Module, names: Sequence[str] | None) -> list[str]:
    # A tied parameter has its first name, also if another one is given.
    first = {id(p): name for name, p in model.named_parameters()}
    if names is None:
        names = [name for name, p in model.named_parameters() if p.requires_grad]
    resolved = [first[id(model.get_parameter(name))] for name in names]
    if len(set(resolved)) < len(resolved):
        raise ValueError(f"a parameter is named twice (tied?): {list(names)}")
    return resolved


def _map(function: Callable[[Tensor], Tensor], nest: Any) -> Any:
    if isinstance(nest, Tensor):
        return function(nest)
    if isinstance(nest, Mapping):
        return {key: _map(function, value) for key, value in nest.items()}
    if isinstance(nest, tuple | list):
        return type(nest)(_map(function, value) for value in nest)
    return nest


def double(tensor: Tensor) -> Tensor:
    """Return a floating-point tensor in float64, and others as they are."""
    return tensor.detach().double() if tensor.is_floating_point() else tensor


def _sample(nest: Any, n: int) -> Any:
    return _map(lambda tensor: double(tensor[n : n + 1]), nest)


def _count(inputs: Any, targets: Any) -> int:
    counts: set[int] = set()

    def add(tensor: Tensor) -> Tensor:
        counts.add(tensor.shape[0])
        return tensor

    _map(add, (inputs, targets))
    if len(counts) != 1 or counts == {0}:
        raise ValueError(f"tensors must share one non-empty sample axis, got {sorted(counts)}")
    return counts.pop()


@contextmanager
def _without_hooks(model: nn.Module) -> Generator[None, None, None]:
    """Disable the hooks of every module, so that the measurement adds no statistics."""
    saved = []
    for module in model.modules():
        for name in _HOOKS:
            hooks = getattr(module, name)
            saved.append((module, name, hooks))
            # torch's own hooks (weight_norm, spectral_norm) compute the weights: they stay.
            kept = [(k, h) for k, h in hooks.items() if type(h).__module__.startswith("torch.")]
            setattr(module, name, OrderedDict(kept))
    try:
        yield
    finally:
        for module, name, hooks in saved:
            setattr(module, name, hooks)


def _forward(model: nn.Module, names: Sequence[str], inputs: Any) -> tuple[Any, list[Tensor]]:
    """Run the model on float64 copies of its tensors."""
    state = {name: p.detach().double() for name, p in model.named_parameters()}
    leaves = [state[name].clone().requires_grad_() for name in names]
    state |= dict(zip(names, leaves, strict=True))
    # Cloned: a buffer that the forward pass updates must not change in the model.
    state |= {name: double(b).clone() for name, b in model.named_buffers()}
    args: tuple[Any, ...] = (inputs,)
    kwargs: dict[str, Any] = {}
    if isinstance(inputs, Mapping):
        args, kwargs = (), dict(inputs)
    elif isinstance(inputs, tuple | list):
        args = tuple(inputs)
    with _without_hooks(model), torch.enable_grad():
        output = torch.func.functional_call(model, state, args, kwargs)
    return output, leaves


def _double_loss(loss: Loss) -> Loss:
    return copy.deepcopy(loss).double() if isinstance(loss, nn.Module) else loss


def _value(loss: Loss, output: Any, target: Any) -> Tensor:
    with torch.enable_grad():
        value = loss(output) if target is None else loss(output, target)
    if value.numel() != 1:
        raise ValueError(f"a loss must have one element, not the shape {tuple(value.shape)}")
    return value.reshape(())


def _flat_gradient(scalar: Tensor, leaves: Sequence[Tensor]) -> Tensor:
    """Return d scalar / d leaves as one vector; zero for leaves outside the scalar's graph."""
    if not scalar.requires_grad:
        return flat(map(torch.zeros_like, leaves))
    return flat(torch.autograd.grad(scalar, leaves, retain_graph=True, materialize_grads=True))


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Return the entries of tensors in one vector."""
    return torch.cat([tensor.flatten() for tensor in tensors])


def _output_hessian(loss: Loss, output: Tensor, target: Any) -> tuple[Tensor, Tensor]:
    """Return the loss at ``output`` and its Hessian ``[K, K]`` in the flattened output."""
    point = output.detach().requires_grad_()
    value = _value(loss, point, target)
    (gradient,) = torch.autograd.grad(value, point, create_graph=True)
    rows = [_flat_gradient(element, [point]) for element in gradient.flatten()]
    return value.detach(), torch.stack(rows)
