"""Counting: the terms that the loss is a mean of, and the rows that are data.

The number of samples is the root module's batch, seen in its inputs and outputs
(`soframe.capture.root`); with ``samples="positions"``, or where they show a language model, the
tokens. Several forward passes in one backward pass are of other samples, whose numbers add up,
unless their inputs are the same. A layer may see some of the samples (a mixture of experts), or
pieces of them (windows of an image): its sums are still divided by N. A layer that is called
without the batch, such as a table of positions with ``[1, T]``, is shared by all samples
(`LayerHelper.lacks_batch`). If the root does not show N (a submodule was called instead), the layer
nearest to the loss does. An uncertain number gives one warning; `Preconditioner.count` declares it
for the forward passes that follow, such as the positions that the loss ignores (``ignore_index``),
in whichever order backward passes come.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from soframe.capture.root import Sight
from soframe.layers.base import Unit

Samples = Literal["batch", "positions"] | Callable[[], int] | None
REMEDY = (
    "say what the loss is a mean over: preconditioner.count(n) before each forward pass (n is "
    "len(inputs) for a mean over the batch; pass labels != ignore_index for one over tokens), or a "
    "callable Statistics(samples=...) that returns n"
)


class DataRows(NamedTuple):
    """The rows or samples of a call that are data."""

    indices: Tensor
    unit: Unit


class RowMask:
    """A mask ``[N, ...]``, bool: True for positions that are data, False for padding."""

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask.detach().reshape(len(mask), math.prod(mask.shape[1:]))
        self._index: dict[torch.device, Tensor] = {}
        self.shape = tuple(mask.shape)
        self.fits = False  # of any call so far

    def of(self, batch: int, shared: int, device: torch.device) -> DataRows | None:
        """Return the rows or samples of a call that are data.

        None if the mask has another shape than the call: then all rows are data.
        """
        samples, positions = self._mask.shape
        if positions == 1 and batch == samples:
            unit: Unit = "sample"
        elif (batch, shared) in ((samples, positions), (samples * positions, 1)):
            unit = "row"
        else:
            return None
        self.fits = True
        if device not in self._index:  # the host waits once for each declaration
            self._index[device] = self._mask.to(device).flatten().nonzero().flatten()
        return DataRows(self._index[device], unit)


@dataclass(eq=False)
class Forward:
    """A forward pass of the root module."""

    root: Sight = field(default_factory=Sight)  # its inputs and outputs

    def see(self, root: Sight) -> None:
        """Keep the batch that the inputs and outputs show."""
        self.root = root


@dataclass(eq=False)
class Batch:
    """The declared or observed numbers of some forward passes."""

    terms: int | None = None  # that their loss is a mean of; None for the layers' batch size
    mask: Tensor | None = None  # the terms of the model's outputs that count; None for all
    rows: RowMask | None = None  # the rows that are data; None for all
    forward: Forward = field(default_factory=Forward)  # the last one
    call: weakref.ref[Any] | None = None  # a call whose graph has a node `marker`
    declared: bool = False  # true if set by `Preconditioner.count`
    closed: bool = False  # whether the next forward pass is of another batch

    def end(self, terms: int | None) -> None:
        """Set the terms, and close the batch: the next forward pass is of another one."""
        self.terms, self.closed = terms, True

    def recognise_by(self, call: Any) -> None:
        """Set the call by whose node ``marker`` a backward pass is found to go through here."""
        self.call = weakref.ref(call)

    def begin(self, root: Sight) -> None:
        """Begin a forward pass of the root, with the batch that its inputs show."""
        self.forward = Forward(root)

    @property
    def lives(self) -> bool:
        """Whether a backward pass may still go through this forward pass."""
        return self.call is not None and self.call() is not None

    @property
    def is_under_way(self) -> bool:
        """Whether the backward pass under way goes through this forward pass; False if unsure."""
        if self.call is None:
            return False
        call = self.call()
        return call is not None and bool(torch._C._will_engine_execute_node(call.marker))


def declare(terms: object, rows: Tensor | None) -> Batch:
    """Check and return the declaration of `Preconditioner.count`."""
    if terms is None and rows is None:
        raise ValueError("count() says terms=, rows= or both")
    batch = Batch(declared=True)
    if rows is not None:
        batch.rows = RowMask(_mask(rows))
    if isinstance(terms, Tensor) and terms.dtype == torch.bool and terms.dim() > 0:
        batch.terms, batch.mask = int(terms.sum()), terms.detach()
    elif terms is not None:
        batch.terms = _number(terms)
    return batch


def _number(terms: object) -> int:
    """Return a declared number of terms."""
    number = _integer(terms)
    if number is None:
        if isinstance(terms, Tensor):
            raise TypeError(
                f"count: terms is a number, or a bool mask such as labels != -100, not a tensor of "
                f"{terms.dtype} and shape {tuple(terms.shape)}"
            )
        raise TypeError(f"count: terms is a number of terms or a bool mask, not {terms!r}")
    if number < 0:
        raise ValueError(f"count: terms must not be negative, not {number}")
    return number


def _integer(number: object) -> int | None:
    """Return an integer, perhaps in a scalar tensor, as an int; None for anything else."""
    if isinstance(number, Tensor) and number.dim() == 0:
        number = number.item()
    if isinstance(number, bool) or not isinstance(number, Integral):
        return None
    return int(number)


def _mask(rows: object) -> Tensor:
    """Return a mask as bool; an attention mask of zeros and ones is one."""
    if not isinstance(rows, Tensor) or rows.is_floating_point() or rows.is_complex():
        what = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise TypeError(f"count: rows is a mask, a tensor of bool or of 0 and 1, not {what}")
    if rows.dim() == 0:
        raise ValueError("count: rows is a mask [N, ...], not a single number")
    if rows.dtype == torch.bool:
        return rows
    data = rows == 1
    if not bool((data | (rows == 0)).all()):
        raise ValueError("count: rows is a mask: True or 1 for data, False or 0 for padding")
    return data


@dataclass(frozen=True)
class Observed:
    """The terms of an observation."""

    terms: int | None  # N; None for the layers' batch size
    masks: Sequence[Tensor] = ()  # multipliers of each output's vectors; empty for ones
    factor: float = 1.0  # a multiplier of g g^T

    def masked(
        self, vectors: Iterable[tuple[Sequence[Tensor | None], float]]
    ) -> Iterator[tuple[Sequence[Tensor | None], float]]:
        """Turn vectors and weights of the mean over all terms into those of the mean over these."""
        for vector, weight in vectors:
            masked = list(vector)
            for index, mask in enumerate(self.masks):
                part = vector[index]
                if part is not None:
                    masked[index] = part * mask
            yield masked, weight * self.factor


def observed(
    outputs: Sequence[Tensor], means: bool | None, batch: Batch, samples: Samples
) -> Observed:
    """Return the terms of an observation of outputs ``[N, features, positions...]``."""
    # The vectors come from the declared loss, whose samples are the first dimension, and are means
    # over positions, sums, or (None) either; the factor rescales them to the mean over terms.
    size = len(outputs[0])
    positions = [math.prod(output.shape[2:]) for output in outputs]
    terms = batch.terms
    if terms is None:
        by_position = samples == "positions" and max(positions) > 1 and not means
        if callable(samples) or by_position:
            return Observed(None)
        return Observed(size)
    counted: Observed | None = None
    if batch.mask is not None:
        counted = _masked(terms, batch.mask, outputs, positions, means)
    elif terms == size:
        counted = Observed(size)
    elif all(terms == size * number for number in positions):
        counted = Observed(terms, factor=_undone(positions[0], means))
    if counted is None:
        shapes = ", ".join(str(tuple(output.shape)) for output in outputs)
        declared = str(terms)
        if batch.mask is not None:
            declared = f"a mask {tuple(batch.mask.shape)}"
        raise ValueError(
            f"count() was given {declared}, which does not say which terms of the outputs {shapes} "
            f"count: observe outputs [N, features, positions...] or [terms, features], and pass "
            f"count() a mask [N, positions...]"
        )
    return counted


def _masked(
    terms: int, mask: Tensor, outputs: Sequence[Tensor], positions: list[int], means: bool | None
) -> Observed | None:
    """Return the terms that a mask of samples, or of samples and positions, selects."""
    size = len(outputs[0])
    factor = 1.0
    if mask.shape != (size,):
        if all(mask.shape == (size, *output.shape[2:]) for output in outputs):
            mask, factor = mask.unsqueeze(1), _undone(positions[0], means)  # [N, 1, positions...]
        elif max(positions) > 1:
            return None
        elif mask.numel() == size:
            mask = mask.reshape(-1)
        elif terms == size:  # the outputs have the counted terms alone
            return Observed(size)
        else:
            return None
    return Observed(terms, [multiplier(mask, output) for output in outputs], factor)


def _undone(positions: int, means: bool | None) -> float:
    """Return the factor that undoes the mean over positions of a loss."""
    if means:
        return float(positions)
    if positions > 1 and means is None:
        raise ValueError(
            "count() needs a SumLoss whose terms all take means over positions, or all sums"
        )
    return 1.0


def multiplier(numbers: Tensor, output: Tensor) -> Tensor:
    """Return numbers for the first dimensions of an output, with as many dimensions as it has."""
    numbers = numbers.to(output.device, output.dtype)
    trailing = [1] * (output.dim() - numbers.dim())
    return numbers.reshape(*numbers.shape, *trailing)


def _positive(number: object) -> int:
    """Return the number that a callable ``samples`` has returned, if it is a positive integer."""
    terms = _integer(number)
    if terms is None or terms < 1:
        raise ValueError(f"samples() must return a positive integer, not {number!r}")
    return terms


@dataclass
class Pass:
    """One backward pass of a window, or several through other layers of one forward pass."""

    samples: int  # the terms that its loss is a mean of
    size: int  # the batch that its first call went through
    lacks_batch: bool = False  # whether the root was called with a sample without a batch
    number: int = 0  # of the first
    stage: int = 0  # the index of its pipeline stage
    is_declared: bool = False  # whether its terms or rows are declared, or observed
    certain: bool = True  # whether its forward passes are surely of other samples, or the same
    batches: list[Batch] = field(default_factory=list)  # its forward passes
    reached: set[int] = field(default_factory=set)  # the numbers of samples of its calls
    loss_scale: float | None = None  # of its loss; None until it is read

    def size_of(self, root: Sight) -> int:
        """Return the number of samples of one of its forward passes."""
        if self.lacks_batch:
            return 1
        return root.size or self.size


@dataclass(eq=False)
class Passes:
    """The backward passes of a window, and the number of samples of each."""

    samples: Samples  # the terms that the loss averages over, where nothing is declared
    # Returns a function for the factor by which the loss of the pass under way is multiplied, the
    # same function for all passes of these. None for losses as they are.
    scale_reader: Callable[[], Callable[[], float]] | None
    # The passes by number; several losses of the same forward passes are one of them.
    by_number: dict[int, Pass] = field(default_factory=dict, init=False)
    # The first error: the step raises it, on every rank.
    failure: Exception | None = field(default=None, init=False)
    # The first error of `loss_scale`, which is raised once.
    scale_failure: Exception | None = field(default=None, init=False)
    _read_scale: Callable[[], float] | None = field(default=None, init=False)

    def enter(
        self,
        number: int,
        sizes: tuple[int, int],
        terms: int | None,
        batch: Batch,
        root: Sight,
        batches: Sequence[Batch],
        stage: int,
    ) -> Pass:
        """Count a call with ``sizes`` (samples, rows); return its pass.

        ``terms`` is their number, if it is declared or observed; ``batch``, ``root`` and ``stage``
        are the call's; ``batches`` are all of the pass at its first call.
        """
        backward = self.by_number.get(number)
        if backward is None:
            backward = self._through(batches)
        if backward is None:
            backward = self._begin(sizes, terms, batch, root, batches)
            backward.number, backward.stage = number, stage
        self.by_number[number] = backward
        backward.reached.add(sizes[0])
        if batch not in backward.batches:
            backward.certain = False
            backward.batches.append(batch)
            if any(batch.declared for batch in backward.batches):
                self.fail(
                    ValueError(
                        "one backward pass went through forward passes of several count(): call "
                        "it once for all forward passes of a loss"
                    )
                )
        return backward

    def _through(self, batches: Sequence[Batch]) -> Pass | None:
        """Return the pass of another loss of the same forward passes of the root, if any."""
        batch = batches[0]
        root = batch.forward.root
        if batch.declared or (root.size is None and not root.is_empty):
            return None  # perhaps of several forward passes
        for backward in self.by_number.values():
            if backward.batches == batches:
                return backward
        return None

    def _begin(
        self,
        sizes: tuple[int, int],
        terms: int | None,
        batch: Batch,
        root: Sight,
        batches: Sequence[Batch],
    ) -> Pass:
        """Return a new pass, given its first call."""
        setting, by_token = self.samples, root.by_token
        if setting is not None:
            by_token = setting == "positions"
        call_samples, call_rows = sizes
        call_terms = call_rows if by_token else call_samples
        distinct, certain = _of_other_samples(batches)
        is_known = terms is not None
        if terms is None:
            if callable(setting):
                terms = self._called(setting, call_terms)
            elif root.is_empty:
                terms = 0
            elif batch.rows is not None:
                terms = call_terms
        elif len(distinct) > 1:
            terms = None  # each is observed
        # Gradients reach the layer nearest to the loss first. If that has one sample where the root
        # shows several, the root was called without a batch: but not if the root shows as many as
        # the layer has positions, [T, 1, features].
        size = root.size or call_samples
        lacks_batch = call_samples == 1 and size not in (1, call_rows)
        if lacks_batch:
            size = 1
        if terms is not None:
            return Pass(terms, size, lacks_batch, is_declared=True, batches=list(batches))
        if size == 1 and not by_token:
            samples = len(distinct)
            if root.size == 1:  # others may show more
                samples = _added_up(distinct, "batch", samples)
        else:
            samples = _added_up(distinct, setting, call_terms)
        return Pass(
            samples, size, lacks_batch, is_declared=is_known, certain=certain, batches=list(batches)
        )

    def _called(self, setting: Callable[[], int], otherwise: int) -> int:
        """Return the number of a callable ``samples``, or another one after an error."""
        try:
            return _positive(setting())
        except Exception as error:  # any error: all ranks raise it, at the step
            self.fail(error)
            return otherwise

    def loss_scale(self, backward: Pass) -> float:
        """Return the scale of a pass's loss; NaN after an error, which the step raises.

        It is read once: the host may have to wait for it.
        """
        if self.scale_reader is None:
            backward.loss_scale = 1.0
        elif backward.loss_scale is None:
            try:
                if self._read_scale is None:
                    self._read_scale = self.scale_reader()
                backward.loss_scale = self._read_scale()
            except Exception as error:  # of any kind: all ranks raise it, at the step
                if self.scale_failure is None:
                    self.scale_failure = error
                backward.loss_scale = math.nan
        return backward.loss_scale

    def fail(self, error: Exception) -> None:
        """Keep an error for the step, if it is the first."""
        if self.failure is None:
            self.failure = error

    def require_counted(self) -> None:
        """Raise the first failure, or a ValueError if a mask of rows fits no layer."""
        if self.failure is not None:
            raise self.failure
        if self.scale_failure is not None:
            # Once: a step that comes all the same drops the statistics, which are not finite.
            error, self.scale_failure = self.scale_failure, None
            raise error
        for backward in self.by_number.values():
            for batch in backward.batches:
                if batch.rows is not None and not batch.rows.fits:
                    raise ValueError(
                        f"count(rows=...) was given a mask {batch.rows.shape}, and no layer was "
                        f"called with so many samples and positions: pass a mask [N, positions]"
                    )

    def doubt(self) -> str | None:
        """Return the question that `Preconditioner.count` answers, if a number is uncertain."""
        if callable(self.samples):
            return None
        for backward in self.by_number.values():
            if backward.is_declared:
                continue
            question = self._question(backward)
            if question is not None:
                return f"{question}: {REMEDY}"
        return None

    def _question(self, backward: Pass) -> str | None:
        samples, sizes = backward.samples, [b.forward.root.size for b in backward.batches]
        if not backward.certain:
            several = " and ".join(map(str, sizes))
            return (
                f"one backward pass went through {len(sizes)} forward passes (of {several} "
                f"samples), whose loss is taken for a mean over {samples} terms"
            )
        for batch in backward.batches:
            question = self._question_of(batch.forward.root, samples)
            if question is not None:
                return question
        if samples != 1:
            return None
        batch_size = max(filter(None, sizes), default=0)
        most = max((number for number in backward.reached if number < batch_size), default=0)
        if most > 1:
            return (
                f"the layer nearest to the loss was called with one sample, so that the "
                f"model's arguments, of {batch_size} samples, are taken for one without a batch; "
                f"but another layer had {most}"
            )
        return None

    def _question_of(self, root: Sight, samples: int) -> str | None:
        """Return the question that inputs and outputs leave open, with the number that is taken."""
        if not root.question or self.samples == "positions":
            return None
        number = f"{samples} {'tokens' if root.by_token else 'samples'}"
        if root.asks_of_tokens:
            if self.samples is not None:
                return None  # the setting is the answer
            return (
                f"the model shows {root.question}, and its loss, perhaps a mean over "
                f"tokens, is taken for a mean over {number} "
                f"(Statistics(samples='positions') takes tokens, samples='batch' keeps it)"
            )
        return f"the model shows {root.question}, and N is taken for {number}"


def _added_up(batches: Iterable[Batch], setting: Samples, otherwise: int) -> int:
    """Return the terms of forward passes, observed or of roots; another number if one has none."""
    total = 0
    for batch in batches:
        root = batch.forward.root
        terms = root.terms or root.size
        if batch.terms is not None:
            terms = batch.terms
        elif setting == "batch":
            terms = root.size
        elif setting == "positions" or root.by_token:
            terms = root.tokens
        if terms is None:
            return otherwise
        total += terms
    return total


def _of_other_samples(batches: Sequence[Batch]) -> tuple[list[Batch], bool]:
    """Return forward passes of other samples than earlier ones, and whether that is certain."""
    distinct: list[Batch] = []
    certain = True
    for number, batch in enumerate(batches):
        root = batch.forward.root
        related = [root.has_samples_of(earlier.forward.root) for earlier in batches[:number]]
        if True not in related:
            distinct.append(batch)
            if None in related:
                certain = False
    return distinct, certain
