"""The torch functions of a forward pass, and the derivatives of its outputs from them.

A `Tape` notes what the pass calls, and computes tangents from the notes, function by function, for
all directions at once: see `soframe.derivatives.tangents` for what a function costs. Nothing runs
again, and no random number is drawn that was not drawn before.

A tape either follows the pass or says that it does not. It does not where a function on the way to
the outputs has no rule, or changes its arguments, where autograd knows of a result that no noted
function returned (a custom ``autograd.Function``), under autocast, and where tensors are no plain
ones. Then the gradient is differentiated: `soframe.derivatives.twice` is the plain twin.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from soframe.derivatives.linear_end import LinearEnd
from soframe.derivatives.replay import RandomState, eagerly
from soframe.derivatives.tangents import (
    RANDOM,
    Moving,
    attention_without_rule,
    owns,
    replaced,
    rule_of,
    signature,
    tensors,
)
from soframe.derivatives.twice import Direction, Kernels, plain_kernels

log = logging.getLogger(__name__)

_RUNNING = {F.batch_norm: "training", F.instance_norm: "use_input_stats"}
"""What changes running statistics, where that argument says that it does not normalise by them."""


OFF = "reuse_activations is off"


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor among the arguments of a call."""

    number: int


@dataclass
class _Call:
    """A function that was called.

    Attributes:
        function: The function.
        args: With a `_Slot` for each tensor.
        kwargs: Likewise.
        inputs: The numbers of those tensors.
        results: The numbers of the tensors that it returned, None where one has no derivative.
        random: The random state at which it was called; None if it draws no numbers.
        last: Tensors that no later call has for an input.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: tuple[int, ...]
    results: tuple[int | None, ...]
    random: RandomState | None
    last: tuple[int, ...] = field(default=())


@lru_cache(maxsize=64)  # once, not at every step
def _tell(problem: str) -> None:
    log.info("derivatives differentiate the gradient: %s", problem)


class Tape:
    """What a forward pass called.

    It keeps the pass's intermediate tensors, most of which autograd keeps anyway, until it is
    itself forgotten.

    Args:
        devices: CUDA devices whose random numbers the pass may draw.
        reuse: Whether it is to be followed; else nothing is noted.

    Attributes:
        problem: Why it cannot be followed; None if it can.
        kernels: In which kernels functions ran that have faster ones.
        differentiates: Whether a gradient was asked for.
    """

    def __init__(self, devices: Sequence[int] = (), *, reuse: bool = True) -> None:
        self._devices = devices
        self.problem: str | None = None if reuse else OFF
        self.kernels: set[Kernels] = set()
        self.differentiates = False
        self._calls: list[_Call] = []
        self._values: dict[int, Tensor] = {}  # without their graph
        self._versions: list[int] = []
        self._numbers: dict[int, int] = {}  # by the id of a tensor; of leaves only, once at its end
        self._tensors: list[Tensor] = []  # so that no other tensor gets such an id
        self._leaves: list[Tensor] = []  # of these, those that have a gradient of their own
        self._ends: list[int | None] = []
        self._ended = False

    @contextmanager
    def record(self) -> Iterator[None]:
        """Note what is called within this context, up to `end`; run it so that it has derivatives.

        A compiled graph is nothing that could be noted, and has no second derivative: compiled
        modules run as they are written.

        Yields:
            Nothing.
        """
        with eagerly(), _Mode(self._call):
            yield

    @contextmanager
    def in_same_kernels(self) -> Iterator[None]:
        """Let checkpoints, which run functions again in a backward pass, run what they ran.

        On whichever thread they do so: these settings are the process's.

        Yields:
            Nothing.
        """
        with ExitStack() as stack:
            for kernels in self.kernels:
                stack.enter_context(kernels())
            yield

    def _call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        kernels = plain_kernels(function)
        self.differentiates |= function is torch.autograd.grad
        if kernels is None:
            return self._note(function, args, kwargs)
        self.kernels.add(kernels)
        with kernels():
            return self._note(function, args, kwargs)

    def _note(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        # Without gradients nothing has a derivative; what changes an argument shows by its version.
        if self.problem is not None or self._ended or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        if (
            getattr(function, "__name__", "") == "__get__"
        ):  # most calls ask a tensor for its shape or the like
            asked = function(*args, **kwargs)
            if not isinstance(asked, Tensor) or not asked.requires_grad:
                return asked
        noted = _without_running(function, args, kwargs)
        inputs = tensors(noted)
        before = [t._version for t in inputs if not t.is_inference()]
        random = RandomState(self._devices) if function in RANDOM else None
        result = function(*args, **kwargs)
        results = tensors(result)
        if any(tensor.requires_grad for tensor in results):
            self.problem = self._problem(function, inputs, results, before)
            if function is F.scaled_dot_product_attention and attention_without_rule(args, kwargs):
                self.problem = self.problem or "attention has dropout, or shares its keys"
            if self.problem is None and not any(r is t for r in results for t in inputs):
                self._add(function, noted, results, random)
        return result

    def _problem(
        self, function: Any, inputs: list[Tensor], results: list[Tensor], before: list[int]
    ) -> str | None:
        """Say why a call cannot be followed."""
        name = getattr(function, "__name__", str(function))
        device = results[0].device.type
        if torch.is_autocast_enabled(device):
            return f"{name} is called under autocast"
        for tensor in (*inputs, *results):
            plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
            if not plain or tensor.is_complex() or tensor.is_inference():
                return f"{name} has to do with tensors of another kind"
        for tensor, version in zip(inputs, before, strict=True):
            number = self._numbers.get(id(tensor))
            if number is None and tensor.grad_fn is not None:
                return f"{name} uses a result of something that is no torch function"
            if number is not None and self._versions[number] != version:
                return f"{name} uses what has been changed in place"
            if tensor._version != version:
                return f"{name} changes its arguments"
        return None

    def _add(
        self,
        function: Any,
        arguments: tuple[tuple[Any, ...], dict[str, Any]],
        results: list[Tensor],
        random: RandomState | None,
    ) -> None:
        inputs: list[int] = []

        def slot(tensor: Tensor) -> _Slot:
            inputs.append(self._number(tensor))
            return _Slot(inputs[-1])

        stripped, named = replaced(arguments, Tensor, slot)
        returned = [self._number(tensor) if tensor.requires_grad else None for tensor in results]
        call = _Call(function, stripped, named, tuple(inputs), tuple(returned), random)
        self._calls.append(call)

    def _number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._versions)  # those that are forgotten keep theirs
            self._tensors.append(tensor)
            if tensor.is_leaf and tensor.requires_grad:  # at `end` each question would be noted
                self._leaves.append(tensor)
            self._values[self._numbers[id(tensor)]] = tensor.detach()
            self._versions.append(tensor._version)
        return self._numbers[id(tensor)]

    def go_on(self) -> None:
        """Note what follows, too: the model is called once more."""
        self._ended = False

    def end(self, outputs: Sequence[Tensor]) -> None:
        """End the tape, once the pass is over.

        Args:
            outputs: What derivatives are asked of, besides the outputs of calls before.
        """
        self._ended = True
        ends = [self._numbers.get(id(output)) for output in outputs]
        self._ends += ends
        for output, number in zip(outputs, ends, strict=True):
            if number is None and output.requires_grad:
                self.problem = self.problem or "no torch function returned the model's output"
            if number is not None and self._versions[number] != output._version:
                self.problem = self.problem or "the model's output has been changed in place"
        needed = {number for number in self._ends if number is not None}
        kept: list[_Call] = []
        for call in reversed(self._calls):
            if needed.isdisjoint(call.results):
                continue
            call.last = tuple(number for number in {*call.inputs} if number not in needed)
            needed.update(call.inputs)
            kept.append(call)
            if rule_of(call.function) is None:
                name = getattr(call.function, "__name__", str(call.function))
                self.problem = self.problem or f"there is no rule for {name}"
        if self.problem is not None and self.problem != OFF:
            _tell(self.problem)
        self._calls = kept[::-1] if self.problem is None else []
        used = {n for call in self._calls for n in (*call.inputs, *call.results)}
        self._values = {n: value for n, value in self._values.items() if n in used}
        self._numbers = {id(leaf): self._numbers[id(leaf)] for leaf in self._leaves}
        self._tensors = []

    def holds(self) -> bool:
        """Return whether the tape is that of the pass, and what it notes is as it was."""
        unchanged = (value._version == self._versions[n] for n, value in self._values.items())
        return self.problem is None and all(unchanged)

    def tangents(
        self, parameters: Sequence[nn.Parameter], directions: Sequence[Direction]
    ) -> list[list[Tensor | None]]:
        """Return the derivatives of the outputs along directions.

        Args:
            parameters: The parameters.
            directions: k of them, with one tensor per parameter or None for zero.

        Returns:
            For each output one per direction; None for zero.
        """
        nothing: list[Tensor | None] = [None] * len(directions)
        live = self._tangents_after(self._calls, parameters, directions)
        return [nothing if end is None else live.get(end, nothing) for end in self._ends]

    def linear_end(
        self, parameters: Sequence[nn.Parameter], directions: Sequence[Direction]
    ) -> LinearEnd | None:
        """Return the last layer with what moves before it, if it is linear and widens.

        Args:
            parameters: The parameters.
            directions: k of them, with one tensor per parameter or None for zero.

        Returns:
            None if the outputs' own tangents take no more.
        """
        if len(self._ends) != 1 or not self._calls:
            return None
        *calls, last = self._calls
        if last.function is not F.linear or last.results != (self._ends[0],):
            return None
        bound = inspect.signature(_linear).bind(*last.args, **last.kwargs)
        bound.apply_defaults()
        slots = [slot and slot.number for slot in bound.args]
        x, weight = (self._values[slots[i]] for i in (0, 1))
        out, width = weight.shape
        count = len(directions)
        if x.dtype != weight.dtype or (count + 1) * width >= count * out:
            return None
        live = self._tangents_after(calls, parameters, directions)
        nothing: list[Tensor | None] = [None] * count
        moving, *of_parameters = (nothing if n is None else live.get(n, nothing) for n in slots)
        rows = [None if dx is None else dx.reshape(-1, width) for dx in moving]
        return LinearEnd(x.reshape(-1, width), weight, [*zip(rows, *of_parameters, strict=True)])

    def _tangents_after(
        self,
        calls: Sequence[_Call],
        parameters: Sequence[nn.Parameter],
        directions: Sequence[Direction],
    ) -> dict[int, list[Tensor | None]]:
        """Return the tangents that are left after some calls, for each direction."""
        live: dict[int, list[Tensor | None]] = {}
        for parameter, *moves in zip(parameters, *directions, strict=True):
            if id(parameter) in self._numbers and any(tangent is not None for tangent in moves):
                live[self._numbers[id(parameter)]] = list(moves)
        made: set[int] = set()  # whose tangents are no other tensor's memory
        draws = any(call.random is not None for call in calls)
        with torch.no_grad(), torch.random.fork_rng(self._devices) if draws else nullcontext():
            for call in calls:
                given = {number: live[number] for number in call.inputs if number in live}
                if given:
                    free = made.issuperset(given) and {*given} <= {*call.last}
                    each = self._tangents_of(call, given, len(directions), free)
                    if not owns(call.function):
                        made.difference_update(given)  # whose memory a result may share now
                    for number, *tangents in zip(call.results, *each, strict=True):
                        if number is not None and any(tangent is not None for tangent in tangents):
                            live[number] = tangents
                            if owns(call.function):
                                made.add(number)
                for number in call.last:
                    live.pop(number, None)
        return live

    def _tangents_of(
        self, call: _Call, given: dict[int, list[Tensor | None]], count: int, free: bool
    ) -> list[list[Tensor | None]]:
        """Return what a call's results have for tangents, for each direction."""
        results = [None if number is None else self._values[number] for number in call.results]
        nothing: list[Tensor | None] = [None] * count

        def moving(slot: _Slot) -> Moving:
            return Moving(self._values[slot.number], given.get(slot.number, nothing))

        args, kwargs = replaced((call.args, call.kwargs), _Slot, moving)
        rule = rule_of(call.function, call.random)
        assert rule is not None  # else `end` has told of it
        tangents: list[list[Tensor | None]] = rule(results, free, *args, **kwargs)
        return tangents


class _Mode(TorchFunctionMode):
    def __init__(self, handle: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self._handle = handle

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._handle(func, args, kwargs or {})


def _without_running(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments without running statistics that are only written."""
    if function not in _RUNNING:
        return args, kwargs
    bound = signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    if bound.arguments[_RUNNING[function]]:
        bound.arguments.update(running_mean=None, running_var=None)
    return bound.args, bound.kwargs


def _linear(input: Any, weight: Any, bias: Any = None) -> None:
    """Has the arguments of `torch.nn.functional.linear`, which has no signature."""
