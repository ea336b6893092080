"""Products with curvatures of models that fully_shard or a tensor-parallel plan has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

import soframe
from soframe.layers import LinearHelper
from tests.curvature import fill, randn
from tests.distributed.harness import RankError, run_ranks
from tests.products.kinds import (
    KINDS,
    Batch,
    Kind,
    Mean,
    across,
    features,
    loss,
    one,
    projections,
    reused,
    tied,
)
from tests.products.table import COLUMNS, errors

Plan = Callable[[nn.Module, DeviceMesh], object]


def by(styles: dict[str, Any]) -> Plan:
    return lambda model, mesh: parallelize_module(model, mesh, styles)


def columns() -> ColwiseParallel:
    return ColwiseParallel(output_layouts=Replicate())


def rows() -> RowwiseParallel:
    return RowwiseParallel(input_layouts=Replicate())


def whole_outside(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Give a module DTensors of whole inputs, and others the whole of its outputs."""

    def cut(module: nn.Module, args: tuple[Tensor]) -> DTensor:
        whole = DTensor.from_local(args[0], mesh, [Replicate()], run_check=False)
        return whole.redistribute(placements=[placement])

    module.register_forward_pre_hook(cut)
    module.register_forward_hook(lambda module, args, output: output.full_tensor())


def distributed(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    """Make DTensors of the parameters of a module, for which torch has no style."""
    for name, parameter in list(module._parameters.items()):
        assert parameter is not None
        tensor = distribute_tensor(parameter.detach(), mesh, [placement])
        module.register_parameter(name, nn.Parameter(tensor))


def tied_plan(model: Any, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"table": rows(), "head": columns()})
    model.head.weight = model.table.weight  # which torch has cut one by one


def norm_plan(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model, mesh, {"0": SequenceParallel()})
    whole_outside(model, mesh, Shard(1))


def convolution_plan(model: Any, mesh: DeviceMesh) -> None:
    # Replicated: of a weight in parts torch's convolution has outputs of a wrong shape.
    distributed(model[0], mesh, Replicate())
    whole_outside(model, mesh, Replicate())


def cell_plan(model: Any, mesh: DeviceMesh) -> None:
    distributed(model.cell, mesh, Shard(0))
    whole_outside(model, mesh, Replicate())


def experts_plan(model: Any, mesh: DeviceMesh) -> None:
    distributed(model.experts, mesh, Shard(0))  # an expert on each rank
    whole_outside(model.experts, mesh, Shard(0))


PLANS: dict[str, tuple[Callable[[], Kind], Plan]] = {
    "columns": (lambda: one(nn.Linear(3, 2), lambda n: randn(n, 3, seed=n)), by({"0": columns()})),
    "rows, positions": (
        lambda: one(nn.Linear(4, 3), lambda n: randn(n, 3, 4, seed=n), channel=-1),
        by({"0": rows()}),
    ),
    "table": (
        lambda: one(
            nn.Embedding(4, 3),
            lambda n: torch.arange(4 * n).view(n, 4) ** 2 % 4,
            Mean(),
            rows=across,
            channel=-1,
        ),
        by({"0": rows()}),
    ),
    "a head tied to its table": (lambda: tied(4), tied_plan),
    "called twice, columns": (lambda: reused(4), by({"layer": columns()})),
    "called twice, rows": (lambda: reused(4), by({"layer": rows()})),
    "a norm along a sequence": (
        lambda: one(nn.LayerNorm(4), lambda n: randn(n, 4, 4, seed=n), rows=features, channel=-1),
        norm_plan,
    ),
    "projections of attention": (
        projections,
        by(dict.fromkeys("qkv", ColwiseParallel()) | {"out": RowwiseParallel()}),
    ),
    "Conv2d": (KINDS["Conv2d"], convolution_plan),
    "LSTMCell": (KINDS["LSTMCell"], cell_plan),
    "experts": (KINDS["experts"], experts_plan),
    "experts as layers": (
        KINDS["experts as layers"],
        by({"experts.0": columns(), "experts.1": columns(), "experts.2": columns()}),
    ),
}
"""Layers that a plan has changed: torch has styles for linear layers, tables and norms alone.

Parts of weights are equal. `nn.MultiheadAttention` computes with its parameters in one function,
which no style serves.
"""
FIRST = ["columns", "rows, positions", "table"]


def shares(data: list[Batch], ranks: int = 2) -> list[list[Batch]]:
    """Return the batches of two or four ranks: as many of each, since each pass gathers weights."""
    first, second, (inputs, targets) = data
    four = [first, second, (inputs[:2], targets[:2]), (inputs[2:], targets[2:])]
    each = 4 // ranks
    return [four[each * rank : each * (rank + 1)] for rank in range(ranks)]


def found(kind: Kind, whole: Kind, share: list[Batch], strategy: str) -> dict[str, float]:
    curvature = soframe.Curvature(kind.model, strategy=strategy, layers=kind.layers)
    return errors(curvature.fit(share, loss), whole, whole.data())


def sharded(rank: int, ranks: int, names: list[str], strategy: str) -> Any:
    of_kinds = {}
    for name in names:
        kind, whole = KINDS[name](), KINDS[name]()
        fully_shard(kind.model)
        of_kinds[name] = found(kind, whole, shares(whole.data(), ranks)[rank], strategy)
    return of_kinds


def planned(rank: int, ranks: int, names: list[str], strategy: str) -> Any:
    of_plans = {}
    mesh = init_device_mesh("cpu", (ranks,))
    for name in names:
        make, plan = PLANS[name]
        kind, whole = make(), make()
        plan(kind.model, mesh)
        # The ranks of a plan have each batch together.
        of_plans[name] = found(kind, whole, whole.data(), strategy)
    return of_plans


def meshed(rank: int, ranks: int, strategies: dict[str, str]) -> Any:
    """Return the errors on two copies of two ranks of a plan, by plans with their strategies."""
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("copies", "plan"))
    of_plans = {}
    for name, strategy in strategies.items():
        make, plan = PLANS[name]
        kind, whole = make(), make()
        plan(kind.model, mesh["plan"])
        share = shares(whole.data())[mesh.get_local_rank("copies")]
        of_plans[name] = found(kind, whole, share, strategy)
    return of_plans


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "names", "strategy"),
    [
        (2, ["Linear, positions", "Conv2d, grouped", "MultiheadAttention", "LSTMCell"], "sharded"),
        *(
            pytest.param(ranks, list(KINDS), strategy, marks=pytest.mark.thorough)
            for ranks in (2, 4)
            for strategy in ("comm-opt", "mem-opt", "hybrid-opt", "sharded")
        ),
    ],
)
def test_fully_sharded_kinds_are_dense_products(
    ranks: int, names: list[str], strategy: str
) -> None:
    for of_kinds in run_ranks(sharded, ranks, names, strategy, timeout=600):
        for name, of_kind in of_kinds.items():
            assert set(of_kind) == set(COLUMNS)
            assert max(of_kind.values()) < 1e-12, (name, of_kind)


@pytest.mark.slow
def test_layers_of_a_plan_are_dense_products() -> None:
    names = [*FIRST, "a head tied to its table", "a norm along a sequence"]
    strategies = dict(zip(FIRST, ("mem-opt", "hybrid-opt", "sharded"), strict=True))
    every = run_ranks(planned, 2, names, "comm-opt") + run_ranks(meshed, 4, strategies)
    require_exact(every)


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt", "hybrid-opt", "sharded"])
def test_layers_of_every_plan_are_dense_products_under(strategy: str) -> None:
    require_exact(run_ranks(planned, 2, list(PLANS), strategy, timeout=600))
    require_exact(run_ranks(meshed, 4, dict.fromkeys(PLANS, strategy), timeout=600))


def require_exact(every: list[dict[str, dict[str, float]]]) -> None:
    for of_plans in every:
        for name, of_plan in of_plans.items():
            assert set(of_plan) == set(COLUMNS)
            assert max(of_plan.values()) < 1e-12, (name, of_plan)


# -- posteriors, penalties and vectors -------------------------------------------------------------


def perceptron() -> tuple[nn.Module, list[Batch]]:
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    return model, [(randn(n, 3, seed=n), randn(n, 2, seed=9 + n)) for n in (5, 4, 3)]


def planned_perceptron(model: nn.Module, ranks: int) -> None:
    plan = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "2": RowwiseParallel(input_layouts=Replicate()),
    }
    parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)


def posterior(model: nn.Module, share: list[Batch], inputs: Tensor) -> list[Any]:
    """Return the posterior's precision, samples and predictions, and a product with weights."""
    statistics = soframe.Statistics(fisher="type-2", loss="squared-error")
    curvature = soframe.Curvature(model, statistics=statistics).fit(share, loss)
    laplace = soframe.laplace.Laplace(curvature).optimised()
    predictive = laplace.predictive(inputs)
    samples = laplace.sample(2, torch.Generator().manual_seed(0))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return [
        laplace.prior_precision,
        laplace.samples,
        predictive.mean,
        predictive.covariance,
        samples,
        curvature @ weights,
    ]


def refusals(model: nn.Module, share: list[Batch]) -> list[str]:
    """Return the errors of what needs whole weights in the model."""
    statistics = soframe.Statistics(fisher="type-2", loss="squared-error")
    curvature = soframe.Curvature(model, statistics=statistics).fit(share, loss)
    anchor = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    calls: list[Callable[[], object]] = [
        lambda: soframe.laplace.Laplace(curvature).outputs(share[0][0], 1),
        lambda: soframe.continual.penalty(curvature, anchor),
        lambda: soframe.merging.merge([curvature, curvature], damping=1.0),
    ]
    messages = []
    for call in calls:
        with pytest.raises(ValueError, match="sharded by") as raised:
            call()
        messages.append(str(raised.value))
    return messages


def users_of(rank: int, ranks: int, how: str) -> Any:
    model, data = perceptron()
    share = data
    if how == "plan":
        planned_perceptron(model, ranks)
    else:
        fully_shard(model)
        share = shares(data)[rank]
    return posterior(model, share, data[0][0]), refusals(model, share)


def of_samples(rank: int, ranks: int) -> dict[str, Tensor]:
    model, data = perceptron()
    curvature = soframe.Curvature(model)
    planned_perceptron(model, ranks)
    return curvature.gradients(data[0], loss).dense()


@pytest.mark.slow
def test_gradients_of_samples_with_a_curvature_from_before_the_plan() -> None:
    model, data = perceptron()
    wanted = soframe.Curvature(model).gradients(data[0], loss).dense()
    for gradients in run_ranks(of_samples, 2):
        torch.testing.assert_close(gradients, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["fully_shard", "plan"])
def test_posteriors_are_those_of_the_whole_model(how: str) -> None:
    model, data = perceptron()
    wanted = posterior(model, data, data[0][0])
    for values, messages in run_ranks(users_of, 2, how):
        torch.testing.assert_close(values, wanted, rtol=1e-9, atol=1e-11)
        for message, what in zip(messages, ("Laplace.outputs", "penalty", "merge"), strict=True):
            assert what in message
            assert "0.weight is sharded by fully_shard or a tensor-parallel plan" in message


class Part(nn.Linear):
    """A layer that computes with this rank's part of its weight alone."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to_local())  # type: ignore[operator]


def of_parts(rank: int, ranks: int) -> None:
    model = fill(nn.Sequential(Part(3, 4, bias=False), nn.Linear(2, 2)))
    weight = distribute_tensor(model[0].weight.detach(), init_device_mesh("cpu", (2,)), [Shard(0)])
    model[0].weight = nn.Parameter(weight)
    curvature = soframe.Curvature(model, layers={"^0$": LinearHelper})
    curvature.gradients((randn(3, 3), randn(3, 2)), loss)


def test_gradients_of_samples_of_a_part_of_a_weight_are_an_error() -> None:
    with pytest.raises(RankError) as raised:
        run_ranks(of_parts, 2)
    for failure in raised.value.failures:
        assert "computes with this rank's part of a parameter" in failure.summary
