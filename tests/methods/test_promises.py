"""What every method owes a run: to go on from its state, alone or shared, and past a bad batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from soframe.methods import (
    EKFAC,
    KFAC,
    KLSOAP,
    SGD,
    SOAP,
    TNT,
    AdamW,
    Blocked,
    Chain,
    Diagonal,
    Eva,
    Graft,
    KLShampoo,
    Momentum,
    Muon,
    NewtonMuon,
    Shampoo,
    SOAPMuon,
)
from tests import kit
from tests.curvature import closing, fill, half_square, preconditioner, randn
from tests.methods import stages

Settings = dict[str, Any]
PLAIN: list[Settings] = [{}]
EVERY_TWO: Settings = {"solve_every": 2}
EVERY_THREE: Settings = {"solve_every": 3}
METHODS: list[tuple[list[Any], list[Settings], Settings, Settings]] = [
    ([AdamW(), SGD(), SGD(0.9), Diagonal()], PLAIN, {}, {}),
    ([Muon(), NewtonMuon(), Momentum(), Chain(("momentum", "orthogonalise"))], PLAIN, {}, {}),
    (
        [Blocked(SOAP(), 2), Chain((Blocked(), "graft")), Graft(SOAP())],
        [EVERY_TWO],
        EVERY_TWO,
        EVERY_TWO,
    ),
    (
        [Shampoo(graft=None), Chain(("momentum", Shampoo(graft_steps=2)))],
        [EVERY_TWO],
        EVERY_TWO,
        {},
    ),
    ([Eva(), Chain((Eva(), "momentum"))], [{"statistics_every": 2, "solve_every": 2}], {}, {}),
]
"""Methods; settings of runs that are resumed, of a shared instance, and of a bad batch."""
SLOW: list[tuple[list[Any], list[Settings], Settings, Settings]] = [
    ([Chain((KFAC(), "momentum", Momentum(0.5)))], PLAIN, {}, {}),
    (
        [SOAP(), SOAP(carry="rotate"), SOAPMuon(), Chain((Momentum(), SOAP()))],
        [EVERY_TWO],
        {},
        {},
    ),
    (
        [EKFAC()],
        [EVERY_THREE, {"statistics_every": 2, "solve_every": 2}],
        EVERY_THREE,
        {"solve_every": 10},
    ),
    (
        [KLShampoo(), KLSOAP()],
        [EVERY_TWO],
        {},
        {},
    ),
    ([TNT()], [EVERY_THREE], {}, {}),
]
THOROUGH: list[tuple[list[Any], list[Settings], Settings, Settings]] = [
    ([Chain((TNT(), "momentum"))], [EVERY_THREE], {}, {}),
    ([KLSOAP(carry="rotate"), Chain((Momentum(), KLSOAP()))], [EVERY_TWO], {}, {}),
    (
        [Chain((EKFAC(), "momentum"))],
        [EVERY_THREE, {"statistics_every": 2, "solve_every": 2}],
        EVERY_THREE,
        {"solve_every": 10},
    ),
]
"""Chains of stages that are above, and what SOAP does, too."""


@pytest.mark.parametrize(
    ("method", "resumed", "shared", "bad"),
    [
        pytest.param(method, *settings, id=repr(method), marks=marks)
        for table, marks in (
            (METHODS, []),
            (SLOW, [pytest.mark.slow]),
            (THOROUGH, [pytest.mark.slow, pytest.mark.thorough]),
        )
        for methods, *settings in table
        for method in methods
    ],
)
def test_promises(method: Any, resumed: list[Settings], shared: Settings, bad: Settings) -> None:
    for settings in resumed:
        stages.check_resume(method, **settings)
    stages.check_shared_instance(lambda: copy.deepcopy(method), **shared)
    stages.check_nonfinite(method, **bad)


@pytest.mark.parametrize(("method", "offset", "tolerance"), [("tnt", 0.0, 0.05), ("eva", 3.0, 0.1)])
@pytest.mark.slow
def test_some_rows_have_the_scale_of_all(method: str, offset: float, tolerance: float) -> None:
    """The mean over many draws of half of the samples is the factor of all, over positions too."""
    x, y = randn(8, 3, 3), offset + randn(8, 3, 2, seed=1)
    found = []
    for rows, steps in ((0.5, 300), (1.0, 1)):
        model = fill(nn.Sequential(nn.Linear(3, 2)))
        with closing(preconditioner(model, method=method, rows=rows, decay=0.999)) as own:
            kit.train(model, lambda net, _: half_square(net(x), y), range(steps), own)
            found.append({n: f.clone() for n, f in own.blocks[0].running.items()})
    for name, factor in found[1].items():
        close = torch.allclose(
            found[0][name], factor, rtol=0.1, atol=tolerance * float(factor.abs().max())
        )
        assert close, (name, found[0][name] / factor)
