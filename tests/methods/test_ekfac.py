"""EKFAC's scale is the diagonal of the dense Fisher in the eigenbasis; its direction follows."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from soframe.blocks.block import Block
from soframe.damping.policies import RelativeDamping
from soframe.methods import EKFAC, KFAC, Chain
from soframe.solvers import Eigen, Lazy, OrthogonalIteration
from soframe.testing import compare, layer_fisher
from tests.curvature import (
    Kind,
    LossAverage,
    closing,
    fill,
    gather,
    gradient_matrix,
    half_square,
    log_cosh,
    of_a_net,
    preconditioner,
    put_gradients,
    randn,
)
from tests.methods import stages


def basis(block: Block, group: int) -> Tensor:
    """``Q_G ⊗ Q_A`` of a group, from the block's data."""
    left, right = block.second_order["G"]["vectors"], block.second_order["A"]["vectors"]
    return torch.kron(left[group], right[group])


def check(block: Block, fishers: list[Tensor], raw: Tensor, damping: float = 0.1) -> None:
    """Hold the scale and the direction to the Fisher ``[P, P]`` of every group."""
    for group, fisher in enumerate(fishers):
        vectors = basis(block, group)
        scale = (vectors.T @ fisher @ vectors).diagonal()
        compare(block.running["S"][group].flatten(), scale, f"S of group {group}")
        direction = vectors @ ((vectors.T @ raw[group].flatten()) / (scale + damping))
        result = gradient_matrix(block)[group].flatten()
        compare(result, direction, f"direction of group {group}")


@pytest.mark.covering(together=1)
@pytest.mark.slow
@pytest.mark.parametrize("average", ["local", "global", "sum"])
@pytest.mark.parametrize("kind", ["empirical", "type-2"])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Linear(3, 2),
        nn.Conv2d(2, 4, 2, groups=2),
        nn.Conv2d(2, 3, 2, padding=1, bias=False),
    ],
    ids=repr,
)
def test_scale_by_passes(layer: nn.Module, kind: Kind, average: LossAverage) -> None:
    """Micro-batches of one and three samples, in the basis of other data."""
    model = fill(nn.Sequential(layer))
    shape = (3,) if isinstance(layer, nn.Linear) else (2, 3, 3)

    def batches(seed: int) -> list[tuple[Tensor, Tensor]]:
        each = [randn(size, *shape, seed=seed + size) for size in (1, 3)]
        with torch.no_grad():
            return [(x, torch.zeros_like(model(x))) for x in each]

    settings = {"loss_average": average, "solve_every": 9}
    with closing(preconditioner(model, method="ekfac", **settings)) as own:
        (block,) = own.blocks
        for step in range(2):
            data = batches(10 * step)
            gather(model, data, log_cosh, kind, average)
            put_gradients(model, seed=step)
            raw = gradient_matrix(block)
            own.step()
            assert ("S" in block.running) == (step == 1)
        if average != "local":
            data = [(torch.cat([x for x, _ in data]), torch.cat([y for _, y in data]))]
        exact = [layer_fisher(model, "0", x, log_cosh, y, kind=kind) for x, y in data]
        check(block, list(torch.stack([torch.stack(each) for each in exact]).mean(0)), raw)


@pytest.mark.parametrize("kind", ["type-2", "empirical"])
@pytest.mark.parametrize("positions", [(), (4,)], ids=str)
@pytest.mark.parametrize("solver", [Eigen(), OrthogonalIteration()], ids=repr)
def test_scale_of_a_net(kind: Kind, positions: tuple[int, ...], solver: Any) -> None:
    settings = {"solver": solver, "solve_every": 5}
    for block, raw, fishers in of_a_net("ekfac", kind, positions, steps=2, **settings):
        check(block, fishers, raw)


def test_a_scale_is_taken_at_the_step_after_its_basis() -> None:
    """It does not wait for the interval of statistics."""
    model = stages.network()
    with closing(stages.preconditioner(model, "ekfac", statistics_every=4, solve_every=8)) as own:
        taken = []
        for step in range(3):
            stages.train(model, own, range(step, step + 1))
            taken.append({"S" in block.running for block in own.blocks})
    assert taken == [{False}, {True}, {True}]


def test_a_scale_belongs_to_its_basis() -> None:
    """It is averaged while the basis stays, dropped with it, and the eigenvalues stand in."""
    one, other = stages.network(), stages.network()
    settings = {"solve_every": 3}
    with (
        closing(stages.preconditioner(one, "ekfac", **settings)) as own,
        closing(stages.preconditioner(other, "kfac", **settings)) as plain,
    ):
        for step in range(7):
            stages.train(one, own, range(step, step + 1), lr=0.0)
            stages.train(other, plain, range(step, step + 1), lr=0.0)
            fresh = step % 3 == 0
            for mine, theirs in zip(own.blocks, plain.blocks, strict=True):
                assert ("S" in mine.running) == (not fresh)
                pair = gradient_matrix(mine), gradient_matrix(theirs)
                assert torch.allclose(*pair, rtol=1e-9, atol=1e-12) == fresh


def test_relative_damping() -> None:
    """Damping relative to the mean eigenvalues of K-FAC, for the scale as for their product."""
    model = fill(nn.Sequential(nn.Linear(3, 2)))
    policy = RelativeDamping(0.3)
    with closing(preconditioner(model, method="ekfac", damping=policy, solve_every=9)) as own:
        (block,) = own.blocks
        for step in range(2):
            inputs = randn(6, 3, seed=step)
            targets = randn(6, 2, seed=7 + step)
            model.zero_grad()
            half_square(model(inputs), targets).backward()
            raw = gradient_matrix(block)
            own.step()
            if step == 0:
                traces = [block.stack.diagonals(f, (0,))[0].mean() for f in block.factors[:2]]
                product = float(traces[0] * traces[1])
        (fisher,) = layer_fisher(model, "0", inputs, half_square, targets)
        check(block, [fisher], raw, damping=0.3 * product)


def test_it_is_refused_where_there_is_no_basis() -> None:
    model = stages.network()
    with pytest.raises(ValueError, match="solver='eigen'"):
        stages.preconditioner(model, "ekfac", solver="inverse")
    with pytest.raises(ValueError, match="kaisa"):
        stages.preconditioner(model, "ekfac", scaling="kaisa")
    with pytest.raises(ValueError, match="forward-only"):
        stages.preconditioner(model, "ekfac", fisher="forward-only")
    assert EKFAC() != KFAC()
    lazy = {"solver": Lazy(Eigen()), "solve_every": 2}
    with closing(stages.preconditioner(model, "ekfac", **lazy)) as own:
        stages.train(model, own, range(2))


@pytest.mark.parametrize("method", [EKFAC(), Chain((EKFAC(), "momentum"))], ids=repr)
@pytest.mark.slow
def test_a_scale_that_no_step_would_use_is_refused(method: Any) -> None:
    model = stages.network()
    with pytest.raises(ValueError, match=r"0: solve_every=1 never uses the factor S.*larger"):
        stages.preconditioner(model, method, solve_every=1)
    with pytest.raises(ValueError, match="method='kfac'"):
        stages.preconditioner(model, method, solve_every=1, background=3)
    for every in (2, lambda step: 1):  # of a callable nothing is known
        with closing(stages.preconditioner(model, method, solve_every=every)) as own:
            stages.train(model, own, range(2), lr=0.0)
            assert all(("S" in block.running) == (every == 2) for block in own.blocks)
    for name in ("kfac", "kl-shampoo", "kl-soap"):
        with closing(stages.preconditioner(model, name, solve_every=1)):
            pass
