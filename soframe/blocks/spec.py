"""The fixed part of a block: its parameters, their layout, the method and the solver."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from soframe.blocks.home import GradientHome
from soframe.layers.base import BlockShape, LayerHelper
from soframe.layers.layout import Layout
from soframe.methods.base import Method
from soframe.solvers.base import Solver
from soframe.specs import FactorSpec, Shards, TensorSpec
from soframe.strategies.work import BlockWork


class SolvedFactor(NamedTuple):
    """A factor that is solved: its position among the block's factors, its spec, its solver."""

    position: int
    factor: FactorSpec
    solver: Solver


@dataclass(eq=False)
class BlockSpec:
    """The curvature of some parameters, most often of one layer's; it never changes."""

    name: str  # the qualified name of the (first) module, or of the parameter
    helpers: tuple[LayerHelper, ...]  # one per module whose calls are observed, sharing parameters
    method: Method  # the curvature method
    solver: Solver  # the solver of factors for which the method chooses none
    dtype: torch.dtype  # the dtype of factors and second-order data
    layout: Layout  # parameters to gradient matrix: the first helper, if there is one
    home: GradientHome  # where the parameters' gradients live
    ranks: tuple[int, ...] = ()  # the global ranks of the group in which the block is placed
    auxiliary: bool = False  # whether its method is the auxiliary one
    state_dtype: torch.dtype = torch.float32  # the dtype in which the method's state is kept
    factor_dtype: torch.dtype = torch.float32  # the dtype in which running factors are kept
    offload: bool = False  # whether running factors are kept on the host

    @property
    def kind(self) -> tuple[object, ...]:
        """A key: blocks with equal keys have the same factors, solvers and states, see `share`."""
        layout = self.layout
        shapes = tuple((name, parameter.shape) for name, parameter in self.parameters.items())
        # A helper that overrides `factor` may do so by any setting of its module.
        adapts = isinstance(layout, LayerHelper) and type(layout).factor is not LayerHelper.factor
        types = (type(layout), *map(type, self.helpers))
        shape = (self.shape, shapes, bool(self.shards), self.factors if adapts else ())
        return types, id(self.method), id(self.solver), self.dtypes, shape

    @property
    def dtypes(self) -> tuple[torch.dtype, torch.dtype, torch.dtype]:
        """The dtypes of second-order data, of states and of running factors."""
        return self.dtype, self.state_dtype, self.factor_dtype

    def share(self, first: BlockSpec) -> None:
        """Take the specs of a block of the same kind."""
        vars(self).update(first._of_kind)

    @cached_property
    def _of_kind(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in _OF_KIND}

    @cached_property
    def shape(self) -> BlockShape:
        """The shape of the gradient matrix."""
        return BlockShape(*self.layout.shape)

    @cached_property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return next(iter(self.parameters.values())).device

    @cached_property
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
    def leading(self) -> str:
        """The first factor whose statistics need no second-order data; empty without one."""
        return next((factor.name for factor in self.factors if not factor.needs), "")

    @cached_property
    def captured(self) -> tuple[FactorSpec, ...]:
        """The factors whose statistics are computed from calls."""
        return tuple(factor for factor in self.factors if factor.captured)

    @cached_property
    def observes(self) -> bool:
        """Whether a factor takes statistics of the averaged gradient."""
        return len(self.captured) < len(self.factors)

    @cached_property
    def psd(self) -> frozenset[str]:
        """The names of the factors that are matrices."""
        return frozenset(factor.name for factor in self.factors if factor.kind == "psd")

    @cached_property
    def has_rows_by_group(self) -> bool:
        """Whether each group has rows of its own."""
        return any(factor.mean_over == "group rows" for factor in self.factors)

    @cached_property
    def solved_factors(self) -> tuple[SolvedFactor, ...]:
        """The factors that are solved."""
        solved: list[SolvedFactor] = []
        for index, factor in enumerate(self.factors):
            solver = self.method.solver(factor, self.solver)
            if not isinstance(solver, Solver | None):
                raise TypeError(f"{self.method!r}: solver() must return a Solver, not {solver!r}")
            if solver is not None:
                solved.append(SolvedFactor(index, factor, solver))
        return tuple(solved)

    @cached_property
    def solvers(self) -> list[tuple[Solver, list[int]]]:
        """The solvers, each with the numbers of its solved factors; equal solvers are merged."""
        solvers: list[tuple[Solver, list[int]]] = []
        for number, (_, _, solver) in enumerate(self.solved_factors):
            for known, numbers in solvers:
                if known == solver:
                    numbers.append(number)
                    break
            else:
                solvers.append((solver, [number]))
        return solvers

    @cached_property
    def unsolved(self) -> tuple[FactorSpec, ...]:
        """The factors that are their own data."""
        return tuple(factor for factor in self.factors if factor.name not in self.tensors)

    @cached_property
    def tensors(self) -> dict[str, dict[str, TensorSpec]]:
        """The second-order data of each factor that is solved."""
        return {factor.name: solver.tensors(factor) for _, factor, solver in self.solved_factors}

    @property
    def relatively_damped(self) -> bool:
        """Whether its damping is a multiple of its own curvature, however little that is."""
        return any("mean_trace" in specs for specs in self.tensors.values())

    @cached_property
    def states(self) -> Mapping[str, TensorSpec]:
        """The method's state, by name."""
        return self.method.state(self.shape)

    @cached_property
    def parcel(self) -> Mapping[str, TensorSpec]:
        """The tensors that are sent in place of an update; empty for the update itself."""
        parcel = self.method.parcel(self.shape)
        if not self.shards:
            return parcel
        # Each rank needs a part of the update alone, which may be less.
        size = sum(spec.packed_numel for spec in parcel.values())
        if size * len(self.ranks) < math.prod(self.shape):
            return parcel
        return {}

    @cached_property
    def remembers(self) -> bool:
        """Whether its updates depend on earlier gradients: by a state, or by factors of them."""
        return bool(self.states) or self.observes

    @cached_property
    def elementwise(self) -> bool:
        """Whether a stack may hold it as a vector of its entries."""
        if not self.method.elementwise or self.factors or self.shards or self.parcel:
            return False
        return all(spec.shape == tuple(self.shape) for spec in self.states.values())

    @cached_property
    def takes_samples(self) -> bool:
        """Whether samples are drawn for ``Statistics(rows=...)`` rather than rows."""
        return self.method.reduces or self.reads_both

    @cached_property
    def reads_both(self) -> bool:
        """Whether statistics of a factor are computed from inputs and output gradients together."""
        return any(factor.reads == "both" for factor in self.factors)

    @cached_property
    def shards(self) -> dict[str, Shards]:
        """How each parameter is sharded over ranks, by name; empty if all are whole."""
        cut: dict[str, Shards] = {}
        for name, parameter in self.parameters.items():
            try:
                shards = self.home.shards(parameter, self.ranks)
            except ValueError as error:
                raise ValueError(f"{self.name}.{name}: {error}") from error
            if shards is not None:
                cut[name] = shards
        if not cut:
            return {}
        shards_of: dict[str, Shards] = {}
        for name, parameter in self.parameters.items():
            dtype = str(parameter.dtype).removeprefix("torch.")
            uncut = Shards.none(tuple(parameter.shape), len(self.ranks), dtype)
            shards_of[name] = cut.get(name, uncut)
        return shards_of

    @cached_property
    def follows(self) -> bool:
        """Whether second-order data follow the factors between solves."""
        return any(solver.follows for _, _, solver in self.solved_factors)

    def work(self, kind: int) -> BlockWork:
        """Return the block's work, for its placement; for ``kind`` see `BlockWork`."""
        return replace(
            self._work,
            name=self.name,
            kind=kind,
            device=str(self.device),
            parameters=len(self.parameters),
            shards=tuple(self.shards.values()),
        )

    @cached_property
    def _work(self) -> BlockWork:
        continued = {position for position, _, solver in self.solved_factors if solver.continues}
        resident: list[bool] = []
        second_order: list[tuple[TensorSpec, ...]] = []
        for position, factor in enumerate(self.factors):
            resident.append(position in continued or not factor.captured)
            second_order.append(tuple(self.tensors.get(factor.name, {}).values()))
        return BlockWork(
            name="",
            shape=self.shape,
            factors=self.factors,
            second_order=tuple(second_order),
            dtype=str(self.dtype).removeprefix("torch."),
            state_dtype=str(self.state_dtype).removeprefix("torch."),
            factor_dtype=str(self.factor_dtype).removeprefix("torch."),
            resident=tuple(resident) if any(resident) else (),
            unsolved=tuple(factor.name for factor in self.unsolved),
            state=tuple(self.states.values()),
            parcel=tuple(self.parcel.values()),
            effort=self.method.effort(self.shape),
            after=self.method.refreshes_after,
            elementwise=self.elementwise,
        )


_OF_KIND = [
    name
    for name, value in vars(BlockSpec).items()
    if isinstance(value, cached_property)
    and name not in ("device", "parameters", "shards", "_of_kind")
]
"""The properties that blocks of one kind share."""
