"""The seam to `soframe.parallel`: parameters that are sharded over ranks.

No other file of the core refers to DTensor or DeepSpeed. A file of `soframe.parallel` is imported
only once the package that it serves is in `sys.modules`; until then each function here returns its
result for plain PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from typing import Any

from torch import Tensor, nn

_SERVED = {
    "torch.distributed.tensor": "dtensors",
    "torch.distributed.fsdp": "fully_shard",
    "deepspeed": "deepspeed",
}
"""Package -> the file of `soframe.parallel` that serves it."""

MARKS = ("_fsdp_flattened", "ds_id", "_hp_mapping")
"""Attributes of parameters in flat buffers of FSDP1, of ZeRO stage 3, and of ZeRO 1 and 2."""

_import = cache(import_module)


def met(package: str) -> Any:
    """Return the file of `soframe.parallel` for a package, or None if that is not imported."""
    if package not in sys.modules:
        return None
    return _import(f"soframe.parallel.{_SERVED[package]}")


# -- tensors of calls ------------------------------------------------------------------------------


def is_distributed(tensor: object) -> bool:
    """Return whether a tensor is a DTensor."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    dtensors = met("torch.distributed.tensor")
    return dtensors is not None and isinstance(tensor, dtensors.DTensor)


def is_cut(tensor: Tensor) -> bool:
    """Return whether this rank has a part of a tensor only."""
    return is_distributed(tensor) and bool(met("torch.distributed.tensor").is_cut(tensor))


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor of a DTensor, which shares its memory; any other as it is."""
    if not is_distributed(tensor):
        return tensor
    part: Tensor = met("torch.distributed.tensor").local(tensor)
    return part


def whole(tensor: Tensor, *, read: bool = True) -> Tensor:
    """Return the full tensor of a DTensor, by a collective unless its values are not to be read."""
    if type(tensor) is Tensor or (dtensors := met("torch.distributed.tensor")) is None:
        return tensor
    full: Tensor = dtensors.whole(tensor, read=read)
    return full


def stands_for(now: object, registered: nn.Parameter, model: nn.Module | None) -> bool:
    """Return whether ``now`` was gathered, or cut, from the parameter that was registered."""
    dtensors = met("torch.distributed.tensor")
    return dtensors is not None and bool(dtensors.stands_for(now, registered, model))


# -- parameters ------------------------------------------------------------------------------------


def zero_count(parameters: Iterable[nn.Parameter]) -> int:
    """Return how many gradients DeepSpeed's ZeRO keeps."""
    if "deepspeed" not in sys.modules:
        return 0
    return sum(not p.__dict__.keys().isdisjoint(MARKS[1:]) for p in parameters)


def shaped(parameters: Iterable[nn.Parameter | None]) -> AbstractContextManager[None]:
    """Return a context in which parameters without elements (ZeRO stage 3) have their shapes."""
    if "deepspeed" not in sys.modules:
        return nullcontext()
    context: AbstractContextManager[None] = met("deepspeed").shaped(parameters)
    return context


def is_sharded(parameter: nn.Parameter) -> bool:
    """Return whether a parameter's elements are not all in a plain tensor on this rank."""
    return is_distributed(parameter) or "ds_id" in parameter.__dict__


# -- models ----------------------------------------------------------------------------------------


def sharded_modules(model: nn.Module) -> list[Any]:
    """Return the modules of a model that fully_shard was called on."""
    fully_shard = met("torch.distributed.fsdp")
    return [] if fully_shard is None else fully_shard.units(model)


def gathered(modules: Iterable[Any]) -> Iterator[None]:
    """Gather the parameters of one of `sharded_modules` after the other; every rank must call."""
    for module in modules:
        module.unshard()
        yield
        module.reshard()


def reshard(modules: Iterable[Any]) -> None:
    """Free the gathered parameters of `sharded_modules`: a forward pass alone leaves them."""
    for module in modules:
        module.reshard()


def copies(model: nn.Module) -> int:
    """Return the number of ranks that have each batch together, by tensor-parallel plans."""
    if "torch.distributed.tensor" not in sys.modules:
        return 1
    number: int = _import("soframe.parallel.tensor_parallel").copies(model)
    return number


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class, as it was before fully_shard changed it."""
    fully_shard = met("torch.distributed.fsdp")
    name: str = type(module).__name__ if fully_shard is None else fully_shard.class_name(module)
    return name


# -- refusals --------------------------------------------------------------------------------------


def _refusals() -> Any:
    return _import("soframe.parallel.refusals")


def require_model(
    model: nn.Module, named: Iterable[tuple[str, nn.Parameter]], ranks: Sequence[int]
) -> None:
    """Raise a ValueError if fully_shard or plans have changed a model in an unsupported way."""
    if "torch.distributed.tensor" in sys.modules:
        _refusals().require_model(model, any(is_distributed(p) for _, p in named), ranks)


def require_served(parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Raise a ValueError if the gradient of a named parameter can neither be read nor written."""
    for name, parameter in parameters:
        is_marked = not parameter.__dict__.keys().isdisjoint(MARKS)
        if is_marked or is_distributed(parameter):
            _refusals().require_served(name, parameter)


def require_whole(parameters: Iterable[tuple[str, nn.Parameter]], what: str) -> None:
    """Raise a ValueError if a named parameter is sharded, and ``what`` needs all of it."""
    for name, parameter in parameters:
        if is_distributed(parameter) or zero_count([parameter]):
            _refusals().refuse_sharded(name, parameter, what)


def require_own_step(parameters: Iterable[nn.Parameter]) -> None:
    """Raise a ValueError if DeepSpeed moves parameters that a ``soframe.Optimizer`` moves."""
    if zero_count(parameters):
        _refusals().refuse_own_step()


def refused_together(model: nn.Module, blocks: Any, placement: Any, *, draws: bool) -> str | None:
    """Return an error if ranks of a plan draw their own targets or take no statistics, or None."""
    if "torch.distributed.tensor" not in sys.modules:
        return None
    why: str | None = _refusals().refused_together(model, blocks, placement, draws=draws)
    return why
