"""The curvature of a block as a spectrum: eigenvalues in a basis of Kronecker products."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Spectrum:
    """The matrix ``(R ⊗ L) diag(values) (R ⊗ L)^T`` of each group, with orthogonal L and R.

    Attributes:
        values: The eigenvalues, ``[groups, out, in]``.
        left: L, ``[groups, out, out]`` (columns); None for the identity.
        right: R, ``[groups, in, in]`` (columns); None for the identity.
    """

    values: Tensor
    left: Tensor | None = None
    right: Tensor | None = None

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
    return Spectrum(values, left.get("vectors"), right.get("vectors"))
