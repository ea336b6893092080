"""Precondition and exchange: gradient workers apply second-order data, and send what results.

Blocks of one shape are applied together, as one block of more groups, where their matrices are
small or the device is no CPU: one batch of products instead of many small ones. Their data then
lie side by side in memory, so that nothing is copied until one of them is solved again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from soframe.blocks.block import Block
from soframe.comm.base import Backend
from soframe.comm.fusion import Parcel, deliver
from soframe.kernels import products
from soframe.specs import TensorSpec
from soframe.strategies.placement import Placement, exchange_group

SMALL = 40_000
"""Elements of a gradient's matrix: on CPUs larger ones are applied one by one. With one thread six
blocks of 16 x 144 took 0.57 of the time together, five of 64 x 576 0.83, and 24 of 256 x 256 1.5
times the time; with two threads 0.42, 0.74 and 0.95 (an AVX2 machine; `bench_apply` of
`benchmarks/bench_kernels.py`). Where oneDNN multiplies a single matrix faster
(`soframe.kernels.products`), five of 64 x 576 took twice the time together."""


def precondition(
    blocks: Sequence[Block],
    placement: Placement,
    backend: Backend,
    damping: float,
    gradients: Mapping[Block, Tensor | None],
    arrive: Callable[[Block], None],
) -> dict[Block, Tensor]:
    """Precondition on the gradient workers and send the result to the receivers.

    Every rank enters the same collectives whatever gradients it has: a worker without a gradient
    sends zeros.

    Args:
        blocks: All blocks, in the placement's order.
        placement: Who preconditions and who receives.
        backend: The backend.
        damping: The damping of this step.
        gradients: The raw gradients of blocks that are solved, ``[groups, out, in]``; None where
            this rank is no gradient worker.
        arrive: Called for a block before its second-order data is used.

    Returns:
        The preconditioned gradient of each of these blocks, ``[groups, out, in]``.
    """
    results: dict[Block, Tensor] = {}
    parcels: list[tuple[Block, Parcel]] = []
    batches: list[Batch] = []
    for block, place in zip(blocks, placement.blocks, strict=True):
        if not block.solved:
            continue
        spec = (TensorSpec(tuple(block.shape)),)
        for worker in place.gradient_workers:
            group = exchange_group(worker, place.sources)
            parcel = Parcel(worker, group, spec, block.dtype, block.device)
            gradient = gradients.get(block)
            if worker == backend.rank and gradient is not None:
                joins = _joins(block, gradient)
                batch = _batch_of(block, place.gradient_workers, batches, damping, arrive, joins)
                batch.gradients[block] = gradient
                parcel.make = functools.partial(batch.result, block)
            parcels.append((block, parcel))
    # What stays here may be made in any order: the largest last, whose solving takes the longest.
    order = sorted((p for _, p in parcels), key=lambda p: 0 if p.travels else p.numel)
    deliver(backend, order, "exchange", fused=backend.fused)
    for block, parcel in parcels:
        if backend.rank in parcel.group and parcel.tensors is not None:
            results[block] = parcel.tensors[0]
    return {block: results[block] for block in gradients}


@dataclass(eq=False)
class Batch:
    """Blocks that are applied together, all of them when the first result is asked for.

    Attributes:
        workers: The gradient workers of all of them: every worker of a block has the same batch,
            so that all find the same bits.
        damping: The damping of this step.
        arrive: Called for a block before its second-order data is used.
        gradients: The blocks' raw gradients, ``[groups, out, in]``.
        results: What is not fetched yet.
    """

    workers: tuple[int, ...]
    damping: float
    arrive: Callable[[Block], None]
    gradients: dict[Block, Tensor] = field(default_factory=dict)
    results: dict[Block, Tensor] = field(default_factory=dict)

    def takes(self, block: Block, workers: tuple[int, ...]) -> bool:
        """Return whether a block may join.

        Args:
            block: The block.
            workers: Its gradient workers.
        """
        one = next(iter(self.gradients))
        return (
            (self.workers, one.shape, one.dtype, one.device, one.tensors)
            == (workers, block.shape, block.dtype, block.device, block.tensors)
        ) and (one.method, one.solver, one.damping) == (block.method, block.solver, block.damping)

    def result(self, block: Block) -> list[Tensor]:
        """Return the preconditioned gradient of a block, once.

        Args:
            block: The block.

        Returns:
            ``[groups, out, in]``, alone in a list.
        """
        if not self.results:
            self._apply()
        return [self.results.pop(block)]

    def _apply(self) -> None:
        blocks = list(self.gradients)
        for block in blocks:
            self.arrive(block)
        one = blocks[0]
        if len(blocks) == 1:
            gradient, data = self.gradients[one], one.second_order
        else:
            gradient = torch.cat(list(self.gradients.values()))
            data = {
                factor: {name: side_by_side(blocks, factor, name) for name in specs}
                for factor, specs in one.tensors.items()
            }
        damping = one.damped_with(self.damping)
        found = one.method.precondition(gradient, data, one.solver, damping)
        self.results.update(zip(blocks, found.split(one.shape.groups), strict=True))


def _batch_of(
    block: Block,
    workers: tuple[int, ...],
    batches: list[Batch],
    damping: float,
    arrive: Callable[[Block], None],
    joins: bool,
) -> Batch:
    """Return the batch that a block joins, perhaps a new one; those that may be joined are kept."""
    new = Batch(workers, damping, arrive)
    if not joins:
        return new
    for batch in batches:
        if batch.takes(block, workers):
            return batch
    batches.append(new)
    return new


def _joins(block: Block, gradient: Tensor) -> bool:
    """Return whether a block is applied together with others of its shape."""
    groups, out, into = block.shape
    if block.device.type == "cpu":
        work = out * into * max(out, into)  # of the larger product
        if out * into > SMALL or (groups == 1 and products.serves(gradient, work)):
            return False
    specs = [spec for tensors in block.tensors.values() for spec in tensors.values()]
    return all(len(spec.shape) > 0 and spec.shape[0] == groups for spec in specs)


def side_by_side(blocks: Sequence[Block], factor: str, name: str) -> Tensor:
    """Return a tensor of some blocks' second-order data as one.

    Where they do not lie side by side in memory they are copied there, and the blocks keep views.

    Args:
        blocks: Blocks whose data have the same shapes, ``[groups, ...]``.
        factor: The factor.
        name: The tensor.

    Returns:
        ``[blocks * groups, ...]``.
    """
    tensors = [block.second_order[factor][name] for block in blocks]
    first, size = tensors[0], tensors[0].numel()
    base, begin = first.untyped_storage().data_ptr(), first.storage_offset()
    if all(
        tensor.untyped_storage().data_ptr() == base
        and tensor.storage_offset() == begin + number * size
        and tensor.is_contiguous()
        for number, tensor in enumerate(tensors)
    ):
        shape = (len(blocks) * len(first), *first.shape[1:])
        return first.as_strided(shape, first.stride(), begin)
    whole = torch.cat(tensors)
    for block, part in zip(blocks, whole.split(len(first)), strict=True):
        # In a new dict: what others kept of the data stays what it was.
        block.second_order[factor] = {**block.second_order[factor], name: part}
    return whole
