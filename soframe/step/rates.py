"""The learning rate of each block, for the clips.

A clip bounds the step ``lr p`` at any learning rate: if it is active, a schedule that lowers the
rate raises the factor, and the step stays as long as before. With ``Clips(clip_lr="initial")`` the
clip uses the rates from which the schedule falls. The factor then does not depend on the schedule,
and the step follows it: as if the bound of the KL clip fell with the square of the schedule, and
the bound of the norm clip with the schedule itself.

Not every schedule begins at its largest rate. So this rate, the *reference*, is the largest of the
rates recorded by torch's schedulers in the group (``initial_lr``, and ``max_lr`` if a cycle has a
peak) and every rate of a step so far. It is never below the live rate, so a step is never longer
than the bound.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor

from soframe.blocks.block import Block
from soframe.blocks.home import GradientHome
from soframe.schedules import Schedule, Scheduled
from soframe.step.moving import grouping

ASSUMED_LR = 0.1
"""The learning rate of the KL clip without ``optimizer=`` and ``lr=``, as in KAISA."""


ClipLR = Literal["live", "initial"]


@dataclass
class _Reference:
    """The largest rate of a param group so far."""

    rate: float | Tensor  # at which the group was first seen, until a step was taken
    taken: bool = False  # whether it is from a step or a state
    group: dict[str, Any] | None = None  # None after a state was loaded
    members: Sequence[int] = ()  # the ids of the group's parameters


class LearningRates:
    """The learning rates of the clips: from the optimizer's groups, or from a schedule.

    Args:
        optimizer: The optimizer, read at every step.
        lr: A schedule, instead of the optimizer.
        clipped: Whether any clip is on.
        which: ``"live"``, or ``"initial"`` for the references: the largest of the rates recorded by
            torch's schedulers in a group (``initial_lr``, ``max_lr``) and of its rates so far; if
            no scheduler has recorded any, this includes the rate at which the group was first seen.

    Attributes:
        which: As given.

    Raises:
        ValueError: If both ``optimizer`` and ``lr`` are given.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer | None,
        lr: Schedule | None,
        *,
        clipped: bool,
        which: ClipLR = "live",
    ) -> None:
        if optimizer is not None and lr is not None:
            raise ValueError("pass optimizer= or lr=, not both: the KL clip needs one source")
        self._assumed = clipped and optimizer is None and lr is None
        self._optimizer = optimizer
        self._schedule = Scheduled("lr", ASSUMED_LR if lr is None else lr)
        # By index: when an optimizer loads its state, it replaces its groups.
        self._group_of: dict[int, int] = {}
        self._members: list[list[int]] = []  # the ids of each group's parameters
        self.which = which
        self._references: list[_Reference] = []
        self._peak, self._peak_step = 0.0, -1  # of the schedule, up to that step

    def __repr__(self) -> str:
        if self._optimizer is None:
            given = f"optimizer=None, lr={self._schedule.value!r}"
        else:
            given = f"optimizer={type(self._optimizer).__name__}"
        return f"{given}, clip_lr={self.which!r}"

    def warn_of_assumptions(self, blocks: Sequence[Block], stacklevel: int) -> None:
        """Warn if a learning rate is assumed, and a clip uses it."""
        if self._assumed and any(block.method.clipped for block in blocks):
            warnings.warn(
                f"soframe: the KL clip assumes a learning rate of {ASSUMED_LR}; pass "
                f"optimizer=... (its live rates are used), lr=..., or kl_clip=None",
                stacklevel=stacklevel,
            )

    def check(self, blocks: Sequence[Block]) -> None:
        """Check that the optimizer has the parameters of every block.

        Raises:
            ValueError: If it lacks one.
        """
        if self._optimizer is None or not blocks:
            return
        if (own := grouping(self._optimizer)) is not None:
            own.group(blocks)
        self._read_groups(self._optimizer, blocks[0].home)
        for block in blocks:
            for name, parameter in block.parameters.items():
                if id(parameter) not in self._group_of:
                    # An optimizer that shards parameters replaces them by others, and reads
                    # gradients of its own.
                    others = self._group_of.keys().isdisjoint(
                        id(p) for each in blocks for p in each.parameters.values()
                    )
                    raise ValueError(
                        f"{block.name}.{name} is not in the given optimizer: add it to a "
                        f"parameter group, or skip the module (skip=[{block.name!r}])"
                        + (
                            ". It has no parameter of any block: it is another model's, or one "
                            "that shares parameters out over ranks and does not read what a "
                            "Preconditioner writes into .grad; lr= would not change that"
                            if others
                            else "; where another optimizer has it, pass lr= instead of optimizer="
                        )
                    )

    def of(self, blocks: Sequence[Block], step: int) -> list[float | Tensor]:
        """Return the learning rate of each block after ``step`` completed steps.

        Rates are numbers, or the scalar tensors of capturable optimizers; a block with parameters
        in different groups has a matrix of rates, ``[groups, out, in]``.
        """
        if self._optimizer is None:
            return [self._scheduled(step)] * len(blocks)
        # Groups may have been added, or parameters moved between them.
        if _members(self._optimizer.param_groups) != self._members:
            self.check(blocks)
        groups = self._optimizer.param_groups
        if self.which == "live":
            rates = [group["lr"] for group in groups]
        else:
            rates = [_largest(*pair) for pair in zip(self._references, groups, strict=True)]
        return [rates[0] if len(rates) == 1 else self._rate(block, rates) for block in blocks]

    def begin(self, step: int) -> None:
        """Read the learning rates of a step, and update the references with ``"initial"``."""
        if self._optimizer is None:
            self._scheduled(step)  # raises if it is out of range
            return
        groups = self._optimizer.param_groups
        self._begin_groups(groups)
        if self.which == "initial":
            for one, group in zip(self._references, groups, strict=True):
                one.rate, one.taken = _largest(one, group), True

    def live(self, step: int) -> list[float]:
        """Return the present rates, one per param group or the schedule's; references stay."""
        if self._optimizer is None:
            return [self._schedule.at(step)]
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def state(self) -> list[float | Tensor]:
        """Return the references with ``"initial"``: a resumed optimizer no longer has them."""
        if self._optimizer is not None:
            self._begin_groups(self._optimizer.param_groups)
        return [one.rate for one in self._references] if self.which == "initial" else []

    def load(self, state: Sequence[float | Tensor]) -> None:
        """Continue from the result of `state`, if it has as many groups."""
        if self.which == "live" or self._optimizer is None or not state:
            return
        # A `soframe.Optimizer` takes the groups of its state, too. Else groups that were split or
        # merged since have the rates that schedulers record in them.
        if len(state) == len(self._references) or grouping(self._optimizer) is not None:
            self._references = [_Reference(rate, taken=True) for rate in state]

    def _scheduled(self, step: int) -> float:
        """Return the rate of the schedule, or with ``"initial"`` its maximum up to this step."""
        if self.which == "live":
            return self._schedule.at(step)
        while self._peak_step < step:  # from the beginning where a run was resumed
            self._peak_step += 1
            self._peak = max(self._peak, self._schedule.at(self._peak_step))
        return self._peak

    def _rate(self, block: Block, rates: Sequence[float | Tensor]) -> float | Tensor:
        groups = [self._group_of[id(p)] for p in block.parameters.values()]
        if len(set(groups)) == 1:
            return rates[groups[0]]
        # The rate of every entry of the matrix; a weight and its bias may be in two groups.
        filled = {
            name: torch.zeros(p.shape, dtype=block.dtype, device=p.device) + rates[group]
            for (name, p), group in zip(block.parameters.items(), groups, strict=True)
        }
        return block.layout.pack(filled)

    def _read_groups(self, optimizer: torch.optim.Optimizer, home: GradientHome) -> None:
        groups = optimizer.param_groups
        self._members = _members(groups)
        self._begin_groups(groups)
        self._group_of = {id(p): i for i, group in enumerate(home.groups(optimizer)) for p in group}

    def _begin_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Begin the references of new groups; others follow their group, or its first parameter."""
        before = self._references
        if len(before) == len(groups) and all(
            one.group is group for one, group in zip(before, groups, strict=True)
        ):
            return
        known = {member: one for one in before for member in one.members}
        known |= {id(one.group): one for one in before}
        members = _members(groups)
        # By index where a state was loaded, or all parameters were replaced.
        replaced = known.keys().isdisjoint(member for own in members for member in own)
        self._references = []
        for index, (group, own) in enumerate(zip(groups, members, strict=True)):
            was = next((known[key] for key in (id(group), *own[:1]) if key in known), None)
            if was is None and replaced and index < len(before):
                was = before[index]
            rate = group["lr"] if was is None else was.rate
            # A copy: schedulers change tensor rates in place.
            rate = rate.clone() if isinstance(rate, Tensor) else rate
            self._references.append(_Reference(rate, was is not None and was.taken, group, own))


def _members(groups: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Return the ids of the parameters by group; `map` avoids a Python call for each."""
    return [list(map(id, group["params"])) for group in groups]


def _largest(reference: _Reference, group: dict[str, Any]) -> float | Tensor:
    """Return the largest rate of a group so far, from which its schedule falls."""
    # Until a step is taken, a scheduler may replace the rate that was first seen: then that rate
    # was never used.
    unused = not reference.taken and "initial_lr" in group
    first = () if unused else (reference.rate,)
    noted = [group[name] for name in ("initial_lr", "max_lr") if name in group]
    rates: list[float | Tensor] = [*first, *noted, group["lr"]]
    return reduce(_larger, rates)


def _larger(one: float | Tensor, other: float | Tensor) -> float | Tensor:
    """Return the larger of two rates in memory of its own, without a wait for the device."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.maximum(one, other.to(one))
    if isinstance(one, Tensor):
        return one.clamp(min=float(other))
    if isinstance(other, Tensor):
        return other.clamp(min=float(one))
    return max(one, other)
