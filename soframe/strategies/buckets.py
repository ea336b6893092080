"""Which tensors share a flat buffer when they travel: one rule for sending and for counting."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

BUCKET_BYTES = 2**25
"""A flat buffer is closed once it is this large: it bounds the memory that packing takes, and what
is in it travels while the next one is made."""


def fill(items: Iterable[tuple[Hashable, int]], limit: int | None = None) -> list[list[int]]:
    """Put what goes the same way together.

    Args:
        items: The route and the bytes of each item.
        limit: The largest buffer in bytes, unless one item alone is larger; by default
            `BUCKET_BYTES`.

    Returns:
        The indices of the items of each buffer: routes in the order of their first item, items in
        their own order.
    """
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
