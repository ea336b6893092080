"""Read checkpoints of ``torch.distributed.checkpoint`` (DCP) without executing their pickles.

DCP describes a checkpoint in a pickle, ``.metadata``, and unpickles entries that are not tensors;
both can run arbitrary code. The readers here restrict both: the description to DCP's own classes,
entries to the types that ``torch.load(weights_only=True)`` accepts. DCP already reads tensors that
way.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path, PurePosixPath
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
# Attributes that each class may receive: its own instance attributes only.
_FIELDS = {record: frozenset(record.__dataclass_fields__) for record in _RECORDS}
_ALLOWED: dict[tuple[str, str], Any] = {
    **{(record.__module__, record.__qualname__): record for record in _RECORDS},
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"): (
        descriptions._MEM_FORMAT_ENCODING
    ),
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): _get_layout,
    ("pathlib", "PosixPath"): PurePosixPath,  # DCP records the folder
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
    """A checkpoint's description is damaged, or would have run code."""


_Unpickler: Any = pickle._Unpickler


class _Plain(_Unpickler):  # type: ignore[misc]  # typeshed has half of it
    """An unpickler for DCP's descriptions only."""

    # Derived from Python's unpickler; the C one allocates memory for any index in a damaged file.

    # A copy, so that `load_build` does not replace the entry of other unpicklers.
    dispatch: ClassVar = dict(_Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise NotPlainError(
                f"it names {module}.{name}, which no description of a checkpoint needs; nothing "
                f"of it was run"
            ) from None

    def load_build(self) -> None:
        """Set the known attributes of a new description; raise NotPlainError for any others."""
        attributes, target = self.stack[-1], self.stack[-2]
        fields = _FIELDS.get(type(target))
        if fields is None:
            raise NotPlainError(f"it changes a {type(target).__name__}")
        if isinstance(target, descriptions.TensorProperties):
            fitting = isinstance(attributes, tuple) and len(attributes) == 5
        else:
            fitting = isinstance(attributes, dict) and set(attributes) <= fields
        if not fitting:
            raise NotPlainError(f"it gives a {type(target).__name__} what it has not")
        super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def parse(data: bytes) -> Metadata:
    """Return the description in the bytes of a ``.metadata``, without running any code."""
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
        if not isinstance(where, dcp_files._StorageInfo) or not within(path):
            raise NotPlainError("the .metadata of the checkpoint names files outside its folder")
    return metadata


def within(path: Any) -> bool:
    """Return whether this is the name of a file in the folder that a checkpoint is in."""
    named = isinstance(path, str) and path not in ("", "..")
    return named and PurePosixPath(path).name == path


class PlainReader(FileSystemReader):
    """A ``FileSystemReader`` that runs no code from the checkpoint.

    Args:
        path: The folder of the checkpoint.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        for file in Path(self.path).glob("*"):  # a pipe or a device may have no end
            if file.exists() and not (file.is_file() or file.is_dir()):
                raise NotPlainError(f"{file.name} is no file")
        with self.fs.create_stream(self._get_metadata_path(kwargs.get("rank")), "rb") as stream:
            metadata = parse(stream.read())
        if not isinstance(metadata.storage_meta, StorageMeta):
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class PlainPlanner(DefaultLoadPlanner):
    """A ``DefaultLoadPlanner`` that reads all entries with ``weights_only=True``."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        plain = torch.load(value, weights_only=True)
        # DCP's own method would read the entry again, without the restriction.
        again = io.BytesIO()
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)


def reader_of(checkpoint_id: Any) -> StorageReader:
    """Return a reader for a folder, or through fsspec for an address with ``://``."""
    if checkpoint_id is None:
        raise ValueError("pass the folder of the checkpoint, or a storage_reader")
    if "://" not in str(checkpoint_id):
        return PlainReader(checkpoint_id)
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader

    class PlainFsspecReader(PlainReader, FsspecReader):
        """`PlainReader` for addresses of fsspec."""

    return PlainFsspecReader(checkpoint_id)
