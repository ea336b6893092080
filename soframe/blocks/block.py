"""A block at run time: its layout, its running factors, its second-order data, its state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from soframe.blocks.home import GradientHome
from soframe.comm.packing import packed_diagonal, unpack_triangle
from soframe.comm.tasks import Task, finish
from soframe.kernels.gram import mirror
from soframe.layers.base import BlockShape, LayerHelper
from soframe.layers.layout import Layout
from soframe.methods.base import Method
from soframe.methods.scaling import Counts
from soframe.solvers.base import Solver, mean_of, mean_trace
from soframe.specs import VALUE, FactorSpec, Shards, TensorSpec
from soframe.strategies.placement import BlockWork


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
        arrived: The running factors that this rank holds, by name: in their shape, or packed as
            triangles where the placement says so; empty before the first statistics. Without what
            is under way: see ``running``.
        lower: Of these the ones of which the lower triangle counts, until somebody looks: most
            statistics steps are followed by another before the next solve.
        under_way: What will bring statistics that travel still into ``arrived``.
        masses: The weight that each running factor's average has gathered, one number or one for
            each group: 1 without start-up bias, 0 before the first statistics. The same on every
            rank.
        pending: The part of ``mass`` that is in the ranks' accumulators still.
        local: This rank's accumulators, by factor, ``[groups, n (n + 1) / 2]``; empty unless the
            placement defers the reduction of statistics to the solves.
        second_order: Factor name -> tensor name -> tensor; empty where this rank has none.
        solved_factors: The factors whose data gradient workers have: the same on every rank.
        failed_factors: Those that could not be solved since it was emptied: likewise.
        failures: How often each factor could not be solved so far: likewise.
        state: What the method keeps from step to step, by name; empty on ranks that do not
            precondition the block, and before its first update.
        updates: How many updates the method has made: the same on every rank.
        sums: The statistics of the window, by factor: of matrices the lower triangles.
        gathered: The factors that take statistics in the window under way, if the block does: those
            whose statistics need second-order data only where these are there.
        counts: What the sums count.
        rows: How many rows, over all ranks, statistics were made of when last asked; 0 if never.
        input_of: The name of the first block that was called with the same input then.
        damping: In place of the preconditioner's; None for that. The same on every rank.
        auxiliary: Whether its method is the auxiliary one.
        shards: How each parameter is shared out over ranks, by its name; empty where every rank has
            all of them whole.
    """

    name: str
    helpers: tuple[LayerHelper, ...]
    method: Method
    solver: Solver
    dtype: torch.dtype
    layout: Layout
    home: GradientHome
    ranks: tuple[int, ...] = ()
    arrived: dict[str, Tensor] = field(default_factory=dict)
    lower: set[str] = field(default_factory=set)
    under_way: list[Task] = field(default_factory=list)
    masses: dict[str, tuple[float, ...]] = field(default_factory=dict)
    pending: float = 0.0
    local: dict[str, Tensor] = field(default_factory=dict)
    second_order: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    solved_factors: set[str] = field(default_factory=set)
    failed_factors: set[str] = field(default_factory=set)
    failures: Counter[str] = field(default_factory=Counter)
    state: dict[str, Tensor] = field(default_factory=dict)
    updates: int = 0
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    rows: int = 0
    input_of: str = ""
    damping: float | None = None
    auxiliary: bool = False

    def __post_init__(self) -> None:
        self.shape: BlockShape = self.layout.shape
        factors = self.method.factors(self.shape)
        if isinstance(self.layout, LayerHelper):
            factors = tuple(map(self.layout.factor, factors))
        self.factors: tuple[FactorSpec, ...] = factors
        self.captured = tuple(factor for factor in factors if factor.captured)
        self.psd = frozenset(factor.name for factor in factors if factor.kind == "psd")
        self.unequal = any(factor.mean_over == "group rows" for factor in factors)
        self.device: torch.device = next(iter(self.parameters.values())).device
        self.solvers: dict[str, Solver | None] = {
            factor.name: self.method.solver(factor, self.solver) for factor in factors
        }
        self.tensors: dict[str, dict[str, TensorSpec]] = {
            factor.name: solver.tensors(factor)
            for factor in factors
            if (solver := self.solvers[factor.name]) is not None
        }
        self.states: Mapping[str, TensorSpec] = self.method.state(self.shape)
        # The factors that are solved: the index of each, what it is, and who solves it.
        self.solved_here: list[tuple[int, FactorSpec, Solver]] = [
            (index, factor, solver)
            for index, factor in enumerate(factors)
            if (solver := self.solvers[factor.name]) is not None
        ]
        self.unsolved = tuple(f for f in factors if self.solvers[f.name] is None)
        self._first = next((f.name for f in factors if not f.needs), "")
        self.takes_samples = self.method.reduces or any(f.reads == "both" for f in factors)
        self._dependent = any(f.needs for f in factors)
        self._all_captured = frozenset(f.name for f in self.captured)
        self.gathered: frozenset[str] = self._gatherable()
        self.shards: dict[str, Shards] = self._shards()

    def _shards(self) -> dict[str, Shards]:
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

    # -- statistics -------------------------------------------------------------------------------

    @property
    def mass(self) -> float:
        """The weight of the first factor's statistics so far; 1 where there are no factors.

        Factors whose statistics need second-order data come later, and do not count.
        """
        if not self.factors:
            return 1.0
        masses = self.masses.get(self._first)
        if masses is None:
            return 0.0
        return masses[0] if len(masses) == 1 else max(masses)

    def gain(
        self, factor: FactorSpec, keep: float, reached: Sequence[float] | None = None
    ) -> float | list[float]:
        """Let the mass of a factor grow by that of one statistic.

        Args:
            factor: The factor.
            keep: What its average keeps of its past.
            reached: How many rows reached each group, where each has an average of its own: those
                that none has reached keep theirs.

        Returns:
            How much of the statistic enters the average, of each group where they differ. Dividing
            by the gathered mass frees the average of its start (Adam's bias correction).
        """
        if factor.mean_over != "group rows":
            mass = keep * self.masses.get(factor.name, (0.0,))[0] + (1 - keep)
            self.masses[factor.name] = (mass,)
            return (1 - keep) / mass
        assert reached is not None
        before = self.masses.get(factor.name, (0.0,) * factor.groups)
        pairs = list(zip(before, reached, strict=True))
        after = tuple(keep * mass + (1 - keep) if rows > 0 else mass for mass, rows in pairs)
        self.masses[factor.name] = after
        return [
            (1 - keep) / mass if rows > 0 else 0.0
            for mass, rows in zip(after, reached, strict=True)
        ]

    @property
    def lacks(self) -> bool:
        """Whether a factor waits for its first statistics, which it could take now."""
        if not self._dependent:
            return False
        able = self._gatherable()
        return any(f.needs and f.name in able and f.name not in self.masses for f in self.captured)

    def _gatherable(self) -> frozenset[str]:
        if not self._dependent:
            return self._all_captured
        solved = self.solved_factors
        return frozenset(f.name for f in self.captured if solved.issuperset(f.needs))

    def renew(self, name: str) -> None:
        """Drop what was gathered with second-order data that are about to be replaced.

        Args:
            name: The factor whose data these are.
        """
        for factor in self.factors if self._dependent else ():
            if name in factor.needs:
                self.gathered -= {factor.name}
                for kept in (self.masses, self.arrived, self.sums):
                    kept.pop(factor.name, None)
                self.lower.discard(factor.name)

    @property
    def running(self) -> dict[str, Tensor]:
        """The running factors, whole, once all statistics so far have arrived."""
        self.arrive()
        for name in self.lower:
            mirror(self.arrived[name])
        self.lower.clear()
        return self.arrived

    @running.setter
    def running(self, factors: dict[str, Tensor]) -> None:
        self.arrive()
        self.arrived = factors
        self.lower.clear()

    def arrive(self) -> None:
        """Wait for the statistics that are under way; every rank has sent its own already."""
        under_way, self.under_way = self.under_way, []
        for task in under_way:
            finish(task)

    def damped_with(self, damping: float) -> float:
        """Return the block's damping.

        Args:
            damping: The preconditioner's.
        """
        return damping if self.damping is None else self.damping

    # -- second-order data and state --------------------------------------------------------------

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters of the block, by their name in the module."""
        return self.layout.parameters

    @property
    def solved(self) -> bool:
        """Whether the gradient workers have second-order data for every factor that is solved."""
        return len(self.solved_factors) == len(self.tensors)

    @property
    def lost(self) -> bool:
        """Whether statistics are to be made with data that were there once, and are not now."""
        if not self.method.observes_with_data or self.solved or self.failed_factors:
            return False
        return any(f.name in self.masses for f in self.factors if not f.captured)

    @property
    def follows(self) -> bool:
        """Whether second-order data follow the factors between solves."""
        return any(solver.follows for _, _, solver in self.solved_here)

    @property
    def active(self) -> bool:
        """Whether the method makes a direction of the block's gradient yet."""
        return self.solved or self.method.starts_at_once

    @property
    def data(self) -> dict[str, Mapping[str, Tensor]]:
        """What `Method.direct` is given: second-order data, and factors that are their own."""
        data: dict[str, Mapping[str, Tensor]] = dict(self.second_order) if self.solved else {}
        for factor in self.unsolved:
            if factor.name in self.masses:
                data[factor.name] = {VALUE: self.running[factor.name]}
        return data

    def shares(self, traces: Sequence[Tensor], damping: float) -> list[Tensor]:
        """Return the share of the damping of each factor that is solved.

        Args:
            traces: The mean trace of each, ``[groups]``.
            damping: The preconditioner's damping.

        Returns:
            ``[groups]`` for each: those of one solver are split by it together.
        """
        damping = self.damped_with(damping)
        solvers = [solver for _, _, solver in self.solved_here]
        if all(solver is self.solver for solver in solvers):
            return self.solver.shares(traces, damping)
        shares: dict[int, Tensor] = {}
        for one in {id(solver): solver for solver in solvers}.values():
            mine = [number for number, solver in enumerate(solvers) if solver is one]
            split = one.shares([traces[number] for number in mine], damping)
            shares.update(zip(mine, split, strict=True))
        return [shares[number] for number in range(len(solvers))]

    @property
    def work(self) -> BlockWork:
        """What has to be placed."""
        solvers = [self.solvers[factor.name] for factor in self.factors]
        resident = tuple(
            not factor.captured or (solver is not None and solver.continues)
            for factor, solver in zip(self.factors, solvers, strict=True)
        )
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
            unsolved=tuple(f.name for f in self.factors if self.solvers[f.name] is None),
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
        assert not self.shards, "the gradient is in parts, which have to be gathered first"
        parameters, read = self.parameters, self.home.read
        tensors: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            gradient = read(parameter)
            if gradient is not None:
                tensors[name] = gradient
        if not tensors:
            return None
        if len(tensors) < len(parameters):
            tensors = {n: tensors.get(n, torch.zeros_like(p)) for n, p in parameters.items()}
        return self.layout.pack(tensors).to(self.dtype)

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

    def matrix(self, factor: FactorSpec) -> Tensor:
        """Return a running factor that this rank holds, as whole matrices.

        Args:
            factor: The factor.

        Returns:
            ``[groups, n, n]``, or the factor's own shape where it is no matrix; the running factor
            itself unless it is packed.
        """
        stored = self.running[factor.name]
        if factor.kind == "psd" and stored.dim() == 2:
            return unpack_triangle(stored, factor.size)
        return stored

    def mean_trace(self, factor: FactorSpec) -> Tensor:
        """Return the trace of a running factor that this rank holds, over its size.

        Args:
            factor: The factor.

        Returns:
            ``[groups]``.
        """
        stored = self.running[factor.name]
        if factor.kind != "psd":
            return mean_of(stored.flatten(1))
        if stored.dim() == 3:
            return mean_trace(stored)
        return mean_of(packed_diagonal(stored, factor.size))

    def forget_window(self) -> None:
        """Drop the statistics of the window."""
        self.sums = {}
        self.counts = Counts()
        self.gathered = self._gatherable()

    def flat_specs(self) -> list[tuple[str, str, TensorSpec]]:
        """Return (factor, tensor, spec) of the second-order data, in the order of travel."""
        return [
            (factor, name, spec)
            for factor, specs in self.tensors.items()
            for name, spec in specs.items()
        ]


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
