"""Posteriors, evidence and predictions against dense float64 matrices."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.polynomial.hermite import hermgauss
from torch import Tensor, nn
from torch.func import functional_call, jacrev

import soframe
from soframe.laplace import Laplace, Predictive
from tests.curvature import fill, randn
from tests.distributed.harness import run_ranks
from tests.examples import examples
from tests.products.kinds import KINDS, SIZES, Batch, Kind, loss
from tests.products.table import taken
from tests.products.test_fitting import batches, cross_entropy, network

KINDS_OF_MODELS = (
    "Linear",
    "Conv2d, grouped",
    "Embedding, padding",
    "LayerNorm",
    "BatchNorm2d, eval",
    "MultiheadAttention",
    "LSTMCell",
    "a layer called twice",
)
PRIOR = 0.7


def fitted(kind: Kind, **options: Any) -> Laplace:
    curvature = soframe.Curvature(kind.model, layers=kind.layers).fit(kind.data(), loss)
    return Laplace(curvature, PRIOR, **options)


def precisions(kind: Kind) -> list[Tensor]:
    """Return the dense posterior precision ``[groups, size, size]`` of each part."""
    matrices = kind.matrices(kind.data())
    return [sum(SIZES) * c + PRIOR * torch.eye(c.shape[-1], dtype=c.dtype) for c in matrices]


def jacobians(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """Return the derivatives ``[samples * outputs, *shape]`` of all outputs, by name."""
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def run(weights: dict[str, Tensor]) -> Tensor:
        outputs: Tensor = functional_call(model, weights, (inputs,))
        return outputs.flatten()

    found: dict[str, Tensor] = jacrev(run, chunk_size=1)(parameters)
    return found


# -- kinds of layers -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS_OF_MODELS)
def test_predictions_have_the_dense_covariance(name: str) -> None:
    kind = KINDS[name]()
    inputs = kind.data()[0][0]
    predictive = fitted(kind).predictive(inputs)
    samples = len(predictive.mean)
    rows = taken(kind, jacobians(kind.model, inputs))
    size = predictive.mean[0].numel()
    covariance = torch.zeros(samples, size, size, dtype=torch.float64)
    for matrix, flat in zip(precisions(kind), rows, strict=True):
        row = flat.unflatten(0, (samples, size))  # [samples, outputs, groups, entries]
        inverse = torch.linalg.inv(matrix)
        covariance += torch.einsum("nkgp,gpq,nlgq->nkl", row, inverse, row)
    torch.testing.assert_close(predictive.covariance, covariance, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(predictive.mean, kind.model(inputs).detach())
    diagonal = covariance.diagonal(dim1=1, dim2=2).reshape(predictive.mean.shape)
    torch.testing.assert_close(predictive.variance, diagonal, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", [*KINDS_OF_MODELS, "experts", "table and head tied"])
def test_the_evidence_is_the_dense_one(name: str) -> None:
    kind = KINDS[name]()
    dense = precisions(kind)
    size = sum(matrix.shape[0] * matrix.shape[1] for matrix in dense)
    weights = torch.cat([p.detach().flatten() for p in kind.model.parameters()])
    assert size == len(weights)
    logdet = torch.stack([torch.linalg.slogdet(matrix)[1].sum() for matrix in dense]).sum()
    evidence = -3.5 - PRIOR * weights @ weights / 2 + size * math.log(PRIOR) / 2 - logdet / 2
    laplace = fitted(kind)
    assert laplace.log_marginal_likelihood(-3.5) == pytest.approx(float(evidence), rel=1e-10)
    determined = size - PRIOR * sum(
        float(torch.linalg.inv(matrix).diagonal(dim1=1, dim2=2).sum()) for matrix in dense
    )
    assert laplace.effective_parameters == pytest.approx(determined, rel=1e-8)


@pytest.mark.parametrize("name", ["Linear", "MultiheadAttention", "LSTMCell"])
def test_samples_have_the_dense_covariance(name: str) -> None:
    kind = KINDS[name]()
    number = 20000
    samples = fitted(kind).sample(number, torch.Generator().manual_seed(3))
    weights = dict(kind.model.named_parameters())
    assert set(samples) == set(weights)
    moves = {name: rows - weights[name].detach() for name, rows in samples.items()}
    whitened = []
    for matrix, rows in zip(precisions(kind), taken(kind, moves), strict=True):
        root = torch.linalg.cholesky(matrix)  # H = L L^T, and L^T w has the covariance I
        whitened.append(torch.einsum("gqp,ngq->ngp", root, rows).flatten(1))
    rows = torch.cat(whitened, 1)
    identity = torch.eye(rows.shape[1], dtype=torch.float64)
    # Entries have a standard deviation of at most sqrt(2 / number).
    torch.testing.assert_close(rows.T @ rows / number, identity, rtol=0, atol=0.06)
    assert rows.mean(0).abs().max() < 0.04


# -- properties of a perceptron --------------------------------------------------------------------


class Problem:
    """A perceptron with a type-2 Fisher, and its dense curvature.

    Args:
        seed: The seed of weights and data.
        hidden: The width.
        outputs: The number of outputs.
        precision: Of the squared errors, half of whose sum is the loss; None for their mean.
    """

    def __init__(self, seed: int, hidden: int, outputs: int, precision: float | None = 1.0) -> None:
        self.model = fill(
            nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, outputs)), seed
        )
        self.inputs, self.targets = randn(9, 2, seed=seed + 1), randn(9, outputs, seed=seed + 2)
        chosen: Any = "mse" if precision is None else soframe.losses.SquaredError(precision)
        precision = precision or 2 / outputs
        self.statistics = soframe.Statistics(fisher="type-2", loss=chosen)

        def squares(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
            found = model(batch[0])
            return found, precision / 2 * (found - batch[1]).square().sum(1).mean()

        self.curvature = soframe.Curvature(self.model, statistics=self.statistics)
        batches = zip(self.inputs.split(4), self.targets.split(4), strict=True)
        self.curvature.fit(list(batches), squares)
        self.precision = precision

    def values(self) -> Tensor:
        """Return the eigenvalues of C from Kronecker products written out."""
        layers: Any = self.model
        first, _, last = layers
        hidden = first(self.inputs).tanh().detach()
        ones = torch.ones(9, 1, dtype=torch.float64)
        # Of y = W2 tanh(s) + b2 the derivatives in s, [9, outputs, hidden].
        slopes = last.weight.detach() * (1 - hidden.square()).unsqueeze(1)
        found = []
        for rows, gradients in (
            (torch.cat([self.inputs, ones], 1), slopes),
            (torch.cat([hidden, ones], 1), torch.eye(last.out_features).double().expand(9, -1, -1)),
        ):
            left = rows.T @ rows / 9
            right = torch.einsum("nki,nkj->ij", gradients, gradients) / 9 * self.precision
            found.append(torch.linalg.eigvalsh(torch.kron(left, right)))
        return torch.cat(found).clamp(min=0)

    def evidence(self, prior: float, noise: float | None = None) -> float:
        """Return the evidence of the Gaussian likelihood, from dense eigenvalues."""
        variance = 1 / self.precision if noise is None else noise
        outputs = self.model(self.inputs).detach()
        density = torch.distributions.Normal(outputs, variance**0.5)
        likelihood = float(density.log_prob(self.targets).sum())
        weights = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        values = self.values() * 9 / self.precision / variance + prior
        return (
            likelihood
            + float(len(weights) * math.log(prior) - prior * weights @ weights - values.log().sum())
            / 2
        )


problems = st.builds(
    Problem,
    st.integers(0, 1000),
    st.integers(1, 3),
    st.integers(1, 2),
    st.sampled_from([0.25, 1.0, 5.0, None]),
)


def assert_evidence(problem: Problem, prior: float, noise: float | None) -> None:
    variance = 1 / problem.precision if noise is None else noise
    outputs = problem.model(problem.inputs).detach()
    density = torch.distributions.Normal(outputs, variance**0.5)
    likelihood = float(density.log_prob(problem.targets).sum())
    laplace = Laplace(problem.curvature, prior, noise)
    evidence = laplace.log_marginal_likelihood(likelihood)
    assert evidence == pytest.approx(problem.evidence(prior, noise), rel=1e-9, abs=1e-9)


@given(problems, st.floats(0.01, 100), st.sampled_from([None, 0.1, 3.0]))
@settings(max_examples=examples(10), deadline=None)
def test_the_evidence_of_a_regression(problem: Problem, prior: float, noise: float | None) -> None:
    assert_evidence(problem, prior, noise)


@pytest.mark.parametrize("noise", [None, 0.3])
def test_the_evidence_of_a_mean_over_three_outputs(noise: float | None) -> None:
    assert_evidence(Problem(0, 2, 3, None), 2.0, noise)


@given(problems)
@settings(max_examples=examples(10), deadline=None)
def test_the_best_prior_is_better_than_all_others(problem: Problem) -> None:
    prior = Laplace(problem.curvature).optimised().prior_precision
    best = problem.evidence(prior)
    # Flat at the top, and lower on both sides: no other prior is better.
    step = 1e-3
    slope = (problem.evidence(prior * (1 + step)) - problem.evidence(prior / (1 + step))) / step
    assert abs(slope) < 1e-4
    assert all(
        problem.evidence(prior * 10**power) < best for power in (-4, -2, -1, -0.3, 0.3, 1, 2)
    )


@given(problems)
@settings(max_examples=examples(10), deadline=None)
def test_the_best_noise_is_better_than_all_others(problem: Problem) -> None:
    residuals = problem.model(problem.inputs).detach() - problem.targets
    laplace = Laplace(problem.curvature).optimised(residuals)
    noise, prior = laplace.noise, laplace.prior_precision
    assert noise is not None
    best = problem.evidence(prior, noise)
    # The evidence grows until the noise, and falls from there on.
    sides = [problem.evidence(prior, noise * factor) for factor in (1 - 1e-3, 1 + 1e-3)]
    assert abs(sides[1] - sides[0]) < 1e-5
    for factor in torch.logspace(-1, 1, 9).tolist():
        for other in torch.logspace(-1, 1, 9).tolist():
            assert problem.evidence(prior * other, noise * factor) <= best + 1e-6
    again = Laplace(problem.curvature, 3.0, 0.2).optimised(residuals)
    assert again.noise == pytest.approx(noise, rel=1e-4)


@pytest.mark.parametrize("method", ["kfac", "ekfac"])
@pytest.mark.parametrize("loss", ["squared-error", "mse"])
def test_residuals_are_of_all_outputs(loss: str, method: str, tmp_path: Path) -> None:
    """Also of a curvature that was loaded, and of one that took two passes over the data."""
    data, model = batches(6, 3), network()
    statistics = soframe.Statistics(fisher="type-2", loss=loss)
    curvature = soframe.Curvature(model, method, statistics=statistics)
    curvature.fit(data, cross_entropy, folder=tmp_path)
    loaded = soframe.Curvature(model, method, statistics=statistics).load(tmp_path)
    residuals = randn(9, 3)
    for fitted in (curvature, loaded):
        assert Laplace(fitted).optimised(residuals).noise
        with pytest.raises(ValueError, match=r"9 residuals are not.*3 outputs each"):
            Laplace(fitted).optimised(residuals[:, 0])


def test_a_fit_that_goes_on_has_the_outputs_before(tmp_path: Path) -> None:
    data, statistics = batches(6, 3), soframe.Statistics(fisher="type-2", loss="mse")

    def dies(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        if batch is data[1]:
            raise KeyboardInterrupt
        return cross_entropy(model, batch)

    with pytest.raises(KeyboardInterrupt):
        soframe.Curvature(network(), statistics=statistics).fit(
            data, dies, folder=tmp_path, every=1
        )
    again = soframe.Curvature(network(), statistics=statistics).load(tmp_path)
    assert Laplace(again.fit(data, cross_entropy)).optimised(randn(9, 3)).noise


def test_a_fit_of_an_earlier_version_leaves_the_number_of_outputs_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statistics = soframe.Statistics(fisher="type-2", loss="squared-error")
    header = soframe.Curvature.header

    def without_outputs(curvature: soframe.Curvature) -> dict[str, Any]:
        saved = header(curvature)
        del saved["fit"]["outputs"]
        return saved

    with monkeypatch.context() as patch:
        patch.setattr(soframe.Curvature, "header", without_outputs)
        curvature = soframe.Curvature(network(), statistics=statistics)
        curvature.fit(batches(6), cross_entropy, folder=tmp_path)
    loaded = soframe.Curvature(network(), statistics=statistics).load(tmp_path)
    assert Laplace(curvature).optimised(randn(6, 3)) is not None
    with pytest.raises(ValueError, match="6 residuals are not of the 6 samples"):
        Laplace(curvature).optimised(randn(6))
    assert Laplace(loaded).optimised(randn(6)).noise


def fitted_under_count(loss: str) -> soframe.Curvature:
    statistics = soframe.Statistics(fisher="type-2", loss=loss)
    curvature = soframe.Curvature(network(), statistics=statistics)

    def counted(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        curvature.count(6)
        return cross_entropy(model, batch)

    return curvature.fit(batches(6), counted)


def test_a_mean_over_an_unknown_number_of_outputs_has_no_noise() -> None:
    curvature = fitted_under_count("mse")
    with pytest.raises(ValueError, match=r"unknown number of outputs, under count\(\)"):
        Laplace(curvature, noise=0.5)


def test_some_residuals_are_of_as_many_outputs_as_they_may_be() -> None:
    """Where `count()` may have left out outputs."""
    curvature = fitted_under_count("squared-error")
    assert Laplace(curvature).optimised(torch.ones(6, 2)).noise
    with pytest.raises(ValueError, match="9 residuals are not of the 6 samples of the fit: "):
        Laplace(curvature).optimised(torch.ones(3, 3))


def test_the_best_prior_of_a_classification_is_better_than_all_others() -> None:
    """Of the evidence with Kronecker products and the softmax's Hessian written out."""
    model, data = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))), batches(12, 9)
    statistics = soframe.Statistics(fisher="type-2", loss="cross-entropy")
    laplace = Laplace(soframe.Curvature(model, statistics=statistics).fit(data, cross_entropy))
    inputs, labels = (torch.cat(tensors) for tensors in zip(*data, strict=True))
    first, _, last = model  # type: ignore[misc]
    hidden, outputs = first(inputs).tanh().detach(), model(inputs).detach()
    shares, ones = outputs.softmax(1), torch.ones(21, 1).double()
    hessians = torch.diag_embed(shares) - shares.unsqueeze(2) * shares.unsqueeze(1)
    # Of the logits the derivatives in the first layer's outputs, [21, 3, 4].
    slopes = last.weight.detach() * (1 - hidden.square()).unsqueeze(1)
    found = []
    for rows, gauss_newton in (
        (torch.cat([inputs, ones], 1), slopes.mT @ hessians @ slopes),
        (torch.cat([hidden, ones], 1), hessians),
    ):
        matrix = torch.kron(rows.T @ rows / 21, gauss_newton.mean(0))
        found.append(torch.linalg.eigvalsh(21 * matrix).clamp(min=0))
    values = torch.cat(found)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    likelihood = -float(nn.functional.cross_entropy(outputs, labels, reduction="sum"))

    def evidence(prior: float) -> float:
        occam = float(torch.log1p(values / prior).sum())
        return likelihood - (prior * float(weights @ weights) + occam) / 2

    best = laplace.optimised()
    prior = best.prior_precision
    assert best.log_marginal_likelihood(likelihood) == pytest.approx(evidence(prior), rel=1e-10)
    slope = (evidence(prior * 1.001) - evidence(prior / 1.001)) / 0.001
    assert abs(slope) < 1e-4
    for power in (-4, -2, -1, -0.3, 0.3, 1, 2):
        assert evidence(prior * 10**power) < evidence(prior)


# -- probabilities ---------------------------------------------------------------------------------


def test_probabilities_are_those_of_the_gaussian() -> None:
    mean = randn(3, 4, seed=1)
    root = randn(3, 4, 4, seed=2)
    predictive = Predictive(mean, root @ root.mT)
    variances = (root @ root.mT).diagonal(dim1=1, dim2=2)
    probit = (mean / (1 + math.pi / 8 * variances).sqrt()).softmax(1)
    torch.testing.assert_close(predictive.probabilities(), probit)
    drawn = predictive.probabilities(20000, torch.Generator().manual_seed(0))
    normal = torch.distributions.MultivariateNormal(mean, root @ root.mT)
    averages = normal.sample((20000,)).softmax(-1).mean(0)
    torch.testing.assert_close(drawn, averages, rtol=0, atol=0.02)


@pytest.mark.parametrize("variance", [0.0, -1e-14, 1e-14])
def test_outputs_without_variance_are_certain(variance: float) -> None:
    """Also where rounding makes it negative."""
    mean = randn(3, 4, seed=1)
    covariance = variance * torch.eye(4, dtype=torch.float64).expand(3, 4, 4)
    predictive = Predictive(mean, covariance)
    for draws in (None, 1, 5):
        torch.testing.assert_close(predictive.probabilities(draws), mean.softmax(1))


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_a_single_output_is_a_binary_logit(shape: tuple[int, ...]) -> None:
    mean = randn(*shape, seed=1)
    predictive = Predictive(mean, torch.full((3, 1, 1), 2.0, dtype=torch.float64))
    probit = (mean / (1 + math.pi / 4) ** 0.5).sigmoid()
    torch.testing.assert_close(predictive.probabilities(), probit)
    drawn = predictive.probabilities(20000, torch.Generator().manual_seed(0))
    noise = randn(20000, seed=3).view(-1, *(1 for _ in shape)) * 2**0.5
    torch.testing.assert_close(drawn, (mean + noise).sigmoid().mean(0), rtol=0, atol=0.02)


def test_labels_of_a_binary_cross_entropy_are_binary() -> None:
    """Each has a probability of its own, the mean of the sigmoid over its Gaussian."""
    statistics = soframe.Statistics(fisher="type-2", loss="binary-cross-entropy")
    data = batches(6)
    laplace = Laplace(soframe.Curvature(network(), statistics=statistics).fit(data, cross_entropy))
    predictive = laplace.predictive(data[0][0])
    deviations = predictive.variance.sqrt()
    # Hermite's nodes integrate over one output after the other.
    nodes, weights = (torch.from_numpy(array) for array in hermgauss(60))
    logits = predictive.mean.unsqueeze(2) + 2**0.5 * deviations.unsqueeze(2) * nodes
    exact = (logits.sigmoid() * weights).sum(2) / math.pi**0.5
    torch.testing.assert_close(predictive.probabilities(), exact, rtol=0, atol=0.02)
    drawn = predictive.probabilities(20000, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn, exact, rtol=0, atol=0.02)


@pytest.mark.parametrize("precision", [1.0, None], ids=["squared-error", "mse"])
def test_outputs_that_are_no_logits_have_no_probabilities(precision: float | None) -> None:
    predictive = Laplace(Problem(0, 2, 2, precision).curvature).predictive(randn(3, 2))
    with pytest.raises(ValueError, match=r"of logits.*take mean and variance.*Predictive\("):
        predictive.probabilities()
    logits = Predictive(predictive.mean, predictive.covariance)
    assert logits.probabilities().sum(1).allclose(torch.ones(3).double())


def test_sampled_outputs_are_of_sampled_weights() -> None:
    model, data = network().eval(), batches(6)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    curvature = soframe.Curvature(model, skip=["^0$"]).fit(data, cross_entropy)
    laplace = Laplace(curvature, 2.0)
    inputs = data[0][0]
    outputs = laplace.outputs(inputs, 3, torch.Generator().manual_seed(4))
    generator = torch.Generator().manual_seed(4)
    for row in outputs:
        sample = laplace.sample(1, generator)
        assert set(sample) == {"2.weight", "2.bias", "3.weight", "3.bias"}
        weights = before | {name: weight[0] for name, weight in sample.items()}
        torch.testing.assert_close(row, functional_call(model, weights, (inputs,)).detach())
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())


def test_a_last_layer_and_inputs_of_several_tensors() -> None:
    model, data = network().eval(), batches(6)
    curvature = soframe.Curvature(model, skip=["^[02]$"]).fit(data, cross_entropy)

    def forward(model: Any, inputs: dict[str, Tensor]) -> Tensor:
        outputs: Tensor = model(inputs["x"])
        return outputs

    inputs = data[0][0]
    laplace = Laplace(curvature, 2.0, forward=forward)
    assert set(laplace.sample(1)) == {"3.weight", "3.bias"}
    predictive = laplace.predictive({"x": inputs})
    features = model[:3](inputs).detach()  # type: ignore[index]
    features = torch.cat([features, torch.ones(6, 1).double()], 1)
    outputs = model(inputs).detach()
    gradients = (outputs.softmax(1) - torch.eye(3).double()[data[0][1]]).T
    matrix = torch.kron(features.T @ features / 6, gradients @ gradients.T / 6)
    inverse = torch.linalg.inv(6 * matrix + 2 * torch.eye(15).double())
    rows = torch.stack([torch.kron(row, torch.eye(3).double()) for row in features.unsqueeze(1)])
    covariance = rows @ inverse @ rows.mT
    torch.testing.assert_close(predictive.covariance, covariance, rtol=1e-10, atol=1e-12)
    assert laplace.outputs({"x": inputs}, 2).shape == (2, 6, 3)


def test_no_inputs_have_no_predictions() -> None:
    data = batches(6)
    laplace = Laplace(soframe.Curvature(network()).fit(data, cross_entropy))
    predictive = laplace.predictive(data[0][0][:0])
    assert predictive.probabilities().shape == (0, 3)
    assert predictive.covariance.shape == (0, 3, 3)
    assert laplace.sample(0)["0.weight"].shape == (0, 4, 3)


def test_a_parameter_without_dimensions_has_a_variance() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scale = nn.Linear(3, 3), nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * self.inner(x)

    model, data = fill(Scaled()), batches(6)
    curvature = soframe.Curvature(model, "diagonal", auxiliary="diagonal").fit(data, cross_entropy)
    predictive = Laplace(curvature, PRIOR).predictive(data[0][0])
    diagonal = curvature @ {name: torch.ones_like(p) for name, p in model.named_parameters()}
    wanted = torch.zeros(6, 3).double()
    for name, rows in jacobians(model, data[0][0]).items():
        variance = 1 / (6 * diagonal[name] + PRIOR)
        wanted += (rows.square() * variance).reshape(6, 3, -1).sum(2)
    torch.testing.assert_close(predictive.variance, wanted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_variances_of_half_models_are_in_float32(dtype: torch.dtype) -> None:
    (inputs, labels) = batches(40)[0]
    model = network().to(dtype)
    laplace = Laplace(soframe.Curvature(model).fit([(inputs.to(dtype), labels)], cross_entropy))
    predictive, whole = laplace.predictive(inputs.to(dtype)), network()
    curvature = soframe.Curvature(whole).fit([(inputs, labels)], cross_entropy)
    assert predictive.covariance.dtype == torch.float32
    assert predictive.probabilities(draws=2).isfinite().all()
    wanted = Laplace(curvature).predictive(inputs).variance.float()
    torch.testing.assert_close(predictive.variance, wanted, rtol=0.1, atol=0)


# -- errors ----------------------------------------------------------------------------------------


def test_errors_have_a_remedy() -> None:
    model, data = network(), batches(6)
    curvature = soframe.Curvature(model)
    with pytest.raises(RuntimeError, match=r"not fitted to data: call fit\(\)"):
        Laplace(curvature)
    curvature.fit(data, cross_entropy)
    for prior in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"prior_precision must be positive.*optimised"):
            Laplace(curvature, prior)
    with pytest.raises(ValueError, match="noise must be positive"):
        Laplace(curvature, noise=0.0)
    with pytest.raises(ValueError, match="loss='squared-error'"):
        Laplace(curvature, noise=0.5)
    with pytest.raises(ValueError, match="loss='squared-error'"):
        Laplace(curvature).optimised(torch.ones(3))
    with pytest.raises(ValueError, match="residuals are all zero or not"):
        Laplace(curvature).optimised(torch.zeros(3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    with pytest.raises(ValueError, match="weights or the curvature are zero"):
        Laplace(curvature).optimised()
    for prior in ("1", None, torch.ones(2)):
        with pytest.raises(ValueError, match="prior_precision must be a number"):
            Laplace(curvature, prior)  # type: ignore[arg-type]
    laplace = Laplace(curvature)
    with pytest.raises(ValueError, match="draws must be at least 1"):
        laplace.predictive(data[0][0]).probabilities(draws=0)
    with pytest.raises(ValueError, match="number must be at least 1"):
        laplace.outputs(data[0][0], 0)
    statistics = soframe.Statistics(fisher="type-2", loss="squared-error")
    squares = soframe.Curvature(network(), statistics=statistics).fit(data, cross_entropy)
    with pytest.raises(ValueError, match="9 residuals are not of the 6 samples"):
        Laplace(squares).optimised(torch.ones(3, 3))
    preconditioner = soframe.Preconditioner(model, layers="all")
    with pytest.raises(RuntimeError, match="curvature of a preconditioner"):
        Laplace(preconditioner.curvature)
    preconditioner.close()


def test_samples_that_cannot_be_told_apart_are_refused() -> None:
    mixed = fill(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    curvature = soframe.Curvature(mixed).fit(batches(5), cross_entropy)
    with pytest.raises(ValueError, match=r"model.eval\(\)"):
        Laplace(curvature).predictive(batches(5)[0][0])


# -- ranks -----------------------------------------------------------------------------------------


def results(laplace: Laplace, inputs: Tensor) -> Any:
    generator = torch.Generator().manual_seed(5)
    predictive = laplace.predictive(inputs)
    return (
        laplace.sample(2, generator),
        predictive.covariance,
        laplace.outputs(inputs, 1, generator),
        [laplace.samples, laplace.optimised().prior_precision, laplace.effective_parameters],
        laplace.log_marginal_likelihood(-2.0),
    )


def on_rank(rank: int, ranks: int, strategy: str) -> Any:
    model, data = network(), batches(5, 4, 6)
    curvature = soframe.Curvature(model, strategy=strategy)
    curvature.fit(data[::2] if rank == 0 else data[1:2], cross_entropy)
    return results(Laplace(curvature, 2.0), data[0][0])


def regress(rank: int, ranks: int) -> list[float]:
    """Choose prior and noise for a mean of squares; of two ranks one has more samples."""
    data = batches(5, 4, 6)
    statistics = soframe.Statistics(fisher="type-2", loss="mse")
    curvature = soframe.Curvature(network(), statistics=statistics)
    curvature.fit(data[rank::ranks], cross_entropy)
    laplace = Laplace(curvature).optimised(randn(15, 3))
    return [laplace.prior_precision, laplace.noise or 0.0, laplace.effective_parameters]


def test_two_ranks_regress_as_one_process() -> None:
    expected = regress(0, 1)
    for result in run_ranks(regress, 2):
        assert result == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt"])
def test_two_ranks_are_one_process(strategy: str) -> None:
    model, data = network(), batches(5, 4, 6)
    alone = soframe.Curvature(model).fit(data, cross_entropy)
    expected = results(Laplace(alone, 2.0), data[0][0])
    for result in run_ranks(on_rank, 2, strategy):
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-11)
