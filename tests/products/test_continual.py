"""The quadratic penalty of continual learning, against dense matrices."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import soframe
from tests.curvature import fill, randn
from tests.products.kinds import KINDS, loss
from tests.products.table import taken, vectors
from tests.products.test_fitting import batches, cross_entropy, network


@pytest.mark.parametrize("name", ["Linear", "MultiheadAttention", "LSTMCell", "BatchNorm2d, eval"])
def test_the_penalty_and_its_gradient_are_dense_products(name: str) -> None:
    kind = KINDS[name]()
    data = kind.data()
    curvature = soframe.Curvature(kind.model, layers=kind.layers).fit(data, loss)
    matrices = kind.matrices(data)
    anchor = copy.deepcopy(kind.model.state_dict())
    moves = vectors(kind, 1)
    with torch.no_grad():
        for key, parameter in kind.model.named_parameters():
            parameter.add_(moves[key][0])
    value = soframe.continual.penalty(curvature, anchor)
    value.backward()
    gradient = {key: p.grad.unsqueeze(0) for key, p in kind.model.named_parameters()}  # type: ignore[union-attr]
    expected = torch.zeros((), dtype=torch.float64)
    for matrix, move, slope in zip(
        matrices, taken(kind, moves), taken(kind, gradient), strict=True
    ):
        product = torch.einsum("gpq,ngq->ngp", matrix, move)
        expected += (product * move).sum() / 2
        torch.testing.assert_close(slope, product, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(value.detach(), expected, rtol=1e-10, atol=1e-12)


class Scaled(nn.Module):
    """A linear layer, and a parameter without a layer helper."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale = nn.Linear(3, 4), nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.scale * self.inner(x)
        return outputs


@pytest.mark.parametrize("auxiliary", [None, "diagonal"])
def test_of_the_diagonal_it_is_elastic_weight_consolidation(auxiliary: str | None) -> None:
    model = fill(Scaled())
    data = [(randn(n, 3, seed=n), torch.arange(n) % 4) for n in (5, 3)]
    fisher = dict.fromkeys(["scale", "inner.weight", "inner.bias"], torch.zeros(()))
    for inputs, labels in data:
        for number in range(len(labels)):
            model.zero_grad()
            outputs = model(inputs[number : number + 1])
            nn.functional.cross_entropy(outputs, labels[number : number + 1]).backward()
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                fisher[name] = fisher[name] + parameter.grad.square() / 8  # of all samples
    skip = [] if auxiliary else ["^$"]  # the parameter without a block
    curvature = soframe.Curvature(model, "diagonal", auxiliary=auxiliary, skip=skip)
    curvature.fit(data, cross_entropy)
    anchor = copy.deepcopy(model.state_dict())
    wanted = torch.zeros((), dtype=torch.float64)
    with torch.no_grad():
        for number, (name, parameter) in enumerate(model.named_parameters()):
            parameter.add_(randn(*parameter.shape, seed=number))
            if auxiliary or name != "scale":
                move = parameter - anchor[name]
                wanted += (fisher[name] * move.square()).sum() / 2
    torch.testing.assert_close(soframe.continual.penalty(curvature, anchor).detach(), wanted)


def test_a_second_task_keeps_the_first_where_it_is_determined() -> None:
    model = network()
    old, new = batches(30), batches(7, 12)[1:]
    statistics = soframe.Statistics(fisher="type-2", loss="cross-entropy")
    sgd = torch.optim.SGD(model.parameters(), lr=0.3)

    def losses() -> tuple[float, float]:
        with torch.no_grad():
            return float(cross_entropy(model, old[0])[1]), float(cross_entropy(model, new[0])[1])

    for _ in range(200):
        sgd.zero_grad()
        cross_entropy(model, old[0])[1].backward()
        sgd.step()
    curvature = soframe.Curvature(model, statistics=statistics).fit(old, cross_entropy)
    anchor = copy.deepcopy(model.state_dict())
    before = losses()
    forgotten = []
    for strength in (0.0, 1.0):
        model.load_state_dict(anchor)
        for _ in range(100):
            sgd.zero_grad()
            value = cross_entropy(model, new[0])[1]
            (value + strength * soframe.continual.penalty(curvature, anchor)).backward()
            sgd.step()
        after = losses()
        assert after[1] < before[1]
        forgotten.append(after[0] - before[0])
    assert forgotten[1] < 0.5 * forgotten[0]


def test_a_missing_anchor_is_an_error() -> None:
    model = network()
    curvature = soframe.Curvature(model)
    anchor = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match="not fitted"):
        soframe.continual.penalty(curvature, anchor)
    curvature.fit(batches(5), cross_entropy)
    del anchor["3.bias"]
    with pytest.raises(ValueError, match=r"lacks 3.bias.*state_dict"):
        soframe.continual.penalty(curvature, anchor)


def test_an_anchor_that_is_the_weights_is_an_error() -> None:
    model = network()
    curvature = soframe.Curvature(model).fit(batches(5), cross_entropy)
    for anchor in (model.state_dict(), dict(model.named_parameters())):
        with pytest.raises(ValueError, match=r"not a copy.*deepcopy"):
            soframe.continual.penalty(curvature, anchor)


def test_an_anchor_of_another_shape_is_an_error() -> None:
    """A bias of one output would be added to each of several."""
    model = network()
    curvature = soframe.Curvature(model).fit(batches(5), cross_entropy)
    anchor = copy.deepcopy(model.state_dict())
    anchor["3.bias"] = anchor["3.bias"][:1]
    with pytest.raises(ValueError, match=r"3.bias has the shape \[3\].*anchor \[1\].*skip="):
        soframe.continual.penalty(curvature, anchor)
