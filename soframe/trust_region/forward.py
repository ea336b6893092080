"""One forward pass of the user's closure, and its derivatives for the quadratic model."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from soframe.losses.base import Loss
from soframe.trust_region.replay import Replay, eagerly
from soframe.trust_region.twice import Direction, PlainKernels, jacobian_products

Closure = Callable[[], Tensor]
"""Runs the model, once or several times, and returns the loss, without a backward pass."""

FORWARD = (
    "let the model's forward do all of that, and return what the loss is of; a module may wrap the "
    "model for it"
)

_Edge = tuple[Any, int]
"""An autograd function, and the index of its result."""


@dataclass(frozen=True)
class Forward:
    """A forward pass of one closure.

    Attributes:
        closure: The closure.
        replay: The random state and buffers for another run.
        outputs: The model's outputs, of all calls in order.
        gradients: The gradients of the loss in them, themselves differentiable.
        kernels: The kernels that the pass ran in.
        calls: The number of the closure's calls of the model.
        expected: The declared loss, if its expected Hessian replaces the closure's own.
    """

    closure: Closure
    replay: Replay
    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    kernels: PlainKernels
    calls: int = 1
    expected: Loss | None = None

    def backward(self) -> None:
        """Accumulate the gradients of the loss in the parameters'; the graph stays."""
        with self.kernels.again():
            torch.autograd.backward(
                self.outputs, [gradient.detach() for gradient in self.gradients], retain_graph=True
            )

    def jacobian_products(
        self, parameters: Sequence[nn.Parameter], directions: Sequence[Direction]
    ) -> list[tuple[Tensor, ...]]:
        """Return the derivatives of the outputs along k directions, one of each output's shape."""
        with self.kernels.again():
            return jacobian_products(self.outputs, parameters, directions)

    @cached_property
    def _counts(self) -> list[Tensor]:
        assert self.expected is not None
        counts, rows = self.expected.counts, zip(self.outputs, self.gradients, strict=True)
        return [counts(output.detach(), g.detach()).to(output.dtype) for output, g in rows]

    def hessian_product(self, tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the Hessian of the loss in the outputs times a tangent, in the outputs' shapes."""
        if self.expected is not None:
            product = self.expected.hessian_product
            each = zip(self._counts, self.outputs, tangents, strict=True)
            return tuple(count * product(output.detach(), v) for count, output, v in each)
        rows = [
            (gradient, tangent)
            for gradient, tangent in zip(self.gradients, tangents, strict=True)
            if gradient.requires_grad  # not if the loss is linear in the output
        ]
        if not rows:
            return tuple(torch.zeros_like(tangent) for tangent in tangents)
        gradients, vectors = zip(*rows, strict=True)
        products: tuple[Tensor, ...] = torch.autograd.grad(
            gradients, self.outputs, vectors, retain_graph=True, materialize_grads=True
        )
        return products


class Outputs:
    """Collects a model's outputs while a closure runs, by a forward hook that `close` removes.

    Attributes:
        differentiates: Whether the last closure computed gradients itself; True before the first.
    """

    def __init__(self, model: nn.Module) -> None:
        self._seen: list[tuple[Tensor, ...]] | None = None
        self._constant: list[tuple[Tensor, ...]] = []
        self.differentiates = True
        self._handle = model.register_forward_hook(self._hook)

    def _hook(self, module: nn.Module, args: object, output: object) -> object:
        if self._seen is None:
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
                f"jacrev, jvp), where the loss cannot be differentiated in its outputs: {FORWARD}"
            )
        if not torch.is_grad_enabled():  # a constant of the loss
            self._constant.append(tuple(outputs))
            return None
        if isinstance(output, Tensor):
            self._seen.append((output,))
            return None
        # One output may be made of another, and the loss is differentiated in each separately: the
        # closure gets views, which no other output is made of.
        views = [one.view_as(one) for one in outputs]
        self._seen.append(tuple(views))
        kind: Any = type(output)
        return kind(*views) if hasattr(output, "_fields") else kind(views)

    def of(self, closure: Closure, kernels: PlainKernels) -> tuple[tuple[Tensor, ...], int, Tensor]:
        """Run a closure; return the outputs of all calls, the number of calls, and the loss."""
        seen: list[tuple[Tensor, ...]] = []
        self._seen, self._constant = seen, []
        try:
            with eagerly(), kernels:
                loss: object = closure()
            self.differentiates = kernels.differentiates
            calls = seen or self._constant[:1]  # `_require_graph` names the missing gradient
        finally:
            self._seen, self._constant = None, []
        if not calls:
            raise RuntimeError("a closure must run the model, and did not")
        if len({len(one) for one in calls}) > 1:
            raise RuntimeError(
                f"calls of the model in one closure return different numbers of tensors "
                f"({', '.join(str(len(one)) for one in calls)}): {FORWARD}"
            )
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise TypeError(f"a closure must return its loss, a scalar tensor, not {loss!r}")
        return tuple(output for one in calls for output in one), len(calls), loss

    def close(self) -> None:
        """Remove the hook."""
        self._handle.remove()


def first_pass(
    model: nn.Module,
    outputs: Outputs,
    closure: Closure,
    parameters: Sequence[nn.Parameter],
    loss: Loss | None = None,
) -> tuple[Forward, Tensor]:
    """Run a closure and differentiate its loss in the outputs; ``loss`` is the declared one."""
    replay, kernels = Replay(model), PlainKernels()
    with _no_gradient_changes(parameters):
        seen, calls, value = outputs.of(closure, kernels)
    _require_graph(seen, value)
    _require_apart(seen, calls)
    gradients = torch.autograd.grad(value, seen, create_graph=True, materialize_grads=True)
    _require_only_through(seen, value, parameters)
    expected = loss if loss is not None and loss.expected else None
    return Forward(closure, replay, seen, gradients, kernels, calls, expected), value


def evaluated(forwards: Iterable[tuple[Closure, Replay]], *, differentiates: bool) -> float:
    """Return the sum of the closures' losses at the present parameters, without side effects."""
    total = 0.0
    for closure, replay in forwards:
        with torch.set_grad_enabled(differentiates), replay.again():
            total += float(closure().detach())
    return total


@contextmanager
def moved(parameters: Sequence[nn.Parameter], update: Sequence[Tensor]) -> Iterator[None]:
    """A context with updated parameters in new storage: the graphs of earlier passes stay valid."""
    with placed(parameters, [p.data + more for p, more in zip(parameters, update, strict=True)]):
        yield


@contextmanager
def placed(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> Iterator[None]:
    """A context with other values of the parameters, in new storage."""
    before = [parameter.data for parameter in parameters]
    try:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value
        yield
    finally:
        for parameter, value in zip(parameters, before, strict=True):
            parameter.data = value


def closures_of(closure: Closure | Sequence[Closure]) -> list[Closure]:
    """Return the closures of a step as a list."""
    closures = list(closure) if isinstance(closure, Sequence) else [closure]
    if not closures or not all(map(callable, closures)):
        raise TypeError(
            f"TrustRegion.step takes a closure that returns the loss, or a list of closures with "
            f"one for every micro-batch, not {closure!r}"
        )
    return closures


# -- requirements of a closure -------------------------------------------------------------------


@contextmanager
def _no_gradient_changes(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    # Keep the tensors themselves, so that no other one takes their address.
    before = [(p.grad, 0 if p.grad is None else p.grad._version) for p in parameters]
    yield
    for parameter, (gradient, version) in zip(parameters, before, strict=True):
        if parameter.grad is not gradient or (
            gradient is not None and gradient._version != version
        ):
            raise RuntimeError(
                "the closure has changed gradients, and the step makes them itself: call neither "
                "backward() nor zero_grad() in the closure, and return the loss"
            )


def _require_graph(outputs: Sequence[Tensor], loss: Tensor) -> None:
    for number, output in enumerate(outputs):
        if output.dim() == 0:
            raise RuntimeError(
                "the model returns a scalar, and the quadratic model needs outputs [samples, ...]: "
                "let the closure compute the loss, outside of the model"
            )
        if not output.requires_grad or not output.is_floating_point():
            raise RuntimeError(
                f"the model's output {number} has no gradient: let the closure run the model with "
                f"gradients (no torch.no_grad or inference_mode), and return only what depends on "
                f"parameters"
            )
    if not loss.requires_grad or not loss.is_floating_point():
        raise RuntimeError(
            "the closure's loss has no gradient: compute it from the model's output, with "
            "gradients, and do not detach it"
        )


def _require_only_through(
    outputs: Sequence[Tensor], loss: Tensor, parameters: Sequence[nn.Parameter]
) -> None:
    """Check that the loss depends on the parameters, and through the model's outputs alone."""
    ids = {id(parameter) for parameter in parameters}
    ends = {(output.grad_fn, output.output_nr) for output in outputs}

    def trained(edge: _Edge) -> bool:
        return id(getattr(edge[0], "variable", None)) in ids

    if _reaches([(loss.grad_fn, loss.output_nr)], trained, without=ends):
        raise RuntimeError(
            f"the closure's loss depends on parameters other than through the model's output. "
            f"Decay weights with weight_decay=. Where it takes derivatives of outputs "
            f"(torch.autograd.grad), or has other terms of parameters, {FORWARD}"
        )
    if not _reaches(ends, trained):
        raise RuntimeError(
            "the model's outputs depend on none of the parameters that are trained: let the "
            "closure run the model with its own parameters, and give torch.func.functional_call "
            "those, as dict(model.named_parameters()), not copies"
        )


def _require_apart(outputs: Sequence[Tensor], calls: int) -> None:
    """Check that no output of the model is an input of another call."""
    count = len(outputs) // calls
    edges = [(output.grad_fn, output.output_nr) for output in outputs]
    for start in range(count, len(edges), count):
        if _reaches(edges[start : start + count], edges[:start].__contains__):
            raise RuntimeError(
                f"the closure gives an output of the model to the model again: {FORWARD}"
            )


def _reaches(
    edges: Iterable[_Edge], wanted: Callable[[_Edge], bool], without: Container[_Edge] = ()
) -> bool:
    """Whether a graph leads to a wanted edge, on a path without some others."""
    todo = [edge for edge in edges if edge not in without]
    seen = set()
    while todo:
        edge = todo.pop()
        if wanted(edge):
            return True
        node, _ = edge
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [edge for edge in node.next_functions if edge not in without]
    return False
