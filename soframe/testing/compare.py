"""Dense linear algebra and comparisons for tests of curvature; torch alone, float64.

Most bugs in this field are wrong constants, so a failed comparison reports the factor.
"""

from __future__ import annotations

import torch
from torch import Tensor

# By the coarser of the two dtypes compared.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def dense_preconditioned(fisher: Tensor, gradient: Tensor, damping: float) -> Tensor:
    """Return ``(F + damping I)^-1 g`` by a dense solve.

    Args:
        fisher: ``[P, P]``.
        gradient: Any shape of P elements, read row-major, such as a matrix ``[out, in(+1)]``.
        damping: Added to the diagonal.

    Returns:
        The shape of ``gradient``, float64. A singular damped matrix raises torch's LinAlgError.
    """
    fisher = fisher.double()
    identity = torch.eye(len(fisher), dtype=torch.float64, device=fisher.device)
    solution: Tensor = torch.linalg.solve(fisher + damping * identity, gradient.double().flatten())
    return solution.reshape(gradient.shape)


def compare(
    actual: Tensor, expected: Tensor, name: str, *, rtol: float | None = None, atol: float = 1e-12
) -> float:
    """Assert that two tensors agree; the error reports the factor between them.

    The error is relative to the whole tensor, ``||actual - expected||_F / ||expected||_F``: an
    entry that should be zero is then measured on the scale of the others.

    Args:
        actual: The result of the code under test.
        expected: The reference, of the same shape.
        name: The tensor's name; begins the message.
        rtol: The largest relative error; by default 1e-9 for float64, 1e-4 for float32, 1e-2 for
            float16 and 5e-2 for bfloat16, by the coarser of the two dtypes.
        atol: Tensors are equal too if no entry differs by more.

    Returns:
        The relative error.

    Raises:
        AssertionError: If they differ. The message has the largest absolute error, the relative
            error, and the median, least and greatest of ``actual / expected``.
    """
    if actual.shape != expected.shape:
        raise AssertionError(
            f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        )
    if rtol is None:
        rtol = max(_TOLERANCE.get(actual.dtype, 1e-9), _TOLERANCE.get(expected.dtype, 1e-9))
    got = actual.detach().cpu().double().flatten()
    want = expected.detach().cpu().double().flatten()
    if got.numel() == 0:
        return 0.0
    largest = float((got - want).abs().max())
    norm = float(want.norm())
    absolute = float((got - want).norm())
    error = 0.0
    if norm:
        error = absolute / norm
    elif largest:
        error = float("inf")
    # Written so that a NaN fails.
    if error <= rtol or largest <= atol:
        return error
    raise AssertionError(
        f"{name}: relative error {error:.3e} > {rtol:.1e}\n"
        f"  largest absolute error {largest:.6e} (largest expected {float(want.abs().max()):.6e})\n"
        f"  {_ratios(got, want)}"
    )


def _ratios(got: Tensor, want: Tensor) -> str:
    broken = int((~got.isfinite()).sum())
    if broken or not bool(want.isfinite().all()):
        wrong = int((~want.isfinite()).sum())
        return f"of {got.numel()} entries {broken} are not finite in actual, {wrong} in expected"
    large = want.abs() > 1e-9 * want.abs().max()
    if not bool(large.any()):
        return "expected is zero everywhere"
    ratios = got[large] / want[large]
    low, middle, high = float(ratios.min()), float(ratios.median()), float(ratios.max())
    text = (
        f"actual/expected: median {middle:.6g}, min {low:.6g}, max {high:.6g} "
        f"({len(ratios)} of {len(want)} entries; in the others expected is zero)"
    )
    if high - low <= 1e-3 * abs(middle):
        text += f"\n  a constant factor of {middle:.6g}: look for the scale"
    return text


def seeded(seed: int = 0) -> torch.Generator:
    """Return a generator of random numbers on the CPU."""
    return torch.Generator().manual_seed(seed)
