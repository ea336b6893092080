"""What each solver must equal: the dense inverse under its own damping."""

from collections.abc import Mapping

import torch
from torch import Tensor

from soframe.solvers import (
    Eigen,
    Inverse,
    NewtonSchulz,
    OrthogonalIteration,
    Solver,
    solve_stack,
)
from soframe.solvers.base import mean_trace, retry
from soframe.specs import FactorSpec
from tests.curvature import randn

SOLVERS: dict[str, Solver] = {
    "eigen": Eigen(),
    "inverse, pi": Inverse(),
    "inverse, sqrt": Inverse(split="sqrt"),
    "inverse, full": Inverse(split="full"),
    "orthogonal iteration": OrthogonalIteration(),
    "newton-schulz, pi": NewtonSchulz(),
    "newton-schulz, full": NewtonSchulz(split="full"),
}


def spectrum(groups: int, n: int, smallest: float, seed: int = 0) -> Tensor:
    """Positive semi-definite ``[groups, n, n]`` with eigenvalues from 1 down to ``smallest``.

    They fall geometrically; ``smallest = 0`` leaves one of them zero, and the others fall to 1e-4.
    """
    values = torch.logspace(0, 1, n, base=smallest or 1e-4, dtype=torch.float64)
    if not smallest:
        values[-1] = 0
    vectors = torch.linalg.qr(randn(groups, n, n, seed=seed))[0]
    matrix = vectors * values @ vectors.mT
    return (matrix + matrix.mT) / 2


class SolveFailedError(RuntimeError):
    """A factor can be solved neither in its own precision nor in float64."""


def solve_safely(
    solver: Solver, matrix: Tensor, damping: Tensor, last: Mapping[str, Tensor] | None = None
) -> tuple[dict[str, Tensor], bool]:
    """Solve as the step does; return the data, and whether float64 was needed."""
    data, good = solve_stack(solver, matrix, damping, last)
    failed = [group for group, ok in enumerate(good.tolist()) if not ok]
    data, reasons = retry(solver, matrix, damping, data, failed)
    if reasons:
        raise SolveFailedError(next(iter(reasons.values())))
    return data, bool(failed)


def run(solver: Solver, gradient: Tensor, g: Tensor, a: Tensor, damping: float) -> Tensor:
    """Precondition as the step does: shares, solve, apply; ``[groups, out, in]``."""
    shares = solver.shares([mean_trace(a), mean_trace(g)], damping)
    right, _ = solve_safely(solver, a, shares[0])
    left, _ = solve_safely(solver, g, shares[1])
    for name, factor in (("A", a), ("G", g)):
        spec = FactorSpec(name, "right" if name == "A" else "left", len(factor), factor.shape[-1])
        data = right if name == "A" else left
        assert {k: tuple(t.shape) for k, t in data.items()} == {
            k: s.shape for k, s in solver.tensors(spec).items()
        }
    return solver.apply(gradient, left=left, right=right, damping=damping)


def damped(name: str, g: Tensor, a: Tensor, damping: float) -> Tensor:
    """The matrix that a solver inverts, ``[out * in, out * in]``, for one group."""
    identities = torch.eye(len(g), dtype=torch.float64), torch.eye(len(a), dtype=torch.float64)
    if name in ("eigen", "orthogonal iteration"):
        return torch.kron(g, a) + damping * torch.kron(*identities)
    own, other = damping, damping
    if not name.endswith("full"):
        pi = 1.0
        if name.endswith("pi"):
            if g.trace() == 0 or a.trace() == 0:
                # The limit of pi as a factor goes to zero: the other one is not seen either.
                return damping * torch.kron(*identities)
            pi = float((a.trace() / len(a) / (g.trace() / len(g))).sqrt())
        own, other = damping**0.5 / pi, damping**0.5 * pi
    return torch.kron(g + own * identities[0], a + other * identities[1])
