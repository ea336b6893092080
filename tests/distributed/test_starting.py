"""Ranks that cannot start: every rank raises, and names the rank and the reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import soframe
from soframe import Preconditioner, TrustRegion
from soframe.comm import TorchDistributed
from soframe.settings import grouped
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def foreign_optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)


# What the last rank is given -> what its own error says, which the others repeat.
SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "damping": ({"damping": -1}, "damping must be"),
    "interval": ({"solve_every": 0}, "solve_every must be"),
    "strategy": ({"strategy": "x"}, "no strategy 'x'"),
    "optimizer": ({"optimizer": foreign_optimizer}, "not in the given optimizer"),
    "rate": ({"lr": -0.1}, "lr must be"),
    "word": ({"scaling": "x"}, "scaling must be one of"),
    "type": ({"skip": "0"}, "skip is a sequence of patterns"),
    "background": ({"background": -1}, "background must be 0"),
    "fisher": ({"fisher": "x"}, "'x'"),
    "rows": ({"rows": 7.0}, "rows"),
    "loss": ({"loss": "x"}, "no loss 'x'"),
}


def start(options: dict[str, Any]) -> Preconditioner:
    made = {k: v() if v is foreign_optimizer else v for k, v in options.items()}
    return Preconditioner(make_model(), **grouped({"kl_clip": None, **made}))


def start_each(rank: int, ranks: int, names: list[str]) -> list[str]:
    errors = []
    for name in names:
        try:
            start(SETTINGS[name][0] if rank == ranks - 1 else {})
        except (ValueError, TypeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        else:
            errors.append("no error")
        dist.barrier()
    start({})  # and the group can still be used
    return errors


def test_a_setting_that_one_rank_refuses_is_an_error_on_all_that_names_it():
    results = run_ranks(start_each, 3, list(SETTINGS))
    for index, (name, (_, own)) in enumerate(SETTINGS.items()):
        assert own in results[2][index], (name, results[2][index])
        for rank in (0, 1):
            told = results[rank][index]
            assert told.startswith("ValueError: rank(s) [2] could not start. rank 2: "), told
            assert results[2][index] in told, (name, told)


def start_with_an_optimizer_on_one_rank(rank: int, ranks: int) -> str:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen: dict[str, Any] = {"optimizer": optimizer} if rank == 0 else {}
    try:
        Preconditioner(model, **grouped(chosen))
    except ValueError as error:
        return str(error)
    return "no error"


def test_an_optimizer_on_one_rank_only_is_an_error_that_names_it():
    for error in run_ranks(start_with_an_optimizer_on_one_rank, 2):
        assert "rank 1 has 'optimizer=NoneType', rank 0 has 'optimizer=SGD'" in error


def start_with_a_parameter_more(rank: int, ranks: int) -> str:
    model = make_model()
    if rank == 1:
        model.register_parameter("more", nn.Parameter(torch.zeros(3)))
    try:
        Preconditioner(model, kl_clip=None, distribution=soframe.Distribution(gradients="local"))
    except ValueError as error:
        return str(error)
    return "no error"


def test_local_gradients_of_other_parameters_do_not_start():
    """Without a block for it, the first step would send buffers that differ in length."""
    for error in run_ranks(start_with_a_parameter_more, 2):
        assert "rank 1 has 'local gradients of 5 parameters" in error


TRUST_REGIONS: dict[str, tuple[dict[str, Any], str]] = {
    "damping": ({"damping": "x"}, "damping must be a number"),
    "preconditioner": ({"preconditioner_damping": -1}, "preconditioner_damping must be positive"),
    "group": ({"lr": -1.0}, "lr"),
    "fisher": ({"fisher": "empirical"}, "TrustRegion needs fisher="),
    "inner": ({"solve_every": 0}, "solve_every must be"),
    "layer groups": ({"layer_groups": -3}, "layer_groups"),
}


def start_trust_regions(rank: int, ranks: int, names: list[str]) -> list[str]:
    errors = []
    for name in names:
        try:
            TrustRegion(make_model(), "mse", **grouped(TRUST_REGIONS[name][0] if rank == 0 else {}))
        except (ValueError, TypeError) as error:
            errors.append(str(error))
        else:
            errors.append("no error")
        dist.barrier()
    return errors


def test_what_a_trust_region_refuses_on_one_rank_is_an_error_on_all():
    mine, others = run_ranks(start_trust_regions, 2, list(TRUST_REGIONS))
    for index, (name, (_, own)) in enumerate(TRUST_REGIONS.items()):
        assert own in mine[index], (name, mine[index])
        assert "rank(s) [0] could not start. rank 0: " in others[index], (name, others[index])
        assert own in others[index], (name, others[index])


def start_in_a_group(rank: int, ranks: int) -> list[str]:
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    backend = TorchDistributed(groups[rank // 2])
    options = {"damping": -1} if rank == 3 else {}
    try:
        Preconditioner(make_model(), kl_clip=None, **grouped({"backend": backend, **options}))
    except ValueError as error:
        return [str(error)]
    return []


def test_an_error_in_a_group_is_told_in_that_group():
    found = run_ranks(start_in_a_group, 4)
    assert found[0] == found[1] == []
    assert "rank(s) [1] could not start. rank 1: ValueError: damping must be" in found[2][0]
    assert "damping must be" in found[3][0]
