"""Files that are replaced as a whole: a write that fails leaves the former one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import IO

import pytest

from soframe.planning.hardware import Hardware
from soframe.state import disk


def half(file: IO[bytes]) -> None:
    file.write(b"half")
    raise OSError("disk full")


def test_a_write_that_fails_leaves_the_former_file(tmp_path: Path) -> None:
    path = tmp_path / "numbers.json"
    disk.replace(path, lambda file: file.write(b"whole"))
    with pytest.raises(OSError, match="disk full"):
        disk.replace(path, half)
    assert path.read_bytes() == b"whole"
    disk.replace(path, lambda file: file.write(b"new"))  # over what the other has left
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(path.name, b"new")]


def test_a_reader_of_the_former_file_reads_it_whole(tmp_path: Path) -> None:
    """The new one is another file, which takes the name at once."""
    path, former = tmp_path / "numbers.json", tmp_path / "former"
    disk.replace(path, lambda file: file.write(b"whole"))
    former.hardlink_to(path)
    disk.replace(path, lambda file: file.write(b"new"))
    assert former.read_bytes() == b"whole"
    assert path.read_bytes() == b"new"


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="this system has no list of files")
def test_a_file_is_on_the_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "numbers.json", list[tuple[str, int]]()

    def fsync(handle: int) -> None:
        name = Path(f"/proc/self/fd/{handle}").readlink().name
        size = 0 if name == tmp_path.name else os.fstat(handle).st_size
        synced.append((name, size))

    monkeypatch.setattr(os, "fsync", fsync)
    disk.replace(path, lambda file: file.write(b"whole"))
    assert synced == [(".numbers.json.tmp", 5), (tmp_path.name, 0)]


def test_a_profile_of_hardware_is_replaced_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hardware = Hardware.load("a100-ib")
    hardware.save(path := tmp_path / "mine.json")
    assert Hardware.load(path) == hardware

    def fail(handle: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        Hardware.load("h100-ib").save(path)
    assert Hardware.load(path) == hardware
