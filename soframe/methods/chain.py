"""A chain of methods, called stages: the update of each stage is the input of the next.

Every stage receives the averaged gradient, the output of its predecessor (`Given.incoming`), and
its own second-order data and state under its own names, as if it were alone::

    Chain(("momentum", SOAP(betas=(0.0, 0.95)), "orthogonalise", "match-rms"))
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, TypeVar

from torch import Tensor

from soframe.layers.layout import BlockShape
from soframe.methods.base import Addend, Call, Candidate, Direction, Given, Method
from soframe.methods.returned import require_named
from soframe.registry import KINDS
from soframe.solvers.base import Solver
from soframe.specs import FactorSpec, SecondOrder, State, TensorSpec

T = TypeVar("T")


class Names:
    """Translates names between methods, by their numbers, and the method around them."""

    def __init__(
        self, by_method: Sequence[frozenset[str]], rename: Callable[[int, str], str]
    ) -> None:
        self._outer: list[dict[str, str]] = []  # by the names of each inner method
        self.inner: dict[str, tuple[int, str]] = {}
        """The number of the inner method and its own name, by the outer name."""
        for number, names in enumerate(by_method):
            outer = {name: rename(number, name) for name in sorted(names)}
            self._outer.append(outer)
            for name, outer_name in outer.items():
                self.inner[outer_name] = number, name

    def of_outer(self, number: int, entries: Mapping[str, T]) -> dict[str, T]:
        """Return the entries of an inner method under the outer names."""
        names = self._outer[number]
        return {names.get(name, name): entry for name, entry in entries.items()}

    def of_inner(self, number: int, entries: Mapping[str, T]) -> dict[str, T]:
        """Select the entries of an inner method, under its own names."""
        names = self._outer[number].items()
        return {name: entries[outer] for name, outer in names if outer in entries}

    def outer_factor(self, number: int, factor: FactorSpec) -> FactorSpec:
        """Return a factor of an inner method under the outer names."""
        names = self._outer[number]
        needs = tuple(names.get(need, need) for need in factor.needs)
        return replace(factor, name=names[factor.name], needs=needs)

    def inner_factor(self, factor: FactorSpec) -> tuple[int, FactorSpec]:
        """Return the number of the inner method of a factor, and the factor under its own names."""
        number, name = self.inner[factor.name]
        needs = tuple(self.inner[need][1] for need in factor.needs)
        return number, replace(factor, name=name, needs=needs)


@dataclass(frozen=True)
class Chain(Method):
    """Stages that act one after another; a chain within a chain is flattened.

    A weight and its bias are one block if all stages are ``joint``; updates are clipped if all
    stages are ``clipped``. The chain computes updates at once if any stage ``starts_at_once``:
    stages whose factors are not solved yet return their input unchanged.

    Attributes:
        stages: Methods, as names, classes or instances, in the order in which they act.

    Raises:
        TypeError: If ``stages`` is a string.
        ValueError: If ``stages`` is empty; if stages differ in ``refreshes_after`` or in
            ``reduces``; if no scaling is common to all.
    """

    stages: tuple[Method, ...]
    _factor_names: Names = field(init=False, repr=False, compare=False)
    _state_names: Names = field(init=False, repr=False, compare=False)
    _option_names: Names = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        choices: object = self.stages
        if isinstance(choices, str):
            raise TypeError(f"Chain: stages is a sequence of methods: pass ({choices!r},)")
        stages: list[Method] = []
        for choice in self.stages:
            stage = KINDS["method"].build(choice, Method)
            stages += stage.stages if isinstance(stage, Chain) else [stage]
        if not stages:
            raise ValueError("Chain: stages must name at least one method")
        derived = {
            "stages": tuple(stages),
            "scalings": _common_scalings(stages),
            **_common_declarations(stages),
            "_factor_names": _names([stage.factor_names() for stage in stages]),
            "_state_names": _names([stage.state_names() for stage in stages]),
            "_option_names": _names([frozenset(stage.settings()) for stage in stages]),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    # -- factors and statistics -------------------------------------------------------------------

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        factors = []
        for number, stage in enumerate(self.stages):
            for factor in stage.factors(shape):
                require_named(stage, factor.name, stage.factor_names(), "factor_names")
                factors.append(self._factor_names.outer_factor(number, factor))
        return tuple(factors)

    def statistics(self, call: Call) -> Mapping[str, Tensor | Addend]:
        statistics: dict[str, Tensor | Addend] = {}
        for number, stage in enumerate(self.stages):
            if stage.captures:
                of_stage = stage.statistics(replace(call, data=self._data(number, call.data)))
                statistics |= self._factor_names.of_outer(number, of_stage)
        return statistics

    def observe(self, gradient: Tensor, data: SecondOrder) -> Mapping[str, Tensor]:
        observed: dict[str, Tensor] = {}
        for number, stage in enumerate(self.stages):
            of_stage = stage.observe(gradient, self._data(number, data))
            observed |= self._factor_names.of_outer(number, of_stage)
        return observed

    def solver(self, factor: FactorSpec, default: Solver) -> Solver | None:
        number, of_stage = self._factor_names.inner_factor(factor)
        return self.stages[number].solver(of_stage, default)

    # -- state and direction ----------------------------------------------------------------------

    def state(self, shape: BlockShape) -> Mapping[str, TensorSpec]:
        specs: dict[str, TensorSpec] = {}
        for number, stage in enumerate(self.stages):
            of_stage = stage.state(shape)
            for name in of_stage:
                require_named(stage, name, stage.state_names(), "state_names")
            specs |= self._state_names.of_outer(number, of_stage)
        return specs

    def direct(self, step: Given) -> Direction:
        matrix = step.incoming
        state: dict[str, Tensor] = {}
        for number, stage in enumerate(self.stages):
            of_stage = replace(
                step,
                incoming=matrix,
                data=self._data(number, step.data),
                state=self._state_names.of_inner(number, step.state),
            )
            if not _is_ready(stage, of_stage):
                continue
            update = stage.direct(of_stage)
            matrix = update.matrix
            state |= self._state_names.of_outer(number, update.state)
        if matrix is step.incoming:
            matrix = matrix.clone()
        return Direction(matrix, state)

    def rebase(self, state: State, old: SecondOrder, new: SecondOrder) -> State:
        rebased: dict[str, Tensor] = {}
        for number, stage in enumerate(self.stages):
            of_stage = stage.rebase(
                self._state_names.of_inner(number, state),
                self._data(number, old),
                self._data(number, new),
            )
            rebased |= self._state_names.of_outer(number, of_stage)
        return rebased

    # -- declarations -----------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        for number, stage in enumerate(self.stages):
            settings |= self._option_names.of_outer(number, stage.settings())
        return settings

    def with_settings(self, settings: Mapping[str, Any]) -> Method:
        stages: list[Method] = []
        for number, stage in enumerate(self.stages):
            of_stage = self._option_names.of_inner(number, settings)
            stages.append(stage.with_settings(of_stage))
        if tuple(stages) == self.stages:
            return self
        new = copy.copy(self)
        object.__setattr__(new, "stages", tuple(stages))
        return new

    def unsuited(self, candidate: Candidate) -> str | None:
        for stage in self.stages:
            if (reason := stage.unsuited(candidate)) is not None:
                return reason
        return None

    def effort(self, shape: BlockShape) -> float:
        return sum(stage.effort(shape) for stage in self.stages)

    @property
    def rebases(self) -> bool:
        """Whether the state of any stage is kept in the basis of its second-order data."""
        return any(stage.rebases for stage in self.stages)

    def factor_names(self) -> frozenset[str]:
        return frozenset(self._factor_names.inner)

    def state_names(self) -> frozenset[str]:
        return frozenset(self._state_names.inner)

    def forward_only(self) -> Method:
        return Chain(tuple(s.forward_only() if s.captures else s for s in self.stages))

    def _data(self, stage: int, data: SecondOrder) -> SecondOrder:
        return self._factor_names.of_inner(stage, data)


def _names(by_stage: Sequence[frozenset[str]]) -> Names:
    """Return the names of stages in their chain: a name that two stages use gets a prefix."""
    uses = Counter(itertools.chain.from_iterable(by_stage))

    def rename(stage: int, name: str) -> str:
        return f"{stage}.{name}" if uses[name] > 1 else name

    return Names(by_stage, rename)


def _common_scalings(stages: Sequence[Method]) -> tuple[str, ...]:
    """Return the scalings that all stages allow; raise a ValueError if none is common."""
    scalings = tuple(stages[0].scalings)
    for stage in stages[1:]:
        scalings = tuple(name for name in scalings if name in stage.scalings)
    if not scalings:
        raise ValueError(f"Chain: no scaling= is common to {stages}: leave a stage out")
    return scalings


def _common_declarations(stages: Sequence[Method]) -> dict[str, Any]:
    """Derive a chain's attributes from its stages."""
    declared: dict[str, Any] = {}
    for name in ("joint", "clipped", "elementwise"):
        declared[name] = all(map(attrgetter(name), stages))
    for name in ("damped", "starts_at_once", "observes_with_data", "empirical_only"):
        declared[name] = any(map(attrgetter(name), stages))
    declared["auxiliary_ratio"] = min(map(attrgetter("auxiliary_ratio"), stages))
    with_factors = [stage for stage in stages if stage.factor_names()]
    order = "refreshes its factors after the direction, and another one before"
    declared["refreshes_after"] = _common(with_factors, "refreshes_after", order)
    capturing = [stage for stage in stages if stage.captures]
    rows = "takes all positions of a sample as one row, and another one as rows"
    declared["reduces"] = _common(capturing, "reduces", rows)
    return declared


def _common(stages: Sequence[Method], name: str, meaning: str) -> bool:
    """Return an attribute that all stages share, False for no stages; raise if they differ."""
    declaring = list(filter(attrgetter(name), stages))
    if declaring and len(declaring) < len(stages):
        raise ValueError(
            f"Chain: {declaring[0]!r} {meaning}: a block has one order of its step; choose stages "
            f"that agree"
        )
    return bool(declaring)


def _is_ready(stage: Method, step: Given) -> bool:
    """Return whether a stage can compute updates; factors with ``needs`` may still be missing."""
    if stage.starts_at_once:
        return True
    groups, out, into = step.incoming.shape
    factors = stage.factors(BlockShape(groups, out, into))
    return all(factor.name in step.data for factor in factors if not factor.needs)
