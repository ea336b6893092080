"""A loss that is scaled: the scale that is read, and what is refused."""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

from soframe import Optimizer
from tests.capture.kit import Case, precondition, snapshot, softplus, vectors
from tests.capture.test_mixed_precision import CalledTwice, assert_close, unscaled_training
from tests.distributed.harness import run_ranks


def scaler_of(**options: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 2.0**10, **options})


def build(lr: float = 0.2) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Case(CalledTwice).build()
    return model, torch.optim.SGD(model.parameters(), lr=lr)


def backward(model: nn.Module, scale: Any = lambda loss: loss, step: int = 0) -> None:
    scale(softplus(model(vectors(step)))).backward()


# -- a scaler that was given -------------------------------------------------------------------


class Own(torch.amp.GradScaler):
    """A subclass, as ``ShardedGradScaler`` is."""


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("kind", [torch.amp.GradScaler, Own])
@pytest.mark.parametrize("known", [False, True])
def test_unscale_clip_step(known: bool, kind: type[torch.amp.GradScaler], clipped: bool) -> None:
    found = []
    for scaled in (True, False):
        model, optimizer = build()
        scaler = kind("cpu", init_scale=2.0**10, growth_interval=2, enabled=scaled)
        options: Any = {"optimizer": optimizer} if known else {}
        own = precondition(model, grad_scaler=scaler, **options)
        for step in range(4):
            optimizer.zero_grad()
            for number in (0, 1):  # micro-batches
                backward(model, lambda loss: scaler.scale(loss / 2), 2 * step + number)  # noqa: B023
            scaler.unscale_(optimizer)
            if clipped:
                clip_grad_norm_(model.parameters(), 0.01)
            own.step()
            scaler.step(optimizer)
            scaler.update()
        assert not any(own.counters.values())
        found.append(snapshot(model, own))
        own.close()
    assert_close(*found)


@pytest.mark.parametrize("known", [False, True])
def test_gradients_that_are_still_scaled_are_refused(known: bool) -> None:
    model, optimizer = build()
    scaler = scaler_of()
    own = precondition(model, grad_scaler=scaler, **({"optimizer": optimizer} if known else {}))
    for step in range(2):
        backward(model, scaler.scale, step)
        gradients = [p.grad.clone() for p in model.parameters()]
        message = "still scaled: call" if known else r"still scaled.* pass optimizer= as well"
        with pytest.raises(RuntimeError, match=message):
            own.step()
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert torch.equal(parameter.grad, gradient)
        scaler.unscale_(optimizer)
        own.step()
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match=r"came after scaler\.step" if known else "still"):
            own.step()
        scaler.update()
        own.reset_batch()
        optimizer.zero_grad()


def test_a_wrapped_optimizer_is_the_one_within() -> None:
    class Wrapped(torch.optim.Optimizer):
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optimizer = optimizer

        @property
        def param_groups(self) -> Any:  # type: ignore[override]
            return self.optimizer.param_groups

    model, optimizer = build()
    scaler = scaler_of()
    own = precondition(model, grad_scaler=scaler, optimizer=Wrapped(optimizer))
    backward(model, scaler.scale)
    with pytest.raises(RuntimeError, match="still scaled"):
        own.step()
    scaler.unscale_(optimizer)
    own.step()
    assert_close(snapshot(model, own), unscaled_training(0, 1, (0,))[0])


def test_a_scaler_that_has_scaled_nothing() -> None:
    model, optimizer = build()
    own = precondition(model, grad_scaler=scaler_of(), optimizer=optimizer)
    backward(model)
    with pytest.raises(RuntimeError, match=r"has not scaled the loss: call scaler\.scale\(loss\)"):
        own.step()


@pytest.mark.parametrize("scaling", ["fisher", "kaisa"])
@pytest.mark.parametrize("later", [False, True])
def test_probes_are_not_scaled(later: bool, scaling: str) -> None:
    """They come before the loss, and before a scaler makes its scale."""
    found = []
    for scaled in (True, False):
        model, optimizer = build()
        scaler = scaler_of(enabled=scaled)
        options: Any = {"grad_scaler": (lambda: scaler) if later else scaler, "scaling": scaling}  # noqa: B023
        own = precondition(model, fisher="type-2", loss="squared-error", **options)
        for step in range(2):
            optimizer.zero_grad()
            output = model(vectors(step))
            own.observe(output)
            scaler.scale(softplus(output)).backward()
            if scaled and step:
                with pytest.raises(RuntimeError, match="the gradients are still scaled"):
                    own.step()
                own.observe(model(vectors(step)))
            scaler.unscale_(optimizer)
            own.step()
            scaler.step(optimizer)
            scaler.update()
        found.append(snapshot(model, own))
        own.close()
    assert_close(*found)


def test_a_scale_that_changes_within_a_window_is_refused() -> None:
    model, optimizer = build()
    scaler = scaler_of(growth_interval=1)
    own = precondition(model, grad_scaler=scaler, optimizer=optimizer)
    backward(model, scaler.scale)
    scaler.step(optimizer)
    scaler.update()
    backward(model, scaler.scale)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"changed from 1024\.0 to 2048\.0.*zero the gradients"):
        own.step()
    assert not own.blocks[0].running
    scaler.update()
    optimizer.zero_grad()
    backward(model, scaler.scale)
    scaler.unscale_(optimizer)
    own.step()


def test_an_overflow_still_costs_one_update() -> None:
    model, optimizer = build()
    scaler = scaler_of()
    own = precondition(model, grad_scaler=scaler)
    backward(model, lambda loss: scaler.scale(loss * math.inf))
    scaler.unscale_(optimizer)
    own.step()
    assert own.counters["skipped_updates"] == own.counters["skipped_statistics"] == 1


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("by_optimizer", [True, False])
def test_an_optimizer_that_its_scaler_does_not_let_step(by_optimizer: bool, late: bool) -> None:
    """Twice at the start and once later; what overflowed leaves no trace."""
    overflows, found = (0, 1, 4), []
    for scaled in (True, False):
        model = Case(CalledTwice).build()
        scaler = scaler_of(enabled=scaled)
        own = Optimizer(model, "kfac", lr=0.1, grad_scaler=(lambda: scaler) if late else scaler)  # noqa: B023
        for step in range(6):
            if not scaled and step in overflows:
                continue
            (own if by_optimizer else model).zero_grad()
            for number in (0, 1):
                backward(model, lambda loss: scaler.scale(loss / 2), 2 * step + number)  # noqa: B023
            if step in overflows:
                next(model.parameters()).grad.view(-1)[0] = math.inf
            scaler.step(own)
            scaler.update()
        assert own.preconditioner.steps == 3
        assert not any(own.preconditioner.counters.values())
        found.append(snapshot(model, own.preconditioner))
        own.close()
    assert_close(*found)


def test_a_scale_is_read_once_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """To read it makes the host wait for the device."""
    model, optimizer = build()
    scaler = scaler_of()
    own = precondition(model, grad_scaler=scaler, optimizer=optimizer)
    reads = []
    get = scaler.get_scale
    monkeypatch.setattr(scaler, "get_scale", lambda: reads.append(1) or get())
    for step in range(3):
        optimizer.zero_grad()
        for number in range(3):
            backward(model, scaler.scale, number)
        scaler.unscale_(optimizer)
        own.step()
        scaler.step(optimizer)
        scaler.update()
        assert len(reads) == step + 1


# -- a callable --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scale", [-1, -1.0, 0, 0.0, math.inf, -math.inf, math.nan, "2", None, True, 1e-200, 10**400]
)
def test_a_scale_that_is_none_is_an_error_at_the_step(scale: Any) -> None:
    scales = [scale]
    model, _ = build()
    own = precondition(model, grad_scaler=lambda: scales[0])
    backward(model)
    gradients = [p.grad.clone() for p in model.parameters()]
    message = r"grad_scaler\(\) must be a positive, finite number"
    with pytest.raises(ValueError, match=message):
        own.step()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    # Whoever goes on without giving the batch up loses its statistics, and no more.
    own.step()
    assert own.counters["skipped_statistics"] == 1
    scales[0] = 1.0
    model.zero_grad()
    backward(model)
    own.step()
    assert_close(snapshot(model, own), unscaled_training(0, 1, (0,))[0])


@pytest.mark.parametrize("scale", [64, 64.0, torch.tensor(64.0)])
def test_scales_of_any_kind_of_number(scale: Any) -> None:
    model, _ = build()
    own = precondition(model, grad_scaler=lambda: scale)
    backward(model, lambda loss: 64 * loss)
    for parameter in model.parameters():
        parameter.grad /= 64
    own.step()
    assert_close(snapshot(model, own), unscaled_training(0, 1, (0,))[0])


def test_each_pass_has_the_scale_of_then() -> None:
    """Gradients are unscaled by hand, pass by pass."""
    now = [1.0]
    found = []
    for scales in ((4.0, 32.0), (1.0, 1.0)):
        model, _ = build()
        own = precondition(model, grad_scaler=lambda: now[0])
        total = [torch.zeros_like(p) for p in model.parameters()]
        for number, scale in enumerate(scales):
            now[0] = scale
            model.zero_grad()
            backward(model, lambda loss: loss * scale / 2, number)  # noqa: B023
            for one, parameter in zip(total, model.parameters(), strict=True):
                one.add_(parameter.grad / scale)
        for one, parameter in zip(total, model.parameters(), strict=True):
            parameter.grad.copy_(one)
        own.step()
        found.append(snapshot(model, own))
        own.close()
    assert_close(*found)


def raising() -> float:
    raise KeyError("no scale")


def test_what_a_callable_raises_is_raised_at_the_step() -> None:
    model, _ = build()
    own = precondition(model, grad_scaler=raising)
    backward(model)
    with pytest.raises(KeyError, match="no scale"):
        own.step()


@pytest.mark.parametrize("wrong", [5, "scaler", 2.0**16, [1.0]])
def test_what_is_no_scaler_is_refused(wrong: Any) -> None:
    with pytest.raises(
        TypeError, match=r"grad_scaler must be a torch\.amp\.GradScaler, a callable"
    ):
        precondition(build()[0], grad_scaler=wrong)


def scale_of_one(rank: int, world_size: int, what: str) -> str:
    model, optimizer = build()
    odd = rank == 1
    scaler = scaler_of()
    if what == "not unscaled":
        own = precondition(model, grad_scaler=scaler, optimizer=optimizer)
    else:
        own = precondition(model, grad_scaler=lambda: 0.0 if odd else 1.0)
    backward(model, scaler.scale if what == "not unscaled" else lambda loss: loss)
    if what == "not unscaled" and not odd:
        scaler.unscale_(optimizer)
    try:
        own.step()
    except (RuntimeError, ValueError) as error:
        dist.barrier()
        return f"{type(error).__name__}: {error}"
    return "no error"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("what", "message"),
    [("not unscaled", "RuntimeError: the gradients are"), ("zero", "ValueError: grad_scaler()")],
)
def test_an_error_of_one_rank_is_one_of_all(what: str, message: str) -> None:
    first, second = run_ranks(scale_of_one, 2, what)
    assert second.startswith(message), second
    assert first.startswith("RuntimeError: another rank cannot take this step"), first
    assert f"rank 1: {message}" in first


# -- a scaler that was not given ---------------------------------------------------------------


def test_float16_autocast_without_a_scaler_is_refused() -> None:
    """Not one that has bfloat16, nor one that says that its loss is not scaled."""
    for dtype, options in (
        (torch.float16, {}),
        (torch.bfloat16, {}),
        (torch.float16, {"grad_scaler": lambda: 1.0}),
    ):
        model = nn.Linear(3, 2)
        own: Any = precondition(model, **options)
        with torch.autocast("cpu", dtype):
            loss = softplus(model(torch.ones(4, 3)))
        loss.backward()
        if options or dtype is torch.bfloat16:
            own.step()
        else:
            with pytest.raises(RuntimeError, match=r"float16 autocast.*Pass grad_scaler=scaler"):
                own.step()
        own.close()


def gradients_over_ranks(rank: int, world_size: int, *, summed: bool) -> dict[str, Any]:
    """A step with gradients that are averaged over ranks, or added up of a divided loss."""
    model, _ = build()
    options: dict[str, Any] = {"grad_scaler": lambda: 1 / world_size} if summed else {}
    own = precondition(model, **options)
    loss = softplus(model(vectors(0).chunk(world_size)[rank]))
    if summed:
        loss = loss / world_size
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if not summed:
            parameter.grad /= world_size  # type: ignore[operator]
    own.step()
    return snapshot(model, own)


@pytest.mark.distributed
def test_gradients_that_are_added_up_over_ranks_are_of_a_scaled_loss() -> None:
    averaged, *_ = run_ranks(functools.partial(gradients_over_ranks, summed=False), 2)
    summed, *_ = run_ranks(functools.partial(gradients_over_ranks, summed=True), 2)
    assert_close(summed, averaged)
