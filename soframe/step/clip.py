"""The clips of a step: their bounds, their learning rates, and their joint factor.

The KL clip bounds the change of the model's predictions that one step may cause. A step ``-lr p``
changes the KL divergence by about ``lr^2 p^T F p / 2``, and ``p^T F p`` is estimated by ``<p, g>``.
The preconditioned gradients are scaled by ``min(1, sqrt(kappa / |sum_l lr_l^2 <p_l, g_l>|))`` (Ba
et al., 2017, section 5; KAISA).

The norm clip bounds the Euclidean length of a step. They are scaled by
``min(1, bound / sqrt(sum_l ||lr_l p_l||^2))``, so that the parameters with curvature move by
``bound`` at most: the radius of a trust region (Nocedal and Wright, 2006, chapter 4), or gradient
clipping (Pascanu et al., 2013) after the preconditioner instead of before. The momentum of an
optimizer behind it is not included. The ``norm_constraint`` of kfac-jax is a bound in the metric of
the Fisher matrix: it corresponds to the KL clip here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.comm.stages import ALONE, Stages
from soframe.schedules import Schedule, Scheduled
from soframe.step.gradients import AveragedGradients
from soframe.step.rates import LearningRates
from soframe.step.updates import Update


@dataclass(frozen=True)
class Bounds:
    """The schedules of the clips' bounds.

    Attributes:
        kl: The KL clip's, or None.
        norm: The norm clip's, or None.
    """

    kl: Scheduled | None
    norm: Scheduled | None

    @classmethod
    def of(cls, kl: Schedule | None, norm: Schedule | None) -> Bounds:
        """Check the settings ``kl_clip`` and ``norm_clip``."""
        given = {"kl_clip": kl, "norm_clip": norm}
        return cls(*(v if v is None else Scheduled(n, v, open_low=True) for n, v in given.items()))

    @property
    def any(self) -> bool:
        """Whether any clip is on."""
        return self.kl is not None or self.norm is not None

    def at(self, step: int) -> Limits:
        """Return the bounds after ``step`` completed steps."""
        kl, norm = (b if b is None else b.at(step) for b in (self.kl, self.norm))
        return Limits(kl, norm)


UNDAMPED = 1e-12
"""Below this damping, a float32 gradient over the least damped eigenvalue may not be finite."""


@dataclass(frozen=True)
class Limits:
    """The bounds of the clips at one step.

    Attributes:
        kl: The KL clip's, or None.
        norm: The norm clip's, or None.
        careful: Whether gradients are so large, or the damping so small, that inner products, or
            even updates and states, may overflow: inner products are then computed in float64, and
            updates and states are checked.
    """

    kl: float | None
    norm: float | None
    careful: bool = False


@dataclass(frozen=True)
class Clipped:
    """The outcome of the clips for the updates of a step.

    Attributes:
        finite: Whether all updates and states are finite, on all ranks; the same on every rank.
        kl: The factor of the KL clip, a scalar in (0, 1]; None if it is off.
        norm: The factor of the norm clip, a scalar in (0, 1]; None if it is off. Updates are scaled
            by the smaller of the two.
    """

    finite: bool
    kl: Tensor | None = None
    norm: Tensor | None = None


def clip(
    updates: Sequence[Update],
    gradients: AveragedGradients,
    *,
    limits: Limits,
    rates: LearningRates,
    step: int,
    stages: Stages = ALONE,
) -> Clipped:
    """Scale all updates by the smallest factor of any clip, in place; every rank must call."""
    clipped = [update for update in updates if update.stack.like.method.clipped]
    if limits.careful:
        bad = bool(updates) and not _finite(updates, gradients)
        if stages.any(bad):
            return Clipped(finite=False)
    if limits.kl is None and limits.norm is None:
        return Clipped(finite=True)
    # On a pipeline other stages may have updates, and wait for this one's sums.
    if not clipped and stages.backend is None:
        return Clipped(finite=True)
    every = [tensor for update in clipped for tensor in update.tensors()]
    # A stage without clipped updates takes part in the sums with zeros.
    first = every[0] if every else torch.zeros((), dtype=torch.float64, device="cpu")
    like = first.double() if limits.careful else first  # the same dtype on every rank
    kl_factor = norm_factor = None
    terms = [
        (update, *term)
        for update in clipped
        for term in _terms(update, rates, step, careful=limits.careful)
    ]
    # Each block's term is added by one rank: the clip sums over ranks.
    if limits.kl is not None:
        led = [term for term in terms if gradients.leads(term[0].stack)]
        kl_factor = kl_clip_factor(
            [matrix for _, matrix, _, _ in led if matrix is not None],
            [gradient for _, _, gradient, _ in led if gradient is not None],
            lrs=[lr for _, _, _, lr in led],
            kappa=limits.kl,
            add=stages.of(gradients.total),
            like=like,
        )
    if limits.norm is not None:
        norm_factor = norm_clip_factor(
            [m if gradients.counts(update.stack) else None for update, m, _, _ in terms],
            [lr for _, _, _, lr in terms],
            bound=limits.norm,
            add=gradients.total_of_updates,
            like=like,
            over_stages=None if stages.backend is None else stages.total,
        )
    factors = [factor for factor in (kl_factor, norm_factor) if factor is not None]
    # The factors stay on the device: comparing them here would make the host wait.
    factor = factors[0] if len(factors) == 1 else torch.minimum(*factors)
    _scale(every, factor.to(first.dtype))
    return Clipped(finite=True, kl=kl_factor, norm=norm_factor)


def _terms(
    update: Update, rates: LearningRates, step: int, *, careful: bool
) -> Iterator[tuple[Tensor | None, Tensor | None, float | Tensor]]:
    """Yield updates, gradients and learning rates: of all blocks at once if rates are equal."""
    lrs = rates.of(update.blocks, step)
    matrix, gradient = update.matrix, update.gradient
    if careful:  # products of float32 numbers may overflow in float32
        matrix = None if matrix is None else matrix.double()
        gradient = None if gradient is None else gradient.double()
    first = lrs[0]
    number = not isinstance(first, Tensor)
    if all(lr is first or (number and isinstance(lr, float) and lr == first) for lr in lrs):
        yield matrix, gradient, first
        return
    split, members = update.stack.split, update.members
    nothing = [None] * len(lrs)
    matrices = nothing if matrix is None else split(matrix, members)
    gradients = nothing if gradient is None else split(gradient, members)
    yield from zip(matrices, gradients, lrs, strict=True)


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
    lrs: Sequence[float | Tensor],
    kappa: float,
    add: Callable[[Tensor], Tensor] | None = None,
    like: Tensor | None = None,
) -> Tensor:
    """Return the factor of the KL clip, a scalar in (0, 1], without a host sync.

    Rates are numbers, or tensors that fit the matrices. ``add`` sums the inner products over ranks,
    if each has some of the blocks; ``like`` has the dtype and device of the sum.
    """
    like = preconditioned[0] if like is None else like
    # One rate for all: one product of the sum, instead of one of each term.
    same = len({id(lr) for lr in lrs}) == 1 and _is_scalar(lrs[0])
    each = [1.0] * len(lrs) if same else lrs
    terms = [_term(p, g, lr) for p, g, lr in zip(preconditioned, gradients, each, strict=True)]
    if len({(term.device, term.dtype) for term in (like, *terms)}) > 1:
        terms = [term.to(like) for term in terms]
    total = torch.stack(terms).sum() if terms else like.new_zeros(())
    total = total.double()  # squares of rates may be out of range where rates are not
    if same:
        total = (total * lrs[0] * lrs[0]).to(total)
    total = (total if add is None else add(total)).abs()
    # kappa / 0 is infinite, and clamped like everything above one.
    return (kappa / total).sqrt().clamp(max=1.0).to(like)


def _term(p: Tensor, g: Tensor, lr: float | Tensor) -> Tensor:
    if not _is_scalar(lr):
        return (p * lr * (g * lr)).sum()
    # One launch, and no temporary of the size of the matrix.
    product = torch.dot(p.flatten(), g.flatten())
    return product if isinstance(lr, float) and lr == 1.0 else product * lr * lr


def _is_scalar(lr: float | Tensor) -> bool:
    return not isinstance(lr, Tensor) or lr.dim() == 0


def norm_clip_factor(
    preconditioned: Sequence[Tensor | None],
    lrs: Sequence[float | Tensor],
    bound: float,
    add: Callable[[Tensor], Tensor] | None = None,
    like: Tensor | None = None,
    over_stages: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Return the factor of the norm clip, a scalar in (0, 1], without a host sync.

    For arguments see `kl_clip_factor`. Matrices are None for blocks that another rank counts;
    ``over_stages`` sums the squares over the stages of a pipeline, which have other rates.
    """
    first = preconditioned[0] if like is None else like
    assert first is not None
    # Relative to the largest rate, so that squares are in range where rates are large.
    largest = max((lr for lr in lrs if not isinstance(lr, Tensor)), default=0.0) or 1.0
    terms = [
        (p * (lr / largest)).square().sum().to(first)
        for p, lr in zip(preconditioned, lrs, strict=True)
        if p is not None
    ]
    squares = torch.stack(terms).sum() if terms else first.new_zeros(())
    squares = squares if add is None else add(squares)
    length = squares.sqrt().double()  # float32 may not hold the bound over a rate
    if over_stages is not None:
        # Each stage has its own largest rate, so absolute squares are summed.
        length = over_stages((length * largest).square()).sqrt() / largest
    # bound / 0 is infinite, and clamped like everything above one.
    return (bound / largest / length).clamp(max=1.0).to(first)
