"""The clips of a step: their bounds, and their joint factor.

The KL clip bounds the change of the model's predictions that one step may cause. A step ``-lr p``
changes the KL divergence by about ``lr^2 p^T F p / 2``, and ``p^T F p`` is estimated by ``<p, g>``.
The preconditioned gradients are scaled by ``min(1, sqrt(kappa / |lr^2 sum_l <p_l, g_l>|))`` (Ba et
al., 2017, section 5; KAISA).

The norm clip bounds the Euclidean length of a step. They are scaled by
``min(1, bound / (lr sqrt(sum_l ||p_l||^2)))``, so that the parameters with curvature move by
``bound`` at most: the radius of a trust region (Nocedal and Wright, 2006, chapter 4), or gradient
clipping (Pascanu et al., 2013) after the preconditioner instead of before. The momentum of an
optimizer behind it is not included. The ``norm_constraint`` of kfac-jax is a bound in the metric of
the Fisher matrix: it corresponds to the KL clip here.

``lr`` is one, unless a rate is given: the clips then bound updates, as gradient clipping does, and
the optimizer's rate scales a clipped step like any other. With the rate in force, as in
kfac-pytorch, a clipped step has the bound's length at any rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce

import torch
from torch import Tensor

from soframe.comm.stages import ALONE, Stages
from soframe.estimate.gradients import AveragedGradients
from soframe.estimate.plan import Plan
from soframe.estimate.updates import Update
from soframe.schedules import Schedule, Scheduled


@dataclass(frozen=True)
class Bounds:
    """The schedules of the clips' bounds, and of the rate of the steps that they bound.

    Attributes:
        kl: The KL clip's, or None.
        norm: The norm clip's, or None.
        lr: The learning rate.
    """

    kl: Scheduled | None
    norm: Scheduled | None
    lr: Scheduled

    @classmethod
    def of(cls, kl: Schedule | None, norm: Schedule | None, lr: Schedule | None) -> Bounds:
        """Check the settings ``kl_clip``, ``norm_clip`` and ``lr``."""
        return cls(
            None if kl is None else Scheduled("kl_clip", kl, open_low=True),
            None if norm is None else Scheduled("norm_clip", norm, open_low=True),
            Scheduled("lr", 1.0 if lr is None else lr),
        )

    def at(self, step: int) -> tuple[float | None, float | None, float]:
        """Return the bounds of the KL and the norm clip, and the rate, after ``step`` steps."""
        kl = None if self.kl is None else self.kl.at(step)
        norm = None if self.norm is None else self.norm.at(step)
        return kl, norm, self.lr.at(step)


@dataclass(frozen=True)
class Clipped:
    """The outcome of the clips for the updates of a step.

    Attributes:
        finite: Whether all updates and states are finite, on all ranks; the same on every rank.
        factors: The factor of each clip, a scalar in (0, 1], by its name. Updates are scaled by the
            smallest.
    """

    finite: bool
    factors: Mapping[str, Tensor] = field(default_factory=dict)


def clip(
    updates: Sequence[Update],
    gradients: AveragedGradients,
    plan: Plan,
    *,
    stages: Stages = ALONE,
) -> Clipped:
    """Scale all updates by the smallest factor of any clip, in place; every rank must call."""
    clipped = [update for update in updates if update.stack.like.method.clipped]
    if plan.careful:
        bad = bool(updates) and not _finite(updates, gradients)
        if stages.any(bad):
            return Clipped(finite=False)
    if plan.kl_clip is None and plan.norm_clip is None:
        return Clipped(finite=True)
    # On a pipeline other stages may have updates, and wait for this one's sums.
    if not clipped and stages.backend is None:
        return Clipped(finite=True)
    every = [tensor for update in clipped for tensor in update.tensors()]
    # A stage without clipped updates takes part in the sums with zeros.
    first = every[0] if every else torch.zeros((), dtype=torch.float64, device="cpu")
    like = first.double() if plan.careful else first  # the same dtype on every rank
    factors: dict[str, Tensor] = {}
    # Each block's term is added by one rank: the clip sums over ranks.
    if plan.kl_clip is not None:
        led = [update for update in clipped if gradients.leads(update.stack)]
        matrices = [_wide(update.matrix, plan) for update in led if update.matrix is not None]
        raw = [_wide(update.gradient, plan) for update in led if update.gradient is not None]
        add = stages.of(gradients.total)
        factors["kl"] = kl_clip_factor(matrices, raw, plan.lr, plan.kl_clip, add, like)
    if plan.norm_clip is not None:
        counted = [update for update in clipped if gradients.counts(update.stack)]
        matrices = [_wide(update.matrix, plan) for update in counted if update.matrix is not None]
        add = stages.of(gradients.total_of_updates)
        factors["norm"] = norm_clip_factor(matrices, plan.lr, plan.norm_clip, add, like)
    # The factors stay on the device: comparing them here would make the host wait.
    smallest = reduce(torch.minimum, factors.values())
    _scale(every, smallest.to(first.dtype))
    return Clipped(finite=True, factors=factors)


def _wide(matrix: Tensor, plan: Plan) -> Tensor:
    """Return a matrix in float64 where products of float32 numbers may overflow in float32."""
    return matrix.double() if plan.careful else matrix


def _scale(every: list[Tensor], factor: Tensor) -> None:
    """Multiply tensors by one factor, in place; in one call if all are on its device."""
    if every and all(tensor.device == factor.device for tensor in every):
        torch._foreach_mul_(every, factor)
    else:
        for tensor in every:
            tensor.mul_(factor.to(tensor.device))


def _finite(updates: Sequence[Update], gradients: AveragedGradients) -> bool:
    """Return whether the updates and the new states of all ranks are finite."""
    # Every rank checks the tensors that it has; together the ranks have all.
    tensors = [update.matrix for update in updates if update.matrix is not None]
    for update in updates:
        tensors += update.states.values()
    bad = [tensor.isfinite().all().logical_not() for tensor in tensors]
    device = bad[0].device if bad else torch.device("cpu")
    # One number per rank, so that one wait for the device is enough.
    count = torch.tensor(0.0, device=device)
    for one in bad:
        count += one.to(device)
    return not bool(gradients.total_of_updates(count, states=gradients.remembers))


def kl_clip_factor(
    preconditioned: Sequence[Tensor],
    gradients: Sequence[Tensor],
    lr: float,
    kappa: float,
    add: Callable[[Tensor], Tensor] | None = None,
    like: Tensor | None = None,
) -> Tensor:
    """Return the factor of the KL clip, a scalar in (0, 1], without a host sync.

    ``add`` sums the inner products over ranks, if each has some of the blocks; ``like`` has the
    dtype and device of the sum.
    """
    like = preconditioned[0] if like is None else like
    # One launch each, and no temporary of the size of the matrix.
    terms = [
        torch.dot(p.flatten(), g.flatten()) for p, g in zip(preconditioned, gradients, strict=True)
    ]
    # The square of the rate may be out of range where the rate is not.
    total = _sum(terms, like).double() * lr * lr
    total = (total if add is None else add(total)).abs()
    # kappa / 0 is infinite, and clamped like everything above one.
    return (kappa / total).sqrt().clamp(max=1.0).to(like)


def norm_clip_factor(
    preconditioned: Sequence[Tensor],
    lr: float,
    bound: float,
    add: Callable[[Tensor], Tensor] | None = None,
    like: Tensor | None = None,
) -> Tensor:
    """Return the factor of the norm clip, a scalar in (0, 1], without a host sync.

    For arguments see `kl_clip_factor`; ``add`` sums the squares over ranks.
    """
    like = preconditioned[0] if like is None else like
    squares = _sum([matrix.square().sum() for matrix in preconditioned], like)
    squares = squares if add is None else add(squares)
    length = squares.double().sqrt() * lr
    # bound / 0 is infinite, and clamped like everything above one.
    return (bound / length).clamp(max=1.0).to(like)


def _sum(terms: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the sum of scalars, on the device and in the dtype of ``like``."""
    if not terms:
        return like.new_zeros(())
    return torch.stack([term.to(like) for term in terms]).sum()
