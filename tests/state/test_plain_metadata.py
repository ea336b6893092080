"""DCP's descriptions of checkpoints are read without running what is in them."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import metadata as descriptions

from soframe import checkpoint
from soframe.state.plain_metadata import NotPlainError, parse
from tests.state.test_refusals import CASE, Run, everything, make
from tests.state.test_resume import equal

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")

DTYPES = [torch.float64, torch.bfloat16, torch.complex64, torch.int8, torch.bool]


def test_what_dcp_writes_is_read_alike(tmp_path):
    state = {
        "tensors": {str(dtype): torch.ones(2, 3).to(dtype) for dtype in DTYPES},
        "images": torch.zeros(1, 2, 3, 3).to(memory_format=torch.channels_last),
        "nested": [{"a": (1, "two", None)}, OrderedDict(b=torch.arange(3))],
        "optimizer": torch.optim.Adam(nn.Linear(2, 3).parameters()).state_dict(),
    }
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    data = (tmp_path / ".metadata").read_bytes()
    assert parse(data) == pickle.loads(data)
    found = {"tensors": {str(dtype): torch.zeros(2, 3, dtype=dtype) for dtype in DTYPES}}
    found["nested"] = [{"a": ()}, OrderedDict(b=torch.zeros(3, dtype=torch.int64))]
    reader, planner = checkpoint.PlainReader(tmp_path), checkpoint.PlainPlanner()
    dcp.load(found, storage_reader=reader, planner=planner, no_dist=True)
    assert equal(found["tensors"], state["tensors"])
    assert found["nested"][0] == {"a": (1, "two", None)}
    assert equal(found["nested"][1], {"b": torch.arange(3)})


class Calls:
    """Calls something when it is unpickled."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def of_class(attributes: dict[str, Any]) -> bytes:
    """A pickle that sets attributes of a class."""
    head = b"ctorch.distributed.checkpoint.metadata\nMetadata\nN"
    return b"\x80\x02" + head + pickle.dumps(attributes, 0)[:-1] + b"\x86b."


PICKLES: dict[str, tuple[bytes, str]] = {
    "os.system": (pickle.dumps(Calls(os.system, "false")), r"posix.system"),
    "eval": (pickle.dumps(Calls(eval, "1")), r"builtins.eval"),
    "getattr": (pickle.dumps(Calls(getattr, 1, "real")), r"builtins.getattr"),
    "torch's own": (pickle.dumps(Calls(torch.load, "x")), r"torch.serialization.load"),
    "a module's": (pickle.dumps(nn.Linear(1, 1)), r"torch.nn.modules.linear.Linear"),
    "a class that is changed": (of_class({"version": 1}), "it changes a type"),
    "what it has not": (
        pickle.dumps(Calls(descriptions.Metadata, {}))[:-1] + pickle.dumps({"x": 1})[2:-1] + b"b.",
        "gives a Metadata what it has not",
    ),
    "no description": (pickle.dumps({"a": 1}), "it describes none"),
    "nothing": (b"", "damaged"),
    "truncated": (pickle.dumps(descriptions.Metadata({}))[:-20], "damaged"),
    "room for much": (b"\x80\x04\x96" + (2**40).to_bytes(8, "little") + b".", "damaged"),
}


@pytest.mark.parametrize("name", PICKLES)
def test_anything_else_is_refused(name):
    data, reason = PICKLES[name]
    with pytest.raises(NotPlainError, match=reason):
        parse(data)


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "..", "", "a/b", None])
def test_files_elsewhere_are_refused(path, tmp_path):
    dcp.save({"a": torch.ones(1)}, checkpoint_id=tmp_path, no_dist=True)
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    for entry in metadata.storage_data.values():
        entry.relative_path = path
    with pytest.raises(NotPlainError, match="files outside its folder"):
        parse(pickle.dumps(metadata))


def test_addresses_are_read_by_fsspec(tmp_path: Path):
    run = make()
    part = {"preconditioner": checkpoint.part(run.preconditioner)}
    dcp.save(part, checkpoint_id=tmp_path, no_dist=True)
    again = Run(CASE)
    checkpoint.load(again.preconditioner, f"file://{tmp_path}")
    assert equal(everything(again)["state"], everything(run)["state"])


def test_no_folder_is_an_error():
    with pytest.raises(ValueError, match="pass the folder of the checkpoint"):
        checkpoint.load(make().preconditioner)
