"""The check of a clip: its terms add up over blocks, and its factor meets the bound."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from soframe.clips import Clip
from soframe.registry import KINDS
from soframe.testing.compare import compare, seeded

_SHAPES = ((3, 2, 5), (1, 4, 4), (2, 1, 3))  # of stacks: [groups, out, in]


def check_clip(clip: str | type[Clip] | Clip) -> None:
    """Check a clip: blocks may be shared by ranks in any way, and a clipped step meets the bound.

    - The term of a stack is the sum of its groups', and quadratic in update and gradient together.
      `Clip.terms` gives the same, and a clip that does not read gradients leaves them alone.
    - Any bound has a positive factor, which is one for updates that were scaled by it, and no
      smaller for a larger bound. Zeros are not scaled.
    - Updates and gradients stay as they are, in float32, too.

    Args:
        clip: The clip; or its name or class.

    Raises:
        AssertionError: If the clip is wrong.
    """
    checked: Clip = KINDS["clip"].build(clip, Clip)
    name = type(checked).__name__
    for dtype in (torch.float64, torch.float32):
        generator, updates, gradients = seeded(), list[Tensor](), list[Tensor]()
        for shape in _SHAPES:
            updates.append(torch.randn(shape, dtype=dtype, generator=generator))
            gradients.append(updates[-1] * torch.rand(shape, dtype=dtype, generator=generator))
        before = [tensor.clone() for tensor in updates + gradients]
        terms = checked.terms(updates, gradients)
        for update, gradient, term in zip(updates, gradients, terms, strict=True):
            groups = map(checked.term, update.split(1), gradient.split(1))
            compare(term, torch.stack(list(groups)).sum(), f"{name}: terms() and the sum of groups")
            alone = checked.term(update, 0 * gradient)
            assert alone.isfinite(), f"{name}: the term is {alone} without a gradient"
            twice = checked.term(2 * update, 2 * gradient)
            compare(twice, 4 * term, f"{name}: the term of twice the update and gradient")
            if not checked.reads_gradients:
                compare(checked.term(update, update), term, f"{name}: a term without gradients")
        for tensor, former in zip(updates + gradients, before, strict=True):
            assert torch.equal(tensor, former), f"{name}: a tensor that it is given has changed"
        total, last = torch.stack(list(terms)).double().sum(), 0.0
        for bound in (1e-3, 1.0, 1e3):
            factor = checked.factor(total, bound)
            assert last <= factor < math.inf, f"{name}: the factor is {factor} at the bound {bound}"
            last = factor.item()
            again = checked.factor(factor.square() * total, bound)
            compare(again, torch.ones_like(total), f"{name}: the factor of scaled updates")
            assert checked.factor(0 * total, bound) >= 1, f"{name}: zeros are scaled"
