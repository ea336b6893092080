"""Momentum and Muon, against their definitions in float64."""

import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soframe.kernels import devices
from soframe.layers.layout import BlockShape
from soframe.methods import (
    SOAP,
    KFACMuon,
    MatchRMS,
    Momentum,
    Muon,
    NewtonMuon,
    Orthogonalise,
    SOAPMuon,
    orthogonal,
)
from soframe.methods.base import Candidate, Given
from soframe.methods.orthogonal import (
    MUON,
    POLAR_EXPRESS,
    Coefficients,
    coefficients,
    nearest_orthogonal,
    orthogonalises,
)
from soframe.solvers import Eigen
from tests import kit
from tests.curvature import closing, fill, randn
from tests.methods import stages


def by_singular_values(matrix: Tensor, steps: list[tuple[float, float, float]], cut: float) -> Any:
    """What the iterations do to each singular value, one by one."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / (cut * s.square().sum().sqrt() + 1e-7)
    for a, b, c in steps:
        s = torch.stack([a * x + b * x**3 + c * x**5 for x in s])
    return u @ torch.diag(s) @ v


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (4, 4), (2, 1), (3, 7), (9, 2)], ids=str)
@pytest.mark.parametrize("kind", ["muon", "polar-express"])
@pytest.mark.parametrize("steps", [1, 5, 9])
def test_iterations(shape: tuple[int, int], kind: Coefficients, steps: int) -> None:
    matrices = randn(3, *shape) * torch.tensor([1e-3, 1.0, 1e5]).double().view(3, 1, 1)
    used = coefficients(kind, steps)
    assert len(used) == steps
    cut = 1.01 if kind == "polar-express" else 1.0
    expected = torch.stack([by_singular_values(m, used, cut) for m in matrices])
    found = nearest_orthogonal(matrices, kind=kind, steps=steps)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("shape", [(3, 5), (5, 3), (2, 9)], ids=str)
def test_each_group_is_as_short_as_its_input_alone(shape: tuple[int, int]) -> None:
    """Of groups far below, below and above the full root mean square, and of zeros."""
    sizes = torch.tensor([1e-9, 0.3, 50.0, 0.0], dtype=torch.float64)
    matrices = randn(4, *shape)
    matrices /= matrices.square().mean((1, 2), keepdim=True).sqrt()
    matrices *= sizes.view(4, 1, 1)
    step = Given(matrices, matrices, {}, {}, 1, Eigen(), 0.1)
    found = Orthogonalise(full_rms=0.5).direct(step).matrix
    expected = [
        share * by_singular_values(matrix, [MUON] * 5, 1.0)
        for matrix, share in zip(matrices, (2e-9, 0.6, 1.0, 0.0), strict=True)
    ]
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-9, atol=1e-20)


def test_coefficients() -> None:
    assert coefficients("muon", 2) == [MUON, MUON] == [(3.4445, -4.7750, 2.0315)] * 2
    polar = coefficients("polar-express", 10)
    assert polar[7:] == [(1.875, -1.25, 0.375)] * 3
    a, b, c = POLAR_EXPRESS[0]
    assert polar[0] == (a / 1.01, b / 1.01**3, c / 1.01**5)


def test_each_step_of_polar_express_errs_alike_above_and_below() -> None:
    """As the best polynomials do, for singular values from a thousandth on."""
    numbers = [torch.linspace(1e-3, 1, 4000).double(), torch.logspace(-3, 0, 4000).double()]
    values = torch.cat([*numbers, torch.tensor([1e-3, 1.0], dtype=torch.float64)])
    for a, b, c in POLAR_EXPRESS:
        values = a * values + b * values**3 + c * values**5
        above, below = values.max() - 1, 1 - values.min()
        torch.testing.assert_close(above, below, rtol=1e-6, atol=1e-11)


def test_gram_matrices_are_of_the_shorter_side() -> None:
    for shape in ((1, 6, 2), (1, 2, 6)):
        matrix = randn(*shape)
        gram = orthogonal._gram(matrix)
        assert gram.shape == (1, 2, 2)
        expected = torch.linalg.svdvals(matrix).square()
        torch.testing.assert_close(torch.linalg.eigvalsh(gram).flip(-1), expected)


@pytest.mark.parametrize(("steps", "grams"), [(1, 1), (5, 1), (6, 2), (10, 2), (11, 3)])
def test_gram_matrices_are_made_anew_after_five_steps_of_muon(
    steps: int, grams: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In single precision; within five, rounding is not yet visible."""
    shapes: list[tuple[int, ...]] = []
    gram_of = orthogonal._gram
    monkeypatch.setattr(
        orthogonal, "_gram", lambda matrix: shapes.append(tuple(matrix.shape)) or gram_of(matrix)
    )
    nearest_orthogonal(randn(2, 3, 9).float(), steps=steps)
    assert shapes == [(2, 3, 9)] * grams


@pytest.mark.parametrize(
    ("kind", "steps", "error"),
    [("muon", 5, 0.4), ("polar-express", 5, 0.2), ("polar-express", 9, 1e-9)],
)
def test_it_is_near_the_nearest(kind: Coefficients, steps: int, error: float) -> None:
    left, right = torch.linalg.qr(randn(6, 4))[0], torch.linalg.qr(randn(4, 4, seed=1))[0]
    values = torch.tensor([1.0, 0.3, 0.1, 0.05]).double()
    found = nearest_orthogonal((left * values @ right)[None], kind=kind, steps=steps)[0]
    assert float(torch.linalg.matrix_norm(found - left @ right, 2)) < error


@pytest.mark.parametrize("kind", ["muon", "polar-express"])
@pytest.mark.parametrize("steps", [5, 9])
@pytest.mark.parametrize("smallest", [-3, -6, -9])
def test_gram_matrices_are_precise_enough(kind: Coefficients, steps: int, smallest: int) -> None:
    """In single precision, at the worst conditions: what is far below rounding stays bounded."""
    left, right = torch.linalg.qr(randn(24, 24))[0], torch.linalg.qr(randn(96, 24, seed=1))[0]
    values = torch.logspace(0, smallest, 24, dtype=torch.float64)
    matrix = (left * values @ right.T)[None]
    each = coefficients(kind, steps)
    scaled = matrix / matrix.norm()
    plain = orthogonal._by_products(scaled, each)
    fast = orthogonal._by_gram_matrices(scaled.float(), each).double()
    slow = orthogonal._by_products(scaled.float(), each).double()
    largest = float(torch.linalg.matrix_norm(plain[0], 2))
    assert float(torch.linalg.matrix_norm(fast[0], 2)) < 1.001 * largest
    error, of_products = ((one - plain).norm() / plain.norm() for one in (fast, slow))
    assert float(error) < 1e-3, (float(error), float(of_products))


def test_long_matrices_are_those_of_twice_the_width() -> None:
    """Half precision is for the products of all steps: Gram matrices square the condition."""
    for dtype, shape, by_gram in (
        (torch.float32, (1, 4, 8), True),
        (torch.float32, (1, 8, 4), True),
        (torch.float32, (1, 4, 7), False),
        (torch.bfloat16, (1, 4, 8), False),
    ):
        matrix = randn(*shape).to(dtype)
        scaled = matrix / (torch.linalg.vector_norm(matrix, dim=(-2, -1), keepdim=True) + 1e-7)
        iterate = orthogonal._by_gram_matrices if by_gram else orthogonal._by_products
        expected = iterate(scaled, coefficients("muon", 5))
        assert torch.equal(nearest_orthogonal(matrix), expected), (dtype, shape)


def test_zero_stays_zero() -> None:
    assert not nearest_orthogonal(torch.zeros(2, 3, 4)).any()
    assert not nearest_orthogonal(torch.zeros(2, 3, 9)).any()


def step_of(matrix: Tensor) -> Given:
    """Return a step of a stage that reads its input alone."""
    return Given(matrix, matrix, {}, {}, 0, None, 0.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["muon", "polar-express"])
def test_groups_below_the_full_rms_are_shorter(kind: Coefficients) -> None:
    """Each by its own entries, of matrices that are not square."""
    matrix = randn(3, 4, 6) * torch.tensor([0.1, 1.0, 10.0]).double().view(3, 1, 1)
    step = step_of(matrix)
    whole = Orthogonalise(coefficients=kind).direct(step).matrix
    shorter = Orthogonalise(coefficients=kind, full_rms=2.0).direct(step).matrix
    share = (matrix.square().mean((1, 2), keepdim=True).sqrt() / 2).clamp(max=1)
    torch.testing.assert_close(shorter, share * whole, rtol=1e-9, atol=0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_dtype_of_the_products(dtype: str) -> None:
    matrix = randn(1, 6, 8)
    found = nearest_orthogonal(matrix, dtype=getattr(torch, dtype))
    assert found.dtype == getattr(torch, dtype)
    error = float((found - nearest_orthogonal(matrix)).norm() / found.norm())
    lowest, highest = {"bfloat16": (1e-3, 5e-2), "float32": (1e-9, 1e-5), "float64": (-1, 1e-15)}[
        dtype
    ]
    assert lowest < error < highest
    step = step_of(matrix)
    for full_rms in (0.0, 0.3):  # updates of the full length
        update = Orthogonalise(dtype=dtype, full_rms=full_rms).direct(step).matrix
        assert update.dtype == matrix.dtype
        assert torch.equal(update, found.to(matrix.dtype))


@pytest.mark.parametrize(
    ("shape", "halved"),
    [
        ((2, 128, 128), True),
        ((1, 1023, 128), True),
        ((1, 129, 300), True),
        ((1, 1024, 128), False),
        ((3, 127, 200), False),
    ],
    ids=str,
)
def test_a_processor_with_instructions_for_bfloat16_uses_them(
    shape: tuple[int, ...], halved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the sides of a matrix, and only instead of float32."""
    matrix = randn(*shape)

    def found(input: Tensor, fast: bool) -> Tensor:
        monkeypatch.setattr(devices, "fast_bfloat16", lambda: fast)
        return Orthogonalise().direct(step_of(input)).matrix

    single = matrix.float()
    for fast in (True, False):
        dtype = torch.bfloat16 if fast and halved else torch.float32
        assert torch.equal(found(single, fast), nearest_orthogonal(single, dtype=dtype).float())
        assert torch.equal(found(matrix, fast), nearest_orthogonal(matrix))
    if halved:
        exact = nearest_orthogonal(matrix)
        error = float((found(single, True) - exact).norm() / exact.norm())
        assert 1e-3 < error < 0.05


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("averaged", [False, True])
def test_momentum(nesterov: bool, averaged: bool) -> None:
    """Against the sum of all gradients with their weights."""
    model = nn.Sequential(nn.Linear(3, 2, bias=False)).double()
    beta, past = 0.6, []
    with closing(stages.preconditioner(model, Momentum(beta, nesterov, averaged))) as own:
        for number in range(4):
            new = randn(2, 3, seed=number)
            past.append(new)
            model[0].weight.grad = new.clone()
            own.step()
            ages = reversed(range(len(past)))
            weight = 1 - beta if averaged else 1.0
            buffer = sum(weight * beta**age * g for age, g in zip(ages, past, strict=True))
            expected = beta * buffer + weight * new if nesterov else buffer
            torch.testing.assert_close(model[0].weight.grad, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("nesterov", [False, True])
def test_classical_momentum_is_torchs(nesterov: bool) -> None:
    one, other = fill(nn.Sequential(nn.Linear(3, 2))), fill(nn.Sequential(nn.Linear(3, 2)))
    options = {"lr": 0.1, "momentum": 0.9, "nesterov": nesterov}
    reference = torch.optim.SGD(other.parameters(), **options)
    plain = torch.optim.SGD(one.parameters(), lr=0.1)
    method = Momentum(0.9, nesterov, averaged=False)

    def loss(model: nn.Module, step: int) -> Tensor:
        return model(randn(5, 3, seed=step)).square().sum()

    with closing(stages.preconditioner(one, method)) as own:
        kit.train(one, loss, range(4), own, plain)
    kit.train(other, loss, range(4), reference)
    torch.testing.assert_close(stages.weights(one), stages.weights(other), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("shape", [(6, 2), (2, 6), (3, 3), (4, 2)], ids=str)
@pytest.mark.parametrize("scale", ["spectral", "rms"])
def test_muon(shape: tuple[int, int], scale: Any) -> None:
    """Three steps of the published rule, written out for one matrix."""
    out, into = shape
    layers = nn.Sequential(nn.Linear(into, out, bias=False), nn.Linear(out, 1)).double()
    buffer = torch.zeros(out, into, dtype=torch.float64)
    factor = max(1.0, out / into) ** 0.5 if scale == "spectral" else 0.2 * max(out, into) ** 0.5
    with closing(stages.preconditioner(layers, Muon(scale=scale))) as own:
        assert [block.name for block in own.blocks] == ["0.weight"]
        for number in range(3):
            gradient = randn(out, into, seed=number)
            layers[0].weight.grad = gradient.clone()
            own.step()
            buffer = 0.95 * buffer + 0.05 * gradient
            ahead = 0.05 * gradient + 0.95 * buffer
            expected = factor * by_singular_values(ahead, [MUON] * 5, 1.0)
            torch.testing.assert_close(layers[0].weight.grad, expected, rtol=1e-9, atol=1e-11)


def test_muon_is_for_matrices_within_the_model() -> None:
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Conv1d(2, 2, 2), nn.Linear(4, 7))
    with closing(stages.preconditioner(model, "muon")) as own:
        assert [block.name for block in own.blocks] == ["1.weight", "2.weight"]
        reasons = {row.parameter: row.reason for row in own.report()}
    assert "vector" in reasons["1.bias"]
    assert "embedding" in reasons["0.weight"]
    assert "head" in reasons["3.weight"]
    bag = Candidate("bag", nn.EmbeddingBag(3, 2), ("weight",), (1, 3, 2))  # type: ignore[arg-type]
    assert Orthogonalise().unsuited(bag) is not None


def test_newton_muon() -> None:
    """Its weights alone, their gradients times the inverse of the inputs' second moment."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    fill(model)
    buffer = torch.zeros(4, 3, dtype=torch.float64)
    moment = torch.zeros(3, 3, dtype=torch.float64)
    with closing(stages.preconditioner(model, "newton-muon", decay=0.5)) as own:
        (block,) = own.blocks
        assert set(block.parameters) == {"weight"}
        reasons = {row.parameter: row.reason for row in own.report()}
        for number in range(4):
            model.zero_grad()
            inputs = randn(6, 3, seed=number)
            model(inputs).square().sum(1).mean().backward()
            gradient = model[0].weight.grad.clone()
            own.step()
            moment = 0.5 * moment + 0.5 * inputs.T @ inputs / 6
            factor = moment / (1 - 0.5 ** (number + 1)) + 0.1 * torch.eye(3).double()
            new = torch.linalg.solve(factor, gradient, left=False)
            buffer = 0.95 * buffer + 0.05 * new
            ahead = 0.95 * buffer + 0.05 * new
            expected = (4 / 3) ** 0.5 * by_singular_values(ahead, [MUON] * 5, 1.0)
            torch.testing.assert_close(model[0].weight.grad, expected, rtol=1e-8, atol=1e-10)
    assert "weight alone" in reasons["0.bias"]
    assert "head" in reasons["2.weight"]
    assert NewtonMuon().captures
    with closing(stages.preconditioner(model, "newton-muon", auxiliary="adamw")) as own:
        assert {block.name: block.auxiliary for block in own.blocks} == {
            "0": False,
            "0.bias": True,
            "2.weight": True,
            "2.bias": True,
        }


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="beta"):
        Momentum(1.0)
    with pytest.raises(ValueError, match="steps"):
        Orthogonalise(steps=0)
    with pytest.raises(ValueError, match="steps must be an integer"):
        Orthogonalise(steps=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="coefficients"):
        Orthogonalise(coefficients="cubic")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dtype"):
        Orthogonalise(dtype="int8")
    for rms in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="full_rms is at least 0"):
            Orthogonalise(full_rms=rms)
    with pytest.raises(ValueError, match="full_rms must be a number"):
        Orthogonalise(full_rms="1")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="scale"):
        MatchRMS("long")  # type: ignore[arg-type]
    assert Muon().stages == (Momentum(0.95, True), Orthogonalise(), MatchRMS())
    assert (Orthogonalise(), MatchRMS()) == (Orthogonalise(5, "muon", None), MatchRMS("spectral"))
    assert Orthogonalise(steps=1).steps == 1
    for dtype in (None, "float64", "float32", "bfloat16", "float16"):
        assert Orthogonalise(dtype=dtype).dtype == dtype
    assert (MatchRMS().auxiliary_ratio, MatchRMS("rms").auxiliary_ratio) == (0.2, 1.0)
    assert not Muon().joint


@pytest.mark.skipif(
    importlib.util.find_spec("pytorch_optimizer") is None, reason="pytorch_optimizer is missing"
)
def test_muon_is_pytorch_optimizers() -> None:
    from pytorch_optimizer import Muon as Peer

    stages.check_peer(Muon(dtype="bfloat16"), Peer)


def test_the_effort_is_that_of_the_products() -> None:
    """Of Gram matrices of the shorter side, by which ranks share matrices out."""
    assert Orthogonalise().effort(BlockShape(2, 3, 5)) == 2 * 3 * 5 * 3


def test_some_methods_orthogonalise() -> None:
    for method in (Muon(), NewtonMuon(), KFACMuon(), SOAPMuon(), Orthogonalise()):
        assert orthogonalises(method)
    assert not orthogonalises(SOAP())
    assert not orthogonalises(MatchRMS())
