"""Reading checkpoints of ``torch.distributed.checkpoint`` without running what is in them.

DCP describes a checkpoint in a file ``.metadata``, which is a pickle: to read it as DCP does runs
whatever its writer wanted to be run. It also unpickles entries that are no tensors. Here both are
read so that nothing but DCP's own descriptions, and what ``torch.load(weights_only=True)`` takes,
can come of it. Tensors are read that way by DCP itself.
"""

from __future__ import annotations

import io
import pickle
from pathlib import PurePosixPath
from typing import Any, ClassVar

import torch
import torch.distributed.checkpoint.metadata as descriptions
from torch.distributed.checkpoint import filesystem as dcp_files
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.serialization import _get_layout

_RECORDS = (
    descriptions.BytesStorageMetadata,
    descriptions.ChunkStorageMetadata,
    descriptions.Metadata,
    descriptions.MetadataIndex,
    descriptions.StorageMeta,
    descriptions.TensorProperties,
    descriptions.TensorStorageMetadata,
    dcp_files._StorageInfo,
)
# Which attributes a description may be given: its own, and never one of its class.
_FIELDS = {record: frozenset(record.__dataclass_fields__) for record in _RECORDS}
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(record.__module__, record.__qualname__): record for record in _RECORDS},
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): (
        descriptions._MEM_FORMAT_ENCODING
    ),
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("pathlib", "PosixPath"): PurePosixPath,  # DCP notes the folder
    ("pathlib", "WindowsPath"): PurePosixPath,
    ("pathlib", "PurePosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
    ("pathlib._local", "WindowsPath"): PurePosixPath,
    ("collections", "OrderedDict"): dict,
    **{
        ("torch", name): value
        for name, value in vars(torch).items()
        if isinstance(value, torch.dtype)
    },
}


class NotPlainError(ValueError):
    """A description of a checkpoint would have run something, or is not one."""


# What no description has, and what gives room to whatever size a damaged file names.
_REFUSED = (
    *(pickle.BYTEARRAY8, pickle.NEXT_BUFFER, pickle.READONLY_BUFFER),
    *(pickle.PERSID, pickle.BINPERSID, pickle.EXT1, pickle.EXT2, pickle.EXT4),
)
_Unpickler: Any = pickle._Unpickler


class _Plain(_Unpickler):  # type: ignore[misc]  # of which typeshed knows half
    """Makes descriptions of checkpoints, and nothing else.

    The unpickler that is written in Python: the other one gives room to whatever index a damaged
    file names.
    """

    dispatch: ClassVar = {
        opcode: method
        for opcode, method in _Unpickler.dispatch.items()
        if bytes([opcode]) not in _REFUSED
    }

    def find_class(self, module: str, name: str) -> Any:
        """See `pickle.Unpickler.find_class`."""
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise NotPlainError(
                f"it names {module}.{name}, which no description of a checkpoint needs; nothing "
                f"of it was run"
            ) from None

    def load_build(self) -> None:
        """Give a new description its attributes: only those that it has, and only in itself.

        Raises:
            NotPlainError: If that is not what is asked for.
        """
        given, target = self.stack[-1], self.stack[-2]
        fields = _FIELDS.get(type(target))
        if fields is None:
            raise NotPlainError(f"it changes a {type(target).__name__}")
        if isinstance(target, descriptions.TensorProperties):
            fitting = isinstance(given, tuple) and len(given) == 5
        else:
            fitting = isinstance(given, dict) and set(given) <= fields
        if not fitting:
            raise NotPlainError(f"it gives a {type(target).__name__} what it has not")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def parse(data: bytes) -> Metadata:
    """Return the description of a checkpoint.

    Args:
        data: What is in its ``.metadata``.

    Raises:
        NotPlainError: If there is something else in it, or it is damaged. Nothing of it was run.
    """
    try:
        metadata = _Plain(io.BytesIO(data)).load()
    except NotPlainError as error:
        raise NotPlainError(f"the .metadata of the checkpoint is refused: {error}") from error
    except Exception as error:  # a damaged pickle may fail in any way
        raise NotPlainError(
            f"the .metadata of the checkpoint is damaged: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise NotPlainError("the .metadata of the checkpoint is damaged: it describes none")
    for where in metadata.storage_data.values():
        path = getattr(where, "relative_path", None)
        if not isinstance(where, dcp_files._StorageInfo) or not _within(path):
            raise NotPlainError("the .metadata of the checkpoint names files outside its folder")
    return metadata


def _within(path: Any) -> bool:
    named = isinstance(path, str) and path not in ("", "..")
    return named and PurePosixPath(path).name == path


class _PlainMetadata(FileSystemReader):
    """Reads ``.metadata`` by `parse`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See `StorageReader.read_metadata`.

        Returns:
            The description.

        Raises:
            NotPlainError: See `parse`.
        """
        del args
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            metadata = parse(stream.read())
        if not isinstance(metadata.storage_meta, StorageMeta):
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainReader(_PlainMetadata):
    """A ``FileSystemReader`` that runs nothing of what it reads.

    Args:
        path: The folder of the checkpoint.
    """


class PlainPlanner(DefaultLoadPlanner):
    """A ``DefaultLoadPlanner`` that reads all entries with ``weights_only=True``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See `LoadPlanner.load_bytes`."""
        plain = torch.load(value, weights_only=True)
        # As DCP's own would go on, which reads the entry without the restriction.
        again = io.BytesIO()
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)


def reader_of(checkpoint_id: Any) -> StorageReader:
    """Return what reads a checkpoint, and runs nothing of it.

    Args:
        checkpoint_id: A folder; or an address with ``://``, for which fsspec is asked.

    Raises:
        ValueError: If there is none.
    """
    if checkpoint_id is None:
        raise ValueError("pass the folder of the checkpoint, or a storage_reader")
    if "://" not in str(checkpoint_id):
        return PlainReader(checkpoint_id)
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    class PlainFsspecReader(_PlainMetadata, FsspecReader):
        """As `PlainReader`, elsewhere."""

    return PlainFsspecReader(checkpoint_id)
