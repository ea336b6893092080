"""Laplace approximation: a Gaussian over weights, and its predictions.

The posterior of the weights w that a curvature C covers is a Gaussian around their present values,
with the precision ``H = N C + prior_precision I`` for N training samples (MacKay, 1992; with
Kronecker factors, Ritter et al., 2018). All other weights stay as they are::

    curvature = soframe.Curvature(model, method="ekfac", statistics=soframe.Statistics(
        fisher="type-2", loss="cross-entropy")).fit(train, loss)
    laplace = soframe.laplace.Laplace(curvature).optimised()
    probabilities = laplace.predictive(inputs).probabilities()
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.optimize import brentq, minimize_scalar
from torch import Tensor, nn
from torch.func import functional_call

from soframe.blocks import sharding
from soframe.checks.values import require_integer, require_numbers
from soframe.curvature import Curvature
from soframe.losses import BinaryCrossEntropy, CrossEntropy, Loss, MeanSquaredError, SquaredError

Forward = Callable[[nn.Module, Any], Tensor]
"""``(model, inputs) -> outputs [samples, ...]``."""


def call(model: nn.Module, inputs: Any) -> Tensor:
    """Return the outputs of a model of one argument."""
    outputs: Tensor = model(inputs)
    return outputs


@dataclass(frozen=True)
class Predictive:
    """A Gaussian over the outputs of each sample, of the model linearised in its weights.

    Attributes:
        mean: The outputs, ``[samples, ...]``.
        covariance: ``[samples, outputs, outputs]``, of the flattened outputs of a sample; in
            float32 at least.
        loss: The loss of the outputs; None for logits of classes.
    """

    mean: Tensor
    covariance: Tensor
    loss: Loss | None = None

    @property
    def variance(self) -> Tensor:
        """The variance of each output, ``[samples, ...]``; of an observation add the noise."""
        return self.covariance.diagonal(dim1=1, dim2=2).reshape(self.mean.shape)

    def probabilities(
        self, draws: int | None = None, generator: torch.Generator | None = None
    ) -> Tensor:
        """Return probabilities of outputs that are logits.

        Of a cross-entropy classes are in dimension 1, and a single output is the logit of a binary
        class; of a binary cross-entropy each output is.

        Args:
            draws: The number of outputs that are drawn and averaged; None for the probit
                approximation, ``softmax(mean / sqrt(1 + pi / 8 variance))``.
            generator: The source of randomness, on the device of the outputs.

        Returns:
            The shape of `mean`.

        Raises:
            ValueError: If the loss is another one.
        """
        if not isinstance(self.loss, BinaryCrossEntropy | CrossEntropy | None):
            raise ValueError(
                f"probabilities() is of logits under a cross-entropy, and the outputs have the "
                f"loss {self.loss!r}: take mean and variance; if they are logits of classes, "
                f"Predictive(p.mean, p.covariance).probabilities()"
            )
        if draws is None:
            return self._link(self.mean / (1 + math.pi / 8 * self.variance).sqrt(), 1)
        require_integer("probabilities: draws", draws, 1)
        values, vectors = torch.linalg.eigh(self.covariance)
        root = vectors * values.clamp(min=0).sqrt().unsqueeze(1)
        shape = (draws, *values.shape, 1)
        noise = torch.randn(shape, generator=generator, dtype=root.dtype, device=root.device)
        deviations = (root @ noise).reshape(draws, *self.mean.shape)
        return self._link(self.mean + deviations, 2).mean(0)

    def _link(self, logits: Tensor, dim: int) -> Tensor:
        """Return probabilities of logits with classes in ``dim``, or of binary classes."""
        is_single = logits.dim() == dim or logits.shape[dim] == 1
        if is_single or isinstance(self.loss, BinaryCrossEntropy):
            return logits.sigmoid()
        return logits.softmax(dim)


@dataclass(frozen=True, eq=False)
class Laplace:
    """A Gaussian posterior of the weights that a fitted curvature covers.

    The layers are the curvature's: `Curvature(..., skip=)` leaves layers out, by patterns on their
    names, such as ``skip=["^body"]`` for the head alone.

    The loss of the fit is the negative log-likelihood of a sample, so its scale counts. The
    Fishers ``"type-2"`` and ``"monte-carlo"`` are its Gauss-Newton matrix; ``"empirical"``
    vanishes where the model fits its data, and gives too much variance there. For a regression the
    loss is ``"squared-error"`` or ``"mse"``, and ``noise`` sets its variance.

    Attributes:
        curvature: A curvature after `Curvature.fit` or `Curvature.load`. Its model is in eval
            mode, where dropout and batch statistics are off.
        prior_precision: The inverse variance of each weight in the prior, around zero.
        noise: The variance of each observed output, for ``loss="squared-error"`` (half the squared
            error of a sample, summed over its outputs) and ``"mse"`` alone; None leaves the loss
            as it is; the variance of ``"mse"`` is then half the number of a sample's outputs.
        forward: Runs the model, ``(model, inputs) -> outputs``, if it has more than one input,
            or its outputs are not a tensor.

    Raises:
        ValueError: If ``prior_precision`` or ``noise`` is not positive, or the loss has no noise.
        RuntimeError: If the curvature is not fitted, or is the curvature of a preconditioner.
    """

    curvature: Curvature
    prior_precision: float = 1.0
    noise: float | None = None
    forward: Forward = call

    def __post_init__(self) -> None:
        require_numbers("Laplace", prior_precision=self.prior_precision)
        if not 0 < self.prior_precision < math.inf:
            raise ValueError(
                f"Laplace: prior_precision must be positive and finite, not "
                f"{self.prior_precision!r}: without a prior, directions that the data leave open "
                f"have no variance; pass a small one, or take optimised()"
            )
        _ = self.samples  # raises where it is not fitted
        if self.noise is not None:
            _require_noise(self.curvature, self.noise)

    @property
    def samples(self) -> float:
        """The number N of training samples that the curvature was fitted to, on all ranks."""
        return self.curvature.fitting.samples

    def log_marginal_likelihood(self, log_likelihood: float) -> float:
        """Return the logarithm of the evidence; every rank must call.

        It is ``log_likelihood - 1/2 (prior_precision ||w||^2 + log det(H) - P log
        prior_precision)`` for P weights w. It compares models, priors and choices of layers.

        Args:
            log_likelihood: The sum over all training samples: minus N times the mean loss, if the
                loss is a negative log-likelihood; for a Gaussian with ``noise`` as variance.
        """
        values, square = self._values(), _square(self.curvature)
        occam = torch.log1p(values / self.prior_precision).sum()
        return float(log_likelihood) - (self.prior_precision * square + float(occam)) / 2

    @property
    def effective_parameters(self) -> float:
        """The effective number of weights that the data determine, the trace of ``N C H^-1``.

        Every rank must call.
        """
        return _effective(self._values(), self.prior_precision)

    def optimised(self, residuals: Tensor | None = None) -> Laplace:
        """Return the posterior at the prior precision of the largest evidence; all ranks must call.

        The precision solves ``effective_parameters = prior_precision ||w||^2``, which has one
        solution.

        Args:
            residuals: Outputs less targets of all training samples of a regression, all outputs
                and of all ranks, of any shape: then the noise is chosen, too. None leaves it.

        Raises:
            ValueError: If the weights or the curvature are zero, the residuals are not of all
                outputs of the fit, or see `Laplace`.
        """
        square = _square(self.curvature)
        if residuals is None:
            return replace(self, prior_precision=_best_precision(self._values(), square))
        number = residuals.numel()
        squares = float(residuals.double().square().sum())
        if not 0 < squares < math.inf:
            raise ValueError("Laplace: residuals are all zero or not finite: they give no noise")
        values = replace(self, noise=1.0)._values()
        outputs = self.curvature.fitting.outputs
        is_of_all = number == outputs if outputs else number % self.samples == 0
        if not is_of_all:
            of_each = f", with {outputs / self.samples:g} outputs each" if outputs else ""
            raise ValueError(
                f"Laplace: {number} residuals are not of the {self.samples:.0f} samples of the "
                f"fit{of_each}: pass the residuals of all outputs, from all ranks"
            )

        def loss(log_noise: float) -> float:
            """Return minus the evidence at the best precision, but for constants."""
            noise = math.exp(log_noise)
            precision = _best_precision(values / noise, square)
            occam = float(torch.log1p(values / noise / precision).sum())
            return (squares / noise + number * log_noise + precision * square + occam) / 2

        # The evidence grows until the mean square of the residuals.
        least = math.log(squares / number)
        options = {"xatol": 1e-9}
        best = minimize_scalar(loss, bounds=(least, least + 14), method="bounded", options=options)
        noise = math.exp(best.x)
        precision = _best_precision(values / noise, square)
        return replace(self, prior_precision=precision, noise=noise)

    def sample(self, number: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Return samples of the weights; every rank must call.

        ``torch.func.functional_call(model, {name: w[0] for name, w in samples.items()}, inputs)``
        runs the model with the first. Under strategies in which each rank holds some blocks, all
        pass generators of the same seed.

        Args:
            number: The number of samples.
            generator: The source of randomness, on the device of the model.

        Returns:
            Name -> ``[number, *shape]``, of the weights that the curvature covers.
        """
        noise, weights = {}, _values_of(self.curvature)
        for name, weight in weights.items():
            shape = (number, *weight.shape)
            noise[name] = torch.randn(
                shape, generator=generator, dtype=weight.dtype, device=weight.device
            )
        deviations = self._root(noise)
        return {name: weights[name] + rows for name, rows in deviations.items()}

    def predictive(self, inputs: Any) -> Predictive:
        """Return the Gaussian over outputs of the model linearised in its weights.

        Each output of a sample takes a forward and a backward pass, and ``outputs * samples``
        vectors over the weights are in memory. Weights, gradients and buffers stay unchanged.
        Every rank must call if each rank holds only some blocks.

        Args:
            inputs: A batch of inputs, passed to `forward`.

        Raises:
            ValueError: If a module mixes samples, or a row is of several (`Curvature.gradients`).
        """
        with torch.no_grad():
            mean = self.forward(self.curvature.parts.model, inputs)
        size = mean.shape[1:].numel()
        roots: dict[str, list[Tensor]] = {name: [] for name in self.curvature.parameters}
        for output in range(size):
            gradients = self.curvature.gradients(inputs, self._mean_of(output)).dense()
            for name, rows in self._root(gradients).items():
                roots[name].append(rows.unsqueeze(1).flatten(1))
        dtype = torch.promote_types(mean.dtype, torch.float32)
        covariance = mean.new_zeros(len(mean), size, size, dtype=dtype)
        for of_outputs in roots.values():
            stacked = torch.stack(of_outputs, 1)  # [samples, outputs, weights]
            covariance += (stacked @ stacked.mT).to(covariance)
        return Predictive(mean, covariance, self.curvature.parts.fisher.loss)

    def outputs(self, inputs: Any, number: int, generator: torch.Generator | None = None) -> Tensor:
        """Return the outputs of the model with sampled weights, ``[number, samples, ...]``.

        Args:
            inputs: A batch of inputs, passed to `forward`.
            number: The number of samples of the weights; see `sample`.
            generator: The source of randomness, on the device of the model.

        Raises:
            ValueError: If the number is no positive integer, or weights are sharded over ranks, by
                fully_shard or a plan.
        """
        require_integer("Laplace.outputs: number", number, 1)
        sharding.require_whole(self.curvature.parameters.items(), "Laplace.outputs")
        runner = _Runner(self.curvature.parts.model, self.forward)
        outputs = []
        for _ in range(number):
            sample = self.sample(1, generator)
            weights = {f"model.{name}": weight[0] for name, weight in sample.items()}
            with torch.no_grad():
                outputs.append(functional_call(runner, weights, (inputs,)))
        return torch.stack(outputs)

    def _mean_of(self, output: int) -> Callable[[nn.Module, Any], tuple[Tensor, Tensor]]:
        """Return the mean of one output over a batch, as the loss whose gradients are Jacobians."""

        def loss(model: nn.Module, inputs: Any) -> tuple[Tensor, Tensor]:
            outputs = self.forward(model, inputs)
            return outputs, outputs.unsqueeze(1).flatten(1)[:, output].mean()

        return loss

    @property
    def _scale(self) -> float:
        """The factor of the curvature in the posterior precision."""
        if self.noise is None:
            return self.samples
        return self.samples / (self.noise * _require_noise(self.curvature, self.noise))

    def _values(self) -> Tensor:
        """Return the eigenvalues of the posterior precision without the prior's, in float64."""
        return self.curvature.eigenvalues().double().clamp(min=0) * self._scale

    def _root(self, vector: dict[str, Tensor]) -> dict[str, Tensor]:
        """Multiply by the symmetric root of the posterior covariance."""
        scale = self._scale
        root = self.curvature.inverse(self.prior_precision / scale).sqrt()
        return {name: rows / math.sqrt(scale) for name, rows in (root @ vector).items()}


class _Runner(nn.Module):
    """A forward pass as a module, whose weights `functional_call` replaces."""

    def __init__(self, model: nn.Module, run: Forward) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, inputs: Any) -> Tensor:
        return self.run(self.model, inputs)


def _require_noise(curvature: Curvature, noise: float) -> float:
    """Return the precision of the squared errors of the fit; raise unless they are its loss."""
    fisher, fitting = curvature.parts.fisher, curvature.fitting
    require_numbers("Laplace", noise=noise)
    if not 0 < noise < math.inf:
        raise ValueError(f"Laplace: noise must be positive and finite, not {noise!r}")
    if fisher.probed and isinstance(fisher.loss, SquaredError):
        return fisher.loss.precision
    if fisher.probed and isinstance(fisher.loss, MeanSquaredError) and fitting.outputs:
        return 2.0 * fitting.samples / fitting.outputs
    raise ValueError(
        "Laplace: noise is the variance of squared errors, and this curvature is of another loss "
        "or Fisher, or of 'mse' with an unknown number of outputs, under count(): fit it with "
        "Statistics(fisher='type-2', loss='squared-error'), or leave noise out"
    )


def _values_of(curvature: Curvature) -> dict[str, Tensor]:
    """Return the weights that a curvature covers, whole ones; if sharded, every rank must call."""
    return {name: sharding.whole(p.detach()) for name, p in curvature.parameters.items()}


def _square(curvature: Curvature) -> float:
    """Return the squared norm of the weights that a curvature covers."""
    squares = [w.double().square().sum().cpu() for w in _values_of(curvature).values()]
    return float(torch.stack(squares).sum())


def _effective(values: Tensor, precision: float) -> float:
    return float((values / (values + precision)).sum())


def _best_precision(values: Tensor, square: float) -> float:
    """Return the prior precision of the largest evidence (MacKay, 1992), of `Laplace._values`."""
    largest = float(values.max())
    if not (square > 0 and largest > 0):
        raise ValueError(
            "Laplace: the evidence has no largest value, as the weights or the curvature are zero: "
            "train the model, and fit the curvature with its loss"
        )
    # The sign changes between these: at `low` the largest eigenvalue alone counts at least 1/2.
    low, high = min(largest, 0.25 / square), len(values) / square

    def excess(log_precision: float) -> float:
        precision = math.exp(log_precision)
        return _effective(values, precision) - precision * square

    return math.exp(brentq(excess, math.log(low), math.log(high), xtol=1e-12))
