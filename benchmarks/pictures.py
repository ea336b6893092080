"""The pictures of the guides on uses of a curvature: each takes seconds of a processor.

python -m benchmarks.pictures spectra docs/guides/spectra.png
python -m benchmarks.pictures influence docs/guides/influence.png
python -m benchmarks.pictures laplace docs/guides/laplace.png
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.sparse.linalg import LinearOperator, eigsh
from torch import Tensor, nn
from torch.nn import functional as F

import soframe
from benchmarks.influence import Data, batches_of, loss_of, split_digits
from soframe.diagnostics import display
from soframe.laplace import Laplace
from soframe.testing import GaussNewton

LANCZOS = 40
"""The number of eigenvalues that Lanczos finds."""


def _trained(model: nn.Module, loss: Callable[[], Tensor], steps: int, lr: float) -> nn.Module:
    adam = torch.optim.Adam(model.parameters(), lr)
    for _ in range(steps):
        adam.zero_grad()
        loss().backward()
        adam.step()
    return model.eval()


def _perceptron(data: Data, width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    return _trained(model, lambda: loss_of(model, data)[1], 60, 0.01)


def spectra() -> Figure:
    """Draw the spectra of a perceptron on digits by layer, and its largest eigenvalues."""
    data, _ = split_digits(500, 1)
    model = _perceptron(data)
    statistics = soframe.Statistics(fisher="type-2", loss="cross-entropy")
    curvature = soframe.Curvature(model, "ekfac", statistics=statistics)
    curvature.fit(batches_of(data), loss_of)
    figure = display.spectra(curvature)
    figure.set_size_inches(11, 4.2)
    by_layer = figure.axes[0]
    by_layer.set_title("EKFAC, by layer", fontsize=10)
    grid = figure.add_gridspec(1, 2)
    by_layer.set_subplotspec(grid[0])
    largest = figure.add_subplot(grid[1])
    places = range(1, LANCZOS + 1)
    values = curvature.eigenvalues().flip(0)[:LANCZOS]
    largest.plot(places, values, "-", color=display.COLORS[0], label="eigenvalues()")
    found = eigsh(curvature.to_scipy(), LANCZOS, return_eigenvectors=False)
    largest.plot(places, np.sort(found)[::-1], ".", color=display.COLORS[0], label="its Lanczos")
    for number, blocks in enumerate(("layers", "all"), 1):
        matrix = GaussNewton(model, lambda: loss_of(model, data)[1], blocks)
        exact = eigsh(operator_of(matrix), LANCZOS, return_eigenvectors=False)
        label = f'exact Gauss-Newton, "{blocks}"'
        largest.plot(places, np.sort(exact)[::-1], "--", color=display.COLORS[number], label=label)
    largest.set(yscale="log", xlabel="number")
    largest.set_title(f"the {LANCZOS} largest", fontsize=10)
    _plain(largest)
    return figure


def operator_of(matrix: GaussNewton) -> Any:
    """Return an exact matrix as an operator of scipy."""
    shapes = {name: gradient.shape for name, gradient in matrix.gradient.items()}
    sizes = [shape.numel() for shape in shapes.values()]

    def multiply(column: Any) -> Any:
        entries = torch.from_numpy(np.asarray(column, dtype=np.float32)).flatten().split(sizes)
        pairs = zip(shapes.items(), entries, strict=True)
        vector = {name: part.view(shape) for (name, shape), part in pairs}
        return torch.cat([tensor.flatten() for tensor in (matrix @ vector).values()]).numpy()

    return LinearOperator((sum(sizes), sum(sizes)), matvec=multiply, dtype=np.dtype("float32"))


def influence() -> Figure:
    """Draw queries with the training samples that lower and that raise their losses most."""
    train, queries = split_digits(500, 5)
    model = _perceptron(train)
    curvature = soframe.Curvature(model, "ekfac").fit(batches_of(train), loss_of)
    damping = 0.1 * curvature.trace() / len(curvature.eigenvalues())
    scores = soframe.influence.scores(
        curvature, [queries], batches_of(train), loss_of, damping=damping
    )
    columns = 4
    _, lowering = soframe.influence.top(scores, columns)
    _, raising = soframe.influence.top(-scores, columns)
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    grid = figure.subplots(len(scores), 1 + 2 * columns)
    for row, axes in enumerate(grid):
        _image(axes[0], queries[0][row], f"query: {int(queries[1][row])}")
        samples = torch.cat([lowering[row], raising[row]])
        for place, sample in zip(axes[1:], samples, strict=True):
            score = float(scores[row, sample])
            _image(place, train[0][sample], f"{int(train[1][sample])}: {score:+.2g}")
    figure.suptitle("queries; the digits that lower their losses; the digits that raise them")
    return figure


def _image(axes: Axes, pixels: Tensor, title: str) -> None:
    axes.imshow(pixels.view(8, 8).numpy(), cmap="gray_r")
    axes.set_title(title, fontsize=7)
    axes.set_axis_off()


def laplace() -> Figure:
    """Draw a regression with its deviations, and probabilities of two classes."""
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    regression, before, after = figure.subplots(1, 3)
    _draw_regression(regression)
    _draw_classes(before, after)
    return figure


def _draw_regression(axes: Axes) -> None:
    torch.manual_seed(0)
    x = torch.cat([torch.linspace(-2, -0.5, 40), torch.linspace(0.5, 2, 40)]).unsqueeze(1)
    y = torch.sin(2 * x) + 0.1 * torch.randn(80, 1)
    model = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    model.append(nn.Linear(16, 1))

    def squares(model: nn.Module, batch: Data) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, (outputs - batch[1]).square().sum(1).mean() / 2

    _trained(model, lambda: squares(model, (x, y))[1], 400, 0.02)
    statistics = soframe.Statistics(fisher="type-2", loss="squared-error")
    curvature = soframe.Curvature(model, "ekfac", statistics=statistics).fit([(x, y)], squares)
    posterior = Laplace(curvature).optimised(residuals=model(x).detach() - y)
    assert posterior.noise is not None
    places = torch.linspace(-4, 4, 160).unsqueeze(1)
    predictive = posterior.predictive(places)
    mean = predictive.mean.squeeze(1)
    deviation = 2 * (predictive.variance + posterior.noise).sqrt().squeeze(1)
    line = places.squeeze(1)
    axes.fill_between(line, mean - deviation, mean + deviation, color="#56B4E9", alpha=0.4)
    axes.plot(line, mean, color=display.COLORS[0])
    axes.plot(x.squeeze(1), y.squeeze(1), "k.", markersize=3)
    axes.set(ylim=(-4, 4))
    axes.set_title("mean and two deviations", fontsize=10)
    _plain(axes)


def _draw_classes(before: Axes, after: Axes) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(200, 2)
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    model.append(nn.Linear(16, 2))
    _trained(model, lambda: F.cross_entropy(model(inputs), labels), 300, 0.02)
    statistics = soframe.Statistics(fisher="type-2", loss="cross-entropy")
    curvature = soframe.Curvature(model, "ekfac", statistics=statistics)
    curvature.fit([(inputs, labels)], loss_of)
    posterior = Laplace(curvature).optimised()
    ticks = torch.linspace(-6, 6, 60)
    points = torch.cartesian_prod(ticks, ticks)
    predictive = posterior.predictive(points)
    shown = (
        (before, "confidence of the network, 0.5 (white) to 1", predictive.mean.softmax(1)),
        (after, "with the posterior", predictive.probabilities()),
    )
    for axes, title, probabilities in shown:
        confidence = probabilities.amax(1).view(60, 60).T
        axes.contourf(ticks, ticks, confidence, levels=np.linspace(0.5, 1, 11), cmap="Blues")
        axes.scatter(inputs[:, 0], inputs[:, 1], c=labels, s=4, cmap="coolwarm")
        axes.set_title(title, fontsize=10)


def _plain(axes: Axes) -> None:
    axes.grid(visible=True, which="major", linewidth=0.5, color="#DDDDDD")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=8)


PICTURES = {"spectra": spectra, "influence": influence, "laplace": laplace}


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw a picture."""
    parser = argparse.ArgumentParser(description="Pictures of the guides on a curvature.")
    parser.add_argument("picture", choices=PICTURES)
    parser.add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    PICTURES[options.picture]().savefig(options.file, dpi=110)
    return 0


if __name__ == "__main__":
    sys.exit(main())
