"""DeepSpeed's ZeRO: a rank holds ranges of averaged gradients, and in stage 3 of parameters.

Stages 1 and 2 lay the parameters of a param group out in one flat buffer, split into one equal
partition per rank. Stage 3 splits each parameter by itself, and a parameter has elements only while
its module runs. Averaged gradients exist from the backward pass that ends a step until
``engine.step()``; ``.grad`` is None then. The optimizer holds flat copies of parts.

Stage 3 stores its optimizer on each parameter. The optimizer of stages 1 and 2 is found through the
engine or the optimizer passed to a preconditioner.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from soframe.blocks.home import GradientHome, PlainGrad
from soframe.specs import Shards

MARK = "_hp_mapping"
"""The attribute that stages 1 and 2 set on a parameter; None on ranks without any part of it."""
_OWNER = "_z3_optimizer"
"""The attribute of a parameter with stage 3's optimizer, once an engine exists."""
_FULLY_SHARD = "shard the model by torch.distributed.fsdp.fully_shard"
_TENSOR_PARALLELISM = (
    f"with tensor parallelism, where a rank sees a part of each sample: {_FULLY_SHARD}"
)


@contextmanager
def shaped(parameters: Iterable[nn.Parameter | None]) -> Iterator[None]:
    """Give parameters without elements their shapes, without memory; each element is NaN."""
    changed: list[tuple[nn.Parameter, Tensor]] = []
    for parameter in parameters:
        if parameter is not None and "ds_id" in parameter.__dict__ and parameter.numel() == 0:
            part: Any = parameter
            changed.append((parameter, parameter.data))
            parameter.data = parameter.data.new_full((), float("nan")).expand(part.ds_shape)
    try:
        yield
    finally:
        for parameter, empty in changed:
            parameter.data = empty


class _Place(NamedTuple):
    """The location of a parameter's gradient."""

    group: int  # the key of its list in ``averaged_gradients``
    entry: int | None  # its index in that list; None if this rank has no part of it
    rank: int  # this rank's number
    ranges: tuple[tuple[int, int], ...]  # of each rank's elements, perhaps empty


class Partitions(GradientHome):
    """The averaged gradients of a ZeRO optimizer: flat parts on each rank."""

    groups_name: str
    """The optimizer's attribute with its parameters, by gradient list."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._parameters: list[list[nn.Parameter]] = getattr(optimizer, self.groups_name)
        why = next(self._unserved(), None)
        if why is not None:
            raise ValueError(why)
        self.places = self._lay_out()

    @abstractmethod
    def _process_group(self, group: int) -> Any:
        """Return the ranks that partition a list."""

    @abstractmethod
    def _lay_out(self) -> dict[nn.Parameter, _Place]:
        """Return the location of each parameter's gradient."""

    def _param_group(self, group: int) -> int:
        """Return the param group of the parameters of a list."""
        return group

    @abstractmethod
    def _in_use(self) -> bool:
        """Return whether the parameters still belong to the optimizer."""

    def _unserved(self) -> Iterator[str]:
        """Yield the reasons against support, with remedies."""
        optimizer = self._optimizer
        parameters = list(itertools.chain.from_iterable(self._parameters))
        offloads = ("cpu_offload", "offload_optimizer", "zenflow")
        if any(getattr(optimizer, name, False) for name in offloads):
            yield (
                "which keeps gradients in the host's memory (offload_optimizer): leave "
                "offload_optimizer out"
            )
        dtypes = {parameter.dtype for parameter in parameters}
        if not dtypes <= {torch.float32, torch.bfloat16}:
            yield (
                f"which has parameters in {', '.join(sorted(map(str, dtypes)))}, where it scales "
                f"losses, or rounds: train in float32, or by bf16 or torch_autocast of DeepSpeed's "
                f"settings in bfloat16"
            )
        scaler = getattr(optimizer, "torch_autocast_gradscaler", None)
        if optimizer.loss_scale != 1 or scaler is not None:
            yield "which scales losses: leave the loss scale at 1"
        if getattr(optimizer, "sequence_parallel_size", 1) > 1:
            yield (
                "with sequence parallelism, where a rank sees a part of each sample: "
                + _FULLY_SHARD
            )
        if any(getattr(parameter, "use_muon", False) for parameter in parameters):
            yield (
                f"which orthogonalises gradients before they are there (Muon): use another "
                f"optimizer, or soframe.Optimizer, and {_FULLY_SHARD}"
            )

    def groups(self, optimizer: Any) -> list[Sequence[nn.Parameter]]:
        while optimizer is not None:
            if optimizer is self._optimizer or optimizer is self._optimizer.optimizer:
                groups: list[list[nn.Parameter]] = [[] for _ in self._optimizer.param_groups]
                for parameter, place in self.places.items():
                    groups[self._param_group(place.group)].append(parameter)
                return list(groups)
            optimizer = getattr(optimizer, "optimizer", None)
        return []

    def incomplete(self, parameters: Iterable[nn.Parameter]) -> str | None:
        if not self._in_use():
            return (
                "deepspeed.initialize was called again since this model was registered: close the "
                "Preconditioner, and build another one"
            )
        # Gradients accumulated in place exist earlier, but incomplete.
        boundary = getattr(self._optimizer, "is_gradient_accumulation_boundary", True)
        ready = boundary() if callable(boundary) else boundary
        averaged = self._optimizer.averaged_gradients
        are_here = all(averaged.get(place.group) is not None for place in self.places.values())
        if ready and are_here:
            return None
        return (
            "DeepSpeed's ZeRO has no averaged gradients now: it has them after the last backward "
            "pass of a step, until engine.step(). Call step() between engine.backward(loss) and "
            "engine.step(), if engine.is_gradient_accumulation_boundary(), as "
            "soframe.integrations.deepspeed.DeepSpeedPreconditioner does"
        )

    def read(self, parameter: nn.Parameter) -> Tensor | None:
        place = self.places[parameter]
        entries = self._optimizer.averaged_gradients.get(place.group)
        if entries is None:
            return None
        if place.entry is None:
            return parameter.detach().new_empty(0)
        start, stop = place.ranges[place.rank]
        part: Tensor = entries[place.entry].detach().view(-1)
        return part[: stop - start]

    def put(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        part = self.read(parameter)
        if part is None:
            if gradient is None:
                return
            raise RuntimeError("DeepSpeed's ZeRO has no averaged gradients now to overwrite")
        if gradient is None:
            part.zero_()  # DeepSpeed updates all parameters
        else:
            part.copy_(gradient)

    def shards(self, parameter: nn.Parameter, ranks: Sequence[int]) -> Shards:
        place = self.places[parameter]
        group_ranks = torch.distributed.get_process_group_ranks(self._process_group(place.group))
        if sorted(group_ranks) != sorted(ranks):
            raise ValueError(
                f"DeepSpeed distributes its gradient over the ranks {group_ranks}, and the "
                f"preconditioner works on the ranks {list(ranks)}: let both have the same"
            )
        accumulated = getattr(self._optimizer, "gradient_accumulation_dtype", parameter.dtype)
        dtype = torch.promote_types(parameter.dtype, accumulated)
        return Shards(
            shape=(max(stop for _, stop in place.ranges),),
            dim=0,
            ranges=tuple(place.ranges[group_ranks.index(rank)] for rank in ranks),
            copies=tuple(itertools.repeat(0, len(ranks))),
            dtype=str(dtype).removeprefix("torch."),
        )


class Flat(Partitions):
    """Stages 1 and 2: a range of the flat buffer of each param group."""

    groups_name = "bit16_groups"

    def _process_group(self, group: int) -> Any:
        return self._optimizer.real_dp_process_group[group]

    def _unserved(self) -> Iterator[str]:
        yield from super()._unserved()
        optimizer = self._optimizer
        if optimizer.model_parallel_world_size > 1:
            yield _TENSOR_PARALLELISM
        if optimizer.has_moe_layers:
            yield (
                "with experts over ranks (MoE), whose gradients are averaged over some of them: "
                "train without the preconditioner"
            )
        if not optimizer.gradient_average:
            yield (
                "which adds gradients up over ranks and does not average them: leave "
                "gradient_average on"
            )

    def _lay_out(self) -> dict[nn.Parameter, _Place]:
        # From the tables by which DeepSpeed reduces.
        optimizer, places = self._optimizer, {}
        for group, parameters in enumerate(self._parameters):
            size = int(optimizer.partition_size[group])
            rank = torch.distributed.get_rank(self._process_group(group))
            starts = optimizer.grad_start_offset[group]
            offsets = optimizer.grad_partition_insertion_offset[group]
            entries: dict[nn.Parameter, int] = {}
            filled = number = 0
            for parameter in optimizer.params_in_partition[group]:
                key = optimizer.get_param_id(parameter)
                offset = int(offsets[rank][key])
                if offset > filled:  # padding in the gap has an entry, too
                    number += 1
                entries[parameter] = number
                filled = offset + min(parameter.numel() - int(starts[rank][key]), size - offset)
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
                places[parameter] = _Place(group, entries.get(parameter), rank, tuple(ranges))
        return places

    def local(self, parameter: nn.Parameter) -> Tensor:
        place = self.places[parameter]
        start, stop = place.ranges[place.rank]
        return parameter.detach().view(-1)[start:stop]

    def _in_use(self) -> bool:
        # A rank whose partition is all padding never has gradients.
        for parameter in itertools.chain.from_iterable(self._parameters):
            mapping = parameter.__dict__.get(MARK)
            if mapping is None:
                continue
            if mapping.gradient_dict is not self._optimizer.averaged_gradients:
                return False
        return True


class Shared(Partitions):
    """Stage 3: a range of each parameter, equal but for the last ranks'."""

    groups_name = "fp16_groups"

    def _process_group(self, group: int) -> Any:
        return self._optimizer.sub_group_process_groups[group]

    def _param_group(self, group: int) -> int:
        param_group: int = self._optimizer.sub_group_to_group_id[group]
        return param_group

    def _unserved(self) -> Iterator[str]:
        yield from super()._unserved()
        optimizer = self._optimizer
        if getattr(optimizer, "model_parallel_group", None) is not None:
            yield _TENSOR_PARALLELISM
        if optimizer.offload_param:
            yield "which keeps parameters elsewhere (offload_param): leave offload_param out"
        if getattr(optimizer, "all2all_process_group", None) is not None:
            yield (
                "which sends gradients in few bits (zero_quantized_gradients of ZeRO++): leave "
                "zero_quantized_gradients out"
            )

    def _lay_out(self) -> dict[nn.Parameter, _Place]:
        places = {}
        for group, parameters in enumerate(self._parameters):
            rank_of_group = torch.distributed.get_rank(self._process_group(group))
            ranks = torch.distributed.get_world_size(self._process_group(group))
            for entry, parameter in enumerate(parameters):
                part: Any = parameter
                size, numel = part.ds_tensor.ds_numel, part.ds_numel
                cuts = [min(rank * size, numel) for rank in range(ranks + 1)]
                places[parameter] = _Place(group, entry, rank_of_group, tuple(pairwise(cuts)))
        return places

    def local(self, parameter: nn.Parameter) -> Tensor:
        place = self.places[parameter]
        start, stop = place.ranges[place.rank]
        part: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]  # DeepSpeed's
        return part.detach().view(-1)[: stop - start]

    def _in_use(self) -> bool:
        return all(p.__dict__.get(_OWNER) is self._optimizer for p in self.places)


class LeftOut(PlainGrad):
    """Parameters outside the ZeRO optimizer, which may not be trained."""

    def shards(self, parameter: nn.Parameter, ranks: Sequence[int]) -> Shards | None:
        raise ValueError(
            "it is trained, and not in the optimizer that deepspeed.initialize was given, so "
            "its gradient is not averaged: give it to the optimizer, freeze it before "
            "deepspeed.initialize, or skip the module"
        )


def homes(
    named: Sequence[tuple[str, nn.Parameter]],
    known: Mapping[nn.Parameter, GradientHome],
    sources: Sequence[object],
) -> dict[nn.Parameter, GradientHome]:
    """Return the gradient storage of a model's parameters; none without a gradient in ZeRO."""
    # `known` has the storage of some of them; `sources` are optimizers, engines and their wrappers,
    # through which the optimizer of stages 1 and 2 is found.
    unknown = {p: name for name, p in named if p not in known}
    storages: dict[nn.Parameter, GradientHome] = {}
    for optimizer, kind in _optimizers(unknown, sources).items():
        groups = getattr(optimizer, kind.groups_name)
        names = [unknown[p] for p in itertools.chain.from_iterable(groups) if p in unknown]
        if not names:
            continue
        try:
            partitions = kind(optimizer)
        except ValueError as error:
            what = f"the parameter {names[0]} belongs to DeepSpeed's ZeRO"
            raise ValueError(f"{what}, {error}") from None
        storages.update(dict.fromkeys(partitions.places, partitions))
    if storages or known:
        # Last, since the other homes take precedence for an optimizer's groups.
        left_out = LeftOut()
        for parameter in unknown:
            if parameter not in storages and _is_left_out(parameter):
                storages[parameter] = left_out
    return storages


def _optimizers(
    parameters: Iterable[nn.Parameter], sources: Sequence[object]
) -> dict[Any, type[Partitions]]:
    """Return ZeRO's optimizers of some parameters, with the kind of their partitions."""
    kinds: dict[Any, type[Partitions]] = {}
    are_flat = False
    for parameter in parameters:
        owner = parameter.__dict__.get(_OWNER)
        if owner is not None:
            kinds[owner] = Shared
        are_flat |= MARK in parameter.__dict__
    if are_flat:
        flat = [source for source in _chained(sources) if hasattr(source, Flat.groups_name)]
        kinds |= dict.fromkeys(flat, Flat)
    return kinds


def _is_left_out(parameter: nn.Parameter) -> bool:
    """Return whether a parameter's model is ZeRO's, but not its gradient."""
    marks = parameter.__dict__
    return MARK not in marks and ("ds_id" not in marks or _OWNER in marks)


def _chained(sources: Sequence[Any]) -> Iterator[Any]:
    """Yield objects, the ``optimizer`` of each, and so on."""
    for source in sources:
        seen: dict[int, Any] = {}
        wrapped = source
        while wrapped is not None and id(wrapped) not in seen:
            yield wrapped
            seen[id(wrapped)] = wrapped
            wrapped = getattr(wrapped, "optimizer", None)
