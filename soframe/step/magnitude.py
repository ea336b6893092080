"""The magnitude of gradients and statistics: finite or not, moderate or large."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from soframe.blocks.home import GradientHome
from soframe.comm.base import Backend
from soframe.kernels.devices import Reading, on_gpu

MODERATE = 1e10
"""Below this sum, or norm, of a gradient products with it are in range."""
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SMALL = 4096
"""Up to this size, in elements, a CPU computes the norm of a gradient faster than its sum."""


class Flags:
    """The magnitudes of all ranks' gradients on the device, on their way to the host.

    Every rank must make them. They do not refer to the gradients.

    Attributes:
        moderate: Whether all are moderate: a bool scalar on the device.

    Args:
        own: The sum of this rank's magnitudes, a scalar.
        backend: The backend.
    """

    def __init__(self, own: Tensor, backend: Backend) -> None:
        numbers = own.reshape(1)
        if backend.world_size > 1:
            numbers = torch.stack([own, own])
            backend.all_reduce(numbers[1], "agree").wait()
        self.moderate = numbers[-1] < MODERATE  # not if it is NaN
        self._reading = Reading(numbers)

    def read(self) -> tuple[float, float]:
        """Return this rank's magnitude and the one of all ranks, infinite or NaN if one is."""
        numbers = self._reading.numbers()
        return numbers[0], numbers[-1]


class Magnitude:
    """The magnitude of the gradients, which a GPU computes while the host goes on.

    Attributes:
        queues: Whether the parameters are on a GPU, the same on every rank.

    Args:
        parameters: The parameters.
        gradients: Their gradients, in any tensors.
        statistics: Scalars that are to be finite, too.
        squared: Whether a method keeps squares of gradients: the sum of all squares is then to be
            finite, too, or the gradients count as infinite.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        statistics: Sequence[Tensor] = (),
        squared: bool = False,
    ) -> None:
        self._squared = squared
        some = [gradient for gradient in gradients if gradient.numel() > 0]
        self._dense = [g.coalesce().values() if g.is_sparse else g for g in some]
        if self._dense and on_gpu(self._dense[0]):
            # On a GPU launches cost more than passes, and all norms take a few launches.
            sums = list(torch._foreach_norm(self._dense, ord=math.inf))
        else:
            small = [g for g in self._dense if g.numel() <= SMALL]
            sums = list(torch._foreach_norm(small)) if small else []
            # A sum is the fastest pass, and elements that are not finite make it not finite.
            large = [g for g in self._dense if g.numel() > SMALL]
            sums += [g.sum(dtype=torch.float32 if g.itemsize < 4 else g.dtype) for g in large]
        each = [*sums, *statistics]
        if len({one.device for one in each}) > 1:
            each = [one.to(each[0].device) for one in each]
        # One tensor, so that the host waits for the device once.
        self._all = torch.stack(each) if each else None
        self.queues = bool(parameters) and on_gpu(parameters[0])
        self._device = parameters[0].device if parameters else torch.device("cpu")

    def read(self) -> tuple[float, bool]:
        """Return the magnitude, and whether the statistics are finite.

        The magnitude is the largest absolute value, infinite or NaN if an element is, or zero if
        all sums of gradients are moderate.
        """
        numbers = [] if self._all is None else self._all.tolist()
        finite = all(abs(number) < math.inf for number in numbers[len(self._dense) :])
        if all(abs(number) < MODERATE for number in numbers[: len(self._dense)]):
            return 0.0, finite
        return self._exact(), finite

    def queue(self, backend: Backend) -> None:
        """Begin to sum the magnitudes over ranks, as `flags`; every rank must call."""
        found = self._all
        if found is None:
            own = torch.zeros((), device=self._device)
        else:  # norms on a GPU, sums elsewhere
            own = (found if on_gpu(found) else found.abs()).sum()
        self.flags = Flags(own, backend)

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
            return largest if length < math.inf else length
        return largest


def discard(parameters: Iterable[nn.Parameter], home: GradientHome) -> None:
    """Zero every gradient, so that a bad batch costs one update and not the weights."""
    for gradient in home.of(parameters):
        gradient.zero_()


def keep_if(good: Tensor, tensors: Iterable[Tensor]) -> None:
    """Zero tensors in place unless ``good``, a bool scalar on a device, is true."""
    alike: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for tensor in tensors:
        dense = tensor._values() if tensor.is_sparse else tensor
        # Zero times NaN is NaN, so their bits are multiplied.
        real = torch.view_as_real(dense) if dense.is_complex() else dense
        bits = _BITS[real.itemsize]
        alike.setdefault((real.device, bits), []).append(real.view(bits))
    for (device, bits), each in alike.items():
        torch._foreach_mul_(each, good.to(device, bits))
