"""The curvature of a block as a spectrum: eigenvalues in a basis of Kronecker products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Spectrum:
    """The matrix ``(R ⊗ L) diag(values) (R ⊗ L)^T`` of each group, with orthogonal L and R.

    Attributes:
        values: The eigenvalues, ``[groups, out, in]``.
        left: L, ``[groups, out, out]`` (columns); None for the identity.
        right: R, ``[groups, in, in]`` (columns); None for the identity.
        null: Where an eigenvalue is zero within the rounding of a factor, bool ``[groups, out,
            in]``; None where zeros are exact.
    """

    values: Tensor
    left: Tensor | None = None
    right: Tensor | None = None
    null: Tensor | None = None

    @property
    def zeros(self) -> Tensor:
        """Where an eigenvalue is zero within rounding, or too small for an inverse, bool."""
        vanishing = self.values < torch.finfo(self.values.dtype).tiny
        return vanishing if self.null is None else vanishing | self.null

    def apply(self, matrices: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Multiply by the matrix whose eigenvalues are a function of these.

        Args:
            matrices: Vectors as gradient matrices, ``[..., groups, out, in]``.
            function: Maps eigenvalues to eigenvalues.

        Returns:
            ``[..., groups, out, in]``.
        """
        rotated = matrices
        if self.left is not None:
            rotated = self.left.mT @ rotated
        if self.right is not None:
            rotated = rotated @ self.right
        scaled = rotated * function(self.values)
        if self.left is not None:
            scaled = self.left @ scaled
        if self.right is not None:
            scaled = scaled @ self.right.mT
        return scaled


def kronecker(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> Spectrum:
    """Return the spectrum of ``right ⊗ left``, given the eigenvalues and vectors of both.

    Args:
        left: ``values`` ``[groups, out]`` and ``vectors``; a diagonal has no vectors.
        right: The same of ``[groups, in]``.

    Raises:
        ValueError: If the solver has computed no eigenvalues.
    """
    if "values" not in left or "values" not in right:
        raise ValueError(
            "products with a curvature need the eigenvalues of its factors, and this solver "
            "computes none: pass solver='eigen'"
        )
    values = left["values"].unsqueeze(-1) * right["values"].unsqueeze(-2)
    null = _null(left).unsqueeze(-1) | _null(right).unsqueeze(-2)
    return Spectrum(values, left.get("vectors"), right.get("vectors"), null)


def _null(data: Mapping[str, Tensor]) -> Tensor:
    """Return where the eigenvalues of a factor, ``[groups, n]``, are zero within rounding."""
    values = data["values"]
    if "vectors" not in data:
        return values <= 0  # a diagonal, whose entries are not rounded by the largest one
    # The bound of torch.linalg.pinv.
    rounding = values.shape[-1] * torch.finfo(values.dtype).eps
    return values <= rounding * values.amax(-1, keepdim=True)
