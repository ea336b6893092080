"""What the settings of a trust region, and the states that it goes on from, may be."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from soframe import building
from soframe.agreement import say_failed
from soframe.losses.base import Loss
from soframe.preconditioner import Preconditioner
from soframe.registry import KINDS
from soframe.schedules import WarmInterval
from soframe.trust_region.adaptive import AdaptiveDamping
from soframe.trust_region.checks import is_number, require_flag, require_integer
from soframe.trust_region.damping import DampingChoice, DampingPolicy, damping_policy

KEYS = ("curvature", "trust_region")
"""What a trust region adds to the state of an optimizer."""

COUNTERS = ("rejected_steps", "skipped_steps")

PRECONDITIONER: dict[str, Any] = {
    "solver": "inverse",
    "decay": 0.5,
    "statistics_every": 3,
    "solve_every": 3,
}
"""What differs from the preconditioner's own defaults: on large batches curvature may be fresh."""


def unscaled() -> float:
    """Return what the loss is multiplied by: the step runs the backward pass itself."""
    return 1.0


REFUSED = {
    "kl_clip": "the quadratic model chooses the length of a step",
    "norm_clip": "the quadratic model chooses the length of a step",
    "clip_lr": "the quadratic model chooses the length of a step",
    "optimizer": "it is an optimizer itself",
    "grad_scaler": "it runs the backward pass itself, of the loss as the closure returns it",
}
"""Settings of a preconditioner that have no meaning here."""


@dataclass(frozen=True)
class Own:
    """A trust region's own settings, besides its param groups; all ranks must have the same.

    Attributes:
        damping: The damping policy.
        momentum: Whether the last update is a direction of the model.
        parts: How many runs of layers have coefficients of their own.
        preconditioner_damping: The damping within the preconditioner.
        reject: Whether a step after which the objective rose is undone.
        full_batch: Whether the next step's loss measures the ratio.
        max_increase: How much a loss may grow.
        burn_in: Batches that only give statistics.
        reuse_activations: Whether derivatives follow a tape.
        flush_denormals: Whether denormal numbers are zero.
    """

    damping: DampingPolicy
    momentum: bool
    parts: int
    preconditioner_damping: AdaptiveDamping | float
    reject: bool
    full_batch: bool
    max_increase: float | None
    burn_in: int
    reuse_activations: bool
    flush_denormals: bool

    def __post_init__(self) -> None:
        flags = ("momentum", "reject", "full_batch", "reuse_activations", "flush_denormals")
        for name in flags:
            require_flag(name, getattr(self, name))
        require_integer("burn_in", self.burn_in, 0)
        own = self.preconditioner_damping
        if not isinstance(own, AdaptiveDamping) and not (is_number(own) and 0 < own < math.inf):
            raise ValueError(
                f"preconditioner_damping must be positive, not {own!r}: an AdaptiveDamping, or a "
                f"multiple of the policy's"
            )


class PreconditionersDamping:
    """The damping of the preconditioner, as a callable of the step whose text ranks compare.

    Args:
        damping: Returns the damping of a step.
        settings: All settings of the trust region.
    """

    def __init__(self, damping: Callable[[int], float], *settings: object) -> None:
        self._damping, self._settings = damping, settings

    def __call__(self, step: int) -> float:
        """Return the damping of a step."""
        return self._damping(step)

    def __repr__(self) -> str:
        return f"TrustRegion{self._settings!r}"


def check(model: object, loss: object, params: object, preconditioner: Mapping[str, Any]) -> Loss:
    """Check what a trust region is given, besides its own settings and its param groups.

    Args:
        model: The model.
        loss: The loss.
        params: Parameters or param groups; None for all of the model's.
        preconditioner: Settings of the preconditioner.

    Returns:
        The loss, built.

    Raises:
        TypeError: If one has the wrong type, or there is no such setting.
        ValueError: If one is out of range, or has no meaning here.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {model!r}")
    if params is not None and not isinstance(params, Iterable):
        raise TypeError(f"params must be parameters or param groups, not {params!r}")
    known = set(inspect.signature(Preconditioner.__init__).parameters) - {"self", "model"}
    for name in preconditioner:
        if name in REFUSED:
            raise ValueError(f"TrustRegion takes no {name}=: {REFUSED[name]}")
        if name not in known:
            raise TypeError(
                f"TrustRegion has no setting {name!r}, nor has Preconditioner; there are its own, "
                f"and {', '.join(sorted(known - set(REFUSED)))}"
            )
    if preconditioner.get("fisher") == "empirical":
        raise ValueError("TrustRegion needs fisher='monte-carlo', 'type-2' or 'forward-only'")
    if preconditioner.get("gradients", "averaged") != "averaged":
        raise ValueError("TrustRegion needs gradients='averaged': slopes are made of them")
    background: object = preconditioner.get("background", 0)
    if not isinstance(background, int) or background != 0:
        raise ValueError("TrustRegion needs background=0: its damping is that of the step")
    if preconditioner.get("loss_average", "local") not in ("local", "global"):
        raise ValueError(
            f"TrustRegion needs loss_average='local' or 'global': closures return means, or shares "
            f"of one, not {preconditioner['loss_average']!r}"
        )
    built: Loss = KINDS["loss"].build(loss, Loss)
    return built


def tell_others(preconditioner: Mapping[str, Any]) -> None:
    """Tell the ranks that wait for this one that it cannot start.

    Args:
        preconditioner: Settings of the preconditioner, perhaps with a backend.
    """
    try:
        backend = building.choose_backend(preconditioner.get("backend"))
    except (TypeError, ValueError, RuntimeError):  # then it is what the others do not have
        backend = building.choose_backend(None)
    say_failed(backend)


def whole_model_damping(choice: DampingChoice) -> DampingPolicy:
    """Return a damping policy that has one damping for the whole model.

    Args:
        choice: The policy's name, class or instance, or a number or a callable of the step.

    Returns:
        The policy.

    Raises:
        ValueError: If its blocks have dampings of their own.
    """
    policy = damping_policy(choice)
    if policy.per_block:
        raise ValueError(
            f"TrustRegion needs one damping for the whole model, which {policy!r} has not"
        )
    return policy


def of_preconditioner(given: Mapping[str, Any], burn_in: int) -> dict[str, Any]:
    """Return the settings of the preconditioner.

    Args:
        given: Those in place of `PRECONDITIONER`.
        burn_in: Steps that take statistics and solve, before the first update.
    """
    settings = {**PRECONDITIONER, "grad_scaler": unscaled, **given}
    for name in ("statistics_every", "solve_every"):
        if burn_in > 0 and isinstance(settings[name], int):
            settings[name] = WarmInterval(settings[name], first=1, steps=burn_in + 1)
    return settings


def state_of(
    state_dict: Mapping[str, Any], damping: DampingPolicy, groups: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the trust region's own state.

    Args:
        state_dict: That of the optimizer.
        damping: The damping policy that goes on from it.
        groups: The param groups that do.

    Raises:
        ValueError: If it is not the state of a TrustRegion, or of one with another policy or other
            groups; nothing has been loaded yet.
    """
    missing = set(KEYS) - set(state_dict)
    if missing:
        raise ValueError(f"not the state of a TrustRegion: it lacks {sorted(missing)}")
    own: dict[str, Any] = state_dict["trust_region"]
    if set(own["damping"]) != set(damping.state()):
        raise ValueError(f"the state is that of another damping policy than {damping!r}")
    sizes, now = ([len(g["params"]) for g in each] for each in (state_dict["param_groups"], groups))
    if sizes != now:
        raise ValueError(f"the state has param groups of {sizes} parameters, TrustRegion of {now}")
    return own
