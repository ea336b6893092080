"""Influence over long streams, where queries are rotated back, and of samples on themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import soframe
from soframe.layers.layout import BlockShape
from soframe.methods import KFAC
from soframe.methods.spectrum import Spectrum
from soframe.products.queries import queries_of
from soframe.specs import SecondOrder
from tests.products.kinds import KINDS, Batch, Kind, loss

DAMPING = 0.1


def singles(kind: Kind) -> list[Batch]:
    """Return batches of one sample."""
    batches = []
    for inputs, targets in kind.data():
        pairs = zip(inputs.split(1), targets.split(1), strict=True)
        batches += list(pairs)
    return batches


def dense(kind: Kind, curvature: soframe.Curvature, data: list[Batch]) -> tuple[Tensor, Tensor]:
    """Return gradients and their products with the dense inverse, ``[samples, parameters]``."""
    operator = curvature.to_scipy()
    matrix = torch.from_numpy(operator @ torch.eye(operator.shape[0]).double().numpy())
    names = dict(kind.model.named_parameters())
    gradients = [kind.gradients(batch) for batch in data]
    rows = [torch.cat([g[name].flatten(1) for name in names], 1) for g in gradients]
    flat = torch.cat(rows)
    return flat, torch.linalg.solve(matrix + DAMPING * torch.eye(len(matrix)), flat.T).T


@pytest.mark.parametrize("name", ["Linear, positions", "Conv2d, grouped", "Embedding"])
def test_scores_of_a_long_stream_are_those_of_the_dense_inverse(name: str) -> None:
    kind = KINDS[name]()
    data = singles(kind)
    curvature = soframe.Curvature(kind.model, "ekfac").fit(data, loss)
    gradients, solved = dense(kind, curvature, data)
    stream = 20 * data
    for queries in (1, 3):  # batches of one each
        scores = soframe.influence.scores(curvature, data[:queries], stream, loss, damping=DAMPING)
        torch.testing.assert_close(scores, (solved[:queries] @ gradients.T).repeat(1, 20))
    own = soframe.influence.self_influence(curvature, data, loss, damping=DAMPING)
    torch.testing.assert_close(own, (solved * gradients).sum(1))


class Flipped(KFAC):
    """K-FAC with its inputs in the opposite order, by a basis."""

    def spectrum(self, shape: BlockShape, data: SecondOrder) -> Spectrum:
        plain = super().spectrum(shape, data)
        order = torch.eye(shape.in_features).to(plain.values).flip(-1).unsqueeze(0)
        return Spectrum(plain.values.flip(-1), plain.left, order)


def test_a_method_may_have_a_basis_of_indices() -> None:
    kind = KINDS["Embedding"]()
    data = singles(kind)
    scores: list[Tensor] = []
    for method in (KFAC(), Flipped()):
        curvature = soframe.Curvature(kind.model, method).fit(data, loss)
        scores.append(soframe.influence.scores(curvature, data[:2], data, loss, damping=DAMPING))
    torch.testing.assert_close(*scores)


def test_each_side_is_rotated_back_when_samples_have_cost_as_much() -> None:
    kind = KINDS["Linear, positions"]()
    data = singles(kind)
    curvature = soframe.Curvature(kind.model, "ekfac").fit(data, loss)
    samples = curvature.gradients(data[0], loss)
    queries = queries_of(curvature.inverse(DAMPING), [samples])
    assert queries is not None
    (block,) = queries.blocks.values()
    assert block.left is not None
    assert block.right is not None
    for _ in range(max(block.matrices.shape)):
        queries.dot(samples)
    assert block.left is None
    assert block.right is None
