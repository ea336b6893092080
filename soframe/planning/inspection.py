"""Register a user's model as a preconditioner would, without training it."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

import torch
from torch import nn

import soframe
from soframe.comm.recording import Recording
from soframe.planning.task import OnPaper
from soframe.planning.workloads import WORKLOADS


def build_model(path: str, *, meta: bool = False) -> nn.Module:
    """Import a model, or call the function that builds it: ``package.models:make_model``."""
    module_name, _, attribute = path.partition(":")
    if not module_name or not attribute:
        raise ValueError(
            f"{path!r} is neither MODULE:CALLABLE, as in package.models:make_model, nor a workload "
            f"of soframe plan: {', '.join(WORKLOADS)}"
        )
    try:
        target = attrgetter(attribute)(import_module(module_name))
    except AttributeError as error:
        raise ValueError(f"there is no {attribute!r} in module {module_name!r}") from error
    if isinstance(target, nn.Module):
        return target
    return _called(target, path, meta=meta)


def _called(function: Any, path: str, *, meta: bool) -> nn.Module:
    """Return the model that a user's function builds."""
    if not callable(function):
        raise ValueError(f"{path} is not a callable, but a {type(function).__name__}")
    try:
        with torch.device("meta") if meta else contextlib.nullcontext():
            model = function()
    except Exception as error:  # the user's code may raise any error
        raise ValueError(
            f"{path}() raised {type(error).__name__}: {error}. It is called without arguments."
        ) from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{path}() returned a {type(model).__name__}, not a torch.nn.Module")
    return model


def import_module(name: str) -> Any:
    """Import a module; as with ``python -m``, first from the working directory."""
    here = os.getcwd()  # noqa: PTH109 (sys.path holds strings)
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):  # the module itself, or a package around it
            raise ValueError(
                f"there is no module {name!r}, neither installed nor in the current folder"
            ) from error
        raise ValueError(f"module {name!r} could not be imported: {error}") from error
    except Exception as error:  # of the user's module
        raise ValueError(
            f"importing module {name!r} raised {type(error).__name__}: {error}"
        ) from error


def inspect(
    model: nn.Module, *, ranks: int, **settings: Any
) -> tuple[soframe.Report, soframe.Placement]:
    """Register a model as a preconditioner with these settings would, with simulated ranks."""
    paper = soframe.Distribution(backend=Recording(world_size=ranks))
    preconditioner = OnPaper(model, distribution=paper, kl_clip=None, **settings)
    report, placement = preconditioner.report(), preconditioner.placement
    preconditioner.close()
    return report, placement


def problem(path: str, shapes: Sequence[str] | None) -> tuple[nn.Module, list[Any] | None]:
    """Return a model, by ``MODULE:CALLABLE`` or a workload's name, and inputs of some shapes."""
    inputs = list(map(_input, shapes or ()))
    if path not in WORKLOADS:
        return build_model(path, meta=True), inputs or None
    workload = WORKLOADS[path]
    return workload.model(), inputs or list(workload.inputs(workload.batch))


def _input(text: str) -> torch.Tensor:
    sides, _, name = text.partition(":")
    dtype = getattr(torch, name or "float32", None)
    if not re.fullmatch(r"\d+(x\d+)*", sides) or not isinstance(dtype, torch.dtype):
        raise ValueError(f"{text!r} is not a shape, such as 32x3x224x224 or 8x1024:int64")
    return torch.empty([int(side) for side in sides.split("x")], dtype=dtype, device="meta")


def as_dict(report: soframe.Report, placement: soframe.Placement) -> dict[str, Any]:
    """Return the results of `inspect` as plain values."""
    blocks: dict[str, Any] = {}
    for work, block in placement.pairs:
        names = [factor.name for factor in work.factors]
        blocks[work.name] = {
            "owners": dict(zip(names, block.owners, strict=True)),
            "gradient_workers": list(block.gradient_workers),
            "sources": list(block.sources),
        }
    return {
        "strategy": placement.strategy,
        "notes": list(placement.notes),
        "parameters": [asdict(row) for row in report],
        "blocks": blocks,
        "ranks": [placement.memory(rank) for rank in range(placement.world_size)],
    }
