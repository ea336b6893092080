"""The step of the trust region with dense matrices throughout, of a net whose blocks are exact."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from tests.curvature import Batch, fill, half_square, randn
from tests.trust_region.kit import fisher, gradient


class Affine(nn.Module):
    """A scale and a shift of every feature: parameters without a block."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features))
        self.shift = nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


def affine_net() -> nn.Module:
    """A net for whose layers K-FAC is exact under squared errors."""
    layers = [nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False), Affine(2)]
    net = fill(nn.Sequential(*layers))
    with torch.no_grad():
        net[2].scale.add_(1.0)
    return net


COVERED = [slice(0, 12), slice(12, 20)]
REST = slice(20, 24)
PARTS = {
    1: [slice(0, 24)],
    2: [slice(0, 20), slice(20, 24)],
    3: [slice(0, 12), slice(12, 20), slice(20, 24)],
}


def of_all(value: float | Tensor) -> Tensor:
    """``[24]``."""
    return torch.as_tensor(value, dtype=torch.float64).expand(24)


@dataclass
class Dense:
    """The trust region of `affine_net`, with dense matrices throughout.

    Weight decays and lengths are one for all or ``[24]``; of ``trained``, ``[24]``, the zeros are
    frozen.
    """

    theta: Tensor
    damping: float
    factor: float = 1.0
    weight_decay: float | Tensor = 0.0
    momentum: bool = True
    layer_groups: int = 3
    lr: float | Tensor = 1.0
    last: Tensor | None = None
    trained: Tensor = field(default_factory=lambda: torch.ones(24, dtype=torch.float64))

    def split(self, direction: Tensor) -> list[Tensor]:
        parts = [torch.zeros_like(direction) for _ in PARTS[self.layer_groups]]
        for part, own in zip(parts, PARTS[self.layer_groups], strict=True):
            part[own] = direction[own]
        return [part for part in parts if part.any()]

    def penalty(self) -> float:
        return float(of_all(self.weight_decay) * self.trained @ self.theta.square() / 2)

    def step(self, batches: list[Batch]) -> float:
        """Take a step and return the predicted change."""
        net = affine_net()
        nn.utils.vector_to_parameters(self.theta, net.parameters())
        decays, lrs = of_all(self.weight_decay), of_all(self.lr)
        f = fisher(net, batches, half_square)
        g = gradient(net, batches, half_square) + decays * self.theta
        damping = self.damping + decays
        tied = (damping * self.trained).sum() / self.trained.sum()
        eye = torch.eye(len(g), dtype=torch.float64)
        preconditioned, rest = torch.zeros_like(g), torch.zeros_like(g)
        for own in COVERED:
            block = (f + self.factor * tied * eye)[own, own]
            preconditioned[own] = -torch.linalg.solve(block, g[own])
        rest[REST] = -g[REST]
        longest = lrs[self.trained > 0].max()
        directions = [d * lrs / longest for d in (*self.split(preconditioned), rest)]
        if self.momentum and self.last is not None:
            directions += [d * (lrs > 0) for d in self.split(self.last)]
        directions = [d * self.trained for d in directions]
        d = torch.stack([each for each in directions if each.any()])
        c, b = d @ (f + damping.diag()) @ d.T, d @ g
        coefficients = longest * torch.linalg.solve(c, -b)
        self.last = coefficients @ d
        self.theta = self.theta + self.last
        return float(b @ coefficients + coefficients @ c @ coefficients / 2)


def regression(step: int) -> list[Batch]:
    return [(randn(n, 3, seed=10 * step + n), randn(n, 2, seed=10 * step + n + 5)) for n in (4, 2)]
