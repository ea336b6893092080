"""The verdict on a step: whether its updates count, and when the host knows it.

The host may read the flags of a step later: then the device selects the new tensors, and the host
counts the update a step later. See `soframe.step.magnitude` for the flags.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from soframe.blocks.block import Block
from soframe.blocks.home import GradientHome
from soframe.checks.warning import warn
from soframe.comm.agreement import add_over_ranks
from soframe.comm.base import Backend
from soframe.estimate.plan import UNDAMPED, Plan
from soframe.estimate.updates import Update, write
from soframe.step.magnitude import MODERATE, Flags, Magnitude, keep_if

SKIPPED_UPDATES, SKIPPED_STATISTICS = "skipped_updates", "skipped_statistics"
MANY = 10
"""Number of skipped updates in a row after which a rank warns."""


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

    def write(
        self, updates: Sequence[Update], parameters: Iterable[nn.Parameter], home: GradientHome
    ) -> None:
        """Overwrite the gradients with the updates, or with zeros where the device finds them bad.

        The host takes the step as one that counts until `settle`.
        """
        if self.good is not None:
            written: set[nn.Parameter] = set()
            tensors: list[Tensor] = []
            for update in updates:
                tensors += update.tensors()
                for block in update.blocks:
                    written.update(block.parameters.values())
            tensors += home.of(p for p in parameters if p not in written)
            keep_if(self.good, tensors)
        write(updates, home)

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
