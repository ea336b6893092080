"""The cost of each rank's part in a step: its arithmetic by phase, and its transient memory.

A stack is priced once for each number of its blocks, by running its own method, solver and helpers
on paper (`soframe.planning.pricing`). Ranks with the same part in everything are one class.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from soframe.blocks.block import Block
from soframe.layers.base import LayerHelper
from soframe.layers.sharing import SharedInputs
from soframe.methods.base import Call, Given
from soframe.planning.hardware import Hardware
from soframe.planning.pricing import Paper, Priced
from soframe.planning.task import Task
from soframe.specs import VALUE
from soframe.strategies.placement import Placement
from soframe.strategies.work import ITEM_BYTES

DAMPING, UPDATES = 1e-3, 10  # of every block on paper


@dataclass(frozen=True)
class Part:
    """What a rank does, by stack: ranks with equal parts take the same time.

    Attributes:
        solves: The stack, the factor and the number of blocks of each solve.
        directs: The stacks for which it computes updates.
        gathers: The stacks to which it contributes statistics.
        holds: The stacks and factors of which it holds the running factors.
    """

    solves: tuple[tuple[int, int, int], ...] = ()
    directs: tuple[int, ...] = ()
    gathers: tuple[int, ...] = ()
    holds: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Arithmetic:
    """Seconds of a rank by phase, and the bytes that it holds for a while.

    Attributes:
        statistics: Moments of calls, in the backward pass.
        average: Running averages of a statistics step.
        observe: Statistics of the averaged gradients.
        solve: Solves of factors.
        direct: Updates.
        write: Reading gradients into stacks and writing updates.
        solving: The most bytes of a step with solves, beside those that are held.
        updating: The same of a step without.
    """

    statistics: float
    average: float
    observe: float
    solve: float
    direct: float
    write: float
    solving: int
    updating: int


def parts(placement: Placement) -> dict[Part, list[int]]:
    """Return the ranks of each part."""
    solves: dict[int, Counter[tuple[int, int]]] = {}
    directs: dict[int, list[int]] = {}
    gathers: dict[int, list[int]] = {}
    holds: dict[int, list[tuple[int, int]]] = {}
    for number, members in enumerate(placement.stacks):
        work, place = placement.work[members[0]], placement.blocks[members[0]]
        captured = [index for index, factor in enumerate(work.factors) if factor.captured]
        for rank in place.gradient_workers:
            directs.setdefault(rank, []).append(number)
        for rank in {rank for index in captured for rank in place.contributing(index)}:
            gathers.setdefault(rank, []).append(number)
        for index, factor in enumerate(work.factors):
            for rank in place.holding(index) if index in captured else ():
                holds.setdefault(rank, []).append((number, index))
            for member in members if factor.name not in work.unsolved else ():
                owner = placement.blocks[member].owners[index]
                solves.setdefault(owner, Counter())[number, index] += 1
    found: dict[Part, list[int]] = {}
    for rank in range(placement.world_size):
        part = Part(
            tuple((*key, count) for key, count in sorted(solves.get(rank, Counter()).items())),
            tuple(directs.get(rank, ())),
            tuple(gathers.get(rank, ())),
            tuple(holds.get(rank, ())),
        )
        found.setdefault(part, []).append(rank)
    return found


class Costs:
    """Prices of a task on described hardware.

    Args:
        task: The task.
        hardware: The hardware.
        amp: Whether the passes run in bfloat16.

    Attributes:
        hardware: The hardware.
        work: The task's work, as it is stacked on the hardware's device.
    """

    def __init__(self, task: Task, hardware: Hardware, *, amp: bool = False) -> None:
        self._task, self.hardware, self._paper = task, hardware, Paper(hardware)
        self._amp = amp
        device = "cpu" if hardware.device == "cpu" else "cuda"
        self.work = tuple(replace(work, device=device) for work in task.work)
        self._priced: dict[Hashable, Priced] = {}
        # See `soframe.Curvature.precision`: all but solves multiply in TF32, if the device can.
        self._fast = "tf32" if "product:tf32" in hardware.operators else "float32"

    @cached_property
    def passes(self) -> Priced:
        """A forward and backward pass."""
        if self._task.inputs is None:
            return Priced(self._task.seconds)
        with self._paper:
            run = self._task.run(self._like)
            return self._paper.price(run, products="bfloat16" if self._amp else self._fast)

    @cached_property
    def statistics(self) -> Mapping[str, float]:
        """The seconds of the moments of each block's calls, by the block's name."""
        shared = SharedInputs()
        made: dict[int, Tensor] = {}
        of_helper = {helper: block for block in self._task.blocks for helper in block.helpers}
        found = dict.fromkeys((block.name for block in self._task.blocks), 0.0)
        with self._paper, torch.no_grad():
            for call in self._task.calls:
                block = of_helper[call.helper]
                if block.captured:
                    # A tensor that several layers read is one here, too.
                    inputs = tuple(made.setdefault(id(x), self._like(x)) for x in call.inputs)
                    rows = call.helper.output_rows(self._like(call.output))
                    run = functools.partial(self._moments, block, call.helper, inputs, rows, shared)
                    found[block.name] += self._paper.price(run, products=self._fast).seconds
        return found

    def _moments(
        self,
        block: Block,
        helper: LayerHelper,
        inputs: tuple[Tensor, ...],
        rows: Tensor,
        shared: SharedInputs,
    ) -> list[Tensor | None]:
        call = Call(helper, inputs, rows, block.dtype, shared, self._data(block, 1))
        shapes = {factor.name: factor.shape for factor in block.factors}
        return [
            moment(self._paper.new(shapes[name], block.dtype), 1.0) if callable(moment) else moment
            for name, moment in block.method.statistics(call).items()
        ]

    def _like(self, tensor: Tensor) -> Tensor:
        made = self._paper.new(tensor.shape, tensor.dtype)
        return made.requires_grad_(tensor.requires_grad)

    def _data(self, block: Block, blocks: int) -> dict[str, dict[str, Tensor]]:
        """Return second-order data of some blocks side by side."""
        shapes = {f: {n: spec.shape for n, spec in own.items()} for f, own in block.tensors.items()}
        shapes |= {factor.name: {VALUE: factor.shape} for factor in block.unsolved}
        return {
            factor: {n: self._paper.new(_times(s, blocks), block.dtype) for n, s in own.items()}
            for factor, own in shapes.items()
        }

    def solve(self, stack: Sequence[int], factor: int, blocks: int) -> Priced:
        """Return the cost of solving a factor of some blocks of a stack."""
        block = self._task.blocks[stack[0]]
        shape = _times(block.factors[factor].shape, blocks)
        solver = next(solver for index, _, solver in block.solved_here if index == factor)
        specs = block.tensors[block.factors[factor].name]

        def run() -> object:
            matrix, damping = (self._paper.new(s, block.dtype) for s in (shape, shape[:1]))
            if not solver.continues:
                return solver.solve(matrix, damping)
            last = {n: self._paper.new(_times(s.shape, blocks)) for n, s in specs.items()}
            return solver.solve_again(matrix, damping, last)

        return self._once(("solve", solver, shape, block.dtype), run, "float32")

    def direct(self, stack: Sequence[int]) -> Priced:
        """Return the cost of the updates of a stack."""
        block = self._task.blocks[stack[0]]
        return self._once(
            ("direct", *self._key(stack)), lambda: block.method.direct(self._given(stack))
        )

    def observe(self, stack: Sequence[int]) -> Priced:
        """Return the cost of a stack's statistics of averaged gradients."""
        block = self._task.blocks[stack[0]]
        if len(block.captured) == len(block.factors):
            return Priced()

        def run() -> object:
            given = self._given(stack)
            return block.method.observe(given.gradient, given.data)

        return self._once(("observe", *self._key(stack)), run)

    def _key(self, stack: Sequence[int]) -> tuple[Hashable, ...]:
        block = self._task.blocks[stack[0]]
        of_block = (block.method, block.solver, block.factors, block.dtype)
        return (*of_block, self._shape(stack), tuple(block.states.items()))

    def _shape(self, stack: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a stack's gradients."""
        if len(stack) > 1 and self._task.blocks[stack[0]].elementwise:
            return (sum(prod(self.work[index].shape) for index in stack), 1, 1)
        return _times(tuple(self._task.blocks[stack[0]].shape), len(stack))

    def _given(self, stack: Sequence[int]) -> Given:
        block, shape = self._task.blocks[stack[0]], self._shape(stack)
        gradient = self._paper.new(shape, block.dtype)
        shapes = {
            name: shape if block.elementwise else _times(spec.shape, len(stack))
            for name, spec in block.states.items()
        }
        state = {name: self._paper.new(own, block.dtype) for name, own in shapes.items()}
        data = self._data(block, len(stack))
        return Given(gradient, gradient, data, state, UPDATES, block.solver, DAMPING)

    def _once(
        self, key: Hashable, run: Callable[[], object], products: str | None = None
    ) -> Priced:
        if key not in self._priced:
            with self._paper, torch.no_grad():
                self._priced[key] = self._paper.price(run, products=products or self._fast)
        return self._priced[key]

    # -- a rank ---------------------------------------------------------------------------------

    def arithmetic(self, placement: Placement, part: Part) -> Arithmetic:
        """Return the seconds of a rank's phases, and its transient bytes."""
        stacks = placement.stacks
        solves = [self.solve(stacks[stack], *of) for stack, *of in part.solves]
        directs = [self.direct(stacks[stack]) for stack in part.directs]
        observes = [self.observe(stacks[stack]) for stack in part.directs]
        first = [self.work[members[0]] for members in stacks]
        item = [ITEM_BYTES[work.dtype] for work in first]
        # Bytes: of all gradients, of states and of factors that are held, of matrices solved here.
        gradients = sum(
            item[stack] * prod(self._shape(members)) for stack, members in enumerate(stacks)
        )
        states = sum(
            item[stack] * len(stacks[stack]) * prod(spec.shape)
            for stack in part.directs
            for spec in first[stack].state
        )
        held = sum(
            item[stack] * len(stacks[stack]) * first[stack].factors[factor].packed_numel
            for stack, factor in part.holds
        )
        matrices = sum(
            item[stack] * blocks * prod(first[stack].factors[factor].shape)
            for stack, factor, blocks in part.solves
        )
        made = sum(
            item[stack] * blocks * prod(spec.shape)
            for stack, factor, blocks in part.solves
            for spec in first[stack].second_order[factor]
        )
        # Gradients side by side, updates, and new states beside the old ones.
        updating = 2 * gradients + states + max((one.peak for one in directs), default=0)
        solving = gradients + matrices + made + max((one.peak for one in solves), default=0)
        bandwidth, launch = self.hardware.bandwidth, self.hardware.launch
        return Arithmetic(
            statistics=sum(
                self.statistics[self.work[index].name]
                for stack in part.gathers
                for index in stacks[stack]
            ),
            average=3 * held / bandwidth + launch * len(part.holds),
            observe=sum(one.seconds for one in observes),
            # A triangle is read, and the matrix written.
            solve=sum(one.seconds for one in solves) + 1.5 * matrices / bandwidth,
            direct=sum(one.seconds for one in directs),
            write=4 * gradients / bandwidth + 2 * launch * len(stacks),
            solving=max(updating, solving),
            updating=updating,
        )


def _times(shape: Sequence[int], blocks: int) -> tuple[int, ...]:
    return (blocks * shape[0], *shape[1:])
