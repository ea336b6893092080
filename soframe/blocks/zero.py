"""What DeepSpeed's ZeRO makes of gradients in stages 1 and 2: whole parameters, gradients in parts.

DeepSpeed lays the parameters of a param group out in one flat buffer, which it cuts into as many
equal partitions as there are ranks. Every rank keeps all parameters. Of the averaged gradients it
has those of its partition, from the backward pass that ends a step until ``engine.step()``; then
``.grad`` is None, and in between it is this rank's own. The optimizer has a flat copy of the
partition in the place of parameters. No other file of soframe knows.

From a parameter no way leads to the optimizer that keeps its gradient. It is looked for among the
objects of the process, when a model is registered.

Nothing of this is imported where nobody uses it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from soframe.specs import Shards

MARK = "_hp_mapping"
"""What DeepSpeed notes of a parameter of which it keeps the gradient; None on ranks without any."""
_MODULE = "deepspeed.runtime.zero.stage_1_and_2"
_FULLY_SHARD = "shard the model by torch.distributed.fsdp.fully_shard"


def is_marked(parameter: nn.Parameter) -> bool:
    """Return whether DeepSpeed has the gradient of a parameter in a buffer of its own.

    Args:
        parameter: The parameter.
    """
    return MARK in parameter.__dict__


def count(parameters: Iterable[nn.Parameter]) -> int:
    """Return of how many parameters DeepSpeed has the gradients.

    Args:
        parameters: The parameters.
    """
    # Not imported: who does not use it need not look.
    return sum(map(is_marked, parameters)) if _MODULE in sys.modules else 0


@dataclass(frozen=True)
class _Place:
    """Where a parameter's gradient is.

    Attributes:
        group: The param group.
        ranges: For each partition the first of its elements that is there, and the one after the
            last; equal where there is none.
        own: This rank's partition.
        entry: Where it is in the list of what this rank has of the group; None if it is not there.
    """

    group: int
    ranges: tuple[tuple[int, int], ...]
    own: int
    entry: int | None


class Partitions:
    """The averaged gradients of a ZeRO optimizer, of which this rank has a partition.

    Args:
        optimizer: DeepSpeed's, of stage 1 or 2.

    Raises:
        ValueError: If it keeps them in a way that is not served.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        if (why := _unserved(optimizer)) is not None:
            raise ValueError(why)
        self._places: dict[nn.Parameter, _Place] = {}
        for group in range(len(optimizer.bit16_groups)):
            self._lay_out(group)

    def _lay_out(self, group: int) -> None:
        optimizer = self._optimizer
        size = int(optimizer.partition_size[group])
        own = torch.distributed.get_rank(optimizer.real_dp_process_group[group])
        starts = optimizer.grad_start_offset[group]
        offsets = optimizer.grad_partition_insertion_offset[group]
        entries: dict[nn.Parameter, int] = {}
        filled = number = 0
        for parameter in optimizer.params_in_partition[group]:
            key = optimizer.get_param_id(parameter)
            offset = int(offsets[own][key])
            number += offset > filled  # what fills the gap has an entry, too
            entries[parameter] = number
            filled = offset + min(parameter.numel() - int(starts[own][key]), size - offset)
            number += 1
        for parameter in optimizer.bit16_groups[group]:
            key = optimizer.get_param_id(parameter)
            ranges = []
            for partition in range(len(starts)):
                start = stop = 0
                if key in starts[partition]:
                    start = int(starts[partition][key])
                    room = size - int(offsets[partition][key])
                    stop = min(parameter.numel(), start + room)
                ranges.append((start, stop))
            self._places[parameter] = _Place(group, tuple(ranges), own, entries.get(parameter))

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._places

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._places)

    @property
    def _averaged(self) -> Mapping[int, Sequence[Tensor] | None]:
        averaged: Mapping[int, Sequence[Tensor] | None] = self._optimizer.averaged_gradients
        return averaged

    def groups(self, optimizer: object) -> list[list[nn.Parameter]] | None:
        """Return the parameters of each param group of an optimizer.

        Args:
            optimizer: DeepSpeed's optimizer, the one that it was given, or what wraps one of them.

        Returns:
            None where it is another one.
        """
        while optimizer is not None:
            if optimizer is self._optimizer or optimizer is self._optimizer.optimizer:
                return [list(group) for group in self._optimizer.bit16_groups]
            optimizer = getattr(optimizer, "optimizer", None)
        return None

    def incomplete(self) -> str | None:
        """Return why the gradients of a step are not there, and the remedy; None if they are."""
        if not _is_in_use(self._optimizer):
            return (
                "deepspeed.initialize was called again since this model was registered: close the "
                "Preconditioner, and build another one"
            )
        # Where gradients are added up in another dtype they are there before, and not complete.
        boundary = getattr(self._optimizer, "is_gradient_accumulation_boundary", True)
        ready = boundary() if callable(boundary) else boundary
        groups = {place.group for place in self._places.values()}
        if ready and all(self._averaged.get(group) is not None for group in groups):
            return None
        return (
            "DeepSpeed's ZeRO has no averaged gradients now: it has them after the last backward "
            "pass of a step, until engine.step(). Call step() between engine.backward(loss) and "
            "engine.step(), if engine.is_gradient_accumulation_boundary(), as "
            "soframe.integrations.deepspeed.DeepSpeedPreconditioner does"
        )

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        """Return this rank's part of a gradient.

        Args:
            parameter: The parameter.

        Returns:
            A flat view of the memory in which it lies; None where there is none.
        """
        place = self._places[parameter]
        entries = self._averaged.get(place.group)
        if entries is None:
            return None
        if place.entry is None:
            return parameter.detach().new_empty(0)
        part = entries[place.entry].detach().view(-1)
        start, stop = place.ranges[place.own]
        assert part.numel() == stop - start, "DeepSpeed keeps gradients in another order"
        return part

    def put(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Overwrite this rank's part of a gradient.

        Args:
            parameter: The parameter.
            gradient: The part, flat; None for zeros, since DeepSpeed takes a step along all.

        Raises:
            RuntimeError: If there are no gradients now.
        """
        part = self.read(parameter)
        if part is None:
            if gradient is None:
                return
            raise RuntimeError("DeepSpeed's ZeRO has no averaged gradients now to overwrite")
        part.copy_(torch.zeros_like(part) if gradient is None else gradient)

    def local(self, parameter: nn.Parameter) -> Tensor:
        """Return the elements of a parameter of which this rank has the gradient.

        Args:
            parameter: The parameter.

        Returns:
            A flat view.
        """
        place = self._places[parameter]
        start, stop = place.ranges[place.own]
        return parameter.detach().view(-1)[start:stop]

    def shards(self, parameter: nn.Parameter, ranks: Sequence[int]) -> Shards:
        """Return which elements of a gradient each rank has.

        Args:
            parameter: The parameter.
            ranks: The global ranks of the group that a preconditioner works in.

        Returns:
            The parts, of the flat gradient.

        Raises:
            ValueError: If it is shared out over other ranks.
        """
        place = self._places[parameter]
        group = self._optimizer.real_dp_process_group[place.group]
        others = torch.distributed.get_process_group_ranks(group)
        if sorted(others) != sorted(ranks):
            raise ValueError(
                f"DeepSpeed shares its gradient out over the ranks {others}, and the "
                f"preconditioner works on the ranks {list(ranks)}: let both have the same"
            )
        return Shards(
            shape=(parameter.numel(),),
            dim=0,
            ranges=tuple(place.ranges[others.index(rank)] for rank in ranks),
            copies=(0,) * len(ranks),
            dtype=str(self._dtype(parameter)).removeprefix("torch."),
        )

    def _dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Return a dtype that holds a parameter's gradient."""
        own = getattr(self._optimizer, "gradient_accumulation_dtype", parameter.dtype)
        return torch.promote_types(parameter.dtype, own)


def find(
    named: Sequence[tuple[str, nn.Parameter]], known: Mapping[nn.Parameter, Partitions]
) -> dict[nn.Parameter, Partitions]:
    """Find who has the gradients of parameters.

    Args:
        named: The parameters, with their names.
        known: What is known of some of them.

    Returns:
        What there is to know beside that; nothing of parameters that ZeRO does not have.

    Raises:
        ValueError: If ZeRO has some in a way that is not served.
    """
    module: Any = sys.modules.get(_MODULE)
    if module is None or all(p in known for _, p in named if is_marked(p)):
        return {}
    kind = module.DeepSpeedZeroOptimizer
    found: dict[nn.Parameter, Partitions] = {}
    for one in [each for each in gc.get_objects() if issubclass(type(each), kind)]:
        if not _is_in_use(one):
            continue
        own = {id(p) for group in one.bit16_groups for p in group}
        name = next((n for n, p in named if id(p) in own), None)
        if name is None:
            continue
        try:
            partitions = Partitions(one)
        except ValueError as error:
            raise ValueError(f"the parameter {name} belongs to DeepSpeed's ZeRO, {error}") from None
        found.update(dict.fromkeys(partitions, partitions))
    return found


def _is_in_use(optimizer: Any) -> bool:
    """Return whether parameters belong to a ZeRO optimizer still."""
    mappings = (p.__dict__.get(MARK) for group in optimizer.bit16_groups for p in group)
    dicts = [mapping.gradient_dict for mapping in mappings if mapping is not None]
    # A rank of which the partition is all padding has none, nor ever had.
    return all(each is optimizer.averaged_gradients for each in dicts)


def _unserved(optimizer: Any) -> str | None:
    """Return why gradients of a ZeRO optimizer cannot be served, and the remedy; None if they can.

    Args:
        optimizer: DeepSpeed's.
    """
    dtypes = {p.dtype for group in optimizer.bit16_groups for p in group}
    reasons = {
        "which keeps gradients in the host's memory (offload_optimizer): leave offload_optimizer "
        "out": optimizer.cpu_offload or getattr(optimizer, "zenflow", False),
        f"which has parameters in {', '.join(sorted(map(str, dtypes)))}, where it scales losses, "
        f"or rounds: train in float32, or by bf16 or torch_autocast of DeepSpeed's settings in "
        f"bfloat16": not dtypes <= {torch.float32, torch.bfloat16},
        "which scales losses: leave the loss scale at 1": (
            optimizer.loss_scale != 1
            or getattr(optimizer, "torch_autocast_gradscaler", None) is not None
        ),
        "with experts over ranks (MoE), whose gradients are averaged over some of them: train "
        "without the preconditioner": optimizer.has_moe_layers,
        f"with tensor or sequence parallelism, where a rank sees a part of each sample: "
        f"{_FULLY_SHARD}": (
            optimizer.model_parallel_world_size > 1
            or getattr(optimizer, "sequence_parallel_size", 1) > 1
        ),
        "which adds gradients up over ranks and does not average them: leave gradient_average "
        "on": not optimizer.gradient_average,
        "which orthogonalises gradients before they are there (Muon): use another optimizer, or "
        f"soframe.Optimizer, and {_FULLY_SHARD}": any(
            getattr(p, "use_muon", False) for group in optimizer.bit16_groups for p in group
        ),
    }
    return next((why for why, holds in reasons.items() if holds), None)
