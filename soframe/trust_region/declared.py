"""The declared loss against the closure's: most mistakes here are ones of scale.

The exact curvature of the closure's loss in the outputs is divided by the declared loss's. Their
ratio is 1 for a mean over the batch, 1/k for the mean over k closures, another constant for
closures of unequal sizes, which must add up to a mean. If it is not constant, the losses differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from soframe.losses.base import Loss
from soframe.losses.sum import SumLoss
from soframe.trust_region.forward import FORWARD, Forward
from soframe.trust_region.twice import fixed


@dataclass(frozen=True)
class Fit:
    """The curvature of a closure's loss, relative to the declared loss's."""

    samples: int  # of the closure's batch
    times: float  # the ratio of curvatures, with the declared loss as a mean over the samples
    plain: bool = True  # whether that is 1 / k for k closures
    mute: bool = False  # whether both are below rounding, as for saturated outputs
    problem: str | None = None  # why the closure's loss is no multiple of the declared one
    tolerance: float = 1e-3  # the relative precision of `times`

    def weight(self, closures: int, *, alike: bool) -> float:
        """Return the weight of the batch in the statistics, relative to its share of the samples.

        ``alike``: all samples of all closures have equal weights, so sample counts suffice.
        """
        if self.plain or alike:
            return 1.0
        return closures * self.times


def fit(declared: Loss, forward: Forward, closures: int) -> Fit:
    """Compare the curvature of the closure's loss with the declared one's; k closures in a step."""
    outputs = list(map(Tensor.detach, forward.outputs))
    samples = len(outputs[0])
    if forward.calls > 1:
        problem = (
            f"the closure calls the model {forward.calls} times, and the declared loss is of one "
            f"call: pass a closure for each, whose losses add up to a mean, or {FORWARD}"
        )
        return Fit(samples, 1 / closures, problem=problem)
    if samples == 0:
        return Fit(samples, 1 / closures, mute=True)
    if len(outputs) > 1 and not isinstance(declared, SumLoss):
        raise TypeError(
            f"the model returns {len(outputs)} tensors, and loss={declared!r} is of one: declare "
            f"a soframe.losses.SumLoss with a Term for each (output=0, 1, ...), or let the "
            f"model's forward return them in one, by torch.stack([...], 1)"
        )
    by = _fit_of_gradients if declared.expected else _fit_of_curvature
    try:
        return by(declared, forward, outputs, closures)
    except (IndexError, RuntimeError, ValueError) as error:
        shapes = ", ".join(str(list(output.shape)) for output in outputs)
        problem = f"loss={declared!r} is not one of outputs of shape {shapes}: {error}"
        return Fit(samples, 1 / closures, problem=problem)


def _fit_of_curvature(
    declared: Loss, forward: Forward, outputs: Sequence[Tensor], closures: int
) -> Fit:
    samples, tangents = len(outputs[0]), list(map(fixed, outputs))
    actual = [product * samples for product in forward.hessian_product(tangents)]
    expected = _hessian_products(declared, outputs, tangents)
    # The curvature of saturated outputs is rounding error of the unsaturated ones'.
    unsaturated = list(map(torch.zeros_like, outputs))
    largest = _hessian_products(declared, unsaturated, tangents)
    # Products with the tangents, [samples] of each output.
    measured = _of_samples(samples, tangents, actual)
    declared_curvature = _of_samples(samples, tangents, expected)
    sizes = [p.nan_to_num(0.0, 0.0, 0.0).abs() for p in _of_samples(samples, tangents, largest)]
    total, expected_total = _total(measured), _total(declared_curvature)
    if not math.isfinite(total + expected_total):
        return Fit(samples, 1 / closures, mute=True)
    rounding = 16 * torch.finfo(outputs[0].dtype).eps
    noise = rounding * _total(sizes)
    tolerance = max(1e-3, rounding)
    plain = math.isclose(total * closures, expected_total, rel_tol=tolerance, abs_tol=noise)
    if plain and expected_total < 1e3 * noise:
        return Fit(samples, 1 / closures, mute=True)
    times = total / expected_total if expected_total else math.inf
    result = Fit(samples, times, plain, tolerance=tolerance)
    if not 0 < times < math.inf:
        return result
    sure = rounding * max(float(size.max()) for size in sizes)
    for a, b in zip(measured, declared_curvature, strict=True):
        off = (a - times * b).abs() > times * (4 * tolerance * b.abs() + sure)
        if bool(off.any()):
            return replace(result, problem=_uneven(declared, a / b))
    return result


def _uneven(declared: Loss, ratios: Tensor) -> str:
    """Describe a loss whose samples have different multiples of the declared curvature."""
    return (
        f"the closure's loss is not the mean of loss={declared!r} over its samples: samples have "
        f"from {float(ratios.min()):.3g} to {float(ratios.max()):.3g} times its curvature. "
        f"Weights of classes, samples and ignored targets are not supported; declare the loss "
        f"that the closure returns"
    )


def _of_samples(
    samples: int, tangents: Sequence[Tensor], products: Sequence[Tensor]
) -> list[Tensor]:
    """Return each sample's inner product of tangents and products, ``[samples]`` per output."""
    pairs = zip(tangents, products, strict=True)
    return [(a * b).reshape(samples, -1).sum(1, dtype=torch.float64) for a, b in pairs]


def _total(tensors: Sequence[Tensor]) -> float:
    return sum(float(tensor.sum()) for tensor in tensors)


def _fit_of_gradients(
    declared: Loss, forward: Forward, outputs: Sequence[Tensor], closures: int
) -> Fit:
    """Compare gradients: the curvature of a loss whose Hessian is expected depends on targets."""
    (output,) = outputs
    samples = len(output)
    counts = declared.counts(output, forward.gradients[0].detach()) * samples
    least, most = map(float, counts.aminmax())
    if not math.isfinite(most):
        return Fit(samples, 1 / closures, mute=True)
    tolerance = max(1e-3, 64 * torch.finfo(output.dtype).eps)
    times, problem = float(counts.mean()), None
    if most - least > 4 * tolerance * most:
        problem = (
            f"the closure's loss is not the mean of loss={declared!r} over its samples: by their "
            f"gradients its terms count from {least:.3g} to {most:.3g} of it; declare the loss "
            f"that the closure returns, with equal weights"
        )
    plain = problem is None and math.isclose(times * closures, 1.0, rel_tol=tolerance)
    return Fit(samples, times, plain, problem=problem, tolerance=tolerance)


def _hessian_products(
    declared: Loss, outputs: Sequence[Tensor], vectors: Sequence[Tensor]
) -> Sequence[Tensor]:
    if len(outputs) == 1:
        return [declared.hessian_product(outputs[0], vectors[0])]
    assert isinstance(declared, SumLoss)
    return declared.hessian_products(outputs, vectors)


def error_of(fits: Sequence[Fit], loss: float) -> ValueError | None:
    """Return the first problem as an error, unless the loss is not finite."""
    for closure_fit in fits:
        if closure_fit.problem is not None and math.isfinite(loss):
            return ValueError(closure_fit.problem)
    return None


def numbers(fits: Sequence[Fit]) -> list[float]:
    """Return this rank's part of the sums for `require_agreement`."""
    times, odd, mute, samples, squares = 0.0, 0.0, 0.0, 0.0, 0.0
    for closure_fit in fits:
        times += closure_fit.times
        odd = max(odd, float(not closure_fit.plain))
        mute = max(mute, float(closure_fit.mute))
        samples += closure_fit.samples
        squares += closure_fit.times**2 / max(1, closure_fit.samples)
    return [times, odd, mute, samples, squares]


def require_agreement(
    declared: Loss, fits: Sequence[Fit], sums: Sequence[float], ranks: int, *, alike: bool
) -> None:
    """Raise on every rank if the closures' losses are not a mean, given the sums of `numbers`."""
    total, odd, mute, samples, squares = sums
    if mute or (odd == 0 and not alike):
        return
    tolerance = max(closure_fit.tolerance for closure_fit in fits)
    if math.isclose(total, ranks, rel_tol=tolerance):
        # By the Cauchy-Schwarz inequality, equal only if weights are proportional to the samples.
        if not alike or math.isclose(squares * samples, total**2, rel_tol=4 * tolerance):
            return
        raise ValueError(
            "loss_average='global' says that all samples count alike, and the closures' losses "
            "weigh batches of unequal sizes alike: multiply each by its share of all samples (on "
            "one of W ranks, W times that), or leave loss_average out"
        )
    for closure_fit in fits:
        if not closure_fit.plain:
            times = closure_fit.times * len(fits)
            raise ValueError(
                f"the closure's loss has {times:.4g} times the curvature of loss={declared!r}, as "
                f"a mean over {closure_fit.samples} samples and {len(fits)} closure(s); declare "
                f"the loss that the closure returns. Batches of unequal sizes have shares of the "
                f"mean that add up to one. Of a likelihood let the model return natural parameters "
                f"(of a Gaussian mean / variance and 1 / variance; loss='gaussian' is of a mean "
                f"and a log-variance): in others its curvature depends on the targets"
            )
    raise ValueError(
        f"the closure's loss is not the declared one on {odd:.0f} other rank(s): see their own "
        f"error"
    )
