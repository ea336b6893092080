"""Precision, compilers, streams, memory and waiting on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe import Preconditioner
from soframe.kernels.precision import Precision, multiply, within
from soframe.solvers import Basis
from tests.gpu.kit import DEVICE, NEEDS_GPU, batch_on, counted_waits, model_on, train
from tests.robustness.test_queued_flags import outcome, same

pytestmark = [
    NEEDS_GPU,
    # The compiler's own look at a frame's arguments.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]
COMMON: dict[str, Any] = {"layers": "all"}
WAITS = {
    "kfac": {"method": "kfac", "solver": "eigen"},
    "kfac, inverse": {"method": "kfac", "solver": "inverse"},
    "ekfac": {"method": "ekfac"},
    "shampoo": {"method": "shampoo"},
    "soap": {"method": "soap"},
    "soap-muon": {"method": "soap-muon"},
    "muon": {"method": "muon"},
    "adamw": {"method": "adamw"},
}


@pytest.mark.parametrize("model", ["images", "tokens"])
@pytest.mark.parametrize("method", WAITS)
def test_waits(method: str, model: str) -> None:
    """Between solves the host waits for gradients, for statistics, and for what ranks agree on."""
    net = model_on(DEVICE, model).float()
    settings = {"statistics_every": 2, "solve_every": 6, **WAITS[method]}
    optimizer = soframe.Optimizer(net, lr=0.01, **COMMON, **settings)
    counts = {}
    for step in range(12):
        inputs, targets = batch_on(DEVICE, model, step)
        inputs = inputs.float() if inputs.is_floating_point() else inputs
        with counted_waits() as passes:
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(inputs), targets).backward()
        with counted_waits() as waits:
            optimizer.step()
        counts[step] = (passes, waits)
    unique = method == "ekfac" and model == "tokens"  # which rows of an embedding were seen
    # The flags of plain steps are read a step later; Shampoo and SOAP have statistics in all steps.
    free = method in ("kfac", "kfac, inverse", "muon", "adamw")
    for step in range(7, 12):
        passes, waits = counts[step]
        assert unique or not passes, (step, passes)
        assert len(waits) <= (0 if free and step % 2 else 2), (step, waits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("method", ["adamw", "muon", "kfac"])
def test_flags_that_are_read_a_step_later(method: str, dtype: torch.dtype) -> None:
    bad = {2: math.nan, 5: math.inf, 8: -math.inf, 10: math.nan}
    settings = {"weight_decay": 0.1, "statistics_every": 4, "solve_every": 4}
    late, plain = (
        outcome(0, 1, queued, method, settings, bad, dtype, steps=12, device=DEVICE)
        for queued in (True, False)
    )
    assert late.reads.next > 0
    same(late, plain, skipped=4)


@pytest.mark.parametrize("method", ["kfac", "soap", "muon"])
def test_memory_does_not_grow(method: str) -> None:
    if DEVICE.type != "cuda":
        pytest.skip("memory of a GPU")
    net = model_on(DEVICE, "tokens")
    optimizer = soframe.Optimizer(net, method, lr=0.01, solve_every=2, background=1, **COMMON)
    used = []
    for step in range(60):
        inputs, targets = batch_on(DEVICE, "tokens", step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
        if step % 20 == 19:
            torch.cuda.synchronize()
            used.append(torch.cuda.memory_allocated())
    assert max(used) - min(used) < 100_000, used


def moved_under(
    dtype: torch.dtype | None, skip: set[int], method: str
) -> tuple[Tensor, set[int], Any]:
    """How far weights move under autocast and loss scaling, and the steps that were stepped over.

    Args:
        dtype: Of autocast; None for neither.
        skip: Steps to leave out, without autocast.
        method: The method.
    """
    net = model_on(DEVICE, "tokens").float()
    begun = nn.utils.parameters_to_vector(net.parameters()).detach().clone()
    scaler = torch.amp.GradScaler(
        DEVICE.type,
        init_scale=2.0**24 if dtype == torch.float16 else 1.0,
        enabled=dtype is not None,
    )
    sgd = torch.optim.SGD(net.parameters(), lr=0.02)
    own = Preconditioner(
        net,
        method,
        optimizer=sgd,
        grad_scaler=scaler if dtype is not None else None,
        damping=0.1,
        statistics_every=1,
        solve_every=2,
        **COMMON,
    )
    over = set()
    for step in range(16):
        if step in skip:
            continue
        inputs, targets = batch_on(DEVICE, "tokens", step)
        sgd.zero_grad()
        with torch.autocast(DEVICE.type, dtype, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(net(inputs), targets)
        scale = scaler.get_scale()
        scaler.scale(loss).backward()
        scaler.unscale_(sgd)
        own.step()
        scaler.step(sgd)
        scaler.update()
        if scaler.get_scale() < scale:
            over.add(step)
    return nn.utils.parameters_to_vector(net.parameters()).detach() - begun, over, own.counters


@pytest.mark.parametrize("method", ["kfac", "kfac-reduce"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_loss_scaling(dtype: torch.dtype, method: str) -> None:
    """Weights go where those of single precision go; steps that overflow are left out by both."""
    found, over, counters = moved_under(dtype, set(), method)
    expected, _, _ = moved_under(None, over, method)
    assert bool(over) == (dtype == torch.float16)
    assert len(over) < 12
    assert counters["skipped_updates"] == len(over)
    distance = (found - expected).norm() / expected.norm()
    assert distance < 0.1, float(distance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_under_autocast_are_those_of_the_rounded_numbers(dtype: torch.dtype) -> None:
    """On tensor cores, from rows of half precision, and in single precision all the same."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 300), nn.Tanh(), nn.Linear(300, 200)).to(DEVICE)
    own = Preconditioner(net, lr=0.1, statistics_every=1, solve_every=1, grad_scaler=lambda: 1.0)
    seen: dict[str, Tensor] = {}
    net[2].register_forward_pre_hook(lambda _, args: seen.update(A=args[0].detach()))
    inputs = torch.randn(4096, 64, device=DEVICE)
    with torch.autocast(DEVICE.type, dtype):
        output = net(inputs)
    output.register_hook(lambda gradient: seen.update(G=gradient.detach()))
    output.float().square().sum(1).mean().backward()
    own.step()
    running = next(b for b in own.blocks if b.name == "2").running
    for name, rows in seen.items():
        assert rows.dtype == dtype
        exact = rows.double() * (len(rows) if name == "G" else 1)
        expected = (exact.T @ exact / len(exact)).tril()
        size = len(expected)
        error = (running[name][0].double().tril()[:size, :size] - expected).norm() / expected.norm()
        assert error < 1e-5, (name, float(error))


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("kernel", [1, 3, 7])
def test_convolutions_under_autocast(kernel: int, last: bool) -> None:
    """The factors of what autocast left in half precision, against a float64 sum of patches."""
    torch.manual_seed(0)
    form = torch.channels_last if last else torch.contiguous_format
    net = nn.Conv2d(24, 40, kernel, padding=kernel // 2, bias=False).to(DEVICE, memory_format=form)
    full = soframe.Statistics(precision="full")
    every = {"statistics_every": 1, "solve_every": 1}
    own = Preconditioner(nn.Sequential(net), lr=0.1, statistics=full, **every)
    x = torch.randn(16, 24, 20, 20, device=DEVICE).bfloat16().to(memory_format=form)
    seen: dict[str, Tensor] = {}
    with torch.autocast(DEVICE.type, torch.bfloat16):
        output = net(x)
    output.register_hook(lambda gradient: seen.update(G=gradient.detach()))
    output.float().square().sum((1, 2, 3)).mean().backward()
    own.step()
    running = next(iter(own.blocks)).running
    helper = next(iter(own.blocks)).helpers[0]
    rows = helper.input_rows(x.double())[0].flatten(0, 1)
    gradients = helper.output_rows(seen["G"].double() * len(x))[0].flatten(0, 1)
    for name, each, count in (("A", rows, len(rows)), ("G", gradients, len(gradients))):
        expected = (each.T @ each).tril()
        found = running[name][0].double().tril()
        ratio = expected.norm() / found.norm()  # whatever the factor is a mean over
        error = (found * ratio - expected).norm() / expected.norm()
        assert error < 1e-5, (name, count, float(error))


@pytest.mark.parametrize("how", ["fused", "capturable", "foreach"])
def test_first_order_optimizers(how: str) -> None:
    """As torch's optimizers run on a GPU, their steps are those of a plain loop over parameters."""
    if how == "capturable" and DEVICE.type != "cuda":
        pytest.skip("torch refuses it elsewhere")

    def make(**settings: Any) -> Any:
        def build(net: nn.Module) -> Any:
            adam = torch.optim.AdamW(net.parameters(), lr=0.01, **settings)
            return Preconditioner(net, optimizer=adam, statistics_every=1, **COMMON), adam

        return build

    plain, other = (train(DEVICE, "tokens", make(**s)) for s in ({"foreach": False}, {how: True}))
    for key, weight in plain.weights.items():
        torch.testing.assert_close(other.weights[key], weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled(mode: str) -> None:
    """With CUDA graphs, too, whose tensors are written over by the next replay."""

    def run(compiled: bool) -> list[Tensor]:
        torch._dynamo.reset()
        net = model_on(DEVICE, "images").float()
        sgd = torch.optim.SGD(net.parameters(), lr=0.05)
        own = Preconditioner(net, optimizer=sgd, statistics_every=1, solve_every=2)
        forward: Any = torch.compile(net, mode=mode) if compiled else net
        for step in range(6):
            inputs, targets = batch_on(DEVICE, "images", step)
            sgd.zero_grad(set_to_none=True)
            nn.functional.cross_entropy(forward(inputs.float()), targets).backward()
            own.step()
            sgd.step()
        return [p.detach().cpu() for p in net.parameters()]

    for one, two in zip(run(False), run(True), strict=True):
        torch.testing.assert_close(two, one, rtol=2e-3, atol=2e-4)


def test_a_graph_of_a_whole_step_is_refused() -> None:
    """By name, and training goes on; a graph of the passes alone is for the step to follow."""
    if DEVICE.type != "cuda":
        pytest.skip("CUDA graphs")
    net = model_on(DEVICE, "dense").float()
    sgd = torch.optim.SGD(net.parameters(), lr=0.05)
    own = Preconditioner(net, optimizer=sgd, statistics_every=1, solve_every=2)
    inputs, targets = batch_on(DEVICE, "dense", 0)

    def step() -> None:
        sgd.zero_grad(set_to_none=False)
        nn.functional.cross_entropy(net(inputs.float()), targets).backward()
        own.step()
        sgd.step()

    step()
    torch.cuda.synchronize()
    with (
        pytest.raises(RuntimeError, match="cannot be captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        own.step()
    step()
    assert all(p.isfinite().all() for p in net.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_muon_in_bfloat16_is_near_float32(dtype: torch.dtype) -> None:
    from soframe.methods.orthogonal import nearest_orthogonal

    matrix = torch.randn(1, 256, 384, device=DEVICE)
    exact = nearest_orthogonal(matrix.double().cpu(), kind="muon", steps=5, dtype=torch.float64)
    found = nearest_orthogonal(matrix, kind="muon", steps=5, dtype=dtype)
    distance = (found.double().cpu() - exact).norm() / exact.norm()
    assert distance < (1e-3 if dtype == torch.float32 else 0.05), distance


@pytest.mark.parametrize("precision", ["full", "fast"])
@pytest.mark.parametrize("solver", ["inverse", "eigen", "newton-schulz", "orthogonal-iteration"])
def test_precision_of_products(solver: str, precision: Precision) -> None:
    """In TensorFloat-32 or not: how far directions are from float64's."""
    directions = []
    for dtype in (torch.float64, torch.float32):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 10)).to(DEVICE, dtype)
        own = Preconditioner(
            net,
            solver=solver,
            statistics_every=1,
            solve_every=1,
            kl_clip=None,
            statistics=soframe.Statistics(precision=precision),
        )
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(256, 64, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
        targets = torch.arange(256, device=DEVICE) % 10
        nn.functional.cross_entropy(net(inputs), targets).backward()
        own.step()
        directions.append(torch.cat([p.grad.double().cpu().flatten() for p in net.parameters()]))
    distance = (directions[1] - directions[0]).norm() / directions[0].norm()
    assert distance < (1e-3 if precision == "full" else 0.1), distance


def test_products_and_bases_in_full_under_tensor_float() -> None:
    """Whatever torch's setting is, as on a processor."""
    left, right = torch.randn(2, 300, 200), torch.randn(2, 200, 300)
    factor = left.double() @ left.double().mT + torch.eye(300)
    last = {"vectors": torch.linalg.qr(torch.randn(2, 300, 300))[0]}
    expected = left.double() @ right.double()
    with within("fast"):
        found = multiply(left.to(DEVICE), right.to(DEVICE)).double().cpu()
        bases = Basis().solve_again(
            factor.float().to(DEVICE),
            torch.zeros(2, device=DEVICE),
            {name: tensor.to(DEVICE) for name, tensor in last.items()},
        )
    assert (found - expected).abs().amax() < 1e-6 * expected.abs().amax()
    vectors = bases["vectors"].double().cpu()
    torch.testing.assert_close(
        vectors.mT @ vectors, torch.eye(300).double().repeat(2, 1, 1), rtol=0, atol=1e-5
    )
    exact = Basis().solve_again(
        factor, torch.zeros(2).double(), {"vectors": last["vectors"].double()}
    )
    assert torch.equal(bases["order"].double().cpu(), exact["order"])
    assert ((vectors * exact["vectors"]).sum(-2).abs() - 1).abs()[:, :150].amax() < 1e-4


def test_phases_are_timed_on_the_device() -> None:
    """Between events of its stream, so that what the device does is seen."""
    net = model_on(DEVICE, "images").float()
    sgd = torch.optim.SGD(net.parameters(), lr=0.05)
    own = Preconditioner(net, optimizer=sgd, statistics_every=1, solve_every=2)
    own.measure(times=True, norms=True)
    for step in range(4):
        inputs, targets = batch_on(DEVICE, "images", step)
        sgd.zero_grad()
        nn.functional.cross_entropy(net(inputs.float()), targets).backward()
        own.step()
        sgd.step()
    found = own.metrics(spectra=True)
    device = {name: phase["device_seconds"] for name, phase in found["phases"].items()}
    assert (None in device.values()) == (DEVICE.type == "cpu"), device
