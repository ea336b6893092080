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
from soframe.strategies.placement import Placement
from soframe.strategies.work import ITEM_BYTES


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


def transients(
    costs: Costs, placement: Placement, part: Part, rank: int, *, background: bool = False
) -> Transients:
    """Return the transient bytes of a rank with some part; ``background`` of its solves."""
    stacks = placement.stacks
    works = [placement.work[members[0]] for members in stacks]
    places = [placement.blocks[members[0]] for members in stacks]
    item = [ITEM_BYTES[work.dtype] for work in works]
    directs = [costs.direct(stacks[stack]) for stack in part.directs]
    gradients = [
        size * prod(costs.shape(members)) for size, members in zip(item, stacks, strict=True)
    ]

    def factors(stack: int, index: int, *, packed: bool) -> int:
        spec = works[stack].factors[index]
        size = spec.packed_numel if packed else prod(spec.shape)
        return item[stack] * len(stacks[stack]) * size

    def folded(stack: int, index: int) -> int:
        """Return the bytes of a matrix's masked corner, which a triangle needs."""
        spec = works[stack].factors[index]
        corner = min(spec.size // 2, BLOCK) ** 2 if spec.kind == "psd" else 0
        return (item[stack] + 1) * len(stacks[stack]) * spec.groups * corner

    # Sums, and triangles for a reduction.
    gathered = [(s, i) for s in part.gathers for i, f in enumerate(works[s].factors) if f.captured]
    sent = [
        (stack, index)
        for stack, index in {*gathered, *part.holds}
        if len(places[stack].reductions[index].group) > 1 and not places[stack].deferred
    ]
    triangles = sum(factors(*one, packed=True) for one in sent)
    deferred = [one for one in gathered if places[one[0]].deferred]
    # A deferred triangle, before it is added to its accumulator.
    settled = max((factors(*one, packed=True) for one in deferred), default=0)
    corner = max((folded(*one) for one in (*sent, *deferred)), default=0)
    window = sum(factors(*one, packed=False) for one in gathered) + triangles + settled + corner

    # Gradients side by side (of a single parameter they are read where they are), updates and new
    # states; then updates on the way, and those that arrive.
    alone = [
        len(members) == work.parameters == 1 for members, work in zip(stacks, works, strict=True)
    ]
    read = sum(size for size, one in zip(gradients, alone, strict=True) if not one)
    made = sum(one.left for one in directs)
    travelling = sum(
        size
        for size, place in zip(gradients, places, strict=True)
        if len(place.gradient_workers) < placement.world_size
    )
    updating = read + max(_peak(directs), made + 2 * travelling)

    # Statistics of gradients come before the new states replace the old ones, solves behind.
    after = any(work.after for work in works)
    observing = [
        costs.observe(stacks[stack]).peak
        + sum(
            factors(s, i, packed=True) + folded(s, i)
            for s, i in part.makes
            if s == stack and places[s].packed
        )
        for stack in part.directs
    ]
    kept = read + (made + travelling if after else 0)
    updating = triangles + max(updating, kept + max(observing, default=0))

    # Matrices out of triangles and results; then results that arrive, and states that follow them.
    kept = read + (sum(gradients) if after else 0)
    solve = costs.solve([(stacks[s], index, blocks) for s, index, blocks in part.solves])
    unpacked = sum(
        item[s] * blocks * prod(works[s].factors[index].shape)
        for s, index, blocks in part.solves
        if places[s].packed and works[s].factors[index].kind == "psd"
    )
    shared = [
        (stack, spec)
        for stack, members in enumerate(stacks)
        for member in members
        for index, specs in enumerate(works[stack].second_order)
        if len(group := placement.blocks[member].sharing(index)) > 1 and rank in group
        for spec in specs
    ]
    arrived = sum(item[stack] * prod(spec.shape) for stack, spec in shared)
    travelled = sum(item[stack] * spec.packed_numel for stack, spec in shared)
    # Parts of several owners are joined, stack by stack. Solves that continue from the last data
    # keep them until the end.
    joined = [
        sum(item[s] * prod(spec.shape) for s, spec in shared if s == stack)
        for stack in part.directs
    ]
    joining = (sum if any(map(any, (work.resident for work in works))) else max)([0, *joined])
    # The updates still hold the states of before: all that follow are new.
    states = _peak([costs.rebase(stacks[stack]) for stack in part.directs])
    installing = solve.left + arrived + max(travelled, joining + states)
    solving = kept + settled + max(unpacked + solve.peak + travelled, installing)
    # The first solve is done in its step, later ones perhaps beside windows and updates.
    beside = _beside(costs, placement, part) if background else 0
    window, updating = window + beside, updating + beside
    return Transients(window, max(updating, solving), updating)


def _beside(costs: Costs, placement: Placement, part: Part) -> int:
    """Return the bytes of solves in the background: copies, results, and of one that runs."""
    copies, results, running = 0, 0, 0
    for stack, index, blocks in part.solves:
        members = placement.stacks[stack]
        work, place = placement.work[members[0]], placement.blocks[members[0]]
        spec, item = work.factors[index], ITEM_BYTES[work.dtype]
        packed = place.packed and spec.kind == "psd"
        matrix = item * blocks * prod(spec.shape)
        copies += item * blocks * spec.packed_numel if packed else matrix
        solve = costs.solve([(members, index, blocks)])
        results += solve.left
        running = max(running, matrix * packed + solve.peak - solve.left)
    # Each copy is freed as its results are made.
    return max(copies, results) + running


def _peak(each: Sequence[Priced]) -> int:
    """Return the most bytes of calls, whose results stay until the last."""
    before, most = 0, 0
    for one in each:
        most = max(most, before + one.peak)
        before += one.left
    return most
