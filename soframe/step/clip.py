"""The clips of a step: all updates are scaled by the smallest factor of any clip.

``lr`` is one, unless a rate is given: the clips then bound updates, as gradient clipping does, and
the optimizer's rate scales a clipped step like any other. With the rate in force, as in
kfac-pytorch, a clipped step has the bound's length at any rate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from soframe.clips import Clip
from soframe.comm.agreement import add_tensor_over_ranks
from soframe.comm.stages import Stages
from soframe.estimate.gradients import AveragedGradients
from soframe.estimate.plan import Plan
from soframe.estimate.updates import Update
from soframe.registry import KINDS
from soframe.schedules import Schedule, Scheduled


@dataclass(frozen=True)
class Clipping:
    """The clips that are on, the schedules of their bounds, and the rate of the bounded steps."""

    clips: Mapping[str, Clip]  # by name
    bounds: Mapping[str, Scheduled]  # by the name of the clip
    lr: Scheduled

    @classmethod
    def of(cls, bounds: Mapping[str, Schedule | None], lr: Schedule | None) -> Clipping:
        """Check the bounds of clips by their registered names; None turns a clip off."""
        scheduled = {
            name: Scheduled(f"{name}_clip", bound, open_low=True)
            for name, bound in bounds.items()
            if bound is not None
        }
        clips: dict[str, Clip] = {name: KINDS["clip"].build(name, Clip) for name in scheduled}
        return cls(clips, scheduled, Scheduled("lr", 1.0 if lr is None else lr))

    def at(self, step: int) -> dict[str, float]:
        """Return the bounds after ``step`` completed steps."""
        return {name: bound.at(step) for name, bound in self.bounds.items()}


def clip_updates(
    updates: Sequence[Update],
    gradients: AveragedGradients,
    clips: Mapping[str, Clip],
    plan: Plan,
    stages: Stages,
) -> Mapping[str, Tensor] | None:
    """Scale all updates by the smallest factor of any clip, in place; every rank must call.

    Return the factor of each clip by name, a scalar in (0, 1]; None if an update, a
    new state or the sum of a clip is not finite on any rank.
    """
    clipped = [update for update in updates if update.stack.like.method.clipped]
    scaled: list[Tensor] = []
    for update in clipped:
        scaled += update.tensors()
    totals: dict[str, Tensor] = {}
    # On a pipeline other stages may have updates, and wait for this one's sums.
    if clipped or stages.backend is not None:
        # A stage without clipped updates takes part in the sums with zeros.
        like = scaled[0] if scaled else torch.zeros((), dtype=torch.float64, device="cpu")
        for name, clip in clips.items():
            totals[name] = stages.total(_total(clip, clipped, gradients, plan, like))
    if plan.careful:
        # Products of float64 numbers may overflow, too.
        bad = bool(updates) and not _finite(updates, totals.values(), gradients)
        if stages.any(bad):
            return None
    factors: dict[str, Tensor] = {}
    for name, total in totals.items():
        # A bound over zero is infinite, and limited like others.
        factors[name] = clips[name].factor(total, plan.bounds[name]).clamp(max=1.0)
    if scaled and factors:
        # The factors stay on the device: comparing them here would make the host wait.
        smallest = reduce(torch.minimum, factors.values())
        _scale(scaled, smallest.to(scaled[0].dtype))
    return factors


def _total(
    clip: Clip, updates: Sequence[Update], gradients: AveragedGradients, plan: Plan, like: Tensor
) -> Tensor:
    """Return a clip's sum over ranks, a float64 scalar on the device of ``like``."""
    # Whether ranks lack some matrices: one rank then adds each block's term.
    is_divided = gradients.divided if clip.reads_gradients else gradients.updates_divided
    matrices: list[Tensor] = []
    averages: list[Tensor] = []
    for update in updates:
        if is_divided and update.stack.place.gradient_workers[0] != gradients.backend.rank:
            continue
        matrix = update.matrix
        gradient = update.gradient if clip.reads_gradients else matrix
        if matrix is None or gradient is None:
            continue
        if plan.careful:  # products of float32 numbers may overflow in float32
            matrix, gradient = matrix.double(), gradient.double()
        matrices.append(matrix)
        averages.append(gradient)
    if terms := clip.terms(matrices, averages):
        dtype = torch.float64 if plan.careful else like.dtype
        total = torch.stack([term.to(like.device, dtype) for term in terms]).sum().double()
        if plan.lr != 1:  # its square may be out of range where the rate is not
            total = total * plan.lr * plan.lr
    else:
        total = torch.zeros((), dtype=torch.float64, device=like.device)
    return add_tensor_over_ranks(gradients.backend, total) if is_divided else total


def _scale(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors by one factor, in place; in one call if all are on its device."""
    if all(tensor.device == factor.device for tensor in tensors):
        torch._foreach_mul_(tensors, factor)
    else:
        for tensor in tensors:
            tensor.mul_(factor.to(tensor.device))


def _finite(
    updates: Sequence[Update], totals: Iterable[Tensor], gradients: AveragedGradients
) -> bool:
    """Return whether the updates and new states of all ranks, and sums over them, are finite."""
    # Every rank checks the tensors that it has; together the ranks have all.
    tensors = list(totals)
    for update in updates:
        if update.matrix is not None:
            tensors.append(update.matrix)
        tensors += update.states.values()
    # One number per rank, so that one wait for the device is enough.
    count = torch.tensor(0.0, device=tensors[-1].device if tensors else torch.device("cpu"))
    for tensor in tensors:
        count += tensor.isfinite().all().logical_not().to(count.device)
    # Whole updates of sharded parameters, and states, are on gradient workers alone.
    if gradients.updates_divided or gradients.remembers:
        count = add_tensor_over_ranks(gradients.backend, count)
    return not bool(count)
