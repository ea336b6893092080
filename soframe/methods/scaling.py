"""The scale of the factors: statistics are divided here and nowhere else.

Convention. The loss is the mean over N samples, and the block of a layer is
``F = (1/N) sum_n J_n^T H_n J_n``. With inputs ``a`` and gradients ``g`` of the outputs of one
sample's own loss, over positions t of samples n (T of them per sample on average):

    A = (1/N) sum_{n,t} a a^T        G = (1/(N T)) sum_{n,t} g g^T

so that ``A ⊗ G = F`` wherever K-FAC is exact. The hooks see not ``g`` but ``g0``, the gradient of
the loss on which backward is called: ``g`` times a weight, which ``loss_average`` declares:

- ``"local"``: each backward pass is a mean over its own samples, divided by the number k of
  backward passes since the last step; ranks are averaged. So ``g = k N_c g0`` for a pass over N_c
  samples, and a sample counts as much as the gradient counts it: ``1 / (W k N_c)`` on W ranks.
- ``"global"``: the loss is scaled so that the gradient, averaged over ranks, is the mean over all
  N samples of all passes and ranks. So ``g = (N / W) g0``, and every sample counts alike.
- ``"sum"``: the loss is a sum over samples. So ``g = g0``; the factors are still those of the mean.

N is the same for all layers, whether they see all samples or some: if 2 of 6 samples are routed to
a layer, its A is the sum of two rows over 6, and its G is the mean of two. A sample is one term of
the mean in the loss (`soframe.capture.counting`); padding counts neither in the sums nor in T.

A layer that is called without the batch (a table of positions with ``[1, T]``) is shared by all
samples of the pass: each has its rows, so that sums of degree 0 and the counts of rows are
multiplied by their number. Its ``g0`` is summed over samples, and ``(sum_n g)(sum_n g)^T`` has the
expectation of ``sum_n g g^T`` if the ``g`` of samples are independent with mean zero. So A is
exact, and G unbiased for targets drawn from the model and for type-2 (whose columns have random
signs); the empirical Fisher adds the outer product of the mean gradient.

A pass without samples, or without terms, is one of the k, and counts for nothing else: the averages
are over samples that exist.

For equal batches the first two agree. ``Statistics(scaling="kaisa")`` gives the constants of
kfac-pytorch: the mean of ``g0 g0^T`` over each call, with rows divided by the number of locations
for convolutions.

Every rank turns its sums into a *contribution*; the sum of contributions over ranks divided by the
sum of their *weights* is the average. So statistics stay linear until they are used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from torch import nn

from soframe.specs import FactorSpec

LossAverage = Literal["local", "global", "sum"]
Scaling = Literal["fisher", "kaisa"]


Multipliers = tuple[float, float, float]
"""Multipliers of sums by degree in ``g0``: 0 (``a a^T``), 1, 2 (``g0 g0^T``)."""


@dataclass
class Counts:
    """Counts of one block by backward pass since the last reduction of statistics, on one rank."""

    # Of the loss, whether they reach the block or not.
    samples: dict[int, int] = field(default_factory=dict)
    # Samples times positions that reach it, with the pass's weight (`Preconditioner.observe`).
    rows: dict[int, float] = field(default_factory=dict)
    group_rows: dict[int, list[float]] = field(default_factory=dict)  # empty if all reach all
    calls: int = 0
    since: int = 0  # the first backward pass that its gradients have; earlier ones were zeroed

    def add(
        self,
        backward: int,
        samples: int,
        rows: float,
        reached: Sequence[float] | None,
        weight: float,
    ) -> None:
        """Add a call's rows that are data, and those that reach each group, with a weight."""
        if reached is not None:
            before = self.group_rows.get(backward, [0.0] * len(reached))
            pairs = zip(before, reached, strict=True)
            self.group_rows[backward] = [old + number * weight for old, number in pairs]
        self.samples.setdefault(backward, samples)
        self.rows[backward] = self.rows.get(backward, 0) + rows * weight
        self.calls += 1


class Contribution(NamedTuple):
    """Multipliers of one rank's sums, and its terms of the divisors."""

    multipliers: Multipliers = (0.0, 0.0, 0.0)
    input_weight: float = 0.0  # term in the divisor of means over samples
    output_weight: float = 0.0  # term in the divisor of means over rows
    group_weights: tuple[float, ...] = ()  # the same of each group; empty for equal ones

    def weight(self, factor: FactorSpec) -> float:
        """Return the rank's term in the divisor of a factor, over all groups."""
        return self.input_weight if factor.mean_over == "samples" else self.output_weight


@dataclass(frozen=True)
class Scale:
    """The scaling convention of a preconditioner."""

    scaling: Scaling = "fisher"
    loss_average: LossAverage = "local"  # the weight between g and g0
    world_size: int = 1  # over which gradients are averaged
    own_gradients: bool = False  # rows are g, as with targets drawn from the model
    copies: int = 1  # ranks that have each batch together, in a mean over data

    def call(
        self, module: nn.Module, samples: int, batch: int, shared: int, scale: float, users: int = 1
    ) -> Multipliers:
        """Return the multipliers of one call.

        ``scale`` is the GradScaler's; ``users`` the number of samples that share each row.
        """
        unscale = 1.0 / scale**2
        if self.scaling == "kaisa":
            per_row = 1.0 / (batch * shared)
            if isinstance(module, nn.modules.conv._ConvNd):
                per_row /= shared**2
            return per_row, math.nan, per_row * unscale
        if self.loss_average == "local":
            weight = 1.0 / max(1, samples)
            if self.own_gradients:
                return weight * users, weight, weight
            return weight * users, 1.0 / scale, samples * unscale
        if self.own_gradients:
            return users, 1.0, 1.0
        return users, 1.0 / scale, unscale

    def contribution(self, counts: Counts, passes: dict[int, int]) -> Contribution:
        """Return the multipliers and weights of this rank, given the samples of every pass."""
        if not passes:
            return Contribution()
        if self.scaling == "kaisa":
            return Contribution((1.0, math.nan, 1.0), counts.calls, counts.calls)
        if self.loss_average == "local":
            k = len(passes)
            # Empty ones divide the loss, and have no samples. Negative numbers are of other stages.
            empty = sum(n >= 0 and in_pass == 0 for n, in_pass in passes.items())
            if empty == k:
                return Contribution()
            positions = sum(rows / max(1, counts.samples[c]) for c, rows in counts.rows.items())
            of_calls: list[list[float]] = []
            for c, reached in counts.group_rows.items():
                of_calls.append([rows / max(1, counts.samples[c]) / k for rows in reached])
            rows_of_groups = tuple(map(sum, zip(*of_calls, strict=True)))
            by_degree = (1.0 / k, 1.0, float(k))
            if self.own_gradients:
                by_degree = (1.0 / k, 1.0 / k, 1.0 / k)
            return Contribution(by_degree, (k - empty) / k, positions / k, rows_of_groups)
        samples = sum(counts.samples.get(c, in_pass) for c, in_pass in passes.items())
        rows_of_groups = tuple(map(sum, zip(*counts.group_rows.values(), strict=True)))
        return Contribution((1.0, 1.0, 1.0), samples, sum(counts.rows.values()), rows_of_groups)

    def gradient_scale(self, factor: FactorSpec, input_weight: float) -> float:
        """Return the part of ``(g / g0)^degree`` that depends on the counts of all ranks."""
        if self.scaling == "fisher" and self.loss_average == "global" and not self.own_gradients:
            return (input_weight / self.world_size) ** factor.degree
        return 1.0


@dataclass(frozen=True)
class OfMeans(Scale):
    """The scale of batches with a mean loss each, whose samples all count alike."""

    def call(
        self, module: nn.Module, samples: int, batch: int, shared: int, scale: float, users: int = 1
    ) -> Multipliers:
        # The loss of a batch is the sum over its samples, divided by their number.
        return super().call(module, samples, batch, shared, scale / max(1, samples), users)
