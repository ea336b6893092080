"""Which tensors share a flat buffer: one rule, used by the collectives and by the plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")

BUCKET_BYTES = 2**25
"""A buffer is closed at this size: it bounds the memory of packing, and a full buffer travels while
the next one is packed.
"""


def fill(items: Iterable[tuple[Hashable, int]]) -> list[list[int]]:
    """Group items of the same route into buffers of `BUCKET_BYTES`; return their indices."""
    routes: dict[Hashable, tuple[list[list[int]], list[int]]] = {}
    for index, (route, size) in enumerate(items):
        buckets, sizes = routes.setdefault(route, ([], []))
        if not buckets or sizes[-1] + size > BUCKET_BYTES:
            buckets.append([])
            sizes.append(0)
        buckets[-1].append(index)
        sizes[-1] += size
    filled: list[list[int]] = []
    for buckets, _ in routes.values():
        filled += buckets
    return filled


def in_buckets(
    items: Sequence[Item], route: Callable[[Item], tuple[Hashable, int]]
) -> list[list[Item]]:
    """Group items by `fill`, from a function that returns the route and the bytes of each."""
    buckets: list[list[Item]] = []
    for indices in fill(map(route, items)):
        buckets.append([items[index] for index in indices])
    return buckets
