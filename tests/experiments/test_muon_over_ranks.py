"""The benchmark of Muon over ranks: what it counts, and its table."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from benchmarks import muon_over_ranks
from benchmarks.muon_over_ranks import Measured
from experiments import models


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="Linux counts them")
def test_bytes_written_to_sockets_count() -> None:
    one, other = socket.socketpair()
    with one, other:
        before = muon_over_ranks.written()
        os.write(one.fileno(), bytes(1000))
        # Other threads of the process may write, too.
        assert 1000 <= muon_over_ranks.written() - before < 2000


def test_the_table_is_of_the_slowest_rank() -> None:
    ranks = [
        {
            "soframe": Measured([0.1, 0.3] * 4, cpu=0.8, sent=8_000_000),
            "torch.optim.Muon": Measured([0.4] * 8, cpu=1.6, sent=16_000_000),
        },
        {
            "soframe": Measured([0.2, 0.2] * 4, cpu=0.8, sent=0),
            "torch.optim.Muon": Measured([0.5] * 8, cpu=1.6, sent=16_000_000),
        },
    ]
    found = muon_over_ranks.rows(ranks, list(ranks[0]))
    assert found["soframe"] == pytest.approx(
        {"made": 8, "sent": 0.5, "ms": 250, "of the least": 1, "CPU": 200}
    )
    assert found["torch.optim.Muon"] == pytest.approx(
        {"made": 16, "sent": 2, "ms": 500, "of the least": 2, "CPU": 400}
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch.optim.Muon", "pytorch_optimizer Muon", "soframe"])
@pytest.mark.thorough
def test_contenders_move_every_parameter(name: str) -> None:
    if "pytorch_optimizer" in name:
        pytest.importorskip("pytorch_optimizer")
    model = models.byte_gpt()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = muon_over_ranks.CONTENDERS[name].make(model)
    for parameter in model.parameters():
        parameter.grad = parameter.detach() + 0.1
    optimizer.step()
    assert all(bool((p != b).any()) for p, b in zip(model.parameters(), before, strict=True))
