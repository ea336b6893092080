"""The check of damping policies: soframe's own pass it, wrong ones do not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch

from soframe.damping.policies import (
    ConstantDamping,
    DampingChoice,
    DampingPolicy,
    LevenbergMarquardt,
    RelativeDamping,
)
from soframe.registry import available, describe
from soframe.testing import check_damping


class Counting(DampingPolicy):
    """Doubles after a bad ratio, three times as much after two in a row: right in all it does."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.now, self.bad = 1.0, 0

    def at(self, step: int) -> float:
        return self.now

    def observe(self, ratio: float) -> None:
        self.bad = 0 if ratio > 0.25 else self.bad + 1
        if self.bad:
            self.now *= 2.0 if self.bad == 1 else 3.0

    def state(self) -> dict[str, float]:
        return {"now": self.now, "bad": self.bad}

    def load(self, state: Mapping[str, float]) -> None:
        self.now, self.bad = state["now"], int(state["bad"])


@pytest.mark.parametrize(
    "policy",
    [
        *sorted(available("damping")),
        0.1,
        lambda step: 1 / (1 + step),
        ConstantDamping(3),
        RelativeDamping(lambda step: 0.5**step),
        LevenbergMarquardt(initial=1.0, interval=2),
        LevenbergMarquardt(low=0.1, high=10.0),
        Counting(),
    ],
    ids=describe,  # which has no address: workers must agree on the names
)
def test_own_policies_pass(policy: DampingChoice) -> None:
    check_damping(policy)


def test_the_policy_stays_as_it_is() -> None:
    policy = Counting()
    policy.observe(0.0)
    check_damping(policy)
    assert policy.state() == {"now": 2.0, "bad": 1}


class Vanishes(Counting):
    """A huge number of a loss that is not finite makes it zero."""

    def observe(self, ratio: float) -> None:
        self.now = max(0.0, self.now + min(0.0, ratio))


class Explodes(Counting):
    def observe(self, ratio: float) -> None:
        self.now *= 0.5 if ratio > 0.25 else 1 - ratio


class GivesTensors(Counting):
    def at(self, step: int) -> Any:
        return torch.tensor(self.now)


class MovesWhenAsked(Counting):
    def at(self, step: int) -> float:
        self.now *= 0.99
        return self.now


class OfTheClass(Counting):
    """What one hears, all of them know."""

    heard: ClassVar[list[float]] = []

    def at(self, step: int) -> float:
        return 1.0 + len(self.heard)

    def observe(self, ratio: float) -> None:
        self.heard.append(ratio)

    def state(self) -> dict[str, float]:
        return {}

    def load(self, state: Mapping[str, float]) -> None:
        pass


class SavesTensors(Counting):
    def state(self) -> dict[str, Any]:
        return {name: torch.tensor(number) for name, number in super().state().items()}


class SavesPart(Counting):
    """What it does next depends on what it forgets."""

    def state(self) -> dict[str, float]:
        return {"now": self.now}

    def load(self, state: Mapping[str, float]) -> None:
        self.now, self.bad = state["now"], 0


class SavesNoBeginning(Counting):
    """The damping that it begins with is not in its state."""

    first = 1.0

    def to_be_measured(self) -> bool:
        return True

    def begin(self, damping: float) -> None:
        self.first = damping

    def at(self, step: int) -> float:
        return self.first * self.now


class LoadsPart(Counting):
    """It is as it was, but for what it has heard itself."""

    def load(self, state: Mapping[str, float]) -> None:
        self.now, self.bad = state["now"], self.bad + int(state["bad"])


class SavesItself(Counting):
    """Its state goes on after it has been saved."""

    def state(self) -> dict[str, float]:
        return vars(self)


class NeverRestarts(Counting):
    def __init__(self) -> None:
        super().restart()

    def restart(self) -> None:
        pass


class RestartsInPart(Counting):
    def __init__(self) -> None:
        super().restart()

    def restart(self) -> None:
        self.now = 1.0


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Vanishes, r"at\(0\) is 0.0 after 5 ratios"),
        (Explodes, r"at\(0\) is inf after 5 ratios"),
        (GivesTensors, r"at\(0\) is tensor"),
        (MovesWhenAsked, "differs from one call to the next"),
        (OfTheClass, "a ratio for the policy changes a copy: they share"),
        (SavesTensors, "'now': tensor.* no plain number"),
        (SavesPart, "a fresh policy that loads the state goes on otherwise, after 1 ratios"),
        (SavesNoBeginning, "a fresh policy that loads the state goes on otherwise, after 0 ratios"),
        (LoadsPart, "one in use that loads the state goes on otherwise, after 0 ratios"),
        (SavesItself, "a saved state changes"),
        (NeverRestarts, "does not begin anew"),
        (RestartsInPart, "does not begin anew"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_wrong_policy_is_found(policy: type[DampingPolicy], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_damping(policy())
