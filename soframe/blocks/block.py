"""A block: its parameters, their layout, method and solver. It never changes.

What changes are its numbers (`soframe.blocks.stack.Record`) and the tensors of the stack that it is
a part of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from soframe.blocks.home import GradientHome
from soframe.blocks.stack import Record, RunningFactors, SecondOrderData, Solved, Stack, State
from soframe.layers.base import BlockShape, LayerHelper
from soframe.layers.layout import Layout
from soframe.methods.base import Method
from soframe.solvers.base import Solver
from soframe.specs import FactorSpec, Shards, TensorSpec
from soframe.strategies.work import BlockWork


@dataclass(eq=False)
class Block:
    """The curvature of some parameters, most often of one layer's.

    Attributes:
        name: The qualified name of the (first) module, or of the parameter.
        helpers: One per module whose calls are observed; several where modules share the
            parameters, none where the method reads gradients alone.
        method: The curvature method.
        solver: The solver of factors for which the method chooses none.
        dtype: The dtype of factors and second-order data.
        layout: How the parameters become the gradient matrix: the first helper, where there is one.
        home: Where the parameters' gradients live.
        ranks: The global ranks of the group in which the block is placed.
        auxiliary: Whether its method is the auxiliary one.
        record: Its numbers.
        member: Its index in its stack.
    """

    name: str
    helpers: tuple[LayerHelper, ...]
    method: Method
    solver: Solver
    dtype: torch.dtype
    layout: Layout
    home: GradientHome
    ranks: tuple[int, ...] = ()
    auxiliary: bool = False
    record: Record = field(default_factory=Record, repr=False)
    member: int = 0
    _stack: Stack | None = field(default=None, repr=False)

    # -- what is asked of it at every step: computed once -----------------------------------------

    @cached_property
    def shape(self) -> BlockShape:
        """The shape of the gradient matrix."""
        return self.layout.shape

    @cached_property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.parameters.values())).device

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters of the block, by their name in the module."""
        return self.layout.parameters

    @cached_property
    def factors(self) -> tuple[FactorSpec, ...]:
        """The factors, in the method's order."""
        factors = self.method.factors(self.shape)
        if isinstance(self.layout, LayerHelper):
            factors = tuple(map(self.layout.factor, factors))
        return factors

    @cached_property
    def captured(self) -> tuple[FactorSpec, ...]:
        """The factors that are made of calls."""
        return tuple(factor for factor in self.factors if factor.captured)

    @cached_property
    def psd(self) -> frozenset[str]:
        """The names of the factors that are matrices."""
        return frozenset(factor.name for factor in self.factors if factor.kind == "psd")

    @cached_property
    def unequal(self) -> bool:
        """Whether groups see rows of their own."""
        return any(factor.mean_over == "group rows" for factor in self.factors)

    @cached_property
    def solved_here(self) -> tuple[tuple[int, FactorSpec, Solver], ...]:
        """The factors that are solved: the index of each, what it is, and who solves it."""
        found = [(i, f, self.method.solver(f, self.solver)) for i, f in enumerate(self.factors)]
        return tuple((i, f, solver) for i, f, solver in found if solver is not None)

    @cached_property
    def solvers(self) -> list[tuple[Solver, list[int]]]:
        """The solvers, and which of the solved factors each has: equal ones are one.

        A method may make a solver for each factor, which is none the less the same.
        """
        solvers: list[tuple[Solver, list[int]]] = []
        for number, (_, _, solver) in enumerate(self.solved_here):
            numbers = next((numbers for one, numbers in solvers if one == solver), None)
            if numbers is None:
                solvers.append((solver, [number]))
            else:
                numbers.append(number)
        return solvers

    @cached_property
    def unsolved(self) -> tuple[FactorSpec, ...]:
        """The factors that are their own data."""
        solved = {factor.name for _, factor, _ in self.solved_here}
        return tuple(factor for factor in self.factors if factor.name not in solved)

    @cached_property
    def tensors(self) -> dict[str, dict[str, TensorSpec]]:
        """What second-order data there are, by the factors that are solved."""
        return {factor.name: solver.tensors(factor) for _, factor, solver in self.solved_here}

    @property
    def relatively_damped(self) -> bool:
        """Whether its damping is a multiple of its own curvature, however little that is."""
        return any("mean_trace" in specs for specs in self.tensors.values())

    @cached_property
    def states(self) -> Mapping[str, TensorSpec]:
        """What the method keeps, by name."""
        return self.method.state(self.shape)

    @cached_property
    def remembers(self) -> bool:
        """Whether its directions depend on earlier gradients: by a state, or by their factors."""
        return bool(self.states) or len(self.captured) < len(self.factors)

    @cached_property
    def takes_samples(self) -> bool:
        """Whether samples are drawn for ``Curvature(rows=...)`` rather than rows."""
        return self.method.reduces or any(factor.reads == "both" for factor in self.factors)

    @cached_property
    def shards(self) -> dict[str, Shards]:
        """How each parameter is shared out over ranks, by its name.

        Returns:
            Nothing, where every rank has all of them whole.

        Raises:
            ValueError: If one is shared out in a way that is not known.
        """
        found: dict[str, Shards | None] = {}
        for name, parameter in self.parameters.items():
            try:
                found[name] = self.home.shards(parameter, self.ranks)
            except ValueError as error:
                raise ValueError(f"{self.name}.{name}: {error}") from error
        if not any(found.values()):
            return {}
        ranks = len(self.ranks)
        return {
            name: shards or Shards.none(tuple(p.shape), ranks, str(p.dtype).removeprefix("torch."))
            for (name, shards), p in zip(found.items(), self.parameters.values(), strict=True)
        }

    # -- what is known of it ----------------------------------------------------------------------

    def join(self, stack: Stack, member: int) -> None:
        """Become a member of a stack, which keeps the block's tensors from now on."""
        self._stack, self.member = stack, member
        self.record.gathered = self.gatherable()

    @property
    def stack(self) -> Stack:
        """The stack that keeps the block's tensors."""
        assert self._stack is not None
        return self._stack

    @property
    def running(self) -> RunningFactors:
        """The running factors that this rank holds."""
        return RunningFactors(self)

    @property
    def second_order(self) -> SecondOrderData:
        """The second-order data that this rank holds."""
        return SecondOrderData(self)

    @property
    def state(self) -> State:
        """What the method keeps from step to step, on gradient workers."""
        return State(self)

    @cached_property
    def _dependent(self) -> bool:
        """Whether statistics of a factor are made with second-order data."""
        return any(factor.needs for factor in self.factors)

    @property
    def mass(self) -> float:
        """The EMA weight of the first factor that needs no data; 1 where there are no factors."""
        first = next((factor.name for factor in self.factors if not factor.needs), None)
        if first is None:
            return 0.0 if self.factors else 1.0
        return self.record.mass(first)

    @property
    def lacks(self) -> bool:
        """Whether a factor waits for its first statistics, which it could take now."""
        if not self._dependent:
            return False
        able, masses = self.gatherable(), self.record.masses
        return any(f.needs and f.name in able and f.name not in masses for f in self.captured)

    def gatherable(self) -> frozenset[str]:
        """Return the factors that can take statistics: some need second-order data for that."""
        ready = self.solved
        return frozenset(f.name for f in self.captured if ready or not f.needs)

    def damped_with(self, damping: float) -> float:
        """Return the block's damping, given the preconditioner's."""
        own = self.record.damping
        return damping if own is None else own

    def damp(self, damping: float | None) -> None:
        """Damp the block with a damping of its own; None for the preconditioner's."""
        self.record.damping = damping

    def snapshot(self) -> Solved:
        """Return the second-order data and the damping, and begin to note failures anew."""
        failed, self.record.failed = self.record.failed, False
        return Solved(dict(self.second_order), self.record.damping, failed)

    def restore(self, solved: Solved) -> None:
        """Replace the second-order data and the damping by those of a snapshot."""
        for factor, tensors in solved.data.items():
            self.stack.set_data(factor, (self.member,), tensors)
        self.record.damping = solved.damping

    @property
    def solved(self) -> bool:
        """Whether the gradient workers have second-order data for every factor that is solved."""
        return self.record.solved or not self.tensors

    @property
    def lost(self) -> bool:
        """Whether statistics are to be made with data that were there once, and are not now."""
        if not self.method.observes_with_data or self.solved or self.record.failed:
            return False
        return any(f.name in self.record.masses for f in self.factors if not f.captured)

    @property
    def follows(self) -> bool:
        """Whether second-order data follow the factors between solves."""
        return any(solver.follows for _, _, solver in self.solved_here)

    @property
    def active(self) -> bool:
        """Whether the method makes a direction of the block's gradient yet."""
        return self.solved or self.method.starts_at_once

    def shares(self, traces: Sequence[Tensor], damping: float) -> list[Tensor]:
        """Return the share of the damping of each factor that is solved.

        Args:
            traces: The mean trace of each, ``[groups]``.
            damping: The damping of the blocks.

        Returns:
            ``[groups]`` for each: those of one solver are split by it together.
        """
        shares: dict[int, Tensor] = {}
        for solver, numbers in self.solvers:
            split = solver.shares([traces[number] for number in numbers], damping)
            shares.update(zip(numbers, split, strict=True))
        return [shares[number] for number in range(len(traces))]

    @property
    def work(self) -> BlockWork:
        """What has to be placed."""
        continued = {factor.name for _, factor, solver in self.solved_here if solver.continues}
        resident = tuple(not f.captured or f.name in continued for f in self.factors)
        return BlockWork(
            name=self.name,
            shape=self.shape,
            factors=self.factors,
            second_order=tuple(
                tuple(self.tensors.get(factor.name, {}).values()) for factor in self.factors
            ),
            dtype=str(self.dtype).removeprefix("torch."),
            device=str(self.device),
            parameters=len(self.parameters),
            resident=resident if any(resident) else (),
            unsolved=tuple(factor.name for factor in self.unsolved),
            state=tuple(self.states.values()),
            shards=tuple(self.shards.values()),
            effort=self.method.effort(self.shape),
            after=self.method.refreshes_after,
        )

    @property
    def has_gradient(self) -> bool:
        """Whether any parameter of the block has a gradient."""
        return any(map(self.home.has, self.parameters.values()))

    def gradient(self) -> Tensor | None:
        """Return the gradient as a matrix in the factors' dtype.

        Returns:
            ``[groups, out, in]``; None if no parameter of the block has a gradient. One that has
            none counts as zero.
        """
        tensors = self.gradients()
        return self.layout.pack(tensors).to(self.dtype) if tensors else None

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by the parameters' names, zeros for missing ones; empty for none."""
        assert not self.shards, "the gradient is in parts, which have to be gathered first"
        parameters, read = self.parameters, self.home.read
        tensors: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            gradient = read(parameter)
            if gradient is not None:
                tensors[name] = gradient
        if tensors and len(tensors) < len(parameters):
            tensors = {n: tensors.get(n, torch.zeros_like(p)) for n, p in parameters.items()}
        return tensors

    def write(self, matrix: Tensor) -> None:
        """Write a matrix into the parameters' gradients, in place.

        Args:
            matrix: ``[groups, out, in]``.
        """
        parameters = self.parameters
        for name, value in self.layout.unpack(matrix).items():
            self.home.write(parameters[name], value)

    def parts(self) -> dict[str, Tensor]:
        """Return this rank's part of each parameter's gradient, by name; zeros where it has none.

        Returns:
            Tensors in the shapes of the home's `soframe.GradientHome.local`.
        """
        home = self.home
        found = {}
        for name, parameter in self.parameters.items():
            gradient = home.read(parameter)
            found[name] = torch.zeros_like(home.local(parameter)) if gradient is None else gradient
        return found

    def assemble(self, wholes: Mapping[str, Tensor]) -> Tensor:
        """Return whole gradients as a matrix in the factors' dtype.

        Args:
            wholes: The gradient of each parameter, by name, of as many elements.

        Returns:
            ``[groups, out, in]``.
        """
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        tensors = {name: whole.reshape(shapes[name]) for name, whole in wholes.items()}
        return self.layout.pack(tensors).to(self.dtype)

    def write_parts(self, parts: Mapping[str, Tensor]) -> None:
        """Write this rank's parts into the parameters' gradients, in place.

        Args:
            parts: The part of each parameter, by name.
        """
        for name, part in parts.items():
            self.home.write(self.parameters[name], part)


def factor_dtype(parameters: Sequence[nn.Parameter], wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a block's factors.

    Args:
        parameters: The block's parameters.
        wanted: What the user asked for.

    Returns:
        ``wanted``, or the parameters' dtype but at least float32.
    """
    if wanted is not None:
        return wanted
    return torch.promote_types(parameters[0].dtype, torch.float32)
