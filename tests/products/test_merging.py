"""Merged weights solve the dense system."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import soframe
from tests.curvature import fill, randn
from tests.products.kinds import KINDS, Kind, loss
from tests.products.table import taken
from tests.products.test_fitting import batches, cross_entropy, network

DAMPING = 0.05


def moved(kind: Kind, seed: int) -> Kind:
    """Return a kind with other weights, and a twin of these."""
    model = copy.deepcopy(kind.model)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.add_(randn(*parameter.shape, seed=seed + number), alpha=0.3)
    return Kind(model, kind.inputs, kind.parts)


@pytest.mark.parametrize("name", ["Linear", "Conv2d, grouped", "LayerNorm", "a layer called twice"])
def test_merged_weights_solve_the_dense_system(name: str) -> None:
    first = KINDS[name]()
    kinds = [first, moved(first, 10), moved(first, 20)]
    curvatures, lefts, rights = [], [], []
    for number, kind in enumerate(kinds):
        data = [(inputs, targets + number) for inputs, targets in kind.data()]
        curvatures.append(soframe.Curvature(kind.model, layers=kind.layers).fit(data, loss))
        lefts.append(kind.matrices(data))
        weights = {n: p.detach().unsqueeze(0) for n, p in kind.model.named_parameters()}
        rights.append(taken(kind, weights))
    merged = soframe.merging.merge(curvatures, damping=DAMPING, tolerance=1e-12)
    rows = taken(first, {n: tensor.unsqueeze(0) for n, tensor in merged.items()})
    for part, row in enumerate(rows):
        size = row.shape[2]
        matrix = DAMPING * torch.eye(size, dtype=torch.float64).expand(row.shape[1], -1, -1)
        right = DAMPING * torch.stack([of[part][0] for of in rights]).mean(0)
        for left, of_kind in zip(lefts, rights, strict=True):
            matrix = matrix + left[part]
            right = right + torch.einsum("gpq,gq->gp", left[part], of_kind[part][0])
        solution = torch.linalg.solve(matrix, right.unsqueeze(2)).squeeze(2)
        torch.testing.assert_close(row[0], solution, rtol=1e-8, atol=1e-10)


def test_conjugate_gradients_end_after_about_as_many_iterations_as_weights() -> None:
    """Steepest descent takes over 500: the preconditioner is bad for curvatures so different."""
    scale = torch.tensor([1.0, 3.0, 10.0, 30.0, 100.0, 300.0], dtype=torch.float64)
    fitted = []
    for number, scales in enumerate((scale, scale.flip(0))):
        model = fill(nn.Linear(6, 3, bias=False), seed=3 * number)  # 18 weights
        data = [(randn(12, 6, seed=number) * scales, torch.arange(12) % 3)]
        fitted.append(soframe.Curvature(model).fit(data, cross_entropy))
    merged = soframe.merging.merge(fitted, damping=1e-4, tolerance=1e-9, iterations=25)
    assert merged.keys() == {"weight"}


def test_a_large_damping_gives_the_mean() -> None:
    models = [network(), fill(network(), 7)]
    merged_names = set(dict(models[0].named_parameters()))
    fitted = []
    for model in models:
        model.register_parameter("integers", nn.Parameter(torch.arange(3), requires_grad=False))
        curvature = soframe.Curvature(model, "ekfac", skip=["^0$"])
        fitted.append(curvature.fit(batches(5), cross_entropy))
    merged = soframe.merging.merge(fitted, damping=1e9)
    assert set(merged) == merged_names
    for name, tensor in merged.items():
        mean = (models[0].get_parameter(name) + models[1].get_parameter(name)).detach() / 2
        torch.testing.assert_close(tensor, mean, rtol=1e-6, atol=1e-6)
    models[0].load_state_dict(merged, strict=False)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_models_below_float32_merge_as_their_whole_twins(dtype: torch.dtype) -> None:
    merged = []
    for of_weights in (dtype, torch.float64):
        curvatures = []
        for seed in (0, 7):
            model = fill(network(), seed).to(dtype).to(of_weights)
            data = [(x.to(dtype).to(of_weights), y) for x, y in batches(20)]
            curvatures.append(soframe.Curvature(model).fit(data, cross_entropy))
        merged.append(soframe.merging.merge(curvatures, damping=1e-3))
    for name, tensor in merged[0].items():
        assert tensor.dtype == dtype
        error = (tensor.double() - merged[1][name]).norm() / merged[1][name].norm()
        assert error < 0.03


def test_equal_models_stay() -> None:
    curvatures = _of_two(lambda: soframe.Curvature(network()))
    merged = soframe.merging.merge(curvatures, damping=0.1)
    for name, tensor in merged.items():
        torch.testing.assert_close(tensor, network().get_parameter(name).detach())


def _unfitted() -> list[soframe.Curvature]:
    return [soframe.Curvature(network())]


def _of_two(*second: Callable[[], soframe.Curvature]) -> list[soframe.Curvature]:
    curvatures = [soframe.Curvature(network()), *(build() for build in second)]
    return [curvature.fit(batches(5), cross_entropy) for curvature in curvatures]


def _other_layers() -> soframe.Curvature:
    return soframe.Curvature(network(), skip=["^0$"])


def _other_model() -> soframe.Curvature:
    return soframe.Curvature(fill(nn.Sequential(nn.Linear(3, 3))))


def test_errors_have_a_remedy() -> None:
    merge = soframe.merging.merge
    with pytest.raises(ValueError, match="pass a fitted curvature"):
        merge([], damping=1.0)
    with pytest.raises(RuntimeError, match="not fitted"):
        merge(_unfitted(), damping=1.0)
    with pytest.raises(ValueError, match="damping must be a number, not 'relative'"):
        merge(_unfitted(), damping="relative")
    for damping in (0.0, math.inf):
        with pytest.raises(ValueError, match=r"damping must be a positive .* pass a few mean"):
            merge(_of_two(), damping=damping)
    with pytest.raises(ValueError, match=r"differ in parameters.*skip="):
        merge(_of_two(_other_layers), damping=1.0)
    with pytest.raises(ValueError, match="differ in names or shapes"):
        merge(_of_two(_other_model), damping=1.0)
    model = network()
    tasks = [soframe.Curvature(model).fit(batches(5), cross_entropy) for _ in range(2)]
    with pytest.raises(ValueError, match="one model"):
        merge(tasks, damping=1.0)
    curvatures = _of_two(lambda: soframe.Curvature(fill(network(), 3)))
    with pytest.raises(ValueError, match="iterations must be at least 1"):
        merge(_of_two(), damping=1.0, iterations=0)
    with pytest.raises(RuntimeError, match="raise the damping"):
        merge(curvatures, damping=1e-6, tolerance=1e-13, iterations=1)
    with torch.no_grad():
        curvatures[1].parameters["0.bias"][0] = math.nan
    with pytest.raises(ValueError, match="weights of a model or a curvature are not finite"):
        merge(curvatures, damping=1.0)


def test_least_squares_of_two_halves_merge_into_that_of_all_data() -> None:
    inputs, targets = randn(40, 3, seed=1), randn(40, 2, seed=2)
    ones = torch.cat([inputs, torch.ones(40, 1).double()], 1)
    statistics = soframe.Statistics(fisher="type-2", loss="squared-error")
    curvatures = []
    for half in (slice(0, 20), slice(20, 40)):
        model = fill(nn.Sequential(nn.Linear(3, 2)))
        solution = torch.linalg.lstsq(ones[half], targets[half]).solution
        with torch.no_grad():
            model.get_parameter("0.weight").copy_(solution[:3].T)
            model.get_parameter("0.bias").copy_(solution[3])
        curvature = soframe.Curvature(model, statistics=statistics)
        curvatures.append(curvature.fit([(inputs[half], targets[half])], loss))
    merged = soframe.merging.merge(curvatures, damping=1e-9, tolerance=1e-12)
    solution = torch.linalg.lstsq(ones, targets).solution
    torch.testing.assert_close(merged["0.weight"], solution[:3].T, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(merged["0.bias"], solution[3], rtol=1e-6, atol=1e-7)
