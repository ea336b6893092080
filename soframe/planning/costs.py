"""The cost of each rank's part in a step: its arithmetic by phase.

A stack is priced once for each number of its blocks, by running its own method, solver and helpers
on paper (`soframe.planning.pricing`). Ranks with the same part in everything are one class.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from soframe.blocks.block import Block
from soframe.layers.base import LayerHelper
from soframe.layers.layout import BlockShape
from soframe.layers.sharing import SharedInputs
from soframe.methods.base import Call, Given
from soframe.methods.returned import direction_of, observed_by
from soframe.planning.hardware import Hardware
from soframe.planning.pricing import Paper, Priced, without_numbers
from soframe.planning.task import Task
from soframe.solvers.base import Problem, Solver, solve_stacks
from soframe.specs import VALUE
from soframe.strategies.placement import Placement
from soframe.strategies.work import Stacked

DAMPING, UPDATES = 1e-3, 10  # of every block on paper
REMEDY = "make it run on the meta device, or name a strategy and do without a plan"


class StackFactor(NamedTuple):
    """A factor of the blocks of a stack, by the numbers of both."""

    stack: int
    factor: int


class Solves(NamedTuple):
    """The solves of a factor for some blocks of a stack."""

    stack: int
    factor: int
    blocks: int


@dataclass(frozen=True)
class Part:
    """The work of a rank, by stack: ranks with equal parts take the same time."""

    solves: tuple[Solves, ...] = ()
    directs: tuple[int, ...] = ()  # stacks for which it computes updates
    gathers: tuple[StackFactor, ...] = ()  # to which its calls contribute
    holds: tuple[StackFactor, ...] = ()  # running averages of statistics of calls


@dataclass(frozen=True)
class _ShapesOfSolve:
    """The shapes of the tensors of one solve."""

    solver: Solver
    dtype: torch.dtype
    matrix: tuple[int, ...]
    last: Mapping[str, tuple[int, ...]]  # the last solve's data, from which it continues


@dataclass(frozen=True)
class Arithmetic:
    """Seconds of a rank by phase."""

    statistics: float = 0.0  # moments of calls, in the backward pass
    reduce: float = 0.0  # sums of calls, added to running averages
    observe: float = 0.0  # statistics of the averaged gradients
    solve: float = 0.0  # solves of factors
    direct: float = 0.0  # updates
    write: float = 0.0  # reading gradients into stacks and writing updates


def parts(placement: Placement) -> dict[Part, list[int]]:
    """Return the ranks of each part."""
    solves = defaultdict[int, list[Solves]](list)  # by rank
    directs = defaultdict[int, list[int]](list)
    gathers = defaultdict[int, list[StackFactor]](list)
    holds = defaultdict[int, list[StackFactor]](list)
    for number, stack in enumerate(placement.stacked):
        for index, factor in enumerate(stack.work.factors):
            key = StackFactor(number, index)
            if factor.captured:
                for rank in stack.place.contributing(index):
                    gathers[rank].append(key)
                for rank in stack.place.holding(index):
                    holds[rank].append(key)
            if factor.name not in stack.work.unsolved:
                for rank, blocks in _owners(placement, stack, index).items():
                    solves[rank].append(Solves(number, index, blocks))
        for rank in stack.place.gradient_workers:
            directs[rank].append(number)
    ranks_of: dict[Part, list[int]] = {}
    for rank in range(placement.world_size):
        part = Part(
            tuple(solves[rank]), tuple(directs[rank]), tuple(gathers[rank]), tuple(holds[rank])
        )
        ranks_of.setdefault(part, []).append(rank)
    return ranks_of


def _owners(placement: Placement, stack: Stacked, factor: int) -> Counter[int]:
    """Return how many blocks of a stack have their factor solved by each rank."""
    return Counter(placement.blocks[member].owners[factor] for member in stack.members)


class Costs:
    """Prices of a task on described hardware; with ``amp`` the passes run in bfloat16."""

    def __init__(self, task: Task, hardware: Hardware, *, amp: bool = False) -> None:
        self._task, self.hardware, self._paper = task, hardware, Paper(hardware)
        # The device decides which blocks are stacked.
        self.work = tuple(replace(work, device=hardware.device) for work in task.work)
        self._priced: dict[Hashable, Priced] = {}
        # See `soframe.Statistics.precision`: all but solves multiply in TF32, if the device can.
        self._fast = "tf32" if "product:tf32" in hardware.operators else "float32"
        self._of_passes = "bfloat16" if amp else self._fast

    @cached_property
    def passes(self) -> Priced:
        """A forward and backward pass."""
        if self._task.inputs is None:
            return Priced()
        with self._paper:
            run = self._task.run(self._like)
            return self._paper.price(run, products=self._of_passes)

    @cached_property
    def statistics(self) -> Mapping[str, Priced]:
        """The cost of the moments of each block's calls, by the block's name."""
        shared = SharedInputs()
        likenesses: dict[int, Tensor] = {}
        block_of: dict[LayerHelper, Block] = {}
        for block in self._task.blocks:
            block_of.update(dict.fromkeys(block.helpers, block))
        costs = {block.name: Priced() for block in self._task.blocks}
        with self._paper, torch.no_grad():
            for call in self._task.calls:
                block = block_of[call.helper]
                if not block.captured:
                    continue
                # A tensor that several layers read is one here, too.
                inputs = tuple(likenesses.setdefault(id(x), self._like(x)) for x in call.inputs)
                rows = call.helper.output_rows(self._like(call.output))
                data = self._data(block, 1)
                priced_call = Call(call.helper, inputs, rows, block.dtype, shared, data)
                run = functools.partial(self._moments, block, priced_call)
                with without_numbers(f"the statistics of {block.name!r}", REMEDY):
                    cost = self._paper.price(run, products=self._fast)
                total = costs[block.name]
                costs[block.name] = replace(
                    total,
                    seconds=total.seconds + cost.seconds,
                    operators=total.operators + cost.operators,
                    host=total.host + self.hardware.hooked(type(call.helper), cost.operators),
                )
        return costs

    def _moments(self, block: Block, call: Call) -> object:
        shapes = {factor.name: factor.shape for factor in block.factors}
        moments = dict(block.method.statistics(call))
        for name, moment in moments.items():
            if callable(moment):
                moments[name] = moment(self._paper.new(shapes[name], block.dtype), 1.0)
        return moments

    def _like(self, tensor: Tensor) -> Tensor:
        likeness = self._paper.new(tensor.shape, tensor.dtype)
        return likeness.requires_grad_(tensor.requires_grad)

    def _data(self, block: Block, blocks: int) -> dict[str, dict[str, Tensor]]:
        """Return second-order data of some blocks side by side."""
        data: dict[str, dict[str, Tensor]] = {}
        for factor, specs in block.tensors.items():
            data[factor] = {}
            for name, spec in specs.items():
                data[factor][name] = self._paper.new(_times(spec.shape, blocks), block.dtype)
        for unsolved in block.unsolved:
            shape = _times(unsolved.running_shape, blocks)
            data[unsolved.name] = {VALUE: self._paper.new(shape, block.dtype)}
        return data

    def solve(self, solves: Sequence[tuple[Sequence[int], int, int]]) -> Priced:
        """Return the cost of solves at once: of a stack's blocks, a factor, a number of blocks."""
        shapes_of_solves: list[_ShapesOfSolve] = []
        for members, index, blocks in solves:
            block = self._task.blocks[members[0]]
            (solved,) = (solved for solved in block.solved_factors if solved.position == index)
            factor, solver = solved.factor, solved.solver
            last: dict[str, tuple[int, ...]] = {}
            if solver.continues:
                for name, tensor in block.tensors[factor.name].items():
                    last[name] = _times(tensor.shape, blocks)
            matrix = _times(factor.shape, blocks)
            shapes_of_solves.append(_ShapesOfSolve(solver, block.dtype, matrix, last))

        def make() -> Callable[[], object]:
            new = self._paper.new
            problems: list[Problem] = []
            for shapes in shapes_of_solves:
                dtype = shapes.dtype
                last_data = {name: new(shape, dtype) for name, shape in shapes.last.items()}
                matrix, damping = new(shapes.matrix, dtype), new(shapes.matrix[:1], dtype)
                problems.append(Problem(shapes.solver, matrix, damping, last_data))
            return lambda: solve_stacks(problems)

        # A solver of a user may not be hashable.
        return self._once("a solve", ("solve", repr(shapes_of_solves)), make, "float32")

    def solve_part(self, placement: Placement, part: Part) -> Priced:
        """Return the cost of all solves of a rank."""
        solves: list[tuple[Sequence[int], int, int]] = []
        for number, factor, blocks in part.solves:
            solves.append((placement.stacks[number], factor, blocks))
        return self.solve(solves)

    def direct(self, members: Sequence[int]) -> Priced:
        """Return the cost of the updates of a stack."""
        method = self._task.blocks[members[0]].method
        return self._of_stack("direct", members, lambda step: direction_of(method, step))

    def observe(self, members: Sequence[int]) -> Priced:
        """Return the cost of a stack's statistics of averaged gradients."""
        block = self._task.blocks[members[0]]
        if not block.observes:
            return Priced()

        def run(step: Given) -> object:
            factors = block.method.factors(BlockShape(*step.gradient.shape))
            return observed_by(block.method, factors, step.gradient, step.data)

        return self._of_stack("observe", members, run)

    def rebase(self, members: Sequence[int]) -> Priced:
        """Return the cost of taking a stack's states to new second-order data."""
        block = self._task.blocks[members[0]]
        if not (block.states and block.method.rebases):
            return Priced()

        def run(step: Given) -> object:
            return block.method.rebase(step.state, step.data, step.data)

        return self._of_stack("rebase", members, run)

    def _of_stack(
        self, phase: str, members: Sequence[int], run: Callable[[Given], object]
    ) -> Priced:
        """Price a phase of the blocks of a stack, which are like the first of them."""
        block, shape = self._task.blocks[members[0]], self.shape(members)
        states: dict[str, tuple[int, ...]] = {}
        for name, spec in block.states.items():
            states[name] = shape if block.elementwise else _times(spec.shape, len(members))

        def make() -> Callable[[], object]:
            gradient = self._paper.new(shape, block.dtype)
            state = {name: self._paper.new(sizes, block.dtype) for name, sizes in states.items()}
            data = self._data(block, len(members))
            numbers = (UPDATES, block.solver, DAMPING)
            step = Given(gradient, gradient, data, state, *numbers, weights=lambda: gradient)
            return lambda: run(step)

        method, solver = id(block.method), repr(block.solver)
        key = (phase, method, solver, block.factors, block.dtype, shape, tuple(states.items()))
        code = f"{phase} of {type(block.method).__name__} on {block.name!r}"
        return self._once(code, key, make, self._fast)

    def shape(self, members: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a stack's gradients."""
        if len(members) > 1 and self._task.blocks[members[0]].elementwise:
            return (sum(prod(self.work[index].shape) for index in members), 1, 1)
        return _times(tuple(self._task.blocks[members[0]].shape), len(members))

    def _once(
        self, code: str, key: Hashable, make: Callable[[], Callable[[], object]], products: str
    ) -> Priced:
        """Price the code that ``make`` returns, with tensors that it has made before."""
        if key not in self._priced:
            with self._paper, torch.no_grad(), without_numbers(code, REMEDY):
                self._priced[key] = self._paper.price(make(), products=products)
        return self._priced[key]

    def arithmetic(self, placement: Placement, part: Part) -> Arithmetic:
        """Return the seconds of a rank's phases."""
        stacks = placement.stacks
        solve = self.solve_part(placement, part)
        direct = observe = statistics = host = 0.0
        for number in part.directs:
            direct += self.direct(stacks[number]).seconds
            observe += self.observe(stacks[number]).seconds
        for number in dict.fromkeys(gathered.stack for gathered in part.gathers):
            for index in stacks[number]:
                moments = self.statistics[self.work[index].name]
                statistics += moments.seconds
                host += moments.host

        factors, matrices = _bytes_of_factors(placement, part)
        gradients = sum(stack.gradient for stack in placement.stacked)
        bandwidth, launch = self.hardware.bandwidth, self.hardware.launch
        return Arithmetic(
            statistics=self._with_host(host, statistics),
            # Zeros and multiplied sums, which are added to the averages.
            reduce=6 * factors / bandwidth + launch * len(part.holds),
            observe=observe,
            # A triangle is read, and the matrix written.
            solve=solve.seconds + 1.5 * matrices / bandwidth,
            direct=direct,
            write=self._with_host(self.hardware.host * len(self.work), 4 * gradients / bandwidth),
        )

    def _with_host(self, host: float, device: float) -> float:
        """Return the seconds of both: a GPU works while the host goes on, a CPU does not."""
        return host + device if self.hardware.device == "cpu" else max(host, device)


def _bytes_of_factors(placement: Placement, part: Part) -> tuple[int, int]:
    """Return the bytes of running factors, and of matrices to be solved."""
    stacks = placement.stacked
    factors = matrices = 0
    for number, index in part.holds:
        stack = stacks[number]
        shape = stack.work.factors[index].kept_shape(packed=stack.place.packed)
        factors += stack.item * len(stack.members) * prod(shape)
    for number, index, blocks in part.solves:
        stack = stacks[number]
        matrices += stack.matrix(index, blocks)
    return factors, matrices


def _times(shape: Sequence[int], blocks: int) -> tuple[int, ...]:
    return (blocks * shape[0], *shape[1:])
