"""The statistics of a window: from calls to sums, from sums on all ranks to running factors.

A window is everything since the last step (`soframe.estimate.window`). Each call adds its moments
to the block's sums as soon as its output gradient is computed; nothing else of it is stored, but
copies of its rows if they are few: at the step one product adds the moments of all blocks of a
stack. There, every rank sends the weights of its sums; once the weights of all ranks are reduced,
the sums are reduced and enter the running average (`soframe.estimate.averages`). If sums are not
finite, on any rank, all ranks drop theirs.

Statistics belong to the gradients that ``.grad`` holds. A block whose gradient is None or zero when
a backward pass begins, or None at the step, though earlier passes of the window have reached it,
has lost those passes: their statistics are dropped.

A rank that does not contribute to a factor only counts samples, which are part of N. Blocks that
are not due do the same: they take no statistics in this window, and their samples count for blocks
that do.
"""

from __future__ import annotations

import itertools
import operator
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from soframe.blocks.block import Block, PlacedBlocks, Stack
from soframe.capture.counting import Batch, DataRows, Pass, Passes, Samples
from soframe.capture.hooks import Calls, Capture, LayerCall
from soframe.capture.sampling import Draw, Sampler
from soframe.checks.warning import warn
from soframe.estimate.averages import Term, by_group, enter
from soframe.estimate.window import Tally, Window
from soframe.kernels.halves import widens
from soframe.layers.base import LayerHelper
from soframe.methods.base import Call
from soframe.methods.returned import require_statistics
from soframe.methods.scaling import Contribution, Counts, Multipliers, Scale
from soframe.specs import FactorSpec


class Weights(NamedTuple):
    """The weights of one block's sums, of all ranks."""

    factors: Sequence[float]  # the divisor of each factor that calls make, in order
    inputs: float  # the weight of means over samples
    # The weights of means over the rows of each group; empty where all rows reach all.
    groups: Sequence[float]


class Folded(NamedTuple):
    """The numbers of one block in the last window whose statistics entered the factors."""

    step: int  # completed steps before it
    counts: Counts  # the counts of this rank
    contribution: Contribution  # the multipliers and weights of this rank
    weights: Weights | None  # the weights of all ranks; None if no rank used the block


class Accumulator:
    """Adds calls to the window under way, and folds its sums into running factors."""

    window: Window  # under way, from `begin` on

    def __init__(
        self,
        placed: PlacedBlocks,
        *,
        scale: Scale,
        samples: Samples,  # the terms that the loss averages over, unless declared for the batch
        # Returns a function for the factor by which the loss of a backward pass is multiplied; None
        # for losses as they are.
        scale_reader: Callable[[], Callable[[], float]] | None,
        capture: Capture,
        sampler: Sampler,
        # The index of the pipeline stage of a block: all stages have equally many backward passes.
        stage_of: Callable[[Block], int],
    ) -> None:
        self._placed, self._pairs = placed, tuple(placed)
        # By block: the factors to which this rank contributes, and those that read inputs.
        self._contributed: dict[Block, list[FactorSpec]] = {}
        self._readers: dict[Block, set[str]] = {}
        # Layers whose inputs are needed along with every probe's rows.
        rereading: list[LayerHelper] = []
        self._block_of: dict[LayerHelper, Block] = {}
        for block, place in self._pairs:
            self._contributed[block], self._readers[block] = [], set()
            for index, factor in enumerate(block.factors):
                if not factor.captured or not place.contributes(placed.rank, index):
                    continue
                self._contributed[block].append(factor)
                if factor.reads_inputs or factor.mean_over == "group rows":
                    self._readers[block].add(factor.name)
            self._block_of.update(dict.fromkeys(block.helpers, block))
            if block.has_rows_by_group or block.reads_both:
                rereading += block.helpers
        self._rereading = frozenset(rereading)
        self._sharing = _may_share(self._block_of)
        # The capture has this object. In a circle of strong references its hooks would be left to
        # the garbage collector, which may run while the model of a dropped curvature is copied.
        self._capture: Capture = weakref.proxy(capture)
        self._sampler = sampler
        self._scale = scale
        self._samples = samples
        self._scale_reader = scale_reader
        self._warned = False  # of samples whose number is in doubt
        self._stage_of = {block: stage_of(block) for block in placed.blocks}
        self._routed: set[Block] = set()  # blocks that were called with a part of a batch
        self.folded: dict[Block, Folded] = {}  # the last window with statistics of each block
        # The last pipeline stage and counts of a block, and their multipliers and weights.
        self._last_counts: tuple[int, Counts] | None = None
        self._last_contribution = Contribution()

    def listen(self, roots: Sequence[nn.Module]) -> None:
        """Take the calls that the capture records from now on; ``roots`` show their batches."""
        names = {helper: block.name for helper, block in self._block_of.items()}
        pairs = [pair for pair in self._pairs if pair[0].captured]
        alike = not any(place.partial(block.factors) for block, place in pairs)
        self._capture.listen(self.add, names, self._rereading, alike=alike, roots=roots)

    def begin(
        self,
        gathered: Mapping[Block, frozenset[str]],
        step: int,
        *,
        former: Window | None = None,
    ) -> None:
        """Begin a window after so many steps, in which blocks take statistics.

        ``gathered`` has the factors by name that do, of each of these blocks. A window with the
        passes of a ``former`` one goes on after the model was rebuilt.
        """
        passes = Passes(self._samples, self._scale_reader)
        # Backward passes may reach forward passes from before this window.
        calls = Calls(waiting=self._capture.calls.waiting)
        if former is not None:
            passes, calls = former.passes, former.calls
        tallies: dict[Block, Tally] = {}
        without_inputs: set[LayerHelper] = set()
        no_statistics: set[LayerHelper] = set()
        if gathered:  # else the capture is off, and needs no sets
            for block in self._placed.blocks:
                tallies[block] = Tally(gathered.get(block, frozenset()))
            for helper, block in self._block_of.items():
                if block not in gathered:
                    no_statistics.add(helper)
                if self._readers[block].isdisjoint(tallies[block].gathered):
                    without_inputs.add(helper)
        draw = Draw(self._sampler, step)
        self.window = Window(frozenset(gathered), self._block_of, passes, draw, tallies, calls)
        self._capture.begin(
            calls,
            enabled=bool(gathered),
            ended=self.window.end_pass,
            without_inputs=frozenset(without_inputs),
            no_statistics=frozenset(no_statistics),
        )

    def resume(self, former: Window) -> None:
        """Continue a window after the model was rebuilt, at first without sums of its blocks."""
        identities = {block.identity for block in former.due}
        due = [block for block in self._placed.captured if block.identity in identities]
        self.begin({block: block.gatherable() for block in due}, 0, former=former)

    def add(self, call: LayerCall) -> None:
        """Add one call; raise ValueError if a helper returns rows of a wrong shape."""
        helper, block = call.helper, self._block_of[call.helper]
        if block.takes_samples or call.is_ragged:
            call = _by_sample(block, call, is_routed=block in self._routed)
        rows = _output_rows(helper, call.gradient)
        _, batch, shared, _ = rows.shape
        if batch * shared == 0:
            if self.window.is_empty(call):
                self.window.count_call(block, call, (0, 0), self._stage_of[block])
            return
        # Without count() all rows are data.
        data = self._data(block, helper, rows, call.batch) if self._capture.counts else None
        sizes = _sizes(data, batch, shared)
        backward = self.window.count_call(block, call, sizes, self._stage_of[block])
        if self._adds(block, call, backward):
            self._add_rows(block, call, rows, data, backward)

    def _add_rows(
        self, block: Block, call: LayerCall, rows: Tensor, data: DataRows | None, backward: Pass
    ) -> None:
        """Count the rows of a call, and add their moments to the sums; for ``data`` see `_data`."""
        helper, probe = call.helper, call.probe
        _, batch, shared, _ = rows.shape
        users, size = 1, backward.size_of(call.root)
        if self._lacks_batch(block, helper, batch, shared, size):
            # Shared by all samples, whose gradients are added up: the positions of one.
            users = size
            call, rows = _as_one_sample(call, rows)
            _, batch, shared, _ = rows.shape
        if block.method.reduces:  # all positions of a sample make one row
            shared = 1
        reached = None
        if block.has_rows_by_group and call.reads:
            rows, reached = _reaching(helper, call.inputs, rows, data, reduces=block.method.reduces)
        rows_of_data = _sizes(data, batch, shared)[1]
        loss_scale = 1.0
        if probe is None:
            loss_scale = self.window.passes.loss_scale(backward)
        tally = self.window.tallies[block]
        factors = [f for f in self._contributed[block] if f.name in tally.gathered]
        if probe is None or probe.first:
            weight = users * self.window.weight
            tally.counts.add(backward.number, backward.samples, rows_of_data, reached, weight)
        else:
            # Several probes go through the same call, whose samples and inputs count once.
            factors = [factor for factor in factors if factor.reads != "inputs"]
        if factors and rows_of_data > 0:
            scale = self._scale.call(
                helper.module, backward.samples, batch, shared, loss_scale, users
            )
            with self._placed.backend.phases("accumulate"):
                for part, part_rows, part_data in _split(factors, rows, data):
                    self._sum(block, part, call, part_rows, part_data, scale)

    def _lacks_batch(
        self, block: Block, helper: LayerHelper, batch: int, shared: int, size: int
    ) -> bool:
        """Return whether a call's rows are shared by all samples, as a table's are."""
        if batch == size:
            return False
        if helper.lacks_batch(batch, shared, size):
            # A single sample of a layer that gets a part of the batch at other times is no table.
            return block not in self._routed
        if batch > 1 and batch % size > 0:
            self._routed.add(block)
        return False

    def _adds(self, block: Block, call: LayerCall, backward: Pass) -> bool:
        """Return whether a call has new inputs; refuse another gradient of the same outputs."""
        window = self.window
        if backward.samples == 0:
            return False  # its loss has no terms
        if call.earlier is None or call.earlier < window.tallies[block].counts.since:
            return True  # the gradients of the earlier one are gone
        earlier = window.passes.by_number.get(call.earlier)
        if earlier is None:
            return True
        reads_gradients = any(factor.reads != "inputs" for factor in block.captured)
        if reads_gradients and earlier.loss_scale is not None:
            window.passes.fail(
                RuntimeError(
                    f"two backward passes went through the same call of {block.name!r}, as those "
                    f"of two losses of one forward pass do (retain_graph=True). Each would count "
                    f"as samples of its own, and they are the same: add the losses up, and call "
                    f"backward() once"
                )
            )
        return earlier is not backward

    def _sum(
        self,
        block: Block,
        factors: Sequence[FactorSpec],
        call: LayerCall,
        rows: Tensor,
        data: DataRows | None,
        scale: Multipliers,
    ) -> None:
        """Add the moments of a call to the sums of some factors; for ``data`` see `_data`."""
        helper, probe, inputs, part = call.helper, call.probe, call.inputs, 1.0
        if data is not None or self._sampler.draws:
            inputs, rows, part = self.window.draw.take(
                helper, (inputs, rows), call.number, block.takes_samples, data
            )
        is_first = self.window.tallies[block].counts.calls <= 1
        moments = block.method.statistics(
            self._call(block, helper, inputs if call.reads else None, rows, is_first)
        )
        sums = self.window.sums_of(block.stack, factors)
        for factor in factors:
            multiplier = scale[factor.degree] * part * self.window.weight
            if probe is not None and factor.reads != "inputs":
                multiplier *= probe.weight
            moment, source = moments.get(factor.name), "statistics()"
            if moment is not None:
                if sums.add(factor, block.member, moment, multiplier):
                    continue
                source = f"statistics() of rows of {type(helper).__name__}"
            try:
                require_statistics(block.method, factor, moment, source)
            except ValueError as error:
                # Not raised here: the other ranks would wait in the backward pass.
                self.window.passes.fail(error)

    def _call(
        self,
        block: Block,
        helper: LayerHelper,
        inputs: tuple[Tensor, ...] | None,
        rows: Tensor,
        first: bool,
    ) -> Call:
        """Return a call as methods see it."""
        is_widened = False
        if rows.dtype != block.dtype and rows.shape[0] == 1 and widens(rows, block.dtype):
            # Not inherited: a subclass may override the moments, and has to declare this itself.
            is_widened = vars(type(helper)).get("widens", False)
        return Call(
            helper=helper,
            inputs=inputs,
            rows=rows,
            dtype=block.dtype,
            shared=self.window.shared if helper in self._sharing else None,
            data=block.second_order if block.needing_data else {},
            widens=is_widened,
            first=first,
        )

    def _data(
        self, block: Block, helper: LayerHelper, rows: Tensor, batch: Batch
    ) -> DataRows | None:
        """Return the rows or samples of a call that are data; None for all."""
        if not batch.declared:
            self.window.passes.fail(
                RuntimeError(
                    f"{block.name!r} ran in a forward pass without count(): once count() is used, "
                    f"call it before the forward pass of every micro-batch"
                )
            )
        if batch.rows is None:
            return None
        data = batch.rows.of(rows.shape[1], rows.shape[2], rows.device)
        if data is None:
            return None
        unit = helper.unit
        if unit == "sample" and rows.shape[2] == 1:
            data = data._replace(unit="sample")
        if unit == "row" and block.method.reduces:
            unit = "sample"
        if unit not in ("row", data.unit):
            taken = "whole calls" if unit is None else "whole samples"
            self.window.passes.fail(
                ValueError(
                    f"count(rows=...) cannot leave single rows out of {block.name!r}: "
                    f"{type(helper).__name__} under {block.method!r} takes {taken}; give it a mask "
                    f"of samples [N], skip the layer, or choose method='kfac' for a linear one"
                )
            )
            return None
        return data

    def require_counted(self) -> None:
        """Check that samples could be counted (`Passes.require_counted`), and warn of a doubt."""
        passes, failure = self.window.passes, self.window.calls.failure
        if failure is not None:
            passes.fail(failure)
        passes.require_counted()
        if not self._warned and (doubt := passes.doubt()) is not None:
            self._warned = True
            warn(doubt)

    def weights(self, of_model: tuple[int, int] = (0, 0)) -> list[float]:
        """Return the weights of this rank's sums, of all due blocks; ranks add them up.

        For ``of_model`` see `Window.samples_by_pass`.

        By block: the divisors of its factors, if some ranks contribute to some factors only; the
        weight of means over samples; the weight of means over rows; and of each group, if their
        rows differ.
        """
        numbers: list[float] = []
        self._last_counts = None
        if not self.window.due:
            return numbers
        for block, place in self._pairs:
            if block not in self.window.due:
                continue
            # With ranks on paper only, this one stands for the contributors.
            factors = block.captured if self._placed.backend.on_paper else self._contributed[block]
            weights = self.window.contributions[block] = self._contribution(block, of_model)
            # If every rank contributes to all factors, the other weights give their divisors.
            if place.contributors:
                numbers += [weights.weight(f) if f in factors else 0.0 for f in block.captured]
            # Samples of ranks that contribute to no factor are part of N; their rows do not count.
            numbers += [weights.input_weight, weights.output_weight if factors else 0.0]
            if block.has_rows_by_group:
                group_weights: Sequence[float] = ()
                if any(factor.mean_over == "group rows" for factor in factors):
                    group_weights = weights.group_weights
                numbers += group_weights or [0.0] * block.shape.groups
        return numbers

    def _contribution(self, block: Block, of_model: tuple[int, int]) -> Contribution:
        """Return the multipliers and weights of this rank for a block."""
        counts, stage = self.window.tallies[block].counts, self._stage_of[block]
        if counts.calls and not self._capture.probing and not block.has_gradient:
            return Contribution()  # zeroed since its backward passes
        if self._last_counts == (stage, counts):
            return self._last_contribution  # most layers have the counts of the one before
        passes = self.window.samples_by_pass(stage, of_model)
        passes = {n: samples for n, samples in passes.items() if not 0 <= n < counts.since}
        contribution = self._scale.contribution(counts, passes)
        self._last_counts, self._last_contribution = (stage, counts), contribution
        return contribution

    def fold(self, weights: Sequence[float], decay: float | None, step: int) -> None:
        """Reduce the sums with the ``weights`` of all ranks, and average them into the factors.

        Without a decay the factors become plain means over data, and the weights are sums since
        the beginning of the data.
        """
        window = self.window
        window.forget_inputs()
        numbers = iter(weights)
        used: dict[Block, Weights] = {}
        for block, place in self._pairs:
            if block in window.due:
                total = weights_of(block, numbers, some_contribute=bool(place.contributors))
                # A block that no rank used keeps its factors.
                if total is not None:
                    if decay is None:
                        total = self._new(block, total)
                    used[block] = total
                counts, contribution = window.tallies[block].counts, window.contributions[block]
                self.folded[block] = Folded(step, counts, contribution, total)
        terms: list[Term] = []
        scaled: list[tuple[Tensor, float]] = []  # sums, and multipliers that they still lack
        for stack, members in self._placed.members(list(used)).items():
            names_of = {m: window.tallies[stack.blocks[m]].gathered for m in members}
            sums = window.sums[stack].totals if stack in window.sums else {}
            for index, factor in enumerate(stack.like.factors):
                gathered = tuple([m for m in members if factor.name in names_of[m]])
                if gathered:
                    here = sums.get(factor.name)
                    terms.append(self._term(stack, gathered, index, here, used, step, scaled))
        if scaled:
            tensors, multipliers = zip(*scaled, strict=True)
            torch._foreach_mul_(tensors, multipliers)
        enter(self._placed, terms, decay, identity=self._scale.scaling == "kaisa")
        window.sums.clear()  # before anything is solved, for its memory

    def _new(self, block: Block, total: Weights) -> Weights:
        """Return the weights of the data that the gathered factors lack."""
        factors, groups = list(total.factors), list(total.groups)
        for position, factor in enumerate(block.captured):
            counted = block.record.masses.get(factor.name)
            if counted is None or factor.name not in self.window.tallies[block].gathered:
                continue
            old = [mass * self._scale.copies for mass in counted]
            if factor.mean_over == "group rows":
                groups = list(map(operator.sub, total.groups, old))
            else:
                factors[position] -= old[0]
        return Weights(factors, total.inputs, groups)

    def _term(
        self,
        stack: Stack,
        members: tuple[int, ...],
        index: int,
        total: Tensor | None,
        used: Mapping[Block, Weights],
        step: int,
        scaled: list[tuple[Tensor, float]],
    ) -> Term:
        """Return the term of a factor; add its sums to ``scaled`` if they are to be scaled."""
        factor, multipliers, reached = stack.like.factors[index], [], []
        position = stack.like.captured.index(factor)
        for member in members:
            block = stack.blocks[member]
            weights = used[block]
            multiplier = self.window.contributions[block].multipliers[factor.degree]
            multiplier *= self._scale.gradient_scale(factor, weights.inputs)
            if factor.mean_over == "group rows":
                multipliers += [multiplier / rows if rows > 0 else 0.0 for rows in weights.groups]
                reached.append([rows / self._scale.copies for rows in weights.groups])
            else:
                divisor = weights.factors[position]
                if divisor > 0:  # else nothing is new
                    multiplier /= divisor
                multipliers += itertools.repeat(multiplier, factor.groups)
                reached.append([divisor / self._scale.copies])
        if total is not None:
            total = stack.take(total, members)
            if len(set(multipliers)) > 1:
                total.mul_(by_group(multipliers, total))
            elif multipliers[0] != 1:
                scaled.append((total, multipliers[0]))
        return Term(stack, members, index, total, reached=reached, turn=step)

    def late(self) -> list[str]:
        """Return the blocks whose second-order data became new in the window under way.

        Factors that need these data take their first statistics in the next window.
        """
        names: list[str] = []
        for block in self._placed.blocks:
            if not block.has_factor_to_begin:
                continue
            is_due = block in self.window.due
            if not is_due or not block.gatherable() <= self.window.tallies[block].gathered:
                names.append(block.name)
        return names


def weights_of(block: Block, numbers: Iterator[float], *, some_contribute: bool) -> Weights | None:
    """Take a block's part of the sums of `Accumulator.weights`; None if no rank used the block."""
    factors = block.captured
    divisors: list[float] = []
    if some_contribute:
        divisors += itertools.islice(numbers, len(factors))
    inputs, outputs = next(numbers), next(numbers)
    if not some_contribute:
        divisors += [inputs if factor.mean_over == "samples" else outputs for factor in factors]
    groups: list[float] = []
    if block.has_rows_by_group:
        groups += itertools.islice(numbers, block.shape.groups)
    for weight in (outputs, *divisors):
        if not weight > 0:
            return None
    return Weights(divisors, inputs, groups)


def _reaching(
    helper: LayerHelper,
    inputs: tuple[Tensor, ...],
    rows: Tensor,
    data: DataRows | None,
    *,
    reduces: bool,
) -> tuple[Tensor, list[float]]:
    """Return a call's rows, masked by group, and the number of data rows that reach each group.

    ``reduces`` means that all positions of a sample make one row.
    """
    mask = helper.mask(inputs, rows)
    if mask is not None:
        rows = rows * mask.unsqueeze(3).to(rows.device)
    # Padding stays in the rows, from which `Sampler.take` removes it; it is left out of the counts.
    counted = rows
    if data is not None:
        inputs, counted = helper.take_inputs(inputs, *data), helper.take_rows(rows, *data)
    groups, batch, shared, _ = counted.shape
    if reduces:
        shared, reached = 1, helper.mask(inputs, counted)
        if reached is not None:
            reached = reached.any(2).sum(1)
    else:
        reached = helper.group_rows(inputs, counted)
    if reached is not None:
        return rows, reached.tolist()
    return rows, list(itertools.repeat(float(batch * shared), groups))


def _by_sample(block: Block, call: LayerCall, *, is_routed: bool) -> LayerCall:
    """Return a call with its samples first; raise ValueError where a nested tensor hides them."""
    if not call.is_ragged:
        call = batch_first(call)
        return call if is_routed else _unflattened(call)
    if block.takes_samples or call.helper.unit != "row":
        raise ValueError(
            f"{type(call.helper).__name__} under {block.method!r} takes whole samples, and a "
            f"nested tensor of sequences of several lengths reaches it: pad them and call "
            f"count(rows=...), skip the layer, or choose method='kfac' for a linear one"
        )
    return call


def batch_first(call: LayerCall) -> LayerCall:
    """Return a call ``[T, N, ...]`` as ``[N, T, ...]``, where the root shows N samples."""
    size, gradient = call.root.size, call.gradient
    if not _has_free_rows(call) or gradient.dim() < 3:
        return call
    positions, second = gradient.shape[:2]
    if second != size or positions == size:
        return call
    if any(x.shape[:2] != gradient.shape[:2] for x in call.inputs):
        return call
    inputs = tuple(x.transpose(0, 1) for x in call.inputs)
    return call._replace(gradient=gradient.transpose(0, 1), inputs=inputs)


def _unflattened(call: LayerCall) -> LayerCall:
    """Return a call ``[N T, ...]`` as ``[N, T, ...]``, where the root shows N samples."""
    size, rows = call.root.size, len(call.gradient)
    if size is None or not _has_free_rows(call) or call.helper.counts_inputs:
        return call
    positions, remainder = divmod(rows, size)
    if remainder > 0 or positions == 1 or {len(x) for x in call.inputs} != {rows}:
        return call
    gradient, *inputs = (x.unflatten(0, (size, -1)) for x in (call.gradient, *call.inputs))
    return call._replace(gradient=gradient, inputs=tuple(inputs))


def _has_free_rows(call: LayerCall) -> bool:
    """Return whether the rows of a call may be put into another order."""
    if call.batch.rows is not None or call.is_ragged:
        return False
    return call.helper.unit == "row"


def _output_rows(helper: LayerHelper, gradient: Tensor) -> Tensor:
    """Return the rows ``[groups, batch, shared, features]`` of a call's output gradient."""
    # The backward pass goes on with this tensor: a change in place would spoil it.
    version = gradient._version
    rows = helper.output_rows(gradient)
    if gradient._version != version:
        raise ValueError(
            f"{type(helper).__name__}: output_rows has changed the gradient of the output in "
            f"place, which the backward pass still needs: return a new tensor"
        )
    if rows.ndim != 4:
        raise ValueError(
            f"{type(helper).__name__}: output_rows gives {tuple(rows.shape)}, and it must give "
            f"[groups, batch, shared, features]"
        )
    return rows


def _sizes(data: DataRows | None, batch: int, shared: int) -> tuple[int, int]:
    """Return the numbers of samples and of rows of a call that are data."""
    if data is None:
        return batch, batch * shared
    if data.unit == "sample":
        return len(data.indices), len(data.indices) * shared
    return batch, len(data.indices)


def _as_one_sample(call: LayerCall, rows: Tensor) -> tuple[LayerCall, Tensor]:
    """Return a call whose rows are all of one sample, ``[groups, 1, batch * shared, features]``."""
    if rows.shape[1] == 1:
        return call, rows
    inputs = tuple(x.reshape(1, -1) for x in call.inputs)
    return call._replace(inputs=inputs), rows.flatten(1, 2).unsqueeze(1)


def _split(
    factors: Sequence[FactorSpec], rows: Tensor, data: DataRows | None
) -> list[tuple[Sequence[FactorSpec], Tensor, DataRows | None]]:
    """Return factors with the rows of a call and its data; some take whole samples of rows."""
    if data is None or data.unit != "row":
        return [(factors, rows, data)]
    parts: list[tuple[Sequence[FactorSpec], Tensor, DataRows | None]] = []
    if of_samples := [factor for factor in factors if factor.reads == "both"]:
        parts.append((of_samples, _with_zeros(rows, data), None))
    if of_rows := [factor for factor in factors if factor.reads != "both"]:
        parts.append((of_rows, rows, data))
    return parts


def _may_share(helpers: Iterable[LayerHelper]) -> set[LayerHelper]:
    """Return the layers that may share their input moments with another one."""
    keys = {helper: helper.input_key() for helper in helpers}
    numbers = Counter(keys.values())
    return {helper for helper, key in keys.items() if numbers[key] > 1}


def _with_zeros(rows: Tensor, data: DataRows) -> Tensor:
    """Return rows ``[groups, batch, shared, features]`` with zeros for padding."""
    # The gradient of a sample is a sum over its positions, to which padding then adds nothing.
    counts = rows.new_zeros(rows[0, :, :, :1].shape)  # [batch, shared, 1]
    counts.view(-1)[data.indices] = 1
    return rows * counts
