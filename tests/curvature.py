"""Drives a preconditioner so that its factors are those of an exact Fisher.

K-FAC takes whatever output gradients a backward pass brings. One pass per column ``s_k`` of the
square root of the loss's Hessian in the outputs, ``H_n = sum_k s_k s_k^T``, brings those of the
type-2 Fisher; each pass is a micro-batch of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor, nn

import soframe
from soframe.blocks.block import Block
from soframe.testing import compare, dense_preconditioned, layer_fisher
from tests import kit

LossAverage = Literal["local", "global", "sum"]
Kind = Literal["type-2", "empirical"]
Loss = Callable[[Tensor, Tensor], Tensor]
Batch = tuple[Tensor, Tensor]
LAYERS = (
    nn.Linear(3, 2),
    nn.Linear(2, 3, bias=False),
    nn.Conv2d(2, 4, 2, groups=2),
    nn.Conv2d(2, 3, 2, padding=1, bias=False),
)
"""Layers for `by_passes`: with one and several positions, groups, and without a bias."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers, float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def fill(module: nn.Module, seed: int = 0) -> nn.Module:
    """Fill the parameters of a module with numbers of order one; float64."""
    module.double()
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            fan_in = max(1, prod(parameter.shape[1:]))
            parameter.copy_(randn(*parameter.shape, seed=1000 * seed + number) / fan_in**0.5)
    return module


def passes(model: nn.Module, layer: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets of passes of one, two and three samples, for a model of one layer.

    Linear layers get vectors, convolutions images of 3 x 3; targets are zero.
    """
    shape = (layer.in_features,) if isinstance(layer, nn.Linear) else (layer.in_channels, 3, 3)
    batches = []
    for size in (1, 2, 3):
        inputs = randn(size, *shape, seed=size)
        with torch.no_grad():
            batches.append((inputs, torch.zeros_like(model(inputs))))
    return batches


def half_square(output: Tensor, target: Tensor) -> Tensor:
    """``|f - y|^2 / 2``, a mean over samples: its Hessian is the identity."""
    return (output - target).square().sum() / (2 * len(output))


def log_cosh(output: Tensor, target: Tensor) -> Tensor:
    """A mean over samples of ``sum_k w_k log cosh(f_k - y_k)`` and a product of neighbours.

    Its Hessian differs from sample to sample and is not diagonal.
    """
    difference = (output - target).flatten(1)
    weights = torch.arange(1, difference.shape[1] + 1, dtype=difference.dtype)
    own = (weights * (difference.exp() + (-difference).exp()).log()).sum()
    return (own + difference.sum(1).square().sum() / 2) / len(output)


def root_hessian(output: Tensor, target: Tensor, loss: Loss) -> Tensor:
    """The columns of the square roots of every sample's own Hessian: ``[K, N, ...]``."""
    columns = []
    for own, wanted in zip(output.detach(), target, strict=True):
        hessian = torch.func.hessian(lambda f, y=wanted: loss(f[None], y[None]))(own)
        values, vectors = torch.linalg.eigh(hessian.reshape(own.numel(), own.numel()))
        columns.append((vectors * values.clamp(min=0).sqrt()).T.reshape(-1, *own.shape))
    return torch.stack(columns, 1)


def output_gradients(output: Tensor, target: Tensor, loss: Loss, kind: Kind) -> Tensor:
    """What the passes of one batch start from, one per pass: ``[K, N, ...]``, no mean taken."""
    if kind == "type-2":
        return root_hessian(output, target, loss)
    point = output.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(point, target) * len(output), point)
    return gradient[None]


def gather(
    model: nn.Module,
    batches: Sequence[Batch],
    loss: Loss,
    kind: Kind = "type-2",
    loss_average: LossAverage = "local",
) -> None:
    """Run the backward passes that bring the Fisher of ``loss`` over micro-batches.

    Args:
        model: A model with a preconditioner.
        batches: Inputs and targets of each micro-batch; all with equally many outputs per sample.
        loss: A mean over samples.
        kind: Which Fisher.
        loss_average: What the gradients of the passes are scaled for.
    """
    starts = []
    for inputs, targets in batches:
        with torch.no_grad():
            output = model(inputs)
        starts.append(output_gradients(output, targets, loss, kind))
    columns = len(starts[0])
    total = columns * sum(len(inputs) for inputs, _ in batches)
    for (inputs, _), start in zip(batches, starts, strict=True):
        own = columns * len(batches) * len(inputs)
        divisor = {"local": own, "global": total, "sum": 1}[loss_average]
        for column in start:
            model(inputs).backward(columns**0.5 * column / divisor)


def preconditioner(
    model: nn.Module, *, damping: float | None = 0.1, **settings: Any
) -> soframe.Preconditioner:
    """See `kit.precondition`; of a damping that is None by default."""
    if damping is not None:
        settings["damping"] = damping
    return kit.precondition(model, **settings)


def blocks(own: soframe.Preconditioner) -> dict[str, Block]:
    """The blocks by name."""
    return {block.name: block for block in own.blocks}


def factors(own: soframe.Preconditioner, layer: str) -> tuple[Tensor, Tensor]:
    """The running A ``[groups, in, in]`` and G ``[groups, out, out]`` of a layer, unpacked."""
    block = blocks(own)[layer]
    a, g = (block.running.matrix(factor) for factor in block.factors)
    return a, g


def put_gradients(model: nn.Module, seed: int = 7) -> None:
    """Give every trainable parameter a gradient of its own."""
    for number, parameter in enumerate(model.parameters()):
        if parameter.requires_grad:
            parameter.grad = randn(*parameter.shape, seed=100 * seed + number)


def gradient_matrix(block: Block) -> Tensor:
    """The gradient ``[groups, out, in]`` of a block, taken from the parameters by hand."""
    module = block.layout.module  # features of a convolution: kernel position, channel
    groups = getattr(module, "groups", 1)
    columns = []
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None
            grad = parameter.grad
            rows = (grad.movedim(1, -1) if grad.dim() > 2 else grad).reshape(len(grad), -1)
            columns.append((name != "weight", rows))
    matrix = torch.cat([rows for _, rows in sorted(columns, key=lambda pair: pair[0])], 1)
    return matrix.reshape(groups, len(matrix) // groups, -1)


def check_exact(
    model: nn.Module,
    own: soframe.Preconditioner,
    batches: Sequence[Batch],
    loss: Loss,
    *,
    kind: Kind = "type-2",
    loss_average: LossAverage = "local",
    damping: float = 0.1,
) -> None:
    """Hold every block to the dense Fisher, and its preconditioned gradient to the dense solve.

    Args:
        model: The model.
        own: Its preconditioner, with the eigen solver and without a clip.
        batches: As in `gather`.
        loss: As in `gather`.
        kind: As in `gather`.
        loss_average: As in `gather`; with ``"local"`` the Fisher is the mean of the batches' own,
            otherwise that of all samples.
        damping: The preconditioner's.
    """
    gather(model, batches, loss, kind, loss_average)
    put_gradients(model)
    raw = {name: gradient_matrix(block) for name, block in blocks(own).items()}
    own.step()
    if loss_average != "local":
        batches = [(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))]
    for name, block in blocks(own).items():
        layer = "" if block.layout.module is model else name
        exact = [layer_fisher(model, layer, x, loss, y, kind=kind) for x, y in batches]
        result = gradient_matrix(block)
        for group, (a, g) in enumerate(zip(*factors(own, name), strict=True)):
            fisher = torch.stack([blocks_of[group] for blocks_of in exact]).mean(0)
            where = f"{name}, group {group}"
            compare(torch.kron(g, a), fisher, f"{where}: kron(G, A)")
            expected = dense_preconditioned(fisher, raw[name][group], damping)
            compare(result[group], expected, f"{where}: preconditioned gradient")


@contextmanager
def closing(own: soframe.Preconditioner):  # type: ignore[no-untyped-def]
    """Close a preconditioner, so that the next one sees a model without hooks."""
    try:
        yield own
    finally:
        own.close()


def of_a_net(
    method: str, kind: Kind, positions: tuple[int, ...], *, steps: int = 1, **settings: Any
) -> Iterator[tuple[Block, Tensor, list[Tensor]]]:
    """Yield the blocks of a net after its last step, their raw gradients and dense Fishers.

    Each Fisher is taken as a preconditioner takes it, with all columns of the loss's Hessian.
    """
    model = fill(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)))
    if kind == "type-2":
        settings |= {"fisher": kind, "loss": "squared-error"}
    with closing(preconditioner(model, method=method, **settings)) as own:
        for step in range(steps):
            inputs = randn(5, *positions, 3, seed=step)
            targets = randn(5, *positions, 3, seed=9 + step)
            model.zero_grad()
            outputs = model(inputs)
            if kind == "type-2":
                own.observe(outputs)
            half_square(outputs, targets).backward()
            raw = {name: gradient_matrix(block) for name, block in blocks(own).items()}
            own.step()
        for name, block in blocks(own).items():
            fishers = layer_fisher(model, name, inputs, half_square, targets, kind=kind)
            yield block, raw[name], fishers


def by_passes(
    layer: nn.Module, method: object, kind: Kind, average: LossAverage
) -> tuple[Block, Tensor, Tensor]:
    """Step once on passes of one, two and three samples, for a model of one layer.

    Returns:
        The block, its gradient before the step, and the Fisher of each group ``[groups, P, P]``.
    """
    model = fill(nn.Sequential(layer))
    batches = passes(model, layer)
    with closing(preconditioner(model, method=method, loss_average=average)) as own:
        gather(model, batches, log_cosh, kind, average)
        put_gradients(model)
        (block,) = own.blocks
        raw = gradient_matrix(block)
        own.step()
    if average != "local":
        batches = [(torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))]
    exact = [layer_fisher(model, "0", x, log_cosh, y, kind=kind) for x, y in batches]
    return block, raw, torch.stack([torch.stack(each) for each in exact]).mean(0)
