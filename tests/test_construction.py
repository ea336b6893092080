"""How much is done for each layer when a preconditioner is built: counted in calls, not seconds."""

from __future__ import annotations

import gc

import pytest
from torch import nn

import soframe
from tests.calls import calls

MOST = {"kfac": 722, "ekfac": 811, "soap": 925, "soap-muon": 968, "muon": 875, "adamw": 851}
"""Calls per layer of a weight and a bias."""


@pytest.mark.slow
@pytest.mark.parametrize("method", MOST)
def test_layers_of_one_kind_are_described_once(method: str) -> None:
    def build(layers: int) -> int:
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers)))
        return round(calls(lambda: soframe.Optimizer(model, method, lr=0.1).close(), steps=1))

    build(2)  # what is imported or looked up once
    few, many = build(10), build(20)
    assert many <= 2.1 * few
    assert (many - few) / 10 <= MOST[method]


@pytest.mark.parametrize("fails", [False, True])
def test_the_garbage_collector_rests_while_layers_are_registered(fails: bool) -> None:
    collections: list[str] = []

    def note(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(200))).requires_grad_(not fails)
    thresholds = gc.get_threshold()
    gc.callbacks.append(note)
    gc.set_threshold(100)
    try:
        if fails:
            with pytest.raises(ValueError, match="there is nothing to precondition"):
                soframe.Preconditioner(model)
        else:
            soframe.Preconditioner(model).close()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(note)
    assert gc.isenabled()
    assert len(collections) < 150  # hundreds with the collector at work, thousands in a new process
