"""Settings as constants or callables: what they may be, and where they are read."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import soframe
from soframe.schedules import Every, Scheduled
from tests import kit
from tests.curvature import closing, fill, randn

REAL_SETTINGS = ["damping", "decay", "kl_clip", "lr"]
INTERVALS = ["statistics_every", "solve_every"]
NAN, INF = float("nan"), float("inf")
OUT_OF_RANGE: list[tuple[str, Any]] = [
    *[(name, bad) for name in REAL_SETTINGS for bad in (-1e-9, NAN, INF, -INF, True, "0.1", 1j)],
    *[(name, np.bool_(True)) for name in REAL_SETTINGS],
    ("decay", 1.0),
    ("decay", 1.5),
    ("kl_clip", 0.0),
    *[(name, bad) for name in INTERVALS for bad in (0, -1, 2.0, NAN, True, "1", None)],
    *[(name, np.bool_(True)) for name in INTERVALS],
    *[(name, np.float64(2.0)) for name in INTERVALS],
    *[(name, None) for name in ("damping", "decay")],
]
IN_RANGE: list[tuple[str, Any]] = [
    ("damping", 0),
    ("damping", np.float32(0.5)),
    ("damping", np.int64(2)),
    ("decay", 0.0),
    ("decay", np.float64(0.9)),
    ("kl_clip", np.float16(0.5)),
    ("lr", 0),
    ("lr", np.float32(0.1)),
    *[(name, good) for name in INTERVALS for good in (1, 7, np.int32(2), np.uint8(3))],
]


def one_step(**settings: Any) -> torch.Tensor:
    model = fill(nn.Linear(2, 2))
    with closing(
        soframe.Preconditioner(model, **{"statistics_every": 1, "lr": 0.1, **settings})
    ) as own:
        model(randn(3, 2)).square().mean().backward()
        own.step()
    return model.weight.grad


@pytest.mark.parametrize(("name", "bad"), OUT_OF_RANGE, ids=str)
def test_out_of_range_names_the_setting(name: str, bad: object) -> None:
    if bad is not None or name not in INTERVALS:  # None leaves an interval to the methods
        with pytest.raises(ValueError, match=f"{name} must be"):
            one_step(**{name: bad})
    with pytest.raises(ValueError, match=f"{name} must be"):
        one_step(**{name: lambda step: bad})


@pytest.mark.parametrize(
    "odd", [object, nn.Linear, lambda: 0.1], ids=["object", "class", "takes nothing"]
)
@pytest.mark.parametrize("name", ["decay", "kl_clip", "lr", *INTERVALS])  # a damping may be a class
def test_what_cannot_be_called_with_a_step_names_the_setting(name: str, odd: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be a number or a callable of the step, and"):
        one_step(**{name: odd})


@pytest.mark.parametrize("name", [*REAL_SETTINGS, *INTERVALS])
def test_what_a_callable_raises_is_passed_on(name: str) -> None:
    def own(step: int) -> float:
        return step + "no number"  # type: ignore[operator]

    with pytest.raises(TypeError, match=r"^unsupported operand") as raised:
        one_step(**{name: own})
    assert raised.traceback[-1].name == "own"


@pytest.mark.parametrize(("name", "good"), IN_RANGE, ids=str)
def test_a_callable_is_its_value(name: str, good: Any) -> None:
    constant = one_step(**{name: good})
    assert torch.equal(constant, one_step(**{name: lambda step: good}))
    plain = int(good) if name in INTERVALS else float(good)
    assert torch.equal(constant, one_step(**{name: plain}))


@pytest.mark.parametrize("name", [*REAL_SETTINGS, *INTERVALS])
def test_callables_are_asked_once_for_each_step(name: str) -> None:
    asked = []
    model = fill(nn.Linear(2, 2))

    def schedule(step: int) -> float:
        asked.append(step)
        return 1 if name in INTERVALS else 0.5

    with closing(
        soframe.Preconditioner(model, **{"statistics_every": 1, "lr": 0.1, name: schedule})
    ) as own:
        kit.train(model, lambda net, _: net(randn(3, 2)).square().mean(), range(3), own)
    expected = [0, 1, 2]
    if name == "statistics_every":  # of gradients in the step, and of calls in the next window
        expected += [0, 1, 2, 3]
    assert sorted(asked) == sorted(expected)


def test_a_schedule_that_leaves_its_range_says_so_when_it_does() -> None:
    damping = Scheduled("damping", lambda step: 1.0 - step)
    assert [damping.at(step) for step in (0, 1)] == [1.0, 0.0]
    with pytest.raises(ValueError, match=r"damping must be .* not -1\.0"):
        damping.at(2)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, [0, 1, 2, 3, 4, 5, 6, 7]),
        (3, [0, 3, 6]),
        (lambda step: 1 if step < 3 else 4, [0, 1, 2, 4]),
    ],
)
def test_due_at_zero_and_every_multiple(value: Any, expected: list[int]) -> None:
    every = Every("solve_every", value)
    assert [step for step in range(8) if every.due(step)] == expected


@pytest.mark.parametrize(
    ("statistics_every", "solve_every"), [(1, 1), (2, 3), (lambda s: 1 + s % 2, 2)]
)
def test_factors_and_data_change_when_they_are_due(statistics_every: Any, solve_every: Any) -> None:
    model = fill(nn.Linear(2, 2))
    settings = {"statistics_every": statistics_every, "solve_every": solve_every}
    own = soframe.Preconditioner(model, solver="eigen", lr=0.1, **settings)
    intervals = [Every(name, value) for name, value in settings.items()]
    seen = []
    with closing(own):
        block = own.blocks[0]
        for step in range(7):
            kit.train(model, lambda net, n: net(randn(3, 2, seed=n)).square().mean(), [step], own)
            data = block.second_order["A"]["vectors"]
            seen.append((block.running["A"].clone(), data.clone()))
            if step:
                changed = [
                    not torch.equal(now, before)
                    for now, before in zip(seen[step], seen[step - 1], strict=True)
                ]
                # A solve of factors that did not change since the last one changes nothing.
                last = max(s for s in range(step) if intervals[1].due(s))
                news = any(intervals[0].due(s) for s in range(last + 1, step + 1))
                due = [interval.due(step) for interval in intervals]
                assert changed == [due[0], due[1] and news], step
