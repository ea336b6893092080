"""The check of clips: registered ones pass it, wrong ones do not."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from soframe.clips import Clip, KLClip, NormClip
from soframe.registry import available, describe
from soframe.testing import check_clip
from tests.test_clips import Energy  # a user's, which is registered, too


@pytest.mark.parametrize("clip", [*sorted(available("clip")), KLClip, Energy()], ids=describe)
def test_registered_clips_pass(clip: str | type[Clip] | Clip) -> None:
    assert {"energy", "kl", "norm"} <= set(available("clip"))
    check_clip(clip)


class OfMean(Energy):
    def term(self, update: Tensor, gradient: Tensor) -> Tensor:
        return update.square().mean()


class OfLength(Energy):
    def term(self, update: Tensor, gradient: Tensor) -> Tensor:
        return update.flatten(1).norm(dim=1).sum()


class OfGradients(KLClip):
    reads_gradients = False


class OfDirections(KLClip):
    def term(self, update: Tensor, gradient: Tensor) -> Tensor:
        products, squares = (update * gradient).sum((1, 2)), gradient.square().sum((1, 2))
        return (products.square() / squares).sum()


class InPlace(Energy):
    def term(self, update: Tensor, gradient: Tensor) -> Tensor:
        return super().term(update, gradient.neg_())


class Apart(NormClip):
    def terms(self, updates: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        return [2 * term for term in super().terms(updates, gradients)]


class WithoutRoot(Energy):
    def factor(self, total: Tensor, bound: float) -> Tensor:
        return bound / total


class Negative(Energy):
    def factor(self, total: Tensor, bound: float) -> Tensor:
        return -super().factor(total, bound)


class Looser(Energy):
    def factor(self, total: Tensor, bound: float) -> Tensor:
        return super().factor(total, 1 / bound)


class NotOfZeros(Energy):
    def factor(self, total: Tensor, bound: float) -> Tensor:
        return (bound * total).sqrt() / total


@pytest.mark.parametrize(
    ("clip", "message"),
    [
        (OfMean, "the sum of groups"),
        (Apart, "the sum of groups"),
        (OfLength, "twice the update and gradient"),
        (OfGradients, "a term without gradients"),
        (OfDirections, "is nan without a gradient"),
        (InPlace, "a tensor that it is given has changed"),
        (WithoutRoot, "the factor of scaled updates"),
        (Negative, "the factor is -"),
        (Looser, "at the bound 1.0"),
        (NotOfZeros, "zeros are scaled"),
    ],
)
def test_wrong_clips_are_found(clip: type[Clip], message: str) -> None:
    with pytest.raises(AssertionError, match=f"^{clip.__name__}: .*{message}"):
        check_clip(clip)
