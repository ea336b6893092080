"""Windows: several passes before a step, and what happens between steps."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from soframe.testing import compare
from tests.capture.kit import (
    SAMPLES,
    STEPS,
    WORLDS,
    CalledTwice,
    Case,
    Result,
    average_gradients,
    check,
    descend,
    no_sync,
    precondition,
    sequences,
    snapshot,
    softplus,
    vectors,
)
from tests.distributed.harness import run_ranks


class Switched(CalledTwice):
    """Some passes do not use the first layer: their samples count all the same."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if (x[:, 0] > 0).any() else self.last(x.tanh())


class SwitchedSamples(CalledTwice):
    """The same for all samples at once."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[:, 0] > 0
        hidden = [self.first(self.first(x[chosen]).tanh()), x[~chosen]]
        return self.last(torch.cat(hidden).tanh())


def switched(step: int) -> Tensor:
    """Samples of which one of each half uses the first layer."""
    x = vectors(step)
    x[:, 0] = torch.tensor([1.0, -1.0, -1.0, 1.0])
    return x


def micro_batches(model: nn.Module, x: Tensor, step: int) -> None:
    """One sample at a time; only the last pass is synchronised."""
    *early, late = x.split(1)
    for part in early:
        with no_sync(model):
            (softplus(model(part)) / len(x)).backward()
    (softplus(model(late)) / len(x)).backward()


def synchronised(model: nn.Module, x: Tensor, step: int) -> None:
    """One sample at a time, every pass averaged over processes."""
    for part in x.split(1):
        (softplus(model(part)) / len(x)).backward()


def incomplete(model: nn.Module, x: Tensor, step: int) -> None:
    """Two micro-batches at the first step, one at each later one."""
    parts = x.chunk(2 if step == 0 else 1)
    with no_sync(model):
        for part in parts[:-1]:
            (softplus(model(part)) / len(parts)).backward()
    (softplus(model(parts[-1])) / len(parts)).backward()


def forwards_first(model: nn.Module, x: Tensor, step: int) -> None:
    """All forwards before all backwards, first in the same order, then in the opposite one."""
    with no_sync(model):
        losses = [softplus(model(part)) / len(x) for part in x.split(1)]
        for loss in losses if step else reversed(losses):
            loss.backward()
    average_gradients(model)


def one_backward(model: nn.Module, x: Tensor, step: int) -> None:
    """All forwards, then one backward of their mean."""
    with no_sync(model):
        losses = [softplus(model(part)) for part in x.split(1)]
        torch.stack(losses).mean().backward()
    average_gradients(model)


def separate_graphs(model: nn.Module, x: Tensor, step: int) -> None:
    """Pipeline stages: the gradient of the middle is handed over by hand."""
    inner: Any = model.module if isinstance(model, DistributedDataParallel) else model
    hidden = inner.first(inner.first(x).tanh())
    middle = hidden.detach().requires_grad_()
    loss = softplus(inner.last(middle.tanh()))
    (gradient,) = torch.autograd.grad(loss, middle, retain_graph=True)
    torch.autograd.backward([loss, hidden], [torch.ones_like(loss), gradient])
    average_gradients(model)


def own_samples() -> int:
    return SAMPLES // (dist.get_world_size() if dist.is_initialized() else 1)


CASES = {
    "micro-batches": Case(CalledTwice, train=micro_batches),
    "micro-batches of sequences": Case(CalledTwice, train=micro_batches, data=sequences),
    "micro-batches, global": Case(
        CalledTwice, train=micro_batches, options={"loss_average": "global"}
    ),
    "a layer unused in some": Case(
        Switched, SwitchedSamples, switched, micro_batches, ddp={"find_unused_parameters": True}
    ),
    "a layer unused in some, global": Case(
        Switched,
        SwitchedSamples,
        switched,
        micro_batches,
        ddp={"find_unused_parameters": True},
        options={"loss_average": "global"},
    ),
    "an incomplete last window": Case(CalledTwice, train=incomplete),
    "forwards before backwards": Case(CalledTwice, train=forwards_first),
    "one backward of several forwards": Case(
        CalledTwice, train=one_backward, options={"samples": own_samples}
    ),
    "stages": Case(CalledTwice, train=separate_graphs),
}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.covering(together=1)
def test_window(name: str, world_size: int) -> None:
    check(CASES[name], world_size)


def test_synchronised_micro_batches_on_one_process() -> None:
    check(Case(CalledTwice, train=synchronised), 1)


def test_window_divided_by_more_passes_than_it_had() -> None:
    """3 of 4 passes, each divided by 4: the loss is 3/4 of the mean, G its square, A the mean."""
    results = []
    for divisor in (3, 4):
        model = Case(CalledTwice).build()
        preconditioner = precondition(model)
        for part in vectors(0)[:3].split(1):
            (softplus(model(part)) / divisor).backward()
        preconditioner.step()
        results.append(snapshot(model, preconditioner))
    for block, factor in results[0]["G"].items():
        compare(results[1]["G"][block], factor * 0.75**2, "G")
        compare(results[1]["A"][block], results[0]["A"][block], "A")


# -- between steps -----------------------------------------------------------------------------


def forward_without_grad(model: nn.Module, x: Tensor) -> Any:
    with torch.no_grad():
        return model(3 * x)


def inference(model: nn.Module, x: Tensor) -> Any:
    with torch.inference_mode():
        return model(3 * x)


def evaluate(model: nn.Module, x: Tensor) -> Any:
    model.eval()
    with torch.no_grad():
        output = model(3 * x)
    model.train()
    return output


def forward_with_grad(model: nn.Module, x: Tensor) -> Any:
    return model(3 * x)  # the graph stays, no backward comes


def forward_with_grad_and_drop(model: nn.Module, x: Tensor) -> Any:
    model(3 * x)


def gradient_of_input(model: nn.Module, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    return torch.autograd.grad(softplus(model(x)), x)


def gradient_of_output(model: nn.Module, x: Tensor) -> Any:
    output = model(x)
    return torch.autograd.grad(softplus(output), output)


def failed_backward(model: nn.Module, x: Tensor) -> Any:
    """A backward that raises before it reaches a layer."""
    loss = softplus(model(x))
    loss.register_hook(_refuse)
    with pytest.raises(ArithmeticError):
        loss.backward()


def _refuse(gradient: Tensor) -> None:
    raise ArithmeticError


def copied(model: nn.Module, x: Tensor) -> Any:
    """Training a copy."""
    other = copy.deepcopy(model)
    softplus(other(3 * x)).backward()


def transformed(model: nn.Module, x: Tensor) -> Any:
    """Gradients by torch.func of a model that is hooked."""

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return softplus(torch.func.functional_call(model, parameters, (x,)))

    gradients = torch.func.grad(loss)(dict(model.named_parameters()))
    plain = [p.detach().requires_grad_() for p in model.parameters()]
    named = dict(zip(gradients, plain, strict=True))
    wanted = torch.autograd.grad(loss(named), plain)
    for got, want in zip(gradients.values(), wanted, strict=True):
        compare(got, want, "torch.func")
    torch.func.grad(lambda inputs: softplus(model(inputs)))(x)


def fast_weights(model: nn.Module, x: Tensor) -> Any:
    """Gradients through parameters that were made of the model's, as in meta-learning."""
    parameters = {name: 2 * p for name, p in model.named_parameters()}
    loss = softplus(torch.func.functional_call(model, parameters, (x,)))
    return torch.autograd.grad(loss, list(model.parameters()))


BETWEEN = [
    forward_without_grad,
    inference,
    evaluate,
    forward_with_grad,
    forward_with_grad_and_drop,
    gradient_of_input,
    gradient_of_output,
    failed_backward,
    copied,
    transformed,
    fast_weights,
]
Other = Callable[[nn.Module, Tensor], Any]


def train_with(rank: int, world_size: int, other: Other | None, **options: Any) -> list[Result]:
    """Train, doing something else with the model before, within and after each window."""
    model = Case(CalledTwice).build()
    wrapped = DistributedDataParallel(model) if world_size > 1 else model
    preconditioner = precondition(wrapped, **options)
    kept, results = [], []
    for step in range(STEPS):
        wrapped.zero_grad()
        parts = vectors(step).chunk(world_size)[rank].chunk(2)
        for part in parts:
            kept.append(other and other(model, part))
            with no_sync(wrapped) if part is parts[0] else torch.enable_grad():
                loss = softplus(wrapped(part)) / 2
                kept.append(other and other(model, part))
                loss.backward()
        kept.append(other and other(model, parts[0]))
        preconditioner.step()
        results.append(snapshot(wrapped, preconditioner))
        descend(model)
    return results


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("other", BETWEEN)
@pytest.mark.covering(together=1)
def test_no_trace_of(other: Other, world_size: int) -> None:
    """Not one bit of factors or gradients changes."""
    if world_size == 1:
        pairs = [(train_with(0, 1, other), train_with(0, 1, None))]
    else:
        alone = run_ranks(train_with, 2, None)
        pairs = list(zip(run_ranks(train_with, 2, other), alone, strict=True))
    for with_other, without in pairs:
        for got, want in zip(with_other, without, strict=True):
            for kind in want:
                assert got[kind].keys() == want[kind].keys()
                for name, tensor in want[kind].items():
                    assert torch.equal(got[kind][name], tensor), f"{kind} of {name}"


@pytest.mark.parametrize("other", [forward_without_grad, inference])
def test_no_trace_of_another_thread_within_a_backward_pass(other: Other) -> None:
    """An actor or an evaluation may call the model while it learns."""

    def act(gradient: Tensor) -> None:
        thread = threading.Thread(target=other, args=(model, x))
        thread.start()
        thread.join()

    results = []
    for acts in (False, True):
        model, x = Case(CalledTwice).build(), vectors(0)
        preconditioner = precondition(model)
        hidden = model.get_submodule("first")(x)
        if acts:
            hidden.register_hook(act)
        softplus(model.get_submodule("last")(hidden.tanh())).backward()
        preconditioner.step()
        results.append(snapshot(model, preconditioner))
    for kind, tensors in results[0].items():
        for name, tensor in tensors.items():
            assert torch.equal(results[1][kind][name], tensor), f"{kind} of {name}"


@pytest.mark.parametrize("other", BETWEEN)
def test_no_trace_off_the_interval(other: Other) -> None:
    """The same where most steps take no statistics."""
    with_other = train_with(0, 1, other, statistics_every=2)
    for got, want in zip(with_other, train_with(0, 1, None, statistics_every=2), strict=True):
        for kind in want:
            for name, tensor in want[kind].items():
                assert torch.equal(got[kind][name], tensor), f"{kind} of {name}"


def test_backward_that_failed_halfway_does_not_join_the_next() -> None:
    """What it had added stays a pass of its own: the passes after it are numbered on."""
    model = Case(CalledTwice).build()
    preconditioner = precondition(model)
    hidden = model.first(vectors(0))
    hidden.register_hook(_refuse)
    with pytest.raises(ArithmeticError):
        softplus(model.last(hidden)).backward()
    softplus(model(vectors(1))).backward()
    assert preconditioner.curvature.capture.calls.count == 2
