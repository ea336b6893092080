"""The settings of trust regions, and the states that they can load."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from soframe.checks.numbers import is_number, require_flag, require_integer
from soframe.damping.policies import DampingChoice, DampingPolicy, adopted, damping_policy
from soframe.layers.layout import BlockShape
from soframe.losses.base import Loss
from soframe.losses.sum import SumLoss
from soframe.methods.base import Method
from soframe.preconditioner import Preconditioner
from soframe.registry import KINDS
from soframe.schedules import WarmInterval
from soframe.settings import flat, grouped
from soframe.trust_region.adaptive import AdaptiveDamping

COUNTERS = ("rejected_steps", "skipped_steps")

VERSIONS = (2, 3)
"""Versions of states that can be loaded; 3 is written. 2 had checksums, and several methods."""

PRECONDITIONER: dict[str, Any] = {
    "method": "kfac",
    "decay": 0.5,
    "statistics_every": 3,
    "solve_every": 3,
}
"""Settings that differ from the preconditioner's defaults: on large batches curvature is fresh."""

_SHAPE = BlockShape(1, 2, 2)


@dataclass(frozen=True)
class Given:
    """The settings of a trust region, built: the loss, the methods and all others."""

    loss: Loss
    methods: list[Method]
    settings: Mapping[str, Any]

    def chosen(self, name: str, *allowed: object) -> bool:
        """Whether a setting has neither its default nor an allowed value."""
        return self.settings.get(name) not in (_DEFAULTS.get(name), *allowed)


_DEFAULTS = flat({})
_LENGTH = "the quadratic model chooses the length of a step"

REFUSED: tuple[tuple[Callable[[Given], object], str], ...] = (
    (lambda given: given.chosen("kl_clip"), f"takes no kl_clip=: {_LENGTH}"),
    (lambda given: given.chosen("norm_clip"), f"takes no norm_clip=: {_LENGTH}"),
    (lambda given: given.chosen("clip_lr"), f"takes no clip_lr=: {_LENGTH}"),
    (lambda given: given.chosen("loss"), "takes its loss beside the model, not in curvature="),
    (lambda given: given.chosen("optimizer"), "takes no optimizer=: it is an optimizer itself"),
    (
        lambda given: given.chosen("pipeline"),
        "takes no pipeline=: it runs the whole model itself, and parts are in other processes",
    ),
    (
        lambda given: given.chosen("grad_scaler"),
        "takes no grad_scaler=: it runs the backward pass of the closure's own loss",
    ),
    (
        lambda given: given.chosen("home"),
        "takes no home=: its backward passes leave gradients in .grad",
    ),
    (
        lambda given: given.chosen("auxiliary", None),
        "takes no auxiliary=: what has no block moves along its own steepest descent",
    ),
    (
        lambda given: given.chosen("fisher", "monte-carlo", "type-2", "forward-only"),
        "needs fisher='monte-carlo', 'type-2' or 'forward-only'",
    ),
    (
        lambda given: given.chosen("gradients", "averaged"),
        "needs gradients='averaged': slopes are made of them",
    ),
    (
        lambda given: given.chosen("background", 0, False),
        "needs background=0: the damping is that of the step",
    ),
    (
        lambda given: given.chosen("loss_average", "local", "global"),
        "needs loss_average='local' or 'global': closures return means, or shares of one",
    ),
    (
        lambda given: any(
            method.state(_SHAPE) or not all(f.captured for f in method.factors(_SHAPE))
            for method in given.methods
        ),
        (
            "needs methods whose updates depend on the present gradient alone, such as 'kfac', "
            "'ekfac' or 'foof': a step that is undone stays in states and averaged gradients"
        ),
    ),
    (
        lambda given: given.loss.expected and isinstance(given.loss, SumLoss),
        (
            "cannot take a sum of losses with an expected Hessian among them, whose scale does not "
            "show in a sum: declare that term alone, or let the model return natural parameters"
        ),
    ),
)
"""Combinations that are refused: the condition, and the text behind the name TrustRegion."""


@dataclass(frozen=True)
class OwnSettings:
    """A trust region's own settings, beside its param groups; the same on every rank."""

    damping: DampingPolicy
    momentum: bool
    layer_groups: int
    preconditioner_damping: AdaptiveDamping | float
    reject: bool
    full_batch: bool
    max_increase: float | None
    burn_in: int

    def __post_init__(self) -> None:
        for name in ("momentum", "reject", "full_batch"):
            require_flag(name, getattr(self, name))
        require_integer("burn_in", self.burn_in, 0)


class PreconditionersDamping:
    """The preconditioner's damping, a callable of the step; ranks compare its text."""

    def __init__(self, damping: Callable[[int], float], *settings: object) -> None:
        self._damping, self._settings = damping, settings

    def __call__(self, step: int) -> float:
        """Return the damping of a step."""
        return self._damping(step)

    def __repr__(self) -> str:
        return f"TrustRegion{self._settings!r}"


def check(loss: object, settings: Mapping[str, Any]) -> Loss:
    """Check the loss and the settings of the preconditioner; return the loss, built."""
    known = set(inspect.signature(Preconditioner.__init__).parameters) - {"self", "model"}
    if unknown := sorted(set(settings) - known):
        raise TypeError(
            f"TrustRegion has no setting {unknown[0]!r}, nor has Preconditioner; it has its own, "
            f"and {', '.join(sorted(known))}"
        )
    built: Loss = KINDS["loss"].build(loss, Loss)
    given = Given(built, _methods(settings.get("method", "kfac")), flat(settings))
    for applies, text in REFUSED:
        if applies(given):
            raise ValueError(f"TrustRegion {text}")
    return built


def _methods(choice: Any) -> list[Method]:
    choices = choice.values() if isinstance(choice, Mapping) else [choice]
    return [KINDS["method"].build(one, Method) for one in choices if one is not None]


def policy_of(choice: DampingChoice) -> DampingPolicy:
    """Return a copy of a damping policy that has one damping for the whole model."""
    policy = damping_policy(choice)
    if policy.per_block:
        raise ValueError(
            f"TrustRegion needs one damping for the whole model, which {policy!r} has not"
        )
    return adopted(policy)


def damping_within(choice: AdaptiveDamping | float | None) -> AdaptiveDamping | float:
    """Return the damping within the preconditioner: a fresh set of trials, or a multiple."""
    damping = AdaptiveDamping() if choice is None else choice
    if isinstance(damping, AdaptiveDamping):
        damping = copy.copy(damping)  # one instance may serve many optimizers
        damping.restart()
    elif not is_number(damping) or not 0 < damping < math.inf:
        raise ValueError(
            f"preconditioner_damping must be positive, not {damping!r}: an AdaptiveDamping, or "
            f"a multiple of the policy's"
        )
    return damping


def unscaled() -> float:
    """Return the gradient scale: the step runs the backward pass of the unscaled loss."""
    return 1.0


def of_preconditioner(given: Mapping[str, Any], loss: Loss, burn_in: int) -> dict[str, Any]:
    """Return the preconditioner's arguments: the given ones, and the trust region's defaults."""
    settings = {**PRECONDITIONER, "grad_scaler": unscaled, "kl_clip": None, **flat(given)}
    settings["loss"] = loss
    if "method" not in given:
        settings.setdefault("solver", "inverse")  # factored damping with Cholesky is cheap
    if settings["fisher"] is None:
        reads = [f.reads for m in _methods(settings["method"]) for f in m.factors(_SHAPE)]
        settings["fisher"] = "forward-only" if set(reads) == {"inputs"} else "monte-carlo"
    for name in ("statistics_every", "solve_every"):
        if burn_in > 0 and isinstance(settings[name], int):
            settings[name] = WarmInterval(settings[name], first=1, steps=burn_in + 1)
    return grouped(settings)


def require_state(state: Any, keys: set[str], own: set[str], what: str) -> None:
    """Check that a state is a trust region's; it has the keys ``own`` under ``"trust_region"``."""
    if not isinstance(state, Mapping):
        raise ValueError(f"not the state of {what}: it is {type(state).__name__}")
    if missing := sorted({*keys, "state", "param_groups", "trust_region"} - set(state)):
        raise ValueError(f"not the state of {what}: it lacks {missing}")
    saved = state["trust_region"]
    version = saved.get("version", 1)
    if version not in VERSIONS:
        raise ValueError(
            f"the state of {what} has version {version!r}; this soframe reads versions "
            f"{' and '.join(map(str, VERSIONS))}: load it with the soframe that wrote it"
        )
    if missing := sorted(own - set(saved)):
        raise ValueError(f"the state is truncated: trust_region lacks {missing}")
    if {"further_methods", "before"} & set(state):
        raise ValueError(
            f"the state of {what} is of methods that depend on earlier gradients, or of several "
            f"methods (version {version}): load it with the soframe that wrote it"
        )
