"""`check_backend` passes soframe's own backends, and finds the ways in which others part ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from soframe.comm import Recording, TorchDistributed
from soframe.comm.base import Backend, Handle, SingleProcess
from soframe.testing import check_backend, compare_weights
from tests.distributed.harness import run_ranks
from tests.distributed.training import Case, train_rank
from tests.docs.page import blocks

GUIDE = Path(__file__).parents[2] / "docs/guides/backend.md"


class Plain(TorchDistributed):
    """The four collectives that a backend must have, and the base class's forms of the others."""

    _reduce = Backend._reduce
    _reduce_scatter = Backend._reduce_scatter
    _all_gather_shares = Backend._all_gather_shares
    _all_to_all = Backend._all_to_all


class Rounds(TorchDistributed):
    """Receivers round, and the source does not."""

    def _broadcast(self, tensor: Tensor, source: int, group: tuple[int, ...]) -> Handle:
        super()._broadcast(tensor, source, group).wait()
        if self.rank != source and tensor.dtype == torch.float32:
            tensor.copy_(tensor.bfloat16())
        return Handle()


class KeepsItsShare(TorchDistributed):
    """As `Rounds`, where updates of all owners travel together."""

    def _all_gather_shares(self, flat: Tensor, sizes: Sequence[int]) -> Handle:
        own = flat.split(list(sizes))[self.rank].clone()
        super()._all_gather_shares(flat, sizes).wait()
        flat.copy_(flat.bfloat16())
        flat.split(list(sizes))[self.rank].copy_(own)
        return Handle()


class ShortStatus(TorchDistributed):
    """Sums of float64 are those of float32."""

    def _all_reduce(self, tensor: Tensor) -> Handle:
        short = tensor.float()
        super()._all_reduce(short).wait()
        tensor.copy_(short)
        return Handle()


class Forgets(TorchDistributed):
    """The second of two collectives under way overwrites the buffer of the first."""

    buffer: Tensor | None = None

    def _all_reduce(self, tensor: Tensor) -> Handle:
        return self._through(tensor, super()._all_reduce)

    def _broadcast(self, tensor: Tensor, source: int, group: tuple[int, ...]) -> Handle:
        return self._through(tensor, lambda b: super(Forgets, self)._broadcast(b, source, group))

    def _through(self, tensor: Tensor, collective: Any) -> Handle:
        self.buffer = tensor.clone()
        handle = collective(self.buffer)

        def wait() -> None:
            handle.wait()
            if self.buffer is not None and self.buffer.shape == tensor.shape:
                tensor.copy_(self.buffer)

        return Handle(wait)


class Turned(TorchDistributed):
    """Parts come in another order than that of ranks."""

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        return super()._all_gather(tensor)[::-1]


GOOD: dict[str, Any] = {
    "torch": TorchDistributed,
    "fused": lambda: TorchDistributed(fused=True),
    "by device": lambda: TorchDistributed(dist.new_group(backend="cpu:gloo,cuda:gloo"), fused=True),
    "plain": Plain,
    "recording": lambda: Recording(TorchDistributed()),
}
BAD: dict[str, tuple[Any, str]] = {
    "rounds": (Rounds, "broadcast of torch.float32 in"),
    "shares": (KeepsItsShare, "all_gather_shares of torch.float"),
    "status": (ShortStatus, "all_reduce of torch.float64 gives"),
    "forgets": (Forgets, ""),
    "turned": (Turned, "all_gather of torch.uint8 gives"),
}


def of_guide() -> Backend:
    """The backend that the guide defines."""
    there: dict[str, Any] = {}
    exec(blocks(GUIDE.read_text())[0].code, there)
    made: Backend = there["Thin"]()
    return made


def check_each(rank: int, ranks: int, names: list[str]) -> list[str]:
    found = []
    for name in names:
        backend = of_guide() if name == "guide" else {**GOOD, **BAD}[name]
        backend = backend if name == "guide" else backend[0]() if name in BAD else backend()
        try:
            check_backend(backend)
        except AssertionError as error:
            found.append(str(error))
        else:
            found.append("")
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.thorough)])
def test_backends_that_are_right_pass_and_others_do_not(ranks):
    for found in run_ranks(check_each, ranks, [*GOOD, "guide", *BAD]):
        assert found[: len(GOOD) + 1] == [""] * (len(GOOD) + 1)
        for (_, expected), error in zip(BAD.values(), found[len(GOOD) + 1 :], strict=True):
            assert ranks == 1 or (error and (expected in error or "another rank" in error)), error


def test_one_process_passes():
    check_backend(SingleProcess())


def train(rank: int, ranks: int, strategy: str) -> list[str]:
    """Training by the guide's backend keeps weights alike; by one that rounds on one side not."""
    found = []
    for make in (of_guide, Rounds):
        case = Case({"strategy": strategy, "dtype": torch.float32, "solve_every": 1}, steps=2)
        model = train_rank(rank, ranks, case, make).model
        try:
            compare_weights(model)
        except RuntimeError as error:
            found.append(str(error))
        else:
            found.append("")
    with torch.no_grad():
        other = nn.Linear(2, 3)
        for parameter in other.parameters():
            dist.broadcast(parameter, 0)
        compare_weights(other)
        other.bias[2].add_(rank * 1e-6)
    with pytest.raises(RuntimeError, match=r"differ between ranks: bias$"):
        compare_weights(other)
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["mem-opt", "comm-opt"])
def test_weights_are_compared(strategy):
    for right, rounded in run_ranks(train, 2, strategy):
        assert right == ""
        assert rounded.startswith("weights differ between ranks: conv.weight")
