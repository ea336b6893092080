"""The learning rate of each block, for the clips.

A clip bounds the step ``lr p``, whatever the learning rate: where it acts, a schedule that lowers
the rate raises the factor, and the step stays as long as before. With ``clip_lr="initial"`` the
clip sees the rates that the optimizer began with. The factor then does not know the schedule, and
the step follows it: as if the bound of the KL clip fell with the square of the schedule, and that
of the norm clip with the schedule itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from soframe.blocks import Block
from soframe.schedules import Schedule, Scheduled

ASSUMED_LR = 0.1
"""What the KL clip assumes where it is told nothing, as KAISA does."""


ClipLR = Literal["live", "initial"]


class LearningRates:
    """Where learning rates come from: the optimizer's groups, or a schedule.

    Args:
        optimizer: The optimizer, read at every step.
        lr: A schedule, instead of the optimizer.
        clipped: Whether anything will ask.
        which: ``"live"``, or ``"initial"`` for those at the beginning: what torch's schedulers note
            as a group's ``initial_lr``, else the rate at which the group was first seen; step 0's
            of a schedule.

    Attributes:
        which: As given.

    Raises:
        ValueError: If both are given.
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
        if clipped and optimizer is None and lr is None:
            warnings.warn(
                f"soframe: the KL clip assumes a learning rate of {ASSUMED_LR}; pass "
                f"optimizer=... (its live rates are used), lr=..., or kl_clip=None",
                stacklevel=3,
            )
        self._optimizer = optimizer
        self._schedule = Scheduled("lr", ASSUMED_LR if lr is None else lr)
        # By index: an optimizer that loads its state has new groups in place of the old.
        self._group_of: dict[int, int] = {}
        self._sizes: list[int] = []
        self.which = which
        self._initial: list[float | Tensor] = []

    def check(self, blocks: Sequence[Block]) -> None:
        """Check that the optimizer has every block.

        Args:
            blocks: The blocks.

        Raises:
            ValueError: If it lacks one.
        """
        if self._optimizer is None:
            return
        self._read_groups(self._optimizer)
        for block in blocks:
            for name, parameter in block.parameters.items():
                if id(parameter) not in self._group_of:
                    # One that shares parameters out has others in their place, and reads its
                    # gradients from elsewhere.
                    others = self._group_of.keys().isdisjoint(
                        id(p) for each in blocks for p in each.parameters.values()
                    )
                    raise ValueError(
                        f"{block.name}.{name} is not in the given optimizer: add it to a "
                        f"parameter group, or skip the module (skip=[{block.name!r}])"
                        + (
                            ". It has no parameter of any block: it is another model's, or one "
                            "that shares parameters out over ranks (DeepSpeed's ZeRO) and does not "
                            "read what a Preconditioner writes into .grad; lr= would not change "
                            "that"
                            if others
                            else "; where another optimizer has it, pass lr= instead of optimizer="
                        )
                    )

    def of(self, blocks: Sequence[Block], step: int) -> list[float | Tensor]:
        """Return the learning rate of each block.

        Args:
            blocks: The blocks.
            step: Completed steps.

        Returns:
            Numbers, or the scalar tensors that capturable optimizers keep; for a block whose
            weight and bias are in different groups a row ``[1, 1, in]`` of their rates.
        """
        if self._optimizer is None:
            return [self._schedule.at(step if self.which == "live" else 0)] * len(blocks)
        if [len(g["params"]) for g in self._optimizer.param_groups] != self._sizes:
            self.check(blocks)
        rates = [self._rate_of(i, group) for i, group in enumerate(self._optimizer.param_groups)]
        return [self._rate(block, rates) for block in blocks]

    def common(self, step: int) -> list[float]:
        """Return the rates that must be the same on every rank, where they are numbers.

        Args:
            step: Completed steps.

        Returns:
            The schedule's, or those of the optimizer's groups; to read the tensors of capturable
            optimizers would make the host wait for the device.
        """
        if self._optimizer is None:
            return [self._schedule.at(step)]
        rates = [group["lr"] for group in self._optimizer.param_groups]
        return [float(rate) for rate in rates if not isinstance(rate, Tensor)]

    def state(self) -> list[float | Tensor]:
        """Return the initial rates, if they matter: a resumed optimizer no longer has them."""
        return list(self._initial) if self.which == "initial" else []

    def load(self, state: Sequence[float | Tensor]) -> None:
        """Continue from a state.

        Args:
            state: What `state` returned; of as many groups, or it is left alone.
        """
        if self.which == "initial" and len(state) == len(self._initial):
            self._initial = list(state)

    def _rate_of(self, index: int, group: dict[str, Any]) -> float | Tensor:
        rate: float | Tensor = group["lr"]
        if self.which == "initial":
            rate = group.get("initial_lr", self._initial[index])
        return rate

    def _rate(self, block: Block, rates: Sequence[float | Tensor]) -> float | Tensor:
        groups = [self._group_of[id(p)] for p in block.parameters.values()]
        if len(set(groups)) == 1:
            return rates[groups[0]]
        row = torch.empty(1, 1, block.shape.in_features, dtype=block.dtype, device=block.device)
        row[..., :-1], row[..., -1:] = (rates[group] for group in groups)
        return row

    def _read_groups(self, optimizer: torch.optim.Optimizer) -> None:
        groups = optimizer.param_groups
        self._sizes = [len(group["params"]) for group in groups]
        for group in groups[len(self._initial) :]:
            rate = group["lr"]
            # Schedulers fill a tensor in place.
            self._initial.append(rate.clone() if isinstance(rate, Tensor) else rate)
        self._group_of = {id(p): i for i, group in enumerate(groups) for p in group["params"]}
