"""Which way a convolution's factor is computed: a geometry in, the name of a path out.

All paths are exact and none subtracts, so only speed decides. It is predicted from three figures of
this file, measured on one core of an AVX2 server with MKL: they need to be right within a factor of
two, since that is by how much the paths mostly differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from torch import Tensor

from soframe.kernels import pointwise, shifts, unfold
from soframe.kernels.geometry import Geometry, segments

Path = Literal["pointwise", "shifts", "rows", "unfold"]
Kernel = Callable[[Tensor, Tensor, Geometry, float], None]

PATHS: Mapping[str, Kernel] = MappingProxyType(
    {
        "pointwise": pointwise.add,
        "shifts": shifts.add,
        "rows": shifts.add_by_rows,
        "unfold": unfold.add,
    }
)

MULTIPLY_ADD = 3e-11  # seconds: of large products
READ = 3e-10  # seconds: of one element, read by a product or copied
CALL = 1.5e-5  # seconds: a product and what is around it


@lru_cache(maxsize=1024)
def choose(geometry: Geometry) -> Path:
    """Return the path that is expected to be fastest.

    Args:
        geometry: The geometry.

    Returns:
        ``"pointwise"`` for every kernel of one position. Otherwise, by the predicted time:
        ``"shifts"`` mostly; ``"rows"`` for inputs of few channels; ``"unfold"`` for maps so small
        that there is nothing to share.
    """
    if geometry.rows.kernel == geometry.columns.kernel == 1:
        return "pointwise"
    candidates: tuple[Path, ...] = ("shifts", "rows", "unfold")
    return min(candidates, key=lambda path: seconds(path, geometry))


def seconds(path: Path, geometry: Geometry) -> float:
    """Predict the time of a path.

    Args:
        path: The path.
        geometry: The geometry.

    Returns:
        Seconds, on the machine where the constants were measured.
    """
    rows, columns, batch = geometry.rows, geometry.columns, geometry.batch
    channels, groups = geometry.channels, geometry.groups
    if path == "unfold":
        copied = geometry.positions * geometry.features * groups
        return 4 * copied * READ + _product(geometry.positions, geometry.features, groups) / 2
    if path == "rows":
        width = columns.kernel * channels
        copied = rows.size * columns.out * batch * width * groups
        counts = [s.count * columns.out for s in segments(rows) if s.other <= 0]
        return copied * READ + sum(_product(batch * n, width, groups) for n in counts)
    copied = rows.size * columns.size * batch * channels * groups
    counts = [
        r.count * c.count
        for r in segments(rows)
        for c in segments(columns)
        if (r.other, c.other) <= (0, 0)
    ]
    copies = 1 + len({s.shift for s in segments(columns)})
    return copied * copies * READ + sum(_product(batch * n, channels, groups) for n in counts)


def _product(length: int, size: int, groups: int) -> float:
    """Predict ``[size, length] @ [length, size]`` for all groups."""
    arithmetic = length * size**2 * MULTIPLY_ADD
    return CALL + groups * (arithmetic + 2 * length * size * READ / 2)
