"""Which tensors share a flat buffer: one rule, used by the collectives and by the plan."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import chain
from typing import TypeVar

Item = TypeVar("Item")

BUCKET_BYTES = 2**25
"""A buffer is closed at this size: it bounds the memory of packing, and a full buffer travels while
the next one is packed.
"""


def in_buckets(
    items: Sequence[Item], route: Callable[[Item], tuple[Hashable, int]]
) -> list[list[Item]]:
    """Group items of one route into buffers, from a function that returns route and bytes."""
    buckets_of: dict[Hashable, list[list[Item]]] = {}  # by route
    sizes: dict[Hashable, int] = {}  # of the last bucket of each route
    for item in items:
        key, size = route(item)
        if key not in sizes or sizes[key] + size > BUCKET_BYTES:
            buckets_of.setdefault(key, []).append([])
            sizes[key] = 0
        buckets_of[key][-1].append(item)
        sizes[key] += size
    return list(chain.from_iterable(buckets_of.values()))
