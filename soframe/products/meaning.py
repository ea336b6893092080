"""The meaning of a fitted curvature, for readers of its files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from soframe.blocks.block import Block
from soframe.products.fitting import Fit
from soframe.registry import describe


def meaning_of(block: Block, names: Mapping[str, str], fit: Fit | None) -> dict[str, Any]:
    """Return the meaning of the tensors of a block, as in JSON; without a fit of training."""
    meaning: dict[str, Any] = {
        "parameters": dict(names),
        "matrix": list(block.shape),
        "bias_column": {"weight", "bias"} <= block.parameters.keys(),
        "method": describe(block.method),
    }
    for factor in block.factors:
        meaning[factor.name] = {
            "side": factor.side,
            "kind": str(factor.kind),
            "shape": list(factor.shape),
            "degree": factor.degree,
            "mean_over": factor.mean_over,
            "number": None if fit is None else fit.numbers(block, factor),
        }
    return meaning
