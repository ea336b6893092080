"""TF32 for statistics and updates, float32 for solves; emulated, since a CPU multiplies in full.

The emulation rounds the operands of products to ten bits of mantissa, as NVIDIA's GPUs do.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from benchmarks.fake_gpu.tensor_float import TensorFloat, gpu_with_tensor_float
from soframe.kernels import devices, precision
from soframe.kernels.precision import multiply, within
from soframe.methods.orthogonal import nearest_orthogonal
from soframe.settings import grouped
from soframe.solvers import Basis, Eigen, NewtonSchulz, OrthogonalIteration, Root, Solver
from tests import kit
from tests.curvature import randn

MATMUL: Any = torch.backends.cuda.matmul


@pytest.fixture
def gpu() -> Iterator[None]:
    """Let soframe see a GPU with TF32, and restore torch's setting."""
    with gpu_with_tensor_float():
        yield


# -- solves in full ---------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["high", "medium"])
def test_products_in_full_on_a_cpu(setting: str) -> None:
    before = torch.get_float32_matmul_precision()
    left, right = randn(2, 30, 40).float(), randn(2, 40, 20).float()
    try:
        torch.set_float32_matmul_precision(setting)
        found = multiply(left, right)
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(found, (left.double() @ right.double()).float())


@pytest.mark.parametrize("size", [1, 7, 64])
def test_products_in_full_of_three_parts(gpu: None, size: int) -> None:
    """Columns of six decades: the error is that of float32, under either setting."""
    left = randn(2, size, 40).float() * torch.logspace(0, -6, 40)
    right = randn(2, 40, size, seed=1).float()
    exact = left.double() @ right.double()
    for setting in ("ieee", "tf32"):
        MATMUL.fp32_precision = setting
        with TensorFloat():
            found, plain = multiply(left, right), left @ right
        bound = 2**-20 * left.double().abs() @ right.double().abs()
        assert ((found.double() - exact).abs() <= bound).all()
        assert setting == "ieee" or not ((plain.double() - exact).abs() <= bound).all()


def test_products_of_many_groups_are_taken_in_parts(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left, right = randn(5, 3, 4).float(), randn(5, 4, 6).float()
    monkeypatch.setattr(devices, "MOST", 2 * 12)
    torch.testing.assert_close(multiply(left, right), left @ right)


def solved(solver: Solver, dtype: torch.dtype) -> dict[str, Tensor]:
    """The data of a factor of four decades from the last solve's, and what follows from them."""
    basis = torch.linalg.qr(randn(2, 40, 40))[0]
    values = torch.logspace(0, -4, 40, dtype=torch.float64)
    last = {
        "vectors": torch.linalg.qr(basis + 1e-3 * randn(2, 40, 40, seed=1))[0].to(dtype),
        "values": torch.ones(2, 40, dtype=dtype),
        "inverse": torch.eye(40, dtype=dtype).repeat(2, 1, 1),
    }
    matrix = ((basis * values) @ basis.mT).to(dtype)
    damping = torch.full((2,), 1e-2, dtype=dtype)
    followed = solver.follow(matrix, last) or {}
    return {**solver.solve_again(matrix, damping, last), **followed}


@pytest.mark.parametrize(
    "solver",
    [
        Basis(),
        OrthogonalIteration(tolerance=10.0),
        Eigen(follows=True),
        Root(epsilon=1e-3),
        NewtonSchulz(),
    ],
    ids=lambda one: type(one).__name__,
)
def test_solves_in_full_whatever_the_setting(gpu: None, solver: Solver) -> None:
    """The order of a basis, Rayleigh quotients, powers and inverses, as float64 has them."""
    MATMUL.fp32_precision = "tf32"
    with TensorFloat():
        found = solved(solver, torch.float32)
    expected = solved(solver, torch.float64)
    for name in found.keys() & {"order"}:
        assert torch.equal(found[name].double(), expected[name])
    for name in found.keys() - {"order", "vectors"}:
        scale = expected[name].abs().amax()
        torch.testing.assert_close(
            found[name].double(), expected[name], rtol=1e-4, atol=3e-6 * float(scale)
        )


@pytest.mark.parametrize("solver", [Basis(), OrthogonalIteration(tolerance=10.0)], ids=repr)
def test_the_order_of_a_basis(gpu: None, solver: Solver) -> None:
    """A spectrum of six decades over 48 columns, of which the last basis has a slightly other."""
    basis = torch.linalg.qr(randn(2, 48, 48))[0]
    factor = (basis * torch.logspace(0, -6, 48, dtype=torch.float64)) @ basis.mT
    nearby = torch.linalg.qr(basis + 1e-3 * randn(2, 48, 48, seed=1))[0].float()
    last = {"vectors": nearby, "values": torch.ones(2, 48), "order": torch.ones(2, 48)}
    matrix, damping = factor.float(), torch.zeros(2)
    exact = solver.solve_again(matrix, damping, last)
    MATMUL.fp32_precision = "tf32"
    with TensorFloat():
        found = solver.solve_again(matrix, damping, last)
    if "order" in found:
        assert torch.equal(found["order"], exact["order"])
    # Where eigenvalues are above the rounding of float32.
    values = (found["vectors"].double().mT @ factor @ found["vectors"].double()).diagonal(0, 1, 2)
    expected = exact["vectors"].double()
    expected = (expected.mT @ factor @ expected).diagonal(0, 1, 2)
    torch.testing.assert_close(values[:, :36], expected[:, :36], rtol=0.02, atol=0)


def test_newton_schulz_in_float32_stays_in_float32(gpu: None) -> None:
    """Muon's iteration on Gram matrices, which rounding to TF32 would make diverge."""
    matrix = randn(1, 8, 40).float()
    model = nn.Linear(40, 8, bias=False)
    own = soframe.Preconditioner(
        nn.Sequential(model, nn.Linear(8, 1)),
        soframe.methods.Orthogonalise(dtype="float32"),
        kl_clip=None,
        skip=["1"],
    )
    model.weight.grad = matrix[0].clone()
    with TensorFloat() as products:
        own.step()
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, nearest_orthogonal(matrix)[0])
    assert set(products.settings) == {"ieee"}


# -- the step ---------------------------------------------------------------------------------


METHODS: dict[str, dict[str, Any]] = {
    "kfac": {"method": "kfac", "solver": "inverse", "lr": 0.1, "kl_clip": 0.03},
    "ekfac": {"method": "ekfac", "lr": 0.1, "kl_clip": 0.03},
    "shampoo": {"method": "shampoo", "lr": 0.02, "kl_clip": None},
    "soap": {"method": "soap", "lr": 0.02, "kl_clip": None},
}


def trained(
    chosen: str, *, seed: int = 0, steps: int = 3, **settings: Any
) -> tuple[nn.Module, float]:
    """Train an autoencoder of eight clusters; return it with its last losses' mean."""
    torch.manual_seed(seed)
    centres, mix = torch.randn(8, 16), torch.randn(16, 16)
    model = nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=METHODS[chosen]["lr"])
    every: dict[str, Any] = {"statistics_every": 1, "solve_every": 2}
    own = soframe.Preconditioner(model, **grouped({**METHODS[chosen], **every, **settings}))
    losses: list[Tensor] = []

    def loss(model: nn.Module, _: int) -> Tensor:
        x = (centres[torch.randint(8, (32,))] + 0.1 * torch.randn(32, 16)) @ mix / 4
        losses.append((model(x) - x).square().sum(1).mean() / 2)
        return losses[-1]

    kit.train(model, loss, range(steps), own, optimizer)
    own.close()
    return model, float(torch.stack(losses[-10:]).detach().mean())


@pytest.mark.parametrize("user", ["ieee", "tf32"])
@pytest.mark.parametrize("chosen", METHODS)
def test_products_of_a_step(gpu: None, chosen: str, user: str) -> None:
    """The setting holds whatever the user's is, and the passes and the solves keep theirs."""
    MATMUL.fp32_precision = user
    counts = {}
    for setting in ("fast", "full"):
        with TensorFloat() as products:
            trained(chosen, precision=setting)
        counts[setting] = {one: products.settings.count(one) for one in ("tf32", "ieee")}
        assert MATMUL.fp32_precision == user
        assert sum(counts[setting].values()) == len(products.settings)
    fast, full = counts["fast"], counts["full"]
    # Statistics and updates: three steps, two layers, two sides.
    assert fast["tf32"] - full["tf32"] == full["ieee"] - fast["ieee"] >= 3 * 2 * 2 * 2 - 4


@pytest.mark.slow
@pytest.mark.parametrize("chosen", ["kfac", "soap"])
def test_learning_in_tf32(gpu: None, chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss of full precision, within a hundredth of what was learned."""
    MATMUL.fp32_precision, counts, switch = "ieee", [], precision._set

    @contextmanager
    def emulated(value: str) -> Iterator[None]:
        with switch(value), TensorFloat() as products:
            yield
        counts.append(products.settings.count("tf32"))

    monkeypatch.setattr(precision, "_set", emulated)
    before, full, fast = (
        trained(chosen, steps=steps, precision=setting)[1]
        for steps, setting in ((1, "full"), (40, "full"), (40, "fast"))
    )
    assert full < 0.7 * before
    assert abs(fast - full) < 0.01 * (before - full)
    assert sum(counts) >= 40 * 8


def test_a_cpu_ignores_it() -> None:
    """Without a GPU neither torch's setting nor a bit changes."""
    before, ends = MATMUL.fp32_precision, []
    for setting in ("fast", "full"):
        with TensorFloat() as products:
            model, _ = trained("kfac", precision=setting)
        ends.append(nn.utils.parameters_to_vector(model.parameters()))
        assert set(products.settings) == {before}
    assert torch.equal(*ends)


def test_an_unknown_precision() -> None:
    with pytest.raises(ValueError, match="precision must be one of 'fast', 'full', not 'tf32'"):
        kit.precondition(nn.Linear(2, 2), precision="tf32")


# -- torch's setting --------------------------------------------------------------------------


def test_the_setting_is_restored_after_an_error(gpu: None) -> None:
    class Faulty(soframe.methods.SOAP):
        def direct(self, given: Any) -> Any:
            assert MATMUL.fp32_precision == "tf32"
            raise ArithmeticError

    MATMUL.fp32_precision = "ieee"
    model = nn.Linear(3, 2)
    own = kit.precondition(model, Faulty(skip_first=False))
    model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ArithmeticError):
        own.step()
    assert MATMUL.fp32_precision == "ieee"


def test_the_setting_is_inherited_again(gpu: None) -> None:
    """It is not pinned to the value of torch.backends that it had."""
    every: Any = torch.backends
    before = every.fp32_precision
    try:
        MATMUL.fp32_precision, every.fp32_precision = "none", "tf32"
        with within("full"):
            assert MATMUL.fp32_precision == "ieee"
        assert MATMUL.fp32_precision == "tf32"
        every.fp32_precision = "ieee"
        assert MATMUL.fp32_precision == "ieee"
    finally:
        every.fp32_precision = before


def test_contexts_of_two_threads_that_overlap(gpu: None) -> None:
    """The first to enter leaves first: the user's setting comes back with the last."""
    MATMUL.fp32_precision = "ieee"
    entered, left = threading.Event(), threading.Event()

    def other() -> None:
        with within("fast"):
            entered.set()
            left.wait(10)

    with ExitStack() as stack:
        stack.enter_context(within("fast"))
        thread = threading.Thread(target=other)
        thread.start()
        entered.wait(10)
        with within("full"):
            assert MATMUL.fp32_precision == "ieee"
        assert MATMUL.fp32_precision == "tf32"
    assert MATMUL.fp32_precision == "tf32"
    left.set()
    thread.join()
    assert MATMUL.fp32_precision == "ieee"


# -- under autocast ---------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["kfac", "ekfac", "shampoo", "soap", "muon", "adamw"])
def test_a_step_within_autocast_is_a_step_after_it(method: str) -> None:
    """Loops that run under autocast as a whole step there, too, in one context or in several."""

    def trained(
        loop: AbstractContextManager[object], *, steps_inside: bool = False
    ) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4))
        for number, parameter in enumerate(model.parameters()):
            parameter.data = randn(*parameter.shape, seed=number).float()
        optimizer = soframe.Optimizer(model, method, auxiliary="adamw", lr=0.01)
        with loop:
            for number in range(3):
                optimizer.zero_grad()
                x = randn(8, 6, seed=10 + number).float()
                with torch.autocast("cpu", torch.bfloat16):
                    model(x).square().mean().backward()
                    if steps_inside:
                        optimizer.step()
                if not steps_inside:
                    optimizer.step()
        assert torch.is_autocast_enabled("cpu") is False
        return [parameter.detach() for parameter in model.parameters()]

    expected = trained(nullcontext())
    # Torch casts each weight once within the outermost context, even one that is off.
    loops = [torch.autocast("cpu", torch.bfloat16, enabled=on) for on in (True, False)]
    for found in (trained(nullcontext(), steps_inside=True), *map(trained, loops)):
        for inside, after in zip(found, expected, strict=True):
            assert torch.equal(inside, after)


def test_autocast_goes_on_after_a_step() -> None:
    model = nn.Linear(3, 2)
    preconditioner = soframe.Preconditioner(model)
    with torch.autocast("cpu", torch.bfloat16):
        model(torch.ones(4, 3)).square().mean().backward()
        preconditioner.step()
        assert model(torch.ones(4, 3)).dtype == torch.bfloat16


def test_products_with_a_curvature_are_not_cast() -> None:
    model, x = nn.Linear(6, 3), randn(20, 6).float()
    curvature = soframe.Curvature(model, "kfac")
    curvature.fit([x], lambda model, batch: (outputs := model(batch), outputs.square().mean()))
    vector = {name: torch.ones_like(parameter) for name, parameter in model.named_parameters()}
    expected = curvature.inverse(0.1) @ vector
    with torch.autocast("cpu", torch.bfloat16):
        products = curvature.inverse(0.1) @ vector
    for name, product in products.items():
        assert torch.equal(product, expected[name])
