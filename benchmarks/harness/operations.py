"""How many multiply-adds the parts of a step take, counted from shapes."""

from __future__ import annotations

from harness.step_times import PHASES
from soframe.strategies.placement import Placement


def operations(placement: Placement, rows: int, attention: float = 0.0) -> dict[str, float]:
    """Count what a step takes on the rank that has most to do.

    Every layer sees the same number of rows, as in a transformer.

    Args:
        placement: Where the work of the layers is done.
        rows: Samples times positions, on a rank.
        attention: Multiply-adds of a forward pass besides the layers'.

    Returns:
        ``"plain"``: forward and backward pass, three products for each layer. ``"apply"``: a
        product with the inverse of each factor. ``"factors"``: one triangle for each factor.
        ``"solve"``: a Cholesky factorisation, n^3 / 6, and the inverse from it, n^3 / 3.
    """
    plain = 3 * attention
    parts = {part: [0.0] * placement.world_size for part in PHASES}
    for work, place in zip(placement.work, placement.blocks, strict=True):
        groups, out, into = work.shape
        plain += 3 * rows * groups * out * into
        for index, factor in enumerate(work.factors):
            parts["solve"][place.owners[index]] += groups * factor.size**3 / 2
            for rank in place.gradient_workers:
                parts["apply"][rank] += groups * out * into * factor.size
            for rank in place.contributing(index):
                parts["factors"][rank] += rows * groups * factor.size**2 / 2
    return {"plain": plain, **{part: max(counts) for part, counts in parts.items()}}
