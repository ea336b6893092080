"""Sums of losses: over parts of one output, or over several outputs of one forward pass.

The Hessian of ``sum_i weight_i l_i(part_i)`` in the outputs is the sum of the terms' own, each at
its part's rows and columns; so the Gauss-Newton matrix is the weighted sum of the terms'. A square
root of it has the columns of all terms. Samples of all terms are drawn independently and sent back
in one pass: their cross products vanish in expectation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from soframe.kernels.devices import along_first
from soframe.losses.base import Loss
from soframe.registry import KINDS, register


@dataclass(frozen=True)
class Term:
    """One term of a sum of losses.

    Attributes:
        loss: A name, class or instance.
        features: The features of the output that it reads (dimension 1); None for all.
        weight: Its factor.
        output: The index of the output that it reads, where the model has several.
    """

    loss: str | type[Loss] | Loss
    features: slice | None = None
    weight: float = 1.0
    output: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "loss", KINDS["loss"].build(self.loss, Loss))
        if not 0 < self.weight < math.inf:
            raise ValueError(f"Term: weight must be positive, not {self.weight!r}")
        if self.output < 0:
            raise ValueError(f"Term: output must not be negative, not {self.output!r}")

    @property
    def own(self) -> Loss:
        """The loss, built."""
        assert isinstance(self.loss, Loss)
        return self.loss

    def of(self, output: Tensor) -> Tensor:
        """Return a view of the features that the term reads; an error if the output lacks any."""
        if self.features is None:
            return output
        size = output.shape[1] if output.dim() > 1 else 0
        start, stop = self.features.start or 0, self.features.stop or 0
        if not range(size)[self.features] or max(abs(start), abs(stop)) > size:
            raise ValueError(f"{self}: the output {tuple(output.shape)} lacks these features")
        return output[:, self.features]

    def embed(self, part: Tensor, output: Tensor) -> Tensor:
        """Return a part embedded in zeros of the output's shape."""
        if self.features is None:
            return part
        embedded = torch.zeros_like(output)
        embedded[:, self.features] = part
        return embedded


@register("loss", "sum")
@dataclass(frozen=True)
class SumLoss(Loss):
    """``sum_i weight_i l_i``; each sample's own, like every loss here.

    Over parts of one output ``[N, features, ...]``::

        SumLoss([Term("cross-entropy", slice(0, 10)), Term("mse", slice(10, None), weight=0.5)])

    Over several outputs, for ``preconditioner.observe((logits, values))`` and for the models of
    `soframe.TrustRegion` that return several tensors::

        SumLoss([Term("cross-entropy", output=0), Term("mse", weight=0.5, output=1)])

    Attributes:
        terms: The terms. They may overlap.
    """

    terms: Sequence[Term] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "terms", tuple(self.terms))
        if not self.terms:
            raise ValueError("SumLoss needs terms: SumLoss([Term('cross-entropy'), ...])")
        for term in self.terms:
            if not isinstance(term, Term):
                raise TypeError(f"SumLoss: a term is a soframe.losses.Term, not {term!r}")

    @property
    def expected(self) -> bool:
        return any(term.own.expected for term in self.terms)

    @property
    def means(self) -> bool | None:
        kinds = {term.own.means for term in self.terms}
        return kinds.pop() if len(kinds) == 1 else None

    @property
    def floor(self) -> float | None:
        total = 0.0
        for term in self.terms:
            if term.own.floor is None:
                return None
            total += term.weight * term.own.floor
        return total

    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        return self.hessian_products([outputs], [vectors])[0]

    def half_factor(self, outputs: Tensor) -> Iterator[Tensor]:
        for (column,) in self.half_factors([outputs]):
            assert column is not None
            yield column

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        return self.samples([outputs], generator)[0]

    def hessian_products(
        self, outputs: Sequence[Tensor], vectors: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return the Hessian in several outputs, times vectors; no term couples two outputs."""
        self._check(outputs)
        totals = list(map(torch.zeros_like, vectors))
        for term in self.terms:
            output, vector = outputs[term.output], vectors[term.output]
            product = term.own.hessian_product(term.of(output), term.of(vector))
            totals[term.output] += term.embed(term.weight * product, output)
        return totals

    def half_factors(self, outputs: Sequence[Tensor]) -> Iterator[list[Tensor | None]]:
        """Yield the columns of a square root of the Hessian, by output; None stands for zeros."""
        self._check(outputs)
        for term in self.terms:
            output = outputs[term.output]
            for column in term.own.half_factor(term.of(output)):
                vector: list[Tensor | None] = [None] * len(outputs)
                vector[term.output] = term.embed(math.sqrt(term.weight) * column, output)
                yield vector

    def samples(
        self, outputs: Sequence[Tensor], generator: torch.Generator | None = None
    ) -> list[Tensor]:
        """Return the gradients in several outputs at independently drawn targets."""
        self._check(outputs)
        totals = list(map(torch.zeros_like, outputs))
        for number, term in enumerate(self.terms):
            output = outputs[term.output]
            sample = math.sqrt(term.weight) * term.own.sample(term.of(output), generator)
            if number:
                # A loss promises the second moment of its samples, not that their mean is zero.
                numbers = torch.rand(len(sample), generator=generator, device=sample.device)
                heads = along_first(numbers < 0.5, sample)
                sample = torch.where(heads, sample, -sample)
            totals[term.output] += term.embed(sample, output)
        return totals

    def _check(self, outputs: Sequence[Tensor]) -> None:
        used = {term.output for term in self.terms}
        if used != set(range(len(outputs))):
            raise ValueError(
                f"SumLoss has terms of the outputs {sorted(used)}, and the model {len(outputs)}: "
                f"every output needs a term, and every term an output"
            )
        sizes = list(map(len, outputs))
        if len(set(sizes)) > 1:
            raise ValueError(
                f"the outputs are of different batches: {sizes} samples; where they have one loss, "
                f"let the model return them as one batch (torch.cat), which a closure's loss may "
                f"weigh sample by sample"
            )
