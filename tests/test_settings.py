"""Settings in groups: each has one place, for Preconditioner, Optimizer and TrustRegion."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe import Clips, Distribution, Preconditioner, Statistics
from soframe.checks.arguments import keywords
from soframe.settings import GROUPS, flat, grouped


def test_every_setting_has_one_place() -> None:
    alone = keywords(Preconditioner) - set(GROUPS)
    of_groups = [name for kind in GROUPS.values() for name in inspect.signature(kind).parameters]
    assert len(alone) <= 15
    assert len({*alone, *of_groups}) == len(alone) + len(of_groups)


def test_settings_by_name_and_in_groups_are_the_same() -> None:
    by_name = {"damping": 0.5, "fisher": "type-2", "loss": "mse", "norm_clip": 0.1, "stagger": True}
    in_groups = {
        "damping": 0.5,
        "statistics": Statistics(fisher="type-2", loss="mse"),
        "clips": Clips(norm_clip=0.1),
        "distribution": Distribution(stagger=True),
    }
    assert grouped(by_name) == in_groups
    assert flat(in_groups).items() >= by_name.items()
    assert grouped(flat(in_groups)) == in_groups


def gradients(**settings: Any) -> list[Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    own = Preconditioner(net, lr=0.1, statistics_every=2, solve_every=4, **settings)
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


@pytest.mark.parametrize(
    "other",
    [
        {"statistics": Statistics(fisher="type-2", loss="squared-error", scaling="fisher", rows=3)},
        {"statistics": Statistics(fisher="forward-only")},
        {"clips": Clips(norm_clip=0.01)},
    ],
)
def test_groups_are_in_force(other: dict[str, Any]) -> None:
    usual: dict[str, Any] = {
        "statistics": Statistics(fisher="type-2", loss="squared-error"),
        "clips": Clips(norm_clip=0.1),
    }
    assert not all(map(torch.equal, gradients(**usual), gradients(**{**usual, **other})))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"clips": {"norm_clip": 1.0}}, "clips must be a soframe.Clips, not"),
        ({"statistics": Statistics(rows=0)}, "rows must be"),
        (
            {"distribution": Distribution(gradients="mine")},
            "gradients must be one of|gradients='averaged'",
        ),  # type: ignore[arg-type]
        ({"fisher": "type-2"}, "fisher"),
    ],
)
def test_what_cannot_be_meant(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises((TypeError, ValueError), match=problem):
        Preconditioner(nn.Linear(3, 2), lr=0.1, **settings)
    with pytest.raises((TypeError, ValueError), match=problem):
        soframe.Optimizer(nn.Linear(3, 2), "kfac", lr=0.1, **settings)
    with pytest.raises((TypeError, ValueError), match=problem):
        soframe.TrustRegion(nn.Linear(3, 2), "mse", **settings)


def test_a_setting_beside_its_group_is_refused() -> None:
    with pytest.raises(TypeError, match="rows stands beside statistics="):
        grouped({"statistics": Statistics(), "rows": 0.5})
