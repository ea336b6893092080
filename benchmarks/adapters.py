r"""A workload of adapters: a byte-level GPT of Python's sources is fine-tuned to SciPy's, by LoRA.

    python -m experiments compare --workload benchmarks/adapters.py --steps 200 --tune 8 \
        --optimizers adamw,soframe:soap --seeds 1,2,3 --output runs/adapters

The base is trained once, on the standard library, and kept in `runs/adapters`. Then it is frozen,
and every linear layer of its blocks gets a product of two thin matrices (Hu et al., 2021), which
alone is trained, on windows of SciPy's modules; the loss is that on held-out ones.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from experiments.data import Examples, scipy_sources, standard_library, take
from experiments.models import byte_gpt
from experiments.tasks import cross_entropy as loss

__all__ = ["data", "loss", "model"]

RANK = 4
BASE = Path("runs/adapters/base.pt")
STEPS, BATCH, LR = 1500, 16, 2e-3  # of the base

title = "LoRA on a byte-level GPT, from Python's sources to SciPy's"
loss_name = "loss on held-out modules (cross entropy per byte, nats)"
batch_size, evaluate_every = 16, 20
# Rates over two decades for both; the schedule of all is searched, too.
spaces = {
    "adamw": {"lr": (5e-4, 5e-2)},
    "soframe:soap": {"lr": (5e-4, 5e-2), "method.max_ratio": [2]},
    "soframe:muon": {"lr": (2e-3, 2e-1)},
    "soframe:soap-normuon": {"lr": (2e-3, 2e-1)},
    "kfac": {"lr": (1e-2, 1.0)},
}


class LoRA(nn.Module):
    """A frozen linear layer and a product of two thin ones, which is zero at first."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))  # type: ignore[no-any-return]


def model() -> nn.Module:
    """The frozen base with new adapters, which are drawn from torch's generator."""
    adapted = byte_gpt()
    adapted.load_state_dict(base())
    adapted.requires_grad_(False)
    for name, module in list(adapted.named_modules()):
        if isinstance(module, nn.Linear) and name != "head":
            parent, _, own = name.rpartition(".")
            setattr(adapted.get_submodule(parent), own, LoRA(module, RANK))
    return adapted


def data() -> tuple[Examples, Examples]:
    return scipy_sources()


def base() -> dict[str, Tensor]:
    """The weights of the base, trained by AdamW at the first call."""
    if BASE.exists():
        weights: dict[str, Tensor] = torch.load(BASE, weights_only=True)
        return weights
    made, (examples, _) = byte_gpt(), standard_library()
    optimizer = torch.optim.AdamW(made.parameters(), lr=LR, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LR, STEPS)
    order = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        chosen = torch.randint(len(examples[0]), (BATCH,), generator=order)
        optimizer.zero_grad()
        loss(made, *take(examples, chosen)).backward()
        optimizer.step()
        schedule.step()
    BASE.parent.mkdir(parents=True, exist_ok=True)
    torch.save(made.state_dict(), BASE)
    return made.state_dict()
