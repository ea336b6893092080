"""Damaged states and checkpoints: every flipped bit is an error, or changes nothing."""

from __future__ import annotations

import copy
import io
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from soframe import checkpoint
from soframe.state import checksums
from tests.distributed.harness import run_ranks
from tests.distributed.training import Case, Run, mean_over
from tests.state.flips import flip_in_folder, flip_in_tensor, flipped
from tests.state.test_refusals import CASE, assert_refused, everything, make
from tests.state.test_resume import equal

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")

FLIPS = 30


# -- flipped bits ------------------------------------------------------------------------------


def loaded(state: dict[str, Any]) -> dict[str, Any]:
    run = Run(CASE)
    run.preconditioner.load_state_dict(state)
    return everything(run)


@pytest.mark.slow
def test_flipped_bits_of_tensors_are_errors():
    good, run, draw = make().preconditioner.state_dict(), make(), random.Random(0)
    paths = [path for path, _ in checksums.tensors_of(good)]
    for _ in range(FLIPS):
        state = copy.deepcopy(good)
        tensors = dict(checksums.tensors_of(state))
        flip_in_tensor(tensors[name := draw.choice(paths)], draw)
        before = everything(run)
        with pytest.raises(ValueError, match="has another checksum") as caught:
            run.preconditioner.load_state_dict(state)
        assert name.split("/")[1] in str(caught.value), "the block is named"
        assert equal(everything(run), before)


@pytest.mark.slow
def test_changed_numbers_are_errors():
    good = make().preconditioner.state_dict()
    masses = good["blocks"]["head"]["masses"]
    for path, value in (
        (("step",), 2),
        (("owed_statistics",), 1),
        (("counters", "failed_solves"), 1),
        (("blocks", "head", "masses", "A", 0), masses["A"][0] * (1 + 2**-52)),
        (("blocks", "head", "rows"), 7),
        (("checksums", "plain"), 0),
    ):
        state = place = copy.deepcopy(good)
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        assert_refused(make(), state, "its numbers and names have another checksum")


@pytest.mark.slow
def test_flipped_bits_of_a_file_are_errors_or_change_nothing():
    file, draw, errors = io.BytesIO(), random.Random(1), 0
    good = make().preconditioner.state_dict()
    torch.save(good, file)
    expected = loaded(good)
    for _ in range(FLIPS):
        run = Run(CASE)
        before = everything(run)
        try:
            state = torch.load(io.BytesIO(flipped(file.getvalue(), draw)), weights_only=True)
            run.preconditioner.load_state_dict(state)
        except Exception:  # torch's own errors are of any kind
            errors += 1
            assert equal(everything(run), before)
        else:
            assert equal(everything(run), expected)
    assert errors > FLIPS / 4  # what else there is in the file is torch's


@pytest.mark.slow
def test_flipped_bits_of_a_sharded_checkpoint_are_errors_or_change_nothing(tmp_path):
    draw, errors, run = random.Random(2), 0, make()
    part = checkpoint.part(run.preconditioner)
    dcp.save({"preconditioner": part}, checkpoint_id=tmp_path, no_dist=True)
    expected = loaded(run.preconditioner.state_dict())
    for _ in range(FLIPS):
        file, good = flip_in_folder(tmp_path, draw)
        own = Run(CASE)
        before = everything(own)
        try:
            checkpoint.load(own.preconditioner, tmp_path)
        except ValueError:
            errors += 1
            assert equal(everything(own), before)
        else:
            assert equal(everything(own), expected)
        file.write_bytes(good)
    assert errors > FLIPS / 4


@pytest.mark.parametrize("sharded", [False, True])
def test_flipped_bits_of_a_saved_checkpoint_are_errors(tmp_path, sharded):
    """Its files have checksums, so that a flip in the model's part is one, too."""
    draw, run = random.Random(3), make()
    for step in (1, 2):
        own = run.preconditioner
        curvature = checkpoint.part(own) if sharded else own.state_dict()
        state = {"step": step, "model": run.model.state_dict(), "preconditioner": curvature}
        checkpoint.save(tmp_path, state, sharded=sharded)
    last = checkpoint.latest(tmp_path)
    assert last is not None
    for _ in range(FLIPS):
        file, good = flip_in_folder(last, draw)
        with pytest.warns(UserWarning, match="the checkpoint before it is taken"):
            before = checkpoint.latest(tmp_path)
        assert before is not None
        assert before.name == "checkpoint-000001"
        with pytest.raises(ValueError, match=r"damaged|another version|truncated|is sharded"):
            checkpoint.read(last)
        file.write_bytes(good)
    assert checkpoint.latest(tmp_path) == last


# -- other dtypes -------------------------------------------------------------------------------


def test_a_sharded_checkpoint_of_another_dtype_is_verified_as_it_was_saved(tmp_path):
    run = make()
    state = {"preconditioner": checkpoint.part(run.preconditioner)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    other = Run(CASE.with_options(dtype=torch.float32))
    checkpoint.load(other.preconditioner, tmp_path)
    for mine, theirs in zip(other.preconditioner.blocks, run.preconditioner.blocks, strict=True):
        for name, factor in mine.running.items():
            assert torch.equal(factor, theirs.running[name].float())


def test_a_state_that_was_cast_is_refused_unless_sealed():
    state = make().preconditioner.state_dict()
    factors = state["blocks"]["head"]["factors"]
    factors["A"] = factors["A"].float()
    assert_refused(make(), state, "as after a cast to another dtype")
    run = make()
    run.preconditioner.load_state_dict(checkpoint.seal(state))


# -- pickles -----------------------------------------------------------------------------------


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.file,))


def write_evil(folder: Path, marker: Path, where: str) -> None:
    """Put something into a checkpoint that acts where it is unpickled."""
    part = checkpoint.part(make().preconditioner)
    if where == "header":
        part["header"] = Evil(marker)
    dcp.save({"preconditioner": part}, checkpoint_id=folder, no_dist=True)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    if where == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    elif where == "within the metadata":
        metadata.planner_data = [Evil(marker)]
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    elif where == "a rank's metadata":
        (folder / ".metadata").unlink()
        (folder / "__0.metadata").write_bytes(pickle.dumps(Evil(marker)))
    elif where == "tensor":
        (file,) = folder.glob("*.distcp")
        data = io.BytesIO()
        torch.save(Evil(marker), data)
        file.write_bytes(data.getvalue().ljust(file.stat().st_size, b"\0"))
        for entry in metadata.storage_data.values():
            entry.offset, entry.length = 0, len(data.getvalue())
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    "where", ["metadata", "within the metadata", "a rank's metadata", "header", "tensor"]
)
def test_what_acts_when_it_is_unpickled_is_refused_and_does_not_act(where, tmp_path):
    marker = tmp_path / "was here"
    write_evil(tmp_path / "checkpoint", marker, where)
    run = make()
    before = everything(run)
    marker.unlink(missing_ok=True)
    with pytest.raises(ValueError, match="no complete checkpoint of a preconditioner"):
        checkpoint.load(run.preconditioner, tmp_path / "checkpoint")
    assert not marker.exists()
    assert equal(everything(run), before)


def test_a_reader_that_is_given_is_trusted(tmp_path):
    """The opposite of the test above, with DCP's own reader: so that the guide is right."""
    marker = tmp_path / "was here"
    write_evil(tmp_path / "checkpoint", marker, "within the metadata")
    marker.unlink(missing_ok=True)
    reader = dcp.FileSystemReader(tmp_path / "checkpoint")
    checkpoint.load(make().preconditioner, storage_reader=reader)
    assert marker.exists()


# -- on ranks ----------------------------------------------------------------------------------


def flip_a_tensor(run: Run, good: Any, folder: Path) -> None:
    if run.rank == 1:
        flip_in_tensor(good["blocks"]["hidden"]["factors"]["G"], random.Random(0))
    run.preconditioner.load_state_dict(good)


def flip_a_shard(run: Run, good: Any, folder: Path) -> None:
    part = checkpoint.part(run.preconditioner)
    for name in part:
        if name.startswith("hidden/factors"):  # on its owner alone, after its checksum was taken
            flip_in_tensor(part[name], random.Random(0))
    dcp.save({"preconditioner": part}, checkpoint_id=folder)
    checkpoint.load(run.preconditioner, folder)


def refuse_the_header(run: Run, good: Any, folder: Path) -> None:
    own = run.preconditioner
    dcp.save({"preconditioner": checkpoint.part(own)}, checkpoint_id=folder)
    own.curvature.parts.scaling = "kaisa" if run.rank == 1 else "fisher"
    try:
        checkpoint.load(own, folder)
    finally:
        own.curvature.parts.scaling = "fisher"


HOW = {
    flip_a_tensor: "blocks/hidden/factors/G has another checksum",
    flip_a_shard: "hidden/factors/",
    refuse_the_header: "scaling='fisher', not 'kaisa'",
}


def refuse_on_ranks(rank: int, ranks: int, folder: Path) -> list[tuple[str, bool]]:
    options = {"strategy": "sharded", "statistics_every": 2, "solve_every": 3}
    run = Run(Case(options), rank, ranks, average=mean_over())
    run.train(range(3))
    answers = []
    for how in HOW:
        good = copy.deepcopy(run.preconditioner.state_dict())
        before = everything(run)
        try:
            how(run, good, folder / how.__name__)
            said = "nothing"
        except ValueError as error:
            said = str(error)
        answers.append((said, equal(everything(run), before)))
    run.step(3)  # the ranks are together still
    return answers


@pytest.mark.distributed
def test_what_is_damaged_for_one_rank_is_loaded_by_none(tmp_path):
    results = run_ranks(refuse_on_ranks, 2, tmp_path, timeout=90, group_timeout=30)
    for reason, answers in zip(HOW.values(), zip(*results, strict=True), strict=True):
        assert any(reason in said for said, _ in answers), answers
        for said, kept in answers:
            assert reason in said or "could not load the state" in said
            assert kept
