"""Packed triangles: half the elements, and back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from soframe.comm.packing import pack_triangle, packed_size, unpack_triangle
from tests.curvature import randn
from tests.examples import examples


@given(
    n=st.integers(0, 13), leading=st.lists(st.integers(0, 3), max_size=2), block=st.integers(1, 8)
)
@settings(max_examples=examples(60))
def test_there_and_back(n: int, leading: list[int], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("soframe.comm.packing.BLOCK", block)
        there_and_back(n, leading)


def there_and_back(n: int, leading: list[int]) -> None:
    matrix = randn(*leading, n, n)
    packed = pack_triangle(matrix)
    assert packed.shape == (*leading, packed_size(n))
    whole = unpack_triangle(packed, n)
    lower = matrix.tril()
    assert torch.equal(whole, lower + lower.tril(-1).mT)  # only the lower triangle was read
    # Every element of the triangle travels, once.
    entries = zip(packed.flatten(0, -2), matrix.flatten(0, -3), strict=True) if leading else []
    for own, source in entries:
        assert sorted(own.tolist()) == sorted(source[torch.tril_indices(n, n).unbind()].tolist())


@pytest.mark.parametrize("n", [1, 2, 5, 8])
def test_packing_is_linear(n: int) -> None:
    """What ranks add up packed is the sum."""
    one, other = randn(2, n, n), randn(2, n, n, seed=1)
    total = pack_triangle(one) + pack_triangle(other)
    assert torch.equal(unpack_triangle(total, n).tril(), (one + other).tril())


def test_a_matrix_that_is_not_contiguous() -> None:
    matrix = randn(5, 5, 3).permute(2, 1, 0)
    assert torch.equal(pack_triangle(matrix), pack_triangle(matrix.contiguous()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_packing_into_a_part_of_a_buffer(dtype: torch.dtype) -> None:
    matrix = randn(2, 5, 5)
    buffer = torch.zeros(40, dtype=dtype)
    packed = pack_triangle(matrix, out=buffer[7:37])
    assert torch.equal(packed, pack_triangle(matrix).to(dtype))
    assert torch.equal(buffer[7:37], packed.flatten())
    assert not buffer[:7].any()
    assert not buffer[37:].any()
