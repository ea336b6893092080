"""How well influence predicts retrained models: the linear datamodeling score (Park et al., 2023).

    python -m benchmarks.influence_lds                        # a perceptron on digits
    python -m benchmarks.influence_lds --model convolutions
    python -m benchmarks.influence_lds --model bytes          # a transformer, minutes

Models are trained on random halves of 500 samples, `SEEDS` of each half, by Adam: of digits, or of
windows of 32 bytes of Python's standard library. The loss of each of 100 queries, a mean over the
seeds, is predicted by minus the sum of the scores of the half; the score of the method is the rank
correlation over halves, the mean over queries. Dampings are multiples of the mean eigenvalue,
chosen on `CHOICE` halves; the others are reported, with a 95 % interval by a bootstrap over
queries. Beside soframe's methods stand the libraries of `benchmarks.influence` that are installed.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

import soframe
from benchmarks.influence import (
    CONTENDERS,
    Data,
    Task,
    batches_of,
    installed,
    loss_of,
    quiet,
    split_digits,
)
from experiments.data import standard_library
from experiments.display import aligned
from experiments.models import GPT, Sizes

SAMPLES, QUERIES, WINDOW = 500, 100, 32
CHOICE, REPORT, SEEDS = 10, 20, 2
DAMPINGS = (0.00001, 0.0001, 0.001, 0.01, 0.1, 1.0, 10.0)
METHODS = ("kfac", "ekfac")
Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Problem:
    """A model, its data and its training.

    Attributes:
        make: Makes the model.
        split: From numbers of samples and queries to both.
        steps: Of Adam.
        batch: Samples of a step.
    """

    make: Callable[[], nn.Module]
    split: Callable[[int, int], tuple[Data, Data]]
    steps: int
    batch: int


def perceptron() -> nn.Module:
    """Return two hidden layers of 64."""
    layers = [nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)]
    return nn.Sequential(*layers)


def convolutional() -> nn.Module:
    """Return two strided convolutions and a linear layer."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        nn.Conv2d(1, 8, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


class Transformer(GPT):
    """Two layers of width 32 over bytes; its positions are called for each sample."""

    def __init__(self) -> None:
        sizes = Sizes(vocabulary=256, context=WINDOW, width=32, layers=2, heads=2)
        super().__init__(sizes, seed=int(torch.randint(2**31, ())))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[samples, 256, places]`` of bytes ``[samples, places]``."""
        places = torch.arange(tokens.shape[1]).expand_as(tokens)
        hidden = self.layers(self.tokens(tokens) + self.positions(places))
        logits: Tensor = self.head(self.norm(hidden))
        return logits.transpose(1, 2)


def split_text(samples: int, queries: int) -> tuple[Data, Data]:
    """Return windows of a text and the bytes that follow, ``[N, 32]`` each.

    Queries lie between the samples, so that they share words with them. No window comes twice.
    """
    (windows, following), _ = standard_library()
    end = samples + queries
    pairs = torch.cat([part.reshape(-1, WINDOW)[: 2 * end] for part in (windows, following)], 1)
    distinct = torch.tensor(list(dict.fromkeys(map(tuple, pairs.tolist())))[:end])
    order = torch.randperm(end, generator=torch.Generator().manual_seed(0))
    inputs, targets = distinct[order].split(WINDOW, 1)
    return (inputs[:samples], targets[:samples]), (inputs[samples:], targets[samples:])


PROBLEMS = {
    "perceptron": Problem(perceptron, split_digits, steps=300, batch=SAMPLES),
    "convolutions": Problem(convolutional, split_digits, steps=300, batch=SAMPLES),
    "bytes": Problem(Transformer, split_text, steps=300, batch=25),
}


def trained(models: list[nn.Module], data: Data, subsets: Tensor, problem: Problem) -> Parameters:
    """Train models at once, each on the samples of its row of ``[models, size]``.

    Returns:
        The parameters by name, ``[models, *shape]``.
    """
    inputs, targets = data
    base = models[0]

    def loss(parameters: Parameters, rows: Tensor) -> Tensor:
        outputs = functional_call(base, parameters, (inputs[rows],))
        decay = sum(p.square().sum() for p in parameters.values())
        return F.cross_entropy(outputs, targets[rows]) + 5e-4 * decay

    stacked, _ = stack_module_state(models)
    parameters = {name: tensor.detach() for name, tensor in stacked.items()}
    optimizer = torch.optim.Adam(list(parameters.values()), lr=0.01)
    gradients_of = vmap(grad(loss))
    generator = torch.Generator().manual_seed(2)
    for step in range(problem.steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 - step / problem.steps)
        places = torch.randperm(subsets.shape[1], generator=generator)[: problem.batch]
        gradients = gradients_of(parameters, subsets[:, places])
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def retrained(
    problem: Problem, data: Data, queries: Data, subsets: Tensor
) -> tuple[nn.Module, Tensor]:
    """Return a model of all samples, and the losses of queries, ``[subsets, SEEDS, queries]``."""
    models = []
    for number in range(SEEDS * len(subsets)):
        torch.manual_seed(number % SEEDS)
        models.append(problem.make())
    model = copy.deepcopy(models[0])
    everything = torch.arange(len(data[1])).unsqueeze(0)
    parameters = trained([model], data, everything, problem)
    model.load_state_dict({name: tensor[0] for name, tensor in parameters.items()})

    def losses_of(single: Parameters) -> Tensor:
        outputs = functional_call(model, single, (queries[0],))
        losses = F.cross_entropy(outputs, queries[1], reduction="none")
        return losses.reshape(len(losses), -1).mean(1)

    parameters = trained(models, data, subsets.repeat_interleave(SEEDS, 0), problem)
    with torch.no_grad():
        losses = vmap(losses_of)(parameters)
    return model, losses.unflatten(0, (-1, SEEDS))


def rank_correlations(first: Tensor, second: Tensor) -> Tensor:
    """Return the correlations of ranks over the first dimension, ``[queries]``."""
    ranks = [values.argsort(0).argsort(0).double() for values in (first, second)]
    centred = [values - values.mean(0) for values in ranks]
    norms = centred[0].norm(dim=0) * centred[1].norm(dim=0)
    return (centred[0] * centred[1]).sum(0) / norms


def correlations(scores: Tensor, subsets: Tensor, losses: Tensor) -> Tensor:
    """Return the rank correlation of predicted and actual losses over subsets, of each query."""
    predicted = -scores.T[subsets].sum(1)  # [subsets, queries]
    return rank_correlations(predicted, losses)


def interval(values: Tensor, resamples: int = 2000) -> tuple[float, float]:
    """Return the 95 % interval of the mean by a bootstrap."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(values), (resamples, len(values)), generator=generator)
    low, high = values[draws].mean(1).quantile(torch.tensor([0.025, 0.975]).double())
    return float(low), float(high)


def candidates(model: nn.Module, data: Data, queries: Data) -> dict[str, dict[float, Tensor]]:
    """Return scores ``[queries, samples]`` by method or library and damping."""
    scores: dict[str, dict[float, Tensor]] = {}
    for method in METHODS:
        curvature = soframe.Curvature(copy.deepcopy(model), method)
        curvature.fit(batches_of(data), loss_of)
        mean = curvature.trace() / len(curvature.eigenvalues())
        scores[method] = {
            damping: soframe.influence.scores(
                curvature, [queries], batches_of(data), loss_of, damping=damping * mean
            )
            for damping in DAMPINGS
        }
    vectors = curvature.gradients(queries, loss_of).dense()
    products = [curvature.gradients(batch, loss_of).dot(vectors) for batch in batches_of(data)]
    scores["gradient products"] = {0.0: torch.cat(products, 1)}
    for library in installed():
        if library == "soframe":
            continue
        scores[library] = {}
        for damping in DAMPINGS:
            task = Task(copy.deepcopy(model), data, queries, damping * mean)
            with quiet():
                scores[library][damping] = CONTENDERS[library].run(task).scores
    return scores


def table(name: str, problem: Problem, samples: int, queries: int, subsets: tuple[int, int]) -> str:
    """Return the scores of the methods as a table; dampings are chosen on the first subsets."""
    data, asked = problem.split(samples, queries)
    generator = torch.Generator().manual_seed(1)
    orders = [torch.randperm(samples, generator=generator) for _ in range(sum(subsets))]
    halves = torch.stack(orders)[:, : samples // 2]
    model, of_seeds = retrained(problem, data, asked, halves)
    losses = of_seeds.mean(1)
    choice, number = slice(subsets[0]), slice(subsets[0], None)
    lines = [["", "damping, mean eigenvalues", "LDS", "95 %"]]
    for method, scores in candidates(model, data, asked).items():
        held_out = {
            damping: float(correlations(of_damping, halves[choice], losses[choice]).mean())
            for damping, of_damping in scores.items()
        }
        damping = max(held_out, key=lambda damping: held_out[damping])
        values = correlations(scores[damping], halves[number], losses[number])
        low, high = interval(values)
        setting = f"{damping:g}" if damping else "-"
        lines.append([method, setting, f"{float(values.mean()):.3f}", f"{low:.3f} to {high:.3f}"])
    agreement = float(rank_correlations(of_seeds[:, 0], of_seeds[:, 1]).mean())
    title = f"{name}: {samples} samples, {subsets[1]} halves, loss {float(losses.mean()):.2f}"
    return aligned(f"{title}, two seeds correlate to {agreement:.2f}", lines)


def main() -> int:
    """Print the table of a model."""
    parser = argparse.ArgumentParser(description="The linear datamodeling score of influence.")
    parser.add_argument("--model", choices=PROBLEMS, default="perceptron")
    parser.add_argument("--short", action="store_true", help="few samples, halves and steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    problem = PROBLEMS[options.model]
    if options.short:
        print(table(options.model, replace(problem, steps=20), 100, 20, (3, 5)))
        return 0
    print(table(options.model, problem, SAMPLES, QUERIES, (CHOICE, REPORT)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
