"""Every method trains small networks by its default settings, at the learning rate of its kind."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import soframe
from tests import kit

STEPS = 25
CURVATURE = ("kfac", "kfac-reduce", "ekfac", "tnt", "eva", "foof", "diagonal")
RATES = {
    **dict.fromkeys(CURVATURE, 0.1),  # docs/quickstart.md, limited by the KL clip
    **dict.fromkeys(("sgd", "momentum", "normalise-rows", "match-rms"), 0.1),
    **dict.fromkeys(("adamw", "blocked", "graft", "shampoo"), 1e-3),
    "kl-shampoo": 0.016,
    **dict.fromkeys(("soap", "kl-soap"), 3e-3),
    **dict.fromkeys(("muon", "normuon", "soap-muon", "soap-normuon"), 0.02),
    **dict.fromkeys(("newton-muon", "kfac-muon", "orthogonalise"), 0.02),
}


class Attention(nn.Module):
    """One layer of a transformer over 6 positions of 16 features, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.packed, self.out = nn.Linear(4, 16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 10)
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x.view(len(x), 6, 4))
        q, k, v = self.packed(self.norm(x)).chunk(3, -1)
        x = x + self.out((q @ k.mT / 4).softmax(-1) @ v)
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return self.head(x.mean(1))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "dense": lambda: nn.Sequential(
        nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 20), nn.Tanh(), nn.Linear(20, 10)
    ),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 6)), nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(),
        nn.Conv2d(8, 12, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(24, 10),
    ),
    "transformer": Attention,
}  # fmt: skip


def test_every_method_has_a_rate() -> None:
    assert set(RATES) == set(soframe.available("method"))


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", RATES)
@pytest.mark.covering(together=1)
def test_defaults_do_not_diverge(method: str, network: str) -> None:
    torch.manual_seed(0)
    model = NETWORKS[network]()
    centres = torch.randn(10, 24)
    own = soframe.Optimizer(model, method, lr=RATES[method], auxiliary="adamw", auxiliary_lr=1e-3)
    losses = []

    def loss(model: nn.Module, step: int) -> Tensor:
        classes = torch.arange(32) % 10
        found = nn.functional.cross_entropy(
            model(centres[classes] + 0.5 * torch.randn(32, 24)), classes
        )
        losses.append(found.item())
        return found

    weights = kit.train(model, loss, range(STEPS), own)
    own.close()
    assert weights.isfinite().all()
    assert max(losses) < 1.5 * losses[0]
    assert sum(losses[-3:]) < 0.97 * sum(losses[:3])
