"""What a run does with a damping policy: ask it for numbers, save it and go on from a state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from soframe.checks.numbers import is_number
from soframe.damping.policies import DampingPolicy
from soframe.registry import describe


def damping_at(policy: DampingPolicy, step: int) -> float:
    """Return the damping of a step, once it is checked.

    Args:
        policy: The policy.
        step: Completed steps.

    Raises:
        ValueError: If it is negative or not finite, or no number.
    """
    damping = policy.at(step)
    if not is_number(damping) or not 0 <= damping < math.inf:
        raise ValueError(
            f"{describe(policy)} gives the damping {damping!r} at step {step}: DampingPolicy.at() "
            f"returns a number that is finite and not negative"
        )
    return float(damping)


def check_damping(saved: Any, policy: DampingPolicy, steps: int) -> None:
    """Check that a policy can go on from a state of its own.

    Args:
        saved: The state.
        policy: The policy.
        steps: Completed steps.

    Raises:
        ValueError: If it is another policy's, or damaged.
    """
    before = policy.state()
    if not isinstance(saved, Mapping):
        raise ValueError(f"the state is damaged: damping is {type(saved).__name__}, not a dict")
    if set(saved) != set(before):
        raise ValueError(f"the state is that of another damping policy than {describe(policy)}")
    for key, value in saved.items():
        if is_number(before[key]) and not (is_number(value) and math.isfinite(value)):
            raise ValueError(f"the state is damaged: {key} of the damping is {value!r}")
    if not saved:
        return
    # Only the policy knows what it makes of its state.
    try:
        policy.load(saved)
        value = policy.at(steps)
    except Exception as error:
        raise ValueError(
            f"the state is damaged: {describe(policy)} cannot load it: {error}"
        ) from error
    finally:
        policy.load(before)
    if not 0 < value < math.inf:
        raise ValueError(f"the state is damaged: its damping is {value!r}")
