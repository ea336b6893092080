"""The verdict on a step: whether its updates count, and when the host knows it.

Gradients and statistics have a `Magnitude`: finite or not, moderate or large. The host may read the
flags of a step later: then the device selects the new tensors, and the host counts the update a
step later.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.optim import Optimizer

from soframe.blocks.block import Block
from soframe.blocks.home import GradientHome
from soframe.checks.warning import warn
from soframe.comm.agreement import add_over_ranks
from soframe.comm.base import Backend
from soframe.estimate.plan import UNDAMPED, Plan
from soframe.estimate.updates import Update
from soframe.kernels.devices import Reading, on_gpu

SKIPPED_UPDATES, SKIPPED_STATISTICS = "skipped_updates", "skipped_statistics"
MANY = 10
"""Number of skipped updates in a row after which a rank warns."""
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
        """Return the magnitude of this rank, and the largest of all ranks."""
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


class Verdict:
    """Whether the updates of the last step count, and how many did not."""

    def __init__(self, backend: Backend, counts: dict[str, int]) -> None:
        # Whether the last step counts, a bool scalar on the device; None if the host knows.
        self.good: Tensor | None = None
        self.moderate = True  # of the last gradients whose flags the host has read
        self.counts = counts  # of skipped updates and statistics, among others; to be increased
        self._backend = backend
        self._in_a_row = 0  # skipped updates until now
        self._taken = False  # whether the update of the last step counts, as far as the host knows
        # The magnitudes of the step under way, if they are read behind its work.
        self._queued: Magnitude | None = None
        # The flags of the last step that are still on the device, and the blocks with an update.
        self._unread: tuple[Flags, Sequence[Block]] | None = None

    # -- the last step ------------------------------------------------------------------------

    @property
    def taken(self) -> bool:
        """Whether the update of the last step counts."""
        self.settle()
        return self._taken

    def settle(self) -> None:
        """Read the flags that were left on the device, and take a skipped update back."""
        if self._unread is None:
            return
        flags, blocks = self._unread
        self.forget()
        magnitude, magnitude_of_all = flags.read()
        moderate = magnitude_of_all < MODERATE  # not if it is NaN
        if not moderate:
            for block in blocks:  # its state has stayed
                block.record.updates -= 1
            self._taken = False
        self._count(skipped=not moderate, moderate=moderate, local=not magnitude < MODERATE)

    def forget(self) -> None:
        """Forget the last step: flags that were left do not matter any more."""
        self.good = self._unread = None

    # -- flags of gradients -------------------------------------------------------------------

    def queue(self, magnitude: Magnitude) -> None:
        """Begin to sum magnitudes over ranks, to be read behind the work; every rank must call."""
        self._queued = magnitude
        magnitude.queue(self._backend)

    def with_flags(self, plan: Plan, *, bad: float, large: float, local: bool) -> Plan:
        """Return the plan with the flags of gradients.

        ``bad`` and ``large`` are numbers of ranks whose gradients are not finite, or large;
        ``local`` is true if those of this rank are not finite.
        """
        self._queued = None  # of a step that raised
        self._count(skipped=bad > 0, moderate=bad + large == 0, local=local)
        # From reduced flags, so that all ranks compute in the same dtype.
        return replace(plan, finite=not bad, careful=large > 0 or plan.damping < UNDAMPED)

    def read(self, plan: Plan, *, always_large: bool) -> Plan:
        """Return the plan with flags that were left unread; every rank must call."""
        assert self._queued is not None
        # Not kept, as it refers to the gradients.
        queued, self._queued = self._queued, None
        size, moderate = queued.read_queued()
        bad, large = float(not math.isfinite(size)), float(size > 0 or always_large)
        is_bad_here = bad > 0
        if not moderate:
            bad, large = add_over_ranks(self._backend, [bad, large])
        return self.with_flags(plan, bad=bad, large=large, local=is_bad_here)

    def leave(self, blocks: Sequence[Block]) -> None:
        """Leave the flags on the device, which selects the new tensors of the blocks."""
        assert self._queued is not None
        flags, self._queued = self._queued.flags, None
        self.good = flags.moderate
        self._unread = flags, blocks

    def _count(self, *, skipped: bool, moderate: bool, local: bool) -> None:
        """Count an update that is skipped; ``local`` if gradients of this rank are a cause."""
        self.moderate = moderate
        if skipped:
            self._in_a_row += 1
            self.counts[SKIPPED_UPDATES] += 1
        else:
            self._in_a_row = 0
        # Only the ranks with such gradients warn: the cause is in their own data.
        if self._in_a_row == MANY and local:
            warn(
                f"rank {self._backend.rank} had gradients that are not finite in {MANY} "
                f"steps in a row, whose updates were skipped on all ranks: look at the loss and "
                f"the data of this rank; counters['skipped_updates'] counts them"
            )

    # -- the effect ---------------------------------------------------------------------------

    def skip(self, plan: Plan) -> None:
        """Count a step whose updates are left out."""
        self._taken = False
        if plan.finite is not False:  # bad gradients are counted already, and updates are not
            self.counts[SKIPPED_UPDATES] += 1

    def zero_if_bad(
        self, updates: Sequence[Update], parameters: Iterable[nn.Parameter], home: GradientHome
    ) -> None:
        """Zero updates, and gradients without one, where the flag on the device is false.

        The host takes the step as one that counts until `settle`.
        """
        assert self.good is not None
        written: set[nn.Parameter] = set()
        tensors: list[Tensor] = []
        for update in updates:
            tensors += update.tensors()
            for block in update.blocks:
                written.update(block.parameters.values())
        tensors += home.of(p for p in parameters if p not in written)
        keep_if(self.good, tensors)

    def commit(self, updates: Sequence[Update]) -> None:
        """Store the new states, and count the updates; every rank must call."""
        self._taken = True
        for update in updates:
            stack, members = update.stack, update.members
            turn = update.blocks[0].record.updates  # alike for all of them
            if self.good is not None and update.states:
                before = stack.state_of(members)
                # One by one, since each is as large as the gradient.
                while update.states:
                    name, new = update.states.popitem()
                    selected = torch.where(self.good, new, before.pop(name))
                    stack.set_state(members, {name: selected}, turn)
            if update.states:
                stack.set_state(members, update.states, turn)
            for block in update.blocks:
                block.record.updates += 1
