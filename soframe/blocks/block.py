"""Blocks, and stacks: blocks that are alike, as one batch of matrices; `PlacedBlocks` has all.

A block has its numbers (`Record`), its slices of the tensors of a stack, and its gradients.

Blocks of the same matrix shape, factors, method, solver, dtype and place form a stack. It keeps one
tensor for each accumulator, factor, second-order datum and method state, with the groups of all its
blocks side by side: a tensor ``[g, ...]`` of one block is a slice of the stack's ``[blocks * g,
...]``. Blocks of an elementwise method need not be alike in shape: several of them are one vector,
``[entries, 1, 1]``. Each phase of the step is then one batched call for a stack, or for some of its
blocks (*members*, ascending indices). Numbers that differ by block are in `Record`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter

import torch
from torch import Tensor, nn

from soframe.blocks.arrangement import Arrangement, Members
from soframe.blocks.spec import BlockSpec
from soframe.comm.base import Backend
from soframe.comm.fused import Pending
from soframe.comm.packing import pack_triangle, packed_diagonal, unpack_triangle
from soframe.kernels.devices import on_device, on_host
from soframe.kernels.gram import mirror
from soframe.kernels.halves import dithered
from soframe.methods.base import Method
from soframe.specs import VALUE, FactorSpec, SecondOrder, State
from soframe.strategies.placement import Placement
from soframe.strategies.work import BlockPlacement

log = logging.getLogger("soframe")

_IS_TRAINED, _OBSERVES = attrgetter("requires_grad"), attrgetter("like.observes")
# Blocks that differ in one of these are updated by calls of their own.
_STATUS = attrgetter("record.updates", "record.damping", "record.solved", "acting")


@dataclass
class Record:
    """The numbers of one block, the same on every rank."""

    # By factor with statistics, for all groups or each: the EMA weight, 1 without start-up bias.
    masses: dict[str, tuple[float, ...]] = field(default_factory=dict)
    pending: float = 0.0  # the part of the weight that is still in the ranks' accumulators
    updates: int = 0
    solved: bool = False  # whether gradient workers have second-order data of all factors
    failures: Counter[str] = field(default_factory=Counter)  # of solves, by factor
    failed: bool = False  # whether a solve failed since the last snapshot
    damping: float | None = None  # the block's own; None for the preconditioner's
    statistics_at: dict[str, int] = field(default_factory=dict)  # factor -> step of the last ones
    solved_at: dict[str, int] = field(default_factory=dict)  # factor -> step of the solved average
    # 1 if it was not used at its last turn for statistics, 2 if it was used since: see `Refresh`.
    missed: int = 0


@dataclass(frozen=True)
class Solved:
    """Data and damping of a block on this rank; see `soframe.Preconditioner.snapshot`.

    Attributes:
        data: Second-order data: factor -> tensor name -> tensor.
        damping: The block's own damping; None for the preconditioner's.
        failed: Whether a factor could not be solved since the last snapshot.
    """

    data: Mapping[str, Mapping[str, Tensor]]
    damping: float | None
    failed: bool


@dataclass(eq=False)
class Block(BlockSpec):
    """A block with its state: numbers, tensors and gradients."""

    record: Record = field(default_factory=Record, repr=False)  # its numbers
    member: int = 0  # its index in its stack
    # Computes the updates: the method, or with the settings of a param group.
    acting: Method = field(init=False, repr=False)
    stack: Stack = field(init=False, repr=False)  # keeps its tensors, once it has a place

    def __post_init__(self) -> None:
        self.acting = self.method

    # -- state ------------------------------------------------------------------------------------

    @property
    def running(self) -> RunningFactors:
        """The running factors that this rank holds."""
        masses = self.record.masses
        return RunningFactors(self, [name for name in self.stack.factors if name in masses])

    @property
    def second_order(self) -> SecondOrder:
        """The second-order data that this rank holds: factor -> tensor name -> tensor."""
        return self.stack.second_order_of((self.member,)) if self.record.solved else {}

    @property
    def state(self) -> State:
        """The method's state, on gradient workers; empty on ranks that hold none."""
        if not self.record.updates:
            return {}
        tensors = self.stack.take_each(self.stack.state, (self.member,))
        return {name: tensor.view(self.states[name].shape) for name, tensor in tensors.items()}

    @cached_property
    def captured_names(self) -> frozenset[str]:
        """The names of the factors with statistics of calls."""
        return frozenset(factor.name for factor in self.captured)

    @cached_property
    def needing_data(self) -> frozenset[str]:
        """The captured factors whose statistics are computed with second-order data, by name."""
        return frozenset(factor.name for factor in self.captured if factor.needs)

    @cached_property
    def dependents(self) -> list[str]:
        """The names of the factors whose statistics are computed with data of solved factors."""
        solved = self.tensors.keys()
        return [factor.name for factor in self.factors if not solved.isdisjoint(factor.needs)]

    @cached_property
    def rebases(self) -> bool:
        """Whether states are kept in the basis of second-order data."""
        return self.method.rebases

    @cached_property
    def solvers_text(self) -> str:
        """The text of `solvers`: blocks with equal texts split their damping alike."""
        return repr(self.solvers)

    @property
    def identity(self) -> tuple[int, str]:
        """The module and the part of it: the same after the module was moved within the model."""
        part = self.helpers[0].part if self.helpers else " ".join(self.parameters)
        return id(self.layout.module), part

    @property
    def mass(self) -> float:
        """The EMA weight of the first factor that needs no data; 1 for a block without factors."""
        if not self.factors:
            return 1.0
        return max(self.record.masses.get(self.leading, (0.0,)))

    @property
    def is_overdue(self) -> bool:
        """Whether statistics of a gradient are taken at any step: the first, or ones missed."""
        return self.mass == 0 or (self.record.missed > 0 and not self.captured)

    @property
    def has_factor_to_begin(self) -> bool:
        """Whether a factor without statistics could take its first ones now."""
        return not self.needing_data <= self.record.masses.keys() and self.solved

    def gatherable(self, *, late: bool = False) -> frozenset[str]:
        """Return the factors that can take statistics: some need second-order data for that.

        ``late`` means that the data are there, and these factors take statistics a window later.
        """
        if self.needing_data and (late or not self.solved):
            return self.captured_names - self.needing_data
        return self.captured_names

    def damped_with(self, damping: float) -> float:
        """Return the block's damping, given the preconditioner's."""
        return damping if self.record.damping is None else self.record.damping

    def damp(self, damping: float | None) -> None:
        """Damp the block with a damping of its own; None for the preconditioner's."""
        self.record.damping = damping

    def act(self, method: Method) -> None:
        """Compute updates by the method with other settings from now on."""
        self.acting = method

    def snapshot(self) -> Solved:
        """Return the second-order data and the damping, and begin to note failures anew."""
        failed, self.record.failed = self.record.failed, False
        return Solved(dict(self.second_order), self.record.damping, failed)

    def restore(self, solved: Solved) -> None:
        """Restore the second-order data and the damping of a snapshot."""
        for factor, tensors in solved.data.items():
            self.stack.set_second_order(factor, (self.member,), tensors)
        self.record.damping = solved.damping

    @property
    def solved(self) -> bool:
        """Whether the gradient workers have second-order data for every factor that is solved."""
        return self.record.solved or not self.tensors

    @property
    def has_lost_data(self) -> bool:
        """Whether statistics need second-order data that the block had once and has lost."""
        if not self.method.observes_with_data or self.solved or self.record.failed:
            return False
        return any(f.name in self.record.masses for f in self.factors if not f.captured)

    @property
    def active(self) -> bool:
        """Whether the method already computes an update from the block's gradient."""
        return self.solved or self.method.starts_at_once

    @property
    def frozen(self) -> bool:
        """Whether no parameter of the block is trained."""
        return not any(map(_IS_TRAINED, self.parameters.values()))

    @property
    def rests(self) -> bool:
        """Whether it is frozen, and its solve has had the last statistics from before that."""
        if not self.frozen:
            return False
        at = self.record.statistics_at
        return all(at.get(name, step) <= step for name, step in self.record.solved_at.items())

    @property
    def has_gradient(self) -> bool:
        """Whether any parameter of the block has a gradient."""
        return bool(self.home.of(self.parameters.values()))

    def gradient(self) -> Tensor:
        """Return the gradient ``[groups, out, in]`` in the factors' dtype, with zeros for None."""
        assert not self.shards, "the gradient is in parts, which have to be gathered first"
        return self.layout.pack(self.parts()).to(self.dtype)

    def parts(self) -> dict[str, Tensor]:
        """Return this rank's part of each gradient by name, in the shape of the home's `local`."""
        parameters = list(self.parameters.values())
        parts: dict[str, Tensor] = {}
        for name, gradient in zip(self.parameters, self.home.each(parameters), strict=True):
            if gradient is not None:
                parts[name] = gradient
            else:
                parts[name] = torch.zeros_like(self.home.local(self.parameters[name]))
        return parts

    def assemble(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Pack whole gradients into ``[groups, out, in]``, in the factors' dtype.

        A whole gradient has the elements of its parameter, in any shape.
        """
        tensors: dict[str, Tensor] = {}
        for name, gradient in gradients.items():
            tensors[name] = gradient.reshape(self.parameters[name].shape)
        return self.layout.pack(tensors).to(self.dtype)


class Stack(Arrangement[Block]):
    """The tensors of blocks that are alike, as this rank holds them.

    Second-order data and states are replaced, never changed in place: a reference to former ones
    stays valid. Factors and accumulators change in place.
    """

    def __init__(
        self, blocks: Sequence[Block], places: Sequence[BlockPlacement], held: Sequence[bool] = ()
    ) -> None:
        super().__init__(blocks)
        self.places, self.place = tuple(places), places[0]  # they differ in owners alone
        self.held = held  # by factor, whether this rank holds the running one
        self._factors: dict[str, Tensor] = {}
        self.lower: set[str] = set()  # factors that are valid in the lower triangle alone
        self.accumulators: dict[str, Tensor] = {}  # deferred statistics, packed
        self.data: dict[str, dict[str, Tensor]] = {}  # factor -> tensor name -> tensor
        self.state: dict[str, Tensor] = {}
        self.pending: list[Pending] = []  # reductions that end before factors are next read
        # The specs of statistics of gradients, by the shape of the gradient.
        self.specs: dict[torch.Size, tuple[FactorSpec, ...]] = {}
        for index, block in enumerate(self.blocks):
            block.stack, block.member = self, index

    def __repr__(self) -> str:
        shapes = Counter(" x ".join(map(str, block.shape)) for block in self.blocks)
        text = ", ".join(f"{number} x {shape}" for shape, number in shapes.items())
        return f"Stack({text}, {self.like.method!r})"

    def clear(self) -> None:
        """Drop all tensors, once pending collectives have finished."""
        self.arrive()
        self.lower.clear()
        for tensors in (self.factors, self.accumulators, self.data, self.state):
            tensors.clear()

    def used(self) -> tuple[int, ...]:
        """Return the blocks with a gradient."""
        if len(self.like.home.of(self.parameters)) == len(self.parameters):
            return self.all
        return tuple(i for i, block in enumerate(self.blocks) if block.has_gradient)

    def alike(self, members: Members) -> list[tuple[int, ...]]:
        """Return sets of blocks in the same state; a method is called once for each set."""
        statuses = list(map(_STATUS, self.blocks_of(members)))
        unsolved = self.like.unsolved
        if members and not unsolved and statuses.count(statuses[0]) == len(statuses):
            return [tuple(members)]
        same: dict[tuple[object, ...], list[int]] = {}
        for member, status in zip(members, statuses, strict=True):
            masses = self.blocks[member].record.masses
            known = tuple([factor.name in masses for factor in unsolved])
            same.setdefault((status[:-1], known, id(status[-1])), []).append(member)
        return list(map(tuple, same.values()))

    # -- running factors --------------------------------------------------------------------------

    def arrive(self) -> None:
        """Wait for the pending reductions of statistics."""
        arriving, self.pending = self.pending, []
        for pending in arriving:
            pending.wait()

    @property
    def factors(self) -> dict[str, Tensor]:
        """The running factors of all blocks as they are stored, after pending reductions.

        Offloaded ones are on the host, and read by `stored_factor` alone: a copy may be under way.
        """
        if self.pending:
            self.arrive()
        return self._factors

    def stored_factor(self, name: str) -> Tensor:
        """Return a running factor of all blocks as it is stored, on their device."""
        if self.pending:
            self.arrive()
        stored = self._factors[name]
        return on_device(stored, self.like.device) if self.like.offload else stored

    def store_factor(self, name: str, factor: Tensor, *, lower: bool = False) -> None:
        """Store a running factor of all blocks, on the host if it is offloaded.

        With ``lower`` its matrices are valid in the lower triangle alone.
        """
        self._factors[name] = on_host(factor) if self.like.offload else factor
        self.lower.discard(name)
        if lower:
            self.lower.add(name)

    def factor(self, name: str) -> Tensor:
        """Return a running factor of all blocks as `stored_factor` does, with both triangles."""
        running = self.stored_factor(name)
        if name in self.lower:
            self.store_factor(name, mirror(running))
        return running

    def matrices(self, factor: FactorSpec, members: Members, *, lower: bool = False) -> Tensor:
        """Return a running factor of some blocks, ``[groups, n, n]`` or its own shape.

        With ``lower`` the entries above the diagonals of matrices may be undefined.
        """
        stored = self.stored_factor(factor.name) if lower else self.factor(factor.name)
        return unpack(self.take(stored, members), factor).to(self.like.dtype)

    def diagonals(self, factor: FactorSpec, members: Members) -> Tensor:
        """Return the diagonals of a factor, ``[groups, n]``; all entries if it is no matrix."""
        stored = self.take(self.stored_factor(factor.name), members)
        if factor.kind != "psd":
            return stored.flatten(1)
        if stored.dim() == 3:
            return stored.diagonal(dim1=-2, dim2=-1)
        return packed_diagonal(stored, factor.size)

    def rounded(self, factor: Tensor, name: str, blocks: int, turn: int) -> Tensor:
        """Return the running factor of some blocks in the dtype in which it is kept."""
        if factor.dtype == self.like.factor_dtype:
            return factor
        if name in self.like.psd and factor.dim() == 3:
            # As triangles, in which some placements keep them: all round alike.
            triangles = self.rounded(pack_triangle(factor), name, blocks, turn)
            return unpack_triangle(triangles, factor.shape[-1])
        return dithered(factor, self.like.factor_dtype, factor.numel() // blocks, turn)

    def set_factor(self, name: str, members: Members, stored: Tensor, turn: int = 0) -> None:
        """Store the running factor of some blocks, as the placement stores it."""
        stored = self.rounded(stored, name, len(members), turn)
        if len(members) == len(self.blocks):
            self.store_factor(name, stored)
            return
        if name in self.factors:
            running = self.factor(name)
        else:
            running = self.empty(tuple(stored.shape), len(members), stored.dtype)
        self.put(running, members, stored)
        self.store_factor(name, running)

    # -- second-order data ------------------------------------------------------------------------

    def data_of(self, members: Members) -> dict[str, dict[str, Tensor]]:
        """Return second-order data of some blocks, all solved or none, for `Method.direct`."""
        block = self.blocks[members[0]]
        data = self.second_order_of(members) if block.solved else {}
        for factor in block.unsolved:
            if factor.name in block.record.masses and factor.name in self.factors:
                data[factor.name] = {VALUE: self.matrices(factor, members)}
        return data

    def second_order_of(self, members: Members) -> dict[str, dict[str, Tensor]]:
        """Return the second-order data of some blocks, all of them solved."""
        return {factor: self.take_each(tensors, members) for factor, tensors in self.data.items()}

    def set_second_order(
        self, factor: str, members: Members, tensors: Mapping[str, Tensor]
    ) -> None:
        """Replace second-order data of a factor of some blocks."""
        old = self.data.get(factor, {})
        new = {n: self.with_values(old.get(n), members, t) for n, t in tensors.items()}
        self.data[factor] = {**old, **new}

    def fill(self, tensors: dict[str, Tensor], name: str, member: int, values: Tensor) -> None:
        """Store the values of one block in a tensor of the stack, which is allocated if needed."""
        if len(self.blocks) == 1:
            tensors[name] = values
            return
        if self._flat:
            values = values.reshape(-1, 1, 1)
        if name not in tensors:
            tensors[name] = self.empty(tuple(values.shape), dtype=values.dtype)
        self.put(tensors[name], (member,), values)

    def state_of(self, members: Members) -> dict[str, Tensor]:
        """Return the states of some blocks, zeros at first, as updates are computed with them."""
        like, dtype = self.like, self.like.dtype
        # The stack has no state tensors before the first update.
        if not self.blocks[members[0]].record.updates:
            states: dict[str, Tensor] = {}
            for name, spec in like.states.items():
                shape = (len(members) * spec.shape[0], *spec.shape[1:])
                if self._flat:
                    shape = self.shape_of(members)
                states[name] = torch.zeros(shape, dtype=dtype, device=like.device)
            return states
        return {name: t.to(dtype) for name, t in self.take_each(self.state, members).items()}

    def set_state(
        self, members: Members, tensors: Mapping[str, Tensor], turn: int | None = None
    ) -> None:
        """Replace the states of some blocks; of a turn they are rounded by `dithered`."""
        for name, tensor in tensors.items():
            kept = tensor.to(self.like.state_dtype)
            if turn is not None and kept.dtype != tensor.dtype:
                # Alike for a block in any stack.
                if self._flat:
                    parts = self.split(tensor, members)
                    kept = self.join([dithered(p, kept.dtype, p.numel(), turn) for p in parts])
                else:
                    kept = dithered(tensor, kept.dtype, tensor.numel() // len(members), turn)
            self.state[name] = self.with_values(self.state.get(name), members, kept)


@dataclass(eq=False)
class PlacedBlocks:
    """The blocks of a model, their placement on ranks, and the backend that sends their tensors.

    Iterate for pairs of block and place.
    """

    blocks: Sequence[Block]
    placement: Placement  # the owner, gradient workers and receivers of each block
    backend: Backend  # the collectives between them
    errors: list[Exception] = field(default_factory=list, repr=False)  # the first of this rank

    def __post_init__(self) -> None:
        self.rank = self.backend.rank  # this rank
        self._pairs = tuple(zip(self.blocks, self.placement.blocks, strict=True))
        stacks: list[Stack] = []
        for members in self.placement.stacks:
            blocks = [self.blocks[index] for index in members]
            places = [self.placement.blocks[index] for index in members]
            stacks.append(Stack(blocks, places, places[0].held_by(self.rank)))
        self.stacks = tuple(stacks)  # the blocks that are alike, batched
        # Those with factors of averaged gradients.
        self.observing = tuple(filter(_OBSERVES, stacks))
        self.captured = tuple(b for b in self.blocks if b.captured)  # with statistics of calls
        self.solvable = tuple(b for b in self.blocks if b.tensors)  # with solved factors

    @cached_property
    def is_apart(self) -> bool:
        """Whether the model has several ranks, or sharded parameters."""
        return self.backend.world_size > 1 or any(stack.like.shards for stack in self.stacks)

    def __iter__(self) -> Iterator[tuple[Block, BlockPlacement]]:
        return iter(self._pairs)

    def trained(self) -> PlacedBlocks:
        """Return the blocks that are trained, within the stacks of all; all if none is."""
        trained = copy(self)
        pairs = tuple([(block, place) for block, place in self if not block.frozen])
        if pairs:
            trained._pairs = pairs
        trained.blocks = [block for block, _ in trained._pairs]
        return trained

    def members(self, blocks: Sequence[Block]) -> dict[Stack, tuple[int, ...]]:
        """Return the stacks of some blocks, in the order of all stacks, with their members."""
        chosen = set(blocks)
        members_of: dict[Stack, tuple[int, ...]] = {}
        for stack in self.stacks:
            members = tuple([i for i, block in enumerate(stack.blocks) if block in chosen])
            if members:
                members_of[stack] = members
        return members_of

    def keep(self, error: Exception, stack: Stack) -> None:
        """Raise an error of the middle of a step; with other ranks keep it: they go on."""
        if self.backend.alone:
            raise error
        if not self.errors:
            names = ", ".join(block.name for block in stack.blocks)
            error.add_note(
                f"in the step before, of {names}: weights may differ between ranks since, so load "
                f"the last checkpoint"
            )
            # Now too, since no status follows the last step.
            log.error("soframe: rank %d", self.rank, exc_info=error)
            self.errors.append(error)


class RunningFactors(Mapping[str, Tensor]):
    """The running factors of a block that this rank holds, as they are stored, by name."""

    def __init__(self, block: Block, names: Collection[str]) -> None:
        self._block, self._names = block, names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        block, stack = self._block, self._block.stack
        return stack.take(stack.factor(name), (block.member,)).to(block.dtype)

    def matrix(self, factor: FactorSpec) -> Tensor:
        """Return a factor as whole matrices, ``[groups, n, n]``, or in its own shape."""
        return unpack(self[factor.name], factor)


def unpack(stored: Tensor, spec: FactorSpec) -> Tensor:
    """Return a factor in its own shape, from either way of storage."""
    if spec.kind == "psd" and stored.dim() == 2:
        return unpack_triangle(stored, spec.size)
    return stored


def factor_dtype(parameters: Sequence[nn.Parameter], dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype in which factors are solved: ``dtype``, or the parameters', of 32 bits."""
    if dtype is not None and dtype.itemsize >= 4:
        return dtype
    return torch.promote_types(parameters[0].dtype.to_real(), torch.float32)
