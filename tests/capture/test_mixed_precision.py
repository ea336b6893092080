"""Autocast and loss scaling: factors in float32, right to the precision of the activations."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from soframe import Preconditioner
from soframe.kernels import devices, halves
from soframe.layers import conv
from soframe.layers.linear import LinearHelper
from soframe.testing import compare
from tests.capture.kit import (
    WORLDS,
    CalledTwice,
    Case,
    check,
    precondition,
    sequences,
    snapshot,
    softplus,
    vectors,
)
from tests.distributed.harness import run_ranks


def autocast(dtype: torch.dtype, model: nn.Module, x: Tensor, step: int) -> None:
    with torch.autocast("cpu", dtype=dtype):
        output = model(x)
        assert output.dtype == dtype
        loss = softplus(output.float())
    loss.backward()


def autocast_around_backward(dtype: torch.dtype, model: nn.Module, x: Tensor, step: int) -> None:
    with torch.autocast("cpu", dtype=dtype):
        softplus(model(x)).backward()


def low(dtype: torch.dtype, train: Any = autocast, **options: Any) -> Case:
    tolerance = {torch.bfloat16: 6e-2, torch.float16: 8e-3}[dtype]
    return Case(
        CalledTwice, train=partial(train, dtype), dtype=torch.float32, rtol=tolerance, **options
    )


def unscaled() -> float:
    return 1.0


CASES = {
    "bfloat16": low(torch.bfloat16),
    "float16": low(torch.float16, options={"grad_scaler": unscaled}),
    "bfloat16 sequences": low(torch.bfloat16, data=sequences),
    "backward within autocast": low(torch.bfloat16, autocast_around_backward),
    "float32": Case(CalledTwice, dtype=torch.float32),
    "float32 model, float64 factors": Case(
        CalledTwice, dtype=torch.float32, options={"dtype": torch.float64}, rtol=1e-6
    ),
    "bfloat16 model": Case(CalledTwice, dtype=torch.bfloat16, rtol=8e-2),
}


@pytest.mark.parametrize("world_size", WORLDS)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.covering(together=1)
def test_precision(name: str, world_size: int) -> None:
    check(CASES[name], world_size)


@pytest.mark.parametrize(
    ("model", "autocast_dtype", "wanted", "factors"),
    [
        (torch.float32, torch.bfloat16, None, torch.float32),
        (torch.float32, torch.float16, None, torch.float32),
        (torch.bfloat16, None, None, torch.float32),
        (torch.float16, None, None, torch.float32),
        (torch.float64, None, None, torch.float64),
        (torch.float32, torch.bfloat16, torch.float64, torch.float64),
        (torch.float64, None, torch.float32, torch.float32),
    ],
)
def test_dtype_of_factors(
    model: torch.dtype,
    autocast_dtype: torch.dtype | None,
    wanted: torch.dtype | None,
    factors: torch.dtype,
) -> None:
    network = CalledTwice().to(model)
    preconditioner = precondition(network, dtype=wanted, grad_scaler=lambda: 1.0)
    x = vectors(0).to(model)
    if autocast_dtype is None:
        softplus(network(x)).backward()
    else:
        autocast(autocast_dtype, network, x, 0)
    preconditioner.step()
    for block in preconditioner.blocks:
        tensors = [
            *block.running.values(),
            *(t for d in block.second_order.values() for t in d.values()),
        ]
        assert {tensor.dtype for tensor in tensors} == {factors}
    assert {p.grad.dtype for p in network.parameters()} == {model}


def test_factors_are_as_precise_as_their_dtype() -> None:
    """Sums of rounded activations are not rounded again: far closer than one bfloat16 sum."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 2)
    preconditioner = precondition(layer)
    x = torch.randn(512, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(x)
    output.float().square().sum(1).mean().backward()
    preconditioner.step()
    rows = torch.cat([x.double(), torch.ones(512, 1, dtype=torch.float64)], 1)
    compare(preconditioner.blocks[0].running["A"][0], rows.T @ rows / 512, "A", rtol=1e-5)
    gradients = (2 * output.double() / 512).bfloat16().double() * 512
    expected = gradients.T @ gradients / 512
    compare(preconditioner.blocks[0].running["G"][0], expected, "G", rtol=1e-5)


def test_statistics_are_not_taken_in_the_autocast_of_a_backward_pass() -> None:
    x = torch.randn(6, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    found = []
    for inside in (True, False):
        torch.manual_seed(0)
        layer = nn.Conv2d(3, 4, 3, bias=False)
        preconditioner = precondition(layer)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = layer(x).float().square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        preconditioner.step()
        found.append(preconditioner.blocks[0].running)
    for name, factor in found[1].items():
        compare(found[0][name], factor, name, rtol=1e-5)


# -- GradScaler --------------------------------------------------------------------------------


def scaled_training(rank: int, world_size: int, overflow: bool, ddp: bool) -> dict[str, Any]:
    """Three steps under a GradScaler; in the second, one rank's loss is infinite if asked for.

    Without DistributedDataParallel the infinity stays on that rank: the gradients are averaged by
    hand after the preconditioner, which has to tell the others.
    """
    model = Case(CalledTwice).build()
    wrapped = DistributedDataParallel(model) if ddp else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    preconditioner = precondition(wrapped, optimizer=optimizer, grad_scaler=scaler)
    factors, weights, scales = [], [], []
    for step in range(3):
        optimizer.zero_grad()
        x = vectors(0 if overflow and step == 2 else step).chunk(world_size)[rank]
        loss = softplus(wrapped(x))
        if overflow and step == 1 and rank == world_size - 1:
            loss = loss * math.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        preconditioner.step()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        factors.append(snapshot(model, preconditioner))
        weights.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return {
        "factors": factors,
        "weights": weights,
        "scales": scales,
        "counters": dict(preconditioner.counters),
    }


def unscaled_training(rank: int, world_size: int, steps: tuple[int, ...]) -> list[Any]:
    model = Case(CalledTwice).build()
    wrapped = DistributedDataParallel(model) if world_size > 1 else model
    preconditioner = precondition(wrapped)
    results = []
    for step in steps:
        model.zero_grad()
        softplus(wrapped(vectors(step).chunk(world_size)[rank])).backward()
        preconditioner.step()
        results.append(snapshot(model, preconditioner))
        torch.optim.SGD(model.parameters(), lr=0.2).step()
    return results


def assert_close(got: Any, want: Any) -> None:
    for kind in want:
        for name, tensor in want[kind].items():
            compare(got[kind][name], tensor, f"{kind} of {name}")


@pytest.mark.parametrize("world_size", WORLDS)
def test_scaled_loss(world_size: int) -> None:
    """The scale, which grows within the run, leaves no trace in factors and gradients."""
    plain = unscaled_training(0, 1, (0, 1, 2))
    if world_size == 1:
        ranks = [scaled_training(0, 1, False, False)]
    else:
        ranks = run_ranks(scaled_training, 2, False, True)
    for result in ranks:
        assert result["scales"] == [2.0**10, 2.0**11, 2.0**11]
        assert not any(result["counters"].values())
        for got, want in zip(result["factors"], plain, strict=True):
            assert_close(got, want)


@pytest.mark.parametrize("world_size", WORLDS)
def test_overflow_costs_one_update(world_size: int) -> None:
    """The step is skipped on every rank, and counted; factors and weights are as before it."""
    if world_size == 1:
        ranks = [scaled_training(0, 1, True, False)]
    else:
        ranks = run_ranks(scaled_training, 2, True, True)
    plain = unscaled_training(0, 1, (0, 0))
    for result in ranks:
        counters = result["counters"]
        assert counters["skipped_updates"] == counters["skipped_statistics"] == 1
        assert counters["failed_solves"] == counters["retried_solves"] == 0
        weights, factors = result["weights"], result["factors"]
        for name, weight in weights[0].items():
            assert torch.equal(weights[1][name], weight)
        for kind in "AG":
            for block, factor in factors[0][kind].items():
                assert torch.equal(factors[1][kind][block], factor)
        assert_close(factors[2], plain[1])


def lone_overflow(rank: int, world_size: int) -> dict[str, Any]:
    """Only rank 1 overflows, and nothing but the preconditioner tells rank 0.

    The gradients are averaged by hand, before the second step only.
    """
    model = Case(CalledTwice).build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    preconditioner = precondition(model, optimizer=optimizer, grad_scaler=scaler)
    before = [p.detach().clone() for p in model.parameters()]
    x = vectors(0).chunk(world_size)[rank]
    loss = softplus(model(x))
    scaler.scale(loss * (math.inf if rank == 1 else 1.0)).backward()
    scaler.unscale_(optimizer)
    preconditioner.step()
    scaler.step(optimizer)
    scaler.update()
    same = [torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)]
    gathered = [bool(b.running) for b in preconditioner.blocks]
    optimizer.zero_grad()
    scaler.scale(softplus(model(x))).backward()
    scaler.unscale_(optimizer)
    for parameter in model.parameters():
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= world_size
    preconditioner.step()
    return {
        "scale": scaler.get_scale(),
        "same": same,
        "gathered": gathered,
        "counters": dict(preconditioner.counters),
        "after": snapshot(model, preconditioner),
    }


@pytest.mark.distributed
def test_ranks_agree_on_an_overflow_of_one() -> None:
    results = run_ranks(lone_overflow, 2)
    # Each rank's own scaler backs off by itself, so the ranks' scales differ from now on.
    assert [result["scale"] for result in results] == [2.0**10, 2.0**9]
    for result in results:
        assert all(result["same"])
        assert not any(result["gathered"])
        assert result["counters"]["skipped_updates"] == 1
        assert result["counters"]["skipped_statistics"] == 1
        (plain,) = unscaled_training(0, 1, (0,))
        assert_close(result["after"], plain)


def lone_infinite_statistics(rank: int, world_size: int) -> Any:
    """Rank 1's gradients are finite, its factor G is not in float32."""
    model = nn.Linear(3, 2)
    preconditioner = precondition(model)
    loss = model(vectors(rank).float()).sum() * (1e25 if rank == 1 else 1.0)
    loss.backward()
    gradient = model.weight.grad.clone()
    preconditioner.step()
    return (
        dict(preconditioner.counters),
        bool(preconditioner.blocks[0].running),
        torch.equal(model.weight.grad, gradient),
    )


@pytest.mark.distributed
def test_ranks_agree_on_statistics_of_one_that_are_not_finite() -> None:
    """The statistics are dropped everywhere; the finite gradients are not."""
    for counters, running, untouched in run_ranks(lone_infinite_statistics, 2):
        assert counters["skipped_statistics"] == 1
        assert counters["skipped_updates"] == 0
        assert not running
        assert untouched


def scaled(options: dict[str, Any]) -> tuple[Preconditioner, Any, Any]:
    model = Case(CalledTwice).build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    scaler = torch.amp.GradScaler("cpu", **options)
    preconditioner = precondition(model, optimizer=optimizer, grad_scaler=scaler)
    scaler.scale(softplus(model(vectors(0)))).backward()
    return preconditioner, scaler, optimizer


def test_forgotten_unscale_is_an_error() -> None:
    preconditioner, scaler, optimizer = scaled({})
    model = preconditioner.curvature.parts.model
    gradients = [p.grad.clone() for p in model.parameters()]
    with pytest.raises(RuntimeError, match=r"scaler\.unscale_\(optimizer\)"):
        preconditioner.step()
    for parameter, gradient in zip(
        preconditioner.curvature.parts.model.parameters(), gradients, strict=True
    ):
        assert torch.equal(parameter.grad, gradient)
    scaler.unscale_(optimizer)
    preconditioner.step()
    assert_close(
        snapshot(preconditioner.curvature.parts.model, preconditioner),
        unscaled_training(0, 1, (0,))[0],
    )
    scaler.step(optimizer)
    scaler.update()
    # The scaler begins anew: forgetting it at a later step is seen too.
    with pytest.raises(RuntimeError, match="unscale_"):
        preconditioner.step()


def test_disabled_scaler_needs_no_unscale() -> None:
    preconditioner, _, _ = scaled({"enabled": False})
    preconditioner.step()
    assert_close(
        snapshot(preconditioner.curvature.parts.model, preconditioner),
        unscaled_training(0, 1, (0,))[0],
    )


def test_scale_by_a_callable() -> None:
    """A loss that was multiplied by hand, and whose gradients were divided by hand."""
    model = Case(CalledTwice).build()
    preconditioner = precondition(model, grad_scaler=lambda: 64.0)
    (64 * softplus(model(vectors(0)))).backward()
    for parameter in model.parameters():
        parameter.grad /= 64
    preconditioner.step()
    assert_close(snapshot(model, preconditioner), unscaled_training(0, 1, (0,))[0])


class Halved(nn.Module):
    """Its first layer is called with single precision, the second with what autocast made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 6), nn.Linear(6, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).mT.contiguous().mT.tanh())


class Derived(LinearHelper):
    """Sums in a way of its own, and knows of no half precision."""

    def output_moment(self, output_rows: Tensor, *own: Any, **named: Any) -> Tensor:
        assert output_rows.dtype == torch.float32
        return super().output_moment(output_rows, *own, **named)


@pytest.mark.parametrize("method", ["kfac", "ekfac", "foof", "kfac-reduce", "eva"])
@pytest.mark.parametrize("layers", [None, {"second": Derived}], ids=["plain", "derived"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_half_precision_are_not_copied_on_an_accelerator(
    dtype: torch.dtype, layers: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their products are exact in single precision, so that sums are those of copies."""
    found, multiplied = [], []
    add_inner = halves.add_inner
    monkeypatch.setattr(
        halves, "add_inner", lambda *own: multiplied.append(own[1].dtype) or add_inner(*own)
    )
    for gpu in (False, True):
        monkeypatch.setattr(devices, "on_gpu", lambda _, gpu=gpu: gpu)
        torch.manual_seed(0)
        model = Halved()
        own = Preconditioner(
            model,
            method,
            lr=0.1,
            layers=layers,
            statistics_every=1,
            solve_every=2,
            damping=0.1,
            grad_scaler=lambda: 1.0,
        )
        for step in range(3):
            x = torch.randn(7, 3, 5, generator=torch.Generator().manual_seed(step))
            with torch.autocast("cpu", dtype):
                output = model(x)
            model.zero_grad()
            softplus(output.float()).backward()
            own.step()
            assert bool(multiplied) <= gpu
        sums = {f"{b.name}.{k}": v for b in own.blocks for k, v in b.running.items()}
        assert {v.dtype for v in sums.values()} == {torch.float32}
        found.append(sums | {k: p.grad for k, p in model.named_parameters()})
        own.close()
    # The outputs' of both layers, and the inputs' of the second, at each step.
    of_first, of_second = {"kfac": (1, 2), "ekfac": (1, 2), "foof": (0, 1)}.get(method, (0, 0))
    expected = of_first + (of_second if layers is None else 0)
    assert multiplied == [dtype] * 3 * expected
    for name, one in found[0].items():
        assert one is not None
        compare(found[1][name], one, name, rtol=1e-5)


CONVOLUTIONS: dict[str, Callable[[], nn.Module]] = {
    "rows": lambda: nn.Conv2d(4, 5, 3, padding=1),
    "strided": lambda: nn.Conv2d(4, 5, 3, stride=2, bias=False, padding_mode="circular", padding=2),
    "unfold": lambda: nn.Conv2d(2, 3, 5),
    "pointwise": lambda: nn.Conv2d(4, 6, 1),
    "groups": lambda: nn.Conv2d(4, 6, 3, groups=2),
    "no weight": lambda: nn.Conv2d(4, 5, 3).requires_grad_(False),
}


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_convolutions_in_half_precision_on_an_accelerator(
    name: str, last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By each of its ways the sums are those of copies in single precision."""
    if name not in ("pointwise", "no weight"):
        path = "unfold" if name == "unfold" else "rows"
        monkeypatch.setattr(conv, "choose", lambda *_, gpu: path)
    form = torch.channels_last if last else torch.contiguous_format
    found, multiplied = [], []
    add_inner = halves.add_inner
    monkeypatch.setattr(
        halves, "add_inner", lambda *own: multiplied.append(own[1].dtype) or add_inner(*own)
    )
    torch.manual_seed(0)
    layer = CONVOLUTIONS[name]()
    if name == "no weight":
        layer.bias.requires_grad_()
    for gpu in (False, True):
        monkeypatch.setattr(devices, "on_gpu", lambda _, gpu=gpu: gpu)
        model = nn.Sequential(copy.deepcopy(layer)).to(memory_format=form)
        own = Preconditioner(model, lr=0.1, statistics_every=1, solve_every=1, damping=0.1)
        x = torch.randn(3, layer.in_channels, 9, 8, generator=torch.Generator().manual_seed(1))
        x = x.bfloat16().to(memory_format=form)
        with torch.autocast("cpu", torch.bfloat16):
            output = model(x)
        assert output.dtype == torch.bfloat16
        softplus(output.float()).backward()
        own.step()
        (block,) = own.blocks
        found.append({k: v.tril() for k, v in block.running.items()})
        assert {v.dtype for v in found[-1].values()} == {torch.float32}
        own.close()
        assert bool(multiplied) == (gpu and name != "groups")
    for factor, one in found[0].items():
        compare(found[1][factor], one, factor, rtol=2e-5)
