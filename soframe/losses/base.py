"""The loss as a Fisher needs it: the Hessian of each sample's loss in the network's output.

Outputs are ``[N, ...]``, and the loss is the mean over N samples of ``l_n(output_n)``. For losses
that are negative log-likelihoods with natural parameters for outputs (all that come with soframe)
the Hessian does not depend on the target, and the Fisher equals the generalised Gauss-Newton matrix
(Martens, 2020, section 9.2).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from soframe.kernels.devices import along_first


class Loss(ABC):
    """The Hessian ``H_n`` of one sample's loss in its output, and its square root."""

    @property
    def floor(self) -> float | None:
        """A lower bound of the loss for all outputs, targets and weights; None if unknown.

        `soframe.TrustRegion` does not trust a model that predicts less.
        """
        return None

    @property
    def expected(self) -> bool:
        """Whether the Hessian depends on targets, so that its expectation is given in its place.

        The expectation is the Fisher, over targets that the model itself would draw (Martens, 2020,
        section 9.1). False by default. `soframe.TrustRegion` then builds its quadratic model of the
        Fisher, and calls `counts` for the scale of the closure's loss.
        """
        return False

    def counts(self, outputs: Tensor, gradients: Tensor) -> Tensor:
        """Return the factor of each term of a closure's loss, from its gradient alone.

        Called where `expected` is true, since the closure's curvature does not determine it then.

        Args:
            outputs: ``[N, ...]``.
            gradients: ``[N, ...]``: of the closure's loss in them.

        Returns:
            Factors in float64, of a shape that can be multiplied with the outputs. They are
            ``1 / N`` where a closure returns the mean over N samples of this loss.

        Raises:
            NotImplementedError: If the loss does not override it.
        """
        raise NotImplementedError(
            f"{type(self).__name__}.expected is true, so it needs a method "
            f"counts(outputs, gradients)"
        )

    @property
    def means(self) -> bool | None:
        """Whether a sample's loss is a mean over its positions, the dimensions after the second.

        False, the default, for a sum; None if it is neither. Used by `Preconditioner.count` where
        positions are ignored.
        """
        return False

    @abstractmethod
    def hessian_product(self, outputs: Tensor, vectors: Tensor) -> Tensor:
        """Return ``H_n v_n`` for every sample.

        Args:
            outputs: ``[N, ...]``.
            vectors: ``[N, ...]``.

        Returns:
            ``[N, ...]``.
        """

    @abstractmethod
    def half_factor(self, outputs: Tensor) -> Iterator[Tensor]:
        """Yield the columns ``s_k`` of a square root of the Hessian.

        Args:
            outputs: ``[N, ...]``.

        Yields:
            ``[N, ...]`` each; for every sample ``sum_k s_k s_k^T = H_n``.
        """

    def sample(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Return the gradient in the outputs at targets drawn from the predictive distribution.

        Only its second moment matters, ``E[v v^T] = H_n``; by default it is a sum of the columns of
        the half-factor with random signs.

        Args:
            outputs: ``[N, ...]``.
            generator: The source of randomness.

        Returns:
            ``[N, ...]``: of each sample's own loss, not divided by N.
        """
        total = torch.zeros_like(outputs)
        like = outputs.new_empty(len(outputs))
        for column in self.half_factor(outputs):
            total += column * along_first(random_signs(like, generator), column)
        return total


def diagonal_columns(root: Tensor) -> Iterator[Tensor]:
    """Yield the columns of a diagonal square root ``[N, ...]``: one for each number of a sample."""
    flat = root.reshape(len(root), root.shape[1:].numel())
    for number in range(flat.shape[1]):
        column = torch.zeros_like(flat)
        column[:, number] = flat[:, number]
        yield column.view_as(root)


def mean_scale(mean: bool, terms: int) -> float:
    """Return the factor of each of a sample's terms: ``1 / terms`` where the loss is their mean."""
    return 1.0 / max(1, terms) if mean else 1.0


def random_signs(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return 1 or -1 for each number of a tensor, with equal probabilities."""
    # A byte draws eight, which takes a fraction of the time of as many normal numbers.
    count = -(-like.numel() // 8)
    device = like.device
    drawn = torch.empty(count, dtype=torch.uint8, device=device).random_(generator=generator)
    # Made where it is used: a copy from the CPU would have to wait.
    bits = torch.arange(256, device=device).unsqueeze(1) >> torch.arange(8, device=device) & 1
    signs = (1 - 2 * bits).to(like.dtype).index_select(0, drawn.int())
    return signs.flatten()[: like.numel()].view(like.shape)
