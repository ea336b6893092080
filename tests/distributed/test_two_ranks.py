"""Two ranks take the steps of one process on both of their batches: the smallest such test."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from soframe.testing import compare
from tests import kit
from tests.curvature import fill, half_square, randn
from tests.distributed.harness import run_ranks

pytestmark = pytest.mark.distributed

SAMPLES = 3


def net() -> nn.Sequential:
    return fill(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)))


def results(rank: int, _: int, strategy: str, together: int) -> dict[str, dict[str, Tensor]]:
    """Take two steps; a rank's batch is ``together`` consecutive shards of the whole."""
    model = net()
    own = kit.precondition(model, strategy=strategy)
    shard = slice(rank * SAMPLES, (rank + together) * SAMPLES)

    def loss(model: nn.Module, step: int) -> Tensor:
        inputs, targets = randn(6, 2, seed=step), randn(6, 2, seed=10 + step)
        return half_square(model(inputs[shard]), targets[shard])

    kit.train(model, loss, range(2), kit.Averaging(model), own)
    return {
        "factors": {
            f"{b.name}.{f.name}": b.running.matrix(f) for b in own.blocks for f in b.factors
        },
        "gradients": {name: p.grad for name, p in model.named_parameters()},
    }


@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt"])
def test_two_ranks_are_one_process_on_both_batches(strategy: str) -> None:
    alone = results(0, 1, "comm-opt", 2)
    for rank, result in enumerate(run_ranks(results, 2, strategy, 1)):
        for kind, tensors in result.items():
            for name, tensor in tensors.items():
                compare(tensor, alone[kind][name], f"rank {rank}: {kind} of {name}")


class TwoDtypes(nn.Module):
    """Layers in single precision beside layers in double: their tensors cannot share a buffer."""

    def __init__(self) -> None:
        super().__init__()
        # In this order each of two ranks owns one of either.
        self.rounded = nn.ModuleList(fill(nn.Linear(2, 1)).float() for _ in range(2))
        self.exact = nn.ModuleList(fill(nn.Linear(2, 1), seed=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rounded = [layer(x.float()).double() for layer in self.rounded]
        return torch.cat([*rounded, *(layer(x) for layer in self.exact)], 1)


def of_two_dtypes(rank: int, _: int, strategy: str, together: int) -> dict[str, Tensor]:
    model = TwoDtypes()
    own = kit.precondition(model, strategy=strategy)
    shard = slice(rank * SAMPLES, (rank + together) * SAMPLES)

    def loss(model: nn.Module, step: int) -> Tensor:
        inputs, targets = randn(6, 2, seed=step), randn(6, 4, seed=10 + step)
        return half_square(model(inputs[shard]), targets[shard])

    kit.train(model, loss, range(2), kit.Averaging(model), own)
    own.close()
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt"])
def test_a_model_of_two_dtypes(strategy: str) -> None:
    alone = of_two_dtypes(0, 1, "comm-opt", 2)
    for rank, gradients in enumerate(run_ranks(of_two_dtypes, 2, strategy, 1)):
        for name, gradient in gradients.items():
            assert gradient.dtype == alone[name].dtype
            rtol = 1e-5 if gradient.dtype == torch.float32 else 1e-12
            compare(gradient, alone[name], f"rank {rank}: {name}", rtol=rtol)


def bad_on_the_last(rank: int, ranks: int) -> tuple[list[str], int]:
    """Gradients that are not finite on the last rank alone, ten times; the warnings here."""
    model = net()
    own = kit.precondition(model, strategy="mem-opt", gradients="local")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for step in range(11):
            model.zero_grad()
            inputs = randn(3, 2, seed=step)
            half_square(model(inputs), inputs).backward()
            if rank == ranks - 1:
                next(model.parameters()).grad[0] = torch.nan
            own.step()
    found = [str(one.message) for one in seen if "not finite" in str(one.message)]
    skipped = own.counters["skipped_updates"]
    own.close()
    return found, skipped


def test_the_rank_whose_gradients_are_not_finite_is_the_one_that_warns() -> None:
    (nothing, skipped), (warned, also_skipped) = run_ranks(bad_on_the_last, 2)
    assert skipped == also_skipped == 11
    assert nothing == []
    assert len(warned) == 1
    assert "rank 1 had gradients that are not finite in 10 steps in a row" in warned[0]


def loaded(
    rank: int, ranks: int, strategy: str, state: dict[str, object] | None, together: int
) -> tuple[dict[str, object], dict[str, int], dict[str, int], dict[str, Tensor]]:
    """Two steps, or a state of them; then what is held and planned, and a step's gradients."""
    model = net()
    own = kit.precondition(model, strategy=strategy)
    shard = slice(rank * SAMPLES, (rank + together) * SAMPLES)

    def loss(model: nn.Module, step: int) -> Tensor:
        inputs, targets = randn(6, 2, seed=step), randn(6, 2, seed=10 + step)
        return half_square(model(inputs[shard]), targets[shard])

    if state is None:
        kit.train(model, loss, range(2), kit.Averaging(model), own)
        state = own.state_dict()
    else:
        own.load_state_dict(state)
        state = own.state_dict()
    held, planned = own.memory_usage(), own.placement.memory(rank)
    kit.train(model, loss, [2], kit.Averaging(model), own)
    own.close()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    kept = ("factors", "second_order")
    return state, {k: held[k] for k in kept}, {k: planned[k] for k in kept}, gradients


@pytest.mark.parametrize("strategy", ["comm-opt", "mem-opt"])
def test_two_ranks_load_the_factors_of_one_process_as_triangles(strategy: str) -> None:
    state, *_, alone = loaded(0, 1, "comm-opt", None, 2)
    for again, held, planned, gradients in run_ranks(loaded, 2, strategy, state, 1):
        assert held == planned
        for name, block in state["blocks"].items():
            for factor, tensor in block["factors"].items():
                assert torch.equal(again["blocks"][name]["factors"][factor], tensor)
            for factor, tensors in block["second_order"].items():
                for key, tensor in tensors.items():
                    assert torch.equal(again["blocks"][name]["second_order"][factor][key], tensor)
        for name, gradient in gradients.items():
            compare(gradient, alone[name], name)
