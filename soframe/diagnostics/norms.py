"""The norms of one step: of each block's gradient, direction and weights, as this rank has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from soframe.blocks import sharding
from soframe.blocks.block import Block


@dataclass(frozen=True)
class Norms:
    """Frobenius norms by the names of blocks, each a scalar in float64 on the block's device.

    A block is missing where this rank does not have the whole matrix.

    Attributes:
        used: The blocks that had a gradient on any rank, the same on every rank.
        gradient: Of the averaged gradients, before they are preconditioned.
        direction: Of the directions as they are written, after the clips.
        weight: Of the parameters before the update.
    """

    used: frozenset[str]
    gradient: Mapping[str, Tensor]
    direction: Mapping[str, Tensor]
    weight: Mapping[str, Tensor]


def measure(
    blocks: Sequence[Block],
    gradients: Mapping[Block, Tensor | None],
    directions: Mapping[Block, Tensor],
) -> Norms:
    """Return the norms of a step, without a wait for the device; nothing travels.

    Args:
        blocks: All blocks.
        gradients: The averaged gradient of each block that has one, ``[groups, out, in]``; None
            where this rank does not know it.
        directions: The direction of each block that is preconditioned, ``[groups, out, in]``.
    """
    return Norms(
        used=frozenset(block.name for block in gradients),
        gradient=_norms(gradients),
        direction=_norms(directions),
        weight={block.name: norm for block in blocks if (norm := _weight(block)) is not None},
    )


def changes(before: Mapping[nn.Parameter, Tensor], blocks: Sequence[Block]) -> dict[str, Tensor]:
    """Return how far the weights of blocks have moved, as Frobenius norms in float64.

    Args:
        before: Where parameters were.
        blocks: The blocks.

    Returns:
        Block's name -> a scalar, for blocks of which this rank has all.
    """
    moved: dict[str, Tensor] = {}
    for block in blocks:
        parameters = list(block.parameters.values())
        if _is_whole(block) and all(p in before for p in parameters):
            moved[block.name] = _together(
                [_norm(p.detach() - before[p]) for p in parameters], block
            )
    return moved


def _norms(matrices: Mapping[Block, Tensor | None] | Mapping[Block, Tensor]) -> dict[str, Tensor]:
    return {
        block.name: _norm(matrix)
        for block, matrix in matrices.items()
        if matrix is not None and tuple(matrix.shape) == tuple(block.shape)
    }


def _weight(block: Block) -> Tensor | None:
    """Return the norm of a block's parameters; None if this rank has only parts of them."""
    if not _is_whole(block):
        return None
    return _together([_norm(p.detach()) for p in block.parameters.values()], block)


def _together(norms: Sequence[Tensor], block: Block) -> Tensor:
    return _norm(torch.stack([norm.to(block.device) for norm in norms]))


def _is_whole(block: Block) -> bool:
    """Return whether this rank has all elements of a block's parameters."""
    parameters = list(block.parameters.values())
    groups, out, into = block.shape
    size = sum(parameter.numel() for parameter in parameters)
    return size == groups * out * into and not any(map(sharding.is_sharded, parameters))


def _norm(tensor: Tensor) -> Tensor:
    """Return the Frobenius norm, in float64: squares of float32 may be out of range."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm
