"""A forward pass of the user's closure, and what derivatives need of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from soframe.derivatives.denormals import users_mode
from soframe.derivatives.replay import Replay
from soframe.derivatives.tape import Tape
from soframe.derivatives.twice import Direction, tangents_by_gradients
from soframe.losses.base import Loss

Closure = Callable[[], Tensor]
"""Runs the model, once or several times, and returns the loss, without a backward pass."""

FORWARD = (
    "let the model's forward do all of that, and return what the loss is of; a module may wrap the "
    "model for it"
)
"""The remedy where a closure asks for more than outputs of the model."""


@dataclass(frozen=True)
class Forward:
    """What the model needs of one forward pass, with gradients, of one micro-batch.

    Attributes:
        closure: What was run.
        replay: How to run it again.
        outputs: The model's outputs, one or several; those of several calls one after the other.
        gradients: The gradients of the loss in them, themselves differentiable.
        tape: What the pass called.
        calls: How many times it called the model.
        expected: The declared loss, where its expected Hessian is to stand for the closure's own.
    """

    closure: Closure
    replay: Replay
    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    tape: Tape = field(default_factory=lambda: Tape(reuse=False))
    calls: int = 1
    expected: Loss | None = None

    @cached_property
    def _counts(self) -> list[Tensor]:
        """What each term of the expected loss is multiplied by, in each output."""
        assert self.expected is not None
        counts, rows = self.expected.counts, zip(self.outputs, self.gradients, strict=True)
        return [counts(output.detach(), g.detach()).to(output.dtype) for output, g in rows]

    def joined(self, each: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs of one call that has the samples of all.

        Args:
            each: Of each output, or what is of its shape.

        Returns:
            Itself, if there is one call.
        """
        if self.calls == 1:
            return tuple(each)
        count = len(each) // self.calls
        return tuple(torch.cat([*each[number::count]]) for number in range(count))

    def hessian_product_of_joined(self, tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the Hessian of the loss in the outputs of all calls together, times a tangent.

        Args:
            tangents: One of each joined output's shape.

        Returns:
            One of each joined output's shape.
        """
        count = len(self.outputs) // self.calls
        pieces = [
            tangent.split([len(output) for output in self.outputs[number::count]])
            for number, tangent in enumerate(tangents)
        ]
        by_call = [
            piece for pieces_of_call in zip(*pieces, strict=True) for piece in pieces_of_call
        ]
        return self.joined(self.hessian_product(by_call))

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
        if self.expected is not None:
            product = self.expected.hessian_product
            each = zip(self._counts, self.outputs, tangents, strict=True)
            return tuple(count * product(output.detach(), v) for count, output, v in each)
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


def evaluated(closure: Closure, replay: Replay, *, differentiates: bool) -> float:
    """Return the loss of a closure, at the parameters of now, and leave no trace.

    Args:
        closure: The closure.
        replay: The random state from which it runs.
        differentiates: Whether it asks for gradients itself, as of outputs in inputs.
    """
    with torch.set_grad_enabled(differentiates), replay.again():
        return float(closure().detach())


class Outputs:
    """Collects the outputs of a model's forward passes, while a closure runs.

    Args:
        model: The model; the hooks are removed by `close`.

    Attributes:
        calls: How many times the last closure called the model with gradients.
        differentiates: Whether the last closure, or the model in it, asked for gradients itself;
            true as long as none has run.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen: list[tuple[Tensor, ...]] | None = None
        self._constant: list[tuple[Tensor, ...]] = []
        self._tape: Tape | None = None
        self.calls, self.differentiates = 1, True
        self._handles = (
            model.register_forward_pre_hook(self._before),
            model.register_forward_hook(self._hook),
        )

    def _before(self, module: nn.Module, args: object) -> None:
        del module, args
        if self._seen and self._tape is not None and torch.is_grad_enabled():
            self._tape.go_on()

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
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, outputs)):
            raise RuntimeError(
                f"the closure calls the model within a transformation of torch.func (vmap, grad, "
                f"jacrev, jvp), where there are no outputs to differentiate the loss in: {FORWARD}"
            )
        if not torch.is_grad_enabled():  # a constant: nothing of it is differentiated
            self._constant.append(tuple(outputs))
            return None
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
            closure: It runs the model and returns a scalar loss.
            tape: Notes what is called until there are outputs.

        Returns:
            The model's outputs, those of several calls one after the other, and the loss.

        Raises:
            RuntimeError: If the model was not run, or is no single function of what it was given:
                calls have other numbers of outputs, or within `torch.func`.
            TypeError: If the loss is no scalar tensor.
        """
        seen: list[tuple[Tensor, ...]] = []
        self._seen, self._constant = seen, []
        self._tape = Tape(reuse=False) if tape is None else tape
        try:
            with self._tape.record():
                loss: object = closure()
            self.differentiates = self._tape.differentiates
            calls = seen or self._constant[:1]  # that it has no gradient is told of the latter
        finally:
            self._seen, self._constant, self._tape = None, [], None
        if not calls:
            raise RuntimeError("a closure must run the model, and did not")
        if len({len(one) for one in calls}) > 1:
            raise RuntimeError(
                f"calls of the model in one closure return other numbers of tensors "
                f"({', '.join(str(len(one)) for one in calls)}): {FORWARD}"
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(f"a closure must return its loss, a scalar tensor, not {loss!r}")
        self.calls = len(calls)
        return tuple(output for one in calls for output in one), loss

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
