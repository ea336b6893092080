"""The use of a damping policy by a run: its checked damping, and its state."""

from __future__ import annotations

import math
from typing import Any

from soframe.checks.numbers import is_number
from soframe.damping.policies import DampingPolicy
from soframe.registry import describe


def damping_at(policy: DampingPolicy, step: int) -> float:
    """Return the damping after a number of completed steps; ValueError if it is out of range."""
    damping = policy.at(step)
    if not is_number(damping) or not 0 <= damping < math.inf:
        raise ValueError(
            f"{describe(policy)} gives the damping {damping!r} at step {step}: DampingPolicy.at() "
            f"returns a number that is finite and not negative"
        )
    return float(damping)


def check_damping(saved: Any, policy: DampingPolicy, steps: int) -> None:
    """Raise a ValueError unless a policy can continue from a state, which it does not keep."""
    before = policy.state()
    if set(saved) != set(before):
        raise ValueError(f"the state is that of another damping policy than {describe(policy)}")
    policy.load(saved)
    damping = policy.at(steps)
    policy.load(before)
    if not 0 <= damping < math.inf:
        raise ValueError(f"the state is damaged: its damping is {damping!r}")
