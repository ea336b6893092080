"""Preconditioned gradients with several dampings, in parts, and the choice among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from soframe.damping.adaptive import AdaptiveDamping
from soframe.derivatives.twice import Direction
from soframe.preconditioner import Preconditioner
from soframe.trust_region.groups import scaled
from soframe.trust_region.parts import Parts, split, uncovered
from soframe.trust_region.quadratic import Quadratic

T = TypeVar("T")


@dataclass(frozen=True)
class Proposal:
    """A preconditioned gradient.

    Attributes:
        parts: Its negative, in parts; None where a parameter has no block.
        second_order: What each block was preconditioned with.
        unsolved: Which parts have a factor that could not be solved for it.
    """

    parts: list[Direction]
    second_order: list[dict[str, Any]]
    unsolved: list[bool]


class Proposer:
    """Tries dampings of the preconditioner where a trial is due.

    Args:
        damping: The dampings, one for each part that has blocks.
        preconditioner: The preconditioner.
        parts: The part of each parameter.
    """

    def __init__(
        self,
        damping: AdaptiveDamping | None,
        preconditioner: Preconditioner,
        parts: Parts,
    ) -> None:
        self._damping, self._preconditioner, self._parts = damping, preconditioner, parts
        self._start = 1.0

    def begin(self, start: float) -> None:
        """Before the preconditioner's step, damp each block with its part's damping.

        Args:
            start: The damping of the first step.
        """
        self._start = start
        if self._damping is not None and self._parts_are_those_of_blocks():
            self._damp(self._of_blocks(self._dampings(self._damping)))

    def propose(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        shares: Sequence[float],
        step: int,
    ) -> list[Proposal]:
        """Return the preconditioned gradient, and another one where a trial is due.

        Args:
            parameters: The parameters, after the preconditioner's step: their gradients are
                preconditioned.
            gradients: Their gradients as they were before.
            shares: What each of them is scaled by, after it was preconditioned.
            step: Completed steps.
        """
        made = [self._proposal(parameters, shares)]
        if self._damping is None:
            return made
        self._dampings(self._damping)  # there are others if the model's blocks are
        self._damping.retreat(made[0].unsolved)
        others = self._damping.trial(step)
        if others:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                self._preconditioner.home.put(parameter, gradient.clone())
            self._damp(self._of_blocks(others))
            self._preconditioner.precondition_again(max(others))
            made.append(self._proposal(parameters, shares))
        return made

    def rest(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        last: Sequence[Tensor | None],
        shares: Sequence[float],
    ) -> list[Direction]:
        """Return the directions that belong to every step.

        Args:
            parameters: The parameters.
            gradients: Their gradients.
            last: The last update, or nothing. It keeps the lengths that it had, but where nothing
                is to move.
            shares: What each direction is scaled by.
        """
        rest = uncovered(parameters, gradients, self._preconditioner.covered())
        rest = [scaled(direction, shares) for direction in rest]
        if last:
            moving = scaled(last, [float(share != 0) for share in shares])
            rest += split(moving, [self._parts.numbers[p] for p in parameters])
        return rest

    def choose(
        self, proposals: Sequence[Proposal], quadratic: Quadratic, step: int
    ) -> tuple[list[Direction], Quadratic]:
        """Keep the parts that the model predicts to bring most, and go on with their dampings.

        Args:
            proposals: What `propose` returned.
            quadratic: The model along the parts of all of them, and of directions that belong to
                every step.
            step: Completed steps.

        Returns:
            The parts that were chosen, and the model along them and the rest.
        """
        one, *others = proposals
        if not others:
            return one.parts, quadratic
        assert self._damping is not None
        (other,) = others
        count = len(one.parts)
        own = quadratic.along([*range(count), *range(2 * count, len(quadratic.slope))])
        finite = quadratic.finite_directions()[count : 2 * count]
        if own.finite():
            barred = [bad or not good for bad, good in zip(other.unsolved, finite, strict=True)]
            taken, model = quadratic.best_of(count, barred)
        else:  # nothing is chosen, and what was tried is not tried again at once
            taken, model = [False] * count, own
        self._damping.choose(taken, step)
        self._damp(self._of_blocks(self._dampings(self._damping)))  # what is in force from now on
        for number, second in enumerate(self._of_blocks(taken)):
            block = self._preconditioner.blocks[number]
            block.second_order.replace((other if second else one).second_order[number])
        pairs = zip(taken, one.parts, other.parts, strict=True)
        return [second if change else first for change, first, second in pairs], model

    def _proposal(self, parameters: Sequence[nn.Parameter], shares: Sequence[float]) -> Proposal:
        covered = self._preconditioner.covered()
        read = self._preconditioner.home.read
        found = [read(p) if p in covered else None for p in parameters]
        rows = [None if direction is None else -direction for direction in found]
        data = [dict(block.second_order) for block in self._preconditioner.blocks]
        parts = split(scaled(rows, shares), [self._parts.numbers[p] for p in parameters])
        return Proposal(parts, data, self._unsolved())

    def _unsolved(self) -> list[bool]:
        """Return which parts with blocks have a factor that could not be solved meanwhile."""
        found: dict[int, bool] = {}
        for block, number in zip(self._preconditioner.blocks, self._part_of_blocks(), strict=True):
            failed = block.second_order.forgive()
            found[number] = found.get(number, False) or failed
        return [found[number] for number in sorted(found)]

    def _damp(self, dampings: Sequence[float]) -> None:
        for block, damping in zip(self._preconditioner.blocks, dampings, strict=True):
            block.second_order.damp(damping)

    def _dampings(self, damping: AdaptiveDamping) -> list[float]:
        return damping.at(self._start, len(set(self._part_of_blocks())))

    def _parts_are_those_of_blocks(self) -> bool:
        """Return whether no block has lost a parameter meanwhile; its step will replace those."""
        return self._preconditioner.covered() <= set(self._parts.numbers)

    def _part_of_blocks(self) -> list[int]:
        numbers, blocks = self._parts.numbers, self._preconditioner.blocks
        return [numbers[next(iter(block.parameters.values()))] for block in blocks]

    def _of_blocks(self, each: Sequence[T]) -> list[T]:
        """Return what each block has, given what each part with blocks has."""
        own = self._part_of_blocks()
        numbers = sorted(set(own))
        return [each[numbers.index(number)] for number in own]
