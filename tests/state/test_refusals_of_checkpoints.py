"""A checkpoint that one rank cannot load is loaded by none; a broken one changes nothing."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from soframe import checkpoint
from soframe.state import saving as state
from tests.distributed.harness import run_ranks
from tests.distributed.training import Case, Run, mean_over
from tests.state.test_refusals import CASE, everything, make
from tests.state.test_resume import equal

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")


def write(part: dict[str, Any], folder: Path) -> None:
    dcp.save({"preconditioner": part}, checkpoint_id=folder, no_dist=True)


def truncate(folder: Path) -> None:
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:-300])


def in_header(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def apply(part: dict[str, Any]) -> None:
        header = json.loads(part["header"])
        place = header
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = to
        part["header"] = json.dumps(header)

    return apply


def poison(part: dict[str, Any]) -> None:
    part["head/factors/G"].view(-1)[-1] = float("nan")


def drop(part: dict[str, Any]) -> None:
    del part["head/second_order/A/inverse"]


def shorten(part: dict[str, Any]) -> None:
    part["head/factors/A"] = part["head/factors/A"][:, :-1]


def garble(part: dict[str, Any]) -> None:
    part["header"] = part["header"][:-9]


def nothing(broken: Any) -> None:
    pass


def forget_metadata(folder: Path) -> None:
    (folder / ".metadata").unlink()


BROKEN: dict[str, tuple[Callable[[dict[str, Any]], None], Callable[[Path], None], str]] = {
    "not finished": (nothing, forget_metadata, "no complete checkpoint"),
    "truncated": (nothing, truncate, "no complete checkpoint"),
    "newer": (in_header("version", to=state.VERSION + 1), nothing, "has version 5, and this sofr"),
    "other model": (in_header("blocks", to={}), nothing, "of another model or another choice"),
    "damaged header": (in_header("step", to=7), nothing, "its numbers and names"),
    "garbled": (garble, nothing, "its header cannot be read"),
    "lacks a tensor": (drop, nothing, "Missing key .*head/second_order/A/inverse"),
    "other size": (shorten, nothing, "Size mismatch .*head/factors/A"),
    "damaged tensor": (poison, nothing, "damaged: head/factors/G has another checksum"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_refused_and_changes_nothing(name, tmp_path):
    in_part, in_folder, reason = BROKEN[name]
    part = copy.deepcopy(checkpoint.part(make().preconditioner))
    in_part(part)
    write(part, tmp_path)
    in_folder(tmp_path)
    run = Run(CASE).train((7, 3))
    before = everything(run)
    with pytest.raises(ValueError, match=f"(?s){reason}"):
        checkpoint.load(run.preconditioner, tmp_path)
    assert equal(everything(run), before)


def test_another_key_and_another_folder_are_refused(tmp_path):
    write(checkpoint.part(make().preconditioner), tmp_path / "here")
    run = make()
    with pytest.raises(ValueError, match="key 'curvature'"):
        checkpoint.load(run.preconditioner, tmp_path / "here", key="curvature")
    with pytest.raises(ValueError, match=r"no complete checkpoint .*nowhere"):
        checkpoint.load(run.preconditioner, tmp_path / "nowhere")


# -- on ranks --------------------------------------------------------------------------------


Answer = tuple[str, bool, Tensor]


def truncated(run: Run, good: Any, earlier: Any, folder: Path) -> None:
    if run.rank == 1:
        del good["blocks"]["head"]
    run.preconditioner.load_state_dict(good)


def another_step(run: Run, good: Any, earlier: Any, folder: Path) -> None:
    run.preconditioner.load_state_dict(earlier if run.rank == 1 else good)


def not_finite(run: Run, good: Any, earlier: Any, folder: Path) -> None:
    part = checkpoint.part(run.preconditioner)
    for name in part:
        if name.startswith("head/factors"):  # on its owner alone
            part[name].fill_(float("nan"))
    dcp.save({"preconditioner": part}, checkpoint_id=folder)
    checkpoint.load(run.preconditioner, folder)


def lost_file(run: Run, good: Any, earlier: Any, folder: Path) -> None:
    dcp.save({"preconditioner": checkpoint.part(run.preconditioner)}, checkpoint_id=folder)
    if run.rank == 1:  # who wrote it knows that it is there
        for file in folder.glob("__1_*"):
            file.unlink()
    torch.distributed.barrier()
    checkpoint.load(run.preconditioner, folder)


HOW = {
    truncated: "lacks ['head']",
    another_step: "rank(s) [1] and rank 0 would continue from different states",
    not_finite: "head/factors/",
    lost_file: "no complete checkpoint",
}


def refuse_on_ranks(rank: int, ranks: int, strategy: str, folder: Path) -> list[Answer]:
    case = Case({"strategy": strategy, "statistics_every": 2, "solve_every": 3})
    answers = []
    for how in HOW:
        run = Run(case, rank, ranks, average=mean_over())
        run.step(0)
        earlier = copy.deepcopy(run.preconditioner.state_dict())
        run.step(1)
        good = copy.deepcopy(run.preconditioner.state_dict())
        run.step(2)
        before = everything(run)
        try:
            how(run, good, earlier, folder / how.__name__)
            said = "nothing"
        except ValueError as error:
            said = str(error)
        kept = equal(everything(run), before)
        run.step(3)  # the ranks are together still
        answers.append((said, kept, run.weights()))
        run.preconditioner.close()
    return answers


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["comm-opt", "sharded"])
def test_what_one_rank_cannot_load_is_loaded_by_none(strategy, tmp_path):
    results = run_ranks(refuse_on_ranks, 2, strategy, tmp_path)
    for reason, answers in zip(HOW.values(), zip(*results, strict=True), strict=True):
        assert any(reason in said for said, _, _ in answers), answers
        for said, kept, weights in answers:
            assert reason in said or "could not load the state" in said
            assert kept
            assert torch.equal(weights, answers[0][2])
