"""The gradients of samples in single parameters, by a backward pass for each sample.

In a backward pass in which the gradients of the outputs of all other samples are zero, a parameter
gets the gradient of one sample. This is exact for any use of the parameter, and needs outputs
``[samples, ...]`` with rows that depend on their own sample alone. Terms of the loss beside its
outputs, such as a penalty on weights, are of no sample, and left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from soframe.capture.root import common, tensors_in


def sample_gradients(
    outputs: Any,
    parameters: Sequence[nn.Parameter],
    starts: Sequence[Tensor],
    gradients: Sequence[Tensor] | None = None,
) -> dict[nn.Parameter, Tensor]:
    """Return the gradients of samples in the parameters that are in the graph.

    Args:
        outputs: The outputs of the model, with their graph, which stays.
        parameters: The parameters.
        starts: The tensors from which backward passes start: the loss, or the outputs.
        gradients: Their gradients; None for ones.

    Returns:
        By parameter ``[samples, entries]``.

    Raises:
        ValueError: If the outputs do not show the samples.
    """
    heads = [tensor for tensor in tensors_in(outputs) if tensor.requires_grad]
    samples = common({len(head) for head in heads})
    if samples is None:
        raise ValueError("loss(model, batch) does not return outputs [samples, ...]")
    rest = _gradients(heads, None, parameters, starts, gradients)
    rows: dict[nn.Parameter, Tensor] = {}
    for parameter in rest:
        rows[parameter] = parameter.new_zeros(samples, parameter.numel())
    for sample in range(samples):
        of_sample = _gradients(heads, sample, parameters, starts, gradients)
        for parameter, gradient in of_sample.items():
            rows[parameter][sample] = (gradient - rest[parameter]).flatten()
    return rows


def _gradients(
    heads: Sequence[Tensor],
    sample: int | None,
    parameters: Sequence[nn.Parameter],
    starts: Sequence[Tensor],
    gradients: Sequence[Tensor] | None,
) -> dict[nn.Parameter, Tensor]:
    """Return the gradients through the outputs of one sample, or of none, where there are any."""
    with _masked(heads, sample):
        of_parameters: Sequence[Tensor | None] = torch.autograd.grad(
            starts, parameters, gradients, retain_graph=True, allow_unused=True
        )
    reached: dict[nn.Parameter, Tensor] = {}
    for parameter, gradient in zip(parameters, of_parameters, strict=True):
        if gradient is not None:
            reached[parameter] = gradient
    return reached


@contextmanager
def _masked(heads: Sequence[Tensor], sample: int | None) -> Iterator[None]:
    """Set the gradients of outputs to zero, but for one sample."""

    def mask(gradient: Tensor) -> Tensor:
        masked = torch.zeros_like(gradient)
        if sample is not None:
            masked[sample] = gradient[sample]
        return masked

    # Twice where an output is made of another one, which changes nothing.
    handles = [head.register_hook(mask) for head in heads]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def require_apart(model: nn.Module) -> None:
    """Raise if a batch norm mixes the samples of a batch."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise ValueError(
                f"{name} normalises with the statistics of the batch, so that a sample has no "
                f"gradient of its own: call model.eval() before"
            )
