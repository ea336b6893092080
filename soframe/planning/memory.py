"""The bytes that a rank needs for a while: beside factors, second-order data and states.

They follow the order of the step and its buffers, as `soframe.strategies.plan` does for the bytes
that stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from soframe.comm.packing import BLOCK
from soframe.planning.costs import Costs, Part
from soframe.planning.pricing import Priced
from soframe.specs import numel
from soframe.strategies import buckets
from soframe.strategies.placement import Placement
from soframe.strategies.work import Stacked


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
class _Sums:
    """The bytes of statistics, before they are in the running factors."""

    window: int  # sums of calls, triangles, and room to pack them
    triangles: int  # of a reduction
    deferred: int  # a triangle, before it is added to its accumulator


def transients(
    costs: Costs, placement: Placement, part: Part, rank: int, *, background: bool = False
) -> Transients:
    """Return the transient bytes of a rank with some part; ``background`` of its solves."""
    copied = 0
    for stack in placement.stacked:
        # The gradient of a single parameter is read in place.
        if not len(stack.members) == stack.work.parameters == 1:
            copied += stack.gradient
    sums = _sums(placement, part, rank)
    updating = sums.triangles + copied + _updating(costs, placement, part)
    solving = sums.deferred + copied + _solving(costs, placement, part, rank)
    # The first solve is done in its step, later ones perhaps beside windows and updates.
    running = _background(costs, placement, part) if background else 0
    window, updating = sums.window + running, updating + running
    return Transients(window, max(updating, solving), updating)


def _sums(placement: Placement, part: Part, rank: int) -> _Sums:
    """Return the bytes of a rank's sums, and of the triangles in which they are reduced."""
    triangles = deferred = corner = 0
    gathered = set(part.gathers)
    for key in gathered.union(part.holds):
        stack, index = placement.stacked[key.stack], key.factor
        triangle = stack.triangle(index, len(stack.members))
        if stack.place.deferred:
            if key not in gathered:
                continue
            deferred = max(deferred, triangle)
        elif len(stack.place.reductions[index].group) > 1:
            triangles += triangle
        else:
            continue
        corner = max(corner, _corner(stack, index))
    return _Sums(placement.window(rank) + triangles + deferred + corner, triangles, deferred)


def _corner(stack: Stacked, index: int) -> int:
    """Return the bytes of a matrix's masked corner, which a triangle needs."""
    spec = stack.work.factors[index]
    if spec.kind != "psd":
        return 0
    side = min(spec.size // 2, BLOCK)
    return (stack.item + 1) * len(stack.members) * spec.groups * side**2


def _updating(costs: Costs, placement: Placement, part: Part) -> int:
    """Return the bytes of updates and new states, or of statistics, beside gradients."""
    stacks = placement.stacked
    updates = [costs.direct(stacks[number].members) for number in part.directs]
    results = sum(update.results for update in updates)
    exchanged = largest = opened = 0
    for stack in stacks:
        if len(stack.place.gradient_workers) == placement.world_size:
            continue
        sent = stack.gradient
        if stack.work.parcel:
            sent = stack.item * len(stack.members) * numel(stack.work.parcel, packed=True)
            opened += stack.gradient
        exchanged += sent
        largest = max(largest, sent)
    # All buffers travel at once; one after another they are read, and freed.
    reading = min(exchanged, max(buckets.BUCKET_BYTES, largest))
    computing = max(_peak(updates), results + exchanged + reading + opened)
    observing = _observing(costs, placement, part)
    if any(stack.work.after for stack in stacks):
        # Statistics come before the new states replace the old ones, solves behind.
        observing += results + exchanged
    return max(computing, observing)


def _observing(costs: Costs, placement: Placement, part: Part) -> int:
    """Return the bytes of statistics of gradients."""
    observing = 0
    for number in part.directs:
        stack = placement.stacked[number]
        size = costs.observe(stack.members).peak
        for index, factor in enumerate(stack.work.factors):
            if stack.place.packed and not factor.captured:
                size += stack.triangle(index, len(stack.members)) + _corner(stack, index)
        observing = max(observing, size)
    return observing


def _solving(costs: Costs, placement: Placement, part: Part, rank: int) -> int:
    """Return the bytes of solves and of the data that arrive, beside gradients."""
    stacks = placement.stacked
    solve = costs.solve_part(placement, part)
    # Then second-order data that arrive, by stack, out of triangles.
    arrived: list[int] = []
    triangles = 0
    for stack in stacks:
        matrices, packed = _received(placement, stack, rank)
        arrived.append(matrices)
        triangles += packed

    # Parts of several owners are joined, stack by stack.
    joined = max([arrived[number] for number in part.directs], default=0)
    # The updates still hold the former states: all that follow are new.
    states = _peak([costs.rebase(stacks[number].members) for number in part.directs])
    installing = solve.results + sum(arrived) + max(triangles, joined + states)
    updates = 0
    if any(stack.work.after for stack in stacks):
        updates = sum(stack.gradient for stack in stacks)
    return updates + max(_unpacked(stacks, part) + solve.peak + triangles, installing)


def _unpacked(stacks: Sequence[Stacked], part: Part) -> int:
    """Return the bytes of a part's matrices out of triangles."""
    unpacked = 0
    for number, index, blocks in part.solves:
        if stacks[number].unpacks(index):
            unpacked += stacks[number].matrix(index, blocks)
    return unpacked


def _received(placement: Placement, stack: Stacked, rank: int) -> tuple[int, int]:
    """Return the bytes of a stack's data that reach a rank over the network, and as triangles."""
    arrived = triangles = 0
    for member in stack.members:
        for index, specs in enumerate(stack.work.second_order):
            group = placement.blocks[member].sharing[index]
            if len(group) > 1 and rank in group:
                arrived += numel(specs)
                triangles += numel(specs, packed=True)
    return stack.item * arrived, stack.item * triangles


def _background(costs: Costs, placement: Placement, part: Part) -> int:
    """Return the bytes of solves in the background: copies, results, and of one that runs."""
    copies, results, running = 0, 0, 0
    for number, index, blocks in part.solves:
        stack = placement.stacked[number]
        solve = costs.solve([(stack.members, index, blocks)])
        results += solve.results
        working = solve.peak - solve.results
        if stack.unpacks(index):
            copies += stack.triangle(index, blocks)
            working += stack.matrix(index, blocks)
        else:
            copies += stack.matrix(index, blocks)
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
