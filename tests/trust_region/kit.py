"""Problems for the trust region, and what is asked of each by plain autograd, all of it dense."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import soframe
from soframe.settings import grouped
from soframe.testing import dense_fisher
from soframe.trust_region import ConstantDamping, DampingPolicy
from tests.curvature import Batch, fill, randn

Criterion = Callable[[Tensor, Tensor], Tensor]


class Measured(ConstantDamping):
    """A constant damping at which every step is measured; it notes the ratios."""

    interval = 1

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.ratios: list[float] = []

    def observe(self, ratio: float) -> None:
        self.ratios.append(ratio)


def trust_region(
    model: nn.Module, loss: Any, damping: float | DampingPolicy = 0.1, **settings: Any
) -> soframe.TrustRegion:
    """An optimizer with the type-2 Fisher, and a damping that is constant unless a policy."""
    if not isinstance(damping, DampingPolicy):
        damping = ConstantDamping(damping)
    plain: dict[str, Any] = {"solver": "eigen", "decay": 0.95, "preconditioner_damping": 1.0}
    plain |= {"statistics_every": 1, "solve_every": 1}
    settings = {"fisher": "type-2", **plain, **settings}
    return soframe.TrustRegion(model, loss, damping=damping, **grouped(settings))


def closures(
    model: nn.Module, batches: Sequence[Batch], criterion: Criterion
) -> list[Callable[[], Tensor]]:
    """One closure for each micro-batch, the mean of whose means is the loss."""
    return [
        lambda x=x, y=y: criterion(model(x), y) / len(batches)  # type: ignore[misc]
        for x, y in batches
    ]


def deep(inputs: int = 3, classes: int = 3) -> nn.Module:
    return fill(nn.Sequential(nn.Linear(inputs, 4), nn.Tanh(), nn.Linear(4, classes)))


def labels(samples: int, classes: int = 3, seed: int = 0) -> Tensor:
    return torch.randint(classes, (samples,), generator=torch.Generator().manual_seed(seed))


def classes_of(step: int, samples: int = 8) -> Batch:
    return randn(samples, 3, seed=step), labels(samples, seed=step)


def vector(model: nn.Module) -> Tensor:
    """The parameters, as one vector."""
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([t.detach().flatten() for t in tensors])


def gradient(model: nn.Module, batches: Sequence[Batch], criterion: Criterion) -> Tensor:
    """The gradient of the loss of `closures`, as one vector; no hook is called."""
    parameters = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    total = torch.zeros((), dtype=torch.float64)
    for x, y in batches:
        output = torch.func.functional_call(model, parameters, (x,))
        total = total + criterion(output, y) / len(batches)
    return flat(torch.autograd.grad(total, list(parameters.values())))


def fisher(model: nn.Module, batches: Sequence[Batch], criterion: Criterion) -> Tensor:
    """The dense Gauss-Newton matrix of the loss of `closures`."""
    each = [dense_fisher(model, x, criterion, y, kind="type-2") for x, y in batches]
    return torch.stack(each).mean(0)
