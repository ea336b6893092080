"""A block at run time: its helpers, its running factors, its second-order data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from soframe.comm.packing import packed_diagonal, unpack_triangle
from soframe.comm.tasks import Task, finish
from soframe.kernels.gram import mirror
from soframe.layers.base import BlockShape, LayerHelper
from soframe.methods.base import Method
from soframe.methods.scaling import Counts
from soframe.solvers.base import Solver, mean_of, mean_trace
from soframe.specs import FactorSpec, TensorSpec
from soframe.strategies.placement import BlockWork


@dataclass(eq=False)
class Block:
    """The curvature of one layer's parameters.

    Attributes:
        name: The qualified name of the (first) module.
        helpers: One per module; several where modules share the parameters.
        method: The curvature method.
        solver: The solver.
        dtype: The dtype of factors and second-order data.
        arrived: The running factors that this rank holds, by name: ``[groups, n, n]``, or packed
            ``[groups, n (n + 1) / 2]`` where its placement says so; empty before the first
            statistics. Without what is under way: see ``running``.
        lower: Of these the ones of which the lower triangle counts, until somebody looks: most
            statistics steps are followed by another before the next solve.
        under_way: What will bring statistics that travel still into ``arrived``.
        mass: The weight that the running factors' average has gathered: 1 without start-up bias,
            0 before the first statistics. The same on every rank.
        pending: The part of ``mass`` that is in the ranks' accumulators still.
        local: This rank's accumulators, by factor, ``[groups, n (n + 1) / 2]``; empty unless the
            placement defers the reduction of statistics to the solves.
        second_order: Factor name -> tensor name -> tensor; empty where this rank has none.
        solved_factors: The factors whose data gradient workers have: the same on every rank.
        failed_factors: Those that could not be solved since it was emptied: likewise.
        failures: How often each factor could not be solved so far: likewise.
        sums: The statistics of the window, by factor: the lower triangles of ``[groups, n, n]``.
        counts: What they count.
        rows: How many rows, over all ranks, statistics were made of when last asked; 0 if never.
        input_of: The name of the first block that was called with the same input then.
        damping: In place of the preconditioner's; None for that. The same on every rank.
    """

    name: str
    helpers: tuple[LayerHelper, ...]
    method: Method
    solver: Solver
    dtype: torch.dtype
    arrived: dict[str, Tensor] = field(default_factory=dict)
    lower: set[str] = field(default_factory=set)
    under_way: list[Task] = field(default_factory=list)
    mass: float = 0.0
    pending: float = 0.0
    local: dict[str, Tensor] = field(default_factory=dict)
    second_order: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    solved_factors: set[str] = field(default_factory=set)
    failed_factors: set[str] = field(default_factory=set)
    failures: Counter[str] = field(default_factory=Counter)
    sums: dict[str, Tensor] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    rows: int = 0
    input_of: str = ""
    damping: float | None = None

    def __post_init__(self) -> None:
        self.shape: BlockShape = self.helper.shape
        self.factors: tuple[FactorSpec, ...] = self.method.factors(self.shape)
        self.device: torch.device = next(iter(self.parameters.values())).device
        self.tensors: dict[str, dict[str, TensorSpec]] = {
            factor.name: self.solver.tensors(factor) for factor in self.factors
        }

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

    @property
    def helper(self) -> LayerHelper:
        """The helper that packs and unpacks the gradient."""
        return self.helpers[0]

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        """The parameters of the block, by their name in the module."""
        return self.helper.parameters

    @property
    def solved(self) -> bool:
        """Whether the gradient workers have second-order data for every factor."""
        return len(self.solved_factors) == len(self.factors)

    @property
    def work(self) -> BlockWork:
        """What has to be placed."""
        second_order = tuple(tuple(specs.values()) for specs in self.tensors.values())
        dtype = str(self.dtype).removeprefix("torch.")
        device, parameters = str(self.device), len(self.parameters)
        return BlockWork(
            self.name, self.shape, self.factors, second_order, dtype, device, parameters
        )

    def gradient(self) -> Tensor | None:
        """Return the gradient as a matrix in the factors' dtype.

        Returns:
            ``[groups, out, in]``; None if no parameter of the block has a gradient. One that has
            none counts as zero.
        """
        own = self.parameters
        if all(parameter.grad is None for parameter in own.values()):
            return None
        parts = {
            name: parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            for name, parameter in own.items()
        }
        matrix = self.helper.to_matrix(parts.get("weight"), parts.get("bias"))
        return matrix.to(self.dtype)

    def write(self, matrix: Tensor) -> None:
        """Write a matrix into the parameters' gradients, in place.

        Args:
            matrix: ``[groups, out, in]``.
        """
        weight, bias = self.helper.from_matrix(matrix)
        for name, value in (("weight", weight), ("bias", bias)):
            parameter = self.parameters.get(name)
            if value is not None and parameter is not None and parameter.grad is not None:
                parameter.grad.copy_(value)

    def matrix(self, factor: FactorSpec) -> Tensor:
        """Return a running factor that this rank holds, as whole matrices.

        Args:
            factor: The factor.

        Returns:
            ``[groups, n, n]``; the running factor itself unless it is packed.
        """
        stored = self.running[factor.name]
        return stored if stored.dim() == 3 else unpack_triangle(stored, factor.size)

    def mean_trace(self, factor: FactorSpec) -> Tensor:
        """Return the trace of a running factor that this rank holds, over its size.

        Args:
            factor: The factor.

        Returns:
            ``[groups]``.
        """
        stored = self.running[factor.name]
        if stored.dim() == 3:
            return mean_trace(stored)
        return mean_of(packed_diagonal(stored, factor.size))

    def forget_window(self) -> None:
        """Drop the statistics of the window."""
        self.sums = {}
        self.counts = Counts()

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
