"""The gradients of a step, averaged over ranks and gathered into the stacks' matrices.

If DistributedDataParallel averages gradients on every rank, and one rank then preconditions and
sends its result, the other ranks receive the average in vain. With *local* gradients each rank
starts from the gradients of its own samples. The gradients of a stack with one gradient worker are
reduced to that rank alone (together a reduce-scatter by ownership); the other ranks receive only
its updates (together an all-gather). The two send as many bytes as DDP's all-reduce. All other
gradients, of parameters without a block, of blocks with several gradient workers and of blocks that
are not solved yet, are averaged on all ranks, in fused buffers.

If parameters are sharded (`soframe.GradientHome.shards`), every rank has a part of each averaged
gradient, and the parts are sent to the gradient workers alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor, nn

from soframe.blocks.block import Block, PlacedBlocks, Stack
from soframe.blocks.home import GradientHome
from soframe.comm.base import Backend, Handle
from soframe.comm.shards import Split, gather
from soframe.strategies.buckets import in_buckets


@dataclass(frozen=True)
class Gradient:
    """The averaged gradient of the blocks of a stack that have one."""

    members: tuple[int, ...]  # the blocks, the same on every rank
    # ``[groups, out, in]`` in the factors' dtype, or ``[entries, 1, 1]`` of an elementwise method;
    # None if this rank does not have it.
    matrix: Tensor | None

    def of(self, stack: Stack, members: Sequence[int]) -> Tensor | None:
        """Return the gradient of some of the blocks."""
        if self.matrix is None or len(members) == len(self.members):
            return self.matrix
        matrices = dict(zip(self.members, stack.split(self.matrix, self.members), strict=True))
        return stack.join([matrices[member] for member in members])


@dataclass(frozen=True)
class _Addend:
    """A tensor that is averaged over ranks in place, on one of them, or on all for None."""

    rank: int | None
    tensor: Tensor


Gradients = Mapping[Stack, Gradient]
_SHAPE = attrgetter("shape")


class AveragedGradients:
    """Gradients that are the same on every rank."""

    divided = False  # whether a rank may lack the gradient of a stack
    updates_divided = False  # whether it may lack its update, too

    def __init__(self, model: nn.Module, placed: PlacedBlocks, home: GradientHome) -> None:
        self.backend, self._home = placed.backend, home
        # The stacks that get no update in this step: the optimizer moves their weights.
        self.left_to_optimizer: Sequence[Stack] = ()
        self._read: Gradients | None = None  # by `tensors`, for `collect`
        self._stacks = placed.stacks
        self._blocks = placed.blocks
        self._of_blocks: list[nn.Parameter] = []
        for block in placed.blocks:
            self._of_blocks += block.parameters.values()
        self._shapes = list(map(_SHAPE, self._of_blocks))
        self._remembering = [block for block in placed.blocks if block.remembers]
        self.remembers = bool(self._remembering)  # whether updates depend on earlier gradients
        covered = set(self._of_blocks)
        self._rest = [p for p in model.parameters() if p not in covered]
        self._parameters = self._of_blocks + self._rest
        # The parameters whose gradients some ranks may lack: ranks agree on them before `collect`.
        self.flagged: list[nn.Parameter] = []
        if self.backend.world_size > 1:
            for block in placed.blocks:
                if not block.remembers:
                    self.flagged += block.parameters.values()

    def check(self) -> None:
        """Raise if this rank's gradients are incomplete, or parameters have other shapes."""
        self._read = None  # of a step that raised
        if list(map(_SHAPE, self._of_blocks)) != self._shapes:
            shapes = iter(self._shapes)
            for block in self._blocks:
                for name, parameter in block.parameters.items():
                    now, then = tuple(parameter.shape), tuple(next(shapes))
                    if now != then:
                        raise ValueError(
                            f"{name} of {block.name} has the shape {now}, and had {then} when it "
                            f"was registered: put a new nn.Parameter in its place rather than "
                            f"other .data; its statistics and moments then begin anew"
                        )
        why = self._home.incomplete(self._of_blocks)
        if why is not None:
            raise RuntimeError(why)

    def alike(self) -> tuple[str, ...]:
        """Return the blocks with a state that have gradients: they must be the same on all ranks.

        States, and averages of averaged gradients, would differ if only some ranks updated them.
        """
        if self.backend.world_size == 1:
            return ()
        return tuple(block.name for block in self._remembering if block.has_gradient)

    def leave(self, stacks: Sequence[Stack]) -> None:
        """Leave the gradients of stacks to the optimizer in this step."""
        self.left_to_optimizer = stacks

    def present(self) -> list[float]:
        """Return a flag for each parameter in ``flagged``: whether this rank has its gradient."""
        return list(map(float, map(self._home.has, self.flagged)))

    def tensors(self) -> list[Tensor]:
        """Return all gradients of this rank, before `collect`, in few tensors."""
        if self.divided:  # of each parameter by itself
            return self._home.of(self._parameters)
        self._read = self.now()
        tensors: list[Tensor] = []
        for gradient in self._read.values():
            if gradient.matrix is not None:
                tensors.append(gradient.matrix)
        rest: list[nn.Parameter] = []
        for stack in self.left_to_optimizer:
            rest += stack.parameters
        return tensors + self._home.of(rest + self._rest)

    def collect(self, present: Sequence[float]) -> Gradients:
        """Average or gather the gradients, and return them for all blocks that have any.

        ``present`` are the flags of `present`, summed over ranks.
        """
        if present:
            self.fill(present)
        read, self._read = self._read, None
        return self.now() if read is None else read

    def fill(self, present: Sequence[float]) -> None:
        """Store zeros for gradients that other ranks alone have, by the sums of `present`."""
        for parameter, ranks in zip(self.flagged, present, strict=True):
            if ranks == 0:
                continue
            if not self._home.has(parameter):
                self._home.fill(parameter)
                self._read = None

    def now(self) -> dict[Stack, Gradient]:
        """Return the gradients that are in their home now."""
        used: dict[Stack, tuple[int, ...]] = {}
        for stack in self._stacks:
            if stack not in self.left_to_optimizer and (members := stack.used()):
                used[stack] = members
        matrices = _gathered(used)
        return {stack: Gradient(members, matrices[stack]) for stack, members in used.items()}


def _gathered(used: Mapping[Stack, Sequence[int]]) -> dict[Stack, Tensor]:
    """Return gradients of some blocks of each stack, see `Gradient.matrix`."""
    matrices: dict[Stack, Tensor] = {}
    targets: list[Tensor] = []
    values: list[Tensor] = []
    for stack, members in used.items():
        blocks, like = stack.blocks_of(members), stack.like
        # One block: its own matrix, without a copy.
        if len(blocks) == 1:
            matrices[stack] = stack.join([blocks[0].gradient()])
            continue
        present = like.home.of(stack.parameters)
        complete = len(present) == len(stack.parameters) and len(blocks) == len(stack.blocks)
        if complete and (flat := stack.flattened(present)) is not None:
            matrices[stack] = flat
            continue
        matrix = torch.empty(stack.shape_of(members), dtype=like.dtype, device=like.device)
        matrices[stack] = matrix
        parts, gradients = None, present
        if complete:
            parts = stack.parts(matrix)
        if parts is None:
            # Matrices of single blocks have zeros for missing gradients.
            parts = stack.split(matrix, members)
            gradients = [block.gradient() for block in blocks]
        targets += parts
        values += gradients
    if targets:
        torch._foreach_copy_(targets, values)
    return matrices


class LocalGradients(AveragedGradients):
    """Gradients of each rank's own samples: each is averaged here, on the ranks that need it."""

    divided = True

    def __init__(self, model: nn.Module, placed: PlacedBlocks, home: GradientHome) -> None:
        super().__init__(model, placed, home)
        self.flagged = self._parameters

    def check(self) -> None:
        """Raise if a gradient is sparse, too."""
        super().check()
        if any(map(self._home.is_sparse, self._parameters)):
            raise TypeError("gradients='local' needs dense gradients: build with sparse=False")

    def alike(self) -> tuple[str, ...]:
        """Return nothing: ranks agree on the gradients of any rank, see `present`."""
        return ()

    def collect(self, present: Sequence[float]) -> dict[Stack, Gradient]:
        """Average every gradient that any rank has; on ranks without it, it counts as zero.

        Gradients of other parameters and of blocks that are not solved yet are averaged in place.
        """
        self.fill(present)  # every rank must take part in the reduction
        used: dict[Stack, tuple[int, ...]] = {}
        solved: dict[Stack, tuple[int, ...]] = {}
        unsolved: dict[Stack, tuple[int, ...]] = {}
        parameters = list(self._rest)
        for stack in self._stacks:
            members = stack.used()
            blocks = stack.blocks_of(members)
            if not blocks:
                continue
            used[stack] = members
            if all(block.active for block in blocks):
                solved[stack] = members
                continue
            # Without an update to receive, every rank needs the averaged gradient itself.
            unsolved[stack] = members
            for block in blocks:
                parameters += block.parameters.values()
        averaged = _gathered(solved)
        if self.backend.world_size > 1:
            self._reduce(averaged, parameters)
        matrices = _gathered(unsolved)
        for stack, matrix in averaged.items():
            if self.backend.rank in stack.place.gradient_workers:
                matrices[stack] = matrix
        return {stack: Gradient(members, matrices.get(stack)) for stack, members in used.items()}

    def _reduce(self, matrices: Mapping[Stack, Tensor], parameters: Iterable[nn.Parameter]) -> None:
        """Average matrices for their gradient workers, and gradients of parameters, in place."""
        addends: list[_Addend] = []
        for stack, matrix in matrices.items():
            workers = stack.place.gradient_workers
            addends.append(_Addend(workers[0] if len(workers) == 1 else None, matrix))
        for gradient in self._home.of(parameters):
            addends.append(_Addend(None, gradient))
        with self.backend.phases("average"):
            _average(self.backend, addends)


def _average(backend: Backend, addends: Sequence[_Addend]) -> None:
    """Average tensors over ranks in place."""

    def route(addend: _Addend) -> tuple[Hashable, int]:
        tensor = addend.tensor
        destination: Hashable = addend.rank
        # Fused: one reduce-scatter for all owners, instead of one reduce for each.
        if backend.fused and addend.rank is not None:
            destination = "owners"
        return (destination, tensor.dtype, tensor.device), tensor.nbytes

    under_way: list[tuple[Handle, Tensor, list[_Addend]]] = []
    for bucket in in_buckets(addends, route):
        # A reduce-scatter sends contiguous shares, in the order of ranks.
        parts = sorted(bucket, key=lambda part: part.rank or 0)
        # One buffer per destination, dtype and device: few large messages.
        flat = torch.cat([part.tensor.flatten() for part in parts])
        flat = flat.to(backend.wire_device(flat.device))
        under_way.append((_started(backend, flat, parts), flat, parts))
    for handle, flat, parts in under_way:
        handle.wait()
        means = flat.split([part.tensor.numel() for part in parts])
        for part, mean in zip(parts, means, strict=True):
            if part.rank in (None, backend.rank):
                part.tensor.copy_(mean.view_as(part.tensor)).div_(backend.world_size)


def _started(backend: Backend, flat: Tensor, parts: Sequence[_Addend]) -> Handle:
    """Start the sum over ranks of one buffer, whose parts are sorted by rank."""
    first = parts[0].rank
    if first is None:
        return backend.all_reduce(flat, "gradients")
    shares = [0] * backend.world_size
    for part in parts:
        assert part.rank is not None  # of one route
        shares[part.rank] += part.tensor.numel()
    if shares[first] == len(flat):
        return backend.reduce(flat, first, tuple(range(backend.world_size)), "gradients")
    return backend.reduce_scatter(flat, shares, "gradients")


class ShardedGradients(AveragedGradients):
    """Averaged gradients with a part on every rank, gathered on the gradient workers.

    Whole updates, too, are on gradient workers only.
    """

    divided = updates_divided = True

    def alike(self) -> tuple[str, ...]:
        """Return all blocks with gradients, since ranks exchange the parts of each."""
        names: list[str] = []
        for block in self._blocks:
            if not block.has_gradient:
                continue
            names.append(block.name)
            # A partial gradient starts a reduction of its own, which all ranks must enter.
            for parameter in block.parameters.values():
                if self._home.is_partial(parameter):
                    names.append(f"{block.name}, a sum over ranks")
        return tuple(names)

    def now(self) -> dict[Stack, Gradient]:
        """Gather the present gradients, as `collect` does; every rank must call."""
        splits: dict[Block, dict[str, Split]] = {}
        every: list[Split] = []
        used: dict[Stack, tuple[int, ...]] = {}
        unsharded: dict[Stack, tuple[int, ...]] = {}
        for stack in self._stacks:
            members = stack.used()
            if members:
                used[stack] = members
                if not stack.like.shards:
                    unsharded[stack] = members
            for block in stack.blocks_of(members):
                splits[block] = self._splits(block, stack.place.gradient_workers)
                every += splits[block].values()
        gather(self.backend, every, "gradients")
        matrices = _gathered(unsharded)
        for stack, members in used.items():
            if stack.like.shards and self.backend.rank in stack.place.gradient_workers:
                matrices[stack] = _joined(stack, members, splits)
        return {stack: Gradient(members, matrices.get(stack)) for stack, members in used.items()}

    def _splits(self, block: Block, workers: tuple[int, ...]) -> dict[str, Split]:
        """Return this rank's parts of the gradients of a block, by name, if it is sharded."""
        for parameter in block.parameters.values():
            if self._home.is_partial(parameter):
                self._home.settle(parameter)
        if not block.shards:
            return {}
        parts = block.parts()
        splits: dict[str, Split] = {}
        for name, shards in block.shards.items():
            splits[name] = Split(
                shards=shards,
                dtype=getattr(torch, shards.dtype),
                device=block.device,
                workers=workers,
                part=parts[name],
            )
        return splits


def _joined(
    stack: Stack, members: Sequence[int], splits: Mapping[Block, Mapping[str, Split]]
) -> Tensor:
    """Return the gradient of some blocks from their gathered parameters; see `Gradient.matrix`."""
    matrices: list[Tensor] = []
    for block in stack.blocks_of(members):
        gradients: dict[str, Tensor] = {}
        for name, split in splits[block].items():
            if split.whole is not None:
                gradients[name] = split.whole
        matrices.append(block.assemble(gradients))  # [groups, out, in]
    return stack.join(matrices)


def source_of(
    gradients: str, model: nn.Module, placed: PlacedBlocks, home: GradientHome
) -> AveragedGradients:
    """Return the source of a step's gradients, for ``"averaged"`` or ``"local"`` ones."""
    # Sharded gradients are averaged by their framework: `require_averaged` refuses local ones.
    if any(block.shards for block in placed.blocks):
        return ShardedGradients(model, placed, home)
    return GRADIENTS[gradients](model, placed, home)


GRADIENTS = {"averaged": AveragedGradients, "local": LocalGradients}
"""The values of the setting ``gradients``."""
