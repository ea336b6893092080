"""Products, posteriors and scores under every strategy and every way to shard a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import soframe
from soframe.laplace import Laplace
from tests.curvature import fill, randn
from tests.distributed.harness import run_ranks
from tests.products.kinds import Batch, Mixture, loss

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

DAMPING = 0.2
SIZES = (5, 4, 2, 3)
"""The samples of the batches."""
METHODS = ("kfac", "ekfac")
STRATEGIES = tuple(soframe.available("strategy"))

Model = nn.Module


def network() -> nn.Sequential:
    """Return two layers that a plan cuts, and two that see the rows of experts."""
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3), nn.LayerNorm(3), Mixture()]
    return fill(nn.Sequential(*layers)).eval()


def batches() -> list[Batch]:
    return [(randn(n, 2, 3, seed=n), randn(n, 2, 2, seed=n + 9)) for n in SIZES]


def planned(model: Model, mesh: Any) -> None:
    plan = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "2": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)


def whole(model: Model, ranks: int) -> int:
    return ranks


def fully_sharded(model: Model, ranks: int) -> int:
    fully_shard(model)
    return ranks


def in_copies(model: Model, ranks: int) -> int:
    fully_shard(model, mesh=init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("a", "b")))
    return ranks


def in_a_plan(model: Model, ranks: int) -> int:
    planned(model, init_device_mesh("cpu", (ranks,)))
    return 1


def copies_of_a_plan(model: Model, ranks: int) -> int:
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("copies", "plan"))
    planned(model, mesh["plan"])
    return ranks // 2


def sharded_plan(model: Model, ranks: int) -> int:
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("shards", "plan"))
    planned(model, mesh["plan"])
    fully_shard(model, mesh=mesh["shards"])
    return ranks // 2


WAYS: dict[str, Callable[[Model, int], int]] = {
    "whole": whole,
    "fully_shard": fully_sharded,
    "fully_shard in copies": in_copies,
    "plan": in_a_plan,
    "copies of a plan": copies_of_a_plan,
    "fully_shard of a plan": sharded_plan,
}
"""Ways to shard a model over ranks. Each returns the number of shares that the data have."""


def products(curvature: soframe.Curvature) -> dict[str, Any]:
    """Return everything that the ranks have in common."""
    shapes = {name: p.shape for name, p in network().named_parameters()}
    vector = {name: randn(2, *shape, seed=i) for i, (name, shape) in enumerate(shapes.items())}
    inverse = curvature.inverse(DAMPING)
    last = curvature.blocks[-1].name
    laplace = Laplace(curvature, 0.7)
    return {
        "product": curvature @ vector,
        "inverse": inverse @ vector,
        "root": inverse.sqrt() @ vector,
        "trace": [curvature.trace(), inverse.trace(), curvature.trace(last)],
        "logdet": [curvature.logdet(DAMPING), inverse.logdet()],
        "eigenvalues": [curvature.eigenvalues(), curvature.eigenvalues(last)],
        "samples": laplace.sample(2, torch.Generator().manual_seed(0)),
        "evidence": laplace.log_marginal_likelihood(-1.0),
        "predictive": laplace.predictive(batches()[0][0][:2, :1]).covariance,
    }


def scores(curvature: soframe.Curvature, train: list[Batch], *, own: bool) -> list[Tensor]:
    """Return the scores of training samples for queries, and for themselves."""
    queries = batches()[2:3]
    found = [soframe.influence.scores(curvature, queries, train, loss, damping=DAMPING)]
    if own:
        found.append(soframe.influence.self_influence(curvature, train, loss, damping=DAMPING))
    return found


def on_rank(
    rank: int, ranks: int, way: str, method: str, strategies: Sequence[str]
) -> dict[str, Any]:
    """Return products and scores by strategy, or the error of one that is refused."""
    results: dict[str, Any] = {}
    for name in strategies:
        model = network()
        shares = WAYS[way](model, ranks)
        share = rank * shares // ranks
        train = batches()[share::shares]
        try:
            curvature = soframe.Curvature(model, method, strategy=name)
        except ValueError as error:
            results[name] = str(error)
            continue
        curvature.fit(train, loss)
        own = name == "comm-opt" or shares == 1
        results[name] = share, shares, products(curvature), scores(curvature, train, own=own)
    return results


def compare(way: str, method: str, ranks: int, strategies: Sequence[str]) -> None:
    alone = soframe.Curvature(network(), method).fit(batches(), loss)
    expected = products(alone)
    columns, itself = (tensor.split(SIZES, -1) for tensor in scores(alone, batches(), own=True))
    for results in run_ranks(on_rank, ranks, way, method, strategies, timeout=240):
        for name, result in results.items():
            if isinstance(result, str):
                assert name == "owner-local", (name, result)
                assert "'mem-opt' or Sharded(group=None)" in result
                continue
            share, shares, common, of_samples = result
            for what, values in common.items():
                torch.testing.assert_close(
                    values,
                    expected[what],
                    rtol=1e-9,
                    atol=1e-11,
                    msg=lambda text, of=(name, what): f"{of}: {text}",
                )
            wanted = [torch.cat(columns[share::shares], 1), torch.cat(itself[share::shares])]
            for found, of_share in zip(of_samples, wanted, strict=False):
                torch.testing.assert_close(found, of_share, rtol=1e-9, atol=1e-11)


QUICK = {
    ("whole", 2, "ekfac"): STRATEGIES,
    ("fully_shard", 2, "kfac"): ("hybrid-opt", "owner-local", "sharded"),
    ("plan", 2, "kfac"): ("mem-opt", "sharded"),
    ("fully_shard in copies", 4, "ekfac"): ("hybrid-opt", "auto"),
}
"""By way, ranks and method the strategies that `make test` tries."""
CASES = []
for case in product(WAYS, (2, 4), METHODS):
    way, ranks, _ = case
    if ranks == 2 and ("copies" in way or "of a plan" in way):
        continue  # they are of four
    quick = QUICK.get(case, ())
    if quick:
        CASES.append(pytest.param(*case, quick, id="-".join(map(str, case))))
    rest = [name for name in STRATEGIES if name not in quick]
    if rest:
        identity = "-".join(map(str, (*case, "rest")))
        CASES.append(pytest.param(*case, rest, marks=pytest.mark.thorough, id=identity))


@pytest.mark.parametrize(("way", "ranks", "method", "strategies"), CASES)
def test_products_and_scores_are_those_of_one_process(
    way: str, ranks: int, method: str, strategies: Sequence[str]
) -> None:
    compare(way, method, ranks, strategies)
