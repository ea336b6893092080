"""The gradients of samples in single parameters, by a backward pass for each sample.

In a backward pass in which the gradients of the outputs of all other samples are zero, a parameter
gets the gradient of one sample. This is exact for any use of the parameter, and needs outputs
``[samples, ...]`` with rows that depend on their own sample alone. Terms of the loss beside its
outputs, such as a penalty on weights, are of no sample, and left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from soframe.blocks import sharding
from soframe.capture.outputs import changed, heads_in, samples_in


def sample_gradients(
    outputs: Any,
    parameters: Sequence[nn.Parameter],
    starts: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
    most: Callable[[int], int],
) -> dict[nn.Parameter, Tensor]:
    """Return the gradients of samples, ``[samples, entries]``, in the parameters of the graph."""
    # `most` has the number of passes, which ranks may have to make together.
    heads = heads_in(outputs)
    samples = samples_in(heads)
    passes = most(samples)
    if samples == 0:
        raise ValueError("loss(model, batch) does not return outputs [samples, ...]")

    def gradients_of(sample: int) -> dict[nn.Parameter, Tensor]:
        """Return the gradients through the outputs of one sample, or of none."""

        def mask(gradient: Tensor) -> Tensor:
            masked = torch.zeros_like(gradient)
            masked[sample : sample + 1] = gradient[sample : sample + 1]
            return masked

        with changed(heads, mask):
            of_parameters: Sequence[Tensor | None] = torch.autograd.grad(
                starts, parameters, gradients, retain_graph=True, allow_unused=True
            )
        reached: dict[nn.Parameter, Tensor] = {}
        for parameter, gradient in zip(parameters, of_parameters, strict=True):
            if gradient is not None:
                reached[parameter] = sharding.whole(gradient)
        return reached

    of_none = gradients_of(samples)  # what no sample's output reaches
    rows: dict[nn.Parameter, Tensor] = {}
    for parameter, gradient in of_none.items():
        rows[parameter] = gradient.new_zeros(samples, gradient.numel())
    for sample in range(passes):
        for parameter, gradient in gradients_of(sample).items():
            if sample < samples:
                rows[parameter][sample] = (gradient - of_none[parameter]).flatten()
    return rows


def require_apart(model: nn.Module) -> None:
    """Raise if a batch norm mixes the samples of a batch."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise ValueError(
                f"{name} normalises with the statistics of the batch, so that a sample has no "
                f"gradient of its own: call model.eval() before"
            )
