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
from soframe.blocks.placed import PlacedBlocks
from soframe.comm.fusion import Parcel, deliver
from soframe.comm.shards import Split, scatter
from soframe.kernels import products
from soframe.methods.base import Given
from soframe.methods.returned import direction_of
from soframe.specs import TensorSpec
from soframe.strategies.work import BlockPlacement, exchange_group

SMALL = 40_000
"""Elements of a gradient's matrix: on CPUs larger ones are applied one by one. With one thread six
blocks of 16 x 144 took 0.57 of the time together, five of 64 x 576 0.83, and 24 of 256 x 256 1.5
times the time; with two threads 0.42, 0.74 and 0.95 (an AVX2 machine; `bench_apply` of
`benchmarks/bench_kernels.py`). Where oneDNN multiplies a single matrix faster
(`soframe.kernels.products`), five of 64 x 576 took twice the time together."""


def precondition(
    placed: PlacedBlocks,
    *,
    damping: float,
    gradients: Mapping[Block, Tensor | None],
    arrive: Callable[[Block], None],
) -> Directions:
    """Precondition on the gradient workers and send the result to the receivers.

    Every rank enters the same collectives whatever gradients it has: a worker without a gradient
    sends zeros.

    Args:
        placed: All blocks, with their places.
        damping: The damping of this step.
        gradients: The raw gradients of blocks that are solved, ``[groups, out, in]``; None where
            this rank is no gradient worker.
        arrive: Called for a block before its second-order data is used.

    Returns:
        The directions of these blocks.
    """
    backend = placed.backend
    results: dict[Block, Tensor] = {}
    parcels: list[tuple[Block, Parcel]] = []
    sharded: dict[Block, _Whole] = {}
    batches = _Batches(damping, arrive)

    def mine(block: Block, place: BlockPlacement) -> Tensor | None:
        return gradients.get(block) if backend.rank in place.gradient_workers else None

    for block, place in placed:
        if not block.active:
            continue
        if block.shards:
            if block in gradients:  # else on no rank
                sharded[block] = _Whole(block, batches.join(block, place, mine(block, place)))
            continue
        spec = (TensorSpec(tuple(block.shape)),)
        joined = batches.join(block, place, mine(block, place))
        for worker in place.gradient_workers:
            group = exchange_group(worker, place.sources)
            parcel = Parcel(worker, group, specs=spec, dtype=block.dtype, device=block.device)
            if worker == backend.rank and joined is not None:
                parcel.made_by(functools.partial(joined.result, block))
            parcels.append((block, parcel))
    # What stays here may be made in any order: the largest last, whose solving takes the longest.
    order = sorted((p for _, p in parcels), key=lambda p: 0 if p.travels else p.numel)
    with backend.phases("direct"):
        deliver(backend, order, "exchange", fused=backend.fused)
    for block, parcel in parcels:
        if backend.rank in parcel.group and parcel.tensors is not None:
            results[block] = parcel.tensors[0]
    parts = _scattered(placed, sharded)
    states: dict[Block, Mapping[str, Tensor]] = {}
    for batch in batches.made:
        states.update(batch.states)
    known = {block: results.get(block) for block in gradients}
    known.update({block: whole.matrix for block, whole in sharded.items()})
    return Directions(known, states, parts)


class _Whole:
    """The direction of a block whose parameters are shared out, made when it is first asked for.

    Attributes:
        matrix: ``[groups, out, in]``, on gradient workers once it is made.

    Args:
        block: The block.
        batch: What makes it, on gradient workers.
    """

    def __init__(self, block: Block, batch: Batch | None) -> None:
        self._block, self._batch = block, batch
        self.matrix: Tensor | None = None

    def of(self, name: str) -> Tensor:
        """Return the direction of one parameter.

        Args:
            name: Its name in the block.
        """
        if self.matrix is None:
            assert self._batch is not None
            (self.matrix,) = self._batch.result(self._block)
        return self._block.layout.unpack(self.matrix)[name]


def _scattered(
    placed: PlacedBlocks, sharded: Mapping[Block, _Whole]
) -> dict[Block, dict[str, Tensor]]:
    """Return this rank's parts of the directions of blocks whose parameters are shared out."""
    splits: dict[Block, dict[str, Split]] = {}
    for block, whole in sharded.items():
        place = placed.place(block)
        splits[block] = {
            name: Split(
                shards=shards,
                dtype=block.dtype,
                device=block.device,
                workers=place.gradient_workers,
                sources=place.sources,
                make=functools.partial(whole.of, name),
            )
            for name, shards in block.shards.items()
        }
    scatter(
        placed.backend, [s for of_block in splits.values() for s in of_block.values()], "exchange"
    )
    return {
        block: {name: split.part for name, split in of_block.items() if split.part is not None}
        for block, of_block in splits.items()
    }


@dataclass(frozen=True)
class Directions:
    """What has become of the gradients of a step.

    Attributes:
        matrices: The direction of each block that has a gradient, ``[groups, out, in]``, on its
            receivers; of blocks whose parameters are shared out on gradient workers, and None
            elsewhere.
        states: The new state of each block that this rank has made a direction of, where its method
            keeps one: to be put to use by `commit` if the step is taken.
        parts: Of blocks whose parameters are shared out this rank's parts, by parameter.
    """

    matrices: dict[Block, Tensor | None]
    states: dict[Block, Mapping[str, Tensor]]
    parts: Mapping[Block, Mapping[str, Tensor]] = field(default_factory=dict)

    @property
    def whole(self) -> dict[Block, Tensor]:
        """The directions that are written whole: clips scale no others but in parts."""
        return {
            block: matrix
            for block, matrix in self.matrices.items()
            if matrix is not None and block not in self.parts
        }

    def tensors(self, block: Block) -> list[Tensor]:
        """Return what this rank writes of a block's direction.

        Args:
            block: The block.
        """
        if block in self.parts:
            return list(self.parts[block].values())
        matrix = self.matrices[block]
        assert matrix is not None
        return [matrix]

    def write(self) -> None:
        """Write the directions into the gradients, in place."""
        for block, matrix in self.matrices.items():
            if block in self.parts:
                block.write_parts(self.parts[block])
            else:
                assert matrix is not None
                block.write(matrix)

    def commit(self) -> None:
        """Let blocks have their new states, and count the update; every rank must call."""
        for block, state in self.states.items():
            block.state.put(state)
        for block in self.matrices:
            block.state.count()


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
        states: The new states of the blocks, once they are applied.
    """

    workers: tuple[int, ...]
    damping: float
    arrive: Callable[[Block], None]
    gradients: dict[Block, Tensor] = field(default_factory=dict)
    results: dict[Block, Tensor] = field(default_factory=dict)
    states: dict[Block, Mapping[str, Tensor]] = field(default_factory=dict)

    def takes(self, block: Block, workers: tuple[int, ...]) -> bool:
        """Return whether a block may join.

        Args:
            block: The block.
            workers: Its gradient workers.
        """
        one = next(iter(self.gradients))
        return (
            self.workers == workers
            and _same_tensors(one, block)
            and (one.method, one.solver) == (block.method, block.solver)
            and one.second_order.damping == block.second_order.damping
        )

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
        gradients = list(self.gradients.values())
        gradient = gradients[0] if len(blocks) == 1 else torch.cat(gradients)
        given = Given(
            gradient=gradient,
            incoming=gradient,
            data=one.data if len(blocks) == 1 else _data_of(blocks),
            state=_state_of(blocks),
            updates=one.state.updates,
            solver=one.solver,
            damping=one.damped_with(self.damping),
        )
        direction = direction_of(one.method, given)
        groups = one.shape.groups
        self.results.update(zip(blocks, direction.matrix.split(groups), strict=True))
        if one.states:
            # A tensor that the method has left alone is the state from the first update on.
            new = {**given.state, **direction.state}
            parts = {name: tensor.chunk(len(blocks)) for name, tensor in new.items()}
            for number, block in enumerate(blocks):
                self.states[block] = {name: part[number] for name, part in parts.items()}


def _same_tensors(one: Block, other: Block) -> bool:
    """Return whether the same tensors are there of two blocks, in the same shapes."""
    return (
        one.shape == other.shape  # first, since it is what most pairs differ in
        and (one.dtype, one.device, one.tensors, one.solved)
        == (other.dtype, other.device, other.tensors, other.solved)
        and (one.state.updates, bool(one.state)) == (other.state.updates, bool(other.state))
    )


def _data_of(blocks: Sequence[Block]) -> dict[str, dict[str, Tensor]]:
    """Return the second-order data of blocks as that of one."""
    one = blocks[0]
    if not one.solved:
        return {}
    return {
        factor: {name: side_by_side(blocks, factor, name) for name in specs}
        for factor, specs in one.tensors.items()
    }


def _state_of(blocks: Sequence[Block]) -> dict[str, Tensor]:
    """Return the states of blocks as that of one: zeros before the first update."""
    one = blocks[0]
    if not one.states:
        return {}
    if not one.state:
        return {
            name: torch.zeros(
                len(blocks) * spec.shape[0], *spec.shape[1:], dtype=one.dtype, device=one.device
            )
            for name, spec in one.states.items()
        }
    states = {}
    for name in one.states:
        states[name], parts = _together([block.state[name] for block in blocks])
        for block, part in zip(blocks, parts, strict=False):
            block.state.put({name: part})
    return states


class _Batches:
    """The batches of a step.

    Attributes:
        made: All of them.

    Args:
        damping: The damping of this step.
        arrive: Called for a block before its second-order data is used.
    """

    def __init__(self, damping: float, arrive: Callable[[Block], None]) -> None:
        self._damping, self._arrive = damping, arrive
        self._open: list[Batch] = []
        self.made: list[Batch] = []

    def join(self, block: Block, place: BlockPlacement, gradient: Tensor | None) -> Batch | None:
        """Return the batch that a block joins, perhaps a new one; None without a gradient.

        Args:
            block: The block.
            place: Its place.
            gradient: Its raw gradient, where this rank is to make its direction.
        """
        if gradient is None:
            return None
        workers = place.gradient_workers
        joins = _joins(block, gradient)
        batch = next((one for one in self._open if joins and one.takes(block, workers)), None)
        if batch is None:
            batch = Batch(workers, self._damping, self._arrive)
            self.made.append(batch)
            if joins:
                self._open.append(batch)
        batch.gradients[block] = gradient
        return batch


def _joins(block: Block, gradient: Tensor) -> bool:
    """Return whether a block is applied together with others of its shape."""
    groups, out, into = block.shape
    if block.device.type == "cpu":
        work = out * into * max(out, into)  # of the larger product
        if out * into > SMALL or (groups == 1 and products.serves(gradient, work)):
            return False
    if block.unsolved:
        return False  # running factors, which others change, stay where they are
    specs = [spec for tensors in block.tensors.values() for spec in tensors.values()]
    specs += block.states.values()
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
    whole, parts = _together([block.second_order[factor][name] for block in blocks])
    for block, part in zip(blocks, parts, strict=False):
        block.second_order.change(factor, {name: part})
    return whole


def _together(tensors: Sequence[Tensor]) -> tuple[Tensor, Sequence[Tensor]]:
    """Return tensors as one, and their parts of it where it is a copy; else none."""
    first, size = tensors[0], tensors[0].numel()
    base, begin = first.untyped_storage().data_ptr(), first.storage_offset()
    if all(
        tensor.untyped_storage().data_ptr() == base
        and tensor.storage_offset() == begin + number * size
        and tensor.is_contiguous()
        for number, tensor in enumerate(tensors)
    ):
        shape = (len(tensors) * len(first), *first.shape[1:])
        return first.as_strided(shape, first.stride(), begin), ()
    whole = torch.cat(list(tensors))
    return whole, whole.split(len(first))
