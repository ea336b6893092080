"""How much a step dispatches and calls, per layer: what small models pay for, on any machine."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import soframe
from experiments.train import numerics
from tests.calls import TURN, Step, calls, operators

MOST = {
    "forward and backward": (16.0, 44),
    "SGD, soframe 1/10": (29.0, 283),
    "SGD, soframe 10/30": (24.5, 101),
    "trust region": (140.0, 575),
}
"""Operators and calls per layer: a twentieth to a tenth more than they are."""


def problem(layers: int) -> tuple[nn.Module, Tensor]:
    """A deep, narrow autoencoder, and its inputs."""
    torch.manual_seed(0)
    deep = [layer for _ in range(layers) for layer in (nn.Linear(4, 4), nn.Tanh())]
    return nn.Sequential(*deep[:-1]), torch.rand(8, 4)


def stepping(name: str, model: nn.Module, x: Tensor) -> Step:
    def loss() -> Tensor:
        return (model(x) - x).square().sum() / (2 * len(x))

    if name == "trust region":
        whole = soframe.TrustRegion(model, "squared-error", full_batch=True)
        return lambda: whole.step(loss)
    steps: list[Step] = []
    if name != "forward and backward":
        sgd = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        taken, solved = map(int, name.rpartition(" ")[2].split("/"))
        every = {"statistics_every": taken, "solve_every": solved}
        steps = [soframe.Preconditioner(model, optimizer=sgd, solver="eigen", **every).step]
        steps.append(sgd.step)

    def step() -> None:
        model.zero_grad()
        loss().backward()
        for one in steps:
            one()

    return step


def counted(name: str, layers: int) -> tuple[float, float]:
    step = stepping(name, *problem(layers))
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
    assert each[0] <= MOST[name][0] + 1e-9  # quotients are rounded
    assert each[1] <= MOST[name][1]


@pytest.mark.slow
def test_what_is_counted() -> None:
    with numerics(1):
        model, x = problem(layers=2)

        def forward() -> None:
            with torch.no_grad():
                model(x)

        # Of each layer its transposed weight and a product, and what lies in between.
        assert operators(forward) == 2 * 2 + 1
        assert calls(lambda: None) >= 1
        assert calls(forward) > 10


@pytest.mark.slow
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
