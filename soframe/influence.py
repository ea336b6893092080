"""Influence of training samples on the losses of queries, by products with an inverse curvature.

The score of a training sample t for a query q is ``g_q^T (C + damping I)^-1 g_t``, with the
gradients of their own losses (Koh and Liang, 2017; with EKFAC, Grosse et al., 2023). It is
positive if training on t lowers the loss of q: of a model trained on N samples, one more copy of t
changes it by about ``-score / N``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from soframe.curvature import Curvature
from soframe.products.fitting import LossOf, together
from soframe.products.queries import queries_of, squares


@torch.no_grad()
def scores(
    curvature: Curvature,
    queries: Iterable[Any],
    train: Iterable[Any],
    loss: LossOf,
    *,
    damping: float,
) -> Tensor:
    """Return the influence of training samples on queries.

    Queries are kept in memory, as vectors over all parameters; training samples are streamed. On
    several ranks all take the same queries, and each its own share of the training samples.

    Args:
        curvature: A fitted curvature.
        queries: Batches of queries.
        train: Batches of training samples; on several ranks a share may be empty.
        loss: ``loss(model, batch) -> (outputs, mean loss)``, for queries too.
        damping: Added to the eigenvalues of the curvature. Scores depend on it more than on the
            method: a fraction of the mean eigenvalue, such as 0.1, is a start.

    Returns:
        ``[queries, training samples of this rank]``.

    Raises:
        ValueError: If queries or training samples are missing, or the damping is zero and the
            curvature singular; under ``fully_shard``, on all ranks, if one has fewer batches; or
            see `Curvature.gradients`.
    """
    inverse = curvature.inverse(damping)
    batches = together(curvature.parts.model, curvature.backend, queries)
    solved = queries_of(inverse, (curvature.gradients(batch, loss) for batch in batches))
    if solved is None:
        raise ValueError("queries has no batches")
    columns = [_nothing(curvature, len(solved), 0)]
    for batch in _share(curvature, train):
        columns.append(solved.dot(curvature.gradients(batch, loss)))
    return torch.cat(columns, 1)


@torch.no_grad()
def self_influence(
    curvature: Curvature, train: Iterable[Any], loss: LossOf, *, damping: float
) -> Tensor:
    """Return the influence of training samples on their own losses, ``[samples of this rank]``.

    Mislabelled and atypical samples have the largest. It takes the arguments of `scores`; several
    ranks need ``strategy="comm-opt"``, as each multiplies vectors of its own.

    Raises:
        ValueError: As `scores` raises it.
    """
    inverse, lengths = curvature.inverse(damping), [_nothing(curvature, 0)]
    for batch in _share(curvature, train):
        lengths.append(squares(inverse, curvature.gradients(batch, loss)))
    return torch.cat(lengths)


def _share(curvature: Curvature, train: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches of this rank, of which one of several may have none."""
    number = 0
    for batch in together(curvature.parts.model, curvature.backend, train):
        number += 1
        yield batch
    if number == 0 and curvature.backend.world_size == 1:
        raise ValueError("train has no batches")


def _nothing(curvature: Curvature, *shape: int) -> Tensor:
    """Return scores of no samples."""
    block = curvature.blocks[0]
    return torch.empty(shape, dtype=block.dtype, device=block.device)


def top(scores: Tensor, number: int) -> tuple[Tensor, Tensor]:
    """Return the highest scores of each query and the indices of their samples, ``[queries, k]``.

    ``top(-scores, k)`` has the samples that raise a query's loss most.
    """
    highest = scores.topk(min(number, scores.shape[-1]), dim=-1)
    return highest.values, highest.indices
