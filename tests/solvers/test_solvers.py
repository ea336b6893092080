"""Every solver against the dense solve under the same damping, and the algebra that it rests on."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from soframe.solvers import Eigen, Inverse, Root
from soframe.solvers.base import mean_trace
from soframe.testing import compare, dense_preconditioned
from tests.curvature import randn
from tests.examples import examples
from tests.solvers.dense import SOLVERS, SolveFailedError, damped, run, solve_safely, spectrum

SPECTRA = [1.0, 1e-2, 1e-4, 1e-6, 1e-8, 0.0]


@given(
    groups=st.integers(1, 3),
    out=st.integers(1, 4),
    into=st.integers(1, 4),
    spectra=st.tuples(st.sampled_from(SPECTRA), st.sampled_from(SPECTRA)),
    damping=st.sampled_from([10.0, 1e-1, 1e-3, 1e-6]),
    scales=st.tuples(st.sampled_from([1e-3, 1.0, 1e3]), st.sampled_from([1e-3, 1.0, 1e3])),
)
@settings(max_examples=examples(30))
@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_agree_with_the_dense_solve(
    name: str,
    groups: int,
    out: int,
    into: int,
    spectra: tuple[float, float],
    damping: float,
    scales: tuple[float, float],
) -> None:
    g = scales[0] * spectrum(groups, out, spectra[0])
    a = scales[1] * spectrum(groups, into, spectra[1], seed=1)
    gradient = randn(groups, out, into, seed=2)
    kept = gradient.clone()
    result = run(SOLVERS[name], gradient, g, a, damping)
    assert torch.equal(gradient, kept), "the gradient was changed in place"
    for group in range(groups):
        matrix = damped(name, g[group], a[group], damping)
        expected = dense_preconditioned(matrix, gradient[group], 0.0)
        # Rounding is magnified by the condition of the damped matrix at most.
        tolerance = max(1e-10, 1e-13 * float(torch.linalg.cond(matrix)))
        compare(result[group], expected, f"{name}, group {group}", rtol=tolerance)


@pytest.mark.parametrize("smallest", SPECTRA[:-1])
@pytest.mark.parametrize("solver", [Eigen(), Inverse()], ids=["eigen", "inverse"])
def test_without_damping_solvers_agree(solver: Eigen | Inverse, smallest: float) -> None:
    g, a = spectrum(1, 4, smallest), spectrum(1, 3, smallest**0.5, seed=1)
    gradient = randn(1, 4, 3, seed=2)
    result = run(solver, gradient, g, a, 0.0)
    product = g @ result @ a.mT
    compare(product, gradient, "A p G", rtol=1e-12 / smallest**1.5)


@given(n=st.integers(1, 4), m=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=examples(20))
def test_the_inverse_of_a_kronecker_product(n: int, m: int, seed: int) -> None:
    """Not symmetric: the order of vectorisation and every transpose show."""
    g = randn(n, n, seed=seed) + 3 * torch.eye(n, dtype=torch.float64)
    a = randn(m, m, seed=seed + 1) + 3 * torch.eye(m, dtype=torch.float64)
    x = randn(n, m, seed=seed + 2)
    inverses = torch.linalg.inv(g), torch.linalg.inv(a)
    compare(
        torch.kron(*inverses), torch.linalg.inv(torch.kron(g, a)), "kron of inverses", rtol=1e-7
    )
    compare((torch.kron(g, a) @ x.flatten()).reshape(n, m), g @ x @ a.mT, "kron times vec")
    # What solvers multiply with need not be symmetric either.
    left, right = {"inverse": inverses[0][None]}, {"inverse": inverses[1][None].mT}
    applied = Inverse().apply(x[None], left=left, right=right, damping=0.0)[0]
    compare(applied, dense_preconditioned(torch.kron(g, a), x, 0.0), "apply", rtol=1e-7)


@given(
    n=st.integers(1, 4),
    m=st.integers(1, 4),
    damping=st.sampled_from([1e-3, 0.1, 3.0]),
    ratio=st.sampled_from([1e-4, 1.0, 1e4]),
)
@settings(max_examples=examples(20))
def test_factored_damping(n: int, m: int, damping: float, ratio: float) -> None:
    """It adds a positive semi-definite residual, of the least trace that any pi gives."""
    g, a = spectrum(1, n, 1e-3), ratio * spectrum(1, m, 1e-2, seed=1)
    shares = Inverse().shares([mean_trace(a), mean_trace(g)], damping)
    compare(
        shares[0] * shares[1],
        torch.full((1,), damping, dtype=torch.float64),
        "the product of the shares",
    )
    identities = torch.eye(n, dtype=torch.float64), torch.eye(m, dtype=torch.float64)

    def factored(share_a: float, share_g: float) -> Tensor:
        return torch.kron(g[0] + share_g * identities[0], a[0] + share_a * identities[1])

    exact = torch.kron(g[0], a[0]) + damping * torch.kron(*identities)
    own = factored(float(shares[0]), float(shares[1]))
    residual = own - exact
    scale = own.norm()
    assert torch.linalg.eigvalsh(residual)[0] >= -1e-12 * scale
    for other in (0.5, 0.99, 1.01, 2.0):
        moved = factored(float(shares[0]) * other, float(shares[1]) / other)
        assert (moved - exact).trace() > residual.trace(), f"pi times {other} is no worse"
    gradient = randn(1, n, m, seed=2)
    longer = (gradient * run(Eigen(), gradient, g, a, damping)).sum()
    shorter = (gradient * run(Inverse(), gradient, g, a, damping)).sum()
    assert 0 < shorter <= longer * (1 + 1e-12)


@pytest.mark.parametrize("name", SOLVERS)
@pytest.mark.parametrize("zero", ["A", "G", "both"])
def test_factors_of_zeros(name: str, zero: str) -> None:
    g, a = spectrum(2, 3, 1e-2), spectrum(2, 2, 1e-2, seed=1)
    # One group of zeros beside one that is not: each has a damping of its own.
    if zero != "A":
        g[0] = 0
    if zero != "G":
        a[0] = 0
    gradient = randn(2, 3, 2, seed=2)
    result = run(SOLVERS[name], gradient, g, a, 0.01)
    for group in range(2):
        matrix = damped(name, g[group], a[group], 0.01)
        compare(result[group], dense_preconditioned(matrix, gradient[group], 0.0), f"group {group}")
    if zero == "both" and not name.endswith("full"):
        compare(result[0], gradient[0] / 0.01, "no curvature: the gradient over the damping")


def scalar(value: float) -> Tensor:
    return torch.full((1, 1, 1), value, dtype=torch.float64)


@pytest.mark.parametrize("name", SOLVERS)
def test_one_by_one(name: str) -> None:
    """Scalars: the preconditioned gradient by hand."""
    g, a, v, damping = 3.0, 0.5, 2.0, 0.1
    result = run(SOLVERS[name], *(scalar(x) for x in (v, g, a)), damping)
    pi = (a / g) ** 0.5
    root = damping**0.5
    expected = {
        "eigen": v / (g * a + damping),
        "inverse, pi": v / ((g + root / pi) * (a + root * pi)),
        "inverse, sqrt": v / ((g + root) * (a + root)),
        "inverse, full": v / ((g + damping) * (a + damping)),
    }
    kind, _, split = name.partition(", ")
    key = "eigen" if kind == "orthogonal iteration" else f"inverse, {split}" if split else kind
    compare(result, scalar(expected[key]), name)


def test_eigenvalues_that_rounding_made_negative_are_zero() -> None:
    matrix = torch.diag(torch.tensor([1.0, -1e-12])).double()[None]
    data = Eigen().solve(matrix, torch.zeros(1))
    assert data["values"].tolist() == [[0.0, 1.0]]


@pytest.mark.parametrize("name", SOLVERS)
def test_only_the_lower_triangle_is_read(name: str) -> None:
    solver = SOLVERS[name]
    matrix = spectrum(2, 4, 1e-2)
    lower = matrix.tril() + 99 * torch.ones(4, 4).double().triu(1)
    damping = torch.full((2,), 0.1).double()
    first = solver.solve(matrix, damping)
    for key, tensor in first.items():
        assert torch.equal(tensor, solver.solve(lower, damping)[key])
    again, expected = (solver.solve_again(own, damping, first) for own in (lower, matrix))
    assert all(torch.equal(again[key], expected[key]) for key in first)


class TestSafely:
    """A failed solve is tried in float64, then given up."""

    def test_float64_helps(self) -> None:
        class Careful(Inverse):
            def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
                if matrix.dtype != torch.float64 or damping.dtype != torch.float64:
                    raise torch.linalg.LinAlgError("not precise enough")
                return super().solve(matrix, damping)

        matrix, damping = spectrum(2, 3, 1e-2), torch.full((2,), 0.25, dtype=torch.float64)
        expected = Inverse().solve(matrix.float().double(), damping)["inverse"]
        data, retried = solve_safely(Careful(), matrix.float(), damping.float())
        assert retried
        assert torch.equal(data["inverse"], expected.float())
        assert not solve_safely(Careful(), matrix, damping)[1]

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    @pytest.mark.parametrize("solver", [Eigen(), Inverse()], ids=["eigen", "inverse"])
    def test_nothing_helps(self, solver: Eigen | Inverse, bad: float) -> None:
        matrix = torch.eye(3).double()[None]
        matrix[0, 2, 1] = bad
        with pytest.raises(SolveFailedError):
            solve_safely(solver, matrix, torch.zeros(1).double())

    @pytest.mark.parametrize(
        ("entries", "good"),
        [
            ([3e38, 3e38, 1.0], True),  # finite, unlike their sum
            ([3e38, math.inf, 1.0], False),
            ([math.inf, -math.inf, 1.0], False),
            ([1.0, 1.0, math.nan], False),
        ],
    )
    def test_every_entry_counts(self, entries: list[float], good: bool) -> None:
        class Fixed(Inverse):
            def solve(self, matrix: Tensor, damping: Tensor) -> dict[str, Tensor]:
                return {"inverse": torch.tensor([entries], dtype=torch.float32)}

        arguments = Fixed(), torch.eye(3)[None], torch.zeros(1)
        if good:
            assert not solve_safely(*arguments)[1]
        else:
            with pytest.raises(SolveFailedError, match="not finite"):
                solve_safely(*arguments)

    def test_an_indefinite_matrix_has_no_damped_inverse(self) -> None:
        with pytest.raises(SolveFailedError, match="positive-definite"):
            solve_safely(Inverse(), -torch.eye(2)[None], torch.zeros(1))


@pytest.mark.parametrize("size", [1, 5, 130])
def test_inverses_are_symmetric_to_the_bit_and_lie_row_by_row(size: int) -> None:
    rows = torch.randn(2, 2 * size, size, dtype=torch.float32)
    inverse = Inverse().solve(rows.mT @ rows, torch.ones(2))["inverse"]
    assert torch.equal(inverse, inverse.mT)
    assert inverse.is_contiguous()


def test_a_split_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="split must be 'pi', 'sqrt' or 'full', not 'half'"):
        Inverse(split="half")  # type: ignore[arg-type]


def test_a_split_is_between_two() -> None:
    with pytest.raises(ValueError, match="between two factors, not 3"):
        Inverse().shares([torch.ones(1)] * 3, 0.1)


def test_no_damping_and_no_curvature_is_no_step() -> None:
    singular = torch.diag(torch.tensor([0.0, 2.0, 4.0], dtype=torch.float64)).unsqueeze(0)
    solver = Eigen()
    data = solver.solve(singular, torch.zeros(1))
    gradient = torch.ones(1, 3, 3, dtype=torch.float64)
    result = solver.apply(gradient, left=data, right=data, damping=0.0)
    inverse = torch.linalg.pinv(torch.kron(singular[0], singular[0]))
    compare(result.flatten(), inverse @ gradient.flatten(), "least step")


@pytest.mark.parametrize("split", ["pi", "sqrt", "full"])
def test_no_damping_is_shared_as_none(split: str) -> None:
    traces = [torch.tensor([2.0, 0.0, 1e-30]), torch.tensor([1e-3, 1.0, 1e30])]
    for dtype in (torch.float32, torch.float64):
        for share in Inverse(split).shares([trace.to(dtype) for trace in traces], 0.0):
            assert share.tolist() == [0.0] * 3


@pytest.mark.parametrize("leading", [(5,), (2, 3)])
@pytest.mark.parametrize("name", [*SOLVERS, "root"])
def test_gradients_may_have_leading_dimensions(name: str, leading: tuple[int, ...]) -> None:
    """As several vectors for one curvature: each is solved as it would be alone."""
    solver = Root() if name == "root" else SOLVERS[name]
    share = torch.full((2,), 0.1, dtype=torch.float64)
    left, right = (solver.solve(spectrum(2, n, 1e-2), share) for n in (3, 4))
    gradients = randn(*leading, 2, 3, 4)
    both = solver.apply(gradients, left=left, right=right, damping=0.01)
    single = solver.apply_right(gradients, right=right, damping=0.01)
    for index in itertools.product(*map(range, leading)):
        gradient = gradients[index]
        alone = solver.apply(gradient, left=left, right=right, damping=0.01)
        compare(both[index], alone, f"{name}, both factors", rtol=1e-12)
        alone = solver.apply_right(gradient, right=right, damping=0.01)
        compare(single[index], alone, f"{name}, one factor", rtol=1e-12)
