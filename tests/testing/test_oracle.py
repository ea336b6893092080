"""The exact Gauss-Newton matrix against dense float64 matrices, and steps along its inverse."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.testing import GaussNewton, Oracle, dense_fisher
from tests.curvature import fill, randn

DAMPING = 0.05


class Tied(nn.Module):
    """A layer that is used twice, a norm, and attention, whose fused kernel has one derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.inner(self.inner(x).tanh())) * self.frozen
        mixed, _ = self.attention(x, x, x, need_weights=False)
        outputs: Tensor = self.head(mixed.mean(1))
        return outputs


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    return fill(Tied()), randn(6, 2, 4), torch.tensor([0, 2, 1, 1, 0, 2])


def layers_of(model: nn.Module) -> list[list[str]]:
    layers: dict[str, list[str]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
    return list(layers.values())


def joined(layers: list[list[str]]) -> list[str]:
    return list(itertools.chain.from_iterable(layers))


def dense(model: nn.Module, x: Tensor, y: Tensor, blocks: Any) -> Tensor:
    """Return the matrix in the order of the parameters, zero between blocks."""
    criterion = nn.functional.cross_entropy
    matrix = dense_fisher(model, x, criterion, y, kind="type-2")
    labels = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            number = next(i for i, block in enumerate(blocks) if name in block)
            labels.append(torch.full((parameter.numel(),), number))
    block_of = torch.cat(labels)
    return matrix * (block_of.unsqueeze(0) == block_of.unsqueeze(1))


def flat(vector: dict[str, Tensor]) -> Tensor:
    return torch.cat([tensor.flatten() for tensor in vector.values()])


@pytest.mark.parametrize("blocks", ["layers", "all", "halves"])
def test_products_and_solves_are_dense_ones(blocks: Any) -> None:
    model, x, y = problem()
    layers = layers_of(model)
    chosen = {
        "layers": layers,
        "all": [joined(layers)],
        "halves": [joined(layers[:2]), joined(layers[2:])],
    }[blocks]
    matrix = GaussNewton(
        model,
        lambda: nn.functional.cross_entropy(model(x), y),
        chosen if blocks == "halves" else blocks,
    )
    wanted = dense(model, x, y, chosen)
    vector = {n: randn(*p.shape, seed=i) for i, (n, p) in enumerate(model.named_parameters())}
    del vector["frozen"]
    product, solved = matrix @ vector, matrix.solve(vector, DAMPING, tolerance=1e-13)
    torch.testing.assert_close(flat(product), wanted @ flat(vector), rtol=1e-9, atol=1e-11)
    inverse = torch.linalg.inv(wanted + DAMPING * torch.eye(len(wanted), dtype=torch.float64))
    torch.testing.assert_close(flat(solved), inverse @ flat(vector), rtol=1e-8, atol=1e-10)
    rough = matrix.solve(vector, DAMPING, iterations=2)
    assert not torch.allclose(flat(rough), flat(solved), rtol=1e-2)


@pytest.mark.parametrize("blocks", ["layers", "all"])
def test_steps_are_sgd_along_dense_solutions(blocks: Any) -> None:
    model, x, y = problem()
    copy, _, _ = problem()
    oracle = Oracle(model, 0.5, damping=DAMPING, blocks=blocks, momentum=0.9, tolerance=1e-12)
    sgd = torch.optim.SGD(copy.parameters(), 0.5, momentum=0.9)
    trained = [p for p in copy.parameters() if p.requires_grad]
    division = layers_of(copy) if blocks == "layers" else [joined(layers_of(copy))]
    for _ in range(3):
        loss = oracle.step(lambda: nn.functional.cross_entropy(model(x), y))
        wanted = nn.functional.cross_entropy(copy(x), y)
        assert float(loss) == pytest.approx(float(wanted.detach()), rel=1e-9)
        gradients = torch.autograd.grad(wanted, trained)
        matrix = dense(copy, x, y, division)
        column = torch.cat([gradient.flatten() for gradient in gradients])
        update = torch.linalg.solve(
            matrix + DAMPING * torch.eye(len(matrix), dtype=torch.float64), column
        )
        parts = update.split([p.numel() for p in trained])
        for parameter, part in zip(trained, parts, strict=True):
            parameter.grad = part.view_as(parameter)
        sgd.step()
    for parameter, other in zip(model.parameters(), copy.parameters(), strict=True):
        torch.testing.assert_close(parameter, other, rtol=1e-7, atol=1e-9)


def test_kfac_is_exact_where_its_assumption_holds() -> None:
    """Of a linear model with a constant Hessian inputs and output gradients are independent."""
    model, x, y = fill(nn.Sequential(nn.Linear(4, 3))), randn(7, 4), randn(7, 3, seed=1)

    def loss(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        outputs = model(batch[0])
        return outputs, (outputs - batch[1]).square().sum(1).mean() / 2

    statistics = soframe.Statistics(fisher="type-2", loss="squared-error")
    curvature = soframe.Curvature(model, statistics=statistics).fit([(x, y)], loss)
    blocks = [list(names.values()) for names in curvature.names.values()]
    exact = GaussNewton(model, lambda: loss(model, (x, y))[1], blocks)
    vector = {name: randn(*p.shape) for name, p in model.named_parameters()}
    torch.testing.assert_close(curvature @ vector, exact @ vector, rtol=1e-9, atol=1e-11)
    approximate = curvature.inverse(DAMPING) @ exact.gradient
    solved = exact.solve(exact.gradient, DAMPING, tolerance=1e-12)
    torch.testing.assert_close(approximate, solved, rtol=1e-8, atol=1e-10)


def test_a_buffer_and_a_gradient_stay_as_they_are_without_a_step() -> None:
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    x = randn(5, 3)
    gradients = GaussNewton(model, lambda: model(x).square().mean()).gradient
    assert all(parameter.grad is None for parameter in model.parameters())
    model(x).square().mean().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)


def test_errors_have_a_remedy() -> None:
    model, x, y = problem()

    def loss() -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    matrix = GaussNewton(model, loss)
    vector = dict(matrix.gradient)
    with pytest.raises(ValueError, match="damping of an exact solve must be positive"):
        matrix.solve(vector, 0.0)
    with pytest.raises(ValueError, match=r"at head.bias: pass a tensor"):
        matrix @ {**vector, "head.bias": randn(2)}
    del vector["norm.bias"]
    with pytest.raises(ValueError, match=r"at norm.bias: pass a tensor"):
        matrix.solve(vector, 1.0)
    twice = ["head.weight", "head.bias", "head.bias"]
    blocks = [*layers_of(model)[1:-1], twice]
    with pytest.raises(ValueError, match=r"head.bias, inner.bias, inner.weight is missing"):
        GaussNewton(model, loss, blocks)
    with pytest.raises(RuntimeError, match="other than through the model's output"):
        GaussNewton(model, lambda: loss() + model.head.weight.square().sum())  # type: ignore[union-attr, operator]
