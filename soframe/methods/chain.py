"""A chain of methods, called stages: the update of each stage is the input of the next.

Every stage receives the averaged gradient, the output of its predecessor (`Given.incoming`), and
its own second-order data and state under its own names, as if it were alone::

    Chain(("momentum", SOAP(betas=(0.0, 0.95)), "orthogonalise", "match-rms"))
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from soframe.layers.layout import BlockShape
from soframe.methods.base import Addend, Call, Candidate, Direction, Given, Method
from soframe.methods.returned import require_named
from soframe.registry import KINDS
from soframe.solvers.base import Solver
from soframe.specs import FactorSpec, SecondOrder, TensorSpec

T = TypeVar("T")


class _Names:
    """Translates names between stages and chain; a name that two stages use gets a prefix."""

    def __init__(self, by_stage: Sequence[frozenset[str]]) -> None:
        uses = Counter(itertools.chain.from_iterable(by_stage))
        self.of: list[dict[str, str]] = []
        """The names of each stage, mapped to the chain's names."""
        for stage, names in enumerate(by_stage):
            outer = {name: f"{stage}.{name}" if uses[name] > 1 else name for name in names}
            self.of.append(outer)

    def outer(self, stage: int, name: str) -> str:
        """Return the chain's name of a stage's name."""
        return self.of[stage].get(name, name)

    def inner(self, outer: str) -> tuple[int, str]:
        """Return the stage and its own name, from the chain's name."""
        for stage, names in enumerate(self.of):
            for name, chain_name in names.items():
                if chain_name == outer:
                    return stage, name
        raise KeyError(outer)

    def every(self) -> frozenset[str]:
        """Return all names of the chain."""
        return frozenset(itertools.chain.from_iterable(names.values() for names in self.of))


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
    _factor_names: _Names = field(init=False, repr=False, compare=False)
    _state_names: _Names = field(init=False, repr=False, compare=False)
    _option_names: _Names = field(init=False, repr=False, compare=False)

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
            "_factor_names": _Names([stage.factor_names() for stage in stages]),
            "_state_names": _Names([stage.state_names() for stage in stages]),
            "_option_names": _Names([frozenset(stage.settings()) for stage in stages]),
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    # -- factors and statistics -------------------------------------------------------------------

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        factors = []
        for number, stage in enumerate(self.stages):
            for factor in stage.factors(shape):
                require_named(stage, factor.name, stage.factor_names(), "factor_names")
                name = self._factor_names.outer(number, factor.name)
                needs = tuple(self._factor_names.outer(number, need) for need in factor.needs)
                factors.append(replace(factor, name=name, needs=needs))
        return tuple(factors)

    def statistics(self, call: Call) -> Mapping[str, Tensor | Addend]:
        statistics: dict[str, Tensor | Addend] = {}
        for number, stage in enumerate(self.stages):
            if stage.captures:
                of_stage = stage.statistics(replace(call, data=self._data(number, call.data)))
                statistics |= {self._factor_names.outer(number, k): v for k, v in of_stage.items()}
        return statistics

    def observe(self, gradient: Tensor, data: SecondOrder) -> Mapping[str, Tensor]:
        observed: dict[str, Tensor] = {}
        for number, stage in enumerate(self.stages):
            of_stage = stage.observe(gradient, self._data(number, data))
            observed |= {self._factor_names.outer(number, k): v for k, v in of_stage.items()}
        return observed

    def solver(self, factor: FactorSpec, default: Solver) -> Solver | None:
        number, name = self._factor_names.inner(factor.name)
        needs = tuple(self._factor_names.inner(need)[1] for need in factor.needs)
        return self.stages[number].solver(replace(factor, name=name, needs=needs), default)

    # -- state and direction ----------------------------------------------------------------------

    def state(self, shape: BlockShape) -> Mapping[str, TensorSpec]:
        specs = {}
        for number, stage in enumerate(self.stages):
            for name, spec in stage.state(shape).items():
                require_named(stage, name, stage.state_names(), "state_names")
                specs[self._state_names.outer(number, name)] = spec
        return specs

    def direct(self, step: Given) -> Direction:
        matrix = step.incoming
        state: dict[str, Tensor] = {}
        for number, stage in enumerate(self.stages):
            of_stage = replace(
                step,
                incoming=matrix,
                data=self._data(number, step.data),
                state=_chosen(step.state, self._state_names.of[number]),
            )
            if not _is_ready(stage, of_stage):
                continue
            update = stage.direct(of_stage)
            matrix = update.matrix
            state |= {self._state_names.outer(number, k): v for k, v in update.state.items()}
        return Direction(matrix.clone() if matrix is step.incoming else matrix, state)

    def rebase(
        self, state: Mapping[str, Tensor], old: SecondOrder, new: SecondOrder
    ) -> Mapping[str, Tensor]:
        rebased: dict[str, Tensor] = {}
        for number, stage in enumerate(self.stages):
            of_stage = stage.rebase(
                _chosen(state, self._state_names.of[number]),
                self._data(number, old),
                self._data(number, new),
            )
            rebased |= {self._state_names.outer(number, k): v for k, v in of_stage.items()}
        return rebased

    # -- declarations -----------------------------------------------------------------------------

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        for number, stage in enumerate(self.stages):
            for name, value in stage.settings().items():
                settings[self._option_names.outer(number, name)] = value
        return settings

    def with_settings(self, settings: Mapping[str, Any]) -> Method:
        names = self._option_names
        new = copy.copy(self)
        stages = tuple(
            stage.with_settings(_chosen(settings, names.of[number]))
            for number, stage in enumerate(self.stages)
        )
        object.__setattr__(new, "stages", stages)
        return self if stages == self.stages else new

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
        return self._factor_names.every()

    def state_names(self) -> frozenset[str]:
        return self._state_names.every()

    def forward_only(self) -> Method:
        return Chain(tuple(s.forward_only() if s.captures else s for s in self.stages))

    def _data(self, stage: int, data: SecondOrder) -> SecondOrder:
        return _chosen(data, self._factor_names.of[stage])


def _chosen(every: Mapping[str, T], names: Mapping[str, str]) -> dict[str, T]:
    """Select the entries of one stage, under its own names."""
    return {name: every[outer] for name, outer in names.items() if outer in every}


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
    return {
        "joint": all(stage.joint for stage in stages),
        "clipped": all(stage.clipped for stage in stages),
        "damped": any(stage.damped for stage in stages),
        "starts_at_once": any(stage.starts_at_once for stage in stages),
        "refreshes_after": _common(
            [(s, s.refreshes_after) for s in stages if s.factor_names()],
            "refreshes its factors after the direction, and another one before",
        ),
        "reduces": _common(
            [(stage, stage.reduces) for stage in stages if stage.captures],
            "takes all positions of a sample as one row, and another one as rows",
        ),
        "observes_with_data": any(stage.observes_with_data for stage in stages),
        "elementwise": all(stage.elementwise for stage in stages),
        "auxiliary_ratio": min(stage.auxiliary_ratio for stage in stages),
        "empirical_only": any(stage.empirical_only for stage in stages),
    }


def _common(declared: Sequence[tuple[Method, bool]], which: str) -> bool:
    """Return the common value of all stages, False for no stages; raise if they differ."""
    stages = [stage for stage, value in declared if value]
    if stages and len(stages) < len(declared):
        raise ValueError(
            f"Chain: {stages[0]!r} {which}: a block has one order of its step; choose stages that "
            f"agree"
        )
    return bool(stages)


def _is_ready(stage: Method, step: Given) -> bool:
    """Return whether a stage can compute updates; factors with ``needs`` may still be missing."""
    if stage.starts_at_once:
        return True
    groups, out, into = step.incoming.shape
    factors = stage.factors(BlockShape(groups, out, into))
    return all(factor.name in step.data for factor in factors if not factor.needs)
