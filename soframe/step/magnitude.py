"""The magnitude of gradients and statistics: finite or not, moderate or large."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from soframe.blocks.home import GradientHome
from soframe.comm.base import Backend, Handle
from soframe.kernels.devices import on_gpu

MODERATE = 1e10
"""Below this sum, or norm, of a gradient products with it are in range."""
SMALL = 4096
"""Up to this size, in elements, a CPU computes the norm of a gradient faster than its sum."""


class Magnitude:
    """The magnitude of the gradients, which a GPU computes while the host goes on.

    Attributes:
        queues: Whether the parameters are on a GPU, the same on every rank.

    Args:
        parameters: The parameters.
        gradients: Their gradients, in any tensors.
        statistics: Scalars that are to be finite, too.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        statistics: Sequence[Tensor] = (),
    ) -> None:
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
        self._handle = Handle()

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
        """Begin to sum the magnitudes over ranks, for `read_queued`; every rank must call."""
        found = self._all
        total = torch.zeros((), device=self._device) if found is None else found.abs().sum()
        if backend.world_size > 1:
            self._handle = backend.all_reduce(total, "agree")
        self._total = total

    def read_queued(self) -> tuple[float, bool]:
        """Return the magnitude here, and whether all ranks' are moderate, the same on all ranks."""
        self._handle.wait()
        if abs(float(self._total)) < MODERATE:
            return 0.0, True
        return self._exact(), False

    def _exact(self) -> float:
        # Finite elements may have a sum that is not.
        return float(torch.nn.utils.get_total_norm(self._dense, norm_type=math.inf))


def discard(model: nn.Module, home: GradientHome) -> None:
    """Zero every gradient, so that a bad batch costs one update and not the weights."""
    for gradient in home.of(model.parameters()):
        gradient.zero_()
