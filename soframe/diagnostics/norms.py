"""The norms of one step: of each block's gradient, update and weights on this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from soframe.blocks import sharding
from soframe.blocks.block import Block
from soframe.estimate.gradients import Gradients
from soframe.estimate.updates import Update


@dataclass(frozen=True)
class Norms:
    """Frobenius norms by block, scalars in float64, of blocks that are whole on this rank."""

    used: frozenset[str]  # blocks with a gradient on any rank, the same on every rank
    gradient: Mapping[str, Tensor]  # averaged, before it is preconditioned
    direction: Mapping[str, Tensor]  # as it is written, after the clips
    weight: Mapping[str, Tensor]  # before the update


def measure(blocks: Sequence[Block], gradients: Gradients, updates: Sequence[Update]) -> Norms:
    """Return the norms of a step, without waiting for the device and without communication."""
    used: set[str] = set()
    gradient_norms: dict[str, Tensor] = {}
    for stack, gradient in gradients.items():
        names = [stack.blocks[member].name for member in gradient.members]
        used.update(names)
        if gradient.matrix is not None:
            matrices = stack.split(gradient.matrix, gradient.members)
            gradient_norms.update(zip(names, map(_norm, matrices), strict=True))

    direction_norms: dict[str, Tensor] = {}
    for update in updates:
        if not update.stack.like.shards:
            for block, matrix in update.each():
                direction_norms[block.name] = _norm(matrix)

    weight_norms: dict[str, Tensor] = {}
    for block in filter(_is_whole, blocks):
        norms = [_norm(parameter.detach()) for parameter in block.parameters.values()]
        weight_norms[block.name] = _together(norms, block)
    return Norms(frozenset(used), gradient_norms, direction_norms, weight_norms)


def copies(blocks: Sequence[Block]) -> dict[nn.Parameter, Tensor]:
    """Return copies of the weights of blocks."""
    weights: dict[nn.Parameter, Tensor] = {}
    for block in blocks:
        for parameter in block.parameters.values():
            weights[parameter] = parameter.detach().clone()
    return weights


def changes(before: Mapping[nn.Parameter, Tensor], blocks: Sequence[Block]) -> dict[str, Tensor]:
    """Return the Frobenius norms of the updates of weights, by block."""
    moved: dict[str, Tensor] = {}
    for block in blocks:
        parameters = list(block.parameters.values())
        if _is_whole(block) and before.keys() >= set(parameters):
            norms = [_norm(p.detach() - before[p]) for p in parameters]
            moved[block.name] = _together(norms, block)
    return moved


def _together(norms: Sequence[Tensor], block: Block) -> Tensor:
    return _norm(torch.stack([norm.to(block.device) for norm in norms]))


def _is_whole(block: Block) -> bool:
    """Return whether this rank has all elements of a block's parameters."""
    parameters = list(block.parameters.values())
    size = sum(map(Tensor.numel, parameters))
    return size == prod(block.shape) and not any(map(sharding.is_sharded, parameters))


def _norm(tensor: Tensor) -> Tensor:
    """Return the Frobenius norm, in float64: squares in float32 may overflow."""
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm
