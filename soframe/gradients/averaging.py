"""The raw gradients of a step: averaged over ranks already, or still each rank's own.

Where DistributedDataParallel averages gradients on every rank and one rank then preconditions and
sends its result, the average has travelled for nothing. With *local* gradients each rank comes with
those of its own samples. Those of a block with one gradient worker are added up on that rank alone
(together a reduce-scatter by ownership); what it sends after preconditioning (together an
all-gather) is all that the others get. The two carry what DDP's all-reduce carries. All other
gradients, of parameters without a block, of blocks with several gradient workers and of blocks that
are not solved yet, are averaged on all ranks, in fused buffers.

Where parameters are shared out (`soframe.GradientHome.shards`), every rank has a part of each
averaged gradient. The parts of a block's go to its gradient workers, and to nobody else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from soframe.blocks.block import Block
from soframe.blocks.home import GradientHome
from soframe.blocks.placed import PlacedBlocks
from soframe.comm.agreement import add_up
from soframe.comm.base import Backend, Handle
from soframe.comm.shards import Split, gather
from soframe.strategies.buckets import fill


class AveragedGradients:
    """Gradients that are the same on every rank: each of them knows all.

    Args:
        model: The model.
        placed: Its blocks, with their places.
        home: Where gradients live.
    """

    def __init__(self, model: nn.Module, placed: PlacedBlocks, home: GradientHome) -> None:
        self._backend, self._home = placed.backend, home
        self._present: Sequence[float] = ()
        self._placed = dict(placed)
        self._of_block = {block: list(block.parameters.values()) for block in placed.blocks}
        self._remembering = [
            block
            for block in placed.blocks
            if block.states or len(block.captured) < len(block.factors)
        ]
        covered = {p for own in self._of_block.values() for p in own}
        self._rest = [p for p in model.parameters() if p not in covered]

    def check(self) -> None:
        """Raise if this rank's gradients are not complete, or none that can be averaged.

        Raises:
            RuntimeError: If their home does not have them yet.
        """
        why = self._home.incomplete(p for own in self._of_block.values() for p in own)
        if why is not None:
            raise RuntimeError(why)

    def alike(self) -> tuple[str, ...]:
        """Return what all ranks must have alike: which blocks with a memory have gradients.

        States, and averages of averaged gradients, would fall apart if some ranks let them go on
        and others did not.
        """
        return tuple(block.name for block in self._remembering if block.has_gradient)

    def present(self) -> list[float]:
        """Return what the ranks have to add up, and pass to `agree`, before they call `raw`."""
        return []

    def none_present(self) -> list[float]:
        """Return what `present` would if there were no gradient, without a look at any."""
        return []

    def agree(self, present: Sequence[float]) -> None:
        """Take note of what ranks have.

        Args:
            present: The added-up `present` of all ranks.
        """
        self._present = present

    def raw(self) -> dict[Block, Tensor | None]:
        """Return the raw gradients of the blocks that are solved and have any.

        Returns:
            ``[groups, out, in]``, at least on the gradient workers; None where it is not known.
        """
        return self.now()

    def later(self, block: Block) -> Tensor | None:
        """Return the gradient of a block that was not active when `raw` was called.

        Args:
            block: The block.

        Returns:
            ``[groups, out, in]``; None where there is none.
        """
        return block.gradient()

    def now(self) -> dict[Block, Tensor | None]:
        """Return what their home holds for the blocks that are solved and have any gradient."""
        held = ((block, block.gradient()) for block in self._placed if block.active)
        return {block: gradient for block, gradient in held if gradient is not None}

    def spoken_for(self, blocks: Collection[Block]) -> list[Block]:
        """Return the blocks whose gradients this rank counts in what `total` adds up.

        Args:
            blocks: Blocks with a raw gradient.
        """
        return list(blocks)

    def _led(self, blocks: Collection[Block]) -> list[Block]:
        rank = self._backend.rank
        return [block for block in blocks if self._placed[block].gradient_workers[0] == rank]

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of a scalar over ranks, each of which speaks for its blocks.

        Args:
            tensor: This rank's.
        """
        return tensor

    def counted(self, blocks: Collection[Block]) -> list[Block]:
        """Return the blocks whose directions this rank counts in what `total_of_directions` adds.

        Args:
            blocks: Blocks with a direction.
        """
        return list(blocks)

    def total_of_directions(self, tensor: Tensor) -> Tensor:
        """Return the sum of a scalar over ranks, each of which counts its blocks' directions.

        Args:
            tensor: This rank's: of all directions, where every rank has them all.
        """
        return tensor


class LocalGradients(AveragedGradients):
    """Gradients that are each rank's own: averaged here, each where it is needed."""

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [*(p for own in self._of_block.values() for p in own), *self._rest]

    def check(self) -> None:
        """See `AveragedGradients.check`.

        Raises:
            TypeError: If a gradient is sparse.
        """
        super().check()
        if any(map(self._home.is_sparse, self._parameters)):
            raise TypeError("gradients='local' needs dense gradients: build with sparse=False")

    def alike(self) -> tuple[str, ...]:
        """See `AveragedGradients.alike`: nothing, since ranks agree on what any of them has."""
        return ()

    def present(self) -> list[float]:
        """Return for every parameter whether this rank has its gradient."""
        return [float(self._home.has(p)) for p in self._parameters]

    def none_present(self) -> list[float]:
        """See `AveragedGradients.none_present`."""
        return [0.0] * len(self._parameters)

    def raw(self) -> dict[Block, Tensor | None]:
        """Average every gradient that any rank has; on ranks without it counts as zero.

        Returns:
            See `AveragedGradients.raw`: the means, on the gradient workers. All gradients of other
            parameters and of blocks that are not solved yet are averaged in place.
        """
        known = set()
        for parameter, ranks in zip(self._parameters, self._present, strict=True):
            if ranks > 0:
                known.add(parameter)
                self._home.fill(parameter)
        everywhere = [p for p in self._rest if p in known]
        to_direct: dict[Block, Tensor | None] = {}
        sums: list[tuple[int | None, Tensor]] = []
        for block, place in self._placed.items():
            known_parameters = [p for p in self._of_block[block] if p in known]
            if not block.active:
                everywhere += known_parameters
            elif known_parameters:
                matrix = block.gradient()
                assert matrix is not None
                workers = place.gradient_workers
                sums.append((workers[0] if len(workers) == 1 else None, matrix))
                to_direct[block] = matrix if self._backend.rank in workers else None
        sums += [(None, gradient) for gradient in self._home.of(everywhere)]
        _average(self._backend, sums)
        return to_direct

    def spoken_for(self, blocks: Collection[Block]) -> list[Block]:
        """See `AveragedGradients.spoken_for`: those whose first gradient worker this rank is."""
        return self._led(blocks)

    def total(self, tensor: Tensor) -> Tensor:
        """See `AveragedGradients.total`."""
        return add_up(self._backend, tensor)


def _average(backend: Backend, sums: Sequence[tuple[int | None, Tensor]]) -> None:
    """Replace tensors by their means over ranks, on one rank each or on all (None)."""
    if backend.world_size == 1:
        return
    with backend.phases("average"):
        _mean(backend, sums)


def _mean(backend: Backend, sums: Sequence[tuple[int | None, Tensor]]) -> None:
    everyone = tuple(range(backend.world_size))
    routes = []
    for to, tensor in sums:
        where = "owners" if backend.fused and to is not None else to
        size = tensor.numel() * tensor.element_size()
        routes.append(((where, tensor.dtype, tensor.device), size))
    under_way: list[tuple[Handle, Tensor, list[tuple[int | None, Tensor]]]] = []
    for bucket in fill(routes):
        parts = [sums[index] for index in bucket]
        destination = parts[0][0]
        parts.sort(key=lambda part: part[0] or 0)
        flat = torch.cat([tensor.flatten() for _, tensor in parts])
        flat = flat.to(backend.wire_device(flat.device))
        if destination is None:
            handle = backend.all_reduce(flat, "gradients")
        elif all(to == destination for to, _ in parts):
            handle = backend.reduce(flat, destination, everyone, "gradients")
        else:
            shares = [sum(t.numel() for to, t in parts if to == rank) for rank in everyone]
            handle = backend.reduce_scatter(flat, shares, "gradients")
        under_way.append((handle, flat, parts))
    for handle, flat, parts in under_way:
        handle.wait()
        means = flat.split([tensor.numel() for _, tensor in parts])
        for (to, tensor), mean in zip(parts, means, strict=True):
            if to in (None, backend.rank):
                tensor.copy_(mean.view_as(tensor)).div_(backend.world_size)


class ShardedGradients(AveragedGradients):
    """Averaged gradients of which every rank has a part, and the gradient workers are to have all.

    A direction, too, is known whole to gradient workers alone.
    """

    def alike(self) -> tuple[str, ...]:
        """See `AveragedGradients.alike`: all blocks, since ranks exchange what they have of each.

        Returns:
            The names of the blocks that have gradients.
        """
        partial, names = self._home.is_partial, []
        for block, own in self._of_block.items():
            if block.has_gradient:
                names.append(block.name)
                names += [f"{block.name}, a sum over ranks" for p in own if partial(p)]
        return tuple(names)

    def raw(self) -> dict[Block, Tensor | None]:
        """Bring the parts of every gradient to its gradient workers.

        Returns:
            See `AveragedGradients.raw`; of blocks that are not solved yet, too.
        """
        raw: dict[Block, Tensor | None] = {}
        splits: dict[Block, dict[str, Split]] = {}
        for block, place in self._placed.items():
            if not block.has_gradient:
                continue
            for parameter in self._of_block[block]:
                if self._home.is_partial(parameter):
                    self._home.settle(parameter)
            raw[block] = None if block.shards else block.gradient()
            if block.shards:
                parts = block.parts()
                splits[block] = {
                    name: Split(
                        shards=shards,
                        dtype=getattr(torch, shards.dtype),
                        device=block.device,
                        workers=place.gradient_workers,
                        part=parts[name],
                    )
                    for name, shards in block.shards.items()
                }
        gather(
            self._backend, [s for by_name in splits.values() for s in by_name.values()], "gradients"
        )
        for block, by_name in splits.items():
            wholes = {name: split.whole for name, split in by_name.items()}
            if self._backend.rank in self._placed[block].gradient_workers:
                raw[block] = block.assemble({n: w for n, w in wholes.items() if w is not None})
        return raw

    def now(self) -> dict[Block, Tensor | None]:
        """See `AveragedGradients.now`: brought together as by `raw`; every rank must call."""
        return {block: gradient for block, gradient in self.raw().items() if block.active}

    def later(self, block: Block) -> Tensor | None:
        """See `AveragedGradients.later`: None, since `raw` has all."""
        return None

    def spoken_for(self, blocks: Collection[Block]) -> list[Block]:
        """See `AveragedGradients.spoken_for`: those whose first gradient worker this rank is."""
        return self._led(blocks)

    def total(self, tensor: Tensor) -> Tensor:
        """See `AveragedGradients.total`."""
        return add_up(self._backend, tensor)

    def counted(self, blocks: Collection[Block]) -> list[Block]:
        """See `AveragedGradients.counted`: likewise."""
        return self._led(blocks)

    def total_of_directions(self, tensor: Tensor) -> Tensor:
        """See `AveragedGradients.total_of_directions`."""
        return add_up(self._backend, tensor)


def source_of(
    gradients: str, model: nn.Module, placed: PlacedBlocks, home: GradientHome
) -> AveragedGradients:
    """Return where the raw gradients of a step come from.

    Args:
        gradients: What they are when it begins, one of `GRADIENTS`.
        model: The model.
        placed: Its blocks, with their places.
        home: Where gradients live.
    """
    if any(block.shards for block in placed.blocks):
        return ShardedGradients(model, placed, home)
    return GRADIENTS[gradients](model, placed, home)


GRADIENTS = {"averaged": AveragedGradients, "local": LocalGradients}
"""What gradients may be when a step begins."""
