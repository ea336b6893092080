"""Gradients that nobody has averaged yet: to those who precondition them, and to all the others.

Where DistributedDataParallel averages gradients on every rank and one rank then preconditions and
sends its result, the average has travelled for nothing. Here each rank comes with the gradients of
its own samples. Those of a block with one gradient worker are added up on that rank alone (together
a reduce-scatter by ownership); what it sends after preconditioning (together an all-gather) is all
that the others get. The two carry what DDP's all-reduce carries. All other gradients, of parameters
without a block, of blocks with several gradient workers and of blocks that are not solved yet, are
averaged on all ranks, in fused buffers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from soframe.blocks import Block
from soframe.buckets import fill
from soframe.comm.base import Backend, Handle
from soframe.strategies.placement import BlockPlacement


class LocalGradients:
    """Averages the gradients of a model over ranks, each where it is needed.

    Args:
        model: The model.
        blocks: Its blocks.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[Block]) -> None:
        self._of_block = {block: list(block.parameters.values()) for block in blocks}
        covered = {p for own in self._of_block.values() for p in own}
        self._rest = [p for p in model.parameters() if p not in covered]

    @property
    def _parameters(self) -> list[nn.Parameter]:
        return [*(p for own in self._of_block.values() for p in own), *self._rest]

    def present(self) -> list[float]:
        """Return for every parameter whether this rank has its gradient, to be added up.

        Raises:
            TypeError: If a gradient is sparse.
        """
        own = self._parameters
        if any(p.grad is not None and p.grad.is_sparse for p in own):
            raise TypeError("gradients='local' needs dense gradients: build with sparse=False")
        return [float(p.grad is not None) for p in own]

    def average(
        self,
        backend: Backend,
        placed: Sequence[tuple[Block, BlockPlacement]],
        present: Sequence[float],
    ) -> dict[Block, Tensor | None]:
        """Average every gradient that any rank has; those that only others have count as zero.

        Args:
            backend: The backend.
            placed: All blocks.
            present: The added-up `present` of all ranks.

        Returns:
            For each block that is solved and whose gradient is present: its mean over ranks,
            ``[groups, out, in]``, on its gradient workers; None elsewhere. All other gradients are
            averaged in place.
        """
        known = set()
        for parameter, ranks in zip(self._parameters, present, strict=True):
            if ranks > 0:
                known.add(parameter)
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        everywhere: list[Tensor] = [p.grad for p in self._rest if p in known and p.grad is not None]
        sums: list[tuple[int | None, Tensor]] = [(None, gradient) for gradient in everywhere]
        found: dict[Block, Tensor | None] = {}
        for block, place in placed:
            own = [p for p in self._of_block[block] if p in known]
            if not block.solved:
                sums += [(None, p.grad) for p in own if p.grad is not None]
            elif own:
                matrix = block.gradient()
                assert matrix is not None
                workers = place.gradient_workers
                sums.append((workers[0] if len(workers) == 1 else None, matrix))
                found[block] = matrix if backend.rank in workers else None
        _add_up(backend, sums)
        return found


def _add_up(backend: Backend, sums: Sequence[tuple[int | None, Tensor]]) -> None:
    """Replace tensors by their means over ranks, on one rank each or on all (None)."""
    if backend.world_size == 1:
        return
    everyone = tuple(range(backend.world_size))
    routes = [((to, t.dtype, t.device), t.numel() * t.element_size()) for to, t in sums]
    under_way: list[tuple[Handle, Tensor, list[Tensor]]] = []
    for bucket in fill(routes):
        destination = sums[bucket[0]][0]
        tensors = [sums[index][1] for index in bucket]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        flat = flat.to(backend.wire_device(flat.device))
        if destination is None:
            handle = backend.all_reduce(flat, "gradients")
        else:
            handle = backend.reduce(flat, destination, everyone, "gradients")
        under_way.append((handle, flat, tensors if destination in (None, backend.rank) else []))
    for handle, flat, tensors in under_way:
        handle.wait()
        sizes = [tensor.numel() for tensor in tensors]
        for tensor, mean in zip(tensors, flat.split(sizes) if sizes else (), strict=True):
            tensor.copy_(mean.view_as(tensor)).div_(backend.world_size)
