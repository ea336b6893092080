"""The bytes that a rank needs for a while: beside factors, second-order data and states.

They follow the order of the step and its buffers, as `soframe.strategies.plan` does for the bytes
that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

from soframe.comm.packing import BLOCK
from soframe.planning.costs import Costs, Part
from soframe.planning.pricing import Priced
from soframe.specs import TensorSpec
from soframe.strategies.placement import Placement
from soframe.strategies.work import ITEM_BYTES, BlockPlacement, BlockWork


@dataclass(frozen=True)
class Transients:
    """The most bytes at once, beside the bytes held between steps."""

    window: int  # the sums of a statistics step, and their triangles on the way
    solving: int  # in a step with solves
    updating: int  # in another step

    @property
    def most(self) -> int:
        """The most of any step."""
        return max(self.window, self.solving, self.updating)


@dataclass(frozen=True)
class _Stack:
    """A stack of a placement, with the bytes of its buffers."""

    members: Sequence[int]
    work: BlockWork  # of its first block
    place: BlockPlacement
    gradient: int  # bytes of its gradients

    @property
    def item(self) -> int:
        return ITEM_BYTES[self.work.dtype]

    @property
    def is_read_in_place(self) -> bool:
        """Whether it has a single parameter, whose gradient is not copied."""
        return len(self.members) == self.work.parameters == 1

    def factor(self, index: int, *, packed: bool) -> int:
        """Return the bytes of a factor of all blocks."""
        spec = self.work.factors[index]
        size = spec.packed_numel if packed else prod(spec.shape)
        return self.item * len(self.members) * size

    def corner(self, index: int) -> int:
        """Return the bytes of a matrix's masked corner, which a triangle needs."""
        spec = self.work.factors[index]
        if spec.kind != "psd":
            return 0
        side = min(spec.size // 2, BLOCK)
        return (self.item + 1) * len(self.members) * spec.groups * side**2


@dataclass(frozen=True)
class _Sums:
    """The bytes of statistics, before they are in the running factors."""

    window: int  # sums of calls, triangles, and what packing needs
    triangles: int  # of a reduction
    deferred: int  # a triangle, before it is added to its accumulator


def transients(
    costs: Costs, placement: Placement, part: Part, rank: int, *, background: bool = False
) -> Transients:
    """Return the transient bytes of a rank with some part; ``background`` of its solves."""
    stacks = [_stack(costs, placement, members) for members in placement.stacks]
    copied = sum(stack.gradient for stack in stacks if not stack.is_read_in_place)
    sums = _sums(stacks, part)
    updating = sums.triangles + copied + _updating(costs, placement, stacks, part)
    solving = sums.deferred + copied + _solving(costs, placement, stacks, part, rank)
    # The first solve is done in its step, later ones perhaps beside windows and updates.
    running = _background(costs, placement, part) if background else 0
    window, updating = sums.window + running, updating + running
    return Transients(window, max(updating, solving), updating)


def _stack(costs: Costs, placement: Placement, members: Sequence[int]) -> _Stack:
    work, place = placement.work[members[0]], placement.blocks[members[0]]
    gradient = ITEM_BYTES[work.dtype] * prod(costs.shape(members))
    return _Stack(members, work, place, gradient)


def _sums(stacks: Sequence[_Stack], part: Part) -> _Sums:
    """Return the bytes of a part's sums, and of the triangles in which they are reduced."""
    matrices = triangles = deferred = corner = 0
    factors = set(part.holds)  # pairs of a stack's number and an index
    for number in part.gathers:
        stack = stacks[number]
        for index, factor in enumerate(stack.work.factors):
            if factor.captured:
                factors.add((number, index))
                matrices += stack.factor(index, packed=False)
    for number, index in factors:
        stack = stacks[number]
        triangle = stack.factor(index, packed=True)
        if stack.place.deferred and number in part.gathers:
            deferred = max(deferred, triangle)
            corner = max(corner, stack.corner(index))
        elif len(stack.place.reductions[index].group) > 1 and not stack.place.deferred:
            triangles += triangle
            corner = max(corner, stack.corner(index))
    return _Sums(matrices + triangles + deferred + corner, triangles, deferred)


def _updating(costs: Costs, placement: Placement, stacks: Sequence[_Stack], part: Part) -> int:
    """Return the bytes of updates and new states, or of statistics, beside gradients."""
    updates = [costs.direct(stacks[number].members) for number in part.directs]
    results = sum(update.results for update in updates)
    exchanged = opened = 0
    for stack in stacks:
        if len(stack.place.gradient_workers) < placement.world_size:
            sent = stack.item * len(stack.members) * sum(s.packed_numel for s in stack.work.parcel)
            exchanged += sent or stack.gradient
            opened += stack.gradient if sent else 0
    # Updates and new states; then updates on the way, and those that arrive.
    computing = max(_peak(updates), results + 2 * exchanged + opened)
    observing = _observing(costs, stacks, part)
    if any(stack.work.after for stack in stacks):
        # Statistics come before the new states replace the old ones, solves behind.
        observing += results + exchanged
    return max(computing, observing)


def _observing(costs: Costs, stacks: Sequence[_Stack], part: Part) -> int:
    """Return the bytes of statistics of gradients."""
    observing = 0
    for number in part.directs:
        stack = stacks[number]
        size = costs.observe(stack.members).peak
        for owner, index in part.makes:
            if owner == number and stack.place.packed:
                size += stack.factor(index, packed=True) + stack.corner(index)
        observing = max(observing, size)
    return observing


def _solving(
    costs: Costs, placement: Placement, stacks: Sequence[_Stack], part: Part, rank: int
) -> int:
    """Return the bytes of solves and of the data that arrive, beside gradients."""
    solve, unpacked = _solves(costs, stacks, part)
    # Then second-order data that arrive, by stack, out of triangles.
    arrived: list[int] = []
    triangles = 0
    for stack in stacks:
        matrices, packed = _received(placement, stack, rank)
        arrived.append(matrices)
        triangles += packed

    # Parts of several owners are joined, stack by stack. Solves that continue from the last data
    # keep them until the end.
    parts = [arrived[number] for number in part.directs]
    continues = any(any(stack.work.resident) for stack in stacks)
    joined = sum(parts) if continues else max(parts, default=0)
    # The updates still hold the former states: all that follow are new.
    states = _peak([costs.rebase(stacks[number].members) for number in part.directs])
    installing = solve.results + sum(arrived) + max(triangles, joined + states)
    updates = 0
    if any(stack.work.after for stack in stacks):
        updates = sum(stack.gradient for stack in stacks)
    return updates + max(unpacked + solve.peak + triangles, installing)


def _solves(costs: Costs, stacks: Sequence[_Stack], part: Part) -> tuple[Priced, int]:
    """Return the cost of a part's solves, and the bytes of matrices out of triangles."""
    calls, unpacked = [], 0
    for number, index, blocks in part.solves:
        stack = stacks[number]
        spec = stack.work.factors[index]
        calls.append((stack.members, index, blocks))
        if stack.place.packed and spec.kind == "psd":
            unpacked += stack.item * blocks * prod(spec.shape)
    return costs.solve(calls), unpacked


def _received(placement: Placement, stack: _Stack, rank: int) -> tuple[int, int]:
    """Return the bytes of a stack's data that reach a rank over the network, and as triangles."""
    received: list[TensorSpec] = []
    for member in stack.members:
        for index, specs in enumerate(stack.work.second_order):
            group = placement.blocks[member].sharing[index]
            if len(group) > 1 and rank in group:
                received += specs
    arrived = sum(prod(tensor.shape) for tensor in received)
    return stack.item * arrived, stack.item * sum(tensor.packed_numel for tensor in received)


def _background(costs: Costs, placement: Placement, part: Part) -> int:
    """Return the bytes of solves in the background: copies, results, and of one that runs."""
    copies, results, running = 0, 0, 0
    for stack, index, blocks in part.solves:
        members = placement.stacks[stack]
        work, place = placement.work[members[0]], placement.blocks[members[0]]
        spec, item = work.factors[index], ITEM_BYTES[work.dtype]
        matrix = item * blocks * prod(spec.shape)
        solve = costs.solve([(members, index, blocks)])
        results += solve.results
        working = solve.peak - solve.results
        if place.packed and spec.kind == "psd":
            copies += item * blocks * spec.packed_numel
            working += matrix
        else:
            copies += matrix
        running = max(running, working)
    # Each copy is freed as its results are made.
    return max(copies, results) + running


def _peak(calls: Sequence[Priced]) -> int:
    """Return the most bytes of calls, whose results stay until the last."""
    results, most = 0, 0
    for call in calls:
        most = max(most, results + call.peak)
        results += call.results
    return most
