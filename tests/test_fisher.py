"""The Fishers that `observe` takes: against the dense Gauss-Newton matrix where K-FAC is exact."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import soframe
from soframe.capture.fisher import Fisher
from soframe.losses import CrossEntropy, MeanSquaredError, SquaredError
from soframe.testing import compare, dense_preconditioned, layer_fisher
from tests import kit
from tests.curvature import (
    Batch,
    blocks,
    closing,
    factors,
    fill,
    gradient_matrix,
    half_square,
    preconditioner,
    randn,
)
from tests.distributed.harness import run_ranks

Criterion = Callable[[Tensor, Tensor], Tensor]
AVERAGES = ["local", "global", "sum"]


def labels(*shape: int, classes: int, seed: int = 0) -> Tensor:
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


def observe(
    model: nn.Module,
    own: soframe.Preconditioner,
    batches: Sequence[Batch],
    criterion: Criterion,
    average: str = "local",
) -> None:
    """Forward, observe and backward of micro-batches; ``criterion`` is a mean over samples."""
    total = sum(len(x) for x, _ in batches)
    for x, y in batches:
        output = model(x)
        own.observe(output)
        weight = {"local": 1 / len(batches), "global": len(x) / total, "sum": len(x)}[average]
        (criterion(output, y) * weight).backward()


def check(
    model: nn.Module,
    own: soframe.Preconditioner,
    batches: Sequence[Batch],
    criterion: Criterion,
    average: str = "local",
    damping: float = 0.1,
) -> None:
    """Hold every block and its preconditioned gradient to the dense type-2 Fisher."""
    observe(model, own, batches, criterion, average)
    raw = {name: gradient_matrix(block).clone() for name, block in blocks(own).items()}
    own.step()
    if average != "local":
        batches = [(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))]
    for name, block in blocks(own).items():
        exact = [layer_fisher(model, name, x, criterion, y, kind="type-2") for x, y in batches]
        result = gradient_matrix(block)
        for group, (a, g) in enumerate(zip(*factors(own, name), strict=True)):
            fisher = torch.stack([each[group] for each in exact]).mean(0)
            compare(torch.kron(g, a), fisher, f"{name}, group {group}: kron(G, A)")
            expected = dense_preconditioned(fisher, raw[name][group], damping)
            compare(result[group], expected, f"{name}, group {group}: preconditioned gradient")


def convolutional() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 3, (2, 3)), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3))


def one_position() -> nn.Sequential:
    """A convolution whose output is one position: K-FAC is exact for it on one datum."""
    return nn.Sequential(nn.Conv2d(2, 4, 2, groups=2), nn.Tanh(), nn.Flatten(), nn.Linear(4, 3))


def deep_linear() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4), nn.Linear(4, 2))


def deep() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 4), nn.Linear(4, 3))


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize(
    ("make", "shape"), [(deep, (1, 3)), (one_position, (1, 2, 2, 2))], ids=["linear", "conv"]
)
def test_one_datum_of_any_net(
    make: Callable[[], nn.Module], shape: tuple[int, ...], average: str
) -> None:
    model, data = fill(make()), [(randn(*shape), labels(1, classes=3))]
    own = preconditioner(model, fisher="type-2", loss="cross-entropy", loss_average=average)
    with closing(own):
        check(model, own, data, F.cross_entropy, average)


@pytest.mark.parametrize("average", AVERAGES)
@pytest.mark.parametrize("sizes", [(5,), (3, 3), (1, 6)], ids=str)
@pytest.mark.parametrize(
    ("loss", "criterion"),
    [("mse", F.mse_loss), (SquaredError(), half_square)],
    ids=["mse", "squared-error"],
)
@pytest.mark.covering(together=2)
def test_any_batch_of_a_deep_linear_net(
    loss: Any, criterion: Criterion, sizes: tuple[int, ...], average: str
) -> None:
    model = fill(deep_linear())
    data = [(randn(n, 3, seed=i), randn(n, 2, seed=9 + i)) for i, n in enumerate(sizes)]
    with closing(preconditioner(model, fisher="type-2", loss=loss, loss_average=average)) as own:
        check(model, own, data, criterion, average)


def by_hand(
    model: nn.Sequential, x: Tensor, hessian: Callable[[Tensor], Tensor], layer: int
) -> tuple[Tensor, Tensor]:
    """A and G of a linear layer, summed up sample by sample from dense Jacobians."""
    before, after = model[:layer], model[layer + 1 :]
    a_sum, g_sum = 0.0, 0.0
    for n in range(len(x)):
        a = torch.cat([before(x[n : n + 1])[0], torch.ones(1).double()])
        point = model[layer](before(x[n : n + 1]))
        jacobian = torch.func.jacrev(lambda z: after(z.clone())[0])(point)[:, 0]
        a_sum = a_sum + torch.outer(a, a)
        g_sum = g_sum + jacobian.T @ hessian(after(point.clone())[0]) @ jacobian
    return (a_sum / len(x)).detach(), (g_sum / len(x)).detach()


def softmax_hessian(f: Tensor) -> Tensor:
    p = f.softmax(0)
    return torch.diag(p) - torch.outer(p, p)


@pytest.mark.parametrize("sizes", [(6,), (2, 4)], ids=str)
def test_factors_are_means_over_samples_where_the_hessian_differs(sizes: tuple[int, ...]) -> None:
    model = fill(deep())
    x, y = randn(6, 3), labels(6, classes=3)
    data = list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))
    own = preconditioner(model, fisher="type-2", loss="cross-entropy", loss_average="global")
    with closing(own):
        observe(model, own, data, F.cross_entropy, "global")
        own.step()
        for layer in (0, 2, 3):
            a, g = by_hand(model, x, softmax_hessian, layer)
            compare(factors(own, str(layer))[0][0], a, f"A of {layer}")
            compare(factors(own, str(layer))[1][0], g, f"G of {layer}")


@pytest.mark.slow
def test_monte_carlo_tends_to_type_2() -> None:
    model, data = fill(deep()), [(randn(4, 3), labels(4, classes=3))]

    def running(fisher: Fisher) -> tuple[list[Tensor], list[Tensor]]:
        with closing(preconditioner(model, fisher="type-2", loss="cross-entropy")) as own:
            own.curvature.parts.fisher = fisher
            observe(model, own, data, F.cross_entropy)
            own.step()
            pairs = [factors(own, name) for name in blocks(own)]
            return [a for a, _ in pairs], [g for _, g in pairs]

    inputs, exact = running(Fisher("type-2", CrossEntropy()))
    errors = []
    for samples in (10, 1000):
        squares = []
        for seed in range(6 if samples == 10 else 1):
            fisher = Fisher(
                "monte-carlo", CrossEntropy(), samples, torch.Generator().manual_seed(seed)
            )
            own_inputs, own = running(fisher)
            for a, b in zip(own_inputs, inputs, strict=True):
                compare(a, b, "A")  # whatever the samples
            squares += [float((a - b).norm() / b.norm()) for a, b in zip(own, exact, strict=True)]
        errors.append(sum(squares) / len(squares))
    assert errors[1] < 0.1
    assert 0.05 < errors[1] / errors[0] < 0.2  # a hundred times the samples, a tenth of the error


class Recurrent(nn.Module):
    """A layer called twice within one forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


def test_calls_of_a_reused_module_are_positions() -> None:
    model, x = fill(Recurrent()), randn(4, 3)
    weight = model.layer.weight.detach()
    with closing(preconditioner(model, fisher="type-2", loss=SquaredError())) as own:
        observe(model, own, [(x, randn(4, 3, seed=1))], half_square)
        own.step()
        hidden = F.linear(x, weight, model.layer.bias.detach())
        ones = torch.ones(4, 1).double()
        rows = torch.cat([torch.cat([x, ones], 1), torch.cat([hidden, ones], 1)])
        a, g = factors(own, "layer")
        compare(a[0], rows.T @ rows / 4, "A")
        compare(g[0], (torch.eye(3).double() + weight.T @ weight) / 2, "G")


class Checkpointed(nn.Module):
    """`deep`, with its first layers in a checkpoint or not."""

    def __init__(self, active: bool) -> None:
        super().__init__()
        self.net, self.active = deep(), active

    def forward(self, x: Tensor) -> Tensor:
        if not self.active:
            return self.net(x)
        return self.net[3](checkpoint(self.net[:3], x, use_reentrant=False))


def test_checkpoints_change_nothing() -> None:
    results = []
    for active in (True, False):
        model = fill(Checkpointed(active))
        with closing(preconditioner(model, fisher="type-2", loss="cross-entropy")) as own:
            for step in range(2):
                model.zero_grad()
                observe(
                    model, own, [(randn(4, 3, seed=step), labels(4, classes=3))], F.cross_entropy
                )
                assert own.curvature.capture.calls.watched == []  # nothing is held without a probe
                own.step()
            results.append([*(t for name in blocks(own) for t in factors(own, name))])
    assert len(results[0]) == 6
    assert all(map(torch.equal, *results))


def test_all_forwards_then_all_observations_then_all_backwards() -> None:
    data = [(randn(n, 3, seed=n), labels(n, classes=3, seed=n)) for n in (2, 3, 1)]
    found = []
    for together in (True, False):
        model = fill(deep())
        own = preconditioner(model, fisher="type-2", loss="cross-entropy", loss_average="sum")
        with closing(own):
            if together:
                outputs = [model(x) for x, _ in data]
                for output in outputs:
                    own.observe(output)
                for output, (_, y) in zip(outputs, data, strict=True):
                    F.cross_entropy(output, y, reduction="sum").backward()
            else:
                observe(model, own, data, F.cross_entropy, "sum")
            own.step()
            found.append([*(t for name in blocks(own) for t in factors(own, name))])
    for one, other in zip(*found, strict=True):
        compare(one, other, "factor")


@pytest.mark.parametrize("factor", [0.01, 30.0])
def test_the_step_is_that_of_any_multiple_of_loss_and_damping(factor: float) -> None:
    model, x, y = fill(deep()), randn(5, 3), randn(5, 3, seed=1)
    results = []
    for scale in (1.0, factor):
        model.zero_grad()
        loss = SquaredError(scale)
        with closing(preconditioner(model, damping=0.1 * scale, fisher="type-2", loss=loss)) as own:
            observe(model, own, [(x, y)], lambda f, y, c=scale: c * half_square(f, y))
            own.step()
            results.append([p.grad.clone() for p in model.parameters()])
    for one, other in zip(*results, strict=True):
        compare(other, one, "step")


# -- ranks -----------------------------------------------------------------------------------


def on_rank(rank: int, ranks: int, average: str) -> list[Tensor]:
    """Three steps on this rank's half of each batch; what is left are factors and weights."""
    model = fill(convolutional())
    wrapped = DistributedDataParallel(model) if ranks > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    own = preconditioner(model, fisher="type-2", loss="cross-entropy", loss_average=average)
    part = slice(rank * 8 // ranks, (rank + 1) * 8 // ranks)

    def loss(_: nn.Module, step: int) -> Tensor:
        output = wrapped(randn(8, 2, 3, 4, seed=step)[part])
        own.observe(output)
        return F.cross_entropy(output, labels(8, classes=3, seed=step)[part])

    with closing(own):
        kit.train(model, loss, range(3), own, optimizer)
        found = [t for name in blocks(own) for t in factors(own, name)]
    return [t.detach().clone() for t in (*found, *model.parameters())]


@pytest.mark.distributed
@pytest.mark.parametrize("average", ["local", "global"])
def test_two_ranks_are_one_process(average: str) -> None:
    alone = on_rank(0, 1, average)
    for own in run_ranks(on_rank, 2, average):
        for one, other in zip(own, alone, strict=True):
            compare(one, other, "factors and weights")


def test_weights_of_vectors_add_up() -> None:
    outputs = randn(2, 3)
    for kind, samples in (("monte-carlo", 4), ("type-2", 1)):
        pairs = list(Fisher(kind, MeanSquaredError(), samples).vectors(outputs))
        total = sum(weight for _, weight in pairs)
        assert math.isclose(total, 1.0 if kind == "monte-carlo" else 3.0)


def test_a_loss_that_is_named_has_its_own_fisher() -> None:
    """Monte-Carlo unless a Fisher is chosen; without a loss the empirical one."""

    def factor(**statistics: str) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3)).double()
        own = soframe.Preconditioner(model, statistics=soframe.Statistics(**statistics))
        outputs = model(randn(6, 4))
        own.observe(outputs)
        F.mse_loss(outputs, torch.zeros(6, 3, dtype=outputs.dtype)).backward()
        with closing(own):
            own.step()
            return factors(own, "0")[1].squeeze(0).clone()

    named = factor(loss="mse")
    assert torch.equal(named, factor(loss="mse", fisher="monte-carlo"))
    # [3, 3]; the loss's Hessian is the identity times 2 over the number of outputs.
    torch.testing.assert_close(named.trace(), torch.tensor(2.0, dtype=named.dtype))
    assert not torch.allclose(named, factor())
    assert torch.equal(factor(), factor(fisher="empirical", loss="mse"))
