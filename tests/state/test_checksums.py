"""Checksums tell whatever is not what was sealed, and nothing else."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from soframe.checkpoint import seal
from soframe.state import checksums

TENSORS = {
    "double": torch.randn(3, 4, dtype=torch.float64),
    "bfloat16": torch.randn(5).bfloat16(),
    "scalar": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.randn(4, 6).T,
    "strided": torch.randn(9)[::2],
    "whole": torch.arange(7),
    "truth": torch.tensor([True, False]),
}
STATE: dict[str, Any] = {
    "tensors": TENSORS,
    "numbers": {"step": 3, "mass": 0.1, "none": None, "yes": True, 7: -0.0, "inf": float("inf")},
    "rows": [1, (2, "two"), [torch.ones(2)]],
}


def test_a_sealed_state_survives_a_file():
    file = io.BytesIO()
    torch.save(seal(STATE), file)
    file.seek(0)
    checksums.verify(torch.load(file, weights_only=True))


def test_order_and_memory_do_not_matter():
    sealed = seal(STATE)
    sealed["numbers"] = dict(reversed(sealed["numbers"].items()))
    sealed["tensors"] = {name: t.clone().contiguous() for name, t in TENSORS.items()}
    checksums.verify(sealed)


CHANGES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "number": (("numbers", "step"), 4),
    "kind of number": (("numbers", "step"), 3.0),
    "truth": (("numbers", "yes"), 1),
    "sign of zero": (("numbers", 7), 0.0),
    "none": (("numbers", "none"), 0),
    "more": (("numbers", "more"), 0),
    "string": (("rows",), [1, (2, "twp"), [torch.ones(2)]]),
    "tuple": (("rows",), [1, [2, "two"], [torch.ones(2)]]),
    "tensor in a list": (("rows",), [1, (2, "two"), [torch.zeros(2)]]),
    "dtype": (("tensors", "double"), TENSORS["double"].float()),
    "shape": (("tensors", "double"), TENSORS["double"].reshape(4, 3)),
    "bit": (("tensors", "bfloat16"), TENSORS["bfloat16"] * 1.01),
    "empty": (("tensors", "empty"), torch.empty(3, 0)),
    "another tensor": (("tensors", "new"), torch.ones(1)),
    "no tensor": (("tensors", "truth"), 5),
    "foreign": (("numbers", "step"), object()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_changed_is_told(name):
    path, value = CHANGES[name]
    sealed = copy.deepcopy(seal(STATE))
    place = sealed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(ValueError, match="the state is damaged"):
        checksums.verify(sealed)
    if name != "foreign":
        checksums.verify(seal(sealed))  # what is changed on purpose


def test_a_state_without_its_checksums_is_truncated():
    for lost in ({}, {"checksums": None}, {"checksums": {"plain": 1}}):
        with pytest.raises(ValueError, match="truncated: it lacks its checksums"):
            checksums.verify({**STATE, **lost})


def test_what_is_not_plain_cannot_be_sealed():
    with pytest.raises(TypeError, match=r"a/0 is set$"):
        seal({"a": [{1}]})


@pytest.mark.parametrize(
    ("tensor", "kind"),
    [(torch.eye(3).to_sparse(), "torch.sparse_coo"), (torch.empty(3, device="meta"), "meta")],
    ids=["sparse", "meta"],
)
def test_a_tensor_that_is_not_dense_is_named(tensor: torch.Tensor, kind: str) -> None:
    with pytest.raises(TypeError, match=f"are dense; state/weight is {kind}"):
        checksums.of_tensor(tensor, "state/weight")


def test_the_dtype_and_the_shape_of_a_tensor_count():
    zeros = torch.zeros(4)
    others = [zeros.view(torch.int32), zeros.view(2, 2), zeros.view(torch.bfloat16)]
    found = {checksums.of_tensor(tensor) for tensor in (zeros, *others)}
    assert len(found) == 4
