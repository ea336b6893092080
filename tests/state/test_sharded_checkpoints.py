"""Sharded checkpoints: each rank writes and reads its own part, and training goes on."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter

from soframe import Preconditioner, checkpoint
from soframe.settings import grouped
from soframe.strategies import HybridOpt, Sharded
from tests.distributed.harness import run_ranks
from tests.distributed.test_places import Apart
from tests.distributed.training import LR, Case, Run, mean_over, same, snapshot
from tests.state.test_resume import equal, triangles

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]

STEPS, AT = 8, 5
# Statistics at steps 0, 2, 4 and 6, solves at 0, 3 and 6: at 5 factors have moved on, or wait.
CASE = Case({"statistics_every": 2, "solve_every": 3}, steps=STEPS)
STRATEGIES: dict[str, Any] = {
    "sharded": Sharded(group=2),
    "comm": "comm-opt",
    "mem": "mem-opt",
    "spread": HybridOpt(colocate=False),
    "owner-local": "owner-local",
    "custom": Apart(),
}
DEFERRED = Sharded(group=None, deferred=True)


def make(strategy: Any, rank: int, ranks: int, **options: Any) -> Run:
    case = CASE.with_options(strategy=strategy, **options)
    run = Run(case, rank, ranks, average=mean_over() if ranks > 1 else None)
    run.optimizer.param_groups[0]["momentum"] = 0.5
    return run


def everything(run: Run) -> dict[str, Any]:
    return {"model": run.model.state_dict(), "optimizer": run.optimizer.state_dict()}


def save(run: Run, folder: Path) -> None:
    state = {**everything(run), "preconditioner": checkpoint.part(run.preconditioner)}
    dcp.save(state, checkpoint_id=folder)


def load(run: Run, folder: Path, reader: FileSystemReader | None = None) -> Run:
    run.step(0)  # gives momentum room; of this step nothing must be left
    found = everything(run)
    dcp.load(found, checkpoint_id=folder)
    run.model.load_state_dict(found["model"])
    run.optimizer.load_state_dict(found["optimizer"])
    checkpoint.load(run.preconditioner, folder, storage_reader=reader)
    return run


# -- the same layout -------------------------------------------------------------------------


def resume(
    rank: int, ranks: int, folder: Path, names: list[str]
) -> dict[str, tuple[bool, bool, int]]:
    outcome = {}
    for name in names:
        strategy = STRATEGIES[name]
        whole = make(strategy, rank, ranks).train(range(AT))
        before = whole.preconditioner.traffic().get("state", {"bytes": 0})["bytes"]
        save(whole, folder / name)
        sent = whole.preconditioner.traffic().get("state", {"bytes": 0})["bytes"] - before
        resumed = load(make(strategy, rank, ranks), folder / name)
        remembered = same(triangles(resumed), triangles(whole))
        whole.train(range(AT, STEPS))
        resumed.train(range(AT, STEPS))
        outcome[name] = (remembered, torch.equal(resumed.weights(), whole.weights()), sent)
    return outcome


@pytest.mark.parametrize(
    "names",
    [
        ["sharded", "custom"],
        pytest.param(["comm", "mem", "spread", "owner-local"], marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_the_same_layout_goes_on_bit_by_bit(tmp_path, names):
    for own in run_ranks(resume, 4, tmp_path, names, timeout=120):
        assert own == dict.fromkeys(names, (True, True, 0))


# -- another layout --------------------------------------------------------------------------


def save_on_rank(rank: int, ranks: int, strategy: Any, folder: Path) -> None:
    run = make(strategy, rank, ranks).train(range(AT))
    before = snapshot(run.preconditioner)
    save(run, folder)
    assert same(before, snapshot(run.preconditioner))


def finish_on_rank(rank: int, ranks: int, strategy: Any, folder: Path, solver: str) -> Tensor:
    return (
        load(make(strategy, rank, ranks, solver=solver), folder).train(range(AT, STEPS)).weights()
    )


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param(Sharded(), id="sharded"),
        pytest.param(DEFERRED, id="deferred", marks=pytest.mark.thorough),
        pytest.param("mem-opt", id="mem", marks=pytest.mark.thorough),
    ],
)
def test_another_layout_goes_on_within_rounding(tmp_path, strategy):
    run_ranks(save_on_rank, 4, strategy, tmp_path)
    expected = make("comm-opt", 0, 1).train(range(STEPS)).weights()
    found = run_ranks(finish_on_rank, 2, "comm-opt", tmp_path, "inverse")
    found += run_ranks(finish_on_rank, 3, DEFERRED, tmp_path, "inverse")
    found += [finish_on_rank(0, 1, "comm-opt", tmp_path, "inverse")]
    for weights in found:
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)


def test_another_solver_takes_the_factors_and_solves_at_once(tmp_path):
    before = make("comm-opt", 0, 1).train(range(AT))
    save(before, tmp_path)
    after = load(make("comm-opt", 0, 1, solver="eigen"), tmp_path)
    assert not any(block.solved for block in after.preconditioner.blocks)
    kept = [{k: t for k, t in triangles(r).items() if k.count(".") == 1} for r in (before, after)]
    assert kept[0]
    assert same(*kept)
    after.step(AT)  # not a solve step
    assert sum(block.solved for block in after.preconditioner.blocks) == 4


# -- who writes and reads what ---------------------------------------------------------------


class Writer(FileSystemWriter):
    """Notes what is written; the tensors wait until they may."""

    def __init__(self, folder: Path, may: threading.Event | None = None) -> None:
        super().__init__(folder)
        self.written: list[str] = []
        self.may = may

    def write_data(self, plan: Any, planner: Any) -> Any:
        if self.may is not None and not self.may.wait(30):
            raise TimeoutError
        self.written += [item.index.fqn for item in plan.items]
        return super().write_data(plan, planner)


class Reader(FileSystemReader):
    """Notes what is read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.read: list[str] = []

    def read_data(self, plan: Any, planner: Any) -> Any:
        self.read += [item.storage_index.fqn for item in plan.items]
        return super().read_data(plan, planner)


def names_of(run: Run) -> set[str]:
    """What a rank holds, under the names that checkpoints have for it."""
    found = set()
    for block in run.preconditioner.blocks:
        found |= {f"preconditioner.{block.name}/factors/{name}" for name in block.running}
        for factor, tensors in block.second_order.items():
            base = f"preconditioner.{block.name}/second_order/{factor}"
            found |= {f"{base}/{name}" for name in tensors}
    return found


def who(rank: int, ranks: int, folder: Path, strategy: Any, other: Any) -> tuple[Any, ...]:
    run = make(strategy, rank, ranks).train(range(AT))
    writer, reader = Writer(folder), Reader(folder)
    part = checkpoint.part(run.preconditioner)
    dcp.save({"preconditioner": part}, storage_writer=writer)
    again = make(other, rank, ranks)
    checkpoint.load(again.preconditioner, storage_reader=reader)
    given = [f"preconditioner.{name}" for name in part]
    assert set(writer.written) - {HEADER} == set(given) - {HEADER}  # DCP moves nothing about
    return names_of(run), given, reader.read, names_of(again)


HEADER = "preconditioner.header"


@pytest.mark.parametrize(
    ("strategy", "other"),
    [(Sharded(group=2), "mem-opt"), ("comm-opt", Sharded(group=2))],
    ids=["sharded-mem", "comm-sharded"],
)
def test_each_rank_writes_its_own_and_reads_what_it_holds(tmp_path, strategy, other):
    results = run_ranks(who, 4, tmp_path, strategy, other)
    written = [name for _, names, _, _ in results for name in names if name != HEADER]
    # All is written, each once, by a rank that holds it; no rank writes most of it.
    assert len(written) == len(set(written))
    assert set(written) == set().union(*(held for held, *_ in results))
    for held, names, read, holds in results:
        assert set(names) - {HEADER} <= held
        assert len(names) < len(written) / 2
        assert {name for name in read if name != HEADER} == holds
        assert len([name for name in read if name != HEADER]) == len(holds)


# -- asynchronously --------------------------------------------------------------------------


def save_both_ways(rank: int, ranks: int, folder: Path, strategy: Any) -> tuple[bool, bool]:
    run = make(strategy, rank, ranks).train(range(AT))
    background = dist.new_group(backend="gloo")  # its collectives are in nobody's way
    save(run, folder / "now")
    may = threading.Event()
    part = {"preconditioner": checkpoint.part(run.preconditioner)}
    writer = Writer(folder / "later", may)
    saving = dcp.async_save(part, storage_writer=writer, process_group=background)
    run.train(range(AT, STEPS))
    busy = not saving.done()
    may.set()
    saving.result()
    found = []
    for how in ("now", "later"):
        again = make(strategy, rank, ranks)
        checkpoint.load(again.preconditioner, folder / how)
        found.append(again.preconditioner.state_dict())
    return busy, equal(*found)


@pytest.mark.parametrize("strategy", [Sharded(), DEFERRED], ids=["sharded", "deferred"])
def test_what_is_saved_while_training_goes_on_is_what_was(tmp_path, strategy):
    assert run_ranks(save_both_ways, 2, tmp_path, strategy) == [(True, True)] * 2


@pytest.mark.parametrize(
    "strategy", ["comm-opt", Sharded(), DEFERRED], ids=["comm", "sharded", "deferred"]
)
def test_a_part_does_not_change_while_training_goes_on(strategy):
    run = make(strategy, 0, 1).train(range(AT))
    part = checkpoint.part(run.preconditioner)
    kept = copy.deepcopy(part)
    run.train(range(AT, STEPS))
    assert equal(part, kept)


def test_data_that_lie_side_by_side_are_written_once(tmp_path):
    """Each is a view of the memory of all."""
    model = torch.nn.Sequential(*(torch.nn.Linear(48, 48) for _ in range(20)))
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    every = {"statistics_every": 1, "solve_every": 1}
    own = Preconditioner(model, optimizer=optimizer, solver="inverse", **grouped(every))
    model(torch.randn(64, 48)).square().mean().backward()
    own.step()
    data = [t for b in own.blocks for ts in b.second_order.values() for t in ts.values()]
    assert all(t.untyped_storage().nbytes() == 20 * t.nbytes for t in data)
    dcp.save({"soframe": checkpoint.part(own)}, checkpoint_id=tmp_path)
    written = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert written < 4 * sum(t.nbytes for t in data)
    own.close()
