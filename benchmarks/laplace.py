"""Laplace approximations: held-out likelihood and calibration, beside laplace-torch.

    python -m benchmarks.laplace               # seconds to a minute of a processor
    pip install laplace-torch==0.3             # may be missing: then soframe's figures alone

Perceptrons on scikit-learn's digits, breast cancer and diabetes (a regression), and two networks of
layers that laplace-torch does not serve: convolutions with BatchNorm, and an LSTM over the rows of
a digit. Prior precision, and the noise of the regression, are those of the largest evidence, by
each library's own search. Predictions are linearised, with the probit approximation.

*NLL* is the mean negative log-likelihood of the test set, *error of calibration* of classes the
expected calibration error in 15 bins of equal width, of the regression the mean over levels of 10
to 90 % of how far the coverage of central intervals is from the level.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import soframe
from experiments.display import aligned
from soframe.laplace import Laplace

BATCH = 100
Data = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Predicted:
    """Predictions of the test set.

    Attributes:
        first: Probabilities ``[samples, classes]``, or means ``[samples, 1]``.
        variance: Of an observation, ``[samples, 1]``, noise included; None for classes.
    """

    first: Tensor
    variance: Tensor | None = None


@dataclass(frozen=True)
class Problem:
    """A network, and the data of a problem.

    Attributes:
        make: Makes the network; its last layer is ``head``.
        data: Training and test data.
        classes: Whether targets are classes.
        steps: Of Adam on all data.
        decay: Its weight decay.
    """

    make: Callable[[], nn.Module]
    data: Callable[[], tuple[Data, Data]]
    classes: bool = True
    steps: int = 200
    decay: float = 1e-4


class Network(nn.Module):
    """A body and a head."""

    def __init__(self, body: nn.Module, head: nn.Linear) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(x))
        return outputs


class Recurrent(nn.Module):
    """The last state of an LSTM over the rows of a digit."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell, self.width = nn.LSTMCell(8, width), width

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), self.width)
        hidden, memory = state, state
        for row in x.view(-1, 8, 8).unbind(1):
            hidden, memory = self.cell(row, (hidden, memory))
        return hidden


def perceptron(into: int, width: int, out: int) -> nn.Module:
    """Return a perceptron with two hidden layers."""
    body = nn.Sequential(nn.Linear(into, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
    return Network(body, nn.Linear(width, out))


def normed() -> nn.Module:
    """Return convolutions with BatchNorm."""
    body = nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Flatten(),
    )
    return Network(body, nn.Linear(64, 10))


def _split(loaded: Any, train: int, *, classes: bool = True) -> tuple[Data, Data]:
    """Return standardised inputs and targets of training and of test samples."""
    inputs = torch.tensor(loaded.data, dtype=torch.float32)
    targets = torch.tensor(loaded.target)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))
    inputs, targets = inputs[order], targets[order]
    deviation = inputs[:train].std(0)
    inputs = (inputs - inputs[:train].mean(0)) / deviation.where(deviation > 0, 1.0)
    if not classes:
        targets = targets.float().unsqueeze(1)
        targets = (targets - targets[:train].mean()) / targets[:train].std()
    return (inputs[:train], targets[:train]), (inputs[train:], targets[train:])


def _digits() -> tuple[Data, Data]:
    return _split(load_digits(), 800)


PROBLEMS = {
    "digits": Problem(lambda: perceptron(64, 32, 10), _digits),
    "breast cancer": Problem(
        lambda: perceptron(30, 16, 2), lambda: _split(load_breast_cancer(), 300)
    ),
    "diabetes": Problem(
        lambda: perceptron(10, 16, 1),
        lambda: _split(load_diabetes(), 250, classes=False),
        classes=False,
    ),
    "digits, BatchNorm": Problem(normed, _digits),
    "digits, LSTM": Problem(lambda: Network(Recurrent(24), nn.Linear(24, 10)), _digits),
}


def loss_of(problem: Problem) -> Callable[[nn.Module, Data], tuple[Tensor, Tensor]]:
    """Return the loss of a batch: cross-entropy, or half the squared error."""

    def classes(model: nn.Module, batch: Data) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, F.cross_entropy(outputs, batch[1])

    def squares(model: nn.Module, batch: Data) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, (outputs - batch[1]).square().sum(1).mean() / 2

    return classes if problem.classes else squares


def trained(problem: Problem, train: Data) -> nn.Module:
    """Return the network after training on all data."""
    torch.manual_seed(0)
    model = problem.make()
    loss = loss_of(problem)
    adam = torch.optim.AdamW(model.parameters(), 0.01, weight_decay=problem.decay)
    for _ in range(problem.steps):
        adam.zero_grad()
        loss(model, train)[1].backward()
        adam.step()
    return model.eval()


def alone(model: nn.Module, problem: Problem, train: Data, inputs: Tensor) -> Predicted:
    """Predict with the network itself; the noise of a regression is its training error."""
    with torch.no_grad():
        outputs = model(inputs)
        if problem.classes:
            return Predicted(outputs.softmax(1))
        noise = (model(train[0]) - train[1]).square().mean()
    return Predicted(outputs, noise.expand_as(outputs))


def with_soframe(
    model: nn.Module, problem: Problem, train: Data, inputs: Tensor, *, method: str, last: bool
) -> Predicted:
    """Predict with soframe's posterior."""
    loss, name = loss_of(problem), "cross-entropy" if problem.classes else "squared-error"
    curvature = soframe.Curvature(
        model,
        method,
        statistics=soframe.Statistics(fisher="type-2", loss=name),
        skip=["^body"] if last else [],
    )
    batches = list(zip(train[0].split(BATCH), train[1].split(BATCH), strict=True))
    curvature.fit(batches, loss)
    residuals = None if problem.classes else (model(train[0]) - train[1]).detach()
    posterior = Laplace(curvature).optimised(residuals=residuals)
    parts = [posterior.predictive(part) for part in inputs.split(BATCH)]
    if problem.classes:
        return Predicted(torch.cat([part.probabilities() for part in parts]))
    assert posterior.noise is not None
    variance = torch.cat([part.variance for part in parts]) + posterior.noise
    return Predicted(torch.cat([part.mean for part in parts]), variance)


def with_laplace_torch(
    model: nn.Module, problem: Problem, train: Data, inputs: Tensor, *, last: bool
) -> Predicted:
    """Predict with laplace-torch's Kronecker posterior."""
    laplace = importlib.import_module("laplace")
    likelihood = "classification" if problem.classes else "regression"
    layers = "last_layer" if last else "all"
    posterior = laplace.Laplace(
        model, likelihood, subset_of_weights=layers, hessian_structure="kron"
    )
    posterior.fit(DataLoader(TensorDataset(*train), BATCH))
    if problem.classes:
        posterior.optimize_prior_precision(method="marglik")
        return Predicted(posterior(inputs, pred_type="glm", link_approx="probit").detach())

    def loss(logs: np.ndarray) -> float:
        """Return minus the evidence for the logarithms of precision and noise."""
        precision, noise = torch.tensor(logs, dtype=torch.float32).exp()
        evidence = posterior.log_marginal_likelihood(precision.view(1), noise.view(1))
        return -float(evidence.sum())

    # Without gradients: its own lack the determinant's, with respect to the noise.
    best = minimize(loss, np.zeros(2), method="Nelder-Mead")
    loss(best.x)  # leaves the posterior there
    mean, variance = posterior(inputs)
    of_noise = float(posterior.sigma_noise.detach().square())
    return Predicted(mean.detach(), variance.detach().reshape(mean.shape) + of_noise)


def likelihood(predicted: Predicted, targets: Tensor) -> float:
    """Return the mean negative log-likelihood of targets."""
    if predicted.variance is None:
        chosen = predicted.first.gather(1, targets.unsqueeze(1)).clamp(min=1e-12)
        return float(-chosen.log().mean())
    variance = predicted.variance
    squares = (targets - predicted.first).square() / variance
    return float((squares + variance.log() + math.log(2 * math.pi)).mean() / 2)


def miscalibration(predicted: Predicted, targets: Tensor, bins: int = 15) -> float:
    """Return the expected calibration error, or the mean error of coverage."""
    if predicted.variance is None:
        confidence, chosen = predicted.first.max(1)
        right = (chosen == targets).float()
        bin_of = (confidence * bins).long().clamp(max=bins - 1)
        error = 0.0
        for number in range(bins):
            inside = bin_of == number
            if inside.any():
                gap = right[inside].mean() - confidence[inside].mean()
                error += float(gap.abs()) * float(inside.float().mean())
        return error
    levels = torch.linspace(0.1, 0.9, 9)
    deviations = (targets - predicted.first).abs() / predicted.variance.sqrt()
    half_widths = math.sqrt(2) * torch.erfinv(levels)
    covered = (deviations.flatten().unsqueeze(1) <= half_widths).float().mean(0)
    return float((covered - levels).abs().mean())


def contenders() -> dict[str, Callable[..., Predicted]]:
    """Return what predicts, by name."""

    def of_soframe(method: str, *, last: bool) -> Callable[..., Predicted]:
        return lambda *task: with_soframe(*task, method=method, last=last)

    found = {
        "the network": alone,
        "soframe, K-FAC, last layer": of_soframe("kfac", last=True),
        "soframe, K-FAC, all layers": of_soframe("kfac", last=False),
        "soframe, EKFAC, all layers": of_soframe("ekfac", last=False),
    }
    if importlib.util.find_spec("laplace") is not None:
        found["laplace-torch, last layer"] = lambda *task: with_laplace_torch(*task, last=True)
        found["laplace-torch, all layers"] = lambda *task: with_laplace_torch(*task, last=False)
    return found


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Likelihood and calibration of posteriors.")
    parser.add_argument("--problem", choices=PROBLEMS, action="append", help="default: all")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in options.problem or PROBLEMS:
        problem = PROBLEMS[name]
        train, test = problem.data()
        model = trained(problem, train)
        lines = [["", "NLL", "error of calibration"]]
        for contender, predict in contenders().items():
            try:
                predicted = predict(model, problem, train, test[0])
            except Exception as error:  # of any kind: that it cannot is a row of the table
                text = str(error).splitlines()
                lines.append([contender, type(error).__name__, text[0][:60] if text else ""])
                continue
            first = likelihood(predicted, test[1])
            lines.append([contender, f"{first:.3f}", f"{miscalibration(predicted, test[1]):.3f}"])
        print(aligned(name, lines), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
