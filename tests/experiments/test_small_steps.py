"""How much a step dispatches and calls, per layer: what small models pay for, on any machine."""

from __future__ import annotations

import gc

import pytest
import torch

from benchmarks.small_steps import TURN, calls, contenders, operators, problem
from experiments.train import numerics

MOST = {
    "forward and backward": (16.0, 44),
    "SGD, soframe 1/10": (52.0, 560),
    "SGD, soframe 10/30": (29.0, 168),
    "trust region": (155.0, 640),
}
"""Operators and calls per layer: a twentieth to a tenth more than they are."""


def counted(name: str, layers: int) -> tuple[float, float]:
    step = contenders(*problem(4, layers, rows=8))[name]
    for _ in range(2 * TURN):  # what is done once, and trials of dampings, which get fewer
        step()
    return operators(step), calls(step)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == "SGD, soframe 10/30" else [pytest.mark.thorough])
        for name in MOST
    ],
)
def test_a_layer_costs_no_more_calls_than_it_does(name: str) -> None:
    with numerics(1):
        few, many = counted(name, 4), counted(name, 8)
    each = [(more - less) / 4 for less, more in zip(few, many, strict=True)]
    assert each[0] <= MOST[name][0]
    assert each[1] <= MOST[name][1]


def test_what_is_counted() -> None:
    with numerics(1):
        model, x = problem(4, layers=2, rows=8)

        def forward() -> None:
            with torch.no_grad():
                model(x)

        # Of each layer its transposed weight and a product, and what lies in between.
        assert operators(forward) == 2 * 2 + 1
        assert calls(lambda: None) >= 1
        assert calls(forward) > 10


def test_finalizers_of_what_was_there_before_are_not_counted() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            finalized.append(1)

    def collect_each_time() -> None:
        if gc.isenabled():
            gc.collect()

    finalized: list[int] = []
    without = calls(collect_each_time, steps=1)
    Cycle()
    assert calls(collect_each_time, steps=1) == without
    assert finalized
    assert gc.isenabled()
