"""The spectrum of a running factor: its extreme eigenvalues, its condition, its effective rank."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from soframe.specs import FactorSpec


def spectrum(matrix: Tensor, factor: FactorSpec, *, full: bool = False) -> dict[str, Any] | None:
    """Return a summary of a factor's eigenvalues over all its groups, in float64, as plain data.

    The matrix is the running factor, without damping. ``"condition"`` is the largest of a group,
    None if the smallest eigenvalue is zero to the rounding of the factor's dtype;
    ``"effective_rank"`` the exponential of the entropy of the normalised eigenvalues (Roy and
    Vetterli, 2007), between 1 and n, 0 for zeros, the mean over groups. None for a factor that is
    neither a matrix nor a diagonal.
    """
    if factor.kind == "psd":
        values = torch.linalg.eigvalsh(matrix.double())
    elif factor.kind == "diagonal":
        values = matrix.double().sort(dim=1).values
    else:
        return None
    values = values.flip(1)
    rounding = torch.finfo(matrix.dtype).eps * values.shape[1]
    summary: dict[str, Any] = {
        "largest": float(values[:, 0].max()),
        "smallest": float(values[:, -1].min()),
        "condition": _condition(values, rounding),
        "effective_rank": float(_effective_rank(values).mean()),
        "trace": float(values.sum(1).mean()),
    }
    if full:
        summary["eigenvalues"] = values.tolist()
    return summary


def _condition(values: Tensor, rounding: float) -> float | None:
    """Return the largest condition number over groups; None where rounding hides it."""
    largest, smallest = values[:, 0], values[:, -1]
    if not bool((smallest > rounding * largest).all()):
        return None
    condition = float((largest / smallest).max())
    return condition if math.isfinite(condition) else None


def _effective_rank(values: Tensor) -> Tensor:
    """Return ``exp(-sum_i p_i log p_i)`` with ``p_i = v_i / sum_j v_j``, for each group."""
    positive = values.clamp(min=0)  # negative ones are rounding errors
    total = positive.sum(1, keepdim=True)
    shares = positive / total.where(total > 0, 1.0)
    ranks = torch.special.entr(shares).sum(1).exp()
    return torch.where(total.squeeze(1) > 0, ranks, 0.0)
