"""Running factors on the host between the steps that use them: the same steps, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.blocks import block as blocks_of
from tests import kit
from tests.curvature import fill, randn
from tests.distributed.harness import run_ranks

METHODS = ("kfac", "ekfac", "foof", "tnt", "eva", "shampoo", "soap", "kl-shampoo", "diagonal")


class Net(nn.Module):
    """Layers of two shapes, one of them twice, and one that is not used in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 5)
        self.third, self.conv = nn.Linear(5, 5), nn.Conv1d(5, 3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        if x.shape[1] == 3:
            x = self.third(x)
        return self.conv(x.mT)


def outcome(
    rank: int, ranks: int, offload: bool, method: str, settings: dict[str, Any], resume: bool
) -> tuple[list[Tensor], str, int]:
    """Return weights, a text of the state, and the bytes that were moved to the host."""
    moved = [0]

    def copied(x: Tensor, device: object = None) -> Tensor:
        # As another device would: what is not written back is lost.
        moved[0] += x.nbytes * (device is None)
        return x.clone()

    model = fill(Net().double())

    def make() -> soframe.Optimizer:
        dtype = settings.get("dtype", torch.float64)
        statistics = soframe.Statistics(offload=offload, dtype=dtype)
        every = {"statistics_every": 2, "solve_every": 4, "auxiliary_lr": 0.01}
        own = {key: value for key, value in settings.items() if key != "dtype"}
        return soframe.Optimizer(
            model, method, lr=0.01, **{**every, **own, "statistics": statistics}
        )

    def loss(model: nn.Module, step: int) -> Tensor:
        return model(randn(6 * ranks, 3 + step % 2, 4, seed=step)[rank::ranks]).square().mean()

    with pytest.MonkeyPatch.context() as patch:
        if offload:
            patch.setattr(blocks_of, "on_host", copied)
            patch.setattr(blocks_of, "on_device", copied)
        own = make()
        kit.train(model, loss, range(6), kit.Averaging(model), own)
        if resume:
            state = own.state_dict()
            own.close()
            own = make()
            own.load_state_dict(state)
        model.first.bias.requires_grad_(False)  # stacks are made anew
        kit.train(model, loss, range(6, 11), kit.Averaging(model), own)
        state = own.preconditioner.state_dict()
        own.close()
    return [p.detach() for p in model.parameters()], str(state), moved[0]


def same(one: Any, other: Any) -> None:
    for p, q in zip(one[0], other[0], strict=True):
        assert torch.equal(p, q)
    assert one[1] == other[1]
    assert one[2] > 0 == other[2]


@pytest.mark.parametrize("method", METHODS)
def test_offloaded_factors_are_the_same(method: str) -> None:
    same(*(outcome(0, 1, offload, method, {}, False) for offload in (True, False)))


def test_both_triangles_stay() -> None:
    """A factor that was mirrored for one reader is so for the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks_of, "on_host", torch.clone)
        patch.setattr(blocks_of, "on_device", lambda x, device: x.clone())
        model = fill(Net().double())
        own = kit.precondition(model, statistics=soframe.Statistics(offload=True), lr=0.1)
        kit.train(model, lambda m, _: m(randn(6, 3, 4)).square().mean(), range(2), own)
        block = own.blocks[0]
        (spec, *_) = block.factors
        for _ in range(2):
            matrix = block.running.matrix(spec)
            assert torch.equal(matrix, matrix.mT)
        own.close()


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize(
    "settings",
    [{"dtype": torch.bfloat16, "solver": "eigen"}, {"background": 1}, {"solver": "eigen"}],
    ids=str,
)
@pytest.mark.covering(together=1)
def test_settings(settings: dict[str, Any], resume: bool) -> None:
    same(*(outcome(0, 1, offload, "kfac", settings, resume) for offload in (True, False)))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [("comm-opt", 2), ("mem-opt", 3), pytest.param("sharded", 2, marks=pytest.mark.thorough)],
)
def test_ranks(strategy: str, ranks: int) -> None:
    runs = [
        run_ranks(outcome, ranks, offload, "kfac", {"strategy": strategy}, True)
        for offload in (True, False)
    ]
    for one, other in zip(*runs, strict=True):
        for p, q in zip(one[0], other[0], strict=True):
            assert torch.equal(p, q)
        assert one[1] == other[1]
