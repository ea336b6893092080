"""Capture: pair the inputs of each layer call with the gradient of its output.

A forward hook puts a hook on the node of the module's output in the autograd graph. When the
gradient of that output arrives, the call is complete: inputs and output gradient go to the sink as
one `LayerCall`. Pairs cannot be mixed up, in any order of calls and backward passes, and a
forward pass that is never differentiated (``no_grad``, validation, the first pass of a checkpoint)
leaves no trace. Unlike full-backward hooks, these allow an in-place activation after the layer, and
run after all tensor hooks, which may change the gradient from which the layer's own are computed.

A product inside a module is found in the graph by its helper (`LayerHelper.observe`): its inputs
are the tensors that its node has saved. A probe delivers the gradients of such nodes at its end.

Inputs are kept through autograd's own saved tensors. So activation checkpointing and offloading
apply to them as to every other saved tensor, and an input that was overwritten is an error.

A backward pass of the loss opens at its first layer and reports its layers when it has ended, so
that statistics can follow the gradients in ``.grad`` (`soframe.estimate.statistics`). Passes are
numbered at their outermost level, since a reentrant checkpoint runs passes of its own inside.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._autograd import SavedTensor, _make_saved_tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from soframe.blocks import sharding
from soframe.capture.counting import Batch, Forward
from soframe.capture.parameters import require_apart, sample_gradients
from soframe.capture.root import Layers, Sight, look, look_at_outputs
from soframe.capture.wrapper import alone_in_join, unlearned_wrapper, unseen_by
from soframe.comm.agreement import gather_json
from soframe.comm.base import Backend
from soframe.kernels.precision import Precision, within
from soframe.layers.base import InnerCall, LayerHelper
from soframe.layers.layout import parameter_of
from soframe.layers.parameter import ParameterHelper


@dataclass(frozen=True)
class Probe:
    """A backward pass for curvature alone: one column of a half-factor, or one drawn target."""

    weight: float  # the weight of its ``g g^T``
    first: bool  # whether it is the first of its forward pass, the only one that counts the inputs
    # The number of terms that the loss is a mean of; None for the layers' batch size.
    samples: int | None = None


class LayerCall(NamedTuple):
    """One complete call of a layer."""

    helper: LayerHelper  # the helper of the module that was called
    inputs: tuple[Tensor, ...]  # the tensors of the call; empty unless `reads`
    gradient: Tensor  # the gradient of the output
    number: int  # the number of the backward pass within the window
    # The probe that brought the gradient; None for the loss's own backward pass.
    probe: Probe | None
    batch: Batch  # the declaration of the forward pass (`Preconditioner.count`)
    root: Sight  # the inputs and outputs of the root in this forward pass
    # The number of another backward pass of the window through the same call, or None.
    earlier: int | None
    reads: bool  # whether the window needs the inputs
    # Whether the call was of a nested tensor: ``gradient`` and ``inputs`` are its values, the rows
    # of all samples, ``[rows, ...]``.
    is_ragged: bool = False


Sink = Callable[[LayerCall], None]
"""Receives each complete call, while the backward pass runs."""

Ended = Callable[[frozenset[LayerHelper]], None]
"""Receives the layers that a backward pass of the loss has reached, when it has ended."""


_compiler: Callable[[], object] = torch._C._dynamo.eval_frame.get_eval_frame_callback


class _Hook:
    """A forward hook that dies with its capture, and that copies of the model do not share.

    The target is the helper of a layer, which is hooked after its calls; or the `Layers` of the
    root, before its calls, with an ellipsis for the output, and after; or a layer that takes
    sequences first, before its calls.
    """

    def __init__(self, capture: Capture, target: LayerHelper | Layers | nn.Module) -> None:
        self._capture, self._target = weakref.ref(capture), weakref.ref(target)
        self._take_call = _take_call_uncompiled()

    @property
    def __name__(self) -> str:
        """Raise AttributeError: a hook has no name, which TorchScript asks for."""
        raise AttributeError(
            "torch.jit.script cannot compile soframe's hooks: script the model before soframe sees "
            "it, or close() the preconditioner first"
        )

    def __call__(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        output: Any = ...,
        is_global: bool = False,
    ) -> None:
        # Torch passes no kwargs if the capture is collected while the pass goes through its hooks.
        capture, target = self._capture(), self._target()
        # torch.compile traces this much: only at statistics steps do layers break the graph.
        if capture is not None and target is not None and capture.enabled:
            if output is not ... and is_global != capture.is_global:
                return  # the capture's global hook has called this one before
            # Between compiled frames a call is exempt; a plain one does not pay for that.
            take_call = _take_call
            if torch.compiler.is_compiling() or _compiler() is not None:
                take_call = self._take_call
            take_call(capture, target, module, args, kwargs or {}, output)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copied or pickled model is another model, perhaps of a machine without soframe: its
        # hook is a function of the standard library that takes any arguments and does nothing.
        return (getattr, (nullcontext(), "__exit__"))


def _hook_globally(capture: weakref.ref[Capture], module: nn.Module, *call: Any) -> None:
    """Call a capture's hooks of a module, before all others: torch calls global hooks first."""
    for hook in module._forward_hooks.values():
        if getattr(hook, "_capture", None) is capture:
            hook(module, *call, is_global=True)


def _take_call(
    capture: Capture,
    target: LayerHelper | Layers | nn.Module,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> None:
    # A torch function mode of the user is for the model, not for the hooks.
    with torch._C.DisableTorchFunction():
        # Tensors within a transformation of torch.func have no graph to put hooks on, and a trace
        # (torch.jit.trace, TensorBoard's add_graph) would contain what the hooks compute.
        if torch._C._are_functorch_transforms_active() or torch._C._is_tracing():
            return
        if isinstance(target, Layers):
            capture._on_root(args, kwargs, output, target)
            return
        if isinstance(target, nn.Module):
            capture._on_sequences(args, kwargs)
            return
        if module is not target.module and getattr(module, "_is_replica", False):
            raise RuntimeError(
                f"torch.nn.DataParallel runs copies of a {type(module).__name__}, each on a part "
                f"of the batch, and statistics need the whole batch: use DistributedDataParallel "
                f"with a process for each device, or a method that reads gradients alone, such as "
                f"'muon'"
            )
        try:
            capture._on_forward(target, args, kwargs, output)
        except Exception as error:  # of any kind: all ranks raise together
            # A checkpoint ends the calls that it repeats in the backward pass by an exception.
            if torch._C._current_graph_task_id() != -1:
                raise
            capture.raise_or_defer(error, target)


@cache
def _take_call_uncompiled() -> Callable[..., None]:
    """Return `_take_call`, exempt from torch.compile."""
    # Not a decorator: that would import the compiler, seconds of it, with the library.
    disabled: Callable[..., None] = torch.compiler.disable(
        _take_call, reason="soframe's hooks read calls between graphs: compile with fullgraph=False"
    )
    return disabled


@dataclass(eq=False)
class Calls:
    """The records of the hooks in one window; the next begins empty."""

    batch: Batch = field(default_factory=Batch)  # the declaration of the forward passes under way
    # The helpers whose modules were called with outputs to differentiate.
    called: set[LayerHelper] = field(default_factory=set)
    # The helpers that the backward pass of the loss under way has reached.
    reached: set[LayerHelper] = field(default_factory=set)
    watched: list[_Watched] = field(default_factory=list)  # the ends of the next probe
    # The batches of forward passes that no backward pass has reached.
    waiting: list[Batch] = field(default_factory=list)
    current: int | None = None  # the number of the backward pass under way, at its outermost level
    first_batch: Batch | None = None  # of the first call that this pass has reached
    count: int = 0  # the number of backward passes
    shares: bool = False  # whether a layer was called without the batch since the last probe
    half: bool = False  # whether a layer with float32 parameters had a float16 gradient
    failure: Exception | None = None  # the error that the step raises on every rank

    def enter(self, ended: Callable[[], None]) -> None:
        """Open the pass under way, unless it is open; ``ended`` closes it."""
        if self.current is None:
            # Behind the callbacks of wrappers, which leave gradients: fully_shard's, DDP's.
            queue = torch.autograd.Variable._execution_engine.queue_callback
            queue(partial(queue, ended))
            self.current = self.count
            self.count += 1

    def fail(self, error: Exception) -> None:
        """Keep the first error, perhaps of this rank alone, for the step, where ranks agree."""
        if self.failure is None:
            self.failure = error

    def take_waiting(self, batch: Batch) -> list[Batch]:
        """Take out the waiting batches of the backward pass under way, in order.

        ``batch`` is the one that it has reached first; it is alone if none is waiting. Batches
        without samples are left out if others have some.
        """
        taken, waiting = list[Batch](), list[Batch]()
        for other in self.waiting:
            if other is batch or other.is_under_way:
                if not other.forward.root.is_empty:
                    taken.append(other)
            elif other.lives:
                waiting.append(other)
        self.waiting = waiting
        return taken or [batch]


@dataclass
class Capture:
    """The hooks on a model's layers."""

    sink: Sink | None = None  # receives the complete calls
    ended: Ended | None = None  # receives the layers of each backward pass of the loss
    # The qualified name of each helper's module, for errors.
    names: dict[LayerHelper, str] = field(default_factory=dict)
    enabled: bool = True  # whether calls are captured; off between statistics steps
    # Whether only probes are captured, and not the loss's own backward passes.
    probing: bool = False
    model: nn.Module | None = None  # the model that has the layers
    # The helpers whose inputs this rank does not need in this window; none are kept.
    without_inputs: frozenset[LayerHelper] = frozenset()
    # The helpers whose calls are only counted in this window, the same on every rank: their
    # tensor-parallel gradients are not gathered.
    no_statistics: frozenset[LayerHelper] = frozenset()
    # The helpers whose inputs every probe needs, not the first alone.
    rereading: frozenset[LayerHelper] = frozenset()
    alike: bool = True  # whether all ranks take statistics of the same calls
    counts: bool = False  # whether `Preconditioner.count` was ever called
    alone: bool = True  # whether no other rank waits for this one
    backend: Backend | None = None  # of the ranks that run a sharded model together
    calls: Calls = field(default_factory=Calls)  # the calls of the window under way
    precision: Precision = "fast"  # the precision of products of float32
    closed: bool = False  # whether `close` was called

    def __post_init__(self) -> None:
        self._handles: list[RemovableHandle] = []
        self._readers: frozenset[LayerHelper] = frozenset()  # the helpers whose inputs are of use
        self._reading = self._readers  # in this window, on this rank
        self._roots: dict[nn.Module, tuple[_Hook, Layers]] = {}  # hooks refer to layers weakly
        # Of the roots, after their calls, and of layers that take sequences first, before theirs.
        self._after: list[RemovableHandle] = []
        self.is_global = False  # whether a global hook calls the others: someone else has some, too
        self._probe: Probe | None = None
        # Of single parameters, which have no calls: their rows come from the outputs.
        self._parameters: Sequence[ParameterHelper] = ()
        self._unlearned_wrapper: nn.parallel.DistributedDataParallel | None = None
        self._delivering = False
        self._sampling = False  # whether backward passes are of `sample_rows`, and of no call
        self._finalizer = weakref.finalize(self, _remove, self._handles)

    # -- interface for statistics, Fishers and the step -----------------------------------------

    def listen(
        self,
        sink: Sink,
        names: Mapping[LayerHelper, str],
        rereading: frozenset[LayerHelper] = frozenset(),
        *,
        alike: bool,
        roots: Sequence[nn.Module] = (),
    ) -> None:
        """Hook the modules of these helpers, unhook all earlier ones, and send calls to a sink.

        The arguments of ``roots``, the model or the stages of a pipeline, show the batch.
        """
        self.sink, self.rereading, self.alike = sink, rereading, alike
        _remove(self._handles)
        self._roots, self._after, self.is_global = {}, [], False
        self.names = dict(names)
        readers = set(rereading)
        self._parameters = [helper for helper in names if isinstance(helper, ParameterHelper)]
        for helper in names:
            if helper in self._parameters:
                continue
            # For a bias alone, inputs show which of several groups a call reaches.
            if helper.multiplies or helper.shape[0] > 1:
                readers.add(helper)
            hook = _Hook(self, helper)
            self._handles.append(helper.module.register_forward_hook(hook, with_kwargs=True))
        self._readers = self._reading = frozenset(readers)
        if not names:
            return
        for root in roots:
            layers = Layers.of(root)
            hook = _Hook(self, layers)
            self._handles.append(root.register_forward_pre_hook(hook, with_kwargs=True))
            self._roots[root] = (hook, layers)

    def _precede(self) -> None:
        """Run before the hooks of others, which may replace the output (adapters do)."""
        if self.is_global is not bool(torch_module._global_forward_hooks):
            self.is_global = True
            hook = partial(_hook_globally, weakref.ref(self))
            handle = torch_module.register_module_forward_hook(hook, with_kwargs=True)
            # NOTE: torch leaves this entry behind, and its compiler warns of it.
            handle.extra_dict_ref += (weakref.ref(torch_module._global_forward_hooks_with_kwargs),)
            self._handles.append(handle)
        for handle in self._handles:
            if (hooks := handle.hooks_dict_ref()) is not None:
                hooks.move_to_end(handle.id, last=False)

    def begin(
        self,
        calls: Calls,
        *,
        enabled: bool,
        ended: Ended | None = None,
        without_inputs: frozenset[LayerHelper] = frozenset(),
        no_statistics: frozenset[LayerHelper] = frozenset(),
    ) -> None:
        """Record the calls of a window from now on, as it needs them; see the attributes."""
        self.calls, self.enabled, self.ended = calls, enabled, ended
        # These hooks are there at statistics steps alone: torch.compile would make calls frames of
        # their own.
        if enabled != bool(self._after):
            for handle in self._after:
                handle.remove()
                self._handles.remove(handle)
            self._after = []
            if enabled:
                for root, (hook, layers) in self._roots.items():
                    self._after.append(root.register_forward_hook(hook, with_kwargs=True))
                    for layer in layers.sequences:
                        see = _Hook(self, layer)
                        self._after.append(layer.register_forward_pre_hook(see, with_kwargs=True))
            self._handles += self._after
        if enabled:
            self._precede()
        self.without_inputs, self.no_statistics = without_inputs, no_statistics
        self._reading = self._readers - without_inputs

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Capture no calls meanwhile."""
        enabled, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = enabled

    def raise_or_defer(self, error: Exception, helper: LayerHelper) -> None:
        """Raise an error of a hook; at the step if other ranks wait in the backward pass."""
        if self.alone:
            raise error
        error.add_note(f"in a call of {self.names.get(helper, type(helper.module).__name__)!r}")
        self.calls.fail(error)

    def set_batch(self, batch: Batch) -> None:
        """Set the declaration of the forward passes that follow."""
        if self.calls.watched:  # observe() could not be matched with one forward pass
            self.calls.fail(
                RuntimeError(
                    "count() was called while a forward pass still waits for observe(): observe "
                    "the outputs of each forward pass before the next one"
                )
            )
        self.calls.batch, self.counts = batch, True

    def close(self) -> None:
        """Remove every hook; calls made before are dropped."""
        self._finalizer()
        self.sink, self.names, self.closed = None, {}, True

    @property
    def is_idle(self) -> bool:
        """Whether a probe would reach no layer: none was called since the last one."""
        return self.probing and not (self.calls.watched or self._parameters)

    def probe(
        self,
        outputs: Sequence[Tensor],
        vectors: Iterable[tuple[Sequence[Tensor | None], float]],
        samples: int | None = None,
    ) -> None:
        """Send vectors backward from the model's outputs, to the layers and no further.

        No parameter's gradient is touched, and the graph stays for the loss's own backward pass.
        ``vectors`` have a gradient for each output (None for zeros), and a weight; ``samples`` are
        the terms of the loss, None for the layers' batch size.

        Raises:
            RuntimeError: If no layer was called since the last probe.
        """
        calls = self.calls
        watched = calls.watched
        if self.is_idle:
            raise RuntimeError(
                "no registered layer ran with gradients since the last probe: call it between "
                "the model's forward pass and loss.backward()"
            )
        number = calls.current = calls.count
        calls.first_batch = None
        calls.count += 1
        try:
            for index, (vector, weight) in enumerate(vectors):
                is_first = index == 0
                self._probe = Probe(weight, is_first, samples)
                # The first has to reach every layer, since it counts the inputs.
                starts, gradients = _starts(outputs, vector, with_zeros=is_first)
                rows = self.sample_rows(outputs, starts, gradients)
                self._deliver_rows(rows, number, self._probe)
                reached = self._reach(watched, starts, gradients)
                pairs = list(zip(watched, reached, strict=True))
                self._deliver_inner_gradients(pairs)
                if is_first:
                    # Layers that were not reached belong to other forward passes, and wait.
                    calls.watched = [end for end, gradient in pairs if gradient is None]
                    watched = [end for end, gradient in pairs if gradient is not None]
        finally:
            calls.current = calls.first_batch = None
            self._probe, calls.shares, self._unlearned_wrapper = None, False, None

    def _reach(
        self, ends: Sequence[_Watched], starts: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> Sequence[Tensor | None]:
        """Return the gradients that reach the ends of a probe."""
        if not ends:
            return ()
        with unseen_by(self._unlearned_wrapper):
            reached: Sequence[Tensor | None] = torch.autograd.grad(
                starts,
                [end.edge for end in ends],
                grad_outputs=gradients,
                retain_graph=True,
                allow_unused=True,
            )
        return reached

    # -- single parameters ------------------------------------------------------------------------

    @contextmanager
    def with_parameters(self, outputs: Any, loss: Tensor) -> Iterator[None]:
        """Deliver the rows of single parameters, around the backward pass of a loss."""
        rows, calls = self.sample_rows(outputs, [loss]), self.calls
        number, terms = calls.count, calls.batch.terms
        yield
        if rows:
            calls.count = number + 1  # also if the pass has reached no layer
            self._deliver_rows(rows, number, Probe(1.0, True, terms))

    def sample_rows(
        self, outputs: Any, starts: Sequence[Tensor], gradients: Sequence[Tensor] | None = None
    ) -> dict[ParameterHelper, Tensor]:
        """Return the gradients of samples in single parameters, see `sample_gradients`."""
        rows: dict[ParameterHelper, Tensor] = {}
        if not self._parameters:
            return rows
        assert self.model is not None
        require_apart(self.model)
        helper_of = self._helpers_of_present_parameters()
        root = self.calls.batch.forward.root
        self._sampling = True
        try:
            of_parameters = sample_gradients(
                outputs, list(helper_of), starts, gradients, self._most
            )
            for parameter, of_samples in of_parameters.items():
                rows[helper_of[parameter]] = of_samples
                if root.dim > 0 or root.size not in (None, len(of_samples)):
                    raise ValueError(
                        f"the outputs have {len(of_samples)} rows, and the batch {root.size} "
                        f"samples in dimension {root.dim}"
                    )
        except ValueError as error:
            names = ", ".join(self.names[helper] for helper in self._parameters)
            raise ValueError(
                f"no gradients of samples of {names}: {error}. Return the outputs that the loss "
                f"is of, tensors [samples, ...], or leave auxiliary= out"
            ) from error
        finally:
            self._sampling = False
        return rows

    def _helpers_of_present_parameters(self) -> dict[nn.Parameter, ParameterHelper]:
        """Return helpers by the parameters with which the model has computed."""
        assert self.model is not None
        helper_of = {helper.parameter: helper for helper in self._parameters}
        for _ in sharding.gathered(sharding.sharded_modules(self.model)):
            helper_of |= {helper.parameter: helper for helper in self._parameters}
        return helper_of

    def _most(self, samples: int) -> int:
        """Return the largest number of samples of the ranks that run backward passes together."""
        assert self.model is not None
        if not sharding.sharded_modules(self.model):
            return samples
        assert self.backend is not None
        return int(max(gather_json(self.backend, samples)))

    def _deliver_rows(
        self, rows: Mapping[ParameterHelper, Tensor], number: int, probe: Probe
    ) -> None:
        """Pass on the rows of single parameters, as calls of layers without inputs."""
        batch, sink = self.calls.batch, self.sink
        root = batch.forward.root
        assert sink is not None
        with torch.no_grad(), within(self.precision):
            for helper, of_samples in rows.items():
                reads = self._reads(helper, probe)
                sink(LayerCall(helper, (), of_samples, number, probe, batch, root, None, reads))

    def _deliver_inner_gradients(self, pairs: Sequence[tuple[_Watched, Tensor | None]]) -> None:
        """Deliver the gradients that have reached calls inside modules."""
        self._delivering = True  # a checkpoint that recomputes meanwhile is no new forward pass
        try:
            for end, gradient in pairs:
                if end.pending is not None and gradient is not None:
                    end.pending(gradient)
        finally:
            self._delivering = False

    # -- forward ----------------------------------------------------------------------------------

    def _on_root(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any, layers: Layers
    ) -> None:
        """See the batch of a forward pass in the root's arguments, and afterwards in its output."""
        if not torch.is_grad_enabled() or torch._C._current_graph_task_id() != -1:
            return  # no training, or a checkpoint that recomputes
        if output is not ...:  # after the call
            forward, terms = self.calls.batch.forward, self.calls.batch.terms
            forward.see(look_at_outputs(forward.root, args, kwargs, output, layers, terms))
            return
        if not self.alone:
            if (error := alone_in_join()) is not None:
                raise RuntimeError(error)
            if self.probing:
                self._unlearned_wrapper = unlearned_wrapper()
        self._precede()
        self._begin_call()
        calls = self.calls
        if not calls.batch.declared:
            calls.batch = Batch()
            calls.waiting.append(calls.batch)
        calls.batch.begin(look(args, kwargs))

    def _on_sequences(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """See the layout of a layer's first input, ``[T, N, features]``."""
        forward = self.calls.batch.forward
        first = next(itertools.chain(args, kwargs.values()), None)
        forward.see(forward.root.with_sequences(first))

    def _on_forward(
        self, helper: LayerHelper, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> None:
        if self.sink is None:
            return
        trained = self.tensors_of_call(helper)
        if trained is None:
            return
        is_recomputed = self._begin_call()
        if not trained:
            return
        inner = helper.observe(args, kwargs, output)
        is_reached = bool(inner)
        if inner is None:
            if not isinstance(output, Tensor):
                raise TypeError(
                    f"{self.names.get(helper, type(helper.module).__name__)}: "
                    f"{type(helper).__name__} serves modules that return one tensor, not "
                    f"{type(output).__name__}; skip the module (skip=[...])"
                )
            is_reached = output.requires_grad
        if not is_reached:
            return
        self.calls.called.add(helper)
        if inner is None:
            self._watch(helper, trained, args, kwargs, output, is_recomputed)
            return
        for call in inner:
            self._watch_inner(helper, trained, call, is_recomputed)

    def _watch(
        self,
        helper: LayerHelper,
        trained: Sequence[nn.Parameter],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Tensor,
        is_recomputed: bool,
    ) -> None:
        """Put a hook on the output of a module."""
        inputs = tuple(map(_values, helper.inputs(args, kwargs)))
        are_plain = set(map(type, trained)) == {nn.Parameter}
        if not are_plain and self._has_rows_of_a_part(helper, trained, (output, *inputs)):
            return
        size = self.calls.batch.forward.root.size
        if self.probing and size is not None and not output.is_nested:
            # [groups, batch, shared, out]
            _, batch, shared, _ = helper.output_rows(output.detach()).shape
            self.calls.shares |= helper.lacks_batch(batch, shared, size)
        hooked, view = _tensor_to_hook(output, inputs)
        pending = self._pending(helper, trained, inputs, hooked.output_nr, view)
        # A recomputed call is reached through the graph of its first pass.
        if self.probing and not is_recomputed:
            self.calls.watched.append(_Watched(get_gradient_edge(hooked)))
        node = hooked.grad_fn
        # A probe ends here, where hooks of nodes do not run; and a leaf has no node.
        if self.probing or node is None:
            hooked.register_hook(pending)
        else:
            pending.find_marker(node, inputs)
            node.register_prehook(pending)

    def _watch_inner(
        self,
        helper: LayerHelper,
        trained: Sequence[nn.Parameter],
        call: InnerCall,
        is_recomputed: bool,
    ) -> None:
        """Put a hook on a call inside a module."""
        inputs: tuple[Tensor, ...] = ()
        if helper in self._reading:
            # The first pass of a checkpoint has saved nothing. Tensors saved here are replaced, in
            # order, by the tensors that its second pass saves.
            inputs = call.like() if _is_checkpointed() else call.read()
        # No reference to the node: it has the hook, and the cycle would never be freed.
        pending = self._pending(helper, trained, inputs, call.edge.output_nr, call.arrange)
        if self.probing and not is_recomputed:
            self.calls.watched.append(_Watched(call.edge, pending))
        pending.find_marker(call.edge.node, ())
        call.edge.node.register_prehook(pending)

    def _has_rows_of_a_part(
        self, helper: LayerHelper, trained: Sequence[Tensor], tensors: Iterable[Tensor]
    ) -> bool:
        """Return whether a call multiplied with a part of a parameter; the step raises it."""
        if not any(map(sharding.is_cut, trained)) or all(map(sharding.is_distributed, tensors)):
            return False
        self.calls.fail(
            ValueError(
                f"{self.names[helper]} computes with this rank's part of a parameter that is "
                f"cut up over ranks, as experts over ranks do, and not with DTensors: its rows "
                f"are not those of the whole. Choose a method that reads gradients alone for "
                f"it, such as 'muon' or 'soap' (method={{pattern: ...}}), or skip it"
            )
        )
        return True

    def tensors_of_call(self, helper: LayerHelper) -> list[nn.Parameter] | None:
        """Return the trained tensors with which a call computes.

        None if a tensor has nothing to do with its parameter, so that the call is not captured.
        Else it is the parameter itself; the one that fully_shard has gathered for this pass; or
        the shard of a later tensor-parallel plan, unless some ranks would not enter the collective
        that gathers its rows: such a model is an error at the step.
        """
        trained: list[nn.Parameter] = []
        present = helper.module._parameters
        for name, registered in helper.parameters.items():
            parameter = present[name] if name in present else parameter_of(helper.module, name)
            if parameter is not registered:
                if sharding.is_distributed(parameter) and not self.alike:
                    return None
                if not sharding.stands_for(parameter, registered, self.model):
                    return None
            assert parameter is not None
            # It may have been frozen since; the rest of the block still needs the call.
            if parameter.requires_grad:
                trained.append(parameter)
        return trained

    def _begin_call(self) -> bool:
        """Prepare the records for a call; return whether a checkpoint recomputes it.

        A recomputed call belongs to the backward pass under way, which is opened if it is the
        first to see it. Any other begins a new batch if a backward pass has ended the former.
        """
        calls = self.calls
        if self._sampling:
            return True
        if self._delivering or torch._C._current_graph_task_id() != -1:
            # A checkpoint recomputes within a backward pass. Seen here, the outermost pass is
            # opened before any nested one delivers gradients.
            calls.enter(self._on_end)
            return True
        if calls.current is not None and torch.is_grad_enabled():
            # A backward pass that raised never closed itself. Actors' threads have no gradients.
            calls.current = calls.first_batch = None
            calls.reached.clear()
        if calls.batch.closed:
            calls.batch = Batch()
        return False

    def _pending(
        self,
        helper: LayerHelper,
        trained: Sequence[nn.Parameter],
        inputs: tuple[Tensor, ...],
        output_index: int,
        view: Callable[[Tensor], Tensor] | None,
    ) -> _Pending:
        """Return the gradient hook of a call, which keeps the inputs if they are needed."""
        saved: tuple[SavedTensor, ...] = ()
        if helper in self._reading:
            saved = tuple([_make_saved_tensor(x, is_output=False) for x in inputs])
        # Within a backward pass a checkpoint recomputes for it.
        batch = self.calls.first_batch or self.calls.batch
        return _Pending(
            weakref.ref(self),
            helper,
            saved,
            trained,
            _accumulator(trained[0]),
            self.without_inputs,
            batch,
            batch.forward,
            output_index,
            view,
        )

    # -- backward ---------------------------------------------------------------------------------

    def _on_end(self) -> None:
        """Close a backward pass, and pass on the layers that it has reached."""
        calls = self.calls
        calls.current = calls.first_batch = None
        reached, calls.reached = frozenset(calls.reached), set()
        if reached and self.ended is not None:
            self.ended(reached)

    def _on_gradient(self, call: _Pending, saved: Sequence[SavedTensor], gradient: Tensor) -> None:
        # The latter were called in a window of other turns: some layers' inputs were not kept.
        if self._sampling or call.without_inputs != self.without_inputs:
            return
        helper, batch, calls = call.helper, call.batch, self.calls
        number = calls.current  # of the loss, or of a probe
        assert number is not None
        if calls.first_batch is None:
            calls.first_batch = batch
        (window, earlier), call.passed = call.passed, (calls, number)
        if window is not calls or earlier == number:
            earlier = None
        batch.closed = True  # the next forward pass is of another one
        if gradient.dtype == torch.float16:
            calls.half |= any(p.dtype == torch.float32 for p in helper.parameters.values())
        try:
            # A context takes a while, even without effect.
            without_graph = torch.no_grad() if torch.is_grad_enabled() else _NOTHING
            with without_graph, within(self.precision):
                probe = self._probe
                reads = self._reads(helper, probe)
                inputs = _unpacked(saved) if reads else ()
                if type(gradient) is not Tensor:
                    gradient = sharding.whole(gradient, read=helper not in self.no_statistics)
                is_ragged = gradient.is_nested
                gradient = _values(gradient)
                if call.view is not None:
                    gradient = call.view(gradient)
                root = call.forward.root
                complete = LayerCall(
                    helper, inputs, gradient, number, probe, batch, root, earlier, reads, is_ragged
                )
                assert self.sink is not None
                with sharding.shaped(helper.module._parameters.values()):
                    self.sink(complete)
        except Exception as error:  # of any kind: all ranks raise together
            error.add_note(f"soframe: in the statistics of {self.names.get(helper)!r}")
            self.raise_or_defer(error, helper)

    def _reads(self, helper: LayerHelper, probe: Probe | None) -> bool:
        """Return whether a probe, or the loss's backward pass, needs the inputs of a helper."""
        if helper in self.without_inputs:
            return False
        return probe is None or probe.first or helper in self.rereading


@dataclass(eq=False, slots=True, weakref_slot=True)
class _Pending:
    """A call that waits for its output gradient: a hook of the output, or of its node."""

    capture: weakref.ref[Capture]
    helper: LayerHelper
    saved: Sequence[SavedTensor]  # the inputs; empty once autograd frees its saved tensors
    trained: Sequence[nn.Parameter]  # the tensors with which the call computes
    accumulator: Any  # the node that adds to the gradient of the first
    without_inputs: frozenset[LayerHelper]  # as it was then
    batch: Batch
    forward: Forward  # of the root, in which the call was
    output_index: int  # of the output among the outputs of its node
    view: Callable[[Tensor], Tensor] | None  # from the gradient received to the output's
    passed: tuple[Calls | None, int | None] = (None, None)  # window and number of the last pass
    marker: Any = None  # a node by which a backward pass through this forward pass is recognised

    def __call__(self, received: Tensor | tuple[Tensor | None, ...] | None) -> None:
        """Take the gradient: of a tensor itself, of a node the gradients of all its outputs."""
        capture, saved = self.capture(), self.saved
        # A layer that was frozen, thawed or replaced since its forward has another helper now.
        if capture is None or not capture.enabled or self.helper not in capture.names:
            return
        if capture._probe is None:
            # autograd.grad passes through here without adding to any parameter's gradient.
            if not self.adds_to_gradients():
                return
            capture.calls.enter(capture._on_end)
            capture.calls.reached.add(self.helper)
            if capture.probing:
                return  # statistics come from probes alone
        elif isinstance(received, tuple):
            return  # a node of a call inside a module, to which `probe` brings its gradient
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            # Autograd frees its saved tensors here, even if the output lives on; so does this node.
            self.saved = ()
        if isinstance(received, tuple):
            received = received[self.output_index]
        # A function's backward may return None for the output: it then counts as not called.
        if received is not None:
            capture._on_gradient(self, saved, received)

    def adds_to_gradients(self) -> bool:
        """Return whether the backward pass under way adds to the gradient of a parameter."""
        if _accumulates(self.accumulator):
            return True
        with torch.enable_grad():  # else the others have no nodes
            return any(_accumulates(_accumulator(parameter)) for parameter in self.trained[1:])

    def find_marker(self, node: Any, inputs: Sequence[Tensor]) -> None:
        """Find a node that no other forward pass has, to recognise this one's batch by.

        The node is an input's, or of the weight's transposition or the product. The root's inputs,
        and other nodes such as casts by autocast, may be parts of several forward passes.
        """
        if self.batch.call is not None:
            return  # one call is enough
        # The call's own node has this hook: a reference to it would be a cycle.
        candidates = [tensor.grad_fn for tensor in inputs if not self.forward.root.has(tensor)]
        names = {_TRANSPOSITION, _PRODUCT.get(node.name())}
        for following, _ in node.next_functions:
            if following is not None and following.name() in names:
                candidates.append(following)
        self.marker = next(filter(None, candidates), None)
        if self.marker is not None:
            self.batch.recognise_by(self)


_TRANSPOSITION = "TBackward0"
"""The name of the node by which each call of a linear layer transposes its weight."""
_PRODUCT = {"AddBackward0": "UnsafeViewBackward0", "UnsafeViewBackward0": "MmBackward0"}
"""The name of the node of a product, of a linear layer whose inputs do not fill their memory."""


class _Watched(NamedTuple):
    """An end of a probe; and for a call inside a module its gradient hook."""

    edge: GradientEdge
    pending: _Pending | None = None


def _tensor_to_hook(
    output: Tensor, inputs: tuple[Tensor, ...]
) -> tuple[Tensor, Callable[[Tensor], Tensor] | None]:
    """Return the output, or the base that it is a view of, and how to view the base's gradient.

    torch gives a view that is changed in place another node in the graph, and never calls hooks of
    the former one. The output of ``nn.Linear`` for inputs of three dimensions is such a view, of a
    product with two. The base's node stays, and its gradient is the gradient of the layer's output.
    """
    base = output._base
    if base is None or base.grad_fn is None or base.dtype != output.dtype:
        return output, None
    # If the output is a view of the inputs, the base has gradients from other uses.
    if any(x is base or x._base is base for x in inputs) or not _dense(base):
        return output, None
    size, stride, base_stride = output.size(), output.stride(), base.stride()
    offset = int(output.storage_offset() - base.storage_offset())

    def of_output(gradient: Tensor) -> Tensor:
        if gradient.stride() != base_stride:
            in_order_of_base = torch.empty_strided(
                gradient.shape, base_stride, dtype=gradient.dtype, device=gradient.device
            )
            gradient = in_order_of_base.copy_(gradient)
        return gradient.as_strided(size, stride, gradient.storage_offset() + offset)

    return base, of_output


def _starts(
    outputs: Sequence[Tensor], vector: Sequence[Tensor | None], *, with_zeros: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the outputs that a probe starts from, and their gradients: of None perhaps zeros."""
    starts: list[Tensor] = []
    gradients: list[Tensor] = []
    for output, gradient in zip(outputs, vector, strict=True):
        if gradient is not None:
            starts.append(output)
            gradients.append(gradient)
        elif with_zeros:
            starts.append(output)
            gradients.append(torch.zeros_like(output))
    return starts, gradients


_NOTHING = nullcontext()


def _unpacked(saved: Sequence[SavedTensor]) -> tuple[Tensor, ...]:
    """Return the inputs of a call."""
    inputs = map(SavedTensor.unpack, saved)
    return tuple([x if type(x) is Tensor else sharding.whole(x) for x in inputs])


def _values(tensor: Tensor) -> Tensor:
    """Return the rows of a nested (jagged) tensor, without padding; another tensor as it is."""
    if not tensor.is_nested:
        return tensor
    if tensor.layout is not torch.jagged:
        raise ValueError("nested tensors need layout=torch.jagged")
    return tensor.values()


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
    """Return whether a checkpoint drops the graph's saved tensors, to recompute them."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is not None and "_checkpoint_hook." in getattr(hooks[0], "__qualname__", "")


def _accumulator(parameter: Tensor) -> Any:
    """Return the node that adds to the gradient of a parameter in backward passes."""
    view: Any = parameter.view_as(parameter)
    return view.grad_fn.next_functions[0][0]


def _accumulates(node: Any) -> bool:
    """Return whether the backward pass under way adds to ``.grad`` of the parameter of a node."""
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        # torch raises this for a parameter that is an input of autograd.grad.
        return False


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
    handles.clear()
