"""Products of all distances between positions at once, by the Fourier transform of the image.

The sum of ``x[u] x[u + l]^T`` over an image is the inverse Fourier transform, at l, of the image's
cross-spectra (Wiener and Khinchin's theorem): one product of channels for each frequency, of which
there are hardly more than there are positions, serves all distances between two positions of a
kernel. A 3 x 3 kernel has 13 of them. The transforms are products with small matrices, which write
frequencies first, as the products of channels want them, so that an image is copied only where its
channels are last.

Those sums are over all windows that meet the image. Some are no outputs of the convolution: windows
in a frame beyond the padding. What they add along rows and columns has distances in one direction
alone; it is taken off, and what they add in the corners, which was taken off twice, is put back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from soframe.kernels import scratch, shifts
from soframe.kernels.geometry import Axis, Blocks, Geometry

CHUNK = 2**23
"""Elements of spectra that are computed before they are added up."""
CACHED = 2**19
"""Elements of images that are transformed at once, or as many as the spectra's products have."""
APART = 64
"""Elements between lines: where they begin powers of two apart they share a place in the cache."""
FEW = 64
"""Channels of which blocks are so small that all are added at once."""

Place = tuple[int, int]
"""A kernel position: its row and its column."""


def add(total: Tensor, x: Tensor, geometry: Geometry, scale: float) -> None:
    """Add the moment of the patches; strides and groups go by shifts.

    Args:
        total: ``[groups, features, features]``; the lower triangle is added to.
        x: ``[batch, channels, height, width]``.
        geometry: Its geometry.
        scale: The multiplier.
    """
    if not serves(geometry):
        shifts.add(total, x, geometry, scale)
        return
    x = x.detach().contiguous()
    rows, columns = _beyond(geometry.rows), _beyond(geometry.columns)
    matrices = [_correlations(x, geometry)]
    matrices += [_lines(x, strips) for strips in _strips(geometry)]
    matrices += [_corners(x, above, beside) for above, beside in product(rows, columns)]
    _add(total, torch.cat(matrices), geometry, scale)


def serves(geometry: Geometry) -> bool:
    """Return whether the stride is one, and there is one group.

    Args:
        geometry: The geometry.
    """
    return geometry.groups == geometry.rows.stride == geometry.columns.stride == 1


def border_work(geometry: Geometry) -> int:
    """Return the multiply-adds of windows beyond the outputs.

    Args:
        geometry: A geometry that is served.
    """
    multiply_adds = 0
    for strips in _strips(geometry):
        lines = sum(len(windows.at) for _, windows in strips.windows) * len(strips.distances)
        positions = geometry.batch * (strips.axis.size + strips.axis.reach)
        multiply_adds += lines * positions * (strips.number * geometry.channels) ** 2
    return multiply_adds


# -- all windows -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Plan:
    """The matrices of a geometry.

    Attributes:
        along: ``[2 frequencies, width]``, the real and the imaginary part of half a transform.
        real: ``[2 frequencies, height]``: what a whole transform makes of a real part.
        imaginary: Likewise of an imaginary one.
        cosines: ``[lags, columns' frequencies, rows' frequencies]``, of the inverse.
        sines: Likewise.
    """

    along: Tensor
    real: Tensor
    imaginary: Tensor
    cosines: Tensor
    sines: Tensor


@lru_cache(maxsize=256)
def _lags(geometry: Geometry) -> tuple[Place, ...]:
    """Return the distances ``k' - k`` of kernel positions that are not above the diagonal."""
    rows, columns = geometry.rows.kernel, geometry.columns.kernel
    every = ((i, j) for i in range(1 - rows, 1) for j in range(1 - columns, columns))
    return tuple(lag for lag in every if lag <= (0, 0))


@lru_cache(maxsize=64)
def _plan(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> _Plan:
    # Zeros after the image, so that no distance reaches around it.
    high = geometry.rows.size + geometry.rows.reach
    wide = geometry.columns.size + geometry.columns.reach
    half = wide // 2 + 1

    def up_to(number: int) -> Tensor:
        return torch.arange(number, device="cpu")

    def angles(frequencies: int, positions: int, period: int) -> Tensor:
        steps = torch.outer(up_to(frequencies), up_to(positions)) % period
        return steps.double() * (2 * math.pi / period)

    def both(real: Tensor, imaginary: Tensor) -> Tensor:
        return torch.stack([real, imaginary], 1).flatten(0, 1).to(device, dtype)

    horizontal = angles(half, geometry.columns.size, wide)
    vertical = angles(high, geometry.rows.size, high)
    lags = torch.tensor(_lags(geometry), device="cpu")
    rows = lags[:, :1] * geometry.rows.dilation * up_to(high)
    columns = lags[:, 1:] * geometry.columns.dilation * up_to(half)
    turns = (columns.double() / wide).unsqueeze(2) + (rows.double() / high).unsqueeze(1)
    inverse = turns % 1 * (2 * math.pi)
    # Frequencies without a conjugate among the others count once.
    weights = torch.full((half, 1), 2.0, dtype=torch.float64, device="cpu")
    weights[0] = 1
    if wide % 2 == 0:
        weights[-1] = 1
    weights /= high * wide
    return _Plan(
        both(horizontal.cos(), -horizontal.sin()),
        both(vertical.cos(), -vertical.sin()),
        both(vertical.sin(), vertical.cos()),
        (weights * inverse.cos()).to(device, dtype),
        (weights * inverse.sin()).to(device, dtype),
    )


def _correlations(x: Tensor, geometry: Geometry) -> Tensor:
    """Return the sums of ``x[u] x[u + lag]^T`` over the image: ``[lags, channels, channels]``."""
    plan = _plan(geometry, x.dtype, x.device)
    batch, channels, height, width = x.shape
    high, half = len(plan.real) // 2, len(plan.along) // 2
    pairs = channels * channels
    images = min(batch, max(1, max(CACHED, half * high * pairs) // x[0].numel()))
    pixels = images * channels
    step = min(half, max(1, CHUNK // (2 * (pixels * (height + high) + pairs * high))))
    lines, spectra, power, cross = scratch.memory(
        x,
        (2 * step, pixels * height + APART),
        (step * 2 * pixels * high,),
        (step * high, channels, channels),
        (step * high, channels, channels),
    )
    even, odd = x.new_zeros(2, len(plan.cosines), pairs)
    for start in range(0, half, step):
        count = min(step, half - start)
        along, now = plan.along[2 * start : 2 * (start + count)], slice(0, count * high)
        for first in range(0, batch, images):
            part = x[first : first + images]
            taken = len(part) * channels
            line = lines[: 2 * count, : taken * height]
            torch.mm(along, part.view(-1, width).T, out=line)
            transformed = line.view(count, 2, taken, height).mT
            spectrum = spectra[: count * 2 * high * taken].view(count, 2 * high, taken)
            torch.bmm(plan.real.expand(count, -1, -1), transformed[:, 0], out=spectrum)
            spectrum.baddbmm_(plan.imaginary.expand(count, -1, -1), transformed[:, 1])
            # Of each frequency the real parts of all images, and the imaginary ones.
            both = spectrum.view(count * high, 2 * len(part), channels)
            beta = min(first, 1)
            power[now].baddbmm_(both.mT, both, beta=beta)
            cross[now].baddbmm_(both[:, : len(part)].mT, both[:, len(part) :], beta=beta)
        these = slice(start, start + count)
        even.addmm_(plan.cosines[:, these].flatten(1), power[now].flatten(1))
        odd.addmm_(plan.sines[:, these].flatten(1), cross[now].flatten(1))
    sines = odd.view(-1, channels, channels)
    sums: Tensor = even.view_as(sines).sub_(sines).add_(sines.mT)
    return sums


# -- windows beyond the outputs --------------------------------------------------------------


@dataclass(frozen=True)
class _Windows:
    """Windows along an axis that meet the image at as many positions, and are no outputs.

    Attributes:
        kernels: Of each the kernel positions that are within the image.
        at: Of each the positions in the image.
    """

    kernels: tuple[tuple[int, ...], ...]
    at: tuple[slice, ...]

    @property
    def number(self) -> int:
        """How many kernel positions of a window are within the image."""
        return len(self.kernels[0])


@lru_cache(maxsize=256)
def _beyond(axis: Axis) -> tuple[_Windows, ...]:
    """Return the windows that meet the image and are no outputs."""
    by_number: dict[int, tuple[list[tuple[int, ...]], list[slice]]] = {}
    for window in range(-axis.reach, axis.size):  # by its first position in the image
        places = [window + axis.dilation * k for k in range(axis.kernel)]
        met = [k for k, place in enumerate(places) if 0 <= place < axis.size]
        if met and window + axis.before not in range(axis.out):
            kernels, at = by_number.setdefault(len(met), ([], []))
            kernels.append(tuple(met))
            at.append(slice(places[met[0]], places[met[-1]] + 1, axis.dilation))
    return tuple(_Windows(tuple(kernels), tuple(at)) for kernels, at in by_number.values())


@dataclass(frozen=True)
class _Strips:
    """Lines that windows beyond the outputs meet, of one length, and as many for each window.

    Attributes:
        axis: Along the lines.
        windows: With the dimension of the image where they are beyond the outputs.
    """

    axis: Axis
    windows: tuple[tuple[int, _Windows], ...]

    @property
    def number(self) -> int:
        """How many lines a window meets."""
        return self.windows[0][1].number

    @property
    def distances(self) -> range:
        """The distances along a line that blocks of the lower triangle have."""
        return range(1 - self.axis.kernel, 1 if self.number == 1 else self.axis.kernel)


@lru_cache(maxsize=256)
def _strips(geometry: Geometry) -> tuple[_Strips, ...]:
    """Return the lines beyond the outputs: those above and beside it together where they can be."""
    together: dict[tuple[Axis, int], list[tuple[int, _Windows]]] = {}
    rows, columns = geometry.rows, geometry.columns
    for dim, across, along in ((2, rows, columns), (3, columns, rows)):
        for windows in _beyond(across):
            together.setdefault((along, windows.number), []).append((dim, windows))
    return tuple(_Strips(along, tuple(windows)) for (along, _), windows in together.items())


def _lines(x: Tensor, strips: _Strips) -> Tensor:
    """Return sums over the lines that windows meet, for all windows along them.

    Args:
        x: ``[batch, channels, height, width]``.
        strips: The lines.

    Returns:
        ``[distances * windows * met * met, channels, channels]``.
    """
    batch, channels = x.shape[:2]
    number, axis = strips.number, strips.axis
    each = [
        (x.permute(2, 0, 3, 1) if dim == 2 else x.permute(3, 0, 2, 1))[at]
        for dim, windows in strips.windows
        for at in windows.at
    ]
    # Lines one after another, with zeros before, between and after them.
    reach, line, width = axis.reach, axis.size + axis.reach, number * channels
    count = batch * line
    (padded,) = scratch.memory(x, (len(each), reach + count + reach, width))
    inner = padded[:, reach : reach + count]
    positions = inner.view(len(each), batch, line, number, channels)
    for zeros in (padded[:, :reach], positions[:, :, axis.size :], padded[:, reach + count :]):
        zeros.zero_()
    for target, lines in zip(positions, each, strict=True):
        target[:, : axis.size] = lines.permute(1, 2, 0, 3)
    lags = strips.distances
    sums = x.new_empty(len(lags), len(each), width, width)
    for lag, out in zip(lags, sums, strict=True):
        start = reach + axis.dilation * lag
        torch.bmm(inner.mT, padded[:, start : start + count], out=out)
    if number == 1:
        return sums.view(-1, channels, channels)
    by_pair = sums.view(-1, number, channels, number, channels).transpose(2, 3)
    return by_pair.reshape(-1, channels, channels)


def _corners(x: Tensor, rows: _Windows, columns: _Windows) -> Tensor:
    """Return the products of what windows meet that are beyond the outputs along both axes.

    Returns:
        ``[rows' windows * columns' windows * met * met, channels, channels]``.
    """
    batch, channels = x.shape[:2]
    number = rows.number * columns.number
    parts = [x[:, :, up, across].permute(0, 2, 3, 1) for up, across in product(rows.at, columns.at)]
    pixels = torch.stack(parts).view(-1, batch, number * channels)
    products = torch.bmm(pixels.mT, pixels).view(-1, number, channels, number, channels)
    return products.transpose(2, 3).reshape(-1, channels, channels)


# -- blocks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Term:
    """The blocks that a matrix belongs to.

    Attributes:
        sign: Whether it is added or taken off.
        place: The first block's kernel position along the factor's rows.
        other: Likewise along its columns.
        run: How many blocks follow along both, by kernel rows and kernel columns.
    """

    sign: int
    place: Place
    other: Place
    run: Place


@lru_cache(maxsize=256)
def _terms(geometry: Geometry) -> tuple[_Term, ...]:
    """Return where the matrices belong, in the order in which `add` computes them."""
    rows, columns = _beyond(geometry.rows), _beyond(geometry.columns)
    height, width = geometry.rows.kernel, geometry.columns.kernel
    terms = []
    for i, j in _lags(geometry):
        place = (-i, max(0, -j))
        terms.append(_Term(1, place, (0, max(0, j)), (height + i, width - abs(j))))
    for strips in _strips(geometry):
        for lag, (dim, windows) in product(strips.distances, strips.windows):
            here, there, run = max(0, -lag), max(0, lag), strips.axis.kernel - abs(lag)
            for met in windows.kernels:
                for a, b in product(met, met):
                    if dim == 2:
                        terms.append(_Term(-1, (a, here), (b, there), (1, run)))
                    else:
                        terms.append(_Term(-1, (here, a), (there, b), (run, 1)))
    for one, two in product(rows, columns):
        for met, across in product(one.kernels, two.kernels):
            places = [*product(met, across)]
            terms += [_Term(1, a, b, (1, 1)) for a, b in product(places, places)]
    return tuple(terms)


@lru_cache(maxsize=64)
def _sums(geometry: Geometry, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return which matrices a block is the sum of: ``[pairs of kernel positions, matrices]``."""
    width = geometry.columns.kernel
    places = geometry.rows.kernel * width
    terms = _terms(geometry)
    signs = torch.zeros(places, places, len(terms), dtype=dtype, device="cpu")
    for number, term in enumerate(terms):
        for i, j in product(*map(range, term.run)):
            row, column = ((a + i) * width + b + j for a, b in (term.place, term.other))
            if column <= row:
                signs[row, column, number] = term.sign
    return signs.flatten(0, 1).to(device)


@lru_cache(maxsize=256)
def _blocks(geometry: Geometry) -> tuple[Blocks | None, ...]:
    """Return the blocks of each matrix; None where they are above the diagonal."""
    size, width = geometry.channels, geometry.columns.kernel
    each = []
    for term in _terms(geometry):
        row, column = ((a * width + b) * size for a, b in (term.place, term.other))
        of_term = Blocks(size, term.run, (width * size, size), row, column)
        each.append(of_term if column <= row else None)
    return tuple(each)


def _add(total: Tensor, matrices: Tensor, geometry: Geometry, scale: float) -> None:
    """Add the matrices to their blocks."""
    channels = geometry.channels
    if channels <= FEW:  # then calls take longer than the blocks above the diagonal
        sums = _sums(geometry, matrices.dtype, matrices.device) @ matrices.flatten(1)
        places = geometry.rows.kernel * geometry.columns.kernel
        by_block = sums.view(places, places, channels, channels)
        whole = total[0].unflatten(1, (places, -1)).unflatten(0, (places, -1))
        whole.add_(by_block.transpose(1, 2), alpha=scale)
        return
    for term, blocks, matrix in zip(_terms(geometry), _blocks(geometry), matrices, strict=True):
        if blocks is not None:
            blocks.of(total).add_(matrix, alpha=term.sign * scale)
