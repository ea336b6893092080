"""Holding the declared loss against the closure's: most mistakes here are ones of scale.

The curvature of the closure's loss in the outputs, which is exact, is divided by that of the
declared one. A constant says how the closure weighs its batch, and must be the mean's, or the
shares of unequal batches that add up to a mean. Where it is not constant the terms of the loss have
weights: those of classes, or zeros for what is ignored. Then the Fisher takes the same weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from soframe.derivatives.forward import FORWARD, Forward
from soframe.losses.base import Loss
from soframe.losses.sum import SumLoss

_Edge = tuple[Any, int]
"""A function of autograd, and the number of its result."""


@dataclass(frozen=True)
class Fit:
    """What the curvature of a closure's loss is, in terms of the declared one's.

    Attributes:
        samples: The samples of the closure's batch.
        times: By how much it is larger than that of the mean over them; 1 / k for k micro-batches
            of equal weight.
        plain: Whether it is 1 / k.
        mute: Whether both are so small, as saturated outputs make them, that they say nothing.
        weights: Of each output, what each term of its loss counts, relative to ``times``; None if
            all count alike.
        problem: Why no weights can make the declared loss the closure's.
        tolerance: To which share ``times`` is known.
    """

    samples: int
    times: float
    plain: bool = True
    mute: bool = False
    weights: tuple[Tensor, ...] | None = None
    problem: str | None = None
    tolerance: float = 1e-3

    def roots(self, closures: int, *, alike: bool) -> tuple[Tensor, ...]:
        """Return what gradients at drawn targets are multiplied by, for each output.

        Args:
            closures: The number of micro-batches.
            alike: Whether all samples of all micro-batches count alike, so that the scale of a
                batch is known without it.

        Returns:
            Nothing where all terms count alike.
        """
        if self.weights is None:
            return ()
        scale = closures * self.times
        if alike:  # then the scale of the batch is in its samples, and weights have a mean of one
            scale = 1 / float(torch.cat([weight.flatten() for weight in self.weights]).mean())
        return tuple((scale * weight).sqrt() for weight in self.weights)

    def share(self, closures: int, *, alike: bool) -> float:
        """Return what the batch counts in the statistics, where 1 is its share of the batches."""
        known = self.plain or self.weights is not None or self.problem is not None or alike
        return 1.0 if known else closures * self.times


def fit(declared: Loss | None, forward: Forward, closures: int, *, alike: bool = False) -> Fit:
    """Compare the curvature of the closure's loss with that of the declared one.

    Several calls are as one that has all their samples, which have weights: each call's loss is a
    mean over its own.

    Args:
        declared: The declared loss.
        forward: The forward pass of one closure.
        closures: The number of micro-batches.
        alike: Whether the user says that all samples count alike.

    Returns:
        How they compare.

    Raises:
        TypeError: If there are several outputs, and the declared loss is no sum over them.
    """
    assert declared is not None
    if problem := _cannot_join(forward, alike):
        return Fit(len(forward.outputs[0]), 1 / closures, problem=problem)
    outputs = [output.detach() for output in forward.joined(forward.outputs)]
    samples = len(outputs[0])
    if samples == 0 or (len(outputs) > 1 and not isinstance(declared, SumLoss)):
        if samples and declared.expected:
            raise TypeError(
                f"the model returns {len(outputs)} tensors, and loss={declared!r} is of one: let "
                f"the model's forward return them in one, by torch.stack([...], 1)"
            )
        if samples:
            raise TypeError(
                f"the model returns {len(outputs)} tensors: declare a soframe.losses.SumLoss with "
                f"a Term for each (output=0, 1, ...) rather than {declared!r}"
            )
        return Fit(samples, 1 / closures, mute=True)
    by = _fit_of_gradients if declared.expected else _fit_of_curvature
    return by(declared, forward, outputs, closures)


def _fit_of_curvature(
    declared: Loss, forward: Forward, outputs: Sequence[Tensor], closures: int
) -> Fit:
    """Compare the curvature of the closure's loss with that of the declared one: see `fit`."""
    samples = len(outputs[0])
    nothing = Fit(samples, 1 / closures, mute=True)
    first, second = _tangents(outputs, 0), _tangents(outputs, 1)
    try:
        expected = _hessian_products(declared, outputs, first)
        flat = _hessian_products(declared, [torch.zeros_like(one) for one in outputs], first)
    except (IndexError, RuntimeError, ValueError) as error:
        shapes = ", ".join(str(list(output.shape)) for output in outputs)
        problem = f"loss={declared!r} is not one of outputs of shape {shapes}: {error}"
        return Fit(samples, 1 / closures, problem=problem)
    actual = [product * samples for product in forward.hessian_product_of_joined(first)]
    terms = declared.term_sums if len(outputs) == 1 else Loss.each_sample
    measured, theirs, unsure = (
        [terms(a * b) for a, b in zip(first, products, strict=True)]
        for products in (actual, expected, flat)
    )
    total, wanted = (sum(map(_sum, each)) for each in (measured, theirs))
    if not math.isfinite(total) or not math.isfinite(wanted):
        return nothing
    # Saturated outputs leave a curvature that is all rounding, which says nothing of a scale.
    rounding = 16 * torch.finfo(outputs[0].dtype).eps
    noise = rounding * sum(_sum(_sizes(one)) for one in unsure)
    tolerance = max(1e-3, rounding)
    plain = math.isclose(total * closures, wanted, rel_tol=tolerance, abs_tol=noise)
    if plain and wanted < 1e3 * noise:
        return nothing
    times = total / wanted if wanted else math.inf
    scaled = Fit(samples, times, plain, tolerance=tolerance)
    sure = rounding * max(float(_sizes(one).max()) for one in (*theirs, *unsure))
    if not 0 < times < math.inf:
        return scaled
    if all(
        _within(a, b, times, share=4 * tolerance, sure=sure)
        for a, b in zip(measured, theirs, strict=True)
    ):
        # A sum of means over the samples of each call is no mean over all of them.
        ones = tuple(torch.ones_like(a).to(o) for a, o in zip(measured, outputs, strict=True))
        return scaled if forward.calls == 1 else replace(scaled, weights=ones)
    weights = [
        torch.where(b > 100 * sure, a / b / times, 1.0).to(output)
        for a, b, output in zip(measured, theirs, outputs, strict=True)
    ]
    # Weights that are those of one direction are those of another too.
    rows = zip(
        weights,
        forward.hessian_product_of_joined(second),
        _hessian_products(declared, outputs, second),
        strict=True,
    )
    squares = torch.zeros(2, dtype=torch.float64, device="cpu")
    for weight, a, b in rows:
        both = (samples * a - times * weight * b, samples * a)
        squares += torch.stack([one.double().square().sum() for one in both]).cpu()
    differs = math.sqrt(float(squares[0] / squares[1])) if squares[1] > 0 else math.inf
    least = min(float(weight.min()) for weight in weights)
    if not differs <= 0.02 or least < -tolerance:
        if not plain:
            return scaled  # it is told that its scale is another one
        problem = (
            f"the closure's loss is not loss={declared!r}, whatever weights samples have: its "
            f"curvature along a direction differs by {differs:.2g} of it; declare the loss "
            f"that the closure returns (soframe.losses.SumLoss adds up several)"
        )
        return Fit(samples, times, plain, problem=problem, tolerance=tolerance)
    clamped = tuple(weight.clamp(min=0) for weight in weights)
    return Fit(samples, times, plain, weights=clamped, tolerance=tolerance)


def _fit_of_gradients(
    declared: Loss, forward: Forward, outputs: Sequence[Tensor], closures: int
) -> Fit:
    """Compare the gradients of the closure's loss with the declared one, whose curvature cannot.

    Args:
        declared: A loss whose Hessian is expected.
        forward: The forward pass of one closure.
        outputs: Its output, of all calls.
        closures: The number of micro-batches.

    Returns:
        How they compare: all terms have to count alike, since a loss of another kind is one whose
        terms do not.
    """
    (output,) = outputs
    samples = len(output)
    (gradient,) = forward.joined([one.detach() for one in forward.gradients])
    try:
        counts = declared.counts(output, gradient) * samples
    except (IndexError, RuntimeError, ValueError) as error:
        problem = f"loss={declared!r} is not one of an output of shape {list(output.shape)}"
        return Fit(samples, 1 / closures, problem=f"{problem}: {error}")
    least, most = (float(end) for end in counts.aminmax())
    if not math.isfinite(most):
        return Fit(samples, 1 / closures, mute=True)
    tolerance = max(1e-3, 64 * torch.finfo(output.dtype).eps)
    times = float(counts.mean())
    if most - least > 4 * tolerance * most:
        return Fit(
            samples,
            times,
            plain=False,
            problem=(
                f"the closure's loss is not the mean of loss={declared!r} over its samples: by "
                f"their gradients its terms count from {least:.3g} to {most:.3g} of it; declare "
                f"the loss that the closure returns, with equal weights"
            ),
            tolerance=tolerance,
        )
    plain = math.isclose(times * closures, 1.0, rel_tol=tolerance)
    return Fit(samples, times, plain, tolerance=tolerance)


def _sum(terms: Tensor) -> float:
    return float(terms.sum(dtype=torch.float64))


def _sizes(terms: Tensor) -> Tensor:
    return terms.nan_to_num(0.0, 0.0, 0.0).abs_()


def _within(measured: Tensor, theirs: Tensor, times: float, *, share: float, sure: float) -> bool:
    """Return whether terms differ from ``times`` the others by at most ``share``, or by rounding.

    In place, and in the precision of the outputs: of large ones each further copy is fresh memory,
    which takes more time than the arithmetic.
    """
    difference = measured.sub(theirs, alpha=times).abs_()
    allowed = theirs.abs().mul_(share).add_(sure).mul_(times)
    return bool((difference <= allowed).all())


def _cannot_join(forward: Forward, alike: bool) -> str | None:
    """Say why the calls of a closure are not as one with all their samples."""
    count = len(forward.outputs) // forward.calls
    for number in range(count if forward.calls > 1 else 0):
        shapes = {tuple(output.shape[1:]) for output in forward.outputs[number::count]}
        if len(shapes) > 1:
            return (
                f"calls of the model in one closure return samples of several shapes "
                f"({', '.join(map(str, sorted(shapes)))}), of which no batch can be made: {FORWARD}"
            )
    if forward.calls > 1 and alike:
        return (
            f"loss_average='global' says that all samples count alike, and a closure calls the "
            f"model {forward.calls} times, whose samples do not: leave it out"
        )
    return None


NUMBERS = 6


def numbers(fits: Sequence[Fit]) -> list[float]:
    """Return what this rank says of its closures, to be added up over ranks.

    Args:
        fits: How they compare; nothing where nobody has looked.

    Returns:
        `NUMBERS` numbers: the curvature's total, on how many ranks it is another one than the
        mean's, whether terms have weights, whether one says nothing, the samples, and the sum of
        squares by which proportionality to the samples shows.
    """
    return [
        sum(one.times for one in fits),
        float(any(not one.plain for one in fits)),
        float(any(one.weights is not None for one in fits)),
        float(any(one.mute for one in fits)),
        float(sum(one.samples for one in fits)),
        sum(one.times**2 / max(1, one.samples) for one in fits),
    ]


def require_agreement(
    declared: Loss | None, fits: Sequence[Fit], sums: Sequence[float], ranks: int, *, alike: bool
) -> None:
    """Raise on every rank if the losses disagree on one, so that none waits for it in vain.

    Args:
        declared: The declared loss.
        fits: How this rank's closures compare with it.
        sums: The `numbers` of all ranks, added up.
        ranks: How many they are.
        alike: Whether the user says that all samples count alike.

    Raises:
        ValueError: If they do.
    """
    share, odd, weighted, mute, samples, squares = sums
    # Weights have no scale that they must have; and whoever says nothing may be right.
    if weighted or mute or (odd == 0 and not alike):
        return
    tolerance = max(one.tolerance for one in fits)
    if math.isclose(share, ranks, rel_tol=tolerance):
        # By the inequality of Cauchy and Schwarz, only if shares are proportional to samples.
        if not alike or math.isclose(squares * samples, share**2, rel_tol=4 * tolerance):
            return
        raise ValueError(
            "loss_average='global' says that all samples count alike, and the closures' losses "
            "weigh batches of unequal sizes alike: multiply each by its share of all samples (on "
            "one of W ranks, W times that), or leave loss_average out"
        )
    for one in fits:
        if not one.plain:
            raise ValueError(
                f"the closure's loss has {one.times * len(fits):.4g} times the curvature of "
                f"loss={declared!r}, as a mean over {one.samples} samples and {len(fits)} "
                f"closure(s); declare the loss that the closure returns. Batches of unequal sizes "
                f"have shares of the mean that add up to one. Of a likelihood let the model return "
                f"natural parameters (of a Gaussian mean / variance and 1 / variance; loss="
                f"'gaussian' is of a mean and a log-variance): in others its curvature depends on "
                f"the targets"
            )
    raise ValueError(
        f"the closure's loss is not the declared one on {odd:.0f} other rank(s): see their own "
        f"error"
    )


def require_graph(outputs: Sequence[Tensor], loss: Tensor) -> None:
    """Check that a loss can be differentiated in a model's outputs.

    Args:
        outputs: The model's outputs.
        loss: The loss.

    Raises:
        RuntimeError: If it cannot.
    """
    for number, output in enumerate(outputs):
        if output.dim() == 0:
            raise RuntimeError(
                "the model returns a scalar, and the quadratic model needs outputs [samples, ...]: "
                "let the closure compute the loss, outside of the model"
            )
        if not output.requires_grad or not output.is_floating_point():
            raise RuntimeError(
                f"the model's output {number} has no gradient: let the closure run the model with "
                f"gradients (no torch.no_grad or inference_mode), and return only what depends on "
                f"parameters"
            )
    if not loss.requires_grad or not loss.is_floating_point():
        raise RuntimeError(
            "the closure's loss has no gradient: compute it from the model's output, with "
            "gradients, and do not detach it"
        )


def require_only_through(
    outputs: Sequence[Tensor], loss: Tensor, parameters: Sequence[nn.Parameter]
) -> None:
    """Check that a loss depends on the parameters, and through the model's outputs alone.

    Args:
        outputs: The model's outputs.
        loss: The loss.
        parameters: The parameters.

    Raises:
        RuntimeError: If it does not: a term beside the outputs has no place in the model of the
            loss, and outputs of other tensors have no gradient here.
    """
    ids = {id(parameter) for parameter in parameters}
    ends = {(output.grad_fn, output.output_nr) for output in outputs}

    def trained(edge: _Edge) -> bool:
        return id(getattr(edge[0], "variable", None)) in ids

    if _reaches([(loss.grad_fn, loss.output_nr)], trained, without=ends):
        raise RuntimeError(
            f"the closure's loss depends on parameters other than through the model's output. "
            f"Decay weights with weight_decay=. Where it takes derivatives of outputs "
            f"(torch.autograd.grad), or has other terms of parameters, {FORWARD}"
        )
    if not _reaches(ends, trained):
        raise RuntimeError(
            "the model's outputs depend on none of the parameters that are trained: let the "
            "closure run the model with its own parameters, and give torch.func.functional_call "
            "those, as dict(model.named_parameters()), not copies"
        )


def require_apart(outputs: Sequence[Tensor], calls: int) -> None:
    """Check that no call of the model is given what another one has returned.

    Args:
        outputs: The outputs of all calls, one after the other.
        calls: How many these are.

    Raises:
        RuntimeError: If one is: the loss would be differentiated in one by way of the other.
    """
    count = len(outputs) // calls
    edges = [(output.grad_fn, output.output_nr) for output in outputs]
    for start in range(count, len(edges), count):
        if _reaches(edges[start : start + count], edges[:start].__contains__):
            raise RuntimeError(
                f"the closure gives an output of the model to the model again: {FORWARD}"
            )


def _reaches(
    edges: Iterable[_Edge],
    wanted: Callable[[_Edge], bool],
    without: Container[_Edge] = (),
) -> bool:
    """Return whether a graph leads to what is wanted.

    Args:
        edges: Where to begin. Several results of one function are told apart, since an output may
            be one of them.
        wanted: Says whether an edge is wanted.
        without: Where to turn back.
    """
    todo = [edge for edge in edges if edge not in without]
    seen = set()
    while todo:
        edge = todo.pop()
        if wanted(edge):
            return True
        node, _ = edge
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [edge for edge in node.next_functions if edge not in without]
    return False


def _tangents(outputs: Sequence[Tensor], which: int) -> list[Tensor]:
    """Return directions in the outputs, without drawing random numbers, which are slow and others'.

    Fractional parts of multiples of irrational numbers: evenly spread, and no two alike.
    """
    feature, sample = ((0.6180339887, 0.7548776662), (0.4142135624, 0.7320508076))[which]
    tangents = []
    for output in outputs:
        one = torch.ones((), dtype=torch.float64, device=output.device)
        features = (one.expand(output[:1].numel()).cumsum(0) * feature).frac()
        samples = (one.expand(len(output)).cumsum(0) * sample).frac()
        both = features.to(output.dtype) + samples.to(output.dtype).unsqueeze(1)
        tangents.append((both.frac() - 0.5).view(output.shape))
    return tangents


def _hessian_products(
    declared: Loss, outputs: Sequence[Tensor], vectors: Sequence[Tensor]
) -> Sequence[Tensor]:
    if len(outputs) == 1:
        return [declared.hessian_product(outputs[0], vectors[0])]
    assert isinstance(declared, SumLoss)
    return declared.hessian_products(outputs, vectors)
