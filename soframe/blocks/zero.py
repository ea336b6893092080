"""What DeepSpeed's ZeRO makes of a model: gradients in parts, and in stage 3 parameters in parts.

In stages 1 and 2 every rank keeps all parameters. DeepSpeed lays those of a param group out in one
flat buffer, which it cuts into as many equal partitions as there are ranks. In stage 3 it cuts each
parameter by itself, and a parameter has no elements but while its module runs. In all of them a
rank has its part of the averaged gradients from the backward pass that ends a step until
``engine.step()``; ``.grad`` is None then, and in between it is this rank's own. The optimizer has
flat copies of parts in the place of parameters. No other file of soframe knows.

In stages 1 and 2 no way leads from a parameter to the optimizer that keeps its gradient. It is
looked for among the objects of the process, when a model is registered.

Nothing of this is imported where nobody uses it.
"""

from __future__ import annotations

import gc
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from soframe.specs import Shards

MARK = "_hp_mapping"
"""What stages 1 and 2 note of a parameter; None on ranks without any part of it."""
SHARED = "ds_id"
"""What stage 3 notes of a parameter."""
_OWNER = "_z3_optimizer"
"""And whose it is, once there is an engine."""
_FLAT = "deepspeed.runtime.zero.stage_1_and_2"
_FULLY_SHARD = "shard the model by torch.distributed.fsdp.fully_shard"


def is_marked(parameter: nn.Parameter) -> bool:
    """Return whether DeepSpeed has the gradient of a parameter in a buffer of its own.

    Args:
        parameter: The parameter.
    """
    return MARK in parameter.__dict__ or is_shared(parameter)


def is_shared(parameter: nn.Parameter) -> bool:
    """Return whether DeepSpeed has cut a parameter itself.

    Args:
        parameter: The parameter.
    """
    return SHARED in parameter.__dict__


def is_there() -> bool:
    """Return whether somebody has imported DeepSpeed: who has not need not pay for looking."""
    return "deepspeed" in sys.modules


def count(parameters: Iterable[nn.Parameter]) -> int:
    """Return of how many parameters DeepSpeed has the gradients.

    Args:
        parameters: The parameters.
    """
    # Not imported: who does not use it need not look.
    return sum(map(is_marked, parameters)) if is_there() else 0


def shaped(parameters: Iterable[nn.Parameter | None]) -> AbstractContextManager[None]:
    """Let parameters that have no elements now have their shapes meanwhile.

    They have no memory, and no values: each element is not a number.

    Args:
        parameters: The parameters; None is passed over.

    Returns:
        A context.
    """
    return _shaped(parameters) if is_there() else nullcontext()


@contextmanager
def _shaped(parameters: Iterable[nn.Parameter | None]) -> Iterator[None]:
    changed: list[tuple[nn.Parameter, Tensor]] = []
    for parameter in parameters:
        if parameter is not None and is_shared(parameter) and parameter.numel() == 0:
            shape = parameter.ds_shape  # type: ignore[attr-defined]  # DeepSpeed's
            changed.append((parameter, parameter.data))
            parameter.data = parameter.data.new_full((), float("nan")).expand(shape)
    try:
        yield
    finally:
        for parameter, nothing in changed:
            parameter.data = nothing


@dataclass(frozen=True)
class _Place:
    """Where a parameter's gradient is.

    Attributes:
        group: The list of gradients that this rank's part is in.
        entry: Where it is in that list; None if this rank has nothing of it.
        own: This rank's number.
        ranges: For each rank the first of the elements that it has, and the one after the last;
            equal where there is none.
    """

    group: int
    entry: int | None
    own: int
    ranges: tuple[tuple[int, int], ...]


class Partitions(ABC):
    """The averaged gradients of a ZeRO optimizer, of which this rank has parts.

    Args:
        optimizer: DeepSpeed's.

    Raises:
        ValueError: If it keeps them in a way that is not served.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        reasons = {**_unserved(optimizer, self._parameters()), **self._unserved()}
        if why := next((why for why, holds in reasons.items() if holds), None):
            raise ValueError(why)
        self._places = self._lay_out()

    @abstractmethod
    def _parameters(self) -> list[list[nn.Parameter]]:
        """Return the parameters by the lists that their gradients are in."""

    @abstractmethod
    def _process_group(self, group: int) -> Any:
        """Return the ranks that share a list out."""

    @abstractmethod
    def _lay_out(self) -> dict[nn.Parameter, _Place]:
        """Return where each parameter's gradient is."""

    @abstractmethod
    def _param_group(self, group: int) -> int:
        """Return the param group of the parameters of a list."""

    @abstractmethod
    def local(self, parameter: nn.Parameter) -> Tensor:
        """Return the elements of a parameter of which this rank has the gradient.

        Args:
            parameter: The parameter.

        Returns:
            A flat view.
        """

    @property
    @abstractmethod
    def in_use(self) -> bool:
        """Whether the parameters belong to the optimizer still."""

    def _unserved(self) -> dict[str, bool]:
        """Return further reasons for which it may not be served, and whether they hold."""
        return {}

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
                found: list[list[nn.Parameter]] = [[] for _ in self._optimizer.param_groups]
                for parameter, place in self._places.items():
                    found[self._param_group(place.group)].append(parameter)
                return found
            optimizer = getattr(optimizer, "optimizer", None)
        return None

    def incomplete(self) -> str | None:
        """Return why the gradients of a step are not there, and the remedy; None if they are."""
        if not self.in_use:
            return (
                "deepspeed.initialize was called again since this model was registered: close the "
                "Preconditioner, and build another one"
            )
        # Where gradients are added up in place they are there before, and not complete.
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

        Raises:
            RuntimeError: If it is shorter than it should be.
        """
        place = self._places[parameter]
        entries = self._averaged.get(place.group)
        if entries is None:
            return None
        if place.entry is None:
            return parameter.detach().new_empty(0)
        start, stop = place.ranges[place.own]
        part = entries[place.entry].detach().view(-1)
        if part.numel() < stop - start:
            raise RuntimeError(
                f"DeepSpeed has {part.numel()} averaged gradients of a parameter where "
                f"{stop - start} were expected: this version of it lays them out in a way that is "
                f"not known. {_FULLY_SHARD.capitalize()}, or use another version"
            )
        return part[: stop - start]

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
        others = torch.distributed.get_process_group_ranks(self._process_group(place.group))
        if sorted(others) != sorted(ranks):
            raise ValueError(
                f"DeepSpeed shares its gradient out over the ranks {others}, and the "
                f"preconditioner works on the ranks {list(ranks)}: let both have the same"
            )
        return Shards(
            shape=(max(stop for _, stop in place.ranges),),
            dim=0,
            ranges=tuple(place.ranges[others.index(rank)] for rank in ranks),
            copies=(0,) * len(ranks),
            dtype=str(self._dtype(parameter)).removeprefix("torch."),
        )

    def _dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Return a dtype that holds a parameter's gradient."""
        own = getattr(self._optimizer, "gradient_accumulation_dtype", parameter.dtype)
        return torch.promote_types(parameter.dtype, own)


class Flat(Partitions):
    """The gradients of stages 1 and 2: a range of the flat buffer of each param group."""

    def _parameters(self) -> list[list[nn.Parameter]]:
        groups: list[list[nn.Parameter]] = self._optimizer.bit16_groups
        return groups

    def _process_group(self, group: int) -> Any:
        return self._optimizer.real_dp_process_group[group]

    def _param_group(self, group: int) -> int:
        return group

    def _unserved(self) -> dict[str, bool]:
        optimizer = self._optimizer
        return {
            "with tensor parallelism, where a rank sees a part of each sample: "
            + _FULLY_SHARD: optimizer.model_parallel_world_size > 1,
            "with experts over ranks (MoE), whose gradients are averaged over some of them: train "
            "without the preconditioner": optimizer.has_moe_layers,
            "which adds gradients up over ranks and does not average them: leave gradient_average "
            "on": not optimizer.gradient_average,
        }

    def _lay_out(self) -> dict[nn.Parameter, _Place]:
        """Return the places, from the tables by which DeepSpeed reduces."""
        optimizer, places = self._optimizer, {}
        for group, parameters in enumerate(optimizer.bit16_groups):
            size = int(optimizer.partition_size[group])
            own = torch.distributed.get_rank(self._process_group(group))
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
            for parameter in parameters:
                key = optimizer.get_param_id(parameter)
                ranges = []
                for partition in range(len(starts)):
                    start = stop = 0
                    if key in starts[partition]:
                        start = int(starts[partition][key])
                        room = size - int(offsets[partition][key])
                        stop = min(parameter.numel(), start + room)
                    ranges.append((start, stop))
                places[parameter] = _Place(group, entries.get(parameter), own, tuple(ranges))
        return places

    def local(self, parameter: nn.Parameter) -> Tensor:
        """See `Partitions.local`."""
        place = self._places[parameter]
        start, stop = place.ranges[place.own]
        return parameter.detach().view(-1)[start:stop]

    @property
    def in_use(self) -> bool:
        """See `Partitions.in_use`."""
        return _is_in_use(self._optimizer)


class Shared(Partitions):
    """The gradients of stage 3: a range of each parameter, equal but for the last ranks'."""

    def _parameters(self) -> list[list[nn.Parameter]]:
        groups: list[list[nn.Parameter]] = self._optimizer.fp16_groups
        return groups

    def _process_group(self, group: int) -> Any:
        return self._optimizer.sub_group_process_groups[group]

    def _param_group(self, group: int) -> int:
        found: int = self._optimizer.sub_group_to_group_id[group]
        return found

    def _unserved(self) -> dict[str, bool]:
        optimizer = self._optimizer
        return {
            f"with tensor parallelism, where a rank sees a part of each sample: {_FULLY_SHARD}": (
                getattr(optimizer, "model_parallel_group", None) is not None
            ),
            "which keeps parameters elsewhere (offload_param): leave offload_param "
            "out": optimizer.offload_param,
            "which sends gradients in few bits (zero_quantized_gradients of ZeRO++): leave "
            "zero_quantized_gradients "
            "out": getattr(optimizer, "all2all_process_group", None) is not None,
        }

    def _lay_out(self) -> dict[nn.Parameter, _Place]:
        places = {}
        for group, parameters in enumerate(self._parameters()):
            own = torch.distributed.get_rank(self._process_group(group))
            ranks = torch.distributed.get_world_size(self._process_group(group))
            for entry, parameter in enumerate(parameters):
                part: Any = parameter
                size, whole = part.ds_tensor.ds_numel, part.ds_numel
                cuts = [min(rank * size, whole) for rank in range(ranks + 1)]
                places[parameter] = _Place(group, entry, own, tuple(pairwise(cuts)))
        return places

    def local(self, parameter: nn.Parameter) -> Tensor:
        """See `Partitions.local`."""
        place = self._places[parameter]
        start, stop = place.ranges[place.own]
        part: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]  # DeepSpeed's
        return part.detach().view(-1)[: stop - start]

    @property
    def in_use(self) -> bool:
        """See `Partitions.in_use`."""
        return all(p.__dict__.get(_OWNER) is self._optimizer for p in self._places)


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
    unknown = {p: name for name, p in named if is_marked(p) and p not in known}
    if not unknown:
        return {}
    owners = {id(o): o for p in unknown if (o := p.__dict__.get(_OWNER)) is not None}
    candidates: list[tuple[type[Partitions], Any, Any]] = [
        (Shared, owner, owner.fp16_groups) for owner in owners.values()
    ]
    module: Any = sys.modules.get(_FLAT)
    if module is not None and any(MARK in p.__dict__ for p in unknown):
        kind = module.DeepSpeedZeroOptimizer
        live = [each for each in gc.get_objects() if issubclass(type(each), kind)]
        candidates += [(Flat, one, one.bit16_groups) for one in live if _is_in_use(one)]
    found: dict[nn.Parameter, Partitions] = {}
    for make, optimizer, groups in candidates:
        name = next((unknown[p] for group in groups for p in group if p in unknown), None)
        if name is None:
            continue
        try:
            partitions = make(optimizer)
        except ValueError as error:
            raise ValueError(f"the parameter {name} belongs to DeepSpeed's ZeRO, {error}") from None
        found.update(dict.fromkeys(partitions, partitions))
    return found


def has_engine(parameter: nn.Parameter) -> bool:
    """Return whether DeepSpeed's stage 3 has cut a parameter, and has an engine for it.

    It need not train it, and has no gradient of it then.

    Args:
        parameter: The parameter.
    """
    return is_shared(parameter) and _OWNER in parameter.__dict__


def _is_in_use(optimizer: Any) -> bool:
    """Return whether parameters belong to an optimizer of stage 1 or 2 still."""
    mappings = (p.__dict__.get(MARK) for group in optimizer.bit16_groups for p in group)
    dicts = [mapping.gradient_dict for mapping in mappings if mapping is not None]
    # A rank of which the partition is all padding has none, nor ever had.
    return all(each is optimizer.averaged_gradients for each in dicts)


def _unserved(optimizer: Any, groups: Sequence[Sequence[nn.Parameter]]) -> dict[str, bool]:
    """Return for which reasons no stage is served, with the remedies, and whether they hold.

    Args:
        optimizer: DeepSpeed's.
        groups: Its parameters.
    """
    dtypes = {p.dtype for group in groups for p in group}
    names = ("cpu_offload", "offload_optimizer", "zenflow")
    return {
        "which keeps gradients in the host's memory (offload_optimizer): leave offload_optimizer "
        "out": any(getattr(optimizer, name, False) for name in names),
        f"which has parameters in {', '.join(sorted(map(str, dtypes)))}, where it scales losses, "
        f"or rounds: train in float32, or by bf16 or torch_autocast of DeepSpeed's settings in "
        f"bfloat16": not dtypes <= {torch.float32, torch.bfloat16},
        "which scales losses: leave the loss scale at 1": (
            optimizer.loss_scale != 1
            or getattr(optimizer, "torch_autocast_gradscaler", None) is not None
        ),
        f"with sequence parallelism, where a rank sees a part of each sample: {_FULLY_SHARD}": (
            getattr(optimizer, "sequence_parallel_size", 1) > 1
        ),
        "which orthogonalises gradients before they are there (Muon): use another optimizer, or "
        f"soframe.Optimizer, and {_FULLY_SHARD}": any(
            getattr(p, "use_muon", False) for group in groups for p in group
        ),
    }
