"""The root module's inputs and outputs, which show the batch of a forward pass.

The batch N is the first dimension common to inputs and outputs. If they have none, it is the
outputs', of which the loss is: so of sequences ``[T, N, features]`` to outputs ``[N, classes]``,
lists of images, and nodes of graphs to outputs of graphs. If outputs are several rows of each
sample, their rows are the terms. Integers ``[N, T]`` to outputs ``[N, T, V]``, where a table of the
model has V rows, are a language model: each token has a term.

Two forward passes are of the same samples if they have the same inputs, or slices of the positions
of one tensor, or one has outputs of the other as inputs. Slices along the batch are other samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

INTEGERS = (torch.int64, torch.int32)


def tensors_in(values: object) -> Iterator[Tensor]:
    """Yield the tensors with dimensions in nested containers."""
    if isinstance(values, Tensor):
        if values.dim() > 0:
            yield values
    elif isinstance(values, Mapping | list | tuple):
        for value in values.values() if isinstance(values, Mapping) else values:
            yield from tensors_in(value)


def entries(tensor: Tensor) -> int:
    """Return the number of entries of a tensor, of a nested one without padding."""
    if tensor.is_nested:
        return int(tensor.values().numel())
    return tensor.numel()


def tables(model: nn.Module) -> frozenset[int]:
    """Return the numbers of rows of a model's embeddings."""
    rows = (getattr(module, "num_embeddings", None) for module in model.modules())
    return frozenset(number for number in rows if isinstance(number, int))


@dataclass(frozen=True)
class Region:
    """The memory of a tensor, without a reference to its values."""

    storage: StorageWeakRef
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    is_indexed: bool  # whether it is a view with fewer dimensions than its base

    @staticmethod
    def of(tensor: Tensor) -> Region | None:
        """Return the region of a plain tensor; None for another."""
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return None
        base = tensor._base
        return Region(
            StorageWeakRef(tensor.untyped_storage()),
            int(tensor.storage_offset()),
            tensor.shape,
            tensor.stride(),
            base is not None and base.dim() > tensor.dim(),
        )

    def has_samples_of(self, other: Region, dim: int) -> bool | None:
        """Return whether two regions of a storage are of the same samples; None if unknown."""
        if len(self.shape) <= dim or self.stride != other.stride:
            return None
        first, second = sorted((self, other), key=lambda region: region.offset)
        between = second.offset - first.offset
        if between < first.stride[dim]:
            return True  # the same tensor, or other positions
        if first.is_indexed or second.is_indexed:
            return None
        samples, rest = divmod(between, first.stride[dim])
        return False if rest == 0 and samples >= first.shape[dim] else None


@dataclass(frozen=True)
class Sight:
    """The tensors of a forward pass of the root.

    Attributes:
        size: The number of samples N; None if unknown.
        terms: The number of rows of the outputs, if they are several for each sample.
        tokens: The number of tokens of the integer inputs, or of the outputs.
        by_token: Whether each token has a term.
        is_empty: Whether the batch has no samples.
        dim: The dimension of the inputs that is the batch.
        inputs: The regions of the inputs.
        outputs: The regions of the outputs; empty before they are computed.
        question: The alternatives, if the number of terms is uncertain.
        asks_of_tokens: Whether the question is of tokens or samples alone.
    """

    size: int | None = None
    terms: int | None = None
    tokens: int | None = None
    by_token: bool = False
    is_empty: bool = False
    dim: int = 0
    inputs: Sequence[Region] = ()
    outputs: Sequence[Region] = ()
    question: str = ""
    asks_of_tokens: bool = False

    def has_samples_of(self, other: Sight) -> bool | None:
        """Return whether two forward passes are of the same samples; None if unknown."""
        for inputs, outputs in ((self.inputs, other.outputs), (other.inputs, self.outputs)):
            for region in inputs:
                if any(region.storage == output.storage for output in outputs):
                    return True
        known = set[bool | None]()
        for region in self.inputs:
            for previous in other.inputs:
                if region.storage == previous.storage and self._is_batched(region):
                    known.add(region.has_samples_of(previous, self.dim))
        known.discard(None)
        # A tensor that all passes have, such as a mask, does not outweigh slices of a batch.
        return None if not known else False not in known

    def has(self, tensor: Tensor) -> bool:
        """Return whether a tensor is in the memory of an input; True if that is unknown."""
        region = Region.of(tensor)
        return region is None or any(region.storage == other.storage for other in self.inputs)

    def _is_batched(self, region: Region) -> bool:
        return len(region.shape) > self.dim and region.shape[self.dim] == self.size


def look(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sight:
    """Return the batch that the inputs of a forward pass show."""
    tensors = list(tensors_in((args, kwargs)))
    integers = [entries(t) for t in tensors if t.dim() == 2 and t.dtype in INTEGERS]
    question = ""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple)]
    if any(isinstance(value, Tensor) for value in itertools.chain.from_iterable(lists)):
        question = f"it takes a list of tensors {_shapes(tensors)}"
    regions = (Region.of(tensor) for tensor in tensors)
    lengths = {len(tensor) for tensor in tensors}
    return Sight(
        size=common(lengths),
        is_empty=lengths == {0},
        tokens=common(set(integers)),
        inputs=[region for region in regions if region is not None],
        question=question,
    )


def look_at_outputs(
    sight: Sight,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    output: object,
    rows: Collection[int],
) -> Sight:
    """Return the batch that inputs and outputs show; the model's tables have so many ``rows``."""
    inputs = list(tensors_in((args, kwargs)))
    outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    integers = [t for t in inputs if t.dim() == 2 and t.dtype in INTEGERS and entries(t) > len(t)]
    if not outputs:
        return _without_outputs(sight, integers)
    regions = (Region.of(tensor) for tensor in outputs)
    lengths = {len(tensor) for tensor in outputs}
    seen = replace(
        sight,
        outputs=[region for region in regions if region is not None],
        question="",
        is_empty=lengths == {0},
    )
    agreed = lengths & {len(tensor) for tensor in inputs}
    if len(agreed) == 1:
        seen = replace(seen, size=common(agreed))
    elif len(lengths) == 1:
        seen = _of_outputs(seen, inputs, common(lengths))
    else:
        question = f"{_shown(inputs, outputs)} have no batch in common"
        seen = replace(seen, size=None, question=question)
    return _with_tokens(seen, integers, inputs, outputs, rows)


def _without_outputs(sight: Sight, integers: Sequence[Tensor]) -> Sight:
    """Return the batch of a forward pass that computed the loss within the model."""
    if sight.question:
        return replace(sight, size=None, asks_of_tokens=False)
    question = f"it takes integers {_shapes(integers)}" if integers else ""
    return replace(sight, question=question, asks_of_tokens=bool(integers))


def _with_tokens(
    sight: Sight,
    integers: Sequence[Tensor],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    rows: Collection[int],
) -> Sight:
    """Return the batch with its tokens, if an output has a row for each of the integers."""
    for tensor in outputs:
        features = tensor.shape[-1] if tensor.dim() > 1 else 1
        tokens = entries(tensor) // max(1, features)
        of_size = [t for t in integers if entries(t) == tokens]
        if tensor.dim() != 2:  # else the tokens are perhaps flattened
            of_size = [t for t in of_size if t.shape == tensor.shape[:-1]]
        if not of_size:
            continue
        if features in rows:
            return replace(sight, tokens=tokens, by_token=True, question="")
        if not sight.question:
            sight = replace(sight, question=_shown(inputs, outputs), asks_of_tokens=True)
    return sight


def _of_outputs(sight: Sight, inputs: Sequence[Tensor], length: int | None) -> Sight:
    """Return the batch of outputs of one length, which no input has."""
    if length is None:
        return sight
    if any(tensor.dim() > 1 and tensor.shape[1] == length for tensor in inputs):
        return replace(sight, size=length, dim=1)
    if sight.size is not None and length > sight.size and length % sight.size == 0:
        return replace(sight, terms=length)  # several rows of each sample
    return replace(sight, size=length)


def common(numbers: Collection[int]) -> int | None:
    """Return the only number, if it is positive."""
    return (next(iter(numbers)) or None) if len(numbers) == 1 else None


def _shown(inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> str:
    return f"inputs {_shapes(inputs)} and outputs {_shapes(outputs)}"


def _shapes(tensors: Sequence[Tensor]) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in tensors[:4])
