"""Influence over long streams, where queries are rotated back, and of samples on themselves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.layers.layout import BlockShape
from soframe.methods import KFAC
from soframe.methods.spectrum import Spectrum
from soframe.products.queries import queries_of
from soframe.products.samples import Dense, Lookups, Rows
from soframe.specs import SecondOrder
from tests.curvature import fill, randn
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


@pytest.mark.parametrize(
    ("layer", "positions", "kept"),
    [
        (nn.Linear(6, 5), 2, Rows),  # 2 * 12 numbers, and 35 of a gradient with its bias
        (nn.Linear(6, 5), 3, Dense),
        (nn.Linear(5, 3), 2, Dense),  # 18 and 18
        (nn.Embedding(7, 4), 5, Lookups),  # 5 * (4 + 1) numbers, and 28 of a table
        (nn.Embedding(7, 4), 6, Dense),
    ],
)
def test_gradients_are_kept_as_rows_where_these_are_smaller(
    layer: nn.Module, positions: int, kept: type
) -> None:
    inputs = randn(4, positions, 6)
    if isinstance(layer, nn.Linear):
        inputs = inputs[..., : layer.in_features]
    else:
        inputs = torch.arange(4 * positions).view(4, positions) ** 2 % 7
    kind = Kind(fill(nn.Sequential(layer)), lambda n: inputs[:n])
    with torch.no_grad():
        batch = inputs, randn(*kind.model(inputs).shape, seed=1)
    gradients = soframe.Curvature(kind.model).gradients(batch, loss)
    (of_block,) = gradients.blocks.values()
    assert type(of_block) is kept
    torch.testing.assert_close(gradients.dense(), kind.gradients(batch))


def test_the_top_are_the_highest_scores_of_each_query() -> None:
    scores = torch.tensor([[0.5, -3.0, 2.0, 1.0], [-1.0, -2.0, -4.0, -3.0]])
    values, samples = soframe.influence.top(scores, 2)
    assert values.tolist() == [[2.0, 1.0], [-1.0, -2.0]]
    assert samples.tolist() == [[2, 3], [0, 1]]
    for number in (4, 9):  # as many as there are, and more
        values, samples = soframe.influence.top(scores, number)
        assert values.tolist() == [[2.0, 1.0, 0.5, -3.0], [-1.0, -2.0, -3.0, -4.0]]
        assert samples.tolist() == [[2, 3, 0, 1], [0, 1, 3, 2]]
    values, samples = soframe.influence.top(-scores, 2)  # that raise the loss most
    assert values.tolist() == [[3.0, -0.5], [4.0, 3.0]]
    assert samples.tolist() == [[1, 0], [2, 3]]
