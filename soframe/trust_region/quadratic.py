"""The quadratic model of the loss along a few directions, exact up to the Gauss-Newton matrix.

    M(c) = h + b^T c + 1/2 c^T C c,    C_ij = d_i^T (F + damping I) d_j,    b_i = gradient^T d_i

F is the generalised Gauss-Newton matrix of the user's own loss, ``(1/N) sum_n J_n^T H_n J_n``: J by
forward-mode differentiation of the user's own closure, H by differentiating the gradient of the
loss in the model's outputs (Martens and Grosse, 2015, sections 6.4 and 7). Only scalars are reduced
over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.autograd.forward_ad as fwd
from torch import Tensor, nn

from soframe.trust_region.memo import Memo
from soframe.trust_region.replay import Replay

Direction = Sequence[Tensor | None]
"""One tensor per parameter; None for zero."""

Closure = Callable[[], Tensor]
"""Runs the model once and returns the loss, without a backward pass."""


@dataclass(frozen=True)
class Quadratic:
    """The model along k directions.

    Attributes:
        curvature: ``[k, k]``, C.
        slope: ``[k]``, b.
    """

    curvature: Tensor
    slope: Tensor

    def best_with_one_of(self, choices: Sequence[range]) -> tuple[int, Quadratic]:
        """Return which choice of directions, together with those in none, promises most.

        Args:
            choices: The first directions, in runs.

        Returns:
            The number of the choice, and the model along its directions and the rest.
        """
        rest = range(choices[-1].stop, len(self.slope))
        which = [[*choice, *rest] for choice in choices]
        models = [Quadratic(self.curvature[w][:, w], self.slope[w]) for w in which]
        changes = [model.change(model.minimise()) for model in models]
        best = changes.index(min(changes))
        return best, models[best]

    def finite(self) -> bool:
        """Return whether every entry is finite."""
        return bool(self.curvature.isfinite().all() and self.slope.isfinite().all())

    def minimise(self) -> Tensor:
        """Return the coefficients of the minimum.

        Returns:
            ``[k]``, float64. Directions that are zero, or that depend on others, get the least
            coefficients that reach the minimum.
        """
        scale = self.curvature.diagonal().clamp(min=0).sqrt()
        scale = torch.where(scale > 0, scale, 1.0)
        # Scaled to a unit diagonal, so that a short direction is no singular one.
        scaled = self.curvature / scale / scale.unsqueeze(1)
        inverse: Tensor = torch.linalg.pinv(scaled, hermitian=True, rtol=1e-10)
        minimum: Tensor = -(inverse @ (self.slope / scale)) / scale
        return minimum

    def change(self, coefficients: Tensor) -> float:
        """Return the predicted change of the loss, ``M(c) - M(0)``.

        Args:
            coefficients: ``[k]``.
        """
        quadratic = 0.5 * coefficients @ self.curvature @ coefficients
        return float(self.slope @ coefficients + quadratic)


@contextmanager
def dual_parameters(model: nn.Module, tangents: dict[int, Tensor]) -> Iterator[None]:
    """Give parameters a tangent for the time of a forward pass.

    Args:
        model: The model; its parameters are the same objects afterwards.
        tangents: The tangent of each parameter, by its ``id``.

    Yields:
        Nothing.
    """
    slots = [
        (module._parameters, name, parameter)
        for module in model.modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and id(parameter) in tangents
    ]
    duals = {id(p): fwd.make_dual(p.detach(), tangents[id(p)]) for _, _, p in slots}
    try:
        for parameters, name, parameter in slots:
            parameters[name] = duals[id(parameter)]
        yield
    finally:
        for parameters, name, parameter in slots:
            parameters[name] = parameter


@dataclass(frozen=True)
class Forward:
    """What the model needs of one forward pass, with gradients, of one micro-batch.

    Attributes:
        closure: What was run.
        replay: How to run it again.
        outputs: The model's outputs, one or several.
        gradients: The gradients of the loss in them, themselves differentiable.
        memo: What the pass computed; None to compute it again.
    """

    closure: Closure
    replay: Replay
    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    memo: Memo | None = None

    def hessian_product(self, tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the Hessian of the loss in the outputs, times a tangent.

        Args:
            tangents: One of each output's shape.

        Returns:
            One of each output's shape.
        """
        rows = [
            (gradient, tangent)
            for gradient, tangent in zip(self.gradients, tangents, strict=True)
            if gradient.requires_grad  # not where the loss is linear in the output
        ]
        if not rows:
            return tuple(torch.zeros_like(tangent) for tangent in tangents)
        gradients, vectors = zip(*rows, strict=True)
        products: tuple[Tensor, ...] = torch.autograd.grad(
            gradients, self.outputs, vectors, retain_graph=True, materialize_grads=True
        )
        return products


class Outputs:
    """Collects the outputs of a model's forward passes, while a closure runs.

    Args:
        model: The model; the hook is removed by `close`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen: list[tuple[Tensor, ...]] | None = None
        self._cut = False
        self._handle = model.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: object, output: object) -> object:
        if self._seen is None:
            return None
        found = (output,) if isinstance(output, Tensor) else output
        if not isinstance(found, tuple | list) or not all(isinstance(o, Tensor) for o in found):
            raise TypeError(
                f"{type(module).__name__} returns {type(output).__name__}; the quadratic model "
                f"needs a model that returns a tensor, or a tuple or list of tensors"
            )
        self._seen.append(tuple(found))
        if not self._cut:
            return None
        primals = [fwd.unpack_dual(tensor).primal for tensor in found]
        if isinstance(output, Tensor):
            return primals[0]
        named = hasattr(output, "_fields")
        return type(output)(*primals) if named else type(output)(primals)  # type: ignore[call-arg]

    def of(self, closure: Closure, *, cut: bool = False) -> tuple[tuple[Tensor, ...], Tensor]:
        """Run a closure.

        Args:
            closure: It runs the model once and returns a scalar loss.
            cut: Whether tangents end at the model's outputs: the loss is computed without.

        Returns:
            The model's outputs and the loss.

        Raises:
            RuntimeError: If the model was not run exactly once.
            TypeError: If the loss is no scalar tensor.
        """
        seen: list[tuple[Tensor, ...]] = []
        self._seen, self._cut = seen, cut
        try:
            loss: object = closure()
        finally:
            self._seen, self._cut = None, False
        if len(seen) != 1:
            raise RuntimeError(
                f"a closure must run the model once, not {len(seen)} times; pass a list with one "
                f"closure for every micro-batch"
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(f"a closure must return its loss, a scalar tensor, not {loss!r}")
        return seen[0], loss

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()


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


def curvature_along(
    model: nn.Module,
    forwards: Sequence[Forward],
    outputs: Outputs,
    parameters: Sequence[nn.Parameter],
    directions: Sequence[Direction],
) -> Tensor:
    """Return ``d_i^T F d_j`` for this rank's data, without damping.

    Args:
        model: The model.
        forwards: One per micro-batch.
        outputs: The model's collector.
        parameters: The parameters.
        directions: k directions.

    Returns:
        ``[k, k]``, float64, on the CPU: of the sum of the closures' losses.
    """
    total = torch.zeros(len(directions), len(directions), dtype=torch.float64)
    for forward in forwards:
        tangents = [
            jacobian_product(model, forward, outputs, parameters, direction)
            for direction in directions
        ]
        for i, tangent in enumerate(tangents):
            products = forward.hessian_product(tangent)
            # One by one: copies of outputs into one matrix would cost more than the products.
            for product, *others in zip(products, *tangents[: i + 1], strict=True):
                row = [product.flatten() @ other.flatten() for other in others]
                total[i, : i + 1] += torch.stack(row).double().cpu()
    return total + total.tril(-1).T


def jacobian_product(
    model: nn.Module,
    forward: Forward,
    outputs: Outputs,
    parameters: Sequence[nn.Parameter],
    direction: Direction,
) -> tuple[Tensor, ...]:
    """Return the derivative of the model's outputs along a direction.

    Args:
        model: The model.
        forward: The forward pass to differentiate.
        outputs: The model's collector.
        parameters: The parameters.
        direction: The direction; what comes before its first parameter is not differentiated.

    Returns:
        One of each output's shape.
    """
    rows = zip(parameters, direction, strict=True)
    tangents = {id(p): d for p, d in rows if d is not None}
    with (
        torch.no_grad(),
        forward.replay.again(),
        fwd.dual_level(),
        dual_parameters(model, tangents),
        nullcontext() if forward.memo is None else forward.memo.recall(),
    ):
        found, _ = outputs.of(forward.closure, cut=True)
        duals = [fwd.unpack_dual(output) for output in found]
    return tuple(
        torch.zeros_like(dual.primal) if dual.tangent is None else dual.tangent for dual in duals
    )


def inner_products(directions: Sequence[Direction]) -> Tensor:
    """Return the inner products of every two of k directions.

    Args:
        directions: The directions.

    Returns:
        ``[k, k]``, float64, on the CPU; those of each parameter are added up in float64.
    """
    parts = []
    for tensors in zip(*directions, strict=True):
        zero = next((torch.zeros_like(tensor) for tensor in tensors if tensor is not None), None)
        if zero is None:
            continue
        own = [zero if tensor is None else tensor.detach() for tensor in tensors]
        rows = torch.stack(own).flatten(1)
        parts.append((rows @ rows.T).double())
    if not parts:
        return torch.zeros(len(directions), len(directions), dtype=torch.float64)
    return torch.stack(parts).sum(0).cpu()


def combine(
    parameters: Sequence[Tensor], directions: Sequence[Direction], coefficients: Tensor
) -> list[Tensor]:
    """Return a linear combination of directions, in new tensors of the parameters' shapes."""
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for direction, coefficient in zip(directions, coefficients, strict=True):
        rows = [(t, d) for t, d in zip(total, direction, strict=True) if d is not None]
        if rows:
            into, added = zip(*rows, strict=True)
            torch._foreach_add_(list(into), list(added), alpha=float(coefficient))
    return total
