"""Settings that belong together, as one argument or by names of their own."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe import Cadence, Clips, Curvature, Preconditioner

GROUPS = {"cadence": Cadence, "clips": Clips, "curvature": Curvature}


@pytest.mark.parametrize("name", GROUPS)
def test_defaults_are_the_constructors(name: str) -> None:
    kind: Any = GROUPS[name]
    signature = inspect.signature(Preconditioner.__init__).parameters
    assert signature[name].default is None
    assert set(kind.names) == {field.name for field in fields(kind)}
    for field, own in kind.names.items():
        assert getattr(kind(), field) == signature[own].default


def gradients(**settings: Any) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    own = Preconditioner(net, lr=0.1, **settings)
    x = torch.randn(8, 3, dtype=torch.float64)
    for _ in range(4):
        net.zero_grad()
        outputs = net(x)
        if own.takes_statistics:
            own.observe(outputs)
        outputs.square().sum(1).mean().backward()
        own.step()
    found = [p.grad.clone() for p in net.parameters()]
    own.close()
    return found


def test_groups_are_their_settings() -> None:
    flat = gradients(
        statistics_every=2,
        solve_every=4,
        kl_clip=1e-3,
        norm_clip=0.1,
        fisher="type-2",
        loss="squared-error",
        decay=0.5,
    )
    grouped = gradients(
        cadence=Cadence(statistics=2, solves=4),
        clips=Clips(kl=1e-3, norm=0.1),
        curvature=Curvature(fisher="type-2", loss="squared-error", decay=0.5),
    )
    other = gradients(
        cadence=Cadence(statistics=2, solves=4),
        clips=Clips(kl=1e-3, norm=0.01),
        curvature=Curvature(fisher="type-2", loss="squared-error", decay=0.5),
    )
    assert all(map(torch.equal, flat, grouped))
    assert not all(map(torch.equal, flat, other))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"cadence": Cadence(), "solve_every": 5}, r"solve_every= is part of cadence="),
        ({"clips": Clips(), "kl_clip": None}, r"give Clips\(kl=...\)"),
        ({"curvature": Curvature(), "rows": 0.5}, r"rows= is part of curvature="),
        ({"clips": {"kl": None}}, "clips must be a soframe.Clips, not"),
        ({"cadence": Cadence(solves=0)}, "solve_every must be a positive integer"),
    ],
)
def test_what_cannot_be_meant(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        Preconditioner(nn.Linear(3, 2), lr=0.1, **settings)


def test_an_optimizer_takes_them_too() -> None:
    optimizer = soframe.Optimizer(nn.Linear(3, 2), "kfac", lr=0.1, clips=Clips(kl=None))
    assert optimizer.preconditioner._bounds.kl is None
