"""A call without settings has the ones of docs/benchmarks/defaults.md."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.methods import SOAP, Chain, MatchRMS, Momentum, Muon, NormaliseRows, Orthogonalise
from soframe.methods.soap import independent_rms
from tests import kit
from tests.curvature import closing, fill, randn


def net() -> nn.Sequential:
    return fill(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4), nn.Linear(4, 2)))


def loss_of(model: nn.Module, step: int) -> Tensor:
    return model(randn(4, 3, seed=step)).square().mean()


@pytest.mark.parametrize(
    ("method", "solves"),
    [("kfac", {*range(0, 101, 10)}), ({"0": "soap", ".*": "kfac"}, {*range(0, 121, 10)})],
    ids=["calls alone", "gradients too"],
)
def test_solves_become_rare_where_all_statistics_come_from_calls(
    method: Any, solves: set[int]
) -> None:
    """Statistics of calls are of every tenth step, so data of other steps would be the same."""
    model, found, before = net(), set(), None
    with closing(soframe.Preconditioner(model, method, kl_clip=None)) as own:
        block = next(block for block in own.blocks if block.captured)
        for step in range(125):
            kit.train(model, loss_of, [step], own)
            data = block.second_order["A"]["inverse"].clone()
            if before is None or not torch.equal(data, before):
                found.add(step)
            before = data
    assert found == solves


@pytest.mark.parametrize(
    ("method", "ratio"),
    [
        ("muon", 0.2),
        (Muon(scale="rms"), 1.0),  # of AdamW's length
        ({"^0$": "soap"}, 1.0),
        ({"0": "soap", "2": "muon"}, 0.2),
        (Chain(("momentum", "orthogonalise", "match-rms")), 0.2),
    ],
    ids=str,
)
def test_the_auxiliary_rate_is_a_multiple(method: Any, ratio: float) -> None:
    for settings, rate in (({}, 0.3 * ratio), ({"auxiliary_lr": 0.7}, 0.7)):
        model = net()
        groups = [
            {"params": list(model[0].parameters()), "lr": 0.5},
            {"params": [p for layer in model[1:] for p in layer.parameters()]},
        ]
        with closing(
            soframe.Optimizer(model, method, lr=0.3, param_groups=groups, **settings)
        ) as own:
            rates = {(g["given"], g["method"][:9]): g["lr"] for g in own.param_groups}
        assert {lr for (n, name), lr in rates.items() if name != "auxiliary"} <= {0.5, 0.3}
        of_others = {n: lr for (n, name), lr in rates.items() if name == "auxiliary"}
        assert of_others[1] == pytest.approx(rate)
        if 0 in of_others:  # a group's own rate has the same multiple
            assert of_others[0] == pytest.approx(settings.get("auxiliary_lr", 0.5 * ratio))


def test_the_optimizer_is_the_one_that_was_raced() -> None:
    soap = SOAP(betas=(0.0, 0.95), skip_first=False, max_ratio=2.0)
    orthogonalise = Orthogonalise(3, full_rms=independent_rms(0.85))
    expected = (Momentum(0.85, True), soap, orthogonalise, NormaliseRows(), MatchRMS())
    with closing(soframe.Optimizer(net(), lr=0.04)) as own:
        assert [b.method.stages for b in own.preconditioner.blocks if not b.auxiliary] == 2 * [
            expected
        ]
        assert (own.preconditioner.statistics_every, own.preconditioner.solve_every) == (1, 10)
    assert soframe.methods.SOAPMuon().stages == expected[:3] + expected[4:]
