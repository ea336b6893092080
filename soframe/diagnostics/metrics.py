"""Metrics: settings in force and their effects, by block and overall, as plain data.

Numbers, strings, lists and dicts, so that ``json.dumps`` writes them. None stands for a number that
is not yet available, not on this rank, or not measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from soframe.blocks.block import Block, PlacedBlocks, unpack
from soframe.combinations import READ_BY
from soframe.comm.agreement import gather_json
from soframe.diagnostics.norms import Norms, measure
from soframe.estimate.averages import settled
from soframe.estimate.gradients import Gradients
from soframe.estimate.plan import Plan
from soframe.estimate.updates import Update
from soframe.registry import describe
from soframe.solvers.scaled import Relative
from soframe.specs import FactorSpec
from soframe.strategies.work import BlockPlacement
from soframe.tracing.phases import Phases, Seconds

FORMAT = "soframe.metrics"
VERSION = 1
CALL = "Preconditioner.metrics(all_ranks=True)"
NORMS = ("gradient_norm", "direction_norm", "weight_norm")
Spectra = bool | Literal["full"]

_PHASE_OF = {"gradients": "average", "move": "hand over"}  # by the names of the traffic


@dataclass(frozen=True)
class Taken:
    """A step as it was taken, and the effect of its clips."""

    plan: Plan
    finite: bool  # whether its updates are, on all ranks
    factors: Mapping[str, Tensor]  # of each clip, by its name
    norms: Norms | None = None


class Measuring:
    """Measures norms and the times of phases, in their order, if enabled; off by default."""

    def __init__(self, phases: Phases, order: Callable[[], Sequence[str]] = list) -> None:
        self._phases, self._order, self._timed_from = phases, order, 0
        self.norms = False  # of the coming step
        self.last: Taken | None = None

    def choose(
        self, *, norms: bool | None, times: bool | None, placed: PlacedBlocks, steps: int
    ) -> None:
        """Choose the measurements from the next step on; None leaves a choice as it is."""
        if norms is not None:
            self.norms = norms
        if times is not None:
            self._timed_from = steps
            if times:
                devices = {block.device.type for block, _ in placed}
                self._phases.start_clock(device="cuda" in devices)
            else:
                self._phases.stop_clock()

    def note(
        self,
        blocks: Sequence[Block],
        gradients: Gradients,
        updates: Sequence[Update],
        plan: Plan,
        *,
        finite: bool,
        factors: Mapping[str, Tensor],
    ) -> None:
        """Keep the numbers of a step, before its gradients are overwritten."""
        norms = None
        if self.norms and finite:  # discarded updates are not measured
            norms = measure(blocks, gradients, updates)
        self.last = Taken(plan, finite, factors, norms)

    def forget(self) -> None:
        """Forget the last step."""
        self.last = None

    def skipped(self) -> None:
        """Update the last step, whose update was skipped."""
        if self.last is not None:
            self.last = replace(self.last, finite=False, factors={}, norms=None)

    def redamped(self, damping: float) -> None:
        """Update the last step, whose updates were recomputed with another damping."""
        if self.last is not None:
            plan = replace(self.last.plan, damping=damping)
            self.last = replace(self.last, plan=plan, norms=None)

    def collect(
        self,
        placed: PlacedBlocks,
        *,
        steps: int,
        counters: Mapping[str, int],
        spectra: Spectra,
        all_ranks: bool,
    ) -> dict[str, Any]:
        """Return the metrics; without a clock ``"timed_steps"`` is None."""
        if not isinstance(spectra, bool) and spectra != "full":
            raise ValueError(f"spectra must be True, False or 'full', not {spectra!r}")
        backend = placed.backend
        if all_ranks:
            backend.meet(CALL)
        metrics: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "rank": backend.rank,
            "world_size": backend.world_size,
            "all_ranks": all_ranks,
            "step": steps,
            **_of_step(self.last),
            "counters": dict(counters),
            "phases": _phases(backend.traffic(), self._phases.seconds(), self._order()),
            "timed_steps": steps - self._timed_from if self._phases.timed else None,
        }
        sums = _sums(placed, all_ranks) if spectra else {}
        blocks: dict[str, dict[str, Any]] = {}
        for block, place in placed:
            held = sums.get(block, {})
            spectrums = _spectra(block, place, held, spectra, placed, all_ranks)
            blocks[block.name] = _of_block(block, self.last, spectrums, steps)
        metrics["blocks"] = blocks
        if all_ranks and not backend.on_paper:
            _fill_in(placed, metrics)
        metrics["norms"] = {name: _total(metrics["blocks"].values(), name) for name in NORMS}
        return metrics


def _of_step(taken: Taken | None) -> dict[str, Any]:
    """Return the numbers of the last step that hold for all blocks."""
    if taken is None:
        return dict.fromkeys((*_OVERALL, "measured"))
    plan = taken.plan
    factors = {name: float(factor) for name, factor in taken.factors.items()}
    names = {**dict.fromkeys(("kl", "norm")), **plan.bounds}  # in order
    return {
        "updated": taken.finite,
        "damping": plan.damping,
        "decay": plan.decay,
        **{f"{name}_clip": plan.bounds.get(name) for name in names},
        **{f"{name}_clip_factor": factors.get(name) for name in names},
        "clip_factor": min(factors.values(), default=1.0) if taken.finite else None,
        "measured": taken.norms is not None,
    }


def _of_block(
    block: Block, taken: Taken | None, spectra: Mapping[str, dict[str, Any] | None], steps: int
) -> dict[str, Any]:
    damping, multiple = _damping(block, taken)
    norms = None if taken is None else taken.norms
    factors: dict[str, dict[str, Any]] = {}
    for factor in block.factors:
        factors[factor.name] = _of_factor(block, factor, spectra.get(factor.name), steps)
    return {
        "method": describe(block.method),
        "solver": describe(block.solver),
        "parameters": list(block.parameters),
        "shape": list(block.shape),
        "auxiliary": block.auxiliary,
        "active": block.active,
        "used": None if norms is None else block.name in norms.used,
        "clipped": block.method.clipped,
        "damping": damping,
        "damping_multiple": multiple,
        "updates": block.record.updates,
        **_norms(block.name, norms),
        "factors": factors,
    }


def _of_factor(
    block: Block, factor: FactorSpec, spectrum: dict[str, Any] | None, steps: int
) -> dict[str, Any]:
    name, record = factor.name, block.record
    ages: dict[str, int | None] = {"statistics_age": None, "solve_age": None}
    # The steps between an event and the last step: 0 for the last one.
    if name in record.masses.keys() & record.statistics_at.keys():
        ages["statistics_age"] = steps - 1 - record.statistics_at[name]
    if block.solved and name in record.solved_at:
        ages["solve_age"] = steps - 1 - record.solved_at[name]
    return {
        "kind": str(factor.kind),
        "size": factor.size,
        "groups": factor.groups,
        "mass": max(record.masses.get(name, (0.0,))),
        **ages,
        "failed_solves": record.failures[name],
        "spectrum": spectrum,
    }


def _damping(block: Block, taken: Taken | None) -> tuple[float | None, float | None]:
    """Return the damping of a block and, where it is relative, its multiple."""
    if taken is None or not READ_BY["damping"](block):
        return None, None
    number = block.damped_with(taken.plan.damping)
    if not isinstance(block.solver, Relative):
        return number, None
    traces = [data["mean_trace"] for data in block.second_order.values() if "mean_trace" in data]
    if not block.solved or not traces:
        return None, number
    return number * float(torch.stack(traces).double().prod(0).mean()), number


def _norms(name: str, norms: Norms | None) -> dict[str, float | None]:
    of_block: dict[str, float | None] = dict.fromkeys(NORMS)
    if norms is None:
        return of_block
    kinds = (norms.gradient, norms.direction, norms.weight)
    for key, known in zip(NORMS, kinds, strict=True):
        norm = float(known.get(name, math.nan))
        if math.isfinite(norm):
            of_block[key] = norm
    return of_block


def _sums(placed: PlacedBlocks, all_ranks: bool) -> dict[Block, Mapping[str, Tensor]]:
    """Return the running factors that this rank holds; deferred ones with ``all_ranks`` only."""
    # If statistics are reduced at the solves, all ranks hold parts of them.
    sums: dict[Block, Mapping[str, Tensor]] = {}
    for block in placed.blocks:
        if block.record.pending == 0:
            sums[block] = block.running
        elif all_ranks:
            sums[block] = settled(placed, block.stack, (block.member,), "metrics")
    return sums


def _spectra(
    block: Block,
    place: BlockPlacement,
    sums: Mapping[str, Tensor],
    spectra: Spectra,
    placed: PlacedBlocks,
    all_ranks: bool,
) -> dict[str, dict[str, Any] | None]:
    """Return the spectra of the factors that this rank holds, or with ``all_ranks`` owns."""
    spectrums: dict[str, dict[str, Any] | None] = {}
    for factor, owner in zip(block.factors, place.owners, strict=True):
        if factor.name in sums and (not all_ranks or owner == placed.rank):
            matrix = unpack(sums[factor.name], factor).to(block.dtype)
            spectrums[factor.name] = spectrum(matrix, factor, full=spectra == "full")
    return spectrums


def _phases(
    traffic: Mapping[str, Mapping[str, int]], times: Mapping[str, Seconds], order: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """Return bytes, calls and seconds of each phase, and its share of all seconds."""
    sent = {_PHASE_OF.get(name, name): count for name, count in traffic.items() if name != "total"}
    total = sum(seconds.host for seconds in times.values())
    phases: dict[str, dict[str, Any]] = {}
    seen = sent.keys() | times.keys()
    known = [name for name in order if name in seen]
    for name in known + sorted(seen.difference(known)):
        seconds, count = times.get(name), sent.get(name, {"bytes": 0, "calls": 0})
        phase: dict[str, Any] = {"bytes": count["bytes"], "calls": count["calls"]}
        phase |= dict.fromkeys(("seconds", "device_seconds", "share"))
        if seconds is not None:
            phase["seconds"], phase["device_seconds"] = seconds.host, seconds.device
            if total != 0:
                phase["share"] = seconds.host / total
        phases[name] = phase
    return phases


def _total(blocks: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """Return a norm over all blocks that have one; None if any is missing."""
    squares: list[float] = []
    for block in blocks:
        if block["used"] is None:
            return None
        # An unused block has no gradient; a block before its first solve has no update.
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


def _fill_in(placed: PlacedBlocks, metrics: dict[str, Any]) -> None:
    """Fill in numbers that only other ranks have; a collective of all ranks."""
    local = {"blocks": metrics["blocks"], "phases": metrics["phases"]}
    of_ranks = gather_json(placed.backend, local, "metrics")
    for name, block in metrics["blocks"].items():
        block_of_ranks = [of_rank["blocks"][name] for of_rank in of_ranks]
        _fill(block, block_of_ranks)
        for factor, factor_metrics in block["factors"].items():
            _fill(factor_metrics, [other["factors"][factor] for other in block_of_ranks])
    metrics["phases_of_ranks"] = [of_rank["phases"] for of_rank in of_ranks]


def _fill(metrics: dict[str, Any], of_ranks: list[Mapping[str, Any]]) -> None:
    for other in of_ranks:
        for key, value in metrics.items():
            if value is None:
                metrics[key] = other[key]


# -- for loggers ---------------------------------------------------------------------------------


def scalars(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of metrics by names that loggers group, such as ``"damping/net.0"``.

    Args:
        metrics: The result of ``metrics()``.

    Returns:
        Name -> number, without unknown numbers and eigenvalues.
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
    for key, value in metrics.items():
        if key in _OVERALL or key.endswith(("_clip", "_clip_factor")):
            yield f"overall/{key}", value
    for key, value in metrics["norms"].items():
        yield f"overall/{key}", value
    for key, value in metrics["counters"].items():
        yield f"counters/{key}", value
    yield from _named_of_phases(metrics["phases"], metrics["timed_steps"])
    for name, block in metrics["blocks"].items():
        for key in _OF_BLOCK:
            yield f"{key}/{name}", block.get(key)
        for factor, factor_metrics in block["factors"].items():
            yield from _named_of_factor(f"{name}.{factor}", factor_metrics)


def _named_of_phases(phases: Mapping[str, Any], steps: int) -> Iterator[tuple[str, Any]]:
    for phase, counts in phases.items():
        yield f"bytes/{phase}", counts["bytes"]
        for key in ("seconds", "device_seconds"):
            if counts[key] is not None and steps:
                yield f"{key}/{phase}", counts[key] / steps


def _named_of_factor(name: str, metrics: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in _OF_FACTOR:
        yield f"{key}/{name}", metrics[key]
    if metrics["spectrum"] is not None:
        for key in _OF_SPECTRUM:
            yield f"{key}/{name}", metrics["spectrum"][key]


def spectrum(matrix: Tensor, factor: FactorSpec, *, full: bool = False) -> dict[str, Any] | None:
    """Return a summary of a factor's eigenvalues over all its groups, in float64, as plain data.

    The matrix is the running factor, without damping. ``"condition"`` is the largest of a group,
    None if the smallest eigenvalue is zero to the rounding of the factor's dtype;
    ``"effective_rank"`` the exponential of the entropy of the normalised eigenvalues (Roy and
    Vetterli, 2007), between 1 and n, 0 for zeros, the mean over groups. None for a factor that is
    neither a matrix nor a diagonal.
    """
    if factor.kind == "psd":
        values = torch.linalg.eigvalsh(matrix.double())
    elif factor.kind == "diagonal":
        values = matrix.double().sort(dim=1).values
    else:
        return None
    values = values.flip(1)
    rounding = torch.finfo(matrix.dtype).eps * values.shape[1]
    summary: dict[str, Any] = {
        "largest": float(values[:, 0].max()),
        "smallest": float(values[:, -1].min()),
        "condition": _condition(values, rounding),
        "effective_rank": float(_effective_rank(values).mean()),
        "trace": float(values.sum(1).mean()),
    }
    if full:
        summary["eigenvalues"] = values.tolist()
    return summary


def _condition(values: Tensor, rounding: float) -> float | None:
    """Return the largest condition number over groups; None where rounding hides it."""
    largest, smallest = values[:, 0], values[:, -1]
    if not bool((smallest > rounding * largest).all()):
        return None
    condition = float((largest / smallest).max())
    return condition if math.isfinite(condition) else None


def _effective_rank(values: Tensor) -> Tensor:
    """Return ``exp(-sum_i p_i log p_i)`` with ``p_i = v_i / sum_j v_j``, for each group."""
    positive = values.clamp(min=0)  # negative ones are rounding errors
    total = positive.sum(1, keepdim=True)
    shares = positive / total.where(total > 0, 1.0)
    ranks = torch.special.entr(shares).sum(1).exp()
    return torch.where(total.squeeze(1) > 0, ranks, 0.0)
