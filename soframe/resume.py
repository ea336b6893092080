"""The state of a curvature as a whole; `soframe.state.saving` has the state of its blocks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from soframe.blocks.registration import plain_name
from soframe.comm.stages import STAGES
from soframe.curvature import Curvature
from soframe.damping.policies import check_damping
from soframe.registry import describe
from soframe.state import checksums
from soframe.state import saving as state


def save(curvature: Curvature, counters: Mapping[str, int]) -> dict[str, Any]:
    """Return the state, independent of world size and strategy; every rank must call."""
    return checksums.seal(state.save(curvature.placed, header(curvature, counters)))


def header(curvature: Curvature, counters: Mapping[str, int]) -> dict[str, Any]:
    """Return the state without its tensors: numbers and strings, the same on every rank."""
    parts, blocks = curvature.parts, curvature.blocks
    numbers: dict[str, Any] = {
        "format": state.FORMAT,
        "version": state.VERSION,
        "step": curvature.steps,
        "owed_statistics": parts.refresh.owed,
        "scaling": parts.scaling,
        "counters": dict(counters),
        "blocks": {block.name: state.of_block(block) for block in blocks},
        "history": state.history(blocks),
        "dampings": state.dampings(blocks, curvature.dampings),
    }
    if policy := parts.damping.state():  # most policies have nothing to keep
        numbers["damping"] = policy
    if late := curvature.statistics.late():
        numbers["late"] = late
    if parts.stages.name:
        numbers[STAGES] = parts.stages.name
    return numbers


def check_header(curvature: Curvature, saved: Any) -> None:
    """Raise ValueError unless a state, perhaps without its tensors, can be loaded."""
    parts = curvature.parts
    named = parts.model.named_parameters()
    frozen = {plain_name(name) for name, p in named if not p.requires_grad}
    state.check_header(saved, curvature.blocks, parts.scaling, frozen)
    if parts.damping.state() and "damping" in saved:
        check_damping(saved["damping"], parts.damping, saved["step"])


def checked(
    curvature: Curvature, saved: Mapping[str, Any]
) -> tuple[Mapping[str, Any], Mapping[str, Tensor]]:
    """Return this rank's part of a state and its tensors, such as ``"head/factors/A"``.

    Raises:
        ValueError: If it is foreign, truncated, damaged or of another model.
    """
    part = curvature.parts.stages.own_part(saved)
    # A part of a merged state: its checksums were made for the whole.
    if part is not saved:
        checksums.verify(saved)
        part = checksums.seal(part)
    check_header(curvature, part)
    tensors = dict(checksums.tensors_of(part["blocks"]))
    state.check(part, tensors, curvature.placed, everywhere=True)
    return part, tensors


def load(
    curvature: Curvature, check: Callable[[], tuple[Mapping[str, Any], Mapping[str, Tensor]]]
) -> Mapping[str, Any]:
    """Continue from a state that ``check`` returns; return its header. Every rank must call."""
    parts = curvature.parts
    saved = state.load(check, curvature.placed, parts.stages)
    frozen = saved["blocks"].keys() - {block.name for block in curvature.blocks}
    if lost := [name for name in frozen if saved["blocks"][name]["updates"]]:
        warnings.warn(
            f"soframe: moments of {', '.join(sorted(lost))} are not loaded, which were frozen "
            f"before this was built: they begin anew if they are thawed. To load them, build "
            f"while they are trained, and freeze them afterwards",
            stacklevel=4,
        )
    # Solves under way are of factors that are replaced now.
    parts.solves.drop()
    parts.refresh.continue_from(saved["step"], saved["owed_statistics"])
    if "damping" in saved and parts.damping.state():
        parts.damping.load(saved["damping"])
    elif parts.damping.state():
        warnings.warn(
            f"soframe: the state has nothing of {describe(parts.damping)}: it begins anew",
            stacklevel=4,
        )
    state.load_history(saved["history"], curvature.blocks)
    curvature.continue_from(saved["step"], saved["counters"], saved.get("dampings"))
    return saved
