"""Capture: which tensors belong to which call of which layer.

A forward hook puts a hook on the node of the module's output in the graph. When that output's
gradient arrives, the call is complete: its inputs and its output gradient are handed on as one
pair. So nothing can be paired wrongly, whatever the order of calls and backward passes, and a
forward that is never differentiated (``no_grad``, validation, the first pass of a checkpoint)
leaves no trace. Such hooks, unlike full-backward hooks, bear an in-place activation after the
layer, and run after all hooks of the tensor, which may change the gradient: the layer's own
gradients are made of what these return. Where an output is a view, an in-place change gives it
another past, and its base keeps what the hook was put on: there the hook is put on the base. A
probe ends at the outputs, where hooks of nodes do not run: for it the hook is one of the tensor.

A call inside a module, which no hook of modules sees, is found in the graph by its helper
(`LayerHelper.observe`): the hook is put on the node of its product, and the inputs are those that
the node has saved. The gradients that a probe sends to such nodes are handed on when it has ended.

Inputs are kept through autograd's own saved tensors, so that activation checkpointing and
offloading treat them like every other saved tensor, and an input that was overwritten is an error
instead of a wrong factor.

Calls of one layer within one backward pass are more positions of the same samples; every further
backward pass before the step is more samples. What a pass is, is decided at its outermost level: a
reentrant checkpoint runs backward passes of its own within it.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from soframe.blocks import sharding
from soframe.capture.counting import Batch
from soframe.layers.base import InnerCall, LayerHelper
from soframe.layers.layout import parameter_of
from soframe.layers.overriding import computes_otherwise
from soframe.layers.sharing import Together

TRANSFORMED = (
    "within a transformation of torch.func (vmap, grad, jacrev, jvp, hessian): take such "
    "derivatives by torch.autograd.grad(..., create_graph=True), whose calls are seen"
)
"""How a layer is called that `Capture` cannot see, and what to do."""

WITH_OTHERS = (
    "with tensors made of its parameters, as by torch.func.functional_call with fast weights: "
    "precondition what is called with its own"
)
"""Likewise."""


@dataclass(frozen=True)
class Probe:
    """A backward pass that only asks for curvature: a column of a half-factor, or a sample.

    Attributes:
        weight: What its ``g g^T`` counts.
        first: Whether it is the first of its forward pass: only that one counts the inputs.
        samples: What the loss is a mean of; None for what layers tell.
    """

    weight: float
    first: bool
    samples: int | None = None


class Sink(Protocol):
    """Receives a complete call."""

    def __call__(
        self,
        helper: LayerHelper,
        inputs: tuple[Tensor, ...],
        gradient: Tensor,
        number: int,
        probe: Probe | None = None,
        said: Batch | None = None,
        earlier: int | None = None,
    ) -> None:
        """Take one call: its inputs, its output gradient, the number of the backward pass.

        ``earlier`` is that of another pass through the same call, if there was one in this window.
        """


class _Keep(torch.autograd.Function):
    """Saves tensors as autograd does; its output only exists to own the node that has them."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return handle.view_as(handle)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        raise RuntimeError("never part of a loss")  # pragma: no cover


class _Hook:
    """A forward hook that dies with its capture, and that copies of the model do not share."""

    def __init__(self, capture: Capture | None, helper: LayerHelper | None) -> None:
        self._capture = None if capture is None else weakref.ref(capture)
        self._helper = None if helper is None else weakref.ref(helper)
        self._deliver = _eagerly()

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        capture = self._capture() if self._capture is not None else None
        helper = self._helper() if self._helper is not None else None
        # A compiler sees this much: a graph is broken at the layers of statistics steps only.
        if capture is not None and helper is not None and capture.enabled:
            if getattr(module, "_is_replica", False):
                raise RuntimeError(
                    f"torch.nn.DataParallel runs copies of a {type(module).__name__}, each with a "
                    f"part of the batch on a device of its own, and its statistics are of the "
                    f"whole batch on one: use DistributedDataParallel with a process for each "
                    f"device, or a method that reads gradients alone, such as 'muon'"
                )
            self._deliver(capture, helper, args, kwargs, output)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or pickled model is another model: its hooks do nothing.
        return (_Hook, (None, None))


def _deliver(
    capture: Capture,
    helper: LayerHelper,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    # No part of the model: who follows its functions by a mode has nothing to see here.
    with torch._C.DisableTorchFunction():
        if torch._C._are_functorch_transforms_active():
            capture._leave_out(helper, output)
        else:
            capture._on_forward(helper, args, kwargs, output)


@cache
def _eagerly() -> Callable[..., None]:
    """Return `_deliver`, which torch.compile neither traces nor compiles.

    Not a decorator: that would import the compiler, seconds of it, with the library.
    """
    disabled: Callable[..., None] = torch.compiler.disable(_deliver)
    return disabled


@dataclass
class _Passes:
    """Numbers the backward passes of a window, at their outermost level."""

    current: int | None = None
    count: int = 0

    def enter(self) -> int:
        """Return the number of the pass under way; the first caller of a pass opens it."""
        if self.current is None:
            torch.autograd.Variable._execution_engine.queue_callback(self.leave)
            return self.begin()
        return self.current

    def begin(self) -> int:
        """Open a pass that the caller closes."""
        self.current = self.count
        self.count += 1
        return self.current

    def leave(self) -> None:
        """Close the pass."""
        self.current = None


@dataclass
class Capture:
    """The hooks on a model's layers.

    Attributes:
        sink: Receives the complete calls.
        names: The qualified name of each helper's module, for errors.
        enabled: Whether calls are captured; off between statistics steps.
        probing: Whether only probes are captured, and not the loss's own backward passes.
        model: The model whose layers they are.
        counting: The helpers whose inputs nobody needs in this window on this rank; none are kept.
        idle: The helpers whose calls are counted alone in this window, the same on every rank: of
            tensor-parallel ones nothing is brought together.
        rereading: The helpers whose inputs are handed on with every probe, not the first alone.
        alike: Whether all ranks take statistics of the same calls.
        together: Which layers have an input in common; None where nobody asks.
        called: The helpers whose modules were called in this window with outputs to differentiate,
            with the version of a parameter then: an optimizer that steps changes it.
        batch: What is known of the forward passes under way.
        told: Whether anything was ever said of one by `Preconditioner.count`.
        failure: What the step is to raise, on every rank.
        warned: Whether it was said that calls that are not seen give no statistics.
    """

    sink: Sink | None = None
    names: dict[LayerHelper, str] = field(default_factory=dict)
    enabled: bool = True
    probing: bool = False
    model: nn.Module | None = None
    counting: frozenset[LayerHelper] = frozenset()
    idle: frozenset[LayerHelper] = frozenset()
    rereading: frozenset[LayerHelper] = frozenset()
    alike: bool = True
    together: Together | None = None
    called: dict[LayerHelper, int] = field(default_factory=dict)
    batch: Batch = field(default_factory=Batch)
    told: bool = False
    failure: Exception | None = None
    warned: bool = False

    def __post_init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._passes = _Passes()
        self._edges: list[_Watched] = []
        self._probe: Probe | None = None
        self._delivering = False
        self._finalizer = weakref.finalize(self, _remove, self._handles)

    @property
    def passes(self) -> int:
        """Backward passes since `reset`."""
        return self._passes.count

    def attach(self, names: Mapping[LayerHelper, str]) -> None:
        """Hook the helpers' modules, instead of those that were hooked before.

        Args:
            names: The qualified name of each helper's module.
        """
        _remove(self._handles)
        self.names = dict(names)
        for helper in names:
            hook = _Hook(self, helper)
            # First of all: another hook may replace the output (adapters do).
            self._handles.append(
                helper.module.register_forward_hook(hook, with_kwargs=True, prepend=True)
            )

    def listen(
        self,
        sink: Sink,
        names: Mapping[LayerHelper, str],
        rereading: frozenset[LayerHelper] = frozenset(),
        *,
        alike: bool = True,
    ) -> None:
        """Hand the calls of some layers to a sink from now on.

        Args:
            sink: Takes the calls.
            names: See `attach`.
            rereading: See the attribute.
            alike: See the attribute.
        """
        self.sink, self.rereading, self.alike = sink, rereading, alike
        self.attach(names)

    def expect(
        self,
        *,
        enabled: bool,
        counting: frozenset[LayerHelper],
        idle: frozenset[LayerHelper],
        together: Together | None,
    ) -> None:
        """Keep of the calls to come what the window needs.

        Args:
            enabled: See the attribute.
            counting: See the attribute.
            idle: See the attribute.
            together: See the attribute.
        """
        self.enabled, self.together = enabled, together
        self.counting, self.idle = counting, idle

    def fail(self, error: Exception) -> None:
        """Let the step raise an error, once ranks agree on it.

        Args:
            error: The error, perhaps of this rank alone.
        """
        self.failure = error

    def know(self, terms: int | None) -> None:
        """Take what an observation tells of the last forward pass; the next is of another batch.

        Args:
            terms: How many terms its loss is a mean of; None for what layers tell.
        """
        self.batch.end(terms)

    def reset(self) -> None:
        """Begin a new window."""
        self.called = {}
        self._passes = _Passes()
        self._edges = []
        self.batch, self.failure = Batch(), None

    def say(self, batch: Batch) -> None:
        """Take what is said of the forward passes that follow.

        Args:
            batch: What is said.
        """
        if self._edges:  # an observation could not tell of which forward pass it is
            self.failure = RuntimeError(
                "count() was called while a forward pass still waits for observe(): observe the "
                "outputs of each forward pass before the next one"
            )
        self.batch, self.told = batch, True

    def probe(
        self,
        outputs: Sequence[Tensor],
        vectors: Iterable[tuple[Sequence[Tensor | None], float]],
        samples: int | None = None,
    ) -> None:
        """Send vectors backward from the model's outputs, to the layers and no further.

        No parameter's gradient is touched, and the graph stays for the loss's own backward pass.

        Args:
            outputs: The outputs of the forward pass just run.
            vectors: A gradient for each output (None for zeros), with their weights.
            samples: What the loss is a mean of; None for what layers tell.

        Raises:
            RuntimeError: If no layer was seen since the last probe.
        """
        edges = self._edges
        if not edges:
            raise RuntimeError(
                "no registered layer ran with gradients since the last probe: call it between "
                "the model's forward pass and loss.backward()"
            )
        self._passes.begin()
        try:
            for index, (vector, weight) in enumerate(vectors):
                self._probe = Probe(weight, index == 0, samples)
                # The first one has to reach every layer, since it counts the inputs.
                starts = [
                    (output, torch.zeros_like(output) if own is None else own)
                    for output, own in zip(outputs, vector, strict=True)
                    if own is not None or index == 0
                ]
                reached = torch.autograd.grad(
                    [output for output, _ in starts],
                    [edge for edge, _ in edges],
                    grad_outputs=[gradient for _, gradient in starts],
                    retain_graph=True,
                    allow_unused=True,
                )
                self._deliver(edges, reached)
                if index == 0:
                    # What belongs to other forward passes waits for their probes.
                    gradients: Sequence[Tensor | None] = reached  # None where there is no way
                    pairs = list(zip(edges, gradients, strict=True))
                    self._edges = [edge for edge, gradient in pairs if gradient is None]
                    edges = [edge for edge, gradient in pairs if gradient is not None]
        finally:
            self._probe = None
            self._passes.leave()

    def _deliver(self, watched: Sequence[_Watched], reached: Sequence[Tensor | None]) -> None:
        """Hand on what has reached calls inside modules: hooks of nodes do not run at the end."""
        self._delivering = True  # what a checkpoint computes anew meanwhile is no forward pass
        try:
            for (_, hook), gradient in zip(watched, reached, strict=True):
                if hook is not None and gradient is not None:
                    hook.deliver(gradient)
        finally:
            self._delivering = False

    def close(self) -> None:
        """Remove every hook; what has been called already is no longer waited for."""
        self._finalizer()
        self.sink = None

    def _on_forward(
        self, helper: LayerHelper, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if self.sink is None:
            return
        if (pairs := self._own(helper)) is None:
            self._pass_by(helper, output)
            return
        again = self._begin_call()
        inner = helper.observe(args, kwargs, output)
        if inner is None and not isinstance(output, Tensor):
            raise TypeError(
                f"{self.names.get(helper, type(helper.module).__name__)}: "
                f"{type(helper).__name__} serves modules that return one tensor, not "
                f"{type(output).__name__}; skip the module (skip=[...])"
            )
        if not (output.requires_grad if inner is None else inner):
            return
        # One that was frozen since is no reason to lose what the others need.
        registered = [p for p, now in pairs if now.requires_grad]
        trained = [now for _, now in pairs if now.requires_grad]
        if not trained:
            return
        self.called[helper] = registered[0]._version
        keeps = helper not in self.counting and (helper.multiplies or helper in self.rereading)
        if inner is not None:
            if self.together is not None:
                self.together.note(helper, ())
            for call in inner:
                self._watch_inner(helper, trained, call, keeps=keeps, again=again)
            return
        if (why := computes_otherwise(helper, args, kwargs, output)) is not None:
            self._fail_for_class(helper, why)
        inputs = tuple(helper.inputs(args, kwargs))
        if self.together is not None:
            # A tensor-parallel plan makes a DTensor of its own for each layer, in the same memory.
            self.together.note(helper, tuple(map(sharding.local, inputs)))
        if self._has_rows_of_a_part(helper, trained, (output, *inputs)):
            return
        where, view = _lasting(output, inputs)
        self._watch(where, self._hook(helper, trained, inputs if keeps else (), view), again=again)

    def _watch(self, where: Tensor, hook: _GradientHook, *, again: bool) -> None:
        """Put the hook of a call on its output, or on the base of that."""
        if not self.probing and (node := where.grad_fn) is not None:  # a leaf has none
            node.register_prehook(_NodeHook(hook, where.output_nr))
            return
        if self.probing and not again:
            # What a checkpoint recomputes is reached through the graph of its first pass.
            self._edges.append((get_gradient_edge(where), None))
        where.register_hook(hook)

    def _fail_for_class(self, helper: LayerHelper, why: str) -> None:
        """Let the step raise where a subclass computes what the helper of its class does not."""
        name, kind = self.names[helper], type(helper.module).__name__
        self.fail(
            ValueError(
                f"{name}: {why}, and {type(helper).__name__} would take the rows of that for those "
                f"of the gradient: register a helper for it (@soframe.register('layer', {kind})), "
                f"choose a method that reads gradients alone for it, such as 'muon' or 'soap' "
                f"(method={{pattern: ...}}), or skip it"
            )
        )

    def _has_rows_of_a_part(
        self, helper: LayerHelper, trained: Sequence[Tensor], tensors: Iterable[Tensor]
    ) -> bool:
        """Return whether a call multiplied with a part of a parameter, and let the step say so."""
        if not any(map(sharding.is_cut, trained)) or all(map(sharding.is_distributed, tensors)):
            return False
        self.fail(
            ValueError(
                f"{self.names[helper]} computes with this rank's part of a parameter that is "
                f"cut up over ranks, as experts over ranks do, and not with DTensors: its rows "
                f"are not those of the whole. Choose a method that reads gradients alone for "
                f"it, such as 'muon' or 'soap' (method={{pattern: ...}}), or skip it"
            )
        )
        return True

    def _own(self, helper: LayerHelper) -> list[tuple[nn.Parameter, nn.Parameter]] | None:
        """Return the parameters of a helper, each with what its module computes with.

        That is the parameter itself; what fully_shard has gathered of it for this pass; or what a
        tensor-parallel plan has cut up since, unless some ranks would stay away where its rows are
        brought together: such a model is refused at the step.

        Args:
            helper: The helper.

        Returns:
            None where the module runs with other tensors, as by ``torch.func.functional_call``.
        """
        pairs = []
        for name, registered in helper.parameters.items():
            now = parameter_of(helper.module, name)
            if now is not registered and sharding.is_distributed(now) and not self.alike:
                return None
            if now is not registered and not sharding.stands_for(now, registered, self.model):
                return None
            assert now is not None
            pairs.append((registered, now))
        return pairs

    def _leave_out(self, helper: LayerHelper, output: Any) -> None:
        """Warn of a call within ``torch.func`` once a loss goes backward through it.

        Its inputs and outputs belong to the transformation; what they wrap has the graph.

        Args:
            helper: The helper.
            output: What its module returned.
        """
        inner = output
        while isinstance(inner, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(inner):
            inner = torch._C._functorch.get_unwrapped(inner)
        trained = any(
            parameter_of(helper.module, name) is registered and registered.requires_grad
            for name, registered in helper.parameters.items()
        )
        listening = self.sink is not None and trained
        if listening and isinstance(inner, Tensor) and inner.requires_grad:
            unseen = _Unseen(weakref.ref(self), name=self.names[helper], called=TRANSFORMED)
            inner.register_hook(unseen)

    def _pass_by(self, helper: LayerHelper, output: Any) -> None:
        """Warn of a call with tensors made of the parameters, once a loss goes backward through it.

        So does meta-learning, whose fast weights a backward pass takes back to the parameters.

        Args:
            helper: The helper.
            output: What its module returned.
        """
        made = any(
            now is not None and now is not registered and now.grad_fn is not None
            for name, registered in helper.parameters.items()
            for now in [parameter_of(helper.module, name)]
        )
        if made and isinstance(output, Tensor) and output.requires_grad:
            trained = [p for p in helper.parameters.values() if p.requires_grad]
            edges = tuple(get_gradient_edge(p).node for p in trained)
            output.register_hook(
                _Unseen(weakref.ref(self), name=self.names[helper], called=WITH_OTHERS, edges=edges)
            )

    def _warn_of(self, name: str, called: str) -> None:
        """Say once that calls of a layer give no statistics.

        Args:
            name: The layer's.
            called: How it is called, and what to do.
        """
        if not self.warned:
            warnings.warn(
                f"{name} is called {called}, or skip the layer. Its gradient has that call, and "
                f"its statistics have not: the curvature of this layer, and of others that are "
                f"called there, is that of other calls alone",
                stacklevel=2,
            )
        self.warned = True

    def _begin_call(self) -> bool:
        """Return whether a checkpoint calls a module again, for the backward pass under way."""
        if self._delivering or torch._C._current_graph_task_id() != -1:
            # A checkpoint recomputes within a backward pass. Seen here, the outermost pass is
            # opened before any nested one delivers gradients.
            self._passes.enter()
            return True
        if self._passes.current is not None:
            # A backward pass that raised never closed itself.
            self._passes.leave()
        if self.batch.closed:
            self.batch = Batch()
        return False

    def _watch_inner(
        self,
        helper: LayerHelper,
        trained: Sequence[nn.Parameter],
        call: InnerCall,
        *,
        keeps: bool,
        again: bool,
    ) -> None:
        """Put a hook on a call inside a module."""
        needed: tuple[Tensor, ...] = ()
        if keeps:
            # The first pass of a checkpoint has saved nothing; what its second pass saves, in the
            # same place of the same order, takes the place of what is saved here.
            needed = call.like() if _is_checkpointed() else call.read()
        # Nothing that leads to the node: it has the hook, and both would live for ever.
        hook = self._hook(helper, trained, needed, _Arranged(call.arrange))
        if self.probing and not again:
            self._edges.append((call.edge, hook))
        call.edge.node.register_prehook(_NodeHook(hook, call.edge.output_nr))

    def _hook(
        self,
        helper: LayerHelper,
        trained: Sequence[nn.Parameter],
        needed: tuple[Tensor, ...],
        view: _View | _Arranged | None,
    ) -> _GradientHook:
        """Return the hook of a call, which keeps what it needs."""
        kept = None
        if needed:
            kept = _Keep.apply(  # type: ignore[no-untyped-call]  # torch leaves it untyped
                sharding.local(trained[0]).new_empty(0, requires_grad=True), *needed
            )
        return _GradientHook(
            capture=weakref.ref(self),
            helper=helper,
            kept=kept,
            edges=[get_gradient_edge(p).node for p in trained],
            counting=self.counting,
            view=view,
            batch=self.batch,
        )

    def _wants(self, edges: Sequence[Any]) -> bool:
        """Return whether the pass under way is one to take statistics from."""
        if self.probing:
            return self._probe is not None
        # autograd.grad passes through here without adding to any parameter's gradient.
        return any(map(_accumulates, edges))

    def _on_gradient(self, call: _GradientHook, kept: Tensor | None, gradient: Tensor) -> None:
        helper, view, batch = call.helper, call.view, call.batch
        # A layer that was frozen, thawed or replaced since its forward has another helper now.
        if self.sink is None or not self.enabled or helper not in self.names:
            return
        if call.counting != self.counting:
            return  # called in a window of other turns: some layers' inputs were not kept
        number = self._passes.enter()
        earlier = call.passed(self._passes, number)
        batch.end(batch.terms)
        device = gradient.device.type
        ours = torch.autocast(device, enabled=False)  # entering it takes a while
        with torch.no_grad(), ours if torch.is_autocast_enabled(device) else nullcontext():
            inputs: tuple[Tensor, ...] = ()
            again = self._probe is not None and not self._probe.first
            if kept is not None and (not again or helper in self.rereading):
                # The tensor is held, not its node alone: torch 2.12 frees one without its output.
                # It has a node, made above, and the node what `_Keep` saved: no type says so.
                inputs = kept.grad_fn.saved_tensors  # type: ignore[union-attr]  # of `_Keep`
                inputs = tuple(map(sharding.whole, inputs))
            gradient = sharding.whole(gradient, read=helper not in self.idle)
            of_output = gradient if view is None else view.of(gradient)
            with sharding.shaped(helper.module._parameters.values()):
                self.sink(helper, inputs, of_output, number, self._probe, batch, earlier)


class _GradientHook:
    """The hook of one call, as a hook of a tensor takes its gradient.

    Attributes:
        helper: The helper of the module that was called.
        counting: The helpers of whose inputs none were kept then.
        view: How the gradient that arrives becomes that of the output.
        batch: What is known of the forward pass.
    """

    __slots__ = ("_capture", "_edges", "_kept", "_passed", "batch", "counting", "helper", "view")

    def __init__(
        self,
        capture: weakref.ref[Capture],
        helper: LayerHelper,
        kept: Any,
        edges: Sequence[Any],
        counting: frozenset[LayerHelper],
        view: _View | _Arranged | None,
        batch: Batch,
    ) -> None:
        self._capture, self._kept, self._edges = capture, kept, edges
        self.helper, self.counting, self.view, self.batch = helper, counting, view, batch
        self._passed: tuple[_Passes, int] | None = None

    def __call__(self, gradient: Tensor | None) -> None:
        capture, kept = self._capture(), self._kept
        if capture is None or not capture._wants(self._edges):
            return
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            # Autograd frees here what it saved, even if the output lives on; so does this node.
            self._kept = None
        # A function's backward may return None for the output: it then counts as not called.
        if gradient is not None:
            capture._on_gradient(self, kept, gradient)

    def passed(self, passes: _Passes, number: int) -> int | None:
        """Note a backward pass through this call.

        Args:
            passes: Those of the window.
            number: The number of the one under way.

        Returns:
            The number of another one of the window that was here before; None if there was none.
        """
        before, self._passed = self._passed, (passes, number)
        if before is None or before[0] is not passes or before[1] == number:
            return None
        return before[1]

    def deliver(self, gradient: Tensor) -> None:
        """Hand on what a probe has brought, after its backward pass."""
        capture = self._capture()
        if capture is not None:
            capture._on_gradient(self, self._kept, gradient)


class _Unseen:
    """The tensor hook of a call that gives no statistics, though its layer's gradient has it.

    Args:
        capture: Warns.
        name: The layer's.
        called: How it is called, and what to do.
        edges: The nodes of its parameters. Only a pass that reaches one of them is told of, or any
            pass where there are none.
    """

    __slots__ = ("_called", "_capture", "_edges", "_name")

    def __init__(
        self, capture: weakref.ref[Capture], *, name: str, called: str, edges: Sequence[Any] = ()
    ) -> None:
        self._capture, self._name, self._called, self._edges = capture, name, called, edges

    def __call__(self, gradient: Tensor) -> None:
        del gradient
        capture = self._capture()
        if capture is not None and (not self._edges or any(map(_accumulates, self._edges))):
            capture._warn_of(self._name, self._called)


class _NodeHook:
    """The hook of one call on the node of its output, or of its product inside a module."""

    __slots__ = ("_hook", "_number")

    def __init__(self, hook: _GradientHook, number: int) -> None:
        self._hook, self._number = hook, number

    def __call__(self, gradients: tuple[Tensor | None, ...]) -> None:
        capture = self._hook._capture()
        # What a probe brings is handed on by `Capture.probe`, whether the node runs or not.
        if capture is not None and capture._probe is None:
            self._hook(gradients[self._number])


_Watched = tuple[GradientEdge, _GradientHook | None]
"""Where a probe ends; and for a call inside a module who takes the gradient."""


@dataclass(frozen=True)
class _Arranged:
    """How the gradient of a call inside a module becomes what its helper takes.

    Attributes:
        arrange: See `InnerCall.arrange`.
    """

    arrange: Callable[[Tensor], Tensor]

    def of(self, gradient: Tensor) -> Tensor:
        """Return the gradient that the helper takes.

        Args:
            gradient: The one that arrives.
        """
        return self.arrange(gradient)


@dataclass(frozen=True)
class _View:
    """How an output lies in its base: enough to find its gradient in the base's.

    Attributes:
        size: The output's size.
        stride: The output's strides.
        offset: Where it begins in the base.
        base_stride: The base's strides.
    """

    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    base_stride: tuple[int, ...]

    def of(self, gradient: Tensor) -> Tensor:
        """Return the output's gradient.

        Args:
            gradient: The base's, of the base's size and whatever strides.

        Returns:
            A view of it, or of a copy that lies as the base does.
        """
        if gradient.stride() != self.base_stride:
            laid = torch.empty_strided(
                gradient.shape, self.base_stride, dtype=gradient.dtype, device=gradient.device
            )
            gradient = laid.copy_(gradient)
        start = gradient.storage_offset() + self.offset
        return gradient.as_strided(self.size, self.stride, start)


def _lasting(output: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, _View | None]:
    """Return where a hook is to be put that an in-place change of the output does not lose.

    torch gives a view that is changed in place another node in the graph, and what was put on the
    former one is never called: so it is with ``nn.Linear`` on inputs of three dimensions, whose
    product has two. The base's node stays, and sees the gradient of what the layer returned.

    Args:
        output: What a module returned, with its graph.
        inputs: What it was called with: where the output is a view of these, the base's gradient is
            not the output's alone.

    Returns:
        The output, or its base and how the output lies in it.
    """
    base = output._base
    if base is None or base.grad_fn is None or base.dtype != output.dtype:
        return output, None
    if any(x is base or x._base is base for x in inputs) or not _dense(base):
        return output, None
    offset = int(output.storage_offset() - base.storage_offset())
    return base, _View(output.size(), output.stride(), offset, base.stride())


def _dense(tensor: Tensor) -> bool:
    """Return whether a tensor fills its memory, each element once, in whichever order."""
    if tensor.layout is not torch.strided:
        return False
    if tensor.is_contiguous():
        return True
    filled = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != filled:
            return False
        filled *= size
    return True


def _is_checkpointed() -> bool:
    """Return whether a checkpoint drops what the graph saves, to compute it anew."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and "_checkpoint_hook." in getattr(hooks[0], "__qualname__", "")


def _accumulates(edge: Any) -> bool:
    """Return whether the backward pass under way adds to a parameter's ``.grad``.

    Args:
        edge: The parameter's node in the graph.
    """
    try:
        return bool(torch._C._will_engine_execute_node(edge))
    except RuntimeError:
        # How torch answers for a parameter that autograd.grad was asked for.
        return False


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
