"""Preconditioned gradients with several dampings, in parts, and the choice among them.

They are of the blocks whose directions are a matter of this gradient alone. Those of others are
`soframe.trust_region.candidates`'s: their states have gone on with it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from soframe.blocks.block import Block
from soframe.damping.adaptive import AdaptiveDamping
from soframe.derivatives.twice import Direction
from soframe.preconditioner import Preconditioner
from soframe.trust_region.directions import LAST, PRECONDITIONED, STEEPEST, NamedDirections
from soframe.trust_region.groups import scaled
from soframe.trust_region.parts import Parts, split, uncovered
from soframe.trust_region.quadratic import Quadratic

T = TypeVar("T")


@dataclass(frozen=True)
class Proposal:
    """A preconditioned gradient.

    Attributes:
        parts: Its negative, in parts; None where a parameter has no such block.
        second_order: What each block was preconditioned with.
        unsolved: Which parts have a factor that could not be solved for it.
    """

    parts: list[Direction]
    second_order: list[dict[str, Any]]
    unsolved: list[bool]

    @property
    def directions(self) -> NamedDirections:
        """Its parts by name."""
        return NamedDirections(self.parts, [PRECONDITIONED] * len(self.parts))


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
        self._adaptive, self._preconditioner, self._parts = damping, preconditioner, parts
        self._start = 1.0

    @property
    def _damping(self) -> AdaptiveDamping | None:
        """The dampings, if there is anything to damp."""
        return self._adaptive if self._blocks() else None

    def _blocks(self) -> list[Block]:
        """Return the blocks that remember nothing."""
        return [block for block in self._preconditioner.blocks if not block.remembers]

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
        *,
        trials: bool = True,
    ) -> list[Proposal]:
        """Return the preconditioned gradient, and another one where a trial is due.

        Args:
            parameters: The parameters, after the preconditioner's step: their gradients are
                preconditioned.
            gradients: Their gradients as they were before.
            shares: What each of them is scaled by, after it was preconditioned.
            step: Completed steps.
            trials: Whether a model will judge them.
        """
        made = [self._proposal(parameters, shares)]
        if self._damping is None:
            return made
        self._dampings(self._damping)  # there are others if the model's blocks are
        self._damping.retreat(made[0].unsolved)
        others = self._damping.trial(step) if trials else []
        if others:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                self._preconditioner.home.put(parameter, gradient.clone())
            self._damp(self._of_blocks(others))
            self._preconditioner.precondition_again(max(others))
            made.append(self._proposal(parameters, shares))
        return made

    def restart(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        shares: Sequence[float],
        damping: float,
    ) -> Proposal:
        """Precondition once more, with one damping for all, and go on from that.

        Args:
            parameters: The parameters.
            gradients: Their gradients as they were before the preconditioner's step.
            shares: What each of them is scaled by, after it was preconditioned.
            damping: The preconditioner's damping.

        Returns:
            What it made of the gradient.
        """
        for parameter, gradient in zip(parameters, gradients, strict=True):
            self._preconditioner.home.put(parameter, gradient.clone())
        if self._damping is not None:
            self._damping.restart()
            self._start = damping
            self._damp(self._of_blocks(self._dampings(self._damping)))
        self._preconditioner.precondition_again(damping)
        return self._proposal(parameters, shares)

    def rest(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        last: Sequence[Tensor | None],
        shares: Sequence[float],
        covered: Collection[nn.Parameter],
    ) -> NamedDirections:
        """Return the directions that belong to every step, whatever the methods.

        Args:
            parameters: The parameters.
            gradients: Their gradients.
            last: The last update, or nothing. It keeps the lengths that it had, but where nothing
                is to move.
            shares: What each direction is scaled by.
            covered: The parameters that a method has.
        """
        directions = uncovered(parameters, gradients, covered)
        directions = [scaled(direction, shares) for direction in directions]
        names = [STEEPEST] * len(directions)
        if last:
            moving = scaled(last, [float(share != 0) for share in shares])
            directions += split(moving, [self._parts.numbers[p] for p in parameters])
        names += [LAST] * (len(directions) - len(names))
        return NamedDirections(directions, names)

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
        usual = quadratic.along([*range(count), *range(2 * count, len(quadratic.slope))])
        finite = quadratic.finite_directions()[count : 2 * count]
        if usual.finite():
            barred = [bad or not good for bad, good in zip(other.unsolved, finite, strict=True)]
            taken, model = quadratic.best_of(count, barred)
        else:  # nothing is chosen, and what was tried is not tried again at once
            taken, model = [False] * count, usual
        self._damping.choose(taken, step)
        self._damp(self._of_blocks(self._dampings(self._damping)))  # what is in force from now on
        for number, second in enumerate(self._of_blocks(taken)):
            block = self._blocks()[number]
            block.restore((other if second else one).second_order[number])
        pairs = zip(taken, one.parts, other.parts, strict=True)
        return [second if change else first for change, first, second in pairs], model

    def _proposal(self, parameters: Sequence[nn.Parameter], shares: Sequence[float]) -> Proposal:
        blocks, read = self._blocks(), self._preconditioner.home.read
        covered = {p for block in blocks for p in block.parameters.values()}
        written = [read(p) if p in covered else None for p in parameters]
        rows = [None if direction is None else -direction for direction in written]
        data = [dict(block.second_order) for block in blocks]
        parts = split(scaled(rows, shares), [self._parts.numbers[p] for p in parameters])
        return Proposal(parts, data, self._unsolved())

    def _unsolved(self) -> list[bool]:
        """Return which parts with blocks have a factor that could not be solved meanwhile."""
        unsolved: dict[int, bool] = {}
        for block, number in zip(self._blocks(), self._part_of_blocks(), strict=True):
            failed = block.record.forgive()
            unsolved[number] = unsolved.get(number, False) or failed
        return [unsolved[number] for number in sorted(unsolved)]

    def _damp(self, dampings: Sequence[float]) -> None:
        for block, damping in zip(self._blocks(), dampings, strict=True):
            block.damp(damping)

    def _dampings(self, damping: AdaptiveDamping) -> list[float]:
        return damping.at(self._start, len(set(self._part_of_blocks())))

    def _parts_are_those_of_blocks(self) -> bool:
        """Return whether no block has lost a parameter meanwhile; its step will replace those."""
        return self._preconditioner.covered() <= set(self._parts.numbers)

    def _part_of_blocks(self) -> list[int]:
        numbers = self._parts.numbers
        return [numbers[next(iter(block.parameters.values()))] for block in self._blocks()]

    def _of_blocks(self, each: Sequence[T]) -> list[T]:
        """Return what each block has, given what each part with blocks has."""
        part_of = self._part_of_blocks()
        numbers = sorted(set(part_of))
        return [each[numbers.index(number)] for number in part_of]
