"""The settings in force, as text, with the values of this step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from soframe.blocks.block import Block
from soframe.registry import describe


def text(
    owner: str,
    *,
    model: nn.Module,
    blocks: Sequence[Block],
    settings: Mapping[str, Any],
    now: Mapping[str, object],
) -> str:
    """Return settings as text, one per line, with their present values ``now``."""
    trained = sum(p.requires_grad for p in model.parameters())
    covered = sum(len(block.parameters) for block in blocks)
    coverage = f"{covered} of {trained} trainable parameters in {len(blocks)} block(s)"
    shown = {"model": f"{type(model).__name__}, {coverage}"}
    for name, value in settings.items():
        shown[name] = _show(value)
    # The components that blocks have, in place of a mapping from patterns.
    components = {"method": Counter[str](), "auxiliary": Counter[str](), "solver": Counter[str]()}
    for block in blocks:
        kind = "auxiliary" if block.auxiliary else "method"
        components[kind][describe(block.method)] += 1
        if block.solved_factors:
            components["solver"][describe(block.solver)] += 1
    for name, counts in components.items():
        shown[name] = _counted(counts)
    for name, value in now.items():
        shown[name] = _with_schedule(value, settings.get(name))
    lines = "".join(f"\n  {name}: {value}" for name, value in shown.items())
    return f"{owner}({lines}\n)"


def _counted(components: Mapping[str, int]) -> str:
    """Return the components of blocks, each with its number of blocks."""
    return ", ".join(f"{name} in {n} block(s)" for name, n in components.items()) or "None"


def _with_schedule(value: object, setting: object) -> str:
    """Return a setting's value at this step; of a schedule or policy also the schedule."""
    if setting is None or isinstance(setting, int | float):
        return _show(value)
    return f"{_show(value)} (now, of {_show(setting)})"


def _show(value: object) -> str:
    if isinstance(value, torch.optim.Optimizer | nn.Module | torch.amp.GradScaler):
        return type(value).__name__  # their own text is longer than all the rest
    if isinstance(value, FunctionType | MethodType):
        return value.__qualname__
    if type(value).__repr__ is object.__repr__:
        return f"{type(value).__name__}()"
    return describe(value)
