"""What counts: the terms that the loss is a mean of, and which rows are data.

Layers tell how many samples they were called with, and in most models all tell the same. They do
not where a layer sees some of the samples only (a mixture of experts), where samples are cut in
pieces (windows of an image), or where the batch is not the first dimension. The loss tells where it
ignores positions (``ignore_index``). What cannot be seen is declared, for the forward passes that
follow: `Preconditioner.count`.

A declaration belongs to forward passes rather than to a backward pass: so the order of forward and
backward passes does not matter. A backward pass uses it up.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

from soframe.layers.base import Unit

Samples = Literal["batch", "positions"] | Callable[[], int]
REMEDY = (
    "say what the loss is a mean over: preconditioner.count(n) before each forward pass (n is "
    "len(inputs) for a mean over the batch; pass labels != ignore_index for one over tokens), or a "
    "callable samples= that returns n"
)


class Rows:
    """Which positions of which samples are data, and not padding.

    Args:
        mask: ``[N, ...]``, bool: True for data.
    """

    def __init__(self, mask: Tensor) -> None:
        self._mask = mask.detach().reshape(len(mask), math.prod(mask.shape[1:]))
        self._index: dict[torch.device, Tensor] = {}
        self.shape = tuple(mask.shape)
        self.fits = False  # any call so far

    def of(self, batch: int, shared: int, device: torch.device) -> tuple[Tensor, Unit] | None:
        """Return which rows of a call are data.

        Args:
            batch: The call's batch.
            shared: Its positions.
            device: Where its rows are.

        Returns:
            Which rows, counted sample by sample, or which samples, where the mask is one of
            samples; None if the mask is not of the call's shape: then all rows are data.
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
        return self._index[device], unit


@dataclass(eq=False)
class Batch:
    """What is known of some forward passes.

    Attributes:
        terms: How many terms their loss is a mean of; None for what layers tell.
        mask: Which terms of the model's outputs these are; None for all.
        rows: Which rows are data; None for all.
        declared: Whether somebody has said so, rather than nobody.
        closed: Whether the next forward pass is of another batch.
    """

    terms: int | None = None
    mask: Tensor | None = None
    rows: Rows | None = None
    declared: bool = False
    closed: bool = False

    def end(self, terms: int | None) -> None:
        """Let the next forward pass be of another batch.

        Args:
            terms: How many terms the loss of this one is a mean of; None for what layers tell.
        """
        self.terms, self.closed = terms, True


def declare(terms: object, rows: Tensor | None) -> Batch:
    """Return what is said of a batch.

    Args:
        terms: See `Preconditioner.count`.
        rows: See `Preconditioner.count`.

    Returns:
        The batch.

    Raises:
        TypeError: If ``terms`` is neither a number nor a mask, or ``rows`` no mask.
        ValueError: If neither is given, ``terms`` is negative, or a mask has no dimension.
    """
    if terms is None and rows is None:
        raise ValueError("count() says terms=, rows= or both")
    masked = None if rows is None else Rows(_mask("rows", rows))
    if terms is None:
        return Batch(rows=masked, declared=True)
    if isinstance(terms, Tensor):
        if terms.dtype == torch.bool and terms.dim() > 0:
            number = int(terms.sum())
            return Batch(number, terms.detach(), masked, declared=True)
        if terms.dim() > 0 or terms.dtype == torch.bool or terms.is_floating_point():
            raise TypeError(
                f"count: terms is a number, or a bool mask such as labels != -100, not a tensor of "
                f"{terms.dtype} and shape {tuple(terms.shape)}"
            )
        terms = int(terms)
    if isinstance(terms, bool) or not isinstance(terms, Integral):
        raise TypeError(f"count: terms is a number of terms or a bool mask, not {terms!r}")
    if terms < 0:
        raise ValueError(f"count: terms must not be negative, not {terms}")
    return Batch(int(terms), None, masked, declared=True)


def _mask(name: str, mask: object) -> Tensor:
    """Return a mask as bool; an attention mask of zeros and ones is one."""
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        what = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise TypeError(f"count: {name} is a mask, a tensor of bool or of 0 and 1, not {what}")
    if mask.dim() == 0:
        raise ValueError(f"count: {name} is a mask [N, ...], not a single number")
    if mask.dtype == torch.bool:
        return mask
    data = mask == 1
    if not bool((data | (mask == 0)).all()):
        raise ValueError(f"count: {name} is a mask: True or 1 for data, False or 0 for padding")
    return data


@dataclass(frozen=True)
class Observed:
    """What an observation counts.

    Attributes:
        terms: N; None for what layers tell.
        masks: For each output what its vectors are multiplied by; None for nothing.
        factor: What else ``g g^T`` is multiplied by.
    """

    terms: int | None
    masks: tuple[Tensor | None, ...]
    factor: float = 1.0

    def of(
        self, vectors: Iterable[tuple[Sequence[Tensor | None], float]]
    ) -> Iterator[tuple[Sequence[Tensor | None], float]]:
        """Yield the vectors of a mean over all terms as those of the mean over those that count.

        Args:
            vectors: A gradient for each output (None for zeros), with their weights.

        Yields:
            The same.
        """
        for vector, weight in vectors:
            pairs = zip(vector, self.masks, strict=True)
            masked = [v if v is None or mask is None else v * mask for v, mask in pairs]
            yield masked, weight * self.factor


def observed(
    outputs: Sequence[Tensor], means: bool | None, batch: Batch, samples: Samples
) -> Observed:
    """Return what an observation of a model's outputs counts.

    Args:
        outputs: ``[N, features, positions...]`` each.
        means: Whether the loss of a sample is a mean over positions rather than a sum; None if
            some of its terms are this and others that.
        batch: What was said of the forward pass.
        samples: The setting.

    Returns:
        What it counts. Vectors are those of the declared loss, whose samples are the first
        dimension; with the factor they are those of the mean over terms.

    Raises:
        ValueError: If what was said of the batch does not fit the outputs.
    """
    size = len(outputs[0])
    each = [math.prod(output.shape[2:]) for output in outputs]
    several = any(positions > 1 for positions in each)
    none = (None,) * len(outputs)
    if batch.terms is None:
        if callable(samples) or (samples == "positions" and several and not means):
            return Observed(None, none)
        return Observed(size, none)
    if batch.mask is None:
        if batch.terms == size:
            return Observed(size, none)
        if len(set(each)) == 1 and batch.terms == size * each[0]:
            return Observed(batch.terms, none, _undone(each[0], means))
    else:
        shape = tuple(batch.mask.shape)
        if shape == (size,):
            return Observed(batch.terms, tuple(_like(batch.mask, o) for o in outputs))
        if all(shape == (size, *output.shape[2:]) for output in outputs):
            masks = tuple(_like(batch.mask.unsqueeze(1), o) for o in outputs)
            return Observed(batch.terms, masks, _undone(each[0], means))
        if not several and batch.mask.numel() == size:
            flat = batch.mask.reshape(-1)
            return Observed(batch.terms, tuple(_like(flat, o) for o in outputs))
        if not several and batch.terms == size:
            return Observed(size, none)  # the outputs are those of the terms alone
    shapes = ", ".join(str(tuple(output.shape)) for output in outputs)
    said = batch.terms if batch.mask is None else f"a mask {tuple(batch.mask.shape)}"
    raise ValueError(
        f"count() was given {said}, which does not say which terms of the outputs {shapes} count: "
        f"observe outputs [N, features, positions...] or [terms, features], and pass count() a "
        f"mask [N, positions...]"
    )


def _undone(positions: int, means: bool | None) -> float:
    """Return what undoes the mean over positions that a loss takes."""
    if positions > 1 and means is None:
        raise ValueError(
            "count() needs a SumLoss whose terms all take means over positions, or all sums"
        )
    return float(positions) if means else 1.0


def _like(mask: Tensor, output: Tensor) -> Tensor:
    mask = mask.to(output.device, output.dtype)
    return mask.reshape(*mask.shape, *(1 for _ in range(output.dim() - mask.dim())))


def checked(number: object) -> int:
    """Return what a callable ``samples`` has returned.

    Args:
        number: The number.

    Raises:
        ValueError: If it is no positive integer.
    """
    if isinstance(number, Tensor) and number.dim() == 0 and not number.is_floating_point():
        number = number.item()
    if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
        raise ValueError(f"samples() must return a positive integer, not {number!r}")
    return int(number)


class Passes:
    """How many samples the loss of each backward pass of a window is a mean of.

    Args:
        samples: The setting: what is a sample where nobody has declared anything.
        compares: Whether layers that differ are an error.

    Attributes:
        samples: Samples by the number of the pass.
        failure: What cannot be counted, to be raised at the step, on every rank.
        warned: Whether it was said, in this window or before, that passes look like those of
            several losses of one batch.
    """

    def __init__(self, samples: Samples, *, compares: bool) -> None:
        self._setting, self._compares = samples, compares
        self.samples: dict[int, int] = {}
        self.failure: Exception | None = None
        self.warned = False
        self._first: dict[int, str] = {}  # the layers that told, by pass
        self._batches: dict[int, Batch] = {}
        self._most: dict[int, dict[str, int]] = {}
        self._calls: dict[int, dict[object, tuple[str, int]]] = {}

    def anew(self) -> Passes:
        """Return those of a new window."""
        passes = Passes(self._setting, compares=self._compares)
        passes.warned = self.warned
        return passes

    def enter(
        self, number: int, layer: str, sizes: tuple[int, int], told: int | None, batch: Batch | None
    ) -> int:
        """Count a call.

        Args:
            number: The number of its backward pass.
            layer: The name of its block.
            sizes: Its batch, and its rows.
            told: What is known of the samples of its forward pass.
            batch: What was said of it.

        Returns:
            The samples of the pass.
        """
        if (
            batch is not None
            and batch.declared
            and self._batches.setdefault(number, batch) != batch
        ):
            self.fail(
                ValueError(
                    "one backward pass went through forward passes of several count(): call it "
                    "once for all forward passes of a loss"
                )
            )
        here = sizes[1] if self._setting == "positions" else sizes[0]
        if number not in self.samples:
            if told is None and callable(self._setting):
                told = self._called(self._setting, here)
            if told is None:
                self._first[number] = layer
            self.samples[number] = here if told is None else told
        elif told is not None and told != self.samples[number]:
            self.fail(
                ValueError(
                    f"one backward pass went through forward passes of {self.samples[number]} and "
                    f"of {told} samples: {REMEDY}"
                )
            )
        if number in self._first:
            most = self._most.setdefault(number, {})
            most[layer] = max(here, most.get(layer, 0))
        return self.samples[number]

    def note(self, number: int, layer: str, helper: object) -> None:
        """Note a call whose positions are counted; not needed for other settings.

        Args:
            number: The number of its backward pass.
            layer: The name of its block.
            helper: What was called: a block may have several.
        """
        if number in self._first:  # else it is said how many count
            calls = self._calls.setdefault(number, {})
            calls[helper] = (layer, calls.get(helper, (layer, 0))[1] + 1)

    def look_at(self, reached: Iterable[tuple[str, Collection[int]]]) -> None:
        """Warn once where backward passes look like those of several losses of one batch.

        Micro-batches reach blocks in common. Passes that do not are of networks without common
        layers, which in most cases go backward one by one for the same samples. It may also be that
        heads or experts take turns, each with samples of its own; then each pass has a declaration
        of its own, if any.

        Args:
            reached: The blocks of one stage, each with the numbers of the passes that reached it.
        """
        if self.warned or not self._compares:
            return
        groups: list[tuple[str, set[int]]] = []
        for layer, own in reached:
            if not own:
                continue
            met = [group for group in groups if not group[1].isdisjoint(own)]
            first = met[0][0] if met else layer
            joined = set(own).union(*(numbers for _, numbers in met))
            groups = [group for group in groups if group not in met] + [(first, joined)]
        each = [{self._batches.get(number) for number in numbers} for _, numbers in groups]
        said = [batch for own in each for batch in own]
        if len(groups) > 1 and (None in said or len(set(said)) < len(said)):
            self.warned = True
            (one, _), (other, _) = groups[:2]
            warnings.warn(
                f"soframe: some backward passes of this step reached {one!r}, others {other!r}, "
                f"and no block has both. If these are losses of one batch, each counts as samples "
                f"of its own, and they are the same: of k passes the factors of inputs are k times "
                f"too small, those of outputs k^2 times too large. Add the losses up, and call "
                f"backward() once. If each pass has samples of its own, as where heads take turns, "
                f"all is well: preconditioner.count(n) before each forward pass says so",
                stacklevel=9,  # whoever called Preconditioner.step()
            )

    def _called(self, setting: Callable[[], int], otherwise: int) -> int:
        try:
            return checked(setting())
        except Exception as error:  # whatever it is: all ranks raise it, at the step
            self.fail(error)
            return otherwise

    def fail(self, error: Exception) -> None:
        """Note what cannot be counted.

        Args:
            error: What the step is to raise, if it is the first.
        """
        self.failure = self.failure or error

    def require_counted(self) -> None:
        """Check that all that was seen could be counted.

        Raises:
            Exception: The first failure.
            ValueError: If layers of one backward pass tell different numbers of samples, or if all
                of them were called several times in one where positions are counted.
        """
        if self.failure is not None:
            raise self.failure
        for batch in self._batches.values():
            if batch.rows is not None and not batch.rows.fits:
                raise ValueError(
                    f"count(rows=...) was given a mask {batch.rows.shape}, and no layer was called "
                    f"with so many samples and positions: pass a mask [N, positions]"
                )
        for number, first in self._first.items() if self._compares else ():
            samples = self.samples[number]
            for layer, size in self._most.get(number, {}).items():
                if size != samples:
                    what = "positions" if self._setting == "positions" else "samples"
                    raise ValueError(
                        f"in one backward pass {first!r} was called with {samples} {what} and "
                        f"{layer!r} with {size}, so how many the loss is a mean over cannot be "
                        f"told, and the scale of the curvature would be wrong; {REMEDY}"
                    )
        for calls in self._calls.values() if self._compares else ():
            layer, times = min(calls.values(), key=lambda call: call[1])
            if times > 1:
                raise ValueError(
                    f"in one backward pass {layer!r} was called {times} times, and no layer less "
                    f"often, as where a model is called for one position after the other. Whether "
                    f"the loss is a mean over the positions of one call or of all cannot be told "
                    f"with samples='positions', and the scale of the curvature would be wrong; "
                    f"{REMEDY}"
                )
