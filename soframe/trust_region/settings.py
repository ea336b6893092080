"""The settings of trust regions."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from soframe.damping.policies import DampingChoice, DampingPolicy, adopted, damping_policy
from soframe.layers.layout import BlockShape
from soframe.losses.base import Loss
from soframe.losses.sum import SumLoss
from soframe.registry import KINDS
from soframe.schedules import WarmInterval
from soframe.settings import Statistics, flat, group_of
from soframe.setup.choosing import methods
from soframe.trust_region.adaptive import AdaptiveDamping, FixedMultiple, GroupDampings

PRECONDITIONER: dict[str, Any] = {
    "method": "kfac",
    "decay": 0.5,
    "statistics_every": 3,
    "solve_every": 3,
}
"""Settings that differ from the preconditioner's defaults: on large batches curvature is fresh."""

_DEFAULTS = flat({})
_LENGTH = "the quadratic model chooses the length of a step"

REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "kl_clip": ((), f"takes no kl_clip=: {_LENGTH}"),
    "norm_clip": ((), f"takes no norm_clip=: {_LENGTH}"),
    "loss": ((), "takes its loss beside the model, not in statistics="),
    "optimizer": ((), "takes no optimizer=: it is an optimizer itself"),
    "pipeline": (
        (),
        "takes no pipeline=: it runs the whole model itself, and parts are in other processes",
    ),
    "grad_scaler": (
        (),
        "takes no grad_scaler=: it runs the backward pass of the closure's own loss",
    ),
    "home": ((), "takes no home=: its backward passes leave gradients in .grad"),
    "auxiliary": (
        (),
        "takes no auxiliary=: what has no block moves along its own steepest descent",
    ),
    "fisher": (
        ("monte-carlo", "type-2", "forward-only"),
        "needs fisher='monte-carlo', 'type-2' or 'forward-only'",
    ),
    "gradients": (("averaged",), "needs gradients='averaged': slopes are made of them"),
    "background": ((0,), "needs background=0: solves use the damping of their own step"),
    "loss_average": (
        ("local", "global"),
        "needs loss_average='local' or 'global': closures return means, or shares of one",
    ),
}
"""Settings of the preconditioner that are refused: the values that are not, beside the default, and
the text behind the name TrustRegion."""

_SHAPE = BlockShape(1, 2, 2)


def check(loss: object, settings: Mapping[str, Any]) -> Loss:
    """Check the loss and the settings of the preconditioner; return the loss, built."""
    built: Loss = KINDS["loss"].build(loss, Loss)
    arguments = flat(settings)
    for name, (allowed, text) in REFUSED.items():
        default = _DEFAULTS.get(name)
        if arguments.get(name, default) not in (default, *allowed):
            raise ValueError(f"TrustRegion {text}")
    if arguments.get("solve_every") == "demand":
        raise ValueError("TrustRegion needs solve_every= a number: it solves for its own dampings")
    for method in methods(arguments.get("method", "kfac")):
        if method.state(_SHAPE) or not all(f.captured for f in method.factors(_SHAPE)):
            raise ValueError(
                "TrustRegion needs methods whose updates depend on the present gradient alone, "
                "such as 'kfac', 'ekfac' or 'foof': a step that is undone stays in states and "
                "averaged gradients"
            )
    if built.expected and isinstance(built, SumLoss):
        raise ValueError(
            "TrustRegion cannot take a sum of losses with an expected Hessian among them, whose "
            "scale does not show in a sum: declare that term alone, or let the model return "
            "natural parameters"
        )
    return built


def policy_of(choice: DampingChoice) -> DampingPolicy:
    """Return a copy of a damping policy that has one damping for the whole model."""
    policy = damping_policy(choice)
    if policy.per_block:
        raise ValueError(
            f"a trust region needs one damping for the whole model, which {policy!r} has not"
        )
    return adopted(policy)


def damping_within(choice: AdaptiveDamping | float | None) -> GroupDampings:
    """Return the damping within the preconditioner: a fresh set of trials, or a multiple."""
    if choice is None:
        return AdaptiveDamping()
    if isinstance(choice, AdaptiveDamping):
        damping = copy.copy(choice)  # one instance may serve many optimizers
        damping.restart()
        return damping
    if not 0 < choice < math.inf:
        raise ValueError(f"preconditioner_damping must be positive, not {choice!r}")
    return FixedMultiple(choice)


def unscaled() -> float:
    """Return the gradient scale: the step runs the backward pass of the unscaled loss."""
    return 1.0


def of_preconditioner(arguments: Mapping[str, Any], loss: Loss, burn_in: int) -> dict[str, Any]:
    """Return the preconditioner's arguments: the given ones, and the trust region's defaults."""
    settings = {**PRECONDITIONER, "grad_scaler": unscaled, **arguments, "kl_clip": None}
    if "method" not in arguments:
        settings.setdefault("solver", "inverse")  # factored damping with Cholesky is cheap
    chosen: Statistics = group_of("statistics", arguments)
    if (fisher := chosen.fisher) is None:
        reads: set[str] = set()
        for method in methods(settings["method"]):
            reads.update(factor.reads for factor in method.factors(_SHAPE))
        fisher = "forward-only" if reads == {"inputs"} else "monte-carlo"
    settings["statistics"] = replace(chosen, fisher=fisher, loss=loss)
    for name in ("statistics_every", "solve_every"):
        if burn_in > 0 and isinstance(settings[name], int):
            settings[name] = WarmInterval(settings[name], first=1, steps=burn_in + 1)
    return settings
