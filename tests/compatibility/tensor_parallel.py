"""A model that tensor-parallel plans cut up, and its training, on ranks and on one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import soframe
from soframe.settings import grouped
from tests.compatibility.fully_sharded import load, weights
from tests.compatibility.kit import Result, assert_same, result_of, state_of
from tests.methods.stages import damping_for

SAMPLES, POSITIONS, WIDTH, TOKENS = 5, 4, 8, 8


class Attention(nn.Module):
    """Four heads, or as many of them as a rank has; without biases, but of what comes out."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.o = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        heads = [f(x).unflatten(-1, (-1, 2)).transpose(1, 2) for f in (self.q, self.k, self.v)]
        q, k, v = heads
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class Net(nn.Module):
    """An embedding, attention, a multilayer perceptron, a norm and a head."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        super().__init__()
        self.checkpoints = checkpoints
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.attention = Attention()
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.attention(self.embedding(tokens))
        if self.checkpoints:
            x = x + checkpoint(self._mlp, x, use_reentrant=False)
        else:
            x = x + self._mlp(x)
        out: Tensor = self.head(self.norm(x))
        return out.full_tensor() if isinstance(out, DTensor) else out

    def _mlp(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).tanh())
        return out


def make_net(*, checkpoints: bool = False) -> Net:
    """The same on every rank."""
    generator = torch.Generator().manual_seed(3)
    model = Net(checkpoints=checkpoints).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)
    return model


def plan(kind: str) -> dict[str, Any]:
    """Which module is cut up how: Megatron's pairs, and others of the same values."""
    attention = {f"attention.{name}": ColwiseParallel() for name in "qkv"}
    pair = {
        **attention,
        "attention.o": RowwiseParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    if kind == "pairs":
        return pair
    if kind == "distributed":  # what the head returns stays a DTensor
        return {**pair, "head": ColwiseParallel(use_local_output=False)}
    if kind == "embedding":  # by the features; by the tokens in "sequence"
        columns = ColwiseParallel(output_layouts=Replicate())
        return {**pair, "embedding": columns}
    assert kind == "sequence"
    along = Shard(1)
    return {
        **pair,
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "attention.o": RowwiseParallel(output_layouts=along),
        "up": ColwiseParallel(input_layouts=along),
        "down": RowwiseParallel(output_layouts=along),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
    }


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        owner: Who makes the step: ``"sgd"`` after `soframe.Preconditioner`, or soframe (``"own"``).
        method: The method.
        options: Settings of soframe.
        kind: The plan.
        when: Whether the plan is put to use before soframe is built, or after.
        passes: Backward passes of a step.
        observed: Whether the Fisher is that of type 2.
        checkpoints: Whether activations are computed anew.
        begin: The first step.
        end: The one after the last.
        state: What the run goes on from.
        spoilt: The step in which gradients are not finite.
        place: Where not: in the loss, or in an entry that one rank has (``"part"``).
    """

    owner: str = "sgd"
    method: str = "kfac"
    options: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "pairs"
    when: str = "before"
    passes: int = 1
    observed: bool = False
    checkpoints: bool = False
    begin: int = 0
    end: int = 4
    state: Any = None
    spoilt: int | None = None
    place: str = "loss"


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The batch of a step, which all ranks have."""
    generator = torch.Generator().manual_seed(100 + step)
    shape = (SAMPLES, POSITIONS)
    tokens = torch.randint(0, TOKENS, shape, generator=generator)
    return tokens, torch.randn(*shape, TOKENS, generator=generator, dtype=torch.float64)


class Run:
    """A run under way, on one of so many ranks; of one process where there are none."""

    def __init__(self, case: Case, ranks: int = 0) -> None:
        self.case = case
        self.model = make_net(checkpoints=case.checkpoints)
        if ranks and case.when == "before":
            self.cut(ranks)
        settings = {"statistics_every": 1, "solve_every": 2, "kl_clip": None}
        settings.update(damping_for(case.method, case.options.get("auxiliary")))
        settings.update(case.options)
        if case.observed:
            settings.update(fisher="type-2", loss="squared-error")
        if case.owner == "sgd":
            self.preconditioner = soframe.Preconditioner(
                self.model, case.method, lr=0.02, **grouped(settings)
            )
        else:
            self.own = soframe.Optimizer(
                self.model, case.method, lr=0.05, weight_decay=0.1, **grouped(settings)
            )
            self.preconditioner = self.own.preconditioner
        if ranks and case.when == "after":
            self.cut(ranks)
        self.optimizer: Any = (
            torch.optim.SGD(self.model.parameters(), lr=0.02) if case.owner == "sgd" else self.own
        )
        if case.state is not None:
            load(self.model, case.state["model"])
            (self.preconditioner if case.owner == "sgd" else self.own).load_state_dict(
                case.state["own"]
            )

    def cut(self, ranks: int) -> None:
        """Put the plan to use."""
        parallelize_module(self.model, init_device_mesh("cpu", (ranks,)), plan(self.case.kind))

    def backward(self, step: int) -> None:
        case = self.case
        every = zip(*(t.chunk(case.passes) for t in batch(step)), strict=True)
        for number, (x, y) in enumerate(every):
            outputs = self.model(x)
            if case.observed:
                self.preconditioner.observe(outputs)
            loss = 0.5 * (outputs - y).square().sum((1, 2)).mean() / case.passes
            spoilt = step == case.spoilt and number == 0
            (loss * float("nan") if spoilt and case.place == "loss" else loss).backward()
        gradient = self.model.down.weight.grad
        if step == case.spoilt and case.place == "part" and gradient is not None:
            own = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if not dist.is_initialized() or dist.get_rank() == 0:
                own[0, 0] = float("inf")

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.backward(step)
        if self.case.owner == "sgd":
            self.preconditioner.step()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        own = self.preconditioner if self.case.owner == "sgd" else self.own
        return {"model": weights(self.model), "own": own.state_dict()}

    @classmethod
    def train(cls, case: Case, ranks: int = 0) -> Self:
        """Take all steps of a case."""
        run = cls(case, ranks)
        for step in range(case.begin, case.end):
            run.step(step)
        return run

    @classmethod
    def alone(cls, case: Case) -> dict[str, Tensor]:
        """The weights after a run on one process, of the concatenated batch."""
        options = {k: v for k, v in case.options.items() if k != "strategy"}
        return weights(cls.train(replace(case, options=options)).model)

    @classmethod
    def train_all(cls, rank: int, ranks: int, cases: Iterable[Case]) -> list[Result]:
        """What runs of some cases come to on a rank."""
        del rank
        return [result_of(cls.train(case, ranks)) for case in cases]

    @classmethod
    def save_all(cls, rank: int, ranks: int, cases: Iterable[Case]) -> list[dict[str, Any]]:
        """The states after runs of some cases on a rank."""
        del rank
        return [state_of(cls.train(case, ranks)) for case in cases]

    @classmethod
    def check(cls, results: Sequence[Result], case: Case, what: str = "") -> None:
        """Every rank has come to what one process does."""
        spoilt = case.spoilt is not None
        assert_same(results, cls.alone(case), weights(make_net()), spoilt=spoilt, what=what)


alone, check, train = Run.alone, Run.check, Run.train
save_all, train_all = Run.save_all, Run.train_all
