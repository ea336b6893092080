"""The statistics of one window: from calls to sums, from sums on all ranks to running factors.

A window is everything since the last step. Each call adds its moments to the block's sums as soon
as its output gradient arrives; nothing else is kept of it. At the step, every rank says how much
its sums weigh; once the weights of all ranks are known, the sums are added up and enter the
running average. Sums that are not finite, on any rank, are dropped on all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from numbers import Integral
from typing import Literal

import torch
from torch import Tensor

from soframe.blocks import Block
from soframe.capture import Probe
from soframe.comm.base import Backend
from soframe.comm.fusion import add_up
from soframe.layers.base import LayerHelper
from soframe.methods.base import Call
from soframe.methods.scaling import Contribution, Scale

Samples = Literal["batch", "positions"] | Callable[[], int]


class Statistics:
    """The sums of a window on this rank.

    Args:
        blocks: The blocks.
        scale: The scaling convention.
        samples: What the loss averages over: ``"batch"`` (the leading dimension), ``"positions"``
            (every position has a loss of its own), or a callable that returns the number of
            samples of the backward pass under way.
        grad_scale: Returns what the loss is multiplied by.
    """

    def __init__(
        self,
        blocks: Sequence[Block],
        scale: Scale,
        samples: Samples,
        grad_scale: Callable[[], float],
    ) -> None:
        self._blocks = blocks
        self._block_of = {helper: block for block in blocks for helper in block.helpers}
        self._scale = scale
        self._samples = samples
        self._grad_scale = grad_scale
        self._passes: dict[int, int] = {}
        self._loss_scale: float | None = None

    def add(
        self,
        helper: LayerHelper,
        inputs: tuple[Tensor, ...],
        gradient: Tensor,
        number: int,
        probe: Probe | None = None,
    ) -> None:
        """Add one call.

        Args:
            helper: The helper of the module that was called.
            inputs: What it was called with.
            gradient: The gradient of its output.
            number: The number of the backward pass within the window.
            probe: The probe that the gradient comes from, if it is not the loss's.
        """
        block = self._block_of[helper]
        rows = helper.output_rows(gradient).to(block.dtype)
        batch, shared = rows.shape[1], rows.shape[2]
        if batch * shared == 0:
            return
        samples = self._count_samples(batch, shared)
        again = probe is not None and not probe.first
        if not again:
            block.counts.add(number, samples, batch * shared)
        samples = block.counts.samples[number]
        self._passes[number] = max(samples, self._passes.get(number, 0))
        if self._loss_scale is None:
            self._loss_scale = self._grad_scale()  # a host sync with GradScaler: once a window
        scale = self._scale.call(helper.module, samples, batch, shared, self._loss_scale)
        added = block.method.statistics(Call(helper, None if again else inputs, rows))
        weight = 1.0 if probe is None else probe.weight
        for factor in block.factors:
            if factor.name not in added:
                continue
            multiplier = scale.inputs if factor.side == "right" else scale.outputs * weight
            total = block.sums.get(factor.name)
            if total is None:
                block.sums[factor.name] = added[factor.name] * multiplier
            else:
                total.add_(added[factor.name], alpha=multiplier)

    def _count_samples(self, batch: int, shared: int) -> int:
        if self._samples == "batch":
            return batch
        if self._samples == "positions":
            return batch * shared
        samples: object = self._samples()
        if isinstance(samples, bool) or not isinstance(samples, Integral) or samples < 1:
            raise ValueError(f"samples() must return a positive integer, not {samples!r}")
        return int(samples)

    def finite(self) -> bool:
        """Return whether every sum is finite (by its diagonal, which bounds the rest)."""
        traces = [
            total.diagonal(dim1=-2, dim2=-1).sum().to("cpu", torch.float64)
            for block in self._blocks
            for total in block.sums.values()
        ]
        return not traces or bool(torch.stack(traces).isfinite().all())

    def weights(self) -> list[float]:
        """Return this rank's weights: two numbers per block, to be added up over ranks."""
        own = [self._contribution(block) for block in self._blocks]
        return [weight for c in own for weight in (c.input_weight, c.output_weight)]

    def fold(self, backend: Backend, weights: Sequence[float], decay: float) -> None:
        """Add up the sums of all ranks and let them enter the running factors.

        Args:
            backend: The backend.
            weights: The added-up `weights` of all ranks.
            decay: What the running average keeps of its past.
        """
        pairs = dict(zip(self._blocks, zip(weights[::2], weights[1::2], strict=True), strict=True))
        # A block that no rank used keeps its factors; all ranks know, for the weights are shared.
        used = [block for block in self._blocks if pairs[block][1] > 0]
        contributions: list[Tensor] = []
        for block in used:
            own, (input_weight, output_weight) = self._contribution(block), pairs[block]
            left = own.outputs * self._scale.gradient_scale(input_weight) / output_weight
            right = own.inputs / input_weight
            for factor in block.factors:
                total = block.sums.get(factor.name)
                if total is None:
                    contributions.append(block.empty_factor(factor))
                else:
                    contributions.append(total.mul_(right if factor.side == "right" else left))
        reduced = iter(add_up(backend, contributions, "reduce"))
        for block in used:
            self._average(block, {factor.name: next(reduced) for factor in block.factors}, decay)

    def _average(self, block: Block, new: dict[str, Tensor], decay: float) -> None:
        if not block.running and self._scale.scaling == "kaisa":
            block.mass = 1.0
            for factor in block.factors:
                eye = torch.eye(factor.size, dtype=block.dtype, device=block.device)
                block.running[factor.name] = eye.repeat(factor.groups, 1, 1)
        # Dividing by the gathered mass frees the average of its start (Adam's bias correction).
        block.mass = decay * block.mass + (1 - decay)
        if not block.running:
            block.running = new
            return
        rate = (1 - decay) / block.mass
        for name, tensor in new.items():
            block.running[name].lerp_(tensor, rate)

    def _contribution(self, block: Block) -> Contribution:
        return self._scale.contribution(block.counts, self._passes)

    def resume(self, before: Statistics) -> None:
        """Go on with the window of other statistics, whose sums the blocks have taken over.

        Args:
            before: The statistics of the model as it was before.
        """
        self._passes, self._loss_scale = before._passes, before._loss_scale

    def clear(self) -> None:
        """Begin a new window."""
        self._passes = {}
        self._loss_scale = None
        for block in self._blocks:
            block.forget_window()
