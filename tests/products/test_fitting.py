"""Fits: means over data, in windows, by passes, after an interruption; and what they leave."""

from __future__ import annotations

import copy
import gc
import json
import signal
import subprocess
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from torch import Tensor, nn

import soframe
from soframe import checkpoint
from soframe.methods import KFAC, Call
from soframe.methods.spectrum import Spectrum, kronecker
from tests.curvature import closing, fill, preconditioner, randn
from tests.products.kinds import KINDS, Batch, Kind, Part, loss, rows_of
from tests.products.table import taken, vectors

CLASSES = 3
STATISTICS: dict[str, soframe.Statistics] = {
    "empirical": soframe.Statistics(),
    "forward-only": soframe.Statistics(fisher="forward-only"),
    "type-2": soframe.Statistics(fisher="type-2", loss="cross-entropy"),
    "monte-carlo": soframe.Statistics(fisher="monte-carlo", loss="cross-entropy"),
}


def network() -> nn.Module:
    return fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, CLASSES)))


def batches(*sizes: int) -> list[Batch]:
    data = []
    for seed, size in enumerate(sizes):
        labels = torch.arange(size) * (seed + 1) % CLASSES
        data.append((randn(size, 3, seed=seed), labels))
    return data


def cross_entropy(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    outputs = model(batch[0])
    return outputs, nn.functional.cross_entropy(outputs, batch[1])


def values_of(curvature: soframe.Curvature) -> list[Tensor]:
    return [curvature.eigenvalues(block.name) for block in curvature.blocks]


def close(one: soframe.Curvature, other: soframe.Curvature) -> None:
    """Check that two curvatures have the same spectra and products."""
    torch.testing.assert_close(values_of(one), values_of(other), rtol=1e-11, atol=1e-13)
    model = one.parts.model
    vector = {n: randn(*p.shape, seed=i) for i, (n, p) in enumerate(model.named_parameters())}
    found, wanted = one.inverse(0.1) @ vector, other.inverse(0.1) @ vector
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


# -- the definition --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Linear, positions", "Conv2d, grouped", "Embedding", "LayerNorm"])
def test_ekfac_has_the_squares_of_rotated_sample_gradients(name: str) -> None:
    kind = KINDS[name]()
    data = kind.data() + kind.data()
    curvature = soframe.Curvature(kind.model, "ekfac").fit(data, loss)
    wanted = ekfac_of(kind, kind.parts[0], data)
    vector = vectors(kind)
    (found,), (given,) = taken(kind, curvature @ vector), taken(kind, vector)
    product = torch.einsum("gpr,ngr->ngp", wanted, given)
    torch.testing.assert_close(found, product, rtol=1e-10, atol=1e-12)


def ekfac_of(kind: Kind, part: Part, data: list[Batch]) -> Tensor:
    """Return ``(Q_G ⊗ Q_A) diag(S) (Q_G ⊗ Q_A)^T`` of each group."""
    inputs, gradients = rows_of(kind, part, data)
    each = [taken(kind, kind.gradients(batch))[0] for batch in data]
    samples = torch.cat(each).unflatten(2, (gradients.shape[2], inputs.shape[2]))
    found = []
    for group in range(len(inputs)):
        _, right = torch.linalg.eigh(inputs[group].T @ inputs[group])
        _, left = torch.linalg.eigh(gradients[group].T @ gradients[group])
        scale = (left.T @ samples[:, group] @ right).square().mean(0)
        basis = torch.kron(left, right)
        found.append(basis @ scale.flatten().diag() @ basis.T)
    return torch.stack(found)


class Flat(nn.Module):
    """Layers that see the tokens of a batch in one dimension, ``[N T, features]``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.inner(x.flatten(0, 1))
        return outputs.unflatten(0, x.shape[:2])


@pytest.mark.parametrize("method", ["ekfac", "kfac-reduce"])
def test_flat_tokens_are_of_their_samples(method: str) -> None:
    inner = network()
    data = [(randn(n, 4, 3, seed=n), randn(n, 4, CLASSES, seed=n + 9)) for n in (5, 4, 1)]
    whole = soframe.Curvature(inner, method).fit(data, loss)
    flat = soframe.Curvature(Flat(inner), method).fit(data, loss)
    torch.testing.assert_close(values_of(flat), values_of(whole), rtol=1e-11, atol=1e-13)


class Picking(nn.Module):
    """A layer that sees some of the tokens of a batch, as an expert does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.number = nn.Linear(3, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        outputs = tokens[:, :2] * 1.0
        outputs[: self.number] = outputs[: self.number] + self.inner(tokens[: self.number])
        return outputs.unflatten(0, x.shape[:2])


def test_rows_of_a_router_are_no_tokens_of_samples() -> None:
    model: Any = fill(Picking())
    data = [(randn(5, 4, 3, seed=n), randn(5, 4, 2, seed=n + 9)) for n in range(2)]

    def picked(module: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        module.number = 7 if batch is data[0] else 10  # two for each sample, by chance
        return loss(module, batch)

    curvature = soframe.Curvature(model, "ekfac").fit(data, picked)
    inputs, gradients = [], []
    for batch in data:
        outputs, value = picked(model, batch)
        (gradient,) = torch.autograd.grad(value, outputs)
        inputs.append(torch.cat([batch[0].flatten(0, 1), torch.ones(20, 1)], 1)[: model.number])
        gradients.append(5 * gradient.flatten(0, 1)[: model.number])
    rows, of_outputs = torch.cat(inputs), torch.cat(gradients)
    right, left = (torch.linalg.eigh(x.T @ x)[1] for x in (rows, of_outputs))
    scale = (of_outputs @ left).square().T @ (rows @ right).square() / 10  # by row
    values = scale.flatten().sort().values
    torch.testing.assert_close(curvature.eigenvalues(), values, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("name", ["Linear, positions", "Conv2d, grouped", "Embedding", "LayerNorm"])
def test_the_diagonal_has_the_squares_of_sample_gradients(name: str) -> None:
    kind = KINDS[name]()
    data = kind.data()
    curvature = soframe.Curvature(kind.model, "diagonal").fit(data, loss)
    gradients = [kind.gradients(batch) for batch in data]
    vector = dict(kind.model.named_parameters())
    products, inverses = curvature @ vector, curvature.inverse(0.1) @ vector
    for key, weight in vector.items():
        diagonal = torch.cat([of_batch[key] for of_batch in gradients]).square().mean(0)
        torch.testing.assert_close(products[key], diagonal * weight.detach())
        torch.testing.assert_close(inverses[key], weight.detach() / (diagonal + 0.1))


@pytest.mark.parametrize("method", ["kfac", "ekfac", "kfac-reduce"])
@pytest.mark.parametrize("fisher", ["empirical", "type-2", "monte-carlo"])
def test_each_fisher_and_method_fits_what_a_step_of_training_has(fisher: str, method: str) -> None:
    data = batches(7)
    model = network()
    preconditioner = soframe.Preconditioner(
        model,
        method,
        "eigen",
        layers="all",
        statistics=STATISTICS[fisher],
        statistics_every=1,
        solve_every=2,
    )
    for _ in range(2 if method == "ekfac" else 1):  # the scale comes with the second step
        torch.manual_seed(1)
        model.zero_grad()
        outputs, value = cross_entropy(model, data[0])
        preconditioner.observe(outputs)
        value.backward()
        preconditioner.step()
    trained = preconditioner.curvature
    preconditioner.close()
    curvature = soframe.Curvature(model, method, statistics=STATISTICS[fisher])
    torch.manual_seed(1)
    if (fisher, method) != ("monte-carlo", "ekfac"):  # whose second pass draws anew
        close(curvature.fit(data, cross_entropy), trained)
    else:
        curvature.fit(data, cross_entropy)
        assert curvature.trace() == pytest.approx(trained.trace(), rel=0.5)


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_the_curvature_of_a_preconditioner_is_that_of_its_last_step(solver: str) -> None:
    model, data = network(), batches(6, 6)
    preconditioner = soframe.Preconditioner(
        model, solver=solver, layers="all", statistics_every=1, solve_every=1, decay=0.5
    )
    curvature = preconditioner.curvature
    with pytest.raises(RuntimeError, match="fit it to data"):
        curvature.trace()

    def step(batch: Batch) -> None:
        model.zero_grad()
        cross_entropy(model, batch)[1].backward()
        preconditioner.step()

    step(data[0])
    close(curvature, soframe.Curvature(model).fit(data[:1], cross_entropy))
    operator, before = curvature.inverse(damping=0.1), curvature.trace()
    vector = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    product = operator @ vector
    step(data[1])
    assert curvature.trace() != pytest.approx(before)
    # An operator keeps the curvature that it was made of.
    for name, tensor in (operator @ vector).items():
        torch.testing.assert_close(tensor, product[name], rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="which has its own statistics"):
        curvature.fit(data, cross_entropy)


@pytest.mark.parametrize("solver", ["eigen", "inverse"])
def test_a_curvature_of_training_is_saved_and_loaded(solver: str, tmp_path: Path) -> None:
    model, data = network(), batches(6, 6)
    with closing(preconditioner(model, solver=solver, layers="all")) as own:
        for batch in data:
            model.zero_grad()
            cross_entropy(model, batch)[1].backward()
            own.step()
        own.curvature.save(tmp_path)
        loaded = soframe.Curvature(model, solver=solver).load(tmp_path)
        close(loaded, own.curvature)
    with pytest.raises(RuntimeError, match="not fitted to data"):
        soframe.laplace.Laplace(loaded)  # the number of samples is unknown


def test_a_scale_of_training_is_saved_and_loaded(tmp_path: Path) -> None:
    model, data = network(), batches(6, 6)
    settings: dict[str, Any] = {"layers": "all", "statistics_every": 1, "solve_every": 2}
    with closing(preconditioner(model, method="ekfac", **settings)) as own:
        for batch in data:  # the scale comes with the second
            model.zero_grad()
            cross_entropy(model, batch)[1].backward()
            own.step()
        own.curvature.save(tmp_path)
        loaded = soframe.Curvature(network(), "ekfac").load(tmp_path)
        close(loaded, own.curvature)
        plain = soframe.Curvature(network(), "kfac").fit(data, cross_entropy)
        assert loaded.trace() != pytest.approx(plain.trace())


def test_another_solver_loads_factors_and_solves_them(tmp_path: Path) -> None:
    model, data = network(), batches(6, 5)
    fitted = soframe.Curvature(model).fit(data, cross_entropy)
    fitted.save(tmp_path / "kfac")
    close(soframe.Curvature(network(), solver="inverse").load(tmp_path / "kfac"), fitted)
    ekfac = soframe.Curvature(model, "ekfac").fit(data, cross_entropy)
    ekfac.save(tmp_path / "ekfac")
    other = soframe.Curvature(network(), "ekfac", solver="orthogonal-iteration")
    with pytest.raises(ValueError, match=r"solved by .*Eigen.* pass the solver= that it was"):
        other.load(tmp_path / "ekfac")


def test_a_closed_curvature_is_not_fitted_and_keeps_its_products() -> None:
    data = batches(6)
    curvature = soframe.Curvature(network()).fit(data, cross_entropy)
    wanted = soframe.Curvature(network()).fit(data, cross_entropy)
    curvature.close()
    with pytest.raises(RuntimeError, match="this curvature is closed"):
        curvature.fit(data, cross_entropy)
    close(curvature, wanted)


@pytest.mark.parametrize("method", ["soap", "kfac"])
def test_methods_without_calls_have_no_gradients_of_samples(method: str) -> None:
    """Of parameters that no call shows, gradients were zeros, with a warning or none."""
    model, data = network(), batches(6)
    own = soframe.Preconditioner(model, method, auxiliary="adamw")
    with closing(own), pytest.raises(ValueError, match=r"reads no calls of layers, .* build a"):
        own.curvature.gradients(data[0], cross_entropy)


def test_statistics_of_training_see_nothing_of_sample_gradients() -> None:
    model, data = network(), batches(6)
    preconditioner = soframe.Preconditioner(
        model, solver="eigen", layers="all", statistics_every=1, solve_every=1
    )
    wanted = soframe.Curvature(model).fit(data, cross_entropy)
    cross_entropy(model, data[0])[1].backward()
    preconditioner.step()
    model.zero_grad()
    cross_entropy(model, data[0])[1].backward()
    preconditioner.curvature.gradients(batches(6, 6)[1], cross_entropy)
    preconditioner.step()
    close(preconditioner.curvature, wanted)


SINGULAR = r"has no inverse: .* Pass a damping, such as 0\.1 \* .*, or leave .* out"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("method", "statistics"),
    [("kfac", "empirical"), ("kfac", "type-2"), ("ekfac", "empirical"), ("foof", "forward-only")],
)
def test_without_damping_a_singular_block_has_no_inverse(
    method: str, statistics: str, dtype: torch.dtype
) -> None:
    """Of fewer samples than inputs: factors have eigenvalues that are zeros but for rounding."""
    model, data = fill(nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, CLASSES))), []
    for _, labels in batches(2, 1):
        data.append((randn(len(labels), 7, seed=len(labels)).to(dtype), labels))
    curvature = soframe.Curvature(model.to(dtype), method, statistics=STATISTICS[statistics])
    curvature.fit(data, cross_entropy)
    dense = dense_of(curvature)
    ranks: dict[str, str] = {}
    for block in curvature.blocks:
        names = list(curvature.names[block].values())
        of_block = dense[names[0].rpartition(".")[0]]
        rank = int(torch.linalg.matrix_rank(of_block, hermitian=True, rtol=1e-5))
        assert rank < len(of_block)
        ranks[block.name] = f"{block.name} (rank {rank} of {len(of_block)})"
    with pytest.raises(ValueError, match=SINGULAR) as raised:
        curvature.inverse(0.0)
    assert f"rounding in {', '.join(ranks.values())}. Pass" in str(raised.value)
    for damping in (1e-42, -0.0) if dtype == torch.float32 else (5e-324,):  # no normal number
        with pytest.raises(ValueError, match="has no inverse"):
            curvature.inverse(damping)
    assert curvature.logdet() == -torch.inf
    inverse = curvature.inverse(1e-30 if dtype == torch.float32 else 1e-300)
    assert all(tensor.isfinite().all() for tensor in (inverse @ ones_like(model)).values())


def dense_of(curvature: soframe.Curvature) -> dict[str, Tensor]:
    """Return the matrix of each module, from products with the columns of the identity."""
    model = curvature.parts.model
    named = list(model.named_parameters())
    size = sum(p.numel() for _, p in named)
    columns = torch.eye(size, dtype=named[0][1].dtype).split([p.numel() for _, p in named], 1)
    vector = {}
    for (name, p), column in zip(named, columns, strict=True):
        vector[name] = column.reshape(size, *p.shape)
    rows = {name: tensor.flatten(1) for name, tensor in (curvature @ vector).items()}
    dense, first = {}, 0
    for module in dict.fromkeys(name.rpartition(".")[0] for name, _ in named):
        of_module = [rows[name] for name, _ in named if name.rpartition(".")[0] == module]
        matrix = torch.cat(of_module, 1)
        dense[module] = matrix[first : first + matrix.shape[1]]
        first += matrix.shape[1]
    return dense


def ones_like(model: nn.Module) -> dict[str, Tensor]:
    return {name: torch.ones_like(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("method", ["kfac", "ekfac", "diagonal"])
def test_without_damping_a_regular_curvature_has_its_inverse(method: str) -> None:
    model = fill(nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 2)))
    data = [(randn(20, 3, seed=seed), randn(20, 2, seed=seed + 9)) for seed in range(2)]
    curvature = soframe.Curvature(model, method).fit(data, loss)
    inverse, values = curvature.inverse(0.0), curvature.eigenvalues()
    vector = ones_like(model)
    for product in (curvature @ (inverse @ vector), inverse.sqrt() @ (curvature @ vector)):
        again = inverse.sqrt() @ (curvature @ (inverse.sqrt() @ product))
        torch.testing.assert_close(again, dict(product), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(curvature @ (inverse @ vector), vector, rtol=1e-9, atol=1e-9)
    assert inverse.trace() == pytest.approx(float((1 / values).sum()))
    assert inverse.logdet() == pytest.approx(-curvature.logdet())


def test_samples_in_different_directions_leave_zeros_of_the_scale() -> None:
    """Both factors of EKFAC are regular, and no sample has the directions of two of them."""
    angle = torch.tensor(0.3, dtype=torch.float64)
    turn = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()]).view(2, 2)
    model = fill(nn.Sequential(nn.Linear(2, 2, bias=False)))
    inputs = turn.T * torch.tensor([[1.0], [2.0]], dtype=torch.float64)

    def linear(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, (outputs * batch[1]).sum(1).mean()

    curvature = soframe.Curvature(model, "ekfac").fit([(inputs, inputs)], linear)
    with pytest.raises(ValueError, match=r"0 \(rank 2 of 4\)"):
        curvature.inverse(0.0)
    soframe.Curvature(model, "kfac").fit([(inputs, inputs)], linear).inverse(0.0)


def test_small_squares_of_the_scale_are_no_zeros() -> None:
    """Of gradients of 1e-9 beside ones, which are far above the rounding of a rotation."""
    model = fill(nn.Sequential(nn.Linear(2, 2, bias=False)))
    inputs = torch.tensor([[2, 0], [0, 1], [1e-9, 0], [0, 1e-9]], dtype=torch.float64)
    of_outputs = torch.tensor([[1, 0], [0, 3], [0, 1], [1, 0]], dtype=torch.float64)

    def linear(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, (outputs * batch[1]).sum(1).mean()

    curvature = soframe.Curvature(model, "ekfac").fit([(inputs, of_outputs)], linear)
    assert 0 < float(curvature.eigenvalues()[1]) < 1e-18
    curvature.inverse(0.0)


def test_a_rare_token_has_a_small_curvature_and_no_zero() -> None:
    """Entries along a side that is not rotated are not rounded by the largest one."""
    model = fill(nn.Sequential(nn.Embedding(3, 2))).float()
    tokens, targets = torch.arange(3).repeat(4).unsqueeze(1), randn(12, 1, 2, seed=0).float()
    targets[tokens[:, 0] == 2] *= 1e-5
    with torch.no_grad():
        model[0].weight.zero_()  # type: ignore[operator,union-attr]
    curvature = soframe.Curvature(model, "ekfac").fit([(tokens, targets)], loss)
    assert float(curvature.eigenvalues()[0]) < 1e-9
    curvature.inverse(0.0)


def test_two_inverses_of_a_small_damping_are_about_the_pseudo_inverse() -> None:
    model = fill(nn.Sequential(nn.Linear(7, 5)))
    data = [(randn(3, 7, seed=seed), randn(3, 5, seed=seed + 9)) for seed in range(2)]
    curvature = soframe.Curvature(model).fit(data, loss)
    inverse, vector = curvature.inverse(1e-6), ones_like(model)
    dense = torch.linalg.pinv(dense_of(curvature)["0"], rtol=1e-9, hermitian=True)
    flat = torch.cat([tensor.flatten() for tensor in vector.values()])
    found = curvature @ (inverse @ (inverse @ vector))
    wanted = dense @ flat
    product = torch.cat([tensor.flatten() for tensor in found.values()])
    torch.testing.assert_close(product, wanted, rtol=0, atol=2e-3 * float(wanted.abs().max()))


# -- windows and passes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["Linear, positions", "experts", "MultiheadAttention", "Embedding"]
)
def test_windows_of_any_length_give_the_same_means(name: str) -> None:
    kind = KINDS[name]()
    data = kind.data()
    method = "kfac" if name == "experts" else "ekfac"
    whole = soframe.Curvature(kind.model, method, layers=kind.layers).fit(data, loss)
    windows = soframe.Curvature(kind.model, method, layers=kind.layers).fit(data, loss, every=1)
    close(windows, whole)


class Deeper(nn.Module):
    """Has one layer more for larger batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.more, self.head = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        if len(x) > 3:
            hidden = self.more(hidden).tanh()
        return self.head(hidden)


@pytest.mark.parametrize("sizes", [(5, 3, 4, 2), (3, 5, 2, 4)])
@pytest.mark.parametrize("method", ["ekfac", "diagonal"])
def test_samples_that_do_not_reach_a_layer_count_in_windows_too(
    method: str, sizes: tuple[int, ...]
) -> None:
    model, data = fill(Deeper()), batches(*sizes)
    whole = soframe.Curvature(model, method).fit(data, cross_entropy)
    trace = 0.0  # of the layer's block, the mean over all samples
    for batch in data:
        gradients = whole.gradients(batch, cross_entropy).dense()
        for name in ("more.weight", "more.bias"):
            trace += float(gradients[name].square().sum()) / sum(sizes)
    for every in (1, 3):
        windows = soframe.Curvature(model, method).fit(data, cross_entropy, every=every)
        close(windows, whole)
        if method == "diagonal":
            assert windows.trace("more") == pytest.approx(trace, rel=1e-5)


@pytest.mark.parametrize("first", [2, 5])
@pytest.mark.parametrize("fisher", ["empirical", "type-2"])
@pytest.mark.parametrize("method", ["kfac", "ekfac", "diagonal"])
def test_micro_batches_within_a_loss_are_one_batch(method: str, fisher: str, first: int) -> None:
    """Of any sizes, if the loss is the mean over all samples."""

    def in_parts(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs, labels = batch
        outputs, value = list[Tensor](), torch.zeros((), dtype=torch.float64)
        for part in (slice(first), slice(first, None)):
            of_part, mean = cross_entropy(model, (inputs[part], labels[part]))
            outputs.append(of_part)
            value = value + len(of_part) / len(inputs) * mean
        return torch.cat(outputs), value

    data, statistics = batches(10, 7), STATISTICS[fisher]
    whole = soframe.Curvature(network(), method, statistics=statistics)
    parts = soframe.Curvature(network(), method, statistics=statistics)
    close(parts.fit(data, in_parts), whole.fit(data, cross_entropy))
    assert parts.fitting.samples == 17


@pytest.mark.parametrize("is_counted", [False, True])
@pytest.mark.parametrize("name", ["Linear, positions", "Conv1d", "LayerNorm"])
def test_micro_batches_within_a_loss_have_the_dense_curvature(name: str, is_counted: bool) -> None:
    """Where their samples are not seen to differ a warning asks for their number."""

    def in_parts(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        if is_counted:
            curvature.count(len(batch[1]))
        outputs, value = list[Tensor](), torch.zeros((), dtype=torch.float64)
        for part in (slice(2), slice(2, None)):
            of_part, mean = loss(model, (batch[0][part], batch[1][part]))
            outputs.append(of_part)
            value = value + len(of_part) / len(batch[1]) * mean
        return torch.cat(outputs), value

    kind = KINDS[name]()
    curvature = soframe.Curvature(kind.model)
    if not is_counted and name != "Linear, positions":
        with pytest.warns(UserWarning, match="went through 2 forward passes .* mean over 3 terms"):
            curvature.fit(kind.data(), in_parts)
        return
    curvature.fit(kind.data(), in_parts)
    vector = vectors(kind)
    (matrix,), (given,) = kind.matrices(kind.data()), taken(kind, vector)
    (found,) = taken(kind, curvature @ vector)
    product = torch.einsum("gpr,ngr->ngp", matrix, given)
    torch.testing.assert_close(found, product, rtol=1e-10, atol=1e-12)


def test_a_second_fit_begins_anew() -> None:
    model, data = network(), batches(5, 5, 2)
    curvature = soframe.Curvature(model, "ekfac")
    curvature.fit(data[:1], cross_entropy).fit(data[1:], cross_entropy)
    close(curvature, soframe.Curvature(model, "ekfac").fit(data[1:], cross_entropy))


class Killed(BaseException):
    """Ends a fit."""


@pytest.mark.parametrize(
    ("method", "runs"),
    [("kfac", 1), ("kfac", 2), ("ekfac", 1), ("ekfac", 3), ("ekfac", 4), ("ekfac", 5)],
)
def test_an_interrupted_fit_goes_on(method: str, runs: int, tmp_path: Path) -> None:
    model, data = network(), batches(5, 4, 3)
    seen: list[int] = []

    def dies(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        if len(seen) == runs:
            raise Killed
        return counts(model, batch)

    def counts(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        seen.append(len(batch[1]))
        return cross_entropy(model, batch)

    curvature = soframe.Curvature(model, method)
    with pytest.raises(Killed):
        curvature.fit(data, dies, folder=tmp_path, every=1)
    again = soframe.Curvature(model, method).load(tmp_path)
    with pytest.raises(RuntimeError, match="not fitted"):
        again.trace()
    other = soframe.Curvature(model, method).load(tmp_path)
    again.fit(data, counts, folder=tmp_path, every=2)
    assert seen == [5, 4, 3] * (2 if method == "ekfac" else 1)
    whole = soframe.Curvature(model, method).fit(data, cross_entropy)
    close(again, whole)
    # A finished fit leaves nothing of the interrupted one that was loaded before.
    close(other.load(tmp_path), whole)
    close(other.fit(data, cross_entropy), whole)


KILLED = """
import os, signal, sys
import soframe
from tests.products.test_fitting import batches, cross_entropy, network

def dies(model, batch):
    if len(batch[1]) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return cross_entropy(model, batch)

curvature = soframe.Curvature(network(), "ekfac")
curvature.fit(batches(5, 4, 3), dies, folder=sys.argv[1], every=1)
"""


@pytest.mark.parametrize("strategy", soframe.available("strategy"))
def test_places_are_the_same_words_in_every_process(strategy: str) -> None:
    curvature = soframe.Curvature(network(), strategy=strategy)
    assert " at 0x" not in curvature.header()["fit"]["places"]


def test_a_shorter_loader_than_was_counted_is_an_error(tmp_path: Path) -> None:
    seen: list[Batch] = []

    def stops(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        seen.append(batch)
        if len(seen) == 4:
            raise KeyboardInterrupt
        return cross_entropy(model, batch)

    data = batches(5, 4, 3, 2)
    with pytest.raises(KeyboardInterrupt):
        soframe.Curvature(network()).fit(data, stops, folder=tmp_path, every=1)
    curvature = soframe.Curvature(network()).load(tmp_path)
    with pytest.raises(ValueError, match="has 2 batches, and 3 were counted"):
        curvature.fit(data[:2], cross_entropy)


def test_a_killed_process_resumes_in_another_one(tmp_path: Path) -> None:
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
    assert process.returncode == -signal.SIGKILL
    seen: list[int] = []

    def counts(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        seen.append(len(batch[1]))
        return cross_entropy(model, batch)

    model, data = network(), batches(5, 4, 3)
    again = soframe.Curvature(model, "ekfac").load(tmp_path).fit(data, counts)
    assert seen == [3, 5, 4, 3]
    close(again, soframe.Curvature(model, "ekfac").fit(data, cross_entropy))


def test_a_saved_curvature_says_what_it_is(tmp_path: Path) -> None:
    model, data = network(), batches(5, 4)
    curvature = soframe.Curvature(model, skip=["^0$"]).fit(data, cross_entropy)
    path = curvature.save(tmp_path)
    loaded = soframe.Curvature(model, skip=["^0$"]).load(tmp_path)
    torch.testing.assert_close(values_of(loaded), values_of(curvature), rtol=0, atol=0)
    saved = {"meaning": {"text": ""}}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*to load in a single process")
        torch.distributed.checkpoint.load(saved, checkpoint_id=path, no_dist=True)
    meaning = json.loads(saved["meaning"]["text"])
    assert meaning["fisher"] == "empirical"
    head = meaning["blocks"]["3"]
    assert head["parameters"] == {"weight": "3.weight", "bias": "3.bias"}
    assert head["A"] == {
        "side": "right",
        "kind": "psd",
        "shape": [1, 5, 5],
        "degree": 0,
        "mean_over": "samples",
        "number": [9.0],
    }
    assert head["G"] == {
        "side": "left",
        "kind": "psd",
        "shape": [1, CLASSES, CLASSES],
        "degree": 2,
        "mean_over": "rows",
        "number": [9.0],
    }
    assert path.parent == tmp_path / "curvature"
    with pytest.raises(ValueError, match="another choice of layers"):
        soframe.Curvature(model).load(tmp_path)
    exact = soframe.Curvature(model, skip=["^0$"], statistics=STATISTICS["type-2"])
    with pytest.raises(ValueError, match="is of the Fisher 'empirical', and this one of 'type-2'"):
        exact.load(tmp_path)
    with pytest.raises(ValueError, match="has no curvature"):
        soframe.Curvature(model).load(tmp_path / "none")


def test_the_number_of_a_factor_is_of_samples_or_of_rows() -> None:
    kind = KINDS["Linear, positions"]()
    data = kind.data()
    curvature = soframe.Curvature(kind.model).fit(data, loss)
    meaning = curvature.meaning_of(*curvature.blocks)
    assert meaning["A"]["number"] == [sum(len(inputs) for inputs, _ in data)]
    assert meaning["G"]["number"] == [sum(inputs[..., 0].numel() for inputs, _ in data)]


def test_the_curvature_of_another_model_is_not_loaded(tmp_path: Path) -> None:
    data = batches(5, 4)
    soframe.Curvature(network()).fit(data, cross_entropy).save(tmp_path)
    wider = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.LayerNorm(5), nn.Linear(5, CLASSES))
    curvature = soframe.Curvature(fill(wider)).fit(data, cross_entropy)
    before = values_of(curvature)
    message = r"'0' has shape \[1, 4, 4\] in the state and \[1, 5, 4\] in the model: load the state"
    with pytest.raises(ValueError, match=message):
        curvature.load(tmp_path)
    torch.testing.assert_close(values_of(curvature), before, rtol=0, atol=0)


def test_checkpoints_of_training_in_the_same_folder_stay(tmp_path: Path) -> None:
    steps = [checkpoint.save(tmp_path, {"step": number}) for number in range(2)]
    curvature = soframe.Curvature(network()).fit(batches(5), cross_entropy, folder=tmp_path)
    last = curvature.save(tmp_path)
    assert [path.name for path in sorted(last.parent.iterdir())] == [last.name]
    assert checkpoint.latest(tmp_path) == steps[1]
    assert steps[0].exists()


# -- what a fit leaves alone -----------------------------------------------------------------------


@pytest.mark.parametrize("fails", [False, True])
def test_a_fit_leaves_weights_gradients_and_buffers(fails: bool) -> None:
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)))
    data = batches(5, 4)
    cross_entropy(model, data[0])[1].backward()
    model[0].bias.grad = None  # type: ignore[union-attr]
    before = copy.deepcopy(model.state_dict())
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    own = [p.grad for p in model.parameters()]

    def last(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        outputs, value = cross_entropy(model, batch)
        return outputs, value * float("nan") if fails and len(batch[1]) == 4 else value

    curvature = soframe.Curvature(model)
    if fails:
        with pytest.raises(ValueError, match="batch 1"):
            curvature.fit(data, last)
    else:
        curvature.fit(data, last)
    model.eval()
    curvature.fit(data, cross_entropy).gradients(data[0], cross_entropy)
    assert all(a is b.grad for a, b in zip(own, model.parameters(), strict=True))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert (parameter.grad is None) == (gradient is None)
        assert gradient is None or torch.equal(gradient, parameter.grad)  # type: ignore[arg-type]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


# -- errors ----------------------------------------------------------------------------------------


def generated() -> Iterator[Batch]:
    yield from batches(5, 4)


def under_no_grad(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        outputs, value = cross_entropy(model, batch)
    return outputs, value.requires_grad_()


def test_groups_of_settings_are_checked() -> None:
    with pytest.raises(TypeError, match=r"statistics must be a soframe.Statistics, not 'type-2'"):
        soframe.Curvature(network(), statistics="type-2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"distribution must be a soframe.Distribution, not 'gloo"):
        soframe.Curvature(network(), distribution="gloo")  # type: ignore[arg-type]


def test_faults_of_data_are_errors_with_a_remedy() -> None:
    curvature = soframe.Curvature(network())
    with pytest.raises(ValueError, match="loader is empty"):
        curvature.fit([], cross_entropy)
    with pytest.raises(ValueError, match="fit: every must be at least 1"):  # would never end
        curvature.fit(batches(3), cross_entropy, every=0)
    with pytest.raises(ValueError, match=r"under no_grad\(\)"):
        curvature.fit(batches(3), under_no_grad)
    data = batches(3, 3)
    data[1][0][0, 0] = float("nan")
    with pytest.raises(ValueError, match="the loss of batch 1 "):
        curvature.fit(data, cross_entropy)
    with pytest.raises(RuntimeError, match="not fitted"):
        curvature.trace()
    with pytest.raises(TypeError, match="must return"):
        curvature.fit(batches(3), lambda model, batch: (None, model(batch[0])))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="not fitted"):  # no file of half a fit
        curvature.save("never")
    with pytest.raises(ValueError, match="pass a DataLoader or a list"):
        soframe.Curvature(network(), "ekfac").fit(generated(), cross_entropy)
    assert curvature.fit(generated(), cross_entropy).trace() > 0
    two = nn.ModuleDict({"used": nn.Linear(3, CLASSES), "idle": nn.Linear(3, 2)}).double()

    def of_used(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
        return cross_entropy(model["used"], batch)

    with pytest.raises(ValueError, match=r"never reach idle.*skip"):
        soframe.Curvature(two).fit(batches(3), of_used)


def test_settings_without_a_meaning_are_refused() -> None:
    model = network()
    for method in ("muon", "soap", "shampoo", "eva", "adamw", "kfac-muon"):
        with pytest.raises(ValueError, match="method='kfac'"):
            soframe.Curvature(model, method)
    for statistics in (
        soframe.Statistics(scaling="kaisa"),
        soframe.Statistics(loss_average="global"),
    ):
        with pytest.raises(ValueError, match="leave scaling= and loss_average="):
            soframe.Curvature(model, statistics=statistics)
    curvature = soframe.Curvature(model).fit(batches(3), cross_entropy)
    with pytest.raises(ValueError, match="at least 0"):
        curvature.inverse(-1.0)
    for damping in ("0.1", None, True, torch.ones(2), 10**400):
        with pytest.raises(ValueError, match="damping must be a number"):
            curvature.logdet(damping)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'head' is no block; the blocks are 0, 2, 3"):
        curvature.trace("head")


def test_strategies_that_leave_data_out_are_refused() -> None:
    distribution = soframe.Distribution(backend=soframe.comm.Recording(rank=0, world_size=8))
    for strategy in ("owner-local", "sharded"):
        with pytest.raises(
            ValueError, match=r"only the ranks .* take statistics of 0: .*group=None"
        ):
            soframe.Curvature(network(), strategy=strategy, distribution=distribution)
    for name in ("comm-opt", "mem-opt", "hybrid-opt"):
        soframe.Curvature(network(), strategy=name, distribution=distribution)
    everyone = soframe.strategies.Sharded(group=None)
    soframe.Curvature(network(), strategy=everyone, distribution=distribution)


def test_names_and_shapes_of_vectors_are_checked() -> None:
    model = network()
    with pytest.warns(UserWarning, match=r"leaves parameters out.*2\.weight"):
        curvature = soframe.Curvature(model, layers=None).fit(batches(3), cross_entropy)
    assert set(curvature.left_out) == {"2.weight", "2.bias"}
    vector = {n: p.detach() for n, p in model.named_parameters() if not n.startswith("2")}
    assert set(curvature @ vector) == set(vector)
    for changed, message in (
        ({"2.weight": randn(4)}, r"no block for 2.weight \(.*layers='all'"),
        ({"head": randn(4)}, r"no block for head \(no parameter\)"),
        ({"0.bias": randn(3)}, r"0.bias has the shape \[4\], and the vector \[3\]"),
        ({"0.bias": randn(2, 4)}, "pass the same for all"),
    ):
        with pytest.raises(ValueError, match=message):
            curvature @ {**vector, **changed}
    whole = dict(vector)
    del vector["0.weight"]
    with pytest.raises(ValueError, match=r"lacks 0.weight.*zeros"):
        curvature @ vector
    with pytest.raises(TypeError, match="a dict of tensors by name, not a Tensor"):
        curvature @ randn(4)
    wrong = [torch.ones(4, dtype=torch.int64), torch.ones(4) * 1j, None]
    wrong += [torch.empty(4, device="meta"), torch.ones(4).to_sparse()]
    for entries in wrong:
        with pytest.raises(TypeError, match=r"0.bias: a vector has dense tensors of real floats"):
            curvature @ {**whole, "0.bias": entries}
    for damping in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="damping must be at least 0 and finite"):
            curvature.inverse(damping)


WRONG: dict[str, Any] = {
    "alone": lambda outputs, loss: loss,
    "of each sample": lambda outputs, loss: (outputs, loss.expand(2)),
    "swapped": lambda outputs, loss: (loss, outputs),
    "number": lambda outputs, loss: (outputs, loss.item()),
    "three": lambda outputs, loss: (outputs, loss, 1),
    "nothing": lambda outputs, loss: None,
}


@pytest.mark.parametrize("wrong", list(WRONG))
def test_a_loss_returns_outputs_and_a_mean(wrong: str) -> None:
    def loss(model: nn.Module, batch: Batch) -> Any:
        return WRONG[wrong](*cross_entropy(model, batch))

    curvature, (data,) = soframe.Curvature(network(), layers="all"), batches(3)
    for call in (lambda: curvature.fit(batches(3), loss), lambda: curvature.gradients(data, loss)):
        with pytest.raises(TypeError, match=r"must return \(outputs, the mean loss, a scalar\)"):
            call()


@pytest.mark.parametrize("fisher", ["empirical", "type-2"])
def test_a_loss_without_a_graph_is_an_error(fisher: str) -> None:
    def detached(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0]).detach()
        return outputs, nn.functional.cross_entropy(outputs, batch[1])

    curvature, data = soframe.Curvature(network(), statistics=STATISTICS[fisher]), batches(3)
    for call in (
        lambda: curvature.fit(data, detached),
        lambda: curvature.gradients(*data, detached),
    ):
        with pytest.raises(ValueError, match="no tensor with a gradient"):
            call()
    if fisher == "type-2":
        with pytest.raises(TypeError, match=r"the tensors that the loss is of.* not NoneType"):
            curvature.fit(data, lambda model, batch: (None, cross_entropy(model, batch)[1]))


def test_layers_that_were_frozen_later_are_covered_still() -> None:
    model, data = network(), batches(5)
    curvature = soframe.Curvature(model)
    wanted = curvature.gradients(data[0], cross_entropy).dense()
    model.requires_grad_(False)
    close(curvature.fit(data, cross_entropy), soframe.Curvature(network()).fit(data, cross_entropy))
    torch.testing.assert_close(curvature.gradients(data[0], cross_entropy).dense(), wanted)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_an_optimizer_in_the_backward_pass_takes_no_step() -> None:
    model, data = network(), batches(5, 4)
    parameters = list(model.parameters())
    optimizers = {p: torch.optim.SGD([p], lr=1.0) for p in parameters}
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    curvature = soframe.Curvature(model, "ekfac").fit(data, cross_entropy)
    curvature.gradients(data[0], cross_entropy)
    torch.testing.assert_close(parameters, list(network().parameters()), rtol=0, atol=0)
    close(curvature, soframe.Curvature(network(), "ekfac").fit(data, cross_entropy))
    cross_entropy(model, data[0])[1].backward()
    assert not torch.equal(parameters[0], next(network().parameters()))


def test_parameters_that_were_replaced_are_an_error() -> None:
    model, data = network(), batches(5)
    curvature = soframe.Curvature(model)
    curvature.gradients(data[0], cross_entropy)
    state = {name: 2 * tensor for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with pytest.raises(ValueError, match=r"parameters of 0 were replaced.*build another"):
        curvature.gradients(data[0], cross_entropy)


def test_a_fit_in_inference_mode_is_one_outside() -> None:
    model, data = network(), batches(5, 4)
    alone = soframe.Curvature(model, "ekfac").fit(data, cross_entropy)
    with torch.inference_mode():
        curvature = soframe.Curvature(model, "ekfac").fit(data, cross_entropy)
        gradients = curvature.gradients(data[0], cross_entropy).dense()
    close(curvature, alone)
    wanted = alone.gradients(data[0], cross_entropy).dense()
    torch.testing.assert_close(gradients, wanted)


@pytest.mark.parametrize("method", ["kfac", "ekfac", "diagonal"])
@pytest.mark.parametrize("name", ["Linear", "Conv2d, grouped", "Embedding", "LSTMCell"])
def test_vectors_may_have_two_leading_dimensions(name: str, method: str) -> None:
    """As the vectors that they hold, one by one."""
    kind = KINDS[name]()
    curvature = soframe.Curvature(kind.model, method).fit(kind.data(), loss)
    vector = {}
    for number, (key, parameter) in enumerate(kind.model.named_parameters()):
        vector[key] = randn(2, 3, *parameter.shape, seed=number)
    inverse = curvature.inverse(0.1)
    for operator in (curvature, inverse, inverse.sqrt()):
        products = operator @ vector
        for i in range(2):
            for j in range(3):
                alone = operator @ {key: tensor[i, j] for key, tensor in vector.items()}
                found = {key: tensor[i, j] for key, tensor in products.items()}
                torch.testing.assert_close(found, alone, rtol=1e-11, atol=1e-13)


def test_no_vectors_have_no_products() -> None:
    model, data = network(), batches(5)
    curvature = soframe.Curvature(model).fit(data, cross_entropy)
    none = {name: p.new_empty(2, 0, *p.shape) for name, p in model.named_parameters()}
    for operator in (curvature, curvature.inverse(0.1).sqrt()):
        torch.testing.assert_close(operator @ none, none)
    gradients = curvature.gradients(data[0], cross_entropy)
    assert gradients.dot(none).shape == (2, 0, 5)
    operator = curvature.to_scipy()
    assert (operator @ torch.empty(operator.shape[0], 0).numpy()).shape == (operator.shape[0], 0)


def test_a_batch_without_samples_has_no_scores() -> None:
    def total(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        value = nn.functional.cross_entropy(outputs, batch[1], reduction="sum")
        return outputs, value / max(1, len(outputs))

    curvature, data = soframe.Curvature(network(), "ekfac"), batches(5, 0, 3)
    curvature.fit(data, total)
    close(curvature, soframe.Curvature(network(), "ekfac").fit(data[::2], total))
    query = [tuple(tensor[:1] for tensor in data[0])]
    scores = soframe.influence.scores(curvature, query, data, total, damping=0.1)
    wanted = soframe.influence.scores(curvature, query, data[::2], total, damping=0.1)
    torch.testing.assert_close(scores, wanted)


def test_gradients_of_another_model_are_an_error() -> None:
    other = network()
    with pytest.raises(ValueError, match="calls another model than the one that it is given"):
        soframe.Curvature(network()).gradients(
            batches(3)[0], lambda model, batch: cross_entropy(other, batch)
        )


def test_samples_that_cannot_be_told_apart_are_refused() -> None:
    mixed = fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)))
    curvature = soframe.Curvature(mixed).fit(batches(5), cross_entropy)
    with pytest.raises(ValueError, match=r"1 normalises.*model.eval\(\)"):
        curvature.gradients(batches(5)[0], cross_entropy)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_have_gradients_of_samples(mode: str) -> None:
    model = fill(nn.Sequential(nn.EmbeddingBag(5, 3, mode=mode, padding_idx=1), nn.Linear(3, 2)))
    kind = Kind(model, lambda n: torch.arange(4 * n).view(n, 4) ** 2 % 5)
    batch = kind.data()[0]
    found = soframe.Curvature(model).gradients(batch, loss)
    assert len(found) == len(batch[1])
    torch.testing.assert_close(found.dense(), kind.gradients(batch))
    vector = vectors(kind, 9)
    flat = torch.stack(
        [(vector[n][:, None] * g).flatten(2).sum(2) for n, g in found.dense().items()]
    )
    torch.testing.assert_close(found.dot(vector), flat.sum(0))


class Pooled(nn.Module):
    """The mean over the positions of sequences, in either layout."""

    def __init__(self, batch: int) -> None:
        super().__init__()
        self.batch, self.inner, self.head = batch, nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).tanh().mean(1 - self.batch))


@pytest.mark.parametrize("positions", [3, 7])
def test_sequences_first_have_gradients_of_samples(positions: int) -> None:
    """Where the outputs alone show which dimension is the batch."""
    model = fill(Pooled(batch=0))
    batch = randn(5, positions, 3), randn(5, 2, seed=1)
    swapped = fill(Pooled(batch=1))
    found = soframe.Curvature(swapped).gradients((batch[0].transpose(0, 1), batch[1]), loss)
    wanted = Kind(model, lambda n: randn(n, positions, 3)).gradients(batch)
    torch.testing.assert_close(found.dense(), wanted)


def test_a_fit_during_training_adds_nothing_to_its_statistics() -> None:
    model, data = network(), batches(6, 5)
    options: dict[str, Any] = {"solver": "eigen", "layers": "all", "statistics_every": 1}
    preconditioner = soframe.Preconditioner(model, **options)
    cross_entropy(model, data[0])[1].backward()
    curvature = soframe.Curvature(model).fit(data, cross_entropy)
    preconditioner.step()
    wanted = soframe.Curvature(model).fit(data[:1], cross_entropy)
    close(preconditioner.curvature, wanted)
    assert curvature.trace() != pytest.approx(wanted.trace())


def test_a_curvature_may_be_collected_in_a_forward_pass() -> None:
    model = network()
    curvatures: list[soframe.Curvature] = []

    def collect(module: nn.Module, args: Any) -> None:
        curvatures.clear()
        gc.collect()

    model.register_forward_pre_hook(collect)  # before soframe's
    curvatures.append(soframe.Curvature(model).fit(batches(3), cross_entropy))
    assert model(batches(3)[0][0]).shape == (3, CLASSES)
    assert not curvatures


# -- methods of users ------------------------------------------------------------------------------


class Halved(KFAC):
    """K-FAC times a half."""

    def spectrum(self, shape: Any, data: Any) -> Spectrum:
        whole = super().spectrum(shape, data)
        return Spectrum(whole.values / 2, whole.left, whole.right)


class Other(KFAC):
    """Another update, which belongs to another curvature."""

    def precondition(self, gradient: Tensor, *others: Any, **more: Any) -> Tensor:
        return gradient.clone()


class Unchanged(KFAC):
    """Other statistics for the same curvature."""

    def statistics(self, call: Call) -> Any:
        return super().statistics(call)


def test_methods_of_users_define_their_own_products() -> None:
    model, data = network(), batches(5)
    whole = soframe.Curvature(model).fit(data, cross_entropy).trace()
    halved = soframe.Curvature(model, Halved()).fit(data, cross_entropy)
    assert halved.trace() == pytest.approx(whole / 2)
    unchanged = soframe.Curvature(model, Unchanged()).fit(data, cross_entropy)
    assert unchanged.trace() == pytest.approx(whole)
    with pytest.raises(ValueError, match=r"implement spectrum\(\)"):
        soframe.Curvature(model, Other())


def test_scipy_takes_the_operators() -> None:
    model, data = network(), batches(9)
    curvature = soframe.Curvature(model).fit(data, cross_entropy)
    size = sum(p.numel() for p in model.parameters())
    eye = torch.eye(size, dtype=torch.float64).numpy()
    dense = torch.from_numpy(curvature.to_scipy() @ eye)
    inverse = torch.from_numpy(curvature.inverse(0.5).to_scipy() @ eye)
    damped = dense + 0.5 * torch.eye(size)
    torch.testing.assert_close(inverse @ damped, torch.eye(size, dtype=torch.float64))
    torch.testing.assert_close(torch.linalg.eigvalsh(dense), curvature.eigenvalues())
    for chosen in (3, slice(3, 5)):  # a column, and two
        columns = curvature.to_scipy() @ eye[:, chosen]
        torch.testing.assert_close(torch.from_numpy(columns), dense[:, chosen])


def test_progress_is_shown_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []

    def tqdm(batches: Iterator[Batch], *shown: Any, **options: Any) -> Iterator[Batch]:
        told.append((*shown, options["initial"]))
        return batches

    curvature = soframe.Curvature(network())  # torch imports a module that looks for tqdm
    monkeypatch.setitem(sys.modules, "tqdm", types.SimpleNamespace(tqdm=tqdm))
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda shows=terminal: shows)
        curvature.fit(batches(3, 2), cross_entropy)
    assert told == [("curvature", 2, 0)]
    monkeypatch.setitem(sys.modules, "tqdm", None)
    curvature.fit(batches(3, 2), cross_entropy)


def test_a_doubt_about_the_number_of_terms_names_the_line_that_fits() -> None:
    def squares(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        outputs = model(batch)
        return outputs, outputs.square().sum(2).mean()

    model = fill(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, CLASSES)))
    tokens = torch.arange(10).view(2, 5) % 7
    with pytest.warns(UserWarning, match="perhaps a mean over tokens") as warned:
        soframe.Curvature(model).fit([tokens], squares)
    assert [warning.filename for warning in warned] == [__file__]


def test_eigenvalues_are_null_within_the_rounding_of_their_factor() -> None:
    """Up to n eps of the largest, of n eigenvalues; those of a diagonal, if they are zero."""
    eps = torch.finfo(torch.float64).eps
    values = torch.tensor([[0.0, 6 * eps, 10 * eps, 1, 1, 1, 1, 1]]).double()
    factor = {"values": values, "vectors": torch.eye(8).double()[None]}
    one = {"values": torch.ones(1, 1).double()}
    for left, right, null in ((factor, one, [0, 1]), (one, {"values": values}, [0])):
        spectrum = kronecker(left, right)
        assert spectrum.null is not None
        assert spectrum.null.flatten().nonzero().flatten().tolist() == null
