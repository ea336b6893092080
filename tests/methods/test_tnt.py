"""TNT is the Kronecker product of the dense Fisher's partial traces, over its trace."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import soframe
from soframe.blocks.block import Block
from soframe.damping.policies import RelativeDamping
from soframe.kernels.samples import moments_by_grams, moments_by_samples, sample_moments
from soframe.solvers import OrthogonalIteration
from soframe.testing import compare, layer_fisher
from tests import kit
from tests.curvature import (
    LAYERS,
    Kind,
    LossAverage,
    blocks,
    by_passes,
    closing,
    fill,
    gradient_matrix,
    half_square,
    of_a_net,
    preconditioner,
    put_gradients,
    randn,
)
from tests.methods import stages


def partial_traces(fisher: Tensor, out: int, into: int) -> tuple[Tensor, Tensor]:
    """L and R of a Fisher over ``(o, i)``, entry by entry."""
    entries = fisher.reshape(out, into, out, into)
    left, right = fisher.new_zeros(out, out), fisher.new_zeros(into, into)
    for i in range(into):
        left += entries[:, i, :, i]
    for o in range(out):
        right += entries[o, :, o, :]
    return left, right


def check(block: Block, fishers: list[Tensor], raw: Tensor, damping: float = 0.1) -> None:
    """Hold factors and direction to the Fisher ``[P, P]`` of every group."""
    _, out, into = block.shape
    for group, fisher in enumerate(fishers):
        left, right = partial_traces(fisher, out, into)
        where, trace = f"group {group}", fisher.trace()
        compare(block.running["L"][group], left, f"L of {where}")
        compare(block.running["R"][group], right, f"R of {where}")
        matrix = torch.kron(left, right) / trace
        compare(matrix.trace(), trace, f"trace of {where}")
        damped = matrix + damping * torch.eye(len(matrix), dtype=matrix.dtype)
        expected = torch.linalg.solve(damped, raw[group].flatten())
        compare(gradient_matrix(block)[group].flatten(), expected, f"direction of {where}")


@pytest.mark.covering(together=1)
@pytest.mark.slow
@pytest.mark.parametrize("average", ["local", "global", "sum"])
@pytest.mark.parametrize("kind", ["empirical", "type-2"])
@pytest.mark.parametrize("layer", LAYERS, ids=repr)
def test_by_passes(layer: nn.Module, kind: Kind, average: LossAverage) -> None:
    """Micro-batches of one, two and three samples, of one and of several positions."""
    block, raw, fishers = by_passes(layer, "tnt", kind, average)
    check(block, list(fishers), raw)


@pytest.mark.parametrize("kind", ["type-2", "empirical"])
@pytest.mark.parametrize("positions", [(), (4,)], ids=str)
@pytest.mark.parametrize("solver", ["eigen", OrthogonalIteration()], ids=str)
def test_of_a_net(kind: Kind, positions: tuple[int, ...], solver: Any) -> None:
    for block, raw, fishers in of_a_net("tnt", kind, positions, solver=solver):
        check(block, fishers, raw)


def test_with_relative_damping() -> None:
    """A multiple of the mean eigenvalue of the block, which is its trace over its size."""
    model = fill(nn.Sequential(nn.Linear(3, 2)))
    with closing(preconditioner(model, method="tnt", damping=RelativeDamping(0.3))) as own:
        (block,) = own.blocks
        inputs, targets = randn(6, 3), randn(6, 2, seed=1)
        half_square(model(inputs), targets).backward()
        raw = gradient_matrix(block)
        own.step()
        (fisher,) = layer_fisher(model, "0", inputs, half_square, targets)
        check(block, [fisher], raw, damping=0.3 * float(fisher.trace()) / len(fisher))


def test_it_is_exact_for_one_sample_of_one_position() -> None:
    model = fill(nn.Sequential(nn.Linear(3, 2)))
    with closing(preconditioner(model, method="tnt")) as own:
        (block,) = own.blocks
        inputs, targets = randn(1, 3), randn(1, 2, seed=1)
        half_square(model(inputs), targets).backward()
        raw = gradient_matrix(block)
        own.step()
        (fisher,) = layer_fisher(model, "0", inputs, half_square, targets)
        damped = fisher + 0.1 * torch.eye(len(fisher)).double()
        expected = torch.linalg.solve(damped, raw[0].flatten())
        compare(gradient_matrix(block)[0].flatten(), expected, "direction")


@pytest.mark.parametrize("padding", [None, 2])
def test_of_an_embedding_there_is_a_diagonal(padding: int | None) -> None:
    """And the same direction as of one-hot rows, where a sample has one index."""
    model = fill(nn.Sequential(nn.Embedding(5, 3, padding_idx=padding), nn.Linear(3, 2)))
    indices, targets = torch.tensor([[0], [3], [3], [2]]), randn(4, 1, 2)
    twin = nn.Sequential(nn.Linear(5, 3, bias=False), nn.Linear(3, 2)).double()
    with torch.no_grad():
        twin[0].weight.copy_(model[0].weight.T)
        twin[1].load_state_dict(model[1].state_dict())
    rows = nn.functional.one_hot(indices, 5).double()
    if padding is not None:
        rows[..., padding] = 0
        model[0].weight.data[padding] = 0
    with closing(preconditioner(model, method="tnt", layers="all")) as own:
        half_square(model(indices), targets).backward()
        own.step()
        assert blocks(own)["0"].running["R"].shape == (1, 5)
    with closing(preconditioner(twin, method="tnt")) as own:
        half_square(twin(rows), targets).backward()
        own.step()
    compare(model[0].weight.grad.T, twin[0].weight.grad, "direction")


@pytest.mark.parametrize("shape", [(2, 3, 1, 4, 5), (1, 3, 2, 9, 7), (1, 2, 40, 3, 2)], ids=str)
def test_moments_of_samples(shape: tuple[int, ...]) -> None:
    groups, batch, shared, into, out = shape
    rows = randn(groups, batch, shared, into)
    gradients = randn(groups, batch, shared, out, seed=1)
    left = torch.zeros(groups, out, out, dtype=torch.float64)
    right = torch.zeros(groups, into, into, dtype=torch.float64)
    for group in range(groups):
        for n in range(batch):
            own = sum(torch.outer(gradients[group, n, t], rows[group, n, t]) for t in range(shared))
            left[group] += own @ own.T
            right[group] += own.T @ own
    ways = [sample_moments, moments_by_grams, moments_by_samples]
    found = [way(rows, gradients) for way in ways]
    found.append(moments_by_samples(rows, gradients, at_once=1))
    for one, other in found:
        compare(one, left, "left")
        compare(other, right, "right")
    for way in ways:
        one, other = way(rows, gradients, diagonal=(True, True))
        compare(one, left.diagonal(dim1=1, dim2=2), "diagonal, left")
        compare(other, right.diagonal(dim1=1, dim2=2), "diagonal, right")


@pytest.mark.parametrize("diagonal", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(
    "shape", [(2, 3, 9), (3, 9, 7), (3, 3, 40), (3, 20, 3), (4, 5, 40), (5, 9, 9)], ids=str
)
def test_the_way_of_fewer_multiplications_is_taken(
    shape: tuple[int, ...], diagonal: tuple[bool, bool]
) -> None:
    """Of samples of so many positions, inputs and outputs."""
    shared, into, out = shape
    rows, gradients = randn(1, 2, shared, into), randn(1, 2, shared, out)
    counts = []
    for way in (sample_moments, moments_by_grams, moments_by_samples):
        with FlopCounterMode(display=False) as counter:
            way(rows, gradients, diagonal=diagonal)
        counts.append(counter.get_total_flops())
    assert counts[0] == min(counts)


@given(scale=st.floats(1e-9, 1e3), seed=st.integers(0, 9))
def test_of_any_scale(scale: float, seed: int) -> None:
    """In float32 too: (loss, damping) -> (c loss, c^2 damping) divides the step by c."""
    found = []
    for factor in (1.0, scale):
        model = fill(nn.Sequential(nn.Linear(3, 2)), seed).float()
        with closing(preconditioner(model, method="tnt", damping=0.1 * factor**2)) as own:
            loss = factor * half_square(model(randn(6, 3).float()), randn(6, 2, seed=1).float())
            loss.backward()
            own.step()
            (block,) = own.blocks
            found.append(gradient_matrix(block) * factor)
    compare(found[1].double(), found[0].double(), "direction", rtol=1e-3)


def test_what_it_refuses() -> None:
    model = stages.network()
    for solver in ("inverse", "newton-schulz"):
        with pytest.raises(ValueError, match="solver='eigen'"):
            stages.preconditioner(model, "tnt", solver=solver)
    with pytest.raises(ValueError, match="kaisa"):
        stages.preconditioner(model, "tnt", scaling="kaisa")
    with pytest.raises(ValueError, match="forward-only"):
        stages.preconditioner(model, "tnt", fisher="forward-only")


def test_without_curvature_and_damping_there_is_no_step() -> None:
    model = fill(nn.Sequential(nn.Linear(3, 2)))
    with closing(preconditioner(model, method="tnt", damping=0.0)) as own:
        (0.0 * model(randn(4, 3))).sum().backward()
        put_gradients(model)
        own.step()
        assert not gradient_matrix(own.blocks[0]).any()


def test_it_is_a_method_of_the_optimizer() -> None:
    model = stages.network()
    with torch.no_grad():
        before = float(stages.loss_of(model, 0))
    optimizer = soframe.Optimizer(model, "tnt", lr=0.1, kl_clip=None, damping=0.1)
    kit.train(model, stages.loss_of, [0] * 20, optimizer)
    optimizer.close()
    with torch.no_grad():
        assert float(stages.loss_of(model, 0)) < 0.5 * before
