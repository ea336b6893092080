"""The root module's inputs and outputs, which show the batch of a forward pass.

The number of samples N is seen in the sizes of inputs and outputs:

- It is the first size, if inputs and outputs have one in common. If their first two sizes agree,
  inputs of a layer with ``batch_first=False`` show which of them is N.
- If they have none in common, N is the second size of outputs ``[T, N, features]`` of inputs
  ``[N, ...]``, as for a CTC loss, or of inputs ``[T, N, features]`` to outputs ``[N, classes]``.
- If outputs are several rows of each sample, these rows are the terms.
- Outputs ``[K, N]`` may be K draws of each sample. Of other outputs N is the first size, since the
  loss is of them: as of lists of images, and of nodes of graphs to outputs of graphs.
- Integers ``[N, T]`` to outputs ``[N, T, V]``, where a table of the model has V rows, are a
  language model: each token has a term.

Two forward passes are of the same samples if they have the same inputs, or slices of the positions
of one tensor, or one has outputs of the other as inputs. Slices along the batch are other samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

INTEGERS = (torch.int64, torch.int32)


def tensors_in(values: object) -> Iterator[Tensor]:
    """Yield the tensors with dimensions in nested containers and dataclasses."""
    if isinstance(values, Tensor):
        if values.dim() > 0:
            yield values
        return
    parts: Iterable[object] = ()
    if isinstance(values, Mapping):
        parts = values.values()
    elif isinstance(values, list | tuple):
        parts = values
    elif is_dataclass(values):
        parts = [getattr(values, field.name, None) for field in fields(values)]
    for part in parts:
        yield from tensors_in(part)


def entries(tensor: Tensor) -> int:
    """Return the number of entries of a tensor, of a nested one without padding."""
    if tensor.is_nested:
        return int(tensor.values().numel())
    return tensor.numel()


@dataclass(frozen=True)
class Layers:
    """The layers of a model that show its batch."""

    rows: frozenset[int]  # the numbers of rows of its embeddings
    sequences: Sequence[nn.Module]  # those that take ``[T, N, features]``: ``batch_first=False``
    all_first: bool  # whether the model itself does

    @staticmethod
    def of(model: nn.Module) -> Layers:
        """Look at the modules of a model."""
        rows: set[int] = set()
        sequences: list[nn.Module] = []
        for module in model.modules():
            number = getattr(module, "num_embeddings", None)
            if isinstance(number, int):
                rows.add(number)
            if getattr(module, "batch_first", None) is False:
                sequences.append(module)
        below = [module for module in sequences if module is not model]
        return Layers(frozenset(rows), below, all_first=model in sequences)


@dataclass(frozen=True)
class Region:
    """The memory of a tensor, without a reference to its values."""

    storage: StorageWeakRef
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    steps: tuple[int, ...]  # the strides of the whole tensor that it is a slice of, if known
    is_indexed: bool  # whether it is a view with fewer dimensions than its base

    @staticmethod
    def of(tensor: Tensor) -> Region | None:
        """Return the region of a plain tensor; None for another."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return None
        steps, is_indexed = list(tensor.stride()), False
        if (base := tensor._base) is not None:
            is_indexed = base.dim() > tensor.dim()
            # A layer's output [N, T, features] may be a view of its product [N T, features].
            if base.dim() == tensor.dim() and not base.requires_grad:
                dims = sorted(range(base.dim()), key=tensor.stride)
                for dim, step in zip(dims, sorted(base.stride()), strict=True):
                    steps[dim] = step
        return Region(
            StorageWeakRef(tensor.untyped_storage()),
            int(tensor.storage_offset()),
            tensor.shape,
            tensor.stride(),
            tuple(steps),
            is_indexed,
        )

    def has_samples_of(self, other: Region, dim: int) -> bool | None:
        """Return whether two regions are of the same samples; None if unknown."""
        if self.storage != other.storage or self.stride != other.stride:
            return None
        if self.stride[dim] == 0:
            return None  # one row for all samples, such as a time step, a position or a mask
        first, second = sorted((self, other), key=lambda region: region.offset)
        moved = first._moved(second.offset - first.offset)
        along = moved.pop(dim)
        if along == 0:
            return True  # the same tensor, or other positions
        if any(moved) or first.is_indexed or second.is_indexed:
            return None
        samples, rest = divmod(along * first.steps[dim], first.stride[dim])
        # Every k-th sample looks like every k-th position of sequences in one dimension.
        if rest == 0 and samples >= first.shape[dim]:
            return False
        return None

    def _moved(self, offset: int) -> list[int]:
        """Return by how many entries of the whole tensor an offset moves along each dimension."""
        moved = [0] * len(self.shape)
        for dim in sorted(range(len(moved)), key=lambda dim: -self.steps[dim]):
            moved[dim], offset = divmod(offset, max(1, self.steps[dim]))
        return moved


@dataclass(frozen=True)
class Sight:
    """The tensors of a forward pass of the root."""

    size: int | None = None  # the number of samples N; None if unknown
    # The number of rows of the outputs, if they are several for each sample.
    terms: int | None = None
    tokens: int | None = None  # the number of tokens of the integer inputs, or of the outputs
    by_token: bool = False  # whether each token has a term
    words: int = 0  # the number of scores of each token, if each has a term
    is_empty: bool = False  # whether the batch has no samples
    dim: int = 0  # the dimension of the inputs that is the batch
    inputs: Sequence[Region] = ()  # the regions of the inputs
    outputs: Sequence[Region] = ()  # the regions of the outputs; empty before they are computed
    question: str = ""  # the alternatives, if the number of terms is uncertain
    asks_of_tokens: bool = False  # whether the question is of tokens or samples alone
    # The second dimensions of the inputs of layers that take ``[T, N, features]``.
    second_sizes: frozenset[int] = frozenset()

    def with_sequences(self, inputs: object) -> Sight:
        """Add the first input of a layer that takes ``[T, N, features]``."""
        if not isinstance(inputs, Tensor) or inputs.dim() != 3:
            return self
        return replace(self, second_sizes=self.second_sizes | {inputs.shape[1]})

    def has_samples_of(self, other: Sight) -> bool | None:
        """Return whether two forward passes are of the same samples; None if unknown."""
        if _meet(self.inputs, other.outputs) or _meet(other.inputs, self.outputs):
            return True
        answer: bool | None = None
        for region, previous in itertools.product(self.inputs, other.inputs):
            if len(region.shape) <= self.dim or region.shape[self.dim] != self.size:
                continue
            are_same = region.has_samples_of(previous, self.dim)
            if are_same is False:
                return False  # a tensor that all passes have, such as a mask, may be the same
            if are_same:
                answer = True
        return answer

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the memory of an input; True if that is unknown."""
        region = Region.of(tensor)
        return region is None or any(region.storage == other.storage for other in self.inputs)


def _meet(inputs: Iterable[Region], outputs: Iterable[Region]) -> bool:
    """Return whether some inputs and outputs have a storage in common."""
    storages = {region.storage for region in inputs}
    return any(output.storage in storages for output in outputs)


def look(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sight:
    """Return the batch that the inputs of a forward pass show."""
    tensors = list(tensors_in((args, kwargs)))
    question = ""
    for value in (*args, *kwargs.values()):
        if isinstance(value, list | tuple) and any(isinstance(part, Tensor) for part in value):
            question = f"it takes a list of tensors {_shapes(tensors)}"
    lengths = {len(tensor) for tensor in tensors}
    return Sight(
        size=common(lengths),
        is_empty=lengths == {0},
        tokens=common(set(map(entries, _tables(tensors)))),
        inputs=list(filter(None, map(Region.of, tensors))),
        question=question,
    )


def look_at_outputs(
    sight: Sight,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    output: object,
    layers: Layers,
    terms: int | None,
) -> Sight:
    """Return the batch that inputs and outputs show; ``terms`` are the declared ones."""
    inputs = list(tensors_in((args, kwargs)))
    outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    integers = [t for t in _tables(inputs) if entries(t) > len(t)]  # more than one in a row
    if not outputs:
        return _without_outputs(sight, integers)
    lengths = {len(tensor) for tensor in outputs}
    regions = list(filter(None, map(Region.of, outputs)))
    seen = replace(sight, outputs=regions, question="", is_empty=lengths == {0})
    agreed = lengths & {len(tensor) for tensor in inputs}
    if len(agreed) == 1:
        seen = replace(seen, size=common(agreed))
        if layers.sequences or layers.all_first:
            seen = _of_sequences(seen, inputs, outputs, terms, all_first=layers.all_first)
    else:
        seen = _of_different_lengths(seen, inputs, outputs)
    if not integers:
        return seen
    return _with_tokens(seen, integers, inputs, outputs, layers.rows)


def _of_different_lengths(
    sight: Sight, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> Sight:
    """Return the batch of inputs and outputs whose first dimensions do not agree."""
    lengths = {len(tensor) for tensor in outputs}
    if len(lengths) > 1:
        question = f"{_shown(inputs, outputs)} have no batch in common"
        return replace(sight, size=None, question=question)
    length = common(lengths)
    if length is None:
        return sight  # the outputs have no rows
    return _of_length(sight, inputs, outputs, length)


def _of_length(
    sight: Sight, inputs: Sequence[Tensor], outputs: Sequence[Tensor], length: int
) -> Sight:
    """Return the batch of inputs and outputs, which are all of a length that no input has."""
    either = f"{_shown(inputs, outputs)}, and either may be the batch"
    is_second = length in {tensor.shape[1] for tensor in inputs if tensor.dim() > 1}
    seconds = {second for _, second in _leading_sizes(outputs)}
    size = common(seconds & {len(tensor) for tensor in inputs})
    if size is not None:  # outputs [T, N, features] of inputs [N, ...]
        is_certain = length % size > 0 and not is_second
        return replace(sight, size=size, question="" if is_certain else either)
    if is_second:
        return replace(sight, size=length, dim=1)
    if sight.size is not None and length % sight.size == 0:
        return replace(sight, terms=length)  # several rows of each sample
    # Perhaps outputs [K, N], K draws for each of the N samples of all inputs.
    if {tensor.shape for tensor in outputs} == {(length, sight.size)}:
        return replace(sight, question=either)
    return replace(sight, size=length)


def _tables(inputs: Sequence[Tensor]) -> list[Tensor]:
    """Return the inputs ``[N, T]`` of integers."""
    return [tensor for tensor in inputs if tensor.dim() == 2 and tensor.dtype in INTEGERS]


def _without_outputs(sight: Sight, integers: Sequence[Tensor]) -> Sight:
    """Return the batch of a forward pass that computed the loss within the model."""
    if sight.question:
        return replace(sight, size=None)
    if not integers:
        return sight
    return replace(sight, question=f"it takes integers {_shapes(integers)}", asks_of_tokens=True)


def _with_tokens(
    sight: Sight,
    integers: Sequence[Tensor],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    rows: Collection[int],
) -> Sight:
    """Return the batch with its tokens, if an output has a row for each of the integers."""
    for tensor in outputs:
        words = tensor.shape[-1]
        tokens = entries(tensor) // max(1, words)
        shapes = {table.shape for table in integers if entries(table) == tokens}
        if tensor.dim() > 2:  # else the tokens are perhaps flattened
            shapes &= {tensor.shape[:-1]}
        if not shapes:
            continue
        if words in rows:
            return replace(sight, tokens=tokens, by_token=True, words=words, question="")
        if not sight.question:
            sight = replace(sight, question=_shown(inputs, outputs), asks_of_tokens=True)
    return sight


def _of_sequences(
    sight: Sight,
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    terms: int | None,
    *,
    all_first: bool,
) -> Sight:
    """Return the batch of inputs and outputs with two dimensions in common, perhaps ``[T, N]``."""
    both = _leading_sizes(inputs) & _leading_sizes(outputs)
    unequal = [(first, second) for first, second in both if first != second]
    if len(unequal) != 1:
        return sight
    ((first, second),) = unequal
    size = common(sight.second_sizes & {first, second})
    if all_first or terms == second:
        size = second
    if size is not None:  # the first one if the model transposes
        return replace(sight, size=size, dim=(first, second).index(size))
    shown = _shown(inputs, outputs)
    question = f"{shown} and a layer with batch_first=False: [{first}, {second}] may be [T, N]"
    return replace(sight, question=question)


def _leading_sizes(tensors: Iterable[Tensor]) -> set[tuple[int, ...]]:
    """Return the first two sizes of the tensors with more dimensions."""
    return {tuple(tensor.shape[:2]) for tensor in tensors if tensor.dim() > 2}


def common(numbers: Collection[int]) -> int | None:
    """Return the only number, if it is positive."""
    if len(numbers) != 1:
        return None
    (number,) = numbers
    return number or None


def _shown(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
    return f"inputs {_shapes(inputs)} and outputs {_shapes(outputs)}"


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in tensors[:4])
