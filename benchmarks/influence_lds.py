"""How well influence predicts retrained models: the linear datamodeling score (Park et al., 2023).

    python -m benchmarks.influence_lds                        # a perceptron on digits
    python -m benchmarks.influence_lds --model convolutions   # slower

Models are trained on random halves of 500 digits, `SEEDS` of each half, by full-batch Adam. The
loss of each of 100 queries, a mean over the seeds, is predicted by minus the sum of the scores of
the half; the score of the method is the rank correlation over halves, the mean over queries.
Dampings are multiples of the mean eigenvalue, chosen on `CHOICE` halves; the others are reported,
with a 95 % interval by a bootstrap over queries.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

import soframe
from benchmarks.influence import Data, batches_of, loss_of, split_digits
from experiments.display import aligned

SAMPLES, QUERIES, STEPS = 500, 100, 300
CHOICE, REPORT, SEEDS = 10, 20, 2
DAMPINGS = (0.001, 0.01, 0.1, 1.0, 10.0)
METHODS = ("kfac", "ekfac")


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


MODELS: dict[str, Callable[[], nn.Module]] = {
    "perceptron": perceptron,
    "convolutions": convolutional,
}


def trained(models: list[nn.Module], data: Data, masks: Tensor, steps: int) -> dict[str, Tensor]:
    """Train models at once, each on the samples of its mask.

    Returns:
        The parameters by name, ``[models, *shape]``.
    """
    inputs, classes = data
    base = models[0]

    def loss(parameters: dict[str, Tensor], mask: Tensor) -> Tensor:
        outputs = functional_call(base, parameters, (inputs,))
        losses = F.cross_entropy(outputs, classes, reduction="none")
        decay = sum(p.square().sum() for p in parameters.values())
        return (losses * mask).sum() / mask.sum() + 5e-4 * decay

    stacked, _ = stack_module_state(models)
    parameters = {name: tensor.detach() for name, tensor in stacked.items()}
    optimizer = torch.optim.Adam(list(parameters.values()), lr=0.01)
    gradients_of = vmap(grad(loss))
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * (1 - step / steps)
        gradients = gradients_of(parameters, masks)
        for name, parameter in parameters.items():
            parameter.grad = gradients[name]
        optimizer.step()
    return {name: parameter.detach() for name, parameter in parameters.items()}


def retrained(
    make: Callable[[], nn.Module], data: Data, queries: Data, masks: Tensor, steps: int
) -> tuple[nn.Module, Tensor]:
    """Return a model of all samples, and the losses of queries by mask, ``[masks, queries]``."""
    everything = torch.ones(1, masks.shape[1])
    all_masks = torch.cat([everything, masks.repeat_interleave(SEEDS, 0)])
    models = []
    for number in range(len(all_masks)):
        torch.manual_seed(number % SEEDS)
        models.append(make())
    parameters = trained(models, data, all_masks, steps)

    def losses_of(single: dict[str, Tensor]) -> Tensor:
        outputs = functional_call(models[0], single, (queries[0],))
        return F.cross_entropy(outputs, queries[1], reduction="none")

    with torch.no_grad():
        losses = vmap(losses_of)(parameters)[1:].unflatten(0, (-1, SEEDS)).mean(1)
    model = make()
    model.load_state_dict({name: tensor[0] for name, tensor in parameters.items()})
    return model, losses


def correlations(scores: Tensor, masks: Tensor, losses: Tensor) -> Tensor:
    """Return the rank correlation of predicted and actual losses over halves, of each query."""
    predicted = -(masks @ scores.T)  # [halves, queries]
    ranks = [values.argsort(0).argsort(0).double() for values in (predicted, losses)]
    centred = [values - values.mean(0) for values in ranks]
    norms = centred[0].norm(dim=0) * centred[1].norm(dim=0)
    return (centred[0] * centred[1]).sum(0) / norms


def interval(values: Tensor, resamples: int = 2000) -> tuple[float, float]:
    """Return the 95 % interval of the mean by a bootstrap."""
    generator = torch.Generator().manual_seed(0)
    draws = torch.randint(len(values), (resamples, len(values)), generator=generator)
    low, high = values[draws].mean(1).quantile(torch.tensor([0.025, 0.975]).double())
    return float(low), float(high)


def candidates(model: nn.Module, data: Data, queries: Data) -> dict[str, dict[float, Tensor]]:
    """Return scores ``[queries, samples]`` by method and damping."""
    scores: dict[str, dict[float, Tensor]] = {}
    for method in METHODS:
        curvature = soframe.Curvature(model, method).fit(batches_of(data), loss_of)
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
    return scores


def table(name: str, samples: int, queries: int, halves: tuple[int, int], steps: int) -> str:
    """Return the scores of the methods as a table."""
    data, asked = split_digits(samples, queries)
    generator = torch.Generator().manual_seed(1)
    orders = [torch.randperm(samples, generator=generator) for _ in range(sum(halves))]
    masks = torch.stack([(order < samples // 2).float() for order in orders])
    model, losses = retrained(MODELS[name], data, asked, masks, steps)
    choice, number = slice(halves[0]), slice(halves[0], None)
    lines = [["", "damping, mean eigenvalues", "LDS", "95 %"]]
    for method, scores in candidates(model, data, asked).items():
        held_out = {
            damping: float(correlations(of_damping, masks[choice], losses[choice]).mean())
            for damping, of_damping in scores.items()
        }
        damping = max(held_out, key=lambda damping: held_out[damping])
        values = correlations(scores[damping], masks[number], losses[number])
        low, high = interval(values)
        setting = f"{damping:g}" if damping else "-"
        lines.append([method, setting, f"{float(values.mean()):.3f}", f"{low:.3f} to {high:.3f}"])
    return aligned(f"{name}: {samples} samples, {halves[1]} halves", lines)


def main() -> int:
    """Print the table of a model."""
    parser = argparse.ArgumentParser(description="The linear datamodeling score of influence.")
    parser.add_argument("--model", choices=MODELS, default="perceptron")
    parser.add_argument("--short", action="store_true", help="few samples, halves and steps")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.short:
        print(table(options.model, 100, 20, (3, 5), 20))
        return 0
    print(table(options.model, SAMPLES, QUERIES, (CHOICE, REPORT), STEPS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
