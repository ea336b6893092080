"""The logger: what is written, when, by whom, and what it lets steps measure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import soframe
from soframe.diagnostics import ScalarLogger
from tests import kit
from tests.distributed.harness import run_ranks
from tests.distributed.training import Case, Run


class Board:
    """Keeps what is added."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.rows.setdefault(global_step, {})[tag] = scalar_value


def loss_of(model: nn.Module, _: int) -> Tensor:
    return model(torch.randn(8, 4)).square().mean()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


@pytest.mark.parametrize("writer", [None, "runs/one"])
def test_a_writer_that_cannot_write_is_refused_at_once(writer: Any) -> None:
    own = soframe.Preconditioner(network())
    with pytest.raises(TypeError, match=r"writer must have add_scalar.*not " + repr(writer)):
        ScalarLogger(own, writer)
    own.close()


def test_every_third_step_is_written_and_measured() -> None:
    model, board = network(), Board()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    own = soframe.Preconditioner(model, optimizer=optimizer, solve_every=2, statistics_every=1)
    logger = ScalarLogger(own, board, every=3, spectra=True)
    measured = []
    for _ in range(7):
        kit.train(model, loss_of, range(1), own)
        measured.append(own.engine.measuring.norms)
        optimizer.step()
        logger.step()
    # Of the seven steps the third and the sixth.
    assert measured == [False, False, True, False, False, True, False]
    assert list(board.rows) == [3, 6]
    row = board.rows[6]
    assert all(name.startswith("soframe/") for name in row)
    assert row["soframe/solve_age/0.A"] == 1
    assert row["soframe/direction_norm/0"] > 0
    assert row["soframe/condition/2.G"] >= 1
    assert row["soframe/seconds/direct"] > 0
    assert own.metrics()["timed_steps"] == 1  # since the last writing


def test_a_callback_takes_the_scalars_of_an_optimizer() -> None:
    model, rows = network(), []

    def log(found: Mapping[str, float], step: int) -> None:
        rows.append((step, dict(found)))

    optimizer = soframe.Optimizer(model, "muon", lr=0.1)
    logger = ScalarLogger(optimizer, log, every=2, prefix="")
    kit.train(model, loss_of, range(4), optimizer, logger)
    assert [step for step, _ in rows] == [2, 4]
    assert rows[0][1]["update_norm/0.weight"] > 0
    assert rows[0][1]["overall/update_norm"] > 0


def test_a_trust_region_is_logged_too() -> None:
    model, board = network(), Board()
    optimizer = soframe.TrustRegion(model, "squared-error")
    logger = ScalarLogger(optimizer, board, every=1)
    x = torch.randn(8, 4)
    for _ in range(3):
        optimizer.step(lambda: model(x).square().sum() / 16)
        logger.step()
    assert list(board.rows) == [1, 2, 3]
    assert board.rows[3]["soframe/damping/0"] > 0


def test_what_cannot_be_logged_is_refused() -> None:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    own = soframe.Preconditioner(model, optimizer=optimizer)
    for rank in (1, -1):  # from the last one no number would come
        with pytest.raises(ValueError, match=rf"rank={rank}, of 1 rank\(s\)"):
            ScalarLogger(own, Board(), rank=rank)
    with pytest.raises(ValueError, match="every must be at least 1, not 0"):
        ScalarLogger(own, Board(), every=0)


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    model = network()
    own = soframe.Preconditioner(model, kl_clip=None)
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        kit.train(model, loss_of, range(4), own, ScalarLogger(own, writer, every=2))
    found = accumulator.EventAccumulator(str(tmp_path))
    found.Reload()
    events = found.Scalars("soframe/damping/0")
    assert [event.step for event in events] == [2, 4]
    assert [event.value for event in events] == pytest.approx([0.05 * 0.99, 0.05 * 0.99**3])


def on_ranks(
    rank: int, ranks: int, all_ranks: bool, everywhere: bool = True
) -> dict[int, dict[str, float]]:
    options = {"strategy": "mem-opt", "gradients": "local"}
    run, board = Run(Case(options), rank, ranks), Board()
    writer = board if everywhere or rank == 0 else None
    logger = ScalarLogger(run.preconditioner, writer, every=2, all_ranks=all_ranks)
    for step in range(2):
        run.step(step)
        logger.step()
    return board.rows


@pytest.mark.distributed
def test_one_rank_writes_and_only_what_it_knows() -> None:
    first, second = run_ranks(on_ranks, 2, False)
    assert (list(first), list(second)) == ([2], [])
    names = {"conv", "grouped", "hidden", "head"}
    known = {name for name in names if f"soframe/gradient_norm/{name}" in first[2]}
    assert 0 < len(known) < len(names)
    first, second = run_ranks(on_ranks, 2, True)
    assert (list(first), list(second)) == ([2], [])
    assert all(f"soframe/gradient_norm/{name}" in first[2] for name in names)


@pytest.mark.distributed
@pytest.mark.parametrize("all_ranks", [False, True])
def test_other_ranks_need_no_writer(all_ranks: bool) -> None:
    first, second = run_ranks(on_ranks, 2, all_ranks, False)
    assert (list(first), list(second)) == ([2], [])
