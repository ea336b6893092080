"""A forward pass of the user's closure, and what derivatives need of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from soframe.derivatives.denormals import users_mode
from soframe.derivatives.replay import Replay
from soframe.derivatives.tape import Tape
from soframe.derivatives.twice import Direction, tangents_by_gradients

Closure = Callable[[], Tensor]
"""Runs the model once and returns the loss, without a backward pass."""


@dataclass(frozen=True)
class Forward:
    """What the model needs of one forward pass, with gradients, of one micro-batch.

    Attributes:
        closure: What was run.
        replay: How to run it again.
        outputs: The model's outputs, one or several.
        gradients: The gradients of the loss in them, themselves differentiable.
        tape: What the pass called.
    """

    closure: Closure
    replay: Replay
    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    tape: Tape = field(default_factory=lambda: Tape(reuse=False))

    def backward(self) -> None:
        """Add the gradients of the loss to those of the parameters.

        From the outputs, not the loss: the Hessian needs the graph in between again. That of the
        model stays only where there is no tape to follow.
        """
        with self.tape.in_same_kernels():
            torch.autograd.backward(
                self.outputs,
                [gradient.detach() for gradient in self.gradients],
                retain_graph=not self.tape.holds(),
            )

    def jacobian_products(
        self, parameters: Sequence[nn.Parameter], directions: Sequence[Direction]
    ) -> list[tuple[Tensor, ...]]:
        """Return the derivatives of the outputs along directions.

        By the tape if that can be followed, else by differentiating the gradient, as long as
        nothing that the pass has computed with has changed.

        Args:
            parameters: The parameters.
            directions: k directions.

        Returns:
            For each direction one of each output's shape.

        Raises:
            RuntimeError: If there are no such derivatives, or what they need has changed.
        """
        if not self.tape.holds():
            with users_mode(), self.tape.in_same_kernels():
                return tangents_by_gradients(self.outputs, parameters, directions)
        rows = self.tape.tangents(parameters, directions)
        each = [
            [torch.zeros_like(output) if tangent is None else tangent for tangent in row]
            for output, row in zip(self.outputs, rows, strict=True)
        ]
        return [*zip(*each, strict=True)]

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

    def isotropy(self) -> float | None:
        """Return c if the Hessian of the loss in the output is c times the identity.

        Returns:
            None if it is not, as the output itself tells, whose product with it is taken.
        """
        if len(self.outputs) != 1:
            return None
        output = self.outputs[0].detach()
        (product,) = self.hessian_product([output])
        output, product = output.flatten(), product.flatten()
        square = output @ output
        scale = output @ product / square
        error = torch.linalg.vector_norm(torch.addcmul(product, output, scale, value=-1))
        most = 128 * torch.finfo(output.dtype).eps * scale.abs() * square.sqrt()
        return float(scale) if error <= most else None  # None for an output of zeros, a NaN


def evaluated(closure: Closure, replay: Replay) -> float:
    """Return the loss of a closure, at the parameters of now, and leave no trace.

    Args:
        closure: The closure.
        replay: The random state from which it runs.
    """
    with torch.no_grad(), replay.again():
        return float(closure())


class Outputs:
    """Collects the outputs of a model's forward passes, while a closure runs.

    Args:
        model: The model; the hook is removed by `close`.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen: list[tuple[Tensor, ...]] | None = None
        self._tape: Tape | None = None
        self._handle = model.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: object, output: object) -> object:
        if self._seen is None or self._tape is None:
            return None
        outputs = (output,) if isinstance(output, Tensor) else output
        if not isinstance(outputs, tuple | list) or not all(
            isinstance(one, Tensor) for one in outputs
        ):
            raise TypeError(
                f"{type(module).__name__} returns {type(output).__name__}; the quadratic model "
                f"needs a model that returns a tensor, or a tuple or list of tensors"
            )
        self._tape.end(outputs)
        if isinstance(output, Tensor):
            self._seen.append((output,))
            return None
        # One output may be made of another. The loss is to be differentiated in each, and not in
        # one by way of another: so it gets views, of which nothing else is made.
        views = [one.view_as(one) for one in outputs]
        self._seen.append(tuple(views))
        kind: Any = type(output)
        return kind(*views) if hasattr(output, "_fields") else kind(views)

    def of(self, closure: Closure, tape: Tape | None = None) -> tuple[tuple[Tensor, ...], Tensor]:
        """Run a closure.

        Args:
            closure: It runs the model once and returns a scalar loss.
            tape: Notes what is called until there are outputs.

        Returns:
            The model's outputs and the loss.

        Raises:
            RuntimeError: If the model was not run exactly once.
            TypeError: If the loss is no scalar tensor.
        """
        seen: list[tuple[Tensor, ...]] = []
        self._seen, self._tape = seen, Tape(reuse=False) if tape is None else tape
        try:
            with self._tape.record():
                loss: object = closure()
        finally:
            self._seen, self._tape = None, None
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
