"""The guide's loop like torchtitan's: two ranks are one process, a resumed run is the whole one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import indent
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import soframe
from soframe import checkpoint
from soframe.settings import grouped
from tests.compatibility.kit import assert_rounded
from tests.distributed.harness import run_ranks
from tests.integrations.kit import TIGHT, assert_equal, sgd, weights
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


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        method: The method.
        end: The step after the last.
        spoilt: Whether a micro-batch of the third step has a loss that is NaN, on one rank.
        bf16: Whether ``fully_shard`` has a policy to compute in bfloat16.
        own: Whether `soframe.Optimizer` owns the step.
        early: Whether the preconditioner is built before layers are wrapped and sharded.
    """

    method: str = "kfac"
    end: int = STEPS
    spoilt: bool = False
    bf16: bool = False
    own: bool = False
    early: bool = False


CASES: dict[str, Case] = {
    "shampoo": Case(method="shampoo", end=5, spoilt=True),
    "bf16": Case(end=5, bf16=True),
    "early": Case(end=5, early=True),
}
RESUMED = [Case(), Case(method="muon", own=True)]


def batches(step: int, case: Case, rank: int = 0, ranks: int = 1) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of a rank."""
    drawn = torch.randint(TOKENS, (MICRO, BATCH, 5), generator=torch.Generator().manual_seed(step))
    every = [(part[:, :-1], part[:, 1:]) for part in drawn[:, rank::ranks]]
    if case.spoilt and step == 2 and rank == 0:
        every[0] = (every[0][0], every[0][1] + TOKENS)
    return every


def loss_fn(outputs: Tensor, targets: Tensor) -> Tensor:
    """The loss; targets that are no tokens spoil it."""
    loss = nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten() % TOKENS)
    return loss * math.nan if bool((targets >= TOKENS).any()) else loss


def plain(case: Case) -> dict[str, Tensor]:
    """Train whole layers on one process, and return the weights."""
    whole = model()
    if case.own:
        optimizer: Any = soframe.Optimizer(whole, case.method, lr=0.02)
        preconditioner = optimizer.preconditioner
    else:
        optimizer = sgd(whole)
        preconditioner = soframe.Preconditioner(whole, case.method, optimizer=optimizer)
    for step in range(case.end):
        optimizer.zero_grad()
        for tokens, targets in batches(step, case):
            (loss_fn(whole(tokens), targets) / MICRO).backward()
        if not case.own:
            preconditioner.step()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
    assert preconditioner.counters["skipped_updates"] == case.spoilt
    return weights(whole)


def replaced(text: str, first: str, last: str, new: str = "") -> str:
    """Replace the lines of a program from the one that begins with a text to another."""
    lines = text.splitlines()
    begins = [line.strip().startswith(first) for line in lines]
    begin = begins.index(True)
    end = next(i for i in range(begin, len(lines)) if lines[i].strip().startswith(last))
    margin = lines[begin][: -len(lines[begin].lstrip())]
    return "\n".join([*lines[:begin], indent(new, margin), *lines[end + 1 :]])


def loop(case: Case) -> str:
    """The guide's code for a case."""
    text, own = code("A loop like torchtitan's")
    if case.early:
        first = 'preconditioner = soframe.Preconditioner(model, strategy="sharded")\n'
        return first + replaced(text, "preconditioner =", "preconditioner =")
    if case.own:
        building, loading, saving = own.split("\n\n")
        both = 'state["model"], state["optimizer"] ='
        text = replaced(text, "optimizer =", "preconditioner =", building)
        text = replaced(text, both, "checkpoint.load(", loading)
        text = replaced(text, both, 'state["preconditioner"]', saving)
        text = replaced(text, "preconditioner.step()", "preconditioner.step()")
    return text


def train(rank: int, ranks: int, folder: Path, case: Case) -> dict[str, Tensor]:
    """Run the guide's code, and return the weights."""
    torch.compiler.reset()  # else code that an earlier case has compiled runs, without hooks
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if case.bf16 else None
    settings = {} if policy is None else {"mp_policy": policy}
    layers = model()
    names: dict[str, Any] = {
        **{one.__name__: one for one in (checkpoint_wrapper, init_device_mesh)},
        **{one.__name__: one for one in (get_state_dict, set_state_dict, loss_fn)},
        **{one.__name__: one for one in (get_model_state_dict, set_model_state_dict)},
        "fully_shard": partial(fully_shard, **settings),
        "torch": torch,
        "dist": dist,
        "dcp": dcp,
        "soframe": SimpleNamespace(
            Preconditioner=partial(soframe.Preconditioner, method=case.method),
            Optimizer=lambda *args, method, **settings: soframe.Optimizer(
                *args, case.method, **grouped(settings)
            ),
        ),
        "checkpoint": checkpoint,
        "folder": folder,
        "steps": case.end,
        "save_every": SAVED,
        "device": "cpu",
        "backend": "aot_eager",
        "model": layers.float() if case.bf16 else layers,
        "batches": lambda step: batches(step, case, rank, ranks),
    }
    exec(loop(case), names)
    own = names["optimizer"].preconditioner if case.own else names["preconditioner"]
    assert own.counters["skipped_updates"] == case.spoilt
    own.close()
    found = {n: p.full_tensor().detach() for n, p in names["model"].named_parameters()}
    return {n.replace("_checkpoint_wrapped_module.", ""): w for n, w in found.items()}


def train_all(rank: int, ranks: int, folder: Path) -> list[Any]:
    """Two runs each of which the second goes on where the first was saved, and the other cases."""
    both = [
        [train(rank, ranks, folder / str(case.own), case) for _ in range(2)] for case in RESUMED
    ]
    return [both, *(train(rank, ranks, folder / name, case) for name, case in CASES.items())]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.distributed
def test_two_ranks_are_one_process_and_go_on(tmp_path: Path) -> None:
    """The second run goes on where the first was saved, and ends with its bits."""
    for both, *found in run_ranks(train_all, 2, tmp_path, timeout=120):
        for (whole, resumed), case in zip(both, RESUMED, strict=True):
            assert_equal(whole, plain(case), TIGHT)
            assert all(torch.equal(resumed[name], weight) for name, weight in whole.items())
        for own, case in zip(found, CASES.values(), strict=True):
            expected = plain(case)
            if case.bf16:
                assert_rounded(own, expected, weights(model()))
            else:
                assert_equal(own, expected, TIGHT)
