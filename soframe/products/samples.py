"""The gradients of single samples, from one backward pass of their mean loss.

The gradient of a sample in a block is ``W_n = sum_t g_{n,t} a_{n,t}^T``, with inputs ``a`` and
output gradients ``g`` at the positions t of sample n. The rows of all calls are kept, or the
gradients where those are smaller. Of a mean over N samples ``g`` is N times the gradient of
the backward pass, so that the mean of the gradients is the gradient of the loss.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from soframe.blocks import sharding
from soframe.blocks.block import Block, PlacedBlocks
from soframe.capture.counting import Batch
from soframe.capture.hooks import Calls, Capture, LayerCall
from soframe.capture.outputs import heads_in, samples_in
from soframe.capture.parameters import require_apart
from soframe.checks.warning import warn
from soframe.comm.agreement import add_over_ranks
from soframe.comm.base import Backend
from soframe.estimate.statistics import batch_first
from soframe.kernels.precision import Precision
from soframe.layers.base import LayerHelper
from soframe.layers.parameter import ParameterHelper
from soframe.products.fitting import LossOf, call_loss, kept, taken
from soframe.products.routing import (
    BASE,
    NONE,
    by_sample,
    digits_of,
    exponents_of,
    number_of_digits,
    numbered,
)
from soframe.products.vectors import Coordinates, Vector, total


def _rotated(rows: Tensor, basis: Tensor | None) -> Tensor:
    """Multiply rows ``[groups, samples, positions, n]`` by a basis ``[groups, n, n]``, or None."""
    # One product for all samples: matmul would broadcast the basis to each.
    return rows if basis is None else (rows.flatten(1, 2) @ basis).view_as(rows)


@dataclass(frozen=True)
class Rows:
    """The gradients of samples in a block, as rows of outputs and of inputs."""

    left: Tensor  # [groups, samples, positions, out]
    right: Tensor  # [groups, samples, positions, in]

    @property
    def rows(self) -> tuple[int, int]:
        """The numbers of rows that a rotation of the left and of the right side multiplies."""
        rows = self.left.shape[1] * self.left.shape[2]
        return rows, rows

    def rotated(self, left: Tensor | None, right: Tensor | None) -> Rows:
        """Return the gradients ``L^T W R``, with None for the identity."""
        return Rows(_rotated(self.left, left), _rotated(self.right, right))

    def dense(self) -> Tensor:
        """Return the gradients, ``[samples, groups, out, in]``."""
        return (self.left.mT @ self.right).transpose(0, 1)

    def dot(self, matrices: Tensor) -> Tensor:
        """Return inner products with ``[vectors, groups, out, in]``: ``[vectors, samples]``."""
        _, samples, positions, out = self.left.shape
        if len(matrices) * positions < out:
            # [vectors, groups, samples * positions, out]
            products = self.right.flatten(1, 2) @ matrices.mT
            by_row: Tensor = (products * self.left.flatten(1, 2)).sum((1, 3))
            return by_row.view(len(matrices), samples, positions).sum(2)
        return Dense(self.dense()).dot(matrices)


@dataclass(frozen=True)
class Lookups:
    """The gradients of samples in a table, as rows of outputs and the indices that they are of."""

    left: Tensor  # [1, samples, positions, out]
    indices: Tensor  # [1, samples, positions, 1], of the columns of the gradient matrix
    size: int  # columns

    @property
    def rows(self) -> tuple[int, int]:
        """See `Rows.rows`: on the right they are the gradients' rows."""
        _, samples, positions, out = self.left.shape
        return samples * positions, samples * out

    def rotated(self, left: Tensor | None, right: Tensor | None) -> Lookups | Dense:
        """Return the gradients ``L^T W R``, with None for the identity."""
        if right is not None:
            return Dense(self.dense()).rotated(left, right)
        return Lookups(_rotated(self.left, left), self.indices, self.size)

    def dense(self) -> Tensor:
        """Return the gradients, ``[samples, 1, out, in]``."""
        _, samples, _, out = self.left.shape
        offsets = torch.arange(samples, device=self.indices.device).view(-1, 1) * self.size
        columns = self.left.new_zeros(samples * self.size, out)
        places = (self.indices[0, :, :, 0] + offsets).flatten()
        columns.index_add_(0, places, self.left.flatten(0, 2))
        return columns.view(samples, 1, self.size, out).mT

    def dot(self, matrices: Tensor) -> Tensor:
        """Return inner products with ``[vectors, 1, out, in]``: ``[vectors, samples]``."""
        columns = matrices[:, 0].mT  # [vectors, in, out]
        chosen = columns[:, self.indices[0, :, :, 0]]  # [vectors, samples, positions, out]
        return (chosen * self.left).sum((2, 3))


@dataclass(frozen=True)
class Sum:
    """Gradients that are the sum of two, such as of a table that is a head, too."""

    first: Rows | Lookups | Dense
    second: Rows | Lookups | Dense

    @property
    def rows(self) -> tuple[int, int]:
        """See `Rows.rows`."""
        (left, right), (more_left, more_right) = self.first.rows, self.second.rows
        return left + more_left, right + more_right

    def rotated(self, left: Tensor | None, right: Tensor | None) -> Sum:
        """Return the gradients ``L^T W R``, with None for the identity."""
        return Sum(self.first.rotated(left, right), self.second.rotated(left, right))

    def dense(self) -> Tensor:
        """Return the gradients, ``[samples, groups, out, in]``."""
        return self.first.dense() + self.second.dense()

    def dot(self, matrices: Tensor) -> Tensor:
        """Return inner products with ``[vectors, groups, out, in]``: ``[vectors, samples]``."""
        return self.first.dot(matrices) + self.second.dot(matrices)


@dataclass(frozen=True)
class Dense:
    """The gradients of samples in a block, ``[samples, groups, out, in]``."""

    matrices: Tensor

    @property
    def rows(self) -> tuple[int, int]:
        """See `Rows.rows`."""
        samples, _, out, into = self.matrices.shape
        return samples * into, samples * out

    def rotated(self, left: Tensor | None, right: Tensor | None) -> Dense:
        """Return the gradients ``L^T W R``, with None for the identity."""
        matrices = self.matrices
        if left is not None:
            matrices = left.mT @ matrices
        if right is not None:
            matrices = matrices @ right
        return Dense(matrices)

    def dense(self) -> Tensor:
        """Return the gradients."""
        return self.matrices

    def dot(self, matrices: Tensor) -> Tensor:
        """Return inner products with ``[vectors, groups, out, in]``: ``[vectors, samples]``."""
        return matrices.flatten(1) @ self.matrices.flatten(1).T


Gradients = Rows | Lookups | Dense | Sum
"""The gradients of samples in a block."""


@dataclass(frozen=True, eq=False)
class SampleGradients:
    """The gradients of the samples of a batch.

    Attributes:
        blocks: The gradients in each block.
        samples: The number of samples.
    """

    blocks: Mapping[Block, Gradients]
    samples: int
    coordinates: Coordinates

    def __len__(self) -> int:
        return self.samples

    def dense(self) -> dict[str, Tensor]:
        """Return the gradients by parameter, ``[samples, *shape]``, in the blocks' dtype."""
        matrices = {block: gradients.dense() for block, gradients in self.blocks.items()}
        return self.coordinates.vector(matrices)

    def dot(self, vector: Vector) -> Tensor:
        """Return inner products with vectors ``[..., *shape]``: ``[..., samples]``.

        Raises:
            ValueError: If names or shapes do not fit.
        """
        leading = self.coordinates.leading(vector)
        products = []  # of each block [vectors, samples]
        for block, matrices in self.coordinates.matrices(vector).items():
            products.append(self.blocks[block].dot(matrices.reshape(-1, *block.shape)))
        return total(products).reshape(*leading, self.samples)


def sample_gradients(
    model: nn.Module,
    placed: PlacedBlocks,
    coordinates: Coordinates,
    loss: LossOf,
    batch: Any,
    precision: Precision,
    routing: Routing,
) -> SampleGradients:
    """Return the gradients of the samples of a batch; see `Curvature.gradients` for errors."""
    require_apart(model)
    for block in placed.blocks:
        if not block.helpers:
            raise ValueError(
                f"{block.name}: {type(block.method).__name__} reads no calls of layers, which show "
                f"the gradients of samples: build a soframe.Curvature(model) beside it, and take "
                f"its gradients()"
            )
    is_sharded = any(map(sharding.is_distributed, model.parameters()))
    backend = placed.backend if is_sharded else None
    capture = Capture(model=model, precision=precision, backend=backend)
    collected = _Collected(placed.blocks, routing)
    capture.listen(collected.add, collected.names, alike=True, roots=[model])
    try:
        for helper, name in collected.names.items():
            if capture.tensors_of_call(helper) is None:
                raise ValueError(
                    f"parameters of {name} were replaced since the curvature was built: build "
                    f"another Curvature, and fit() it, or load() a saved one into it"
                )
        with kept(model, coordinates.parameters(model).values()):
            done = False
            while not done:  # once more where rows are met that need the graph
                done = _run_passes(model, loss, batch, capture, collected, backend)
    finally:
        capture.close()
    with torch.no_grad():
        gradients = SampleGradients(collected.gradients(), collected.samples, coordinates)
        if collected.loss_gradient:
            _warn_of_rest(gradients, collected.loss_gradient)
        return gradients


def _run_passes(
    model: nn.Module,
    loss: LossOf,
    batch: Any,
    capture: Capture,
    collected: _Collected,
    backend: Backend | None,
) -> bool:
    """Run the backward passes of a batch; return whether the graph was kept, if it was needed."""
    capture.begin(Calls(), enabled=True)
    outputs, value = call_loss(loss, model, batch)
    collected.begin(outputs)
    collected.parameters = capture.sample_rows(outputs, [value])
    keeps_graph = collected.routing.keeps_graph
    value.backward(retain_graph=keeps_graph)
    failure = capture.calls.failure
    failed = _any(backend, failure is not None)
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError("another rank cannot take the gradients of its samples")
    reached = [*collected.parameters, *filter(None, collected.calls.values())]
    if not reached:
        raise ValueError(
            "no layer has gradients of this batch: loss(model, batch) calls another model than the "
            "one that it is given"
        )
    if backend is None and not collected.routing.is_checked:
        collected.loss_gradient = taken(model)
    for digit in collected.digits(backend):
        if not keeps_graph:
            collected.routing.keeps_graph = True
            return False
        with collected.numbered(digit):
            value.backward(retain_graph=True)
    return True


def _warn_of_rest(gradients: SampleGradients, loss_gradient: Vector) -> None:
    """Warn of blocks in which a gradient is not the mean of the samples' gradients."""
    names, coordinates = list[str](), gradients.coordinates
    vector = {name: loss_gradient[name] for name in coordinates.shapes}
    for block, matrix in coordinates.matrices(vector).items():
        products = gradients.blocks[block].dot(matrix.unsqueeze(0))
        square = matrix.square().sum()
        # Autocast rounds both by less.
        if bool((products.mean() - square).abs() > 0.01 * (products.abs().mean() + square)):
            names.append(block.name)
    if names:
        warn(
            f"in {', '.join(names)} the gradient of the loss is not the mean of the "
            f"samples' gradients, which lack what does not go through the layers' calls: a penalty "
            f"on weights, a weight that is used without its module, or a derivative of a gradient"
        )


def _any(backend: Backend | None, flag: bool) -> bool:
    """Return whether a flag is true, on any rank if they run together."""
    if backend is None:
        return flag
    return add_over_ranks(backend, [float(flag)])[0] > 0


@dataclass
class Routing:
    """The layers whose rows may be of any samples, or have another order than the batch."""

    helpers: set[LayerHelper] = field(default_factory=set)
    # Both are the same on all ranks of a sharded model.
    is_checked: bool = False  # whether the order of rows has been looked at
    keeps_graph: bool = True  # whether further backward passes may follow

    @classmethod
    def of(cls, blocks: Iterable[Block]) -> Routing:
        """Return the layers with `LayerHelper.routes`."""
        helpers = set[LayerHelper]()
        for block in blocks:
            helpers.update(helper for helper in block.helpers if helper.routes)
        return cls(helpers)


@dataclass(eq=False)
class _Call:
    """The rows of a call."""

    left: Tensor  # of outputs, [groups, batch, positions, out]
    right: Tensor  # of inputs, [groups, batch, positions, in], or indices
    # The sample of each row, [groups, batch * positions]; None in the order of the batch.
    samples: Tensor | None = None
    # Left in a pass with numbers, if it is no multiple of left.
    numbered: Tensor | None = None

    @property
    def is_in_order(self) -> bool:
        """Whether samples by their last digits are in the order of the batch."""
        if self.samples is None:
            return True
        _, batch, positions, _ = self.left.shape
        order = torch.arange(batch, device=self.left.device).repeat_interleave(positions) % BASE
        return bool(((self.samples == order) | (self.samples == NONE)).all())

    def arranged(self, size: int) -> tuple[Tensor, Tensor]:
        """Return left and right sides with samples in dimension 1."""
        if self.samples is None:
            return self.left, self.right
        left, right = self.left.flatten(1, 2), self.right.flatten(1, 2)
        return by_sample(left, self.samples, size), by_sample(right, self.samples, size)


class _Collected:
    """The rows of the calls of a batch."""

    def __init__(self, blocks: Sequence[Block], routing: Routing) -> None:
        self.routing = routing
        self._block_of: dict[LayerHelper, Block] = {}
        for block in blocks:
            self._block_of.update(dict.fromkeys(block.helpers, block))
        self.names = {helper: block.name for helper, block in self._block_of.items()}
        self._blocks = blocks
        self.begin()

    def begin(self, outputs: Any = None) -> None:
        """Drop all rows, before the backward pass from outputs of the batch."""
        self._heads = heads_in(outputs)
        self.samples = 0
        self._forward_passes: set[Batch] = set()
        self.loss_gradient: dict[str, Tensor] = {}  # the gradient of the loss, if it is looked at
        self.calls: dict[LayerHelper, list[_Call]] = {helper: [] for helper in self._block_of}
        # The gradients of samples in single parameters, [samples, entries], of the mean loss.
        self.parameters: Mapping[ParameterHelper, Tensor] = {}
        self._is_numbered = False  # whether a pass with numbers is under way
        self._digit: int | None = None  # of that pass
        self._routed: set[LayerHelper] = set()  # layers whose rows may be of any samples
        # Layers with as many rows as samples, whose order is looked at; and of these, those with
        # terms that are not of the outputs.
        self._ordered: set[LayerHelper] = set()
        self._unclear: set[LayerHelper] = set()
        self._later: dict[LayerHelper, Iterator[_Call]] = {}  # the calls that such a pass repeats

    def add(self, call: LayerCall) -> None:
        """Keep the rows of a call, or find the samples of rows that are there."""
        if not self._is_numbered:
            self._keep(call)
        elif call.helper in self._later:
            known = next(self._later[call.helper])
            rows = self._sides(batch_first(call))[0].flatten(1, 2)
            if self._digit is None:
                self._compare(known, rows, call)
            else:
                self._number(known, rows, call, self._digit)

    def _sides(self, call: LayerCall) -> tuple[Tensor, Tensor]:
        """Return the rows of outputs and of inputs, ``[groups, batch, positions, ...]``."""
        helper = call.helper
        rows = helper.output_rows(call.gradient).to(self._block_of[helper].dtype)
        return helper.sample_rows(call.inputs, rows)

    def _keep(self, call: LayerCall) -> None:
        """Keep the rows of a call, and note whether they are of other samples than the batch."""
        helper, call = call.helper, batch_first(call)
        left, right = self._sides(call)
        self.calls[helper].append(_Call(left, right))
        self._forward_passes.add(call.batch)
        size = call.root.size or samples_in(self._heads)
        if size == 0 and not helper.routes:
            size = left.shape[1]
        if self.samples == 0:
            self.samples = size
        if call.is_ragged or {left.shape[1], size} != {self.samples}:
            self.routing.helpers.add(helper)

    def _number(self, known: _Call, rows: Tensor, call: LayerCall, digit: int) -> None:
        """Add a digit to the samples of the rows of a call."""
        digits = digits_of(known.left.flatten(1, 2), rows, call.gradient.dtype)
        if digits is None:
            if call.helper not in self._ordered:
                raise self._unexplained(call.helper)
            known.samples = None
            if bool(rows.isfinite().all()):  # half precision overflows
                known.numbered = rows
                self._unclear.add(call.helper)
        elif known.samples is not None:
            samples = known.samples + digits * BASE**digit
            known.samples = samples.where(digits != NONE, NONE)

    def _compare(self, known: _Call, rows: Tensor, call: LayerCall) -> None:
        """Raise if rows with numbers are no multiples of rows with equal numbers."""
        numbered, known.numbered = known.numbered, None
        if numbered is None:
            return
        if exponents_of(rows, numbered, call.gradient.dtype) is None:
            raise self._unexplained(call.helper)

    def _unexplained(self, helper: LayerHelper) -> ValueError:
        """Return the error of rows that no sample explains."""
        return ValueError(
            f"{self.names[helper]}: a call of {type(helper.module).__name__} has rows whose "
            f"gradients are not of the outputs of one of the {self.samples} samples: call it "
            f"with [samples, ...] (expand tensors without a batch), return the outputs that "
            f"the loss is of, leave terms of the whole batch out of the loss, or skip it "
            f"(skip=[...])"
        )

    def digits(self, backend: Backend | None) -> Iterator[int | None]:
        """Yield the digits that a rank needs; with None, all samples have the same number."""
        checks = not self.routing.is_checked
        self._routed = self._in_another_order()
        if (checks or self._routed) and 1 < samples_in(self._heads) == self.samples:
            self._ordered = set(self.calls) - self._routed
        for helper in self._routed | self._ordered:
            for call in self.calls[helper]:
                call.samples = torch.zeros_like(call.left[..., 0], dtype=torch.long).flatten(1)
        digit = 0
        while _any(backend, self._needs(digit)):
            yield digit
            digit += 1
        if not checks:
            return
        if _any(backend, len(self._unclear) > 0):
            yield None
        if _any(backend, self.samples > 1):
            self.routing.is_checked = True
            self.routing.keeps_graph = _any(backend, len(self._routed) > 0)

    def _needs(self, digit: int) -> bool:
        """Return whether the samples of rows have a digit that is not known."""
        if self._routed:
            return digit < number_of_digits(self.samples)
        return digit == 0 < len(self._ordered)

    def _in_another_order(self) -> set[LayerHelper]:
        """Return the layers of such rows; raise if outputs do not show the samples."""
        called = {helper for helper, calls in self.calls.items() if calls}
        helpers, shown = called & self.routing.helpers, samples_in(self._heads)
        is_known = self.samples in (1, shown)
        if len(self._forward_passes) > 1:
            # They are of micro-batches, or all of the same samples.
            helpers, self.samples, is_known = called, shown, shown > 0
        for helper in helpers:
            if not is_known:
                raise ValueError(
                    f"{self.names[helper]}: the rows of a {type(helper.module).__name__} are not "
                    f"in the order of the batch, and loss(model, batch) does not return the "
                    f"outputs that the loss is of, a tensor [samples, ...] or several, which show "
                    f"the samples: return them, or skip it (skip=[...])"
                )
        return helpers

    @contextmanager
    def numbered(self, digit: int | None) -> Iterator[None]:
        """Find a digit of the samples of the rows in the pass under way; see `digits`."""
        self._is_numbered, self._digit = True, digit
        helpers = self._unclear if digit is None else self._routed | self._ordered
        self._later = {helper: iter(self.calls[helper]) for helper in helpers}
        # Other ranks may need the pass, and this one not.
        with numbered(self._heads if helpers else (), digit):
            yield
        for helper in self._ordered:
            if all(call.is_in_order for call in self.calls[helper]):
                for call in self.calls[helper]:
                    call.samples = None
            else:
                self.routing.helpers.add(helper)
                self._routed.add(helper)
        self._ordered = set()

    def gradients(self) -> dict[Block, Gradients]:
        """Return the gradients by block; zeros for a block that was not called."""
        of_parameters: dict[Block, Gradients] = {}
        for helper, rows in self.parameters.items():
            self.samples, block = len(rows), self._block_of[helper]
            matrices = (self.samples * rows).view(-1, *block.shape)
            of_parameters[block] = Dense(matrices.to(block.dtype))
        return {block: of_parameters.get(block) or self._of(block) for block in self._blocks}

    def _of(self, block: Block) -> Gradients:
        rows: list[tuple[Tensor, Tensor]] = []
        lookups: list[tuple[Tensor, Tensor]] = []  # of tables, whose rows of inputs are indices
        for helper in block.helpers:
            for call in self.calls[helper]:
                left, right = call.arranged(self.samples)
                sides = left * self.samples, right
                calls = rows if right.is_floating_point() else lookups
                calls.append(sides)
        gradients: Rows | Lookups | Dense | None = None
        if rows:
            left, right = _joined(rows)
            gradients = _smaller(Rows(left, right), right, block)
        if lookups:
            left, indices = _joined(lookups)
            table = Lookups(left, indices, block.shape.in_features)
            of_table = _smaller(table, indices, block)
            return of_table if gradients is None else Sum(gradients, of_table)
        if gradients is None:
            shape = (self.samples, *block.shape)
            return Dense(torch.zeros(shape, dtype=block.dtype, device=block.device))
        return gradients


def _smaller(rows: Rows | Lookups, right: Tensor, block: Block) -> Rows | Lookups | Dense:
    """Return rows, or the gradients that they make if these have as few entries."""
    _, _, positions, out = rows.left.shape
    if positions * (out + right.shape[3]) < out * block.shape.in_features:
        return rows
    return Dense(rows.dense())


def _joined(calls: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Concatenate the positions of calls, dimension 2."""
    if len(calls) == 1:
        ((left, right),) = calls
        return left.detach(), right.detach()
    lefts, rights = zip(*calls, strict=True)
    return torch.cat(lefts, 2), torch.cat(rights, 2)
