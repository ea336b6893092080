"""States of methods in bfloat16: half the memory, and training goes on as in single precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import soframe
from soframe.kernels.halves import dithered
from soframe.methods import AdamW
from tests import kit
from tests.distributed.harness import run_ranks

BF16 = torch.bfloat16


@given(seed=st.integers(0, 2**16), scale=st.floats(1e-20, 1e20), turn=st.integers(0, 2**20))
def test_rounding_goes_to_a_neighbour_and_cancels_over_turns(
    seed: int, scale: float, turn: int
) -> None:
    values = scale * torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
    near = values.to(BF16).double()
    ulp = 2.0 ** (values.double().abs().log2().floor() - 7)
    turns = [dithered(values, BF16, 15, turn + t).double() for t in range(256)]
    assert all(bool(((one - values).abs() < ulp).all()) for one in turns)
    mean = torch.stack(turns).mean(0)
    # Rounded to nearest, an error of up to half a step would stay.
    assert bool(((mean - values).abs() <= ulp / 40).all())
    assert bool(((near - values).abs() <= ulp / 2).all())


def test_numbers_that_need_no_rounding_stay() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, torch.inf, -torch.inf, torch.nan, 2.0**-130])
    for turn in range(300):
        torch.testing.assert_close(
            dithered(exact, BF16, 8, turn).float(), exact, equal_nan=True, rtol=0, atol=0
        )
    assert dithered(exact.double(), torch.float32, 8, 0).dtype == torch.float32


def test_a_slow_average_does_not_stall() -> None:
    """AdamW's second moment of gradients that shrink: it falls as its twin in float64 does."""
    model = nn.Linear(8, 4, bias=False)
    own = kit.precondition(model, AdamW(betas=(0.9, 0.999)), state_dtype=BF16)
    twin = torch.zeros(1, 4, 8, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for step in range(600):
        gradient = torch.randn(4, 8, generator=generator) * (1.0 if step < 100 else 0.1)
        model.weight.grad = gradient.clone()
        own.step()
        twin = 0.999 * twin + 0.001 * gradient.double().square()
    (block,) = own.blocks
    kept = block.state["square"]
    assert kept.dtype == BF16
    torch.testing.assert_close(kept.double(), twin, rtol=0.15, atol=0)
    assert abs(float((kept.double() / twin).mean()) - 1) < 0.03


def learn(method: Any, dtype: torch.dtype | None, lr: float) -> tuple[float, float]:
    """The loss of a small regression before and after training, with noise in the inputs."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())
    model.append(nn.Linear(16, 2))
    curvature = soframe.Curvature(state_dtype=dtype)
    own = soframe.Optimizer(
        model, method, lr=lr, auxiliary=AdamW(betas=(0.9, 0.999)), curvature=curvature
    )
    inputs = torch.randn(64, 6)
    targets = torch.stack([inputs[:, 0] * inputs[:, 1], inputs[:, 2].sin()], 1)

    def loss(net: nn.Module, step: int) -> Tensor:
        part = torch.arange(16) + 16 * (step % 4)
        return (net(inputs[part]) - targets[part]).square().mean()

    def whole() -> float:
        return float((model(inputs) - targets).square().mean().detach())

    before = whole()
    kit.train(model, loss, range(80), own)
    own.close()
    return before, whole()


@pytest.mark.parametrize(
    ("method", "lr"), [("adamw", 0.02), ("muon", 0.05), ("soap", 0.02), ("soap-muon", 0.05)]
)
def test_training_does_not_suffer(method: str, lr: float) -> None:
    before, single = learn(method, None, lr)
    _, half = learn(method, BF16, lr)
    assert single < 0.3 * before
    assert half < 1.5 * single + 0.01 * before


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3))


def loss_of(net: nn.Module, step: int) -> Tensor:
    return net(torch.randn(4, 6, generator=torch.Generator().manual_seed(step))).square().mean()


@pytest.mark.parametrize("method", ["muon", "soap-muon"])
def test_states_are_planned_counted_and_resumed_in_their_dtype(method: str) -> None:
    """Those of the auxiliary method, too: to the byte, and to the bit."""

    def make(model: nn.Module, **settings: Any) -> soframe.Optimizer:
        curvature = soframe.Curvature(**settings)
        return soframe.Optimizer(model, method, lr=0.05, curvature=curvature)

    memory = []
    for settings in ({}, {"state_dtype": BF16}):
        model = network()
        own = make(model, **settings)
        kit.train(model, loss_of, range(3), own)
        used = own.preconditioner.memory_usage()
        assert used == own.preconditioner.placement.memory(0)
        memory.append(used["state"])
        assert any(block.auxiliary and block.state for block in own.preconditioner.blocks)
        saved = {"model": model.state_dict(), "optimizer": own.state_dict()}
        again = network()
        again.load_state_dict(saved["model"])
        resumed = make(again, **settings)
        resumed.load_state_dict(saved["optimizer"])
        one = kit.train(model, loss_of, range(3, 6), own)
        other = kit.train(again, loss_of, range(3, 6), resumed)
        assert torch.equal(one, other)
        own.close()
        resumed.close()
    assert memory[0] == 2 * memory[1]


def _on_ranks(rank: int, ranks: int, strategy: str) -> dict[str, Tensor]:
    model = network()
    curvature = soframe.Curvature(state_dtype=BF16)
    own = soframe.Optimizer(model, "soap", lr=0.05, strategy=strategy, curvature=curvature)

    def loss(net: nn.Module, step: int) -> Tensor:
        return loss_of(net, step)

    kit.train(model, loss, range(4), kit.Averaging(model), own)
    assert own.preconditioner.memory_usage() == own.preconditioner.placement.memory(rank)
    states = own.state_dict()
    return {name: p.detach() for name, p in model.named_parameters()} | {
        "keys": torch.tensor(len(states))
    }


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt"])
def test_ranks_round_alike(strategy: str) -> None:
    alone = _on_ranks(0, 1, "comm-opt")
    for result in run_ranks(_on_ranks, 2, strategy):
        for name, tensor in result.items():
            torch.testing.assert_close(tensor, alone[name], rtol=1e-3, atol=1e-4)


def test_others_are_refused() -> None:
    with pytest.raises(ValueError, match=r"state_dtype must be torch\.bfloat16, torch\.float32"):
        kit.precondition(network(), "muon", state_dtype=torch.float16)
