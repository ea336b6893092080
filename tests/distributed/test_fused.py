"""One reduce-scatter and one all-gather carry what a call per owner carries, and give the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import soframe
from soframe import Preconditioner
from soframe.comm import Backend, Recording, TorchDistributed
from soframe.settings import grouped
from tests import kit
from tests.distributed.harness import RankFailure, run_ranks
from tests.distributed.test_equivalence import assert_same_traces

pytestmark = pytest.mark.distributed

SIZES = {
    "even": (3, 3, 3, 3),
    "uneven": (2, 5, 1, 4),
    "some have nothing": (0, 7, 0, 1),
    "one has all": (0, 6, 0, 0),
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def addend(rank: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Small whole numbers: every dtype adds them up exactly."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-8, 9, (sum(sizes),), generator=generator).to(dtype)


def collect(rank: int, ranks: int, how: str) -> dict[Any, tuple[Tensor, Tensor]]:
    """This rank's share of each sum, and what it has after each gathering."""
    backend = TorchDistributed()
    if how == "lists":
        backend._engines = {"cpu": "nccl"}
    twin = Backend if how == "twin" else TorchDistributed
    found = {}
    for name, all_sizes in SIZES.items():
        sizes = all_sizes[:ranks]
        for dtype in DTYPES:
            flat = addend(rank, sizes, dtype)
            twin._reduce_scatter(backend, flat, sizes).wait()
            total = flat.split(list(sizes))[rank].clone()
            gathered = torch.full((sum(sizes),), torch.nan, dtype=dtype)
            gathered.split(list(sizes))[rank].copy_(total)
            # Gloo has no all-gather of lists that are uneven.
            if how != "lists" or len(set(sizes)) == 1:
                twin._all_gather_shares(backend, gathered, sizes).wait()
                found[name, dtype] = (total, gathered)
            else:
                found[name, dtype] = (total, None)
    return found


@pytest.mark.parametrize(
    ("how", "ranks"),
    [
        ("fused", 3),
        *(
            pytest.param(how, ranks, marks=pytest.mark.slow)
            for how, ranks in [("fused", 4), ("lists", 4), ("twin", 2)]
        ),
    ],
)
def test_shares_are_added_up_and_gathered(how, ranks):
    for rank, own in enumerate(run_ranks(collect, ranks, how)):
        for (name, dtype), (share, gathered) in own.items():
            where = (rank, name, dtype)
            sizes = SIZES[name][:ranks]
            expected = torch.stack([addend(r, sizes, dtype) for r in range(ranks)]).sum(0)
            assert torch.equal(share, expected.split(list(sizes))[rank]), where
            if gathered is not None:
                assert torch.equal(gathered, expected), where


# -- steps ---------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers of several sizes, and one that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.body = nn.ModuleList(nn.Linear(4, 4, bias=bool(i % 2)) for i in range(5))
        self.never = nn.Linear(2, 2)
        self.head = nn.Linear(4, 9)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for layer in self.body:
            x = layer(x).tanh()
        return self.head(x)


def gradients_of(
    rank: int, strategy: str, gradients: Any, *, fused: bool
) -> tuple[list[Tensor], Recording, dict[str, Any]]:
    torch.manual_seed(0)
    model = Net()
    backend = Recording(TorchDistributed(fused=fused))
    options: dict[str, Any] = {"strategy": strategy, "gradients": gradients}
    options |= {"statistics_every": 1, "solve_every": 2, "kl_clip": 1e-2, "lr": 0.1}
    own = Preconditioner(model, **grouped({"backend": backend, **options}))

    def losses(model: nn.Module, step: int) -> Iterator[Tensor]:
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + rank)
            x = torch.randn(3, 4, generator=generator, dtype=torch.float64)
            yield model(x).square().sum(1).mean() / 2

    before = [kit.Averaging(model)] if gradients == "averaged" else []
    found: list[Tensor] = []
    for step in range(4):
        kit.train(model, losses, [step], *before, own)
        found += kit.gradients(model)
    own.close()
    return found, backend, own.traffic()


def both_ways(rank: int, ranks: int, bucket: int, cases: list[tuple[str, str]]) -> list[Any]:
    import soframe.strategies.buckets

    soframe.strategies.buckets.BUCKET_BYTES = bucket
    found = []
    for case in cases:
        for fused in (True, False):
            gradients, backend, traffic = gradients_of(rank, *case, fused=fused)
            found.append((gradients, backend.events, traffic))
    return found


CASES = [
    ("mem-opt", "local"),
    ("sharded", "local"),
    ("hybrid-opt", "local"),
    ("mem-opt", "averaged"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "bucket"), [(3, 700), pytest.param(4, 2**25, marks=pytest.mark.thorough)]
)
def test_both_forms_give_the_same_gradients_and_carry_the_same_bytes(ranks, bucket):
    results = run_ranks(both_ways, ranks, bucket, CASES, timeout=120)
    for index, case in enumerate(CASES):
        for rank, own in enumerate(results):
            (fused, events, traffic), (plain, _, expected) = own[2 * index : 2 * index + 2]
            for one, other, everybodys in zip(fused, plain, results[0][2 * index][0], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
                assert torch.equal(one, everybodys), (case, rank)
            for phase, count in traffic.items():
                assert count["bytes"] == expected[phase]["bytes"], (case, phase)
                assert count["calls"] <= expected[phase]["calls"], (case, phase)
            kinds = {event.operation for event in events}
            if case[0] == "hybrid-opt":  # its workers send to some ranks each
                continue
            wanted = {"all_gather_shares", *({"reduce_scatter"} if case[1] == "local" else ())}
            assert wanted <= kinds, case
            if bucket > 700:  # that is one buffer for all; it is cut otherwise
                assert traffic["total"]["calls"] < expected["total"]["calls"], case
        assert_same_traces([own[2 * index][1] for own in results])


# -- what is refused -----------------------------------------------------------------------------


def build_apart(rank: int, ranks: int) -> None:
    backend = TorchDistributed(fused=rank == 0)
    Preconditioner(
        nn.Linear(3, 2), distribution=soframe.Distribution(backend=backend), kl_clip=None
    )


def test_ranks_that_differ_are_told():
    for failure in run_ranks(build_apart, 2, check=False):
        assert isinstance(failure, RankFailure)
        assert "settings of rank(s) [1] differ" in failure.summary


def build_elsewhere(rank: int, ranks: int) -> tuple[bool, str]:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        TorchDistributed(fused=True)
    except ValueError as error:
        return TorchDistributed().fused, str(error)
    raise AssertionError("it was taken")


def find_wires(rank: int, ranks: int) -> dict[str, list[str]]:
    wires = {}
    for engines in ("cpu:gloo", "cuda:nccl", "cpu:gloo,cuda:nccl"):
        with patch.object(dist, "get_backend_config", return_value=engines):
            backend = TorchDistributed()
        with patch.object(torch.cuda, "current_device", return_value=3):
            wires[engines] = [str(backend.wire_device(torch.device(d))) for d in ("cpu", "cuda:1")]
    return wires


def test_numbers_travel_from_where_they_are_if_an_engine_is_there():
    [wires] = run_ranks(find_wires, 1)
    assert wires == {
        "cpu:gloo": ["cpu", "cuda:1"],
        "cuda:nccl": ["cuda:3", "cuda:1"],
        "cpu:gloo,cuda:nccl": ["cpu", "cuda:1"],
    }


def test_another_engine_is_refused_with_a_remedy():
    [(default, error)] = run_ranks(build_elsewhere, 1, backend=None)
    assert not default
    assert "fused=True is for Gloo and NCCL" in error
    assert "engine is 'fake'; pass fused=False" in error
