"""Which tensors share a flat buffer: one rule, used by the collectives and by the plan."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

BUCKET_BYTES = 2**25
"""A buffer is closed at this size: it bounds the memory of packing, and a full buffer travels while
the next one is packed.
"""


def fill(items: Iterable[tuple[Hashable, int]], limit: int | None = None) -> list[list[int]]:
    """Group items of the same route into buffers of at most `limit` bytes; return their indices."""
    limit = BUCKET_BYTES if limit is None else limit
    routes: dict[Hashable, list[list[int]]] = {}
    sizes: dict[Hashable, int] = {}
    for index, (route, size) in enumerate(items):
        buckets = routes.setdefault(route, [])
        if not buckets or sizes[route] + size > limit:
            buckets.append([])
            sizes[route] = 0
        buckets[-1].append(index)
        sizes[route] += size
    return [bucket for buckets in routes.values() for bucket in buckets]
