"""Small parts of communication, each by itself: handles, defaults, fingerprints, packed sums."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from soframe.comm import Handle, Recording, SingleProcess
from soframe.comm.agreement import (
    add_over_ranks,
    describe_error,
    fingerprint,
    gather_texts,
    require_all_ranks,
    require_common,
    require_no_failure,
)
from soframe.comm.base import together
from soframe.comm.fused import Parcel, Pending, Sum, buckets, own_memory, started
from soframe.comm.packing import pack_triangle, packed_diagonal
from soframe.registry import describe
from soframe.specs import TensorSpec
from soframe.strategies.work import Reduction
from tests.curvature import randn

CPU = torch.device("cpu")


def test_a_handle_completes_once() -> None:
    calls: list[int] = []
    handle = Handle(lambda: calls.append(1))
    assert not handle.done
    handle.wait()
    handle.wait()
    assert calls == [1]
    assert handle.done
    assert Handle().done
    Handle().wait()
    both = together([Handle(lambda: calls.append(2)), Handle(lambda: calls.append(3))])
    assert calls == [1]
    both.wait()
    assert calls == [1, 2, 3]


class Two(SingleProcess):
    """One of two ranks, of which the other has the same numbers."""

    world_size = 2

    def __init__(self) -> None:
        super().__init__()
        self.prepared: list[Any] = []
        self.met: list[str] = []

    @property
    def global_ranks(self) -> tuple[int, ...]:
        return (4, 7)

    @property
    def process_group(self) -> Any:
        return "a group"

    def prepare(self, groups: Any) -> None:
        self.prepared.extend(groups)

    def meet(self, what: str) -> None:
        self.met.append(what)

    def wire_device(self, device: torch.device) -> torch.device:
        return torch.device("meta") if device == CPU and self.overlap is None else device

    def _all_reduce(self, tensor: Tensor) -> Handle:
        tensor *= 2
        return Handle()

    def _all_gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor, tensor.clone()]


def test_a_backend_is_one_rank_that_overlaps_unless_it_says_otherwise() -> None:
    one = SingleProcess()
    assert (one.rank, one.world_size, one.on_paper, one.overlap, one.fused) == (
        *(0, 1),
        *(False, True, False),
    )
    assert [backend.alone for backend in (one, Two(), Recording(world_size=2))] == [
        True,
        False,
        True,
    ]
    assert one.all_gather(torch.ones(2), "x") == [pytest.approx(torch.ones(2))]
    assert one.traffic()["total"] == {"bytes": 0, "calls": 0}


def test_a_recording_is_what_it_is_around() -> None:
    inner = Two()
    outer = Recording(inner, rank=5, world_size=9, fused=True)
    assert (outer.rank, outer.world_size, outer.on_paper, outer.fused) == (0, 2, False, False)
    assert (outer.global_ranks, outer.process_group, outer.overlap) == ((4, 7), "a group", True)
    outer.prepare([(0, 1)])
    outer.meet("here")
    assert (outer.groups, inner.prepared, inner.met) == ([(0, 1)], [(0, 1)], ["here"])
    inner.overlap = None  # type: ignore[assignment]  # only asked here
    assert outer.wire_device(CPU) == torch.device("meta")
    summed = torch.ones(3)
    outer.all_reduce(summed, "sum").wait()
    assert summed.tolist() == [2, 2, 2]
    assert len(outer.all_gather(torch.ones(2), "all")) == 2
    names = [(event.operation, event.numel, event.group) for event in outer.events]
    assert names == [("all_reduce", 3, (0, 1)), ("all_gather", 2, (0, 1))]
    inner.overlap = False
    assert not Recording(inner).overlap
    inner.fused = True
    assert Recording(inner).fused


def test_a_rank_on_paper_represents_all() -> None:
    paper = Recording(world_size=3, fused=True)
    assert (paper.rank, paper.world_size, paper.on_paper, paper.overlap, paper.fused) == (
        *(0, 3),
        *(True, True, True),
    )
    assert (paper.global_ranks, paper.process_group) == ((0, 1, 2), None)
    assert paper.wire_device(CPU) == CPU
    paper.meet("here")
    gathered = paper.all_gather(torch.ones(2), "all")
    assert [tensor.tolist() for tensor in gathered] == [[1, 1]] * 3


# -- agreement -------------------------------------------------------------------------------------


def test_a_fingerprint_is_twenty_bits_and_their_square() -> None:
    common = {"lr": 0.1, "steps": 3}
    digest = hashlib.sha256(describe(common).encode()).hexdigest()
    number = int(digest[3:8], 16)  # the last twenty of the first thirty-two bits
    assert fingerprint(common) == [float(number), float(number**2)]
    assert fingerprint({"lr": 0.2, "steps": 3}) != fingerprint(common)


def test_sums_of_fingerprints_show_a_difference() -> None:
    two, common = Two(), {"lr": 0.1}
    number, square = fingerprint(common)
    require_common(two, common, [2 * number, 2 * square])
    with pytest.raises(ValueError, match=r"does not return the exact sum\. Look here"):
        require_common(two, common, [2 * number + 1, 2 * square], ". Look here")
    require_common(Recording(world_size=2), common, [number, square])


def test_errors_are_one_line_with_their_notes() -> None:
    error = ValueError("no")
    assert describe_error(error) == "ValueError: no"
    error.add_note("see there")
    assert describe_error(error) == "ValueError: no; see there"
    assert describe_error(None) == ""


def test_all_ranks_change_or_none() -> None:
    require_all_ranks(Two(), 2.0)
    with pytest.raises(RuntimeError, match="on 1 of 2 ranks"):
        require_all_ranks(Two(), 1.0)


def test_an_error_is_raised_here_and_on_the_others() -> None:
    require_no_failure(Two(), None, 0.0)
    error = KeyError("x")
    with pytest.raises(KeyError):
        require_no_failure(Two(), error, 1.0)
    with pytest.raises(RuntimeError, match="another rank cannot take this step"):
        require_no_failure(Two(), None, 1.0)


@pytest.mark.parametrize("text", ["", "a", "größer"])
def test_texts_come_as_they_were_sent(text: str) -> None:
    assert gather_texts(Two(), text) == [text, text]
    assert gather_texts(SingleProcess(), text) == [text]


def test_numbers_are_added_up() -> None:
    two = Two()
    assert add_over_ranks(two, [1.5, -2.0]) == [3.0, -4.0]
    assert two.traffic()["agree"] == {"bytes": 16, "calls": 1}
    assert add_over_ranks(SingleProcess(), [1.5, -2.0]) == [1.5, -2.0]


# -- buffers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_the_diagonal_of_a_packed_triangle(n: int) -> None:
    matrix = randn(2, 3, n, n)
    found = packed_diagonal(pack_triangle(matrix), n)
    assert torch.equal(found, matrix.diagonal(dim1=-2, dim2=-1))


def test_specs_of_many_blocks_have_their_groups() -> None:
    specs = (TensorSpec((2, 3, 3), symmetric=True), TensorSpec((2, 5)))
    assert Parcel(0, (0, 1), specs, torch.float32, CPU).stacked == specs
    stacked = Parcel(0, (0, 1), specs, torch.float32, CPU, blocks=2).stacked
    assert stacked == [TensorSpec((4, 3, 3), symmetric=True), TensorSpec((4, 5))]


def parcel(source: int, group: tuple[int, ...], tensors: list[Tensor] | None = None) -> Parcel:
    specs = (TensorSpec((1, 3, 3), symmetric=True), TensorSpec((1, 2)))
    return Parcel(source, group, specs, torch.float32, CPU, tensors)


def test_a_parcel_is_written_and_read() -> None:
    matrix = torch.arange(9.0).view(1, 3, 3)
    matrix = matrix + matrix.mT
    sent = parcel(0, (0, 1), [matrix, torch.tensor([[7.0, 8.0]])])
    assert sent.numel == 6 + 2
    flat = torch.full((8,), torch.nan)
    sent.write(flat)
    read = parcel(0, (0, 1))
    read.read(flat)
    assert read.tensors is not None
    assert [tensor.tolist() for tensor in read.tensors] == [matrix.tolist(), [[7.0, 8.0]]]
    # A source that has none sends zeros, or what marks a failure.
    parcel(0, (0, 1)).write(flat)
    assert not flat.any()
    failed = parcel(0, (0, 1))
    failed.missing = torch.nan
    failed.write(flat)
    assert flat.isnan().all()


def test_parcels_share_a_buffer_by_their_ranks() -> None:
    backend = Recording(rank=1, world_size=3)
    everyone = (0, 1, 2)
    parcels = [parcel(2, everyone), parcel(0, everyone), parcel(0, (0, 2)), parcel(1, (1, 2))]
    parcels += [parcel(0, everyone), parcel(1, (1,))]
    apart = buckets(backend, parcels)
    assert [[one.source for one in bucket] for bucket in apart] == [[2], [0, 0], [1]]
    others = [parcel(0, (0, 1)), replace(parcel(0, everyone), dtype=torch.float64)]
    assert len(buckets(backend, [*parcels, *others])) == 5
    fused = buckets(backend, parcels, fused=True)
    assert [[one.source for one in bucket] for bucket in fused] == [[0, 0, 2], [1]]
    assert buckets(SingleProcess(), parcels) == []


def test_without_overlap_a_transfer_is_over_at_once() -> None:
    calls: list[int] = []
    backend = Two()
    pending = started(backend, lambda: calls.append(1), nbytes=5)
    assert isinstance(pending, Pending)
    assert (calls, pending.done, pending.nbytes, pending.sums) == ([], False, 5, ())
    backend.overlap = False
    assert started(backend, lambda: calls.append(2)).done
    assert calls == [2]
    assert Pending().nbytes == 0


def test_a_view_gets_memory_of_its_own() -> None:
    whole = torch.arange(6.0)
    assert own_memory(whole) is whole
    part = own_memory(whole[:2])
    assert part.untyped_storage().nbytes() == 8
    assert part.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("form", ["matrix", "packed", "zeros"])
def test_a_sum_travels_packed(symmetric: bool, form: str) -> None:
    matrix = randn(2, 3, 3).float()
    packed = pack_triangle(matrix) if symmetric else matrix
    tensor = {"matrix": matrix, "packed": packed, "zeros": None}[form]
    way = Reduction((0, 1), 0, ())
    part = Sum(way, (2, 3, 3), torch.float32, torch.float64, CPU, tensor, symmetric)
    assert part.packed_shape == ((2, 6) if symmetric else (2, 3, 3))
    assert part.numel == (12 if symmetric else 18)
    expected = torch.zeros_like(packed) if tensor is None else packed
    assert torch.equal(part.packed(), expected)
    flat = torch.full((part.numel,), torch.nan, dtype=part.wire)
    part.write(flat)
    assert torch.equal(flat, expected.flatten().double())
    assert part.tensor is None
    part.read(flat)
    assert part.tensor is not None
    assert torch.equal(part.tensor, expected)
    key, size = part.route((0, 1))
    assert size == 8 * part.numel
    assert key == ((0, 1), 0, torch.float64, CPU)
