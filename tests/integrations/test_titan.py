"""The guide's loop like torchtitan's: two ranks are one process, a resumed run is the whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import soframe
from soframe import checkpoint
from tests.distributed.harness import run_ranks
from tests.integrations.kit import TIGHT, assert_equal, sgd
from tests.integrations.test_guide import code

STEPS, SAVED, MICRO, BATCH, TOKENS, WIDTH = 12, 8, 2, 8, 11, 6


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 9)
        self.down = nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).tanh())  # type: ignore[no-any-return]


class Transformer(nn.Module):
    """Tokens, two layers in a dictionary as torchtitan has them, and a head; no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleDict({str(index): Layer() for index in range(2)})
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.head(x)  # type: ignore[no-any-return]


def model() -> Transformer:
    torch.manual_seed(0)
    return Transformer().double()


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def batches(step: int, rank: int = 0, ranks: int = 1) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of a rank."""
    drawn = torch.randint(TOKENS, (MICRO, BATCH, 5), generator=torch.Generator().manual_seed(step))
    return [(part[:, :-1], part[:, 1:]) for part in drawn[:, rank::ranks]]


def plain() -> dict[str, Tensor]:
    """Train whole layers on one process, and return the weights."""
    whole = model()
    optimizer = sgd(whole)
    preconditioner = soframe.Preconditioner(whole, optimizer=optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        for tokens, targets in batches(step):
            (loss_fn(whole(tokens), targets) / MICRO).backward()
        preconditioner.step()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
    return {name: p.detach() for name, p in whole.named_parameters()}


def train(rank: int, ranks: int, folder: Path, ends: list[int]) -> list[dict[str, Tensor]]:
    """Run the guide's code anew for each end, and return the weights of each run."""
    (loop,) = code("A loop like torchtitan's")
    weights = []
    for end in ends:
        names: dict[str, Any] = {
            **{one.__name__: one for one in (checkpoint_wrapper, fully_shard, init_device_mesh)},
            **{one.__name__: one for one in (get_state_dict, set_state_dict, loss_fn)},
            "torch": torch,
            "dist": dist,
            "dcp": dcp,
            "soframe": soframe,
            "checkpoint": checkpoint,
            "folder": folder,
            "steps": end,
            "save_every": SAVED,
            "device": "cpu",
            "backend": "aot_eager",
            "model": model(),
            "batches": lambda step: batches(step, rank, ranks),
        }
        exec(loop, names)
        whole = {n: p.full_tensor().detach() for n, p in names["model"].named_parameters()}
        weights.append({n.replace("_checkpoint_wrapped_module.", ""): w for n, w in whole.items()})
        names["preconditioner"].close()
    return weights


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_are_one_process_and_go_on(tmp_path: Path) -> None:
    """The second run goes on where the first was saved, and ends with its bits."""
    for whole, resumed in run_ranks(train, 2, tmp_path, [STEPS, STEPS], timeout=120):
        assert_equal(whole, plain(), TIGHT)
        assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())
