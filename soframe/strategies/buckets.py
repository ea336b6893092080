"""Which tensors share a flat buffer when they travel: one rule for sending and for counting."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

BUCKET_BYTES = 2**25
"""A flat buffer is closed once it is this large: it bounds the memory that packing takes, and what
is in it travels while the next one is made."""


def fill(items: Iterable[tuple[Hashable, int]], limit: int | None = None) -> list[list[int]]:
    """Put what goes the same way together."""
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
