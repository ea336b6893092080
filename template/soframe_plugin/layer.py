"""A layer that multiplies each feature by a weight, and its helper."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import soframe


class Scale(nn.Module):
    """Multiplies features ``[N, features]`` by a weight each."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[N, features]``."""
        return x * self.weight


# A layer registers itself under its module's type: the entry point imports this file.
@soframe.register("layer", Scale)
class ScaleHelper(soframe.LayerHelper):
    """Each feature is a group with one input and one output."""

    @property
    def groups(self) -> int:
        """The number of features."""
        weight: Tensor = self.module.weight  # type: ignore[assignment]
        return weight.numel()

    def input_rows(self, *inputs: Tensor) -> Tensor:
        """Return ``[features, N, 1, 1]``."""
        return inputs[0].T[:, :, None, None]

    def output_rows(self, grad_output: Tensor) -> Tensor:
        """Return ``[features, N, 1, 1]``."""
        return grad_output.T[:, :, None, None]
