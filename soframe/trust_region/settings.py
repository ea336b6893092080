"""What the settings of a trust region, and the states that it goes on from, may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from soframe.schedules import WarmInterval
from soframe.trust_region.adaptive import AdaptiveDamping
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


def check(
    preconditioner_damping: AdaptiveDamping | float, preconditioner: Mapping[str, Any]
) -> None:
    """Check what a trust region is given, besides its param groups.

    Args:
        preconditioner_damping: The preconditioner's own, or a multiple of the policy's.
        preconditioner: Settings of the preconditioner.

    Raises:
        ValueError: If one is out of range.
    """
    own = preconditioner_damping
    if not isinstance(own, AdaptiveDamping) and not own > 0:
        raise ValueError(f"preconditioner_damping must be positive, not {own!r}")
    if preconditioner.get("fisher") == "empirical":
        raise ValueError("TrustRegion needs fisher='monte-carlo', 'type-2' or 'forward-only'")
    if preconditioner.get("gradients", "averaged") != "averaged":
        raise ValueError("TrustRegion needs gradients='averaged': slopes are made of them")
    if preconditioner.get("background", 0) != 0:
        raise ValueError("TrustRegion needs background=0: its damping is that of the step")


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
    settings = {**PRECONDITIONER, **given}
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
