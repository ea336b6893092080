"""One forward pass of the user's closure, and its derivatives for the quadratic model."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from soframe.capture.wrapper import alone_in_join, unlearned_wrapper
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
    """A forward pass of one closure."""

    closure: Closure
    replay: Replay
    outputs: tuple[Tensor, ...]  # of all calls of the model, in order
    gradients: tuple[Tensor, ...]  # of the loss in them, themselves differentiable
    kernels: PlainKernels
    calls: int = 1
    expected: Loss | None = None  # the declared loss, if its expected Hessian replaces the own

    def backward(self) -> None:
        """Accumulate the gradients of the loss in the parameters'; the graph stays."""
        with self.kernels.again():
            gradients = list(map(Tensor.detach, self.gradients))
            torch.autograd.backward(self.outputs, gradients, retain_graph=True)

    def jacobian_products(
        self, parameters: Sequence[nn.Parameter], directions: Sequence[Direction]
    ) -> list[tuple[Tensor, ...]]:
        """Return the derivatives of the outputs along k directions, one of each output's shape."""
        with self.kernels.again():
            return jacobian_products(self.outputs, parameters, directions)

    @cached_property
    def _counts(self) -> list[Tensor]:
        assert self.expected is not None
        counts: list[Tensor] = []
        for output, gradient in zip(self.outputs, self.gradients, strict=True):
            output_counts = self.expected.counts(output.detach(), gradient.detach())
            counts.append(output_counts.to(output.dtype))
        return counts

    def hessian_product(self, tangents: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the Hessian of the loss in the outputs times a tangent, in the outputs' shapes."""
        if self.expected is not None:
            expected: list[Tensor] = []
            for count, output, tangent in zip(self._counts, self.outputs, tangents, strict=True):
                product = self.expected.hessian_product(output.detach(), tangent)
                expected.append(count * product)
            return tuple(expected)
        # Not if the loss is linear in an output.
        curved = [gradient.requires_grad for gradient in self.gradients]
        if not any(curved):
            return tuple(map(torch.zeros_like, tangents))
        products: tuple[Tensor, ...] = torch.autograd.grad(
            list(itertools.compress(self.gradients, curved)),
            self.outputs,
            list(itertools.compress(tangents, curved)),
            retain_graph=True,
            materialize_grads=True,
        )
        return products


def run(
    model: nn.Module, closure: Closure, kernels: PlainKernels
) -> tuple[list[tuple[Tensor, ...]], Tensor]:
    """Run a closure; return the model's outputs of each call, and the loss."""
    calls: list[tuple[Tensor, ...]] = []
    kind = next(model.parameters()).device.type

    def collect(module: nn.Module, args: object, output: object) -> object:
        if not torch.is_grad_enabled():  # a constant of the loss
            return None
        if (error := _wrong_gradients(kind)) is not None:
            raise RuntimeError(error)
        if isinstance(output, Tensor):
            calls.append((output,))
            return None
        tensors, with_views = _as_views(module, output)
        calls.append(tensors)
        return with_views

    handle = model.register_forward_hook(collect)
    try:
        torch.clear_autocast_cache()  # see `evaluated`
        with eagerly(), kernels:
            loss: object = closure()
    finally:
        handle.remove()
    if not calls:
        raise RuntimeError("a closure must run the model, with gradients")
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(f"a closure must return its loss, a scalar tensor, not {loss!r}")
    return calls, loss


def _as_views(module: nn.Module, output: object) -> tuple[tuple[Tensor, ...], object]:
    """Return the tensors of an output that need gradients, as views, and the output with these."""
    # One output may be made of another, and the loss is differentiated in each separately: the
    # closure gets views, which no other output is made of.
    leaves, structure = tree_flatten(output)
    views: list[Tensor] = []
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            leaves[index] = leaf.view_as(leaf)
            views.append(leaves[index])
    if not views:
        raise TypeError(
            f"{type(module).__name__} returns {type(output).__name__} without a tensor that "
            f"needs a gradient; the quadratic model needs tensors, or tuples, lists and dicts "
            f"of them. Return these, or register the class with torch.utils._pytree"
        )
    return tuple(views), tree_unflatten(leaves, structure)


def _wrong_gradients(kind: str) -> str | None:
    """Return the error if the forward pass that runs would have wrong gradients, or None."""
    if unlearned_wrapper() is not None:
        return (
            "a trust region differentiates the model's outputs before its parameters, and "
            "DistributedDataParallel(static_graph=True) would take all of these for unused, and "
            "never average their gradients: build it without static_graph=True"
        )
    if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == torch.float16:
        return (
            f"a trust region does not scale the loss, and under float16 autocast gradients below "
            f"6e-8 become zeros: let the closure use torch.autocast({kind!r}, torch.bfloat16)"
        )
    return alone_in_join()


def first_pass(
    model: nn.Module, closure: Closure, parameters: Sequence[nn.Parameter], loss: Loss | None = None
) -> tuple[Forward, Tensor]:
    """Run a closure and differentiate its loss in the outputs; ``loss`` is the declared one."""
    replay, kernels = Replay(model), PlainKernels()
    with replay.first():
        calls, value = run(model, closure, kernels)
    outputs = tuple(itertools.chain.from_iterable(calls))
    if any(output.dim() == 0 for output in outputs):
        raise RuntimeError(
            "the model returns a scalar, and the quadratic model needs outputs [samples, ...]: "
            "let the closure compute the loss, outside of the model"
        )
    gradients = torch.autograd.grad(value, outputs, create_graph=True, materialize_grads=True)
    _require_only_through(calls, value, parameters)
    expected = loss if loss is not None and loss.expected else None
    return Forward(closure, replay, outputs, gradients, kernels, len(calls), expected), value


def evaluated(forwards: Iterable[tuple[Closure, Replay]], *, differentiates: bool) -> float:
    """Return the sum of the closures' losses at the present parameters, without side effects."""
    total = 0.0
    for closure, replay in forwards:
        # By the kernels of the first pass: others draw other dropout masks from the same state.
        kernels = PlainKernels()
        # Within one context of autocast, as of a caller, torch casts each parameter once.
        torch.clear_autocast_cache()
        with torch.set_grad_enabled(differentiates), replay.again(), eagerly(), kernels:
            total += float(closure().detach())
    return total


def moved(
    parameters: Sequence[nn.Parameter], update: Sequence[Tensor]
) -> AbstractContextManager[None]:
    """A context with updated parameters in new storage: the graphs of earlier passes stay valid."""
    values = [p.data + difference for p, difference in zip(parameters, update, strict=True)]
    return placed(parameters, values)


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
    if not closures:
        raise ValueError("a step needs a closure, or several for micro-batches, not an empty list")
    return closures


def _require_only_through(
    calls: Sequence[Sequence[Tensor]], loss: Tensor, parameters: Sequence[nn.Parameter]
) -> None:
    """Check that loss and parameters are connected by outputs, each of one call of the model."""
    ids = set(map(id, parameters))
    ends: set[_Edge] = set()
    for call in calls:
        edges = {(output.grad_fn, output.output_nr) for output in call}
        if _reaches(edges, ends.__contains__):
            raise RuntimeError(
                f"the closure passes an output of the model back to the model: {FORWARD}"
            )
        ends |= edges

    def trained(edge: _Edge) -> bool:
        return id(getattr(edge[0], "variable", None)) in ids

    if _reaches([(loss.grad_fn, loss.output_nr)], trained, without=ends):
        raise RuntimeError(
            f"the closure's loss depends on parameters other than through the model's output. "
            f"Decay weights with weight_decay=. Where it takes derivatives of outputs "
            f"(torch.autograd.grad), or has other terms of parameters, {FORWARD}"
        )


def _reaches(
    edges: Iterable[_Edge], is_met: Callable[[_Edge], bool], without: Container[_Edge] = ()
) -> bool:
    """Whether a graph leads to a wanted edge, on a path without some others."""
    todo = [edge for edge in edges if edge not in without]
    seen = set()
    while todo:
        edge = todo.pop()
        if is_met(edge):
            return True
        node, _ = edge
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [edge for edge in node.next_functions if edge not in without]
    return False
