"""Metrics: what is in force and what became of it, by block and overall, as plain data.

Numbers, strings, lists and dicts, so that ``json.dumps`` writes them. None stands for what is not
known: on this rank, or not yet, or because nobody asked in time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from soframe.blocks.block import Block
from soframe.blocks.placed import PlacedBlocks
from soframe.comm.agreement import describe_error, gather_texts
from soframe.diagnostics.norms import Norms
from soframe.diagnostics.spectra import spectrum
from soframe.gradients.clipping import Clipped
from soframe.registry import describe
from soframe.solvers.relative import Relative
from soframe.statistics.running import settled, unpack
from soframe.strategies.work import BlockPlacement
from soframe.tracing.phases import Seconds, only

FORMAT = "soframe.metrics"
VERSION = 1
CALL = "Preconditioner.metrics(all_ranks=True)"
NORMS = ("gradient_norm", "direction_norm", "weight_norm")
Spectra = bool | Literal["full"]

_PHASE_OF = {"gradients": "average", "move": "hand over"}
"""Phases by the names under which traffic counts them, where these differ."""


@dataclass(frozen=True)
class Taken:
    """A step as it was taken.

    Attributes:
        step: Completed steps before it.
        damping: The damping of blocks without one of their own.
        decay: What running factors kept of their past.
        kl_clip: The bound of the KL clip, or None.
        norm_clip: That of the norm clip, or None.
        clipped: What the clips did.
        norms: The norms, if they were measured.
    """

    step: int
    damping: float
    decay: float
    kl_clip: float | None
    norm_clip: float | None
    clipped: Clipped
    norms: Norms | None = None


@dataclass(frozen=True)
class Timing:
    """What the clock of a rank says.

    Attributes:
        steps: How many steps were timed; None if there is no clock.
        seconds: How long each phase took in them.
    """

    steps: int | None
    seconds: Mapping[str, Seconds]


def collect(
    placed: PlacedBlocks,
    *,
    steps: int,
    taken: Taken | None,
    counters: Mapping[str, int],
    timing: Timing,
    spectra: Spectra,
    all_ranks: bool,
) -> dict[str, Any]:
    """Return the metrics; see `soframe.Preconditioner.metrics`.

    Args:
        placed: All blocks, with their places.
        steps: Completed steps.
        taken: The last step; None before the first.
        counters: What went wrong so far.
        timing: How long phases took.
        spectra: Whether factors are decomposed.
        all_ranks: Whether ranks tell each other what they know; then every rank must call.

    Returns:
        The metrics.

    Raises:
        ValueError: If ``spectra`` is nothing that is known, or ranks ask for different ones.
        RuntimeError: If a rank does not come, or fails.
    """
    if not isinstance(spectra, bool) and spectra != "full":
        raise ValueError(f"spectra must be True, False or 'full', not {spectra!r}")
    backend = placed.backend
    if all_ranks:
        backend.meet(CALL)
        asked = set(gather_texts(backend, repr(spectra), "metrics"))
        if len(asked) > 1:
            raise ValueError(
                f"{CALL}: ranks ask for different spectra ({', '.join(sorted(asked))}): pass the "
                f"same on every rank"
            )
    metrics: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "rank": backend.rank,
        "world_size": backend.world_size,
        "all_ranks": all_ranks,
        "step": steps,
        **_of_step(taken),
        "counters": dict(counters),
        "phases": _phases(backend.traffic(), timing),
        "timed_steps": timing.steps,
    }
    sums = _sums(placed, all_ranks) if spectra else {}
    blocks: dict[str, dict[str, Any]] = {}
    failure: Exception | None = None
    try:
        for block, place in placed:
            spectrums = _spectra(
                block,
                place,
                sums=sums.get(block, {}),
                spectra=spectra,
                placed=placed,
                all_ranks=all_ranks,
            )
            blocks[block.name] = _of_block(placed, block, taken, spectrums)
    except Exception as error:  # whatever it is: the other ranks wait, and must be told
        if not all_ranks:
            raise
        failure = error
    metrics["blocks"] = blocks
    if all_ranks and not backend.on_paper:
        _fill_in(placed, metrics, failure)
    metrics["norms"] = {name: _total(metrics["blocks"].values(), name) for name in NORMS}
    return metrics


def _of_step(taken: Taken | None) -> dict[str, Any]:
    """Return what holds for all blocks of the last step."""
    if taken is None:
        return dict.fromkeys((*_OVERALL, "measured"))
    kl, norm = taken.clipped.kl, taken.clipped.norm
    factors = [float(factor) for factor in (kl, norm) if factor is not None]
    return {
        "updated": taken.clipped.finite,
        "damping": taken.damping,
        "decay": taken.decay,
        "kl_clip": taken.kl_clip,
        "norm_clip": taken.norm_clip,
        "kl_clip_factor": None if kl is None else float(kl),
        "norm_clip_factor": None if norm is None else float(norm),
        "clip_factor": min(factors, default=1.0) if taken.clipped.finite else None,
        "measured": taken.norms is not None,
    }


def _of_block(
    placed: PlacedBlocks,
    block: Block,
    taken: Taken | None,
    spectra: Mapping[str, dict[str, Any] | None],
) -> dict[str, Any]:
    damping, multiple = _damping(block, taken)
    norms = None if taken is None else taken.norms
    factors: dict[str, dict[str, Any]] = {}
    for factor in block.factors:
        name, known = factor.name, factor.name in block.running.masses
        solved, history = name in block.second_order.solved, placed.history
        factors[name] = {
            "kind": factor.kind,
            "size": factor.size,
            "groups": factor.groups,
            "mass": max(block.running.masses[name]) if known else 0.0,
            "statistics_age": history.statistics_age(block.name, name) if known else None,
            "solve_age": history.solve_age(block.name, name) if solved else None,
            "failed_solves": block.second_order.failures[name],
            "spectrum": spectra.get(name),
        }
    return {
        "method": describe(block.method),
        "solver": describe(block.solver),
        "parameters": [*block.parameters],
        "shape": list(block.shape),
        "auxiliary": block.auxiliary,
        "active": block.active,
        "used": None if norms is None else block.name in norms.used,
        "clipped": block.method.clipped,
        "damping": damping,
        "damping_multiple": multiple,
        "updates": block.state.updates,
        **_norms(block.name, norms),
        "factors": factors,
    }


def _damping(block: Block, taken: Taken | None) -> tuple[float | None, float | None]:
    """Return what is added to the curvature of a block, and, where it is relative, the multiple."""
    if taken is None:
        return None, None
    number = block.damped_with(taken.damping)
    if not isinstance(block.solver, Relative):
        return number, None
    traces = [data["mean_trace"] for data in block.second_order.values() if "mean_trace" in data]
    if not block.solved or not traces:
        return None, number
    return number * float(torch.stack(traces).double().prod(0).mean()), number


def _norms(name: str, norms: Norms | None) -> dict[str, float | None]:
    if norms is None:
        return dict.fromkeys(NORMS)
    each = (norms.gradient, norms.direction, norms.weight)
    return {
        key: None if name not in known else _finite(float(known[name]))
        for key, known in zip(NORMS, each, strict=True)
    }


def _sums(placed: PlacedBlocks, all_ranks: bool) -> dict[Block, Mapping[str, Tensor]]:
    """Return the running factors that this rank holds; what was deferred only with ``all_ranks``.

    Between two solves nobody alone knows the running factors of a strategy that adds statistics up
    at the solves.
    """
    sums: dict[Block, Mapping[str, Tensor]] = {}
    for block, place in placed:
        if block.running.pending == 0:
            sums[block] = block.running
        elif all_ranks:
            sums[block] = settled(placed.backend, block, place, "metrics")
    return sums


def _spectra(
    block: Block,
    place: BlockPlacement,
    sums: Mapping[str, Tensor],
    spectra: Spectra,
    placed: PlacedBlocks,
    all_ranks: bool,
) -> dict[str, dict[str, Any] | None]:
    """Return the spectra of the factors that this rank is to decompose.

    These are all that it holds, or with ``all_ranks`` those that it owns.
    """
    return {
        factor.name: spectrum(unpack(sums[factor.name], factor), factor, full=spectra == "full")
        for index, factor in enumerate(block.factors)
        if factor.name in sums and (not all_ranks or place.owners[index] == placed.rank)
    }


def _phases(traffic: Mapping[str, Mapping[str, int]], timing: Timing) -> dict[str, dict[str, Any]]:
    """Return bytes, calls and seconds of each phase, and its share of all seconds."""
    sent = {_PHASE_OF.get(name, name): count for name, count in traffic.items() if name != "total"}
    total = sum(seconds.host for seconds in timing.seconds.values())
    phases: dict[str, dict[str, Any]] = {}
    for name in only({*sent, *timing.seconds}):
        seconds, count = timing.seconds.get(name), sent.get(name, {"bytes": 0, "calls": 0})
        timed = timing.steps is not None and seconds is not None
        phases[name] = {
            "bytes": count["bytes"],
            "calls": count["calls"],
            "seconds": seconds.host if timed and seconds is not None else None,
            "device_seconds": seconds.device if timed and seconds is not None else None,
            "share": seconds.host / total if timed and seconds is not None and total > 0 else None,
        }
    return phases


def _total(blocks: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """Return a norm over all blocks that have one; None if this rank does not know it of each."""
    squares: list[float] = []
    for block in blocks:
        if block["used"] is None:
            return None
        # A block that nobody used has no gradient; one that is not solved yet, no direction.
        needs = {
            "gradient_norm": block["used"],
            "direction_norm": block["used"] and block["active"],
        }
        if needs.get(name, True):
            if block[name] is None:
                return None
            squares.append(block[name])
    return math.hypot(*squares)


# -- several ranks -------------------------------------------------------------------------------


def _fill_in(placed: PlacedBlocks, metrics: dict[str, Any], failure: Exception | None) -> None:
    """Fill in what this rank does not know and another one does; every rank must call."""
    mine = {"blocks": metrics["blocks"], "phases": metrics["phases"]}
    mine["failed"] = None if failure is None else describe_error(failure)
    texts = gather_texts(placed.backend, json.dumps(mine), "metrics")
    everyones = [json.loads(text) for text in texts]
    if failure is not None:
        raise failure
    problems = {rank: said["failed"] for rank, said in enumerate(everyones) if said["failed"]}
    if problems:
        said = "; ".join(f"rank {rank}: {problem}" for rank, problem in problems.items())
        raise RuntimeError(f"{CALL} failed on another rank. {said}")
    for name, block in metrics["blocks"].items():
        others = [said["blocks"][name] for said in everyones]
        _fill(block, others)
        for factor, one in block["factors"].items():
            _fill(one, [other["factors"][factor] for other in others])
    metrics["phases_of_ranks"] = [said["phases"] for said in everyones]


def _fill(mine: dict[str, Any], others: list[Mapping[str, Any]]) -> None:
    for key, value in mine.items():
        if value is None:
            mine[key] = next((other[key] for other in others if other[key] is not None), None)


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


# -- for loggers ---------------------------------------------------------------------------------


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of metrics by names that loggers group, such as ``"damping/net.0"``.

    Args:
        metrics: What ``metrics()`` returned.

    Returns:
        Name -> number; what is None is left out. Eigenvalues are, too.
    """
    return {name: float(value) for name, value in _named(metrics) if value is not None}


_OVERALL = (
    "damping",
    "decay",
    "kl_clip",
    "norm_clip",
    "kl_clip_factor",
    "norm_clip_factor",
    "clip_factor",
    "updated",
)
_OF_BLOCK = ("damping", *NORMS, "update_norm")
_OF_FACTOR = ("statistics_age", "solve_age", "failed_solves")
_OF_SPECTRUM = ("largest", "smallest", "condition", "effective_rank")


def _named(metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _OVERALL:
        yield f"overall/{key}", metrics[key]
    for key, value in metrics["norms"].items():
        yield f"overall/{key}", value
    for key, value in metrics["counters"].items():
        yield f"counters/{key}", value
    steps = metrics["timed_steps"]
    for phase, one in metrics["phases"].items():
        yield f"bytes/{phase}", one["bytes"]
        for key in ("seconds", "device_seconds"):
            if one[key] is not None and steps:
                yield f"{key}/{phase}", one[key] / steps
    for name, block in metrics["blocks"].items():
        for key in _OF_BLOCK:
            yield f"{key}/{name}", block.get(key)
        for factor, one in block["factors"].items():
            for key in _OF_FACTOR:
                yield f"{key}/{name}.{factor}", one[key]
            for key in _OF_SPECTRUM if one["spectrum"] is not None else ():
                yield f"{key}/{name}.{factor}", one["spectrum"][key]
