"""A checkpoint is whole or not there, whatever kills the save or fills the disk."""

from __future__ import annotations

import errno
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from soframe import checkpoint
from soframe.state import durable
from tests.distributed.harness import RankError, RankFailure, run_ranks

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")

Strikes = list[int]


def state_of(step: int, rank: int = 0, sharded: bool = False) -> dict[str, Any]:
    weights = torch.full((1000,), float(step))
    return {f"weights {rank}" if sharded else "weights": weights, "step": step}


def save(folder: Path, step: int, rank: int = 0, *, sharded: bool = False, **options: Any) -> Path:
    return checkpoint.save(folder, state_of(step, rank, sharded), sharded=sharded, **options)


def content(folder: Path, sharded: bool, ranks: int = 1) -> int | None:
    """The step of the last checkpoint, all of whose weights are that step's."""
    last = checkpoint.latest(folder)
    if last is None:
        return None
    if sharded:
        found = {"step": -1} | {f"weights {rank}": torch.zeros(1000) for rank in range(ranks)}
        reader, planner = checkpoint.PlainReader(last), checkpoint.PlainPlanner()
        dcp.load(found, storage_reader=reader, planner=planner)
    else:
        found = checkpoint.read(last)
    step = found.pop("step")
    for weights in found.values():
        assert torch.equal(weights, torch.full((1000,), float(step)))
    assert isinstance(step, int)
    return step


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("sharded", [False, True])
def test_the_last_checkpoints_are_kept(tmp_path, sharded):
    folder = tmp_path / "run" / "checkpoints"
    assert checkpoint.latest(folder) is None
    for step in range(4):
        saved = save(folder, step, sharded=sharded, keep=3)
        assert checkpoint.latest(folder) == saved
        assert content(folder, sharded) == step
    names = [f"checkpoint-00000{number}" for number in (2, 3, 4)]
    assert names_in(folder) == names
    save(folder, 4, sharded=sharded, keep=1)
    assert names_in(folder) == ["checkpoint-000005"]


def test_what_else_is_in_the_folder_stays(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "checkpoint-best").mkdir()
    # Of a trainer of another library, which has more steps.
    for name in ("checkpoint-1", "checkpoint-500"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "trainer_state.json").write_text("{}")
    first = save(tmp_path, 0)
    for step in range(1, 4):
        save(tmp_path, step)
    others = {"notes.txt", "checkpoint-best", "checkpoint-1", "checkpoint-500"}
    saved = {"checkpoint-000503", "checkpoint-000504"}
    assert first.name == "checkpoint-000501"
    assert set(names_in(tmp_path)) == others | saved
    assert content(tmp_path, sharded=False) == 3


def test_misuse_is_told(tmp_path):
    with pytest.raises(RuntimeError, match="keep must be at least 1, not 0"):
        save(tmp_path, 0, keep=0)
    with pytest.raises(RuntimeError, match=r"keep must be an integer, not 2\.5"):
        save(tmp_path, 0, keep=2.5)
    assert names_in(tmp_path) == []
    with pytest.raises(ValueError, match=r"is no checkpoint of soframe\.checkpoint\.save"):
        checkpoint.read(tmp_path)
    with pytest.raises(ValueError, match=r"is sharded: load the preconditioner with soframe"):
        checkpoint.read(save(tmp_path, 0, sharded=True))


def test_where_no_checkpoint_is_whole_nobody_begins_anew_in_silence(tmp_path):
    for step in range(2):
        (save(tmp_path, step) / "state.pt").write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="is not what was saved; the checkpoint before it"),
        pytest.raises(ValueError, match=r"no checkpoint in .* is whole"),
    ):
        checkpoint.latest(tmp_path)


def test_the_whole_of_a_large_file_is_under_its_checksum(tmp_path):
    """It is read in pieces of 16 MB; the damage is in the first of two."""
    saved = checkpoint.save(tmp_path, {"x": torch.zeros(5_000_000)})
    with (saved / "state.pt").open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"!")
    with pytest.raises(ValueError, match=r"state\.pt is not what was saved"):
        checkpoint.read(saved)


def test_a_state_that_could_not_be_read_is_refused_when_it_is_saved(tmp_path):
    """As numpy's numbers, which a loss or a generator leaves in a state."""
    save(tmp_path, 0)
    for entry in (np.float64(1.5), np.random.default_rng(0).integers(3, size=2), Path("x")):
        with pytest.raises(RuntimeError, match=r"which read\(\) would not load: save tensors"):
            checkpoint.save(tmp_path, {"loss": entry})
    assert names_in(tmp_path) == ["checkpoint-000001"]
    plain = {"loss": 1.5, "random": random.getstate(), "shape": torch.Size([2])}
    assert checkpoint.read(checkpoint.save(tmp_path, plain)) == plain


def test_a_checkpoint_runs_nothing_when_it_is_read(tmp_path, monkeypatch):
    marker = tmp_path / "was here"

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (marker,))

    with pytest.raises(RuntimeError, match="would not load"):
        checkpoint.save(tmp_path / "checkpoints", {"evil": Evil()})
    assert not marker.exists()
    monkeypatch.setattr(durable, "get_unsafe_globals_in_checkpoint", lambda path: [])
    saved = checkpoint.save(tmp_path / "checkpoints", {"evil": Evil()})
    with pytest.raises(RuntimeError, match="cannot be read"):
        checkpoint.read(saved)
    assert not marker.exists()


# -- killed ------------------------------------------------------------------------------------


def operations(folder: Path, at: int | None) -> Strikes:
    """Count what this process does to files in a folder; die before the one with a number."""
    seen = [0]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        kinds = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate")
        if event not in kinds or not str(arguments[0]).startswith(str(folder)):
            return
        if seen[0] == at:
            os.kill(os.getpid(), signal.SIGKILL)
        seen[0] += 1

    sys.addaudithook(hook)
    return seen


def save_until(
    rank: int, ranks: int, folder: Path, sharded: bool, victim: int, at: int | None
) -> int:
    seen = operations(folder, at) if rank == victim else [0]
    save(folder, 3, rank, sharded=sharded)
    return seen[0]


def save_twice(rank: int, ranks: int, folder: Path, sharded: bool) -> None:
    for step in (1, 2):
        save(folder, step, rank, sharded=sharded)


def look(rank: int, ranks: int, folder: Path, sharded: bool) -> int | None:
    return content(folder, sharded, ranks)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "sharded"), [(1, False), pytest.param(2, True, marks=pytest.mark.thorough)]
)
def test_a_save_that_is_killed_anywhere_leaves_a_whole_checkpoint(tmp_path, ranks, sharded):
    found = set()
    for victim in range(ranks):
        run_ranks(save_twice, ranks, folder := tmp_path / f"count-{victim}", sharded)
        count = run_ranks(save_until, ranks, folder, sharded, victim, None)[victim]
        assert count >= (1 if victim else 10)
        for at in {*range(0, count, 3 * ranks - 1), count - 1}:
            run_ranks(save_twice, ranks, folder := tmp_path / f"{victim}-{at}", sharded)
            ends = run_ranks(
                *(save_until, ranks, folder, sharded, victim, at), check=False, group_timeout=3
            )
            assert isinstance(ends[victim], RankFailure)
            assert ends[victim].exitcode == -signal.SIGKILL
            steps = run_ranks(look, ranks, folder, sharded)
            assert steps in ([2] * ranks, [3] * ranks), (victim, at)
            found.add(steps[0])
            # The next save removes what the killed one has left.
            run_ranks(save_until, ranks, folder, sharded, victim, None)
            assert len(names_in(folder)) == 2
    assert found == {2, 3}  # both before and after the rename


# -- a full disk -------------------------------------------------------------------------------


def save_with_little_room(
    rank: int, ranks: int, folder: Path, sharded: bool, victim: int
) -> tuple[str, int | None, int | None]:
    save(folder, 1, rank, sharded=sharded)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, before[1]))
    said = "nothing"
    try:
        save(folder, 2, rank, sharded=sharded)
    except RuntimeError as error:
        said = str(error)
    kept = content(folder, sharded, ranks)
    left = [name for name in names_in(folder) if name.startswith(".")]
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    save(folder, 3, rank, sharded=sharded)
    assert left == []
    return said, kept, content(folder, sharded, ranks)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("ranks", "sharded", "victim"), [(1, False, 0), (2, False, 0), (2, True, 0), (2, True, 1)]
)
def test_where_there_is_no_room_every_rank_says_so_and_the_last_stays(
    tmp_path, ranks, sharded, victim
):
    results = run_ranks(save_with_little_room, ranks, tmp_path, sharded, victim, group_timeout=30)
    for said, kept, after in results:
        assert "checkpoint-000002 was not saved; the checkpoints before it are as they" in said
        assert f"rank {victim}" in said
        assert os.strerror(errno.EFBIG) in said
        assert (kept, after) == (1, 3)


@pytest.fixture
def small_disk(tmp_path):
    """A file system with room for 100 kB."""
    (folder := tmp_path / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a small file system")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.distributed
@pytest.mark.parametrize("sharded", [False, True])
def test_a_full_disk_leaves_the_last_checkpoint(small_disk, sharded):
    (small_disk / "others").write_bytes(b"0" * 70_000)
    kept = fill_up(small_disk, sharded)
    assert kept >= 1
    assert content(small_disk / "run", sharded) == kept
    (small_disk / "others").unlink()
    assert save(small_disk / "run", 99, sharded=sharded).exists()
    assert content(small_disk / "run", sharded) == 99


def fill_up(disk: Path, sharded: bool) -> int:
    """Save until there is no room; return the last step that was saved."""
    for step in range(1, 50):
        try:
            save(disk / "run", step, sharded=sharded, keep=50)
        except RuntimeError as error:
            if os.strerror(errno.ENOSPC) in str(error):
                return step - 1
            raise
    raise AssertionError("there was room for all")


def save_apart(rank: int, ranks: int, folder: Path) -> str:
    """Rank 1 has something that cannot be saved."""
    state = {**state_of(1), **({"x": threading.Lock()} if rank == 1 else {})}
    try:
        checkpoint.save(folder, state, sharded=True)
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.mark.distributed
def test_what_one_rank_cannot_save_is_an_error_on_every_rank(tmp_path):
    for said in run_ranks(save_apart, 2, tmp_path, group_timeout=30):
        assert "cannot pickle '_thread.lock' object" in said
        assert "checkpoint-000001 was not saved" in said
    assert checkpoint.latest(tmp_path) is None


def damage_and_look(rank: int, ranks: int, folder: Path) -> str:
    with pytest.warns(UserWarning, match="is not what was saved"):
        last = checkpoint.latest(folder)
    assert last is not None
    return last.name


@pytest.mark.distributed
def test_ranks_take_the_same_checkpoint_where_one_of_them_finds_damage(tmp_path):
    run_ranks(save_twice, 2, tmp_path, True)
    (file,) = (tmp_path / "checkpoint-000002").glob("__1_*")
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    with pytest.raises(RankError, match="DID NOT WARN"):  # it is rank 0 that warns, once
        run_ranks(damage_and_look, 2, tmp_path, group_timeout=30)
    assert run_ranks(quietly_look, 2, tmp_path) == ["checkpoint-000001"] * 2


def quietly_look(rank: int, ranks: int, folder: Path) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        last = checkpoint.latest(folder)
    assert last is not None
    return last.name


def test_tensors_are_read_where_they_are_wanted(tmp_path):
    path = checkpoint.save(tmp_path, {"weights": torch.ones(3)})
    assert checkpoint.read(path)["weights"].device.type == "cpu"
    assert checkpoint.read(path, map_location="meta")["weights"].is_meta
