"""The magnitude of gradients and statistics: finite or not, moderate or large."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from soframe.comm.base import Backend
from soframe.kernels.devices import Reading, on_gpu

MODERATE = 1e10
"""Below this norm of a gradient products with it are in range."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Flags:
    """The magnitudes of all ranks' gradients on the device, on their way to the host.

    Every rank must make them. They do not refer to the gradients.
    """

    def __init__(self, magnitude: Tensor, backend: Backend) -> None:
        numbers = magnitude.reshape(1)
        if backend.world_size > 1:
            numbers = torch.stack([magnitude, magnitude])
            backend.all_reduce(numbers[1], "agree").wait()
        # Whether all are moderate, a bool scalar on the device: not if one is NaN.
        self.moderate = numbers[-1] < MODERATE
        self._reading = Reading(numbers)

    def read(self) -> tuple[float, float]:
        """Return this rank's magnitude and the one of all ranks, infinite or NaN if one is."""
        numbers = self._reading.numbers()
        return numbers[0], numbers[-1]


class Magnitude:
    """The magnitude of the gradients, which a GPU computes while the host goes on.

    ``statistics`` are scalars that are to be finite, too. With ``squared`` a method keeps squares
    of gradients, and these count as infinite if the sum of all squares is.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        statistics: Sequence[Tensor] = (),
        squared: bool = False,
    ) -> None:
        self._squared = squared
        self._dense: list[Tensor] = []
        for gradient in gradients:
            if gradient.numel() > 0:
                is_sparse = gradient.is_sparse
                self._dense.append(gradient.coalesce().values() if is_sparse else gradient)
        # One tensor, on the device of the first, so that the host waits for a device once.
        scalars = [*_norms(self._dense), *statistics]
        devices = {scalar.device for scalar in scalars}
        if len(devices) > 1:
            scalars = [scalar.to(scalars[0].device) for scalar in scalars]
        device = parameters[0].device if parameters else torch.device("cpu")
        self._all = torch.stack(scalars) if scalars else torch.empty(0, device=device)
        self.queues = bool(parameters) and on_gpu(parameters[0])  # the same on every rank

    def read(self) -> tuple[float, bool]:
        """Return the magnitude, and whether the statistics are finite.

        The magnitude is the largest absolute value, infinite or NaN if an element is, or zero if
        the norms of gradients are moderate.
        """
        numbers = self._all.tolist()
        count = len(self._dense)
        finite = all(abs(number) < math.inf for number in numbers[count:])
        if sum(numbers[:count]) < MODERATE:  # not if one is NaN
            return 0.0, finite
        return self._exact(), finite

    def queue(self, backend: Backend) -> None:
        """Begin to sum the magnitudes over ranks, as `flags`; every rank must call."""
        self.flags = Flags(self._all.sum(), backend)

    def read_queued(self) -> tuple[float, bool]:
        """Return the magnitude here, and whether all ranks' are moderate, the same on all ranks."""
        if self.flags.read()[1] < MODERATE:
            return 0.0, True
        return self._exact(), False

    def _exact(self) -> float:
        # Finite elements may have a sum that is not.
        largest = float(torch.nn.utils.get_total_norm(self._dense, norm_type=math.inf))
        if self._squared and largest < math.inf:
            # This norm overflows where the sum of squares does.
            length = float(torch.nn.utils.get_total_norm(self._dense, norm_type=2.0))
            if not length < math.inf:
                return length
        return largest


def _norms(gradients: list[Tensor]) -> list[Tensor]:
    """Return a scalar of each gradient, which is not finite where the gradient is not."""
    alike: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        alike.setdefault(gradient.dtype, []).append(gradient)
    norms: list[Tensor] = []
    for dtype, tensors in alike.items():
        # A CPU adds squares up faster than it compares numbers.
        order = math.inf if on_gpu(tensors[0]) else 2.0
        wide = torch.float32 if dtype.itemsize < 4 else None
        norms += torch._foreach_norm(tensors, ord=order, dtype=wide)
    return norms


def keep_if(good: Tensor, tensors: Iterable[Tensor]) -> None:
    """Zero tensors in place unless ``good``, a bool scalar on a device, is true."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        dense = tensor._values() if tensor.is_sparse else tensor
        # Zero times NaN is NaN, so their bits are multiplied.
        real = torch.view_as_real(dense) if dense.is_complex() else dense
        bits = _BITS[real.itemsize]
        alike.setdefault((real.device, bits), []).append(real.view(bits))
    for (device, bits), views in alike.items():
        torch._foreach_mul_(views, good.to(device, bits))
