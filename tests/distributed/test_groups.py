"""Two models of one architecture, each trained by DistributedDataParallel on half of the ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import soframe
from soframe import checkpoint
from soframe.comm import TorchDistributed
from soframe.settings import Distribution, Statistics
from soframe.testing import compare, compare_weights
from tests.curvature import fill
from tests.distributed.harness import run_ranks
from tests.trust_region.kit import classes_of, deep, vector

pytestmark = pytest.mark.distributed

KINDS = ("preconditioner", "optimizer", "trust region", "stochastic")
SAMPLES = 8
TYPE2 = Statistics(fisher="type-2")


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    alone = Distribution() if isinstance(model, DistributedDataParallel) else Distribution("single")
    if kind == "optimizer":
        return soframe.Optimizer(model, "kfac", lr=0.1, distribution=alone)
    if kind == "stochastic":
        return soframe.StochasticTrustRegion(model)
    return soframe.TrustRegion(model, "cross-entropy", statistics=TYPE2, distribution=alone)


def train(kind: str, number: int, group: Any, part: slice) -> Tensor:
    """Train the model of one group; without a group, on this process alone."""
    model = fill(deep(), seed=number)
    net = model if group is None else DistributedDataParallel(model, process_group=group)
    if kind == "preconditioner":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        distribution = Distribution("single" if group is None else None)
        own = soframe.Preconditioner(
            net, optimizer=optimizer, statistics_every=1, solve_every=1, distribution=distribution
        )
    else:
        optimizer = optimizer_of(kind, net)
    for step in range(2 + number):  # the groups do not take turns
        x, y = classes_of(10 * number + step, SAMPLES)

        def closure() -> Tensor:
            return F.cross_entropy(net(x[part]), y[part])  # noqa: B023

        if kind in ("trust region", "stochastic"):
            optimizer.step(closure)
            continue
        optimizer.zero_grad()
        closure().backward()
        if kind == "preconditioner":
            own.step()
        optimizer.step()
    if group is not None:
        compare_weights(net)
    return vector(model)


def train_in_groups(rank: int, ranks: int) -> list[Tensor]:
    half = ranks // 2
    groups = [dist.new_group(list(range(half))), dist.new_group(list(range(half, ranks)))]
    number, place = divmod(rank, half)
    part = slice(place * SAMPLES // half, (place + 1) * SAMPLES // half)
    return [train(kind, number, groups[number], part) for kind in KINDS]


def test_the_ranks_are_those_of_the_wrapper() -> None:
    results = run_ranks(train_in_groups, 4)
    for index, kind in enumerate(KINDS):
        for number in range(2):
            expected = train(kind, number, None, slice(None))
            for own in results[2 * number : 2 * number + 2]:
                compare(own[index], expected, f"{kind}, model {number}")


# -- checkpoints -----------------------------------------------------------------------------------


def loss_of(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    outputs = model(batch[0])
    return outputs, F.cross_entropy(outputs, batch[1])


def curvature_of(backend: Any) -> soframe.Curvature:
    return soframe.Curvature(deep(), distribution=Distribution(backend))


def saved_and_loaded(curvature: soframe.Curvature, backend: Any, folder: Path) -> bool:
    """Return whether a curvature is the one that was fitted, once it is saved and loaded."""
    curvature.save(folder)
    loaded = curvature_of(backend).load(folder)
    return torch.equal(loaded.eigenvalues(), curvature.eigenvalues())


def checkpoints(rank: int, ranks: int, folder: Path) -> tuple[bool, bool]:
    """Save and load in two groups, and on the first rank alone."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    backend = TorchDistributed(groups[rank // 2])
    curvature = curvature_of(backend).fit([classes_of(rank)], loss_of)
    in_groups = saved_and_loaded(curvature, backend, folder / f"group {rank // 2}")
    alone = True
    if rank == 0:
        curvature = curvature_of("single").fit([classes_of(rank)], loss_of)
        alone = saved_and_loaded(curvature, "single", folder / "alone")
        own = soframe.Preconditioner(deep(), lr=0.1, distribution=Distribution("single"))
        part = {"preconditioner": checkpoint.part(own)}
        dcp.save(part, checkpoint_id=folder / "part", no_dist=True)
        checkpoint.load(own, folder / "part")
    dist.barrier()
    return in_groups, alone


@pytest.mark.filterwarnings("ignore::UserWarning:torch.*")
def test_states_are_saved_and_loaded_by_their_own_ranks(tmp_path: Path) -> None:
    assert run_ranks(checkpoints, 4, tmp_path, timeout=60) == [(True, True)] * 4


def in_two_folders(rank: int, ranks: int, folder: Path) -> list[str]:
    """Save into a folder for each rank, without a process group for each, and with one."""
    said = []
    for call in (checkpoint.latest, lambda path: checkpoint.save(path, {"rank": rank})):
        try:
            call(folder / str(rank))
        except ValueError as error:
            said.append(str(error))
    groups = [dist.new_group([number]) for number in range(ranks)]
    saved = checkpoint.save(folder / str(rank), {"rank": rank}, process_group=groups[rank])
    state = checkpoint.read(saved, process_group=groups[rank])
    assert state["rank"] == rank
    return said


def test_ranks_with_different_folders_write_no_checkpoint_together(tmp_path: Path) -> None:
    """The first rank would write alone, and the others return a folder that does not exist."""
    for said in run_ranks(in_two_folders, 2, tmp_path, timeout=60):
        assert len(said) == 2
        for text in said:
            assert "ranks have different folders for one checkpoint" in text
            assert "pass their process_group=" in text
