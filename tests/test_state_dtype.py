"""States and factors in bfloat16: half the memory, and training as in single precision."""

from __future__ import annotations

from statistics import median
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import soframe
from soframe.kernels.halves import dithered
from soframe.methods import AdamW
from soframe.strategies import Sharded
from tests import kit
from tests.curvature import closing, randn
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


@pytest.mark.parametrize("turn", [0, 3, 60_000])
def test_thresholds_come_again_after_all_turns_of_sixteen_bits(turn: int) -> None:
    values = randn(8).float()
    again = dithered(values, BF16, 8, turn + 2**16)
    assert torch.equal(again, dithered(values, BF16, 8, turn))
    assert not torch.equal(again, dithered(values, BF16, 8, turn + 2**15))


def test_numbers_that_need_no_rounding_stay() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, torch.inf, -torch.inf, torch.nan, 2.0**-130])
    for turn in range(300):
        torch.testing.assert_close(
            dithered(exact, BF16, 8, turn).float(), exact, equal_nan=True, rtol=0, atol=0
        )
    assert dithered(exact.double(), torch.float32, 8, 0).dtype == torch.float32


def test_nan_of_any_bits_stays_nan() -> None:
    """Noise that carries out of a NaN's bits would make a zero of it."""
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32)
    for turn in range(300):
        assert dithered(bits.view(torch.float32), BF16, 4, turn).isnan().all()


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
    statistics = soframe.Statistics(state_dtype=dtype)
    own = soframe.Optimizer(
        model, method, lr=lr, auxiliary=AdamW(betas=(0.9, 0.999)), statistics=statistics
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "lr"),
    [
        ("adamw", 0.02),
        ("soap-muon", 0.05),
        pytest.param("muon", 0.05, marks=pytest.mark.thorough),
        pytest.param("soap", 0.02, marks=pytest.mark.thorough),
    ],
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
        statistics = soframe.Statistics(**settings)
        return soframe.Optimizer(model, method, lr=0.05, statistics=statistics)

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
    statistics = soframe.Statistics(state_dtype=BF16)
    own = soframe.Optimizer(model, "soap", lr=0.05, strategy=strategy, statistics=statistics)

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


@pytest.mark.slow
def test_a_slow_average_of_a_factor_does_not_stall() -> None:
    """Of inputs that shrink: rounded to nearest, factors would stay where they were."""
    found = []
    for dtype in (BF16, torch.float64):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4))
        often = {"solve_every": 1000, "decay": 0.999}
        with closing(kit.precondition(model, "kfac", dtype=dtype, **often)) as own:
            generator = torch.Generator().manual_seed(0)
            for step in range(200):
                x = torch.randn(8, 6, generator=generator) * (1.0 if step < 50 else 0.1)
                model(x).square().mean().backward()
                own.step()
                model.zero_grad()
            (block,) = own.blocks
            assert block.stack.factors["A"].dtype == dtype
            found.append({name: factor.double() for name, factor in block.running.items()})
    kept, exact = found
    for name in "AG":
        assert float((kept[name] - exact[name]).norm() / exact[name].norm()) < 0.02
        assert torch.equal(kept[name], kept[name].mT)


def fitted(method: str, dtype: torch.dtype | None, seed: int) -> float:
    """The loss of a small classification after 20 steps."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 5))
    inputs, teacher = torch.randn(256, 20), torch.randn(20, 5)
    targets = (inputs @ teacher + torch.randn(256, 5)).argmax(1)
    statistics = soframe.Statistics(dtype=dtype)
    own = soframe.Optimizer(model, method, lr=0.02, statistics=statistics, **kit.exact(method))

    def loss(net: nn.Module, step: int) -> Tensor:
        part = slice(step % 4 * 64, step % 4 * 64 + 64)
        return nn.functional.cross_entropy(net(inputs[part]), targets[part])

    kit.train(model, loss, range(20), own)
    own.close()
    return float(nn.functional.cross_entropy(model(inputs), targets).detach())


@pytest.mark.parametrize(
    ("method", "apart"),
    [
        ("kfac", 0.02),
        pytest.param("soap", 0.04, marks=pytest.mark.thorough),
        pytest.param("shampoo", 0.06, marks=pytest.mark.thorough),
    ],
)
def test_training_does_not_suffer_from_factors(method: str, apart: float) -> None:
    """Medians over three seeds, in parts of the loss in single precision."""
    single, half = (median(fitted(method, d, seed) for seed in range(3)) for d in (None, BF16))
    assert half < (1 + apart) * single


@pytest.mark.parametrize("method", ["kfac", "soap", "kl-shampoo"])
def test_factors_are_planned_counted_and_resumed_in_their_dtype(method: str) -> None:
    memory = []
    for dtype in (torch.float32, BF16):
        model, again = network(), network()
        own, resumed = (kit.precondition(one, method, dtype=dtype) for one in (model, again))
        kit.train(model, loss_of, range(3), own)
        used = own.memory_usage()
        assert used == own.placement.memory(0)
        memory.append(used)
        again.load_state_dict(model.state_dict())
        resumed.load_state_dict(own.state_dict())
        kit.train(model, loss_of, range(3, 6), own)
        kit.train(again, loss_of, range(3, 6), resumed)
        for one, other in zip(own.blocks, resumed.blocks, strict=True):
            for name, factor in one.running.items():
                assert torch.equal(factor, other.running[name])
        own.close()
        resumed.close()
    assert memory[0]["factors"] == 2 * memory[1]["factors"]
    assert memory[0]["second_order"] == memory[1]["second_order"]


def _factors_on_ranks(rank: int, ranks: int, strategy: Any) -> dict[Any, Tensor]:
    model = network()
    own = kit.precondition(model, "kfac", strategy=strategy, dtype=BF16, solve_every=2)
    kit.train(model, loss_of, range(6), kit.Averaging(model), own)
    usage = own.memory_usage()
    usage["total"] -= usage.pop("in_flight", 0)  # sums that the next step waits for
    assert usage == own.placement.memory(rank)
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    state = own.state_dict()["blocks"]
    factors = {(n, k): f.float() for n, block in state.items() for k, f in block["factors"].items()}
    own.close()
    return gradients | factors


def _falling(rank: int, ranks: int, strategy: Any) -> Tensor:
    """A after statistics of inputs that became four times smaller: it falls slowly."""
    model, inputs = nn.Linear(6, 2, bias=False), randn(8, 6).float()
    settings = {"strategy": strategy, "dtype": BF16, "solve_every": 3, "decay": 0.99}
    with closing(kit.precondition(model, "kfac", **settings)) as own:

        def loss(model: nn.Module, step: int) -> Tensor:
            scale = 1.0 if step == 0 else 0.25
            return model(scale * inputs[rank::ranks]).square().sum(1).mean()

        kit.train(model, loss, range(121), kit.Averaging(model), own)
        return own.state_dict()["blocks"]["Linear"]["factors"]["A"].double()


@pytest.mark.distributed
@pytest.mark.slow
def test_deferred_statistics_do_not_stall_over_many_solves() -> None:
    inputs = randn(8, 6)
    moment = inputs.T @ inputs / 8
    running, mass = torch.zeros(6, 6).double(), 0.0
    for step in range(121):
        mass = 0.99 * mass + 0.01
        running += 0.01 / mass * ((1.0 if step == 0 else 0.0625) * moment - running)
    triangle = torch.ones(6, 6).tril().bool()
    for packed in run_ranks(_falling, 2, Sharded(group=None, deferred=True)):
        # The layout of packed triangles is another test's: their sums of squares will do.
        expected = running[triangle].square().sum().sqrt()
        assert float(packed.norm() / expected) == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("method", ["kfac", "soap"])
def test_triangles_round_as_whole_matrices(method: str) -> None:
    """One process keeps whole matrices, or triangles as ranks do: it takes the same steps."""
    ends = []
    for strategy in ("comm-opt", "sharded"):
        model = network()
        base = torch.optim.SGD(model.parameters(), lr=0.05)
        settings = {"strategy": strategy, "dtype": BF16}
        with closing(kit.precondition(model, method, **settings)) as own:
            ends.append(kit.train(model, loss_of, range(6), own, base))
    assert torch.equal(*ends)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("strategy", "apart"),
    [("comm-opt", 1e-6), ("sharded", 1e-6), (Sharded(group=None, deferred=True), 0.02)],
    ids=["comm-opt", "sharded", "deferred"],
)
def test_ranks_have_one_direction_and_the_factors_of_one(strategy: Any, apart: float) -> None:
    """Deferred statistics are rounded at solves alone."""
    alone = {k: f for k, f in _factors_on_ranks(0, 1, "comm-opt").items() if isinstance(k, tuple)}
    first, *others = run_ranks(_factors_on_ranks, 4, strategy)
    for key, tensor in first.items():
        assert all(torch.equal(tensor, other[key]) for other in others), key
    for key, factor in alone.items():
        assert float((first[key] - factor).norm() / factor.norm()) < apart, key


def test_others_are_refused() -> None:
    with pytest.raises(ValueError, match=r"state_dtype must be torch\.bfloat16, torch\.float32"):
        kit.precondition(network(), "muon", state_dtype=torch.float16)
    with pytest.raises(ValueError, match=r"dtype must be torch\.bfloat16, torch\.float32"):
        kit.precondition(network(), dtype=torch.float16)
