"""Adam by torch's fused kernel: moments, weight decay and step in one pass over the memory.

A `soframe.Optimizer` moves the weights of the stacks that this serves by itself: their gradients
are neither gathered nor overwritten. The plain twin is `soframe.methods.AdamW` with
`soframe.step.moving.descend`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from soframe.blocks.block import Block, Stack
from soframe.blocks.home import PlainGrad
from soframe.comm.base import Backend
from soframe.methods.adam import AdamW
from soframe.step.moving import Move

_KIND = attrgetter("dtype", "layout")


def serves(stack: Stack, backend: Backend) -> bool:
    """Return whether a stack's method is Adam, and every rank makes its whole update."""
    like = stack.like
    if type(like.method) is not AdamW or type(like.home) is not PlainGrad:
        return False
    if like.shards or like.dtype != like.state_dtype:
        return False
    if like.device.type not in ("cpu", "cuda"):
        return False
    if not all(_is_plain(parameter, like.dtype) for parameter in stack.parameters):
        return False
    if set(stack.place.gradient_workers) != set(range(backend.world_size)):
        return False
    # The kernel reads memory from end to end: moments are to lie as parameters do.
    parts = stack.parts(torch.empty(stack.shape_of(stack.all), dtype=like.dtype, device="cpu"))
    return parts is not None and all(map(Tensor.is_contiguous, parts))


def _is_plain(parameter: nn.Parameter, dtype: torch.dtype) -> bool:
    """Return whether a parameter is trained, dense, with all memory here, and of a dtype."""
    has_parts = is_traceable_wrapper_subclass(parameter)  # elsewhere, as DTensors
    is_known = parameter.dtype == dtype and not has_parts
    return is_known and parameter.requires_grad and parameter.is_contiguous()


@dataclass(eq=False)
class Batch:
    """Parameters that one call of the kernel moves, with views of their moments."""

    group: int  # the number of their param group
    decays: bool  # whether they decay
    parameters: list[nn.Parameter] = field(default_factory=list)
    means: list[Tensor] = field(default_factory=list)
    squares: list[Tensor] = field(default_factory=list)


class Adam:
    """Moves the weights of a stack by the kernel, see `serves`."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._group_of: Mapping[int, int] = {}  # the mapping of the last step, see `move`
        self._groups: set[int] = set()  # the numbers of the param groups of the stack in it
        # The blocks that are alike with their batches; and what these were made of: the mapping
        # and the moments by identity, the blocks that are alike and the decays by value.
        self._batches: list[tuple[list[Block], list[Batch]]] = []
        self._sources: tuple[object, ...] = ()
        self._arrangement: tuple[object, ...] = ()

    def complete(self, group_of: Mapping[int, int], moves: Sequence[Move]) -> bool:
        """Return whether all parameters have plain gradients, and moves of the kernel."""
        stack = self._stack
        if group_of is not self._group_of:
            self._group_of = group_of
            self._groups = {group_of.get(id(parameter), -1) for parameter in stack.parameters}
        # Before groups follow a changed model a parameter has none.
        if -1 in self._groups or not all(moves[number].is_plain for number in self._groups):
            return False
        gradients = stack.like.home.of(stack.parameters)
        if len(gradients) < len(stack.parameters):
            return False
        is_plain = set(map(_KIND, gradients)) == {(stack.like.dtype, torch.strided)}
        return is_plain and all(map(Tensor.is_contiguous, chain(gradients, stack.parameters)))

    def move(
        self, group_of: Mapping[int, int], moves: Sequence[Move], bad: Tensor | None = None
    ) -> None:
        """Move the weights unless ``bad``, a scalar on the device, is one; count the updates.

        ``group_of`` has the number of the param group of each parameter, by identity.
        """
        stack = self._stack
        alike = stack.alike(stack.all)
        for members in alike:
            if not stack.blocks[members[0]].record.updates:
                stack.set_state(members, stack.state_of(members))  # zeros
        # At a decay of zero vectors and matrices are one batch.
        decays = [move.decay_vectors or move.weight_decay == 0 for move in moves]
        sources = (group_of, stack.state["mean"], stack.state["square"])
        are_same = all(map(is_, sources, self._sources))
        if self._arrangement != (alike, decays) or not are_same:
            self._sources, self._arrangement = sources, (alike, decays)
            self._batches = self._batch(alike, group_of, decays)
        device = stack.like.device
        for blocks, batches in self._batches:
            method = blocks[0].acting
            assert isinstance(method, AdamW)
            number = float(blocks[0].record.updates + 1)
            count = torch.full((), number, dtype=torch.float32, device=device)
            for batch in batches:
                gradients = stack.like.home.each(batch.parameters)
                _step(batch, gradients, method, moves[batch.group], count, bad)
            for block in blocks:
                block.record.updates += 1

    def _batch(
        self,
        alike: Sequence[Sequence[int]],
        group_of: Mapping[int, int],
        vectors_decay: Sequence[bool],
    ) -> list[tuple[list[Block], list[Batch]]]:
        """Return the blocks that are alike, with their parameters by group and decay."""
        stack = self._stack
        means, squares = _by_parameter(stack, "mean"), _by_parameter(stack, "square")
        batched: list[tuple[list[Block], list[Batch]]] = []
        for members in alike:
            blocks = [stack.blocks[member] for member in members]
            batches: dict[tuple[int, bool], Batch] = {}
            for block in blocks:
                for parameter in block.parameters.values():
                    group = group_of[id(parameter)]
                    decays = vectors_decay[group] or parameter.dim() > 1
                    batch = batches.setdefault((group, decays), Batch(group, decays))
                    batch.parameters.append(parameter)
                    batch.means.append(means[id(parameter)])
                    batch.squares.append(squares[id(parameter)])
            batched.append((blocks, list(batches.values())))
        return batched


def _by_parameter(stack: Stack, name: str) -> dict[int, Tensor]:
    """Return views of a state of the stack by the identity of their parameter."""
    parts = stack.parts(stack.state[name])
    assert parts is not None
    return {id(p): part for p, part in zip(stack.parameters, parts, strict=True)}


def _step(
    batch: Batch,
    gradients: Sequence[Tensor | None],
    method: AdamW,
    move: Move,
    count: Tensor,
    bad: Tensor | None,
) -> None:
    """Call the kernel for update number ``count``; it does nothing where ``bad`` is one."""
    kernel: Any = torch._fused_adamw_
    kernel(
        batch.parameters,
        gradients,
        batch.means,
        batch.squares,
        [],
        [count] * len(batch.parameters),
        lr=move.lr,
        beta1=method.betas[0],
        beta2=method.betas[1],
        weight_decay=move.weight_decay if batch.decays else 0.0,
        eps=method.eps,
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=bad,
    )
