"""The check of a damping policy."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence

from soframe.damping.policies import DampingChoice, DampingPolicy, adopted, damping_policy

STEPS = 24
"""The number of steps whose damping is read."""
RATIOS = (0.9, 1.0, 0.1, 0.5, -math.inf, 0.8, 0.95, 2.5, 0.3, -1.0, 0.9)
"""Good and bad reduction ratios, and one of a loss that was not finite."""
OTHER_RATIOS = (0.2, 0.2, -math.inf, 0.6, 0.0)
"""Ratios of another, worse run."""


def check_damping(policy: DampingChoice) -> None:
    """Check a damping policy: it is positive, restarts afresh, and resumes from its state exactly.

    - The damping of every step is positive and finite after any ratios, and repeated calls return
      the same.
    - Optimizers given the same policy have a copy each; updates of one copy change neither another
      nor the policy itself.
    - ``state`` is plain numbers and does not change later. A policy that loads it, fresh or in use,
      continues as the saved one would.
    - After ``restart`` it equals a policy without updates.

    Args:
        policy: The policy, which is not changed; or its name or class.

    Raises:
        AssertionError: If the policy is wrong.
    """
    chosen = copy.deepcopy(damping_policy(policy))
    name = repr(chosen)
    _check_positive(chosen, name)
    _check_apart(chosen, name)
    for count in range(len(RATIOS) + 1):
        _check_state(chosen, name, RATIOS[:count])
        begun = _begun(chosen, RATIOS[:count])
        begun.restart()
        problem = _difference(begun, adopted(chosen))
        assert not problem, f"{name}: restart() does not begin anew: {problem}"


def _check_positive(policy: DampingPolicy, name: str) -> None:
    begun = _begun(policy)
    for count in range(len(RATIOS) + 1):
        for step, damping in enumerate(_dampings(begun)):
            number = type(damping) in (int, float) and 0 < damping < math.inf
            assert number, f"{name}: at({step}) is {damping!r} after {count} ratios"
        assert _dampings(begun) == _dampings(begun), (
            f"{name}: at() differs from one call to the next"
        )
        if count < len(RATIOS):
            begun.observe(RATIOS[count])


def _check_apart(original: DampingPolicy, name: str) -> None:
    """Check that a policy and its copy share no state."""
    policy = copy.deepcopy(original)
    policies = {"the policy": policy, "a copy": adopted(policy), "another copy": adopted(policy)}
    for observing, observer in policies.items():
        before = {key: _seen(policy) for key, policy in policies.items()}
        _run(observer, RATIOS)
        for key, policy in policies.items():
            is_alike = key == observing or _seen(policy) == before[key]
            assert is_alike, f"{name}: a ratio for {observing} changes {key}: they share something"


def _check_state(policy: DampingPolicy, name: str, ratios: Sequence[float]) -> None:
    begun = _begun(policy, ratios)
    state = begun.state()
    for key, value in state.items():
        plain = type(key) is str and type(value) in (bool, int, float)
        assert plain, f"{name}: state() has {key!r}: {value!r}, which is no plain number by name"
    saved = dict(state)
    used = _begun(policy, OTHER_RATIOS)
    for which, resumed in (("a fresh policy", adopted(policy)), ("one in use", used)):
        resumed.load(dict(saved))
        problem = _difference(resumed, copy.deepcopy(begun))
        assert not problem, f"{name}: {which} that loads the state goes on otherwise, {problem}"
    for ratio in OTHER_RATIOS:
        begun.observe(ratio)
    assert _numbers(state) == _numbers(saved), (
        f"{name}: a saved state changes with later ratios: {state}"
    )


def _difference(first: DampingPolicy, second: DampingPolicy) -> str:
    """Return the first difference of two policies that receive the same ratios, or nothing."""
    for count, ratio in enumerate((None, *OTHER_RATIOS, *RATIOS)):
        if ratio is not None:
            first.observe(ratio)
            second.observe(ratio)
        if _seen(first) != _seen(second):
            texts = [f"at(0) {p.at(0)!r} and the state {p.state()}" for p in (first, second)]
            return f"after {count} ratios: {texts[0]}, and not {texts[1]}"
    return ""


def _begun(policy: DampingPolicy, ratios: Sequence[float] = ()) -> DampingPolicy:
    """Return a copy of a policy that has begun, and received ratios."""
    begun = adopted(policy)
    _run(begun, ratios)
    return begun


def _run(policy: DampingPolicy, ratios: Sequence[float]) -> None:
    if policy.to_be_measured():
        policy.begin(policy.at(0) / 10)
    for ratio in ratios:
        policy.observe(ratio)


def _dampings(policy: DampingPolicy) -> list[float]:
    return list(map(policy.at, range(STEPS)))


def _seen(policy: DampingPolicy) -> tuple[list[float], dict[str, str]]:
    """Return the visible state of a policy, in a form that compares NaNs as equal."""
    return _dampings(policy), _numbers(policy.state())


def _numbers(state: Mapping[str, float]) -> dict[str, str]:
    return {key: repr(value) for key, value in state.items()}
