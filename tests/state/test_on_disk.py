"""How a checkpoint comes to the disk: what is synchronised when, and how many stay."""

from __future__ import annotations

import json
import os
import shutil
import stat
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from soframe import checkpoint
from soframe.state import durable

STATE: dict[str, Any] = {"step": 3, "weights": torch.ones(1000)}


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system has no list of files")
def test_files_are_on_the_disk_before_their_names_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []
    sync = os.fsync

    def fsync(handle: int) -> None:
        status = os.fstat(handle)
        size = status.st_size if stat.S_ISREG(status.st_mode) else 0
        synced.append((Path(f"/proc/self/fd/{handle}").readlink().name, size))
        sync(handle)

    monkeypatch.setattr(durable.os, "fsync", fsync)
    root = tmp_path / "a" / "run"
    before = len(list(Path("/proc/self/fd").iterdir()))
    path = checkpoint.save(root, STATE)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert synced == [
        ("state.pt", (path / "state.pt").stat().st_size),
        ("manifest.json", (path / "manifest.json").stat().st_size),
        (".checkpoint-000001.tmp", 0),  # the folder, with the names of its files
        ("run", 0),  # after the rename
    ]


def test_a_manifest_names_its_format_and_its_files(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, STATE)
    manifest = json.loads((path / "manifest.json").read_text())
    assert (manifest["format"], manifest["version"]) == ("soframe.checkpoint", 1)
    assert manifest["sharded"] is False
    data = (path / "state.pt").read_bytes()
    assert manifest["files"] == {"state.pt": [len(data), zlib.crc32(data)]}


def test_two_checkpoints_stay_unless_told_otherwise(tmp_path: Path) -> None:
    for _ in range(3):
        checkpoint.save(tmp_path, STATE)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-000002",
        "checkpoint-000003",
    ]
    checkpoint.save(tmp_path, STATE, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000004"]
    with pytest.raises(RuntimeError, match="keep must be at least 1, not 0"):
        checkpoint.save(tmp_path, STATE, keep=0)


def test_names_beside_checkpoints_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-000007").write_text("a file of somebody else's")
    (tmp_path / "checkpoint-last").mkdir()
    (tmp_path / ".checkpoint-000001.tmp").mkdir()
    (tmp_path / ".checkpoint-000002.tmp").write_text("left by a save")
    elsewhere = tmp_path / "other"
    elsewhere.mkdir()
    (tmp_path / "checkpoint-000003").symlink_to(elsewhere)
    path = checkpoint.save(tmp_path, STATE, keep=1)
    assert path.name == "checkpoint-000008"
    left = {entry.name for entry in tmp_path.iterdir()}
    assert left == {"checkpoint-000007", "checkpoint-000008", "checkpoint-last", "other"}


@pytest.mark.parametrize("piece", [1, 3, 10, 11])
def test_a_checksum_is_that_of_the_whole_file(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable, "_PIECE", piece)
    (tmp_path / "file").write_bytes(b"0123456789")
    assert durable._digest(tmp_path / "file") == [10, zlib.crc32(b"0123456789")]


@pytest.mark.parametrize(("size", "is_read"), [(2**26, True), (2**26 + 1, False)])
def test_a_manifest_has_64_mebibytes_at_most(
    size: int, is_read: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoint.save(tmp_path, STATE)
    monkeypatch.setattr(durable, "_size", lambda path: size)
    if is_read:
        assert durable._manifest(path)["version"] == 1
    else:
        with pytest.raises(ValueError, match="its manifest cannot be read: it is too large"):
            durable._manifest(path)


def test_the_error_of_a_save_is_not_that_of_its_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The unfinished folder may be gone, too, where a disk is."""

    def write(path: Path, write: Any) -> None:
        shutil.rmtree(path.parent)
        raise OSError("the disk is gone")

    monkeypatch.setattr(durable.disk, "write", write)
    with pytest.raises(RuntimeError, match=r"000001 was not saved.* the disk is gone"):
        checkpoint.save(tmp_path, STATE)
    assert checkpoint.latest(tmp_path) is None


def test_a_warning_of_damage_points_to_the_call(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, STATE)
    path = checkpoint.save(tmp_path, STATE)
    (path / "state.pt").unlink()
    with pytest.warns(UserWarning, match=r"state\.pt is missing; the checkpoint before") as warned:
        last = checkpoint.latest(tmp_path)
    assert [one.filename for one in warned] == [__file__]
    assert last == tmp_path / "checkpoint-000001"
    (last / "state.pt").write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="is taken"),
        pytest.raises(ValueError, match=r"is whole: .*is missing; .*is not what was saved"),
    ):
        checkpoint.latest(tmp_path)
    assert checkpoint.latest(tmp_path / "nothing") is None


def test_a_folder_instead_of_a_file_is_no_file(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, STATE)
    (path / "state.pt").unlink()
    (path / "state.pt").mkdir()
    with pytest.raises(ValueError, match=r"state\.pt cannot be read: state\.pt is no file"):
        checkpoint.read(path)
