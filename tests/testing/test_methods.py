"""The check of a method tells what the other tests of methods take for granted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from soframe.layers.layout import BlockShape
from soframe.methods.kfac import KFAC
from soframe.specs import FactorSpec
from soframe.testing import check_method


class OfTheFirstDegree(KFAC):
    """Its factor of output gradients grows with the batch, however that is cut up."""

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        a, g = super().factors(shape)
        return a, replace(g, degree=1)


class OfDegreeTwo(KFAC):
    """Its factor of inputs grows with the batch, too."""

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        a, g = super().factors(shape)
        return replace(a, degree=2), g


@pytest.mark.parametrize("method", [OfTheFirstDegree(), OfDegreeTwo], ids=repr)
def test_a_wrong_degree_shows_where_the_batch_grows(method: KFAC | type[KFAC]) -> None:
    with pytest.raises(AssertionError, match="every sample twice"):
        check_method(method, ranks=())
