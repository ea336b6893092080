"""LoRA-Pro: one block over the two layers of an adapter, whose method sees both of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import soframe
from experiments.gallery.lora_pro import LoRAPro
from soframe.methods import Chain, Method, Momentum
from soframe.testing import compare
from tests.curvature import closing, randn
from tests.distributed.harness import RankFailure, run_ranks
from tests.experiments.gallery.references import lora_pro
from tests.experiments.gallery.runs import Adapter, Adapting, adapt, adapted, sharded

SCALE = 0.5


def updates(model: nn.Module, method: Method, gradients: list[Tensor]) -> list[Tensor]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter, gradient in zip(trained, gradients, strict=True):
        parameter.grad = gradient.clone()
    with closing(soframe.Preconditioner(model, method)) as preconditioner:
        preconditioner.step()
    return [parameter.grad for parameter in trained]


def test_updates_are_the_paper_s() -> None:
    """Of all adapters together, two of which share a stack."""
    model = adapted()
    pairs = [(block.lora_A.weight.detach(), block.lora_B.weight.detach()) for block in model]
    gradients = [randn(*w.shape, seed=i) for i, w in enumerate(w for pair in pairs for w in pair)]
    found = updates(model, LoRAPro(SCALE), gradients)
    for index, pair in enumerate(pairs):
        numbers = [tensor.numpy() for tensor in (*pair, *gradients[2 * index : 2 * index + 2])]
        for update, expected in zip(found[2 * index :], lora_pro(*numbers, SCALE), strict=False):
            compare(update, torch.from_numpy(expected), f"adapter {index}", rtol=1e-7)


def test_the_whole_weight_moves_along_the_nearest_gradient() -> None:
    """The projection of its gradient, by least squares over all directions of A and B."""
    adapter = Adapter(5, 3, 2, seed=1)
    right, left = adapter.lora_A.weight.detach(), adapter.lora_B.weight.detach()
    whole = randn(3, 5)
    gradients = [SCALE * left.T @ whole, SCALE * whole @ right.T]
    of_right, of_left = updates(nn.Sequential(adapter), LoRAPro(SCALE, eps=0.0), gradients)
    moved = SCALE * (left @ of_right + of_left @ right)
    # Of vec(B U_A + U_B A), row by row.
    basis = np.hstack([np.kron(left, np.eye(5)), np.kron(np.eye(3), right.T)])
    weights = np.linalg.lstsq(basis, whole.numpy().ravel(), rcond=None)[0]
    compare(moved, torch.from_numpy((basis @ weights).reshape(3, 5)), "projection", rtol=1e-9)


def test_a_pair_is_one_block_and_other_methods_take_its_layers_apart() -> None:
    model = adapted()
    with closing(soframe.Preconditioner(model, LoRAPro())) as preconditioner:
        assert [list(block.parameters) for block in preconditioner.curvature.blocks] == 3 * [
            ["lora_A.weight", "lora_B.weight"]
        ]
    model[0].lora_A.requires_grad_(False)
    with closing(soframe.Preconditioner(model, LoRAPro(), auxiliary="adamw")) as preconditioner:
        names = [block.name for block in preconditioner.curvature.blocks]
    assert names == ["1", "2", "0.lora_B.weight"]
    with closing(soframe.Preconditioner(model, LoRAPro(), skip=["^1$"])) as preconditioner:
        assert [block.name for block in preconditioner.curvature.blocks] == ["2"]


def test_a_pair_is_one_block_under_a_chain() -> None:
    """The momentum of a first gradient is a part of it, and the method is linear in gradients."""
    model = adapted()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = [randn(*parameter.shape, seed=i) for i, parameter in enumerate(trained)]
    alone = updates(model, LoRAPro(SCALE), gradients)
    chained = updates(model, Chain((Momentum(0.75), LoRAPro(SCALE))), gradients)
    for update, of_whole in zip(chained, alone, strict=True):
        compare(update, of_whole / 4, "chain", rtol=1e-9)


def test_a_pair_outlasts_a_freeze() -> None:
    model = adapted()
    with closing(soframe.Preconditioner(model, LoRAPro())) as preconditioner:
        for is_trained in (True, False, True):
            model[0].requires_grad_(is_trained)
            for number, parameter in enumerate(model.parameters()):
                gradient = randn(*parameter.shape, seed=number)
                parameter.grad = gradient if parameter.requires_grad else None
            preconditioner.step()
        updates = [block.record.updates for block in preconditioner.curvature.blocks]
    assert updates == [2, 3, 3]


def test_a_pair_that_shares_a_layer_is_no_block() -> None:
    model = adapted()
    other = nn.Linear(5, 2, bias=False)
    other.weight = model[0].lora_A.weight
    model.append(other)
    with closing(soframe.Preconditioner(model, LoRAPro(), auxiliary="adamw")) as preconditioner:
        blocks = {block.name: list(block.parameters) for block in preconditioner.curvature.blocks}
    assert blocks.keys() == {"1", "2", "0.lora_A.weight", "0.lora_B.weight"}


def test_micro_batches_and_a_resumed_run_are_one_run() -> None:
    expected, _ = adapt(0, 1, Adapting())
    for weight, whole in zip(adapt(0, 1, Adapting(passes=3))[0], expected, strict=True):
        compare(weight, whole, "micro-batches", rtol=1e-9)
    _, state = adapt(0, 1, Adapting(end=2))
    for weight, whole in zip(adapt(0, 1, Adapting(begin=2, state=state))[0], expected, strict=True):
        assert torch.equal(weight, whole)


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt", "hybrid-opt", "sharded"])
@pytest.mark.covering(together=1)
def test_ranks_are_one_process(ranks: int, strategy: str) -> None:
    expected, _ = adapt(0, 1, Adapting())
    run = Adapting(strategy, passes=1 + ranks % 4)
    results = run_ranks(adapt, ranks, run)
    half = run_ranks(adapt, ranks, replace(run, end=2))
    resumed = run_ranks(adapt, 2, Adapting(begin=2, state=half[0][1]))
    for weights, _ in (*results, *resumed):
        for weight, whole in zip(weights, expected, strict=True):
            compare(weight, whole, strategy, rtol=1e-9)


@pytest.mark.distributed
def test_sharded_weights_are_an_error() -> None:
    for failure in run_ranks(sharded, 2, check=False):
        assert isinstance(failure, RankFailure)
        assert "reads weights, and they are sharded" in str(failure.exception)
