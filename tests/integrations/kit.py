"""A model, its data, what is tried under every trainer, and the loop that trainers are held to."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset

import soframe
from soframe.settings import grouped
from tests.compatibility.kit import assert_rounded
from tests.methods.stages import damping_for

STEPS, MICRO, BATCH = 6, 2, 4  # steps, micro-batches of each, samples of these
SAVED = 3  # the step of the checkpoint, between two steps of statistics and solves
SPOILT = 2  # the step with a bad sample, where statistics and solves are due
OPTIONS: dict[str, Any] = {"statistics_every": 2, "solve_every": 2, "damping": 0.01}
TIGHT = 1e-10


@dataclass(frozen=True)
class Case:
    """What a run has beside, or in the place of, what is usual.

    Attributes:
        method: The method.
        lr: The learning rate of the optimizer behind a preconditioner.
        own: Whether `soframe.Optimizer` owns the step.
        clip: What the trainer clips the norm of gradients, or of directions, to.
        spoilt: Whether a sample of the step `SPOILT` has targets that are NaN.
        checkpoints: Whether activations are computed anew in the backward pass.
        bf16: Whether the trainer lets the model run under autocast to bfloat16.
        fp16: Whether it does under autocast to float16, and has a ``GradScaler``, which lets the
            optimizer not step where a gradient is not finite.
        dtype: The dtype of parameters and data.
    """

    method: str = "kfac"
    lr: float = 0.1
    own: bool = False
    clip: float | None = None
    spoilt: bool = False
    checkpoints: bool = False
    bf16: bool = False
    fp16: bool = False
    dtype: torch.dtype = torch.float64

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the preconditioner that its method reads."""
        unread = set() if damping_for(self.method) else {"damping"}
        return {name: value for name, value in OPTIONS.items() if name not in unread}


CASES: dict[str, Case] = {
    "shampoo": Case(method="shampoo", lr=0.01),
    "own muon": Case(method="muon", own=True),
    "spoilt": Case(spoilt=True, clip=0.05),
    "own spoilt": Case(spoilt=True, own=True),
    "checkpoints": Case(checkpoints=True),
    "bf16": Case(bf16=True, dtype=torch.float32),
    "fp16": Case(fp16=True, spoilt=True, dtype=torch.float32),
    "own fp16": Case(fp16=True, spoilt=True, own=True, dtype=torch.float32),
}
"""What is tried under every trainer, on one process and on two."""


def scaler() -> torch.amp.GradScaler:
    """A scaler of losses with which nothing overflows."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**10)


def let_scale(accelerator: Any) -> None:
    """Let an ``Accelerator`` train in float16: what it does on GPUs, and refuses to do on CPUs."""
    accelerator.state._mixed_precision = "fp16"
    accelerator.native_amp, accelerator.scaler = True, scaler()


def let_shard(accelerator: Any) -> None:
    """Let an ``Accelerator`` shard by ``fully_shard``: what its plugin does on GPUs alone."""
    from accelerate import DistributedType, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator.state.fsdp_plugin = plugin
    for state in (accelerator.state.__dict__, PartialState._shared_state):
        state["distributed_type"] = DistributedType.FSDP


class Network(nn.Module):
    """Takes labels, as models of transformers do.

    Attributes:
        call: What calls the inner part: at once, or so that its activations are computed anew.
        runs: How often that part was called.
    """

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2)
        self.call, self.runs = call, 0

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.call(self._inner, self.first(x))
        return {"loss": nn.functional.mse_loss(outputs, labels), "outputs": outputs}

    def _inner(self, hidden: Tensor) -> Tensor:
        self.runs += 1
        return self.last(self.norm(hidden.tanh()))  # type: ignore[no-any-return]


class Data(Dataset[dict[str, Tensor]]):
    """The samples of one rank, in the order in which they are used."""

    def __init__(self, rank: int = 0, ranks: int = 1, case: Case = Case()) -> None:
        generator = torch.Generator().manual_seed(7)
        shape = (STEPS * MICRO, BATCH, 3)
        x = torch.randn(shape, generator=generator, dtype=torch.float64).to(case.dtype)
        labels = x[..., :2].sin()
        if case.spoilt:
            labels[SPOILT * MICRO, 0] = torch.nan
        self.x, self.labels = (t[:, rank::ranks].flatten(0, 1) for t in (x, labels))
        self._size = len(self.x) // (STEPS * MICRO)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.labels[index]}

    def skip(self, steps: int) -> None:
        """Leave out the samples of the first steps."""
        self.x, self.labels = (t[steps * MICRO * self._size :] for t in (self.x, self.labels))

    def batches(self, together: int = 1) -> list[dict[str, Tensor]]:
        """The micro-batches, or so many of them in one."""
        size = self._size * together
        parts = zip(self.x.split(size), self.labels.split(size), strict=True)
        return [{"x": x, "labels": labels} for x, labels in parts]


def at_once(function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    return function(hidden)


def anew(function: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    return checkpoint(function, hidden, use_reentrant=False)  # type: ignore[no-any-return]


def network(case: Case = Case(), anew: Callable[..., Tensor] = anew) -> Network:
    """A network; ``anew`` calls what is computed anew in the backward pass."""
    torch.manual_seed(3)
    return Network(anew if case.checkpoints else at_once).to(case.dtype)


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def base(model: nn.Module, case: Case, **options: Any) -> torch.optim.Optimizer:
    """The optimizer that a trainer is given."""
    if not case.own:
        return sgd(model, lr=case.lr)
    intervals = {"statistics_every": 2, "solve_every": 2}
    return soframe.Optimizer(model, case.method, lr=0.02, **grouped({**intervals, **options}))


def weights(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.detach() for name, p in model.named_parameters()}
    return {n: w.full_tensor() if isinstance(w, DTensor) else w.clone() for n, w in found.items()}


def plain(case: Case, *, clips: str = "gradients") -> dict[str, Tensor]:
    """Train in a loop written out, and return the weights.

    It is in float64, without checkpoints, and of one batch where a trainer has micro-batches.

    Args:
        case: The case.
        clips: Whether ``"gradients"`` are clipped or ``"directions"``.
    """
    model = network()
    optimizer = base(model, case)
    step: Callable[[], None] = lambda: None  # noqa: E731
    if not case.own:
        step = soframe.Preconditioner(
            model, case.method, optimizer=optimizer, **grouped(case.settings)
        ).step
    for number, batch in enumerate(Data(case=Case(spoilt=case.spoilt)).batches(MICRO)):
        model(**batch)["loss"].backward()
        if case.clip is not None and clips == "gradients":
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        step()
        if case.clip is not None and clips == "directions":
            nn.utils.clip_grad_norm_(model.parameters(), case.clip)
        if not (case.fp16 and case.spoilt and number == SPOILT):
            optimizer.step()
        elif isinstance(optimizer, soframe.Optimizer):  # no scaler here shows that it is given up
            optimizer.preconditioner.reset_batch()
        optimizer.zero_grad()
    return weights(model)


def finish(
    model: Network, preconditioner: soframe.Preconditioner, case: Case, *, begun: int = 0
) -> dict[str, Tensor]:
    """Check what a run has done, beside the weights, and return these.

    Args:
        model: The network.
        preconditioner: The preconditioner, which is closed.
        case: The case.
        begun: The step that this run began with.
    """
    kept_from = case.own and case.fp16 and case.spoilt  # its scaler does not let it step
    assert preconditioner.steps == STEPS - kept_from
    counters = dict(preconditioner.counters)
    assert counters.pop("skipped_updates") == (case.spoilt and not kept_from)
    assert counters.pop("skipped_statistics") == case.spoilt or kept_from
    assert not any(counters.values())
    assert model.runs == (1 + case.checkpoints) * MICRO * (STEPS - begun)
    preconditioner.close()
    return weights(model)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol)


def assert_plain(
    found: dict[str, Tensor],
    case: Case,
    atol: float,
    *,
    clips: str = "gradients",
) -> None:
    """Check the weights of a trainer against those of the plain loop in float64.

    Args:
        found: The weights.
        case: The case; in bfloat16 and float16 weights are a little off: at most 5 % of the way
            that they go.
        atol: By how much they may be off in other cases.
        clips: See `plain`.
    """
    expected = plain(case, clips=clips)
    if not (case.bf16 or case.fp16):
        assert_equal(found, {k: w.to(case.dtype) for k, w in expected.items()}, atol)
        return
    assert set(found) == set(expected)
    assert_rounded(found, expected, weights(network()))


def as_launched(rank: int, ranks: int) -> None:
    """Let libraries find what ``torchrun`` says; there is a process group already."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29500",
        GROUP_RANK="0",
        TORCHELASTIC_RUN_ID="test",
        ACCELERATE_USE_CPU="1",
    )
