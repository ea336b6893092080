"""Muon: momentum, orthogonalised (Jordan et al., 2024), with AdamW for all but hidden matrices.

The published implementations, torch's included, orthogonalise in bfloat16, which many a CPU
emulates at a tenth of the speed. A fair comparison of seconds stays in the parameters' dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 5


def orthogonalise(matrix: Tensor) -> Tensor:
    """Return Newton-Schulz iterations towards the nearest semi-orthogonal matrix.

    Singular vectors stay, and singular values become about 0.7 to 1.2.
    """
    a, b, c = COEFFICIENTS
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x: Tensor = wide / wide.norm().clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x if wide is matrix else x.T


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay.

    Args:
        matrices: Hidden weights, matrices or kernels ``[out, in, *size]``, as ``[out, in * size]``.
        lr: The learning rate; a matrix's is multiplied by ``sqrt(max(1, rows / columns))``.
        momentum: Momentum of the gradient's running mean.
        weight_decay: Multiplied by the learning rate.
    """

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    # Without a closure no optimizer returns a loss, which torch types as overloads.
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the training loop calls backward itself"
        for group in self.param_groups:
            lr, momentum = group["lr"], group["momentum"]
            for matrix in group["params"]:
                state = self.state[matrix]
                if not state:
                    state["mean"] = torch.zeros_like(matrix)
                mean = state["mean"].lerp_(matrix.grad, 1 - momentum)
                update = orthogonalise(torch.lerp(matrix.grad, mean, momentum).flatten(1))
                matrix.mul_(1 - lr * group["weight_decay"])
                scale: float = max(1.0, update.shape[0] / update.shape[1]) ** 0.5
                matrix.add_(update.view_as(matrix), alpha=-lr * scale)


class Together(torch.optim.Optimizer):
    """Several optimizers of disjoint parameters, as one with the parts' parameter groups."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts
        groups = list(itertools.chain.from_iterable(part.param_groups for part in parts))
        parameters = itertools.chain.from_iterable(group["params"] for group in groups)
        super().__init__(list(parameters), {})
        self.param_groups = groups

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        assert closure is None, "the training loop calls backward itself"
        for part in self.parts:
            part.step()


def muon_with_adamw(
    model: nn.Module,
    lr: float,
    momentum: float,
    adamw_lr: float = 3e-3,
    adamw_betas: tuple[float, float] = (0.9, 0.95),
    weight_decay: float = 0.0,
) -> Together:
    """Return the usual treatment: hidden matrices by Muon, all else by AdamW."""
    matrices, outer = split(model)
    adamw = torch.optim.AdamW(
        outer, lr=adamw_lr, betas=adamw_betas, weight_decay=weight_decay, fused=True
    )
    return Together(Muon(matrices, lr, momentum, weight_decay), adamw)


def split(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the hidden matrices and all other parameters.

    Embeddings, and an attribute `head` if the model has one, are not hidden.
    """
    outside: list[nn.Module] = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    if isinstance(head := getattr(model, "head", None), nn.Module):
        outside.append(head)
    excluded: set[int] = set()
    for module in outside:
        excluded.update(map(id, module.parameters()))
    matrices: list[nn.Parameter] = []
    outer: list[nn.Parameter] = []
    for parameter in model.parameters():
        hidden = parameter.ndim == 2 and id(parameter) not in excluded
        if hidden:
            matrices.append(parameter)
        else:
            outer.append(parameter)
    return matrices, outer
