"""What the settings of a trust region may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soframe.trust_region.adaptive import AdaptiveDamping
from soframe.trust_region.damping import DampingChoice, DampingPolicy, damping_policy


def check_settings(
    lr: float,
    weight_decay: float,
    preconditioner_damping: AdaptiveDamping | float,
    preconditioner: Mapping[str, Any],
) -> None:
    """Check what a trust region is given.

    Args:
        lr: What updates are multiplied by.
        weight_decay: The coefficient of the penalty.
        preconditioner_damping: The preconditioner's own, or a multiple of the policy's.
        preconditioner: Settings of the preconditioner.

    Raises:
        ValueError: If one is out of range.
    """
    own = preconditioner_damping
    multiple = 1.0 if isinstance(own, AdaptiveDamping) else own
    for name, value in (("lr", lr), ("preconditioner_damping", multiple)):
        if not value > 0:
            raise ValueError(f"{name} must be positive, not {value!r}")
    if not weight_decay >= 0:
        raise ValueError(f"weight_decay must not be negative, not {weight_decay!r}")
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
