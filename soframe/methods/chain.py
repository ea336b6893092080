"""A chain of methods, called stages: the update of each stage is the input of the next.

Every stage receives the averaged gradient, the output of its predecessor (`Given.incoming`), and
its own second-order data and state under its own names, as if it were alone::

    Chain(("momentum", SOAP(betas=(0.0, 0.95)), "orthogonalise", "match-rms"))
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from torch import Tensor

from soframe.layers.layout import BlockShape
from soframe.methods.base import Direction, Given, Method
from soframe.methods.composed import Composed, Names
from soframe.registry import KINDS


@dataclass(frozen=True)
class Chain(Composed):
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
        derived: dict[str, Any] = {
            "stages": tuple(stages),
            "scalings": _common_scalings(stages),
            "_option_names": Names.apart([frozenset(stage.settings()) for stage in stages]),
        }
        derived |= _common_declarations(stages)
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        self._name()

    @property
    def _inner(self) -> Sequence[Method]:
        return self.stages

    def direct(self, step: Given) -> Direction:
        matrix = step.incoming
        state: dict[str, Tensor] = {}
        for number, stage in enumerate(self.stages):
            of_stage = self._given(number, step, step.gradient, matrix)
            if not _is_ready(stage, of_stage):
                continue
            update = stage.direct(of_stage)
            matrix = update.matrix
            state |= self._state_names.of_outer(number, update.state)
        if matrix is step.incoming:
            matrix = matrix.clone()
        return Direction(matrix, state)

    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {}
        for number, stage in enumerate(self.stages):
            settings |= self._option_names.of_outer(number, stage.settings())
        return settings

    def with_settings(self, settings: Mapping[str, Any]) -> Chain:
        stages: list[Method] = []
        for number, stage in enumerate(self.stages):
            of_stage = self._option_names.of_inner(number, settings)
            stages.append(stage.with_settings(of_stage))
        if tuple(stages) == self.stages:
            return self
        new = copy.copy(self)
        object.__setattr__(new, "stages", tuple(stages))
        return new

    def forward_only(self) -> Method:
        return Chain(tuple(s.forward_only() if s.captures else s for s in self.stages))


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
    order = "refreshes its factors after the update, and another one before"
    declared["refreshes_after"] = _common(with_factors, "refreshes_after", order)
    capturing = [stage for stage in stages if stage.captures]
    rows = "takes all positions of a sample as one row, and another one as rows"
    declared["reduces"] = _common(capturing, "reduces", rows)
    return declared


def _common(stages: Sequence[Method], name: str, meaning: str) -> bool:
    """Return an attribute that all stages share, False for no stages; raise if they differ."""
    declaring = list(filter(attrgetter(name), stages))
    if 0 < len(declaring) < len(stages):
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
