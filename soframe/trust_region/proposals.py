"""Preconditioned gradients with several dampings, in layer groups, and the choice among them.

``damp`` and ``propose`` of `soframe.Preconditioner` make an update with given dampings;
``snapshot`` and ``restore`` go back to the chosen one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from soframe.preconditioner import Preconditioner
from soframe.trust_region.adaptive import GroupDampings
from soframe.trust_region.exact import Batch
from soframe.trust_region.layer_groups import LayerGroups
from soframe.trust_region.param_groups import scaled
from soframe.trust_region.quadratic import Quadratic
from soframe.trust_region.twice import Direction

T = TypeVar("T")


@dataclass(frozen=True)
class Proposal:
    """A preconditioned gradient."""

    parts: list[Direction]  # its negative, one direction for each layer group that has blocks
    solved: Mapping[str, Any]  # the data of each block: see `soframe.Preconditioner.snapshot`
    failed: list[bool]  # the layer groups with a factor that could not be solved for it


class Proposer:
    """Damps the preconditioner: by a multiple of the policy's damping, or by trials."""

    def __init__(
        self, preconditioner: Preconditioner, damping: GroupDampings, groups: LayerGroups
    ) -> None:
        self._preconditioner, self._damping, self._groups = preconditioner, damping, groups
        self._start = 1.0

    def begin(self, start: float) -> None:
        """Damp the blocks before the preconditioner's step; ``start`` is the policy's damping."""
        self._start = start
        if self.covered() <= set(self._groups.numbers):  # else the step replaces these blocks
            self._damp(self._dampings())

    def propose(self, batch: Batch, shares: Sequence[float], step: int) -> list[Proposal]:
        """Return the preconditioner's update, and a second proposal if a trial is due."""
        usual = self._proposal(batch, shares)
        if not usual.failed:  # no layer group has blocks
            return [usual]
        self._dampings()  # the number of groups with blocks may have changed in the step
        self._damping.retreat(usual.failed)
        tried = self._damping.trial(step)
        if not tried:
            return [usual]
        return [usual, self._again(batch, shares, tried)]

    def restart(self, batch: Batch, shares: Sequence[float], start: float) -> Proposal:
        """Propose once more, from another damping of the policy, and reset all trials."""
        self._start = start
        self._damping.restart()
        return self._again(batch, shares, self._dampings())

    def choose(
        self, proposals: Sequence[Proposal], quadratic: Quadratic, step: int
    ) -> tuple[list[Direction], Quadratic]:
        """Return the parts with the best prediction, and the model along them and the rest."""
        # The model is along the parts of all proposals, then along directions of every step.
        if len(proposals) == 1:
            return proposals[0].parts, quadratic
        usual, trial = proposals
        count = len(usual.parts)
        taken, model = [False] * count, quadratic.of_pairs([False] * count)
        if model.finite():  # else the same trial is not repeated at once
            barred = list(trial.failed)
            for number, is_finite in enumerate(quadratic.finite_directions()[count : 2 * count]):
                barred[number] |= not is_finite
            taken, model = quadratic.best_of(count, barred)
        self._damping.choose(taken, step)
        parts, solved = list(usual.parts), dict(usual.solved)
        for number, is_taken in enumerate(taken):
            if is_taken:
                parts[number] = trial.parts[number]
        for name, is_taken in self._of_blocks(taken).items():
            if is_taken:
                solved[name] = trial.solved[name]
        self._preconditioner.restore(solved)
        self._damp(self._dampings())  # in force from now on
        return parts, model

    def covered(self) -> set[nn.Parameter]:
        """Return the parameters that have a block that is trained."""
        parameters: set[nn.Parameter] = set()
        for block in self._preconditioner.blocks:
            if not block.frozen:
                parameters.update(block.parameters.values())
        return parameters

    def _again(self, batch: Batch, shares: Sequence[float], dampings: Sequence[float]) -> Proposal:
        for parameter, gradient in zip(batch.parameters, batch.gradients, strict=True):
            parameter.grad = gradient.clone()
        self._damp(dampings)
        self._preconditioner.propose()
        return self._proposal(batch, shares)

    def _proposal(self, batch: Batch, shares: Sequence[float]) -> Proposal:
        covered, parameters = self.covered(), batch.parameters
        rows: list[Tensor | None] = [None] * len(parameters)
        for index, parameter in enumerate(parameters):
            if parameter in covered and parameter.grad is not None:
                rows[index] = -parameter.grad
        solved = self._preconditioner.snapshot()
        failed = defaultdict[int, bool](bool)
        for name, number in self._group_of_blocks().items():
            failed[number] |= solved[name].failed
        parts = self._groups.split(parameters, scaled(rows, shares))
        return Proposal(parts, solved, [failed[number] for number in sorted(failed)])

    def _damp(self, dampings: Sequence[float]) -> None:
        self._preconditioner.curvature.damp(self._of_blocks(dampings))

    def _dampings(self) -> list[float]:
        """Return the damping of each layer group with blocks."""
        count = len(set(self._group_of_blocks().values()))
        return self._damping.at(self._start, count) if count else []

    def _group_of_blocks(self) -> dict[str, int]:
        numbers: dict[str, int] = {}
        for block in self._preconditioner.blocks:
            if block.frozen:
                continue
            numbers[block.name] = self._groups.numbers[next(iter(block.parameters.values()))]
        return numbers

    def _of_blocks(self, values: Sequence[T]) -> dict[str, T]:
        """Return the value of each block, given one for each layer group with blocks."""
        group_of = self._group_of_blocks()
        order = sorted(set(group_of.values()))
        return {name: values[order.index(number)] for name, number in group_of.items()}
