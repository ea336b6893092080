"""Eva is the dense solve with the outer products of mean inputs and mean output gradients."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soframe.damping.policies import RelativeDamping
from soframe.methods import Chain, Eva
from soframe.testing import check_method, compare, dense_fisher
from tests.curvature import (
    LossAverage,
    blocks,
    closing,
    fill,
    gather,
    gradient_matrix,
    half_square,
    log_cosh,
    preconditioner,
    put_gradients,
    randn,
)
from tests.methods import stages

DAMPING = 0.1


def dense(a: Tensor, g: Tensor, raw: Tensor, damping: float = DAMPING) -> Tensor:
    """``((g g^T) ⊗ (a a^T) + damping I)^-1`` by its matrix."""
    matrix = torch.kron(torch.outer(g, g), torch.outer(a, a))
    damped = matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype)
    return torch.linalg.solve(damped, raw.flatten()).view_as(raw)


def own_gradients(model: nn.Module, x: Tensor, y: Tensor, loss: Any) -> Tensor:
    """The gradients of each sample's own loss in the outputs of a model of one layer."""
    found = []
    for one, wanted in zip(x, y, strict=True):
        output = model(one[None]).detach().requires_grad_()
        found.append(torch.autograd.grad(loss(output, wanted[None]), output)[0])
    return torch.cat(found)


@pytest.mark.parametrize("average", ["local", "global", "sum"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("positions", [(), (3,)], ids=str)
def test_by_passes(positions: tuple[int, ...], bias: bool, average: LossAverage) -> None:
    """Micro-batches of one, two and three samples; the averages of all or of each pass's own."""
    model = fill(nn.Sequential(nn.Linear(3, 2, bias=bias)))
    batches = [
        (randn(size, *positions, 3, seed=size), randn(size, *positions, 2)) for size in (1, 2, 3)
    ]
    with closing(preconditioner(model, method="eva", loss_average=average)) as own:
        gather(model, batches, log_cosh, "empirical", average)
        put_gradients(model)
        (block,) = own.blocks
        raw = gradient_matrix(block)[0]
        own.step()
    if average != "local":
        batches = [(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))]
    a, g = [], []
    for x, y in batches:
        inputs = torch.cat([x, torch.ones_like(x[..., :1])], -1) if bias else x
        gradients = own_gradients(model, x, y, log_cosh)
        a.append(inputs.reshape(len(x), -1, inputs.shape[-1]).sum(1).mean(0))
        g.append(gradients.reshape(-1, 2).mean(0))
    a, g = torch.stack(a).mean(0), torch.stack(g).mean(0)
    compare(block.running["a"][0], a, "a")
    compare(block.running["g"][0], g, "g")
    compare(gradient_matrix(block)[0], dense(a, g, raw), "direction")


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(2, 4, 2, groups=2),
        nn.Conv2d(2, 3, 2, padding=1, stride=2, bias=False),
        nn.Conv2d(2, 3, (2, 1), padding=1, padding_mode="circular", dilation=2),
    ],
    ids=repr,
)
def test_of_a_convolution(layer: nn.Module) -> None:
    """With inputs that are patches written out by torch."""
    model = fill(nn.Sequential(layer))
    x = randn(3, 2, 4, 5)
    with torch.no_grad():
        y = torch.zeros_like(model(x))
    with closing(preconditioner(model, method="eva")) as own:
        half_square(model(x), y).backward()
        put_gradients(model)
        (block,) = own.blocks
        raw = gradient_matrix(block)
        own.step()
    padded = x
    if layer.padding_mode == "circular":
        padded = nn.functional.pad(x, (1, 1, 1, 1), mode="circular")
    padding = 0 if layer.padding_mode == "circular" else layer.padding
    patches = nn.functional.unfold(padded, layer.kernel_size, layer.dilation, padding, layer.stride)
    patches = patches.unflatten(1, (layer.groups, 2 // layer.groups, -1)).transpose(2, 3)
    gradients = (model(x) - y).detach().flatten(2).unflatten(1, (layer.groups, -1))
    for group in range(layer.groups):
        a = patches[:, group].flatten(1, 2).sum((0, 2)) / len(x)
        if layer.bias is not None:
            a = torch.cat([a, a.new_tensor([float(gradients.shape[-1])])])
        g = gradients[:, group].mean((0, 2))
        expected = dense(a, g, raw[group])
        compare(gradient_matrix(block)[group], expected, f"direction of group {group}")


def test_a_sample_with_one_input_is_exact() -> None:
    """Its positions have the same input, and gradients of their own."""
    model = fill(nn.Sequential(nn.Linear(3, 2)))
    x, y = randn(1, 1, 3).repeat(1, 4, 1), randn(1, 4, 2)
    with closing(preconditioner(model, method="eva")) as own:
        half_square(model(x), y).backward()
        (block,) = own.blocks
        own.step()
        a, g = block.running["a"][0], block.running["g"][0]
    fisher = dense_fisher(model, x, half_square, y)
    order = [0, 1, 2, 6, 3, 4, 5, 7]  # weights of an output, then its bias
    compare(torch.kron(torch.outer(g, g), torch.outer(a, a)), fisher[order][:, order], "block")


@pytest.mark.parametrize(
    "layer",
    [nn.Embedding(5, 3), nn.Embedding(5, 3, padding_idx=2), nn.EmbeddingBag(5, 3, mode="sum")],
    ids=repr,
)
def test_of_an_embedding_it_counts(layer: nn.Module) -> None:
    model = fill(nn.Sequential(layer, nn.Linear(3, 2)))
    indices = torch.tensor([[0, 3], [3, 2], [3, 4]])
    with closing(preconditioner(model, method="eva", layers="all", samples="batch")) as own:
        model(indices).square().sum().backward()
        raw = model[0].weight.grad.clone()
        own.step()
        running = blocks(own)["0"].running
    counts = torch.tensor([1, 0, 1, 3, 1]).double() / 3
    if getattr(layer, "padding_idx", None) is not None:
        counts[2] = 0
    compare(running["a"][0], counts, "a")
    expected = dense(running["a"][0], running["g"][0], raw.T)
    compare(model[0].weight.grad.T, expected, "direction")


@pytest.mark.parametrize("damping", [0.0, 1e-3])
def test_the_least_step_where_nothing_is_damped(damping: float) -> None:
    model = fill(nn.Sequential(nn.Linear(3, 2)))
    with closing(preconditioner(model, method="eva", damping=damping)) as own:
        half_square(model(randn(4, 3)), randn(4, 2)).backward()
        put_gradients(model)
        (block,) = own.blocks
        raw = gradient_matrix(block)[0]
        own.step()
        a, g = block.running["a"][0], block.running["g"][0]
    matrix = torch.kron(torch.outer(g, g), torch.outer(a, a))
    inverse = torch.linalg.pinv(matrix + damping * torch.eye(len(matrix)).double(), rtol=1e-12)
    compare(gradient_matrix(block)[0].flatten(), inverse @ raw.flatten(), "direction")


@pytest.mark.parametrize("scale", [1e-18, 1e12])
def test_of_any_scale(scale: float) -> None:
    """In float32, where the squares of lengths would be out of range."""
    found = []
    for factor in (1.0, scale):
        model = fill(nn.Sequential(nn.Linear(3, 2))).float()
        with closing(preconditioner(model, method="eva", damping=0.1 * factor**2)) as own:
            loss = factor * half_square(model(randn(6, 3).float()), randn(6, 2, seed=1).float())
            loss.backward()
            own.step()
            (block,) = own.blocks
            found.append(gradient_matrix(block).double() * factor)
    compare(found[1], found[0], "direction", rtol=1e-4)


def test_after_a_spike() -> None:
    """Its means are finite in float32, and the squares of their lengths are not."""
    found = []
    for dtype in (torch.float32, torch.float64):
        model = fill(nn.Sequential(nn.Linear(3, 2))).to(dtype)
        options = {"damping": 0.1, "kl_clip": None, "statistics_every": 10, "solve_every": 10}
        with closing(preconditioner(model, method="eva", **options)) as own:
            for step, scale in enumerate((1e12, 1.0)):
                model.zero_grad()
                x = scale * randn(6, 3, seed=step).to(dtype)
                half_square(model(x), randn(6, 2, seed=1).to(dtype)).backward()
                own.step()
            (block,) = own.blocks
            found.append(gradient_matrix(block).double())
    compare(found[0], found[1], "direction", rtol=1e-4)


def test_a_curvature_beyond_float64_leaves_finite_directions() -> None:
    """After a huge gradient."""
    model = fill(nn.Sequential(nn.Linear(3, 2)))
    with closing(preconditioner(model, method="eva", damping=0.1, kl_clip=None)) as own:
        for scale in (1e160, 1.0):
            model.zero_grad()
            (scale * half_square(model(randn(6, 3)), randn(6, 2, seed=1))).backward()
            own.step()
        (block,) = own.blocks
        gradient = gradient_matrix(block)
    assert gradient.isfinite().all()
    assert gradient.any()


def test_it_is_for_the_loss_s_own_gradients() -> None:
    """Those of targets that the model draws have the mean zero."""
    for fisher in ("monte-carlo", "type-2"):
        for method in ("eva", Chain((Eva(), "momentum"))):
            with pytest.raises(ValueError, match="fisher='empirical'"):
                stages.preconditioner(stages.network(), method, fisher=fisher, loss="squared-error")
    with pytest.raises(ValueError, match="forward-only"):
        stages.preconditioner(stages.network(), "eva", fisher="forward-only")
    with pytest.raises(ValueError, match="kaisa"):
        stages.preconditioner(stages.network(), "eva", scaling="kaisa")


@pytest.mark.parametrize("method", ["eva", "diagonal"])
def test_a_damping_that_is_relative_to_nothing_is_refused(method: str) -> None:
    with pytest.raises(ValueError, match="pass a number for damping="):
        stages.preconditioner(stages.network(), method, damping=RelativeDamping(0.1))


@pytest.mark.slow
def test_a_method_of_the_empirical_fisher_is_checked_under_that_alone() -> None:
    check_method(Eva(), ranks=())
    assert Chain((Eva(), "momentum")).empirical_only
