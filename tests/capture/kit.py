"""What every capture test is held against: the same training, plainly and densely.

A ``Case`` is a model and a way to run its steps. ``expected`` runs the plain twin of the model (the
same parameters without what is under test) on the whole batch in one pass. Each layer's ``forward``
is replaced by one that keeps its input and adds a zero to its output; the gradient of that zero is
the gradient of the output. From these the factors are written out, and every gradient is
``(kron(G, A) + damping I)^-1 g`` by a dense solve. No hook, and no line of the capture, is shared.

``actual`` runs the case with a preconditioner on one process or, in DistributedDataParallel with
the batch split evenly, on several.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from soframe import Preconditioner
from soframe.settings import grouped
from soframe.testing import compare, dense_preconditioned
from tests.distributed.harness import run_ranks
from tests.kit import exact

WORLDS = [1, pytest.param(2, marks=pytest.mark.distributed)]
DAMPING, DECAY, LR, STEPS, SAMPLES = 0.1, 0.8, 0.2, 3, 4
LAYERS = (nn.Linear, nn.Conv2d)

Result = dict[str, dict[str, Tensor]]
"""Of one step: "gradients" by parameter, "A" and "G" by block."""


class TwoLayers(nn.Module):
    """Two layers; subclasses say how they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.last = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).tanh())


class CalledTwice(TwoLayers):
    """The first layer is called twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.first(x).tanh()).tanh())


def softplus(output: Tensor) -> Tensor:
    """The mean over samples of a loss whose gradient is nowhere zero."""
    return F.softplus(output).flatten(1).sum(1).mean()


def vectors(step: int) -> Tensor:
    """The batch of a step, ``[4, 3]``."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)


def sequences(step: int) -> Tensor:
    """The batch of a step, ``[4, 2, 3]``."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 2, 3, generator=generator, dtype=torch.float64)


def images(step: int) -> Tensor:
    """The batch of a step, ``[4, 2, 3, 3]``."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 2, 3, 3, generator=generator, dtype=torch.float64)


def one_pass(model: nn.Module, x: Tensor, step: int) -> None:
    """The plain way through a batch."""
    softplus(model(x)).backward()


def no_sync(model: nn.Module) -> Any:
    """DistributedDataParallel's context that accumulates, or none."""
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


def average_gradients(model: nn.Module) -> None:
    """Average the gradients over processes by hand, where ``no_sync`` was left to do nothing."""
    if isinstance(model, DistributedDataParallel):
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()


def unwrapped(model: nn.Module) -> nn.Module:
    """The model within DistributedDataParallel."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def _leave_model(model: nn.Module) -> None:
    pass


def _leave_model_at(model: nn.Module, step: int) -> None:
    pass


@dataclass(frozen=True)
class Case:
    """A training that the capture must get right.

    Attributes:
        model: Builds the model.
        plain: Builds its twin without what is under test; None for the same model.
        data: The whole batch of a step.
        train: Runs forward and backward of one step on this process's part of the batch.
        prepare: Changes the model before the preconditioner is built, in both runs.
        begin: Changes the model before a forward, in both runs.
        change: Changes the model between backward and step, in both runs.
        ddp: Options of DistributedDataParallel.
        options: Options of the preconditioner.
        raw: Modules that have no block.
        dtype: The dtype of the model; the reference is float64.
        rtol: What the comparison bears; None for the default of the dtypes.
    """

    model: Callable[[], nn.Module]
    plain: Callable[[], nn.Module] | None = None
    data: Callable[[int], Tensor] = vectors
    train: Callable[[nn.Module, Tensor, int], None] = one_pass
    prepare: Callable[[nn.Module], None] = _leave_model
    begin: Callable[[nn.Module, int], None] = _leave_model_at
    change: Callable[[nn.Module, int], None] = _leave_model_at
    ddp: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    raw: tuple[str, ...] = ()
    dtype: torch.dtype = torch.float64
    rtol: float | None = None

    def build(self) -> nn.Module:
        """Build the model, the same on every process."""
        torch.manual_seed(0)
        model = self.model().to(self.dtype)
        self.prepare(model)
        return model

    def twin(self) -> nn.Module:
        """Build the plain model with the same parameters, in float64."""
        torch.manual_seed(0)
        model = (self.plain or self.model)().double()
        model.load_state_dict(self.build().state_dict())
        self.prepare(model)
        return model


def check(case: Case, world_size: int, timeout: float = 30.0) -> None:
    """Assert that a case gives the dense result, on every one of its processes.

    Args:
        case: The case.
        world_size: How many processes share each batch.
        timeout: Seconds until a hang is an error.
    """
    if world_size == 1:
        results = [actual(0, 1, case)]
    else:
        results = run_ranks(actual, world_size, case, timeout=timeout)
    wanted = expected(case)
    for rank, steps in enumerate(results):
        assert len(steps) == len(wanted)
        for step, (got, want) in enumerate(zip(steps, wanted, strict=True)):
            for kind in want:
                where = f"rank {rank}, step {step}: {kind}"
                assert got[kind].keys() == want[kind].keys(), where
                for name, tensor in want[kind].items():
                    compare(got[kind][name], tensor, f"{where} of {name}", rtol=case.rtol)


# -- the code under test -----------------------------------------------------------------------


def actual(rank: int, world_size: int, case: Case) -> list[Result]:
    """Train with a preconditioner on this rank's part of every batch."""
    model = case.build()
    if world_size > 1:
        model = DistributedDataParallel(model, **case.ddp)
    preconditioner = precondition(model, **case.options)
    results = []
    for step in range(STEPS):
        batch = case.data(step).to(case.dtype)
        own = batch.chunk(world_size)[rank]
        model.zero_grad()
        case.begin(unwrapped(model), step)
        case.train(model, own, step)
        case.change(unwrapped(model), step)
        preconditioner.step()
        results.append(snapshot(model, preconditioner))
        descend(model)
    return results


def precondition(model: nn.Module, **options: Any) -> Preconditioner:
    """Build a preconditioner with the settings of the reference."""
    settings: dict[str, Any] = {
        "damping": DAMPING,
        "decay": DECAY,
        "kl_clip": None,
        "solve_every": 1,
    }
    settings |= {"statistics_every": 1, **exact(options.get("method", "kfac"))}
    return Preconditioner(model, **grouped({**settings, **options}))


def snapshot(model: nn.Module, preconditioner: Preconditioner) -> Result:
    """Return the gradients and factors of a step."""
    named = unwrapped(model).named_parameters()
    blocks = [b for b in preconditioner.blocks if b.running]
    assert len({b.name for b in preconditioner.blocks}) == len(preconditioner.blocks)
    return {
        "gradients": {n: p.grad.clone() for n, p in named if p.grad is not None},
        **{
            kind: {
                b.name: b.running.matrix(f)[0].clone()
                for b in blocks
                for f in b.factors
                if f.name == kind
            }
            for kind in "AG"
        },
    }


@torch.no_grad()
def descend(model: nn.Module) -> None:
    """Gradient descent, so that every step has other weights."""
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.requires_grad:
            parameter.sub_(LR * parameter.grad)


# -- the reference -----------------------------------------------------------------------------


def expected(case: Case) -> list[Result]:
    """Train the plain twin densely on the whole batches."""
    model = case.twin()
    recorder = Recorder(model, case.raw)
    results = []
    for step in range(STEPS):
        batch = case.data(step)
        model.zero_grad()
        case.begin(model, step)
        softplus(model(batch)).backward()
        case.change(model, step)
        recorder.step(len(batch))
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        factors = {k: {n: f[k] for n, f in recorder.factors().items()} for k in "AG"}
        results.append({"gradients": gradients, **factors})
        descend(model)
    return results


class Recorder:
    """Records what goes in and out of a plain model's layers and preconditions densely.

    Modules with one weight are one block. A layer of another geometry than its fellow is beyond it.

    Args:
        model: The model, float64.
        raw: Modules to leave alone.
    """

    def __init__(self, model: nn.Module, raw: tuple[str, ...] = ()) -> None:
        self._calls: dict[str, list[tuple[nn.Module, Tensor, Tensor]]] = {}
        self._first: dict[str, nn.Module] = {}
        self._history: dict[str, tuple[Tensor, Tensor, float]] = {}
        self._had: dict[str, tuple[bool, bool]] = {}
        names: dict[int, str] = {}
        for name, module in model.named_modules():
            if isinstance(module, LAYERS) and name not in raw:
                block = names.setdefault(id(module.weight), name or type(module).__name__)
                self._first.setdefault(block, module)
                self._calls[block] = []
                self._had[block] = trainable(self._first[block])
                module.forward = functools.partial(self._call, block, module, module.forward)

    def _call(self, block: str, module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        x = args[0] if args else kwargs["input"]
        output = forward(*args, **kwargs)
        zero = torch.zeros_like(output, requires_grad=True)
        self._calls[block].append((module, x.detach().clone(), zero))
        return output + zero

    def step(self, samples: int) -> None:
        """Precondition every gradient with all that was recorded.

        Args:
            samples: N, of which the loss was the mean.
        """
        for block, calls in self._calls.items():
            module, has = self._first[block], trainable(self._first[block])
            if not any(has):  # what is frozen as a whole keeps its block
                has = self._had[block]
            seen = [(m, x, z.grad) for m, x, z in calls if z.grad is not None]
            gained = any(now and not then for then, now in zip(self._had[block], has, strict=True))
            if gained:  # begins anew, with the next window
                self._history.pop(block, None)
            trained = zip((module.weight, module.bias), has, strict=True)
            given = any(p.grad is not None for p, is_trained in trained if is_trained)
            if seen and given and not gained:
                self._average(block, *moments(seen, samples))
            self._had[block] = has
            calls.clear()
            if block in self._history and given:
                self._precondition(module, *has, **self.factors()[block])

    def forget(self, block: str) -> None:
        """Drop what was recorded of a block since the last step."""
        self._calls[block].clear()

    def _average(self, block: str, a: Tensor, g: Tensor) -> None:
        old_a, old_g, mass = self._history.get(block, (0 * a, 0 * g, 0.0))
        self._history[block] = (
            DECAY * old_a + (1 - DECAY) * a,
            DECAY * old_g + (1 - DECAY) * g,
            DECAY * mass + (1 - DECAY),
        )

    def factors(self) -> dict[str, dict[str, Tensor]]:
        """Return the running factors, with the columns of what is trainable."""
        found = {}
        for block, (a, g, mass) in self._history.items():
            weight, bias = self._had[block]
            if weight or bias:
                columns = slice(None if weight else -1, None if bias else -1)
                found[block] = {"A": (a / mass)[columns, columns], "G": g / mass}
        return found

    def _precondition(
        self, module: nn.Module, weight: bool, bias: bool, A: Tensor, G: Tensor
    ) -> None:
        parts = [channels_last(module.weight.grad)] if weight else []
        if bias:
            parts.append(module.bias.grad[:, None])
        result = dense_preconditioned(torch.kron(G, A), torch.cat(parts, 1), DAMPING)
        if bias:
            module.bias.grad.copy_(result[:, -1])
            result = result[:, :-1]
        if weight:
            _, channels, *kernel = module.weight.shape
            result = result.reshape(-1, *kernel, channels)
            module.weight.grad.copy_(result.movedim(-1, 1))


def trainable(module: nn.Module) -> tuple[bool, bool]:
    """Return whether a layer's weight and bias are there and trainable."""
    return module.weight.requires_grad, module.bias is not None and module.bias.requires_grad


def moments(calls: list[tuple[nn.Module, Tensor, Tensor]], samples: int) -> tuple[Tensor, Tensor]:
    """Return A with its bias column, and G.

    With N samples and all positions t of all calls, T per sample on average:
    ``A = (1/N) sum a a^T`` and ``G = (1/(N T)) sum (N g)(N g)^T``, g the gradient of the mean loss.

    Args:
        calls: Module, input and gradient of the output, of one block.
        samples: N.

    Returns:
        ``[in + 1, in + 1]`` and ``[out, out]``.
    """
    inputs = torch.cat([rows_in(module, x) for module, x, _ in calls])
    outputs = samples * torch.cat([rows_out(module, grad) for module, _, grad in calls])
    inputs = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=inputs.dtype)], 1)
    return inputs.T @ inputs / samples, outputs.T @ outputs / len(outputs)


def rows_in(module: nn.Module, x: Tensor) -> Tensor:
    """Return what the weight multiplies, one row per sample and position."""
    if isinstance(module, nn.Linear):
        return x.reshape(-1, module.in_features)
    patches = F.unfold(
        x, module.kernel_size, padding=module.padding, stride=module.stride
    )  # [N, in * kernel, positions]
    patches = patches.unflatten(1, (x.shape[1], -1)).permute(0, 3, 2, 1)
    return patches.reshape(-1, patches.shape[2] * patches.shape[3])


def channels_last(weight: Tensor) -> Tensor:
    """Return a weight as a matrix, features in the order kernel position, channel."""
    return weight.movedim(1, -1).flatten(1)


def rows_out(module: nn.Module, gradient: Tensor) -> Tensor:
    """Return the gradient of the output, one row per sample and position."""
    if isinstance(module, nn.Linear):
        return gradient.reshape(-1, module.out_features)
    return gradient.flatten(2).transpose(1, 2).reshape(-1, module.out_channels)
