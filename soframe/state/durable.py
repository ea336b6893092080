"""Atomic checkpoints, in a folder that keeps the last good ones.

    folder/
        checkpoint-000003/      plain: state.pt; sharded: files of torch.distributed.checkpoint
            manifest.json       the size and the checksum of every file
        checkpoint-000004/
        .checkpoint-000005.tmp/ being written, or left by a save that was killed

A checkpoint is written under a hidden name, synchronised to the disk, and renamed when every rank
is done. A save that is killed leaves the earlier checkpoints as they were.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.checkpoint.stateful import Stateful
from torch.serialization import get_unsafe_globals_in_checkpoint

from soframe.checks.values import require_integer
from soframe.checks.warning import warn
from soframe.comm.base import Backend
from soframe.state import checksums, disk
from soframe.state.plain_metadata import within

T = TypeVar("T")

PREFIX = "checkpoint-"
STATE = "state.pt"
MANIFEST = "manifest.json"
FORMAT = "soframe.checkpoint"
VERSION = 1
_PIECE = 2**24
_LARGEST = 2**26  # bytes of a manifest, which has about 50 for each file


def save(
    folder: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    sharded: bool = False,
    keep: int = 2,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Save a checkpoint atomically, and remove old ones once it is complete.

    Call it on every rank. It returns when the checkpoint is on the disk. A save that is killed or
    fails leaves the earlier checkpoints as they were, and the next save removes its files.

    Args:
        folder: The folder of this run's checkpoints, the same for all ranks, and for no other run.
        state: The state dict. Plain, ``torch.save`` writes rank 0's; sharded,
            ``torch.distributed.checkpoint.save`` writes every rank's part.
        sharded: Whether every rank writes a part.
        keep: The number of checkpoints that stay, this one included.
        process_group: The process group of the ranks; None for the default group.

    Returns:
        The folder of the checkpoint, within ``folder``.

    Raises:
        RuntimeError: On every rank, if one could not write its part, for example because the disk
            is full, has a ``keep`` below 1, or a plain state that `read` could not load.
        ValueError: On every rank, if ranks have different folders.
    """
    return save_on(Ranks.of(process_group), folder, state, sharded=sharded, keep=keep)


def save_on(
    ranks: Ranks,
    folder: str | os.PathLike[str],
    state: Mapping[str, Any],
    *,
    sharded: bool,
    keep: int,
) -> Path:
    """Save a checkpoint as `save` does, on these ranks."""
    root = Path(folder)
    entries: dict[str, Any] = {}

    def begin() -> str:
        require_integer("keep", keep, 1)
        # DCP would call `state_dict` where other ranks are in a collective already.
        for name, entry in state.items():
            entries[name] = entry
            if sharded and isinstance(entry, Stateful):
                entries[name] = entry.state_dict()
        return _begin(root) if ranks.rank == 0 else ""

    name = ranks.of_folder(root, "no checkpoint was saved", begin)
    unfinished, final = root / f".{name}.tmp", root / name
    failure = f"{final} was not saved; the checkpoints before it are as they were"

    def write() -> None:
        if sharded:
            _write_shards(unfinished, entries, ranks)
        elif ranks.rank == 0:
            disk.write(unfinished / STATE, lambda file: torch.save(entries, file))
            if unknown := get_unsafe_globals_in_checkpoint(unfinished / STATE):
                raise TypeError(
                    f"the state has {', '.join(sorted(unknown))}, which read() would not load: "
                    f"save tensors, numbers and strings in dicts and lists, or allow them "
                    f"(torch.serialization.add_safe_globals)"
                )

    def finish() -> None:
        files: dict[str, Any] = {}
        for of_rank in digests:
            files |= of_rank
        plain = {"format": FORMAT, "version": VERSION, "sharded": sharded, "files": files}
        manifest = json.dumps(checksums.seal(plain), indent=1)
        disk.write(unfinished / MANIFEST, lambda file: file.write(manifest.encode()))
        disk.sync(unfinished)
        # A rename is atomic: readers find a complete checkpoint or none.
        unfinished.rename(final)
        # The new name must reach the disk, too.
        disk.sync(root)

    try:
        ranks.all(failure, write)
        names = ranks.first(failure, lambda: sorted(p.name for p in unfinished.iterdir()))
        # Ranks compute the checksums together, each for some of the files.
        digests = ranks.all(
            failure,
            lambda: {file: _digest(unfinished / file) for file in ranks.share(names, sharded)},
        )
        ranks.first(failure, finish)
    except RuntimeError:
        if ranks.rank == 0:  # the next save removes the files of a failed one
            shutil.rmtree(unfinished, ignore_errors=True)
        raise
    warning = f"{final} was saved, but older ones could not be removed"
    ranks.first(warning, lambda: _prune(root, keep))
    return final


def latest(
    folder: str | os.PathLike[str], *, process_group: dist.ProcessGroup | None = None
) -> Path | None:
    """Return the last checkpoint whose files match their saved checksums.

    Call it on every rank: they share the files of a sharded checkpoint. A damaged checkpoint is
    skipped with a warning.

    Args:
        folder: As for `save`.
        process_group: As for `save`.

    Returns:
        The checkpoint, the same on every rank; None for a folder without any.

    Raises:
        ValueError: On every rank, if all checkpoints are damaged, or ranks have different folders.
        RuntimeError: On every rank, if one cannot read the folder.
    """
    return latest_on(Ranks.of(process_group), folder)


def latest_on(ranks: Ranks, folder: str | os.PathLike[str]) -> Path | None:
    """Return the last whole checkpoint as `latest` does, on these ranks."""
    root = Path(folder)
    names = ranks.of_folder(root, f"{root} cannot be read", lambda: _names(root))
    problems = []
    # The newest first; older ones only if it is damaged.
    for name in reversed(names):
        problem = _problem(ranks, root / name)
        if not problem:
            return root / name
        problems.append(problem)
        if ranks.rank == 0:
            warn(f"{problem}; the checkpoint before it is taken")
    if problems:
        raise ValueError(f"no checkpoint in {root} is whole: {'; '.join(problems)}")
    return None


def read(
    checkpoint: str | os.PathLike[str],
    *,
    map_location: Any = "cpu",
    process_group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """Read a plain checkpoint.

    Call it on every rank.

    Args:
        checkpoint: The folder that `save` or `latest` returned.
        map_location: As for ``torch.load``.
        process_group: As for `save`.

    Returns:
        The saved state dict.

    Raises:
        ValueError: On every rank, if the checkpoint is sharded, damaged or not a checkpoint.
        RuntimeError: On every rank, if one cannot read it.
    """
    ranks, path = Ranks.of(process_group), Path(checkpoint)
    problem = _problem(ranks, path)
    if problem:
        raise ValueError(problem)
    if _manifest(path)["sharded"]:
        raise ValueError(
            f"{path} is sharded: load the preconditioner with soframe.checkpoint.load, and the "
            f"rest with torch.distributed.checkpoint.load"
        )
    contents: list[dict[str, Any]] = []

    def load() -> None:
        contents.append(torch.load(path / STATE, map_location=map_location, weights_only=True))

    ranks.all(f"{path} cannot be read", load)
    return contents[0]


def _names(root: Path) -> list[str]:
    """Return the names of the checkpoints, oldest first."""
    if not root.exists():
        return []
    named = [p.name for p in root.iterdir() if p.name.startswith(PREFIX)]
    return sorted((n for n in named if n[len(PREFIX) :].isdecimal()), key=_number)


def _number(name: str) -> int:
    return int(name[len(PREFIX) :])


def _begin(root: Path) -> str:
    """Remove the files of killed saves, and return the name of the next checkpoint."""
    root.mkdir(parents=True, exist_ok=True)
    # No other save is under way: a folder belongs to one run.
    for remains in root.glob(f".{PREFIX}*.tmp"):
        _remove(remains)
    number = max(map(_number, _names(root)), default=0) + 1
    name = f"{PREFIX}{number:06d}"
    (root / f".{name}.tmp").mkdir()
    return name


def _prune(root: Path, keep: int) -> None:
    saved: list[str] = []
    for name in _names(root):
        # Files of such a name, and folders without a manifest, are of another library; a link may
        # lead to a disk that is not there.
        if (root / name / MANIFEST).exists() or (root / name).is_symlink():
            saved.append(name)
    for name in saved[:-keep]:
        # Removing a folder is not atomic: first rename it, so that it is no checkpoint.
        (root / name).rename(root / f".{name}.tmp")
        _remove(root / f".{name}.tmp")


def _remove(path: Path) -> None:
    """Remove a folder; of a link, as to another disk, the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _write_shards(folder: Path, entries: dict[str, Any], ranks: Ranks) -> None:
    with warnings.catch_warnings():
        # DCP warns of a missing process group, which is intended here.
        warnings.filterwarnings("ignore", ".*to save in a single process")
        dcp_save(
            entries,
            storage_writer=FileSystemWriter(folder),
            process_group=ranks.group,
            no_dist=ranks.size == 1,
        )


def _digest(path: Path) -> list[int]:
    """Return the size and the CRC-32 of a file."""
    size = checksum = 0
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            size, checksum = size + len(piece), zlib.crc32(piece, checksum)
    return [size, checksum]


def _size(path: Path) -> int:
    """Return the size of a file; ValueError for devices and pipes, whose contents may not end."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{path.name} is no file")
    return status.st_size


def _manifest(path: Path) -> dict[str, Any]:
    """Read the manifest of a checkpoint; ValueError if it is missing or damaged."""
    manifest = _unchecked_manifest(path)
    checksums.verify(manifest, f"the manifest of {path}")
    if (manifest.get("format"), manifest.get("version")) != (FORMAT, VERSION):
        raise ValueError(f"{path} is of another version of soframe.checkpoint.save")
    files, sharded = manifest.get("files"), manifest.get("sharded")
    if not isinstance(files, dict) or not all(isinstance(of, list) for of in files.values()):
        raise ValueError(f"{path} is damaged: its manifest names no files")
    if not all(map(within, files)):
        raise ValueError(f"{path} is damaged: its manifest names files outside its folder")
    if (".metadata" if sharded else STATE) not in files:
        raise ValueError(f"{path} is damaged: its manifest lacks the state")
    return dict(manifest)


def _unchecked_manifest(path: Path) -> Any:
    try:
        if _size(path / MANIFEST) > _LARGEST:
            raise ValueError("it is too large")
        return json.loads((path / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise ValueError(f"{path} is no checkpoint of soframe.checkpoint.save") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: its manifest cannot be read: {error}") from error


def _problem(ranks: Ranks, path: Path) -> str:
    """Return the damage of a checkpoint, the same on every rank; empty if it is whole."""

    def problem() -> str:
        try:
            manifest = _manifest(path)
        except ValueError as error:
            return str(error)
        files = manifest["files"]
        for name in ranks.share(sorted(files), manifest["sharded"]):
            try:
                # The size first, which takes no time.
                digest = [_size(path / name)]
                if digest == files[name][:1]:
                    digest = _digest(path / name)
            except FileNotFoundError:
                return f"{path} is damaged: {name} is missing"
            except (OSError, ValueError) as error:
                return f"{path} is damaged: {name} cannot be read: {error}"
            if digest != files[name]:
                return f"{path} is damaged: {name} is not what was saved"
        return ""

    return next(filter(None, ranks.all(f"{path} cannot be read", problem)), "")


@dataclass(frozen=True)
class Ranks:
    """The ranks that share a checkpoint.

    Attributes:
        group: Their process group; None for the default group.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int

    @staticmethod
    def of(group: dist.ProcessGroup | None) -> Ranks:
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks(None, 0, 1)
        return Ranks(group, dist.get_rank(group), dist.get_world_size(group))

    @staticmethod
    def of_backend(backend: Backend) -> Ranks:
        """Return the ranks of a preconditioner or a curvature."""
        if backend.world_size == 1:
            return Ranks(None, 0, 1)
        return Ranks.of(backend.process_group)

    def share(self, names: Sequence[str], sharded: bool) -> Sequence[str]:
        """Return the files whose digests this rank computes; rank 0 takes a plain checkpoint's."""
        if sharded:
            return names[self.rank :: self.size]
        if self.rank == 0:
            return names
        return ()

    def all(self, failure: str, action: Callable[[], T]) -> list[T]:
        """Call on every rank and return all results; if one raises, RuntimeError on all."""
        result, error, text = None, None, ""
        try:
            result = action()
        # CheckpointException is a BaseException only
        except (CheckpointException, Exception) as raised:
            error, text = raised, f"rank {self.rank}: {_reason(raised)}"
        outcomes: list[Any] = [(result, text)]
        if self.size > 1:
            outcomes = [None] * self.size
            dist.all_gather_object(outcomes, (result, text), group=self.group)
        texts = dict.fromkeys(text for _, text in outcomes if text)
        if texts:
            raise RuntimeError(f"{failure}. {'; '.join(texts)}") from error
        return [result for result, _ in outcomes]

    def of_folder(self, folder: Path, failure: str, action: Callable[[], T]) -> T:
        """Call on every rank and return rank 0's result; ValueError if folders differ."""
        answers = self.all(failure, lambda: (str(folder), action()))
        if len(folders := dict.fromkeys(name for name, _ in answers)) > 1:
            raise ValueError(
                f"ranks have different folders for one checkpoint, {' and '.join(folders)}: ranks "
                f"with a checkpoint of their own pass their process_group="
            )
        return answers[0][1]

    def first(self, failure: str, action: Callable[[], T]) -> T:
        """Call on rank 0 and return its result on every rank; as `all` if it raises."""
        answer: Any = self.all(failure, lambda: action() if self.rank == 0 else None)[0]
        result: T = answer
        return result


def _reason(error: BaseException) -> str:
    """Return an error and its causes as text: torch reports only effects of a full disk."""
    reasons = [f"{type(error).__name__}: {error}"]
    if isinstance(error, CheckpointException):
        reasons = [f"on rank {r}: {_reason(failure[0])}" for r, failure in error.failures.items()]
    cause = error.__cause__ or error.__context__
    text = "; ".join(reasons)
    if cause is not None:
        text += f" (after {_reason(cause)})"
    return text
