"""The kinds of Fisher, by the output gradients that enter the statistics.

- ``"empirical"``: gradients of the loss itself, from the user's backward pass. It costs nothing,
  and is no curvature: it vanishes where the model fits its data (Kunstner et al., 2019).
- ``"monte-carlo"``: gradients at targets drawn from the model's predictive distribution, unbiased
  for the true Fisher. One more backward pass per sample, to the layers' outputs only.
- ``"forward-only"``: none. The factor of the outputs is the identity, and the block of a layer
  ``A ⊗ I`` (Benzing, 2022, who calls it FOOF). It costs less than the empirical Fisher.
- ``"type-2"``: the columns of a square root of the loss's Hessian, exact (Eschenhagen et al., 2023,
  section 2.1). One more backward pass per column.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from soframe.blocks import sharding
from soframe.capture.counting import Samples, multiplier, observed
from soframe.capture.hooks import Capture
from soframe.checks.values import require_word
from soframe.losses.base import Loss
from soframe.losses.classification import CrossEntropy
from soframe.losses.sum import SumLoss

Kind = Literal["empirical", "forward-only", "monte-carlo", "type-2"]
KINDS_OF_FISHER: tuple[Kind, ...] = ("empirical", "forward-only", "monte-carlo", "type-2")


@dataclass(frozen=True)
class Fisher:
    """A Fisher and its settings."""

    kind: Kind = "empirical"  # one of KINDS_OF_FISHER
    loss: Loss | None = None  # the loss; needed by the kinds that are probed
    samples: int = 1  # targets drawn per datum of the Monte-Carlo Fisher
    generator: torch.Generator | None = None  # their source of randomness; None for torch's

    def __post_init__(self) -> None:
        require_word("fisher", self.kind, KINDS_OF_FISHER)
        if self.probed and self.loss is None:
            raise ValueError(
                f"fisher={self.kind!r} needs a loss, for example Statistics(loss='cross-entropy')"
            )
        if self.samples < 1:
            raise ValueError(f"Fisher: samples must be at least 1, not {self.samples}")

    @property
    def probed(self) -> bool:
        """Whether it needs further backward passes for output gradients."""
        return self.kind in ("monte-carlo", "type-2")

    def observe(
        self,
        outputs: Tensor | Sequence[Tensor],
        capture: Capture,
        samples: Samples = None,
        step: int = 0,
    ) -> None:
        """Send vectors backward to the layers from a model's outputs, of the loss's batch."""
        if self.kind == "empirical":
            return  # it takes its statistics from loss.backward()
        heads = heads_of(outputs)
        if not capture.enabled:
            return
        if self.probed:
            assert self.loss is not None
            try:
                words = capture.calls.batch.forward.root.words
                if isinstance(self.loss, CrossEntropy) and _has_words_last(heads[0], words):
                    raise ValueError(
                        f"loss 'cross-entropy' has classes in dimension 1, and outputs "
                        f"{list(heads[0].shape)} have the {words} words in the last one: pass "
                        f"outputs.transpose(1, 2)"
                    )
                counted = observed(heads, self.loss.means, capture.calls.batch, samples)
            except ValueError as error:  # perhaps on this rank alone: all raise it at the step
                capture.calls.fail(error)
                return
            vectors = counted.masked(self.vectors(outputs))
            if self.kind == "type-2" and capture.calls.shares:
                vectors = _signed(vectors, step)
            capture.probe(heads, vectors, counted.terms)
        elif (batch := capture.calls.batch).terms is None:
            batch.end(observed(heads, False, batch, samples).terms)

    def vectors(
        self, outputs: Tensor | Sequence[Tensor]
    ) -> Iterator[tuple[Sequence[Tensor | None], float]]:
        """Yield gradients ``[N, ...]`` in each output (None for zeros), with a weight."""
        # Their weighted outer products add up to the Hessian: exactly for type-2, in expectation
        # for Monte-Carlo.
        assert self.loss is not None
        if isinstance(outputs, Tensor):
            detached = outputs.detach()
            if self.kind == "type-2":
                for column in self.loss.half_factor(detached):
                    yield [column], 1.0
                return
            for _ in range(self.samples):
                yield [self.loss.sample(detached, self.generator)], 1.0 / self.samples
            return
        if not isinstance(self.loss, SumLoss):
            raise TypeError(
                f"several outputs need a loss for each: SumLoss([Term(..., output=0), Term(..., "
                f"output=1)]) rather than {self.loss!r}"
            )
        heads = [output.detach() for output in outputs]
        if self.kind == "type-2":
            for columns in self.loss.half_factors(heads):
                yield columns, 1.0
            return
        for _ in range(self.samples):
            yield self.loss.samples(heads, self.generator), 1.0 / self.samples


def _has_words_last(scores: Tensor, words: int) -> bool:
    """Return whether scores of words are in the last dimension, as language models have them."""
    return scores.dim() > 2 and scores.shape[-1] == words != scores.shape[1]


def _signed(
    vectors: Iterator[tuple[Sequence[Tensor | None], float]], seed: int
) -> Iterator[tuple[Sequence[Tensor | None], float]]:
    """Yield the columns with each sample's multiplied by a sign, the same for all outputs."""
    # Where a layer is shared by all samples, autograd adds up their columns. With random signs the
    # products of different samples' columns have mean zero; each sample's own is unchanged.
    generator = torch.Generator(device="cpu").manual_seed(seed)  # torch's own is the user's
    for columns, weight in vectors:
        size = next(len(column) for column in columns if column is not None)
        signs = 2 * torch.randint(2, (size,), generator=generator, device="cpu") - 1
        signed: list[Tensor | None] = []
        for column in columns:
            if column is None:
                signed.append(None)
            else:
                signed.append(column * multiplier(signs, column))
        yield signed, weight


def heads_of(outputs: Any) -> list[Tensor]:
    """Return the output tensors of a model as a list."""
    heads = list(outputs) if isinstance(outputs, Sequence) else [outputs]
    if not all(isinstance(head, Tensor) for head in heads):
        raise TypeError(
            f"observe takes the tensors that the loss is of, one or a sequence of them, not "
            f"{type(outputs).__name__}"
        )
    if any(map(sharding.is_distributed, heads)):
        raise TypeError(
            "observe takes whole outputs, and these are DTensors: pass output.full_tensor()"
        )
    return heads
