"""What is in force can be read: every setting in the text, and the values of the coming step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import soframe
from soframe.settings import defaults, grouped


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def lines(text: str) -> dict[str, str]:
    """The settings of a text by name."""
    found = (line.strip().partition(": ") for line in text.splitlines()[1:-1])
    return {name: value for name, _, value in found}


def settings() -> set[str]:
    return set(defaults(soframe.Preconditioner)) - {"model"}


def test_every_setting_is_in_the_text() -> None:
    own = soframe.Preconditioner(network(), kl_clip=None)
    found = lines(repr(own))
    assert found.keys() >= settings() | {"steps", "rank", "world_size"}
    assert found["model"] == "Sequential, 4 of 4 trainable parameters in 2 block(s)"
    assert found["method"] == "KFAC() in 2 block(s)"
    assert found["solver"].endswith(") in 2 block(s)")
    assert found["kl_clip"] == found["auxiliary"] == "None"
    assert found["world_size"] == "1"
    assert " at 0x" not in repr(own)


def test_a_curvature_says_whether_it_is_fitted() -> None:
    model = network()
    own = soframe.Curvature(model, "ekfac", strategy="mem-opt", skip=["^0$"])
    found = lines(repr(own))
    assert found["model"] == "Sequential, 2 of 4 trainable parameters in 1 block(s)"
    assert (found["fisher"], found["fitted"]) == ("'empirical'", "False")
    assert found["strategy"].startswith("MemOpt(")
    own.fit([torch.ones(3, 4)], lambda model, batch: (model(batch), model(batch).square().mean()))
    assert lines(repr(own))["fitted"] == "True"
    assert lines(repr(soframe.Preconditioner(model, lr=0.1).curvature))["steps"] == "0"


CHOSEN: dict[str, Any] = {
    "damping": 0.25,
    "decay": 0.75,
    "kl_clip": 0.125,
    "norm_clip": 8.0,
    "lr": 0.5,
    "statistics_every": 3,
    "solve_every": 6,
    "stagger": True,
    "background": 2,
    "skip": ("^0$",),
    "scaling": "fisher",
    "loss_average": "sum",
    "samples": "positions",
    "rows": 0.5,
    "layers": "all",
    "dtype": torch.float64,
    "fisher": "monte-carlo",
    "loss": "cross-entropy",
    "gradients": "local",
}


def test_settings_are_those_that_were_chosen() -> None:
    own = soframe.Preconditioner(network(), "ekfac", "eigen", "mem-opt", **grouped(CHOSEN))
    found = lines(repr(own))
    for name, value in CHOSEN.items():
        assert found[name] == repr(value), name
    assert found["method"].startswith("EKFAC(")
    assert found["strategy"].startswith("MemOpt(")
    own.close()


def test_values_are_those_of_the_coming_step() -> None:
    def falling(step: int) -> float:
        return 0.5 / (step + 1)

    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    own = soframe.Preconditioner(
        model,
        optimizer=optimizer,
        damping=falling,
        decay=falling,
        kl_clip=falling,
        clips=soframe.Clips(norm_clip=falling),
        lr=falling,
        statistics_every=lambda step: step + 1,
        solve_every=lambda step: 2 * (step + 1),
    )
    for step in range(2):
        for value in (own.damping, own.decay, own.kl_clip, own.norm_clip, own.lr):
            assert value == 0.5 / (step + 1)
        assert (own.steps, own.statistics_every, own.solve_every) == (step, step + 1, 2 * step + 2)
        assert lines(repr(own))["damping"].startswith(f"{0.5 / (step + 1)} (now, of test_values")
        model.zero_grad()
        model(torch.randn(3, 4)).square().mean().backward()
        own.step()
    with pytest.raises(AttributeError):
        own.damping = 3.0  # type: ignore[misc]
    policy = soframe.Preconditioner(network(), damping="relative", kl_clip=None)
    assert lines(repr(policy))["damping"] == "0.1 (now, of 'relative')"
    assert (policy.kl_clip, policy.norm_clip, policy.world_size) == (None, None, 1)


def test_an_optimizer_shows_its_groups_and_its_preconditioner() -> None:
    optimizer = soframe.Optimizer(
        network(), "muon", lr=0.02, weight_decay=0.5, auxiliary_lr=0.003, solve_every=7
    )
    text = repr(optimizer)
    muon, auxiliary = text.splitlines()[1:3]
    assert muon.strip().startswith("muon: lr=")
    assert "lr=0.02, weight_decay=0.5, weight_decay_kind='decoupled', constraint=None" in muon
    assert auxiliary.strip().startswith("auxiliary: adamw: ")
    assert "lr=0.003" in auxiliary
    assert "  preconditioner: Preconditioner(\n" in text
    assert "    solve_every: 7\n" in text
