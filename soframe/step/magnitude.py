"""The magnitude of gradients and statistics: finite or not, moderate or large."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.optim import Optimizer

from soframe.comm.base import Backend
from soframe.kernels.devices import Reading, on_gpu

MODERATE = 1e10
"""Below this norm of a gradient products with it are in range."""
SMALL = 4096  # so many elements are copied by a CPU in less time than a call for their norm takes
_IS_SPARSE = attrgetter("is_sparse")
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
        self._dense = list(filter(Tensor.numel, gradients))
        if any(map(_IS_SPARSE, self._dense)):
            self._dense = [g.coalesce().values() if g.is_sparse else g for g in self._dense]
        # One tensor, on the device of the first, so that the host waits for a device once.
        norms = _norms(self._dense)
        self._norms, scalars = len(norms), [*norms, *statistics]
        devices = {scalar.device for scalar in scalars}
        if len(devices) > 1:
            scalars = [scalar.to(scalars[0].device) for scalar in scalars]
        device = parameters[0].device if parameters else torch.device("cpu")
        self._scalars = torch.stack(scalars) if scalars else torch.empty(0, device=device)
        self.queues = bool(parameters) and on_gpu(parameters[0])  # the same on every rank

    def read(self) -> tuple[float, bool]:
        """Return the magnitude, and whether the statistics are finite.

        The magnitude is the largest absolute value, infinite or NaN if an element is, or zero if
        the norms of gradients are moderate.
        """
        numbers = self._scalars.tolist()
        finite = all(abs(number) < math.inf for number in numbers[self._norms :])
        if sum(numbers[: self._norms]) < MODERATE:  # not if one is NaN
            return 0.0, finite
        return self._exact(), finite

    def queue(self, backend: Backend) -> None:
        """Begin to sum the magnitudes over ranks, as `flags`; every rank must call."""
        self.flags = Flags(self._scalars.sum(), backend)

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
    """Return scalars of gradients, which are not all finite where a gradient is not."""
    norms: list[Tensor] = []
    if not gradients:
        return norms
    alike: Any = Optimizer._group_tensors_by_device_and_dtype([list(gradients)])
    for (_, dtype), ((tensors,), _) in alike.items():
        wide = torch.float32 if dtype.itemsize < 4 else None
        if on_gpu(tensors[0]):
            norms += torch._foreach_norm(tensors, ord=math.inf, dtype=wide)
            continue
        # A CPU adds squares up faster than it compares numbers.
        parts = [tensor for tensor in tensors if tensor.numel() > SMALL]
        if len(parts) < len(tensors):
            small = [tensor for tensor in tensors if tensor.numel() <= SMALL]
            parts.append(_flatten_dense_tensors(small))
        norms += torch._foreach_norm(parts, ord=2.0, dtype=wide)
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
