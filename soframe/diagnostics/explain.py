"""One block: its part of the last window on every rank, its factors, and its lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from soframe.blocks.block import Block, PlacedBlocks
from soframe.comm.agreement import gather_json
from soframe.diagnostics.metrics import NORMS
from soframe.estimate.statistics import Accumulator, Folded
from soframe.registry import describe
from soframe.specs import FactorSpec
from soframe.strategies.work import BlockPlacement

CALL = "Preconditioner.explain(all_ranks=True)"


@dataclass(frozen=True)
class Explanation:
    """One block: its parts, the window that its factors come from, and its update. Print it.

    Attributes:
        name: The name of the block.
        block: Its parameters, layers, method, solver, shape and damping.
        ranks: For each rank its contribution to the last window with statistics: calls, backward
            passes, samples and rows; and which factors it contributes to, holds and solves.
        factors: For each factor its definition (degree, mean), its divisor and multiplier in that
            window, its weight in the running average, its spectrum, and the ages of statistics and
            solve.
        update: The norms of gradient, direction and weights at the last step; None for those that
            were not measured.
        reasons: Sentences on its lacks.
    """

    name: str
    block: Mapping[str, Any]
    ranks: Sequence[Mapping[str, Any]]
    factors: Mapping[str, Mapping[str, Any]]
    update: Mapping[str, Any]
    reasons: Sequence[str]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.name}: {_listed(self.block, str)}"
        yield "the last window with its statistics, by rank:"
        for numbers in self.ranks:
            yield f"  {_listed(numbers)}"
        for name, numbers in self.factors.items():
            yield f"factor {name}: {_listed(numbers)}"
        yield f"update: {_listed(self.update)}"
        yield from self.reasons

    def as_dict(self) -> dict[str, Any]:
        """Return it as lists and dicts of numbers and texts, as in JSON."""
        return asdict(self)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _listed(numbers: Mapping[str, Any], show: Callable[[object], str] = _short) -> str:
    return ", ".join(f"{key} {show(value)}" for key, value in numbers.items())


def explain(
    name: str,
    placed: PlacedBlocks,
    statistics: Accumulator,
    metrics: Mapping[str, Any],
    *,
    all_ranks: bool,
) -> Explanation:
    """Return the explanation of a block, given its `Preconditioner.metrics`.

    Raises:
        ValueError: If no block has this name.
    """
    named = {block.name: (block, place) for block, place in placed}
    if name not in named:
        raise ValueError(f"no block is named {name!r}; there are {', '.join(named)}")
    block, place = named[name]
    folded = statistics.folded.get(block)
    ranks = [_of_rank(block, place, folded, placed.rank)]
    if all_ranks:
        ranks = gather_json(placed.backend, ranks[0], "metrics")
    measured = metrics["blocks"][name]
    factors: dict[str, dict[str, Any]] = {}
    for factor in block.factors:
        factors[factor.name] = {
            **_definition(factor),
            **_scale(block, factor, folded),
            **_kept(measured["factors"][factor.name]),
        }
    update = {"updates": block.record.updates}
    for norm in NORMS:
        update[norm] = measured[norm]
    return Explanation(
        name=name,
        block={
            "parameters": list(block.parameters),
            "layers": [type(helper.module).__name__ for helper in block.helpers],
            "shape": list(block.shape),
            "method": describe(block.method),
            "solver": ", ".join(describe(solver) for solver, _ in block.solvers),
            "damping": measured["damping"],
        },
        ranks=ranks,
        factors=factors,
        update=update,
        reasons=list(_reasons(block, folded, measured)),
    )


def _of_rank(
    block: Block, place: BlockPlacement, folded: Folded | None, rank: int
) -> dict[str, Any]:
    """Return this rank's numbers of the window, and its work for the block."""
    numbers: dict[str, Any] = {"rank": rank}
    if folded is not None:
        counts, contribution = folded.counts, folded.contribution
        numbers |= {
            "step": folded.step,
            "calls": counts.calls,
            "passes": len(counts.samples),
            "samples": sum(counts.samples.values()),
            "rows": sum(counts.rows.values()),
            "weight of samples": contribution.input_weight,
            "weight of rows": contribution.output_weight,
        }
    contributes: list[str] = []
    holds: list[str] = []
    solves: list[str] = []
    for index, factor in enumerate(block.factors):
        if factor.captured and place.contributes(rank, index):
            contributes.append(factor.name)
        if place.holds(rank, index):
            holds.append(factor.name)
        if place.owners[index] == rank:
            solves.append(factor.name)
    numbers |= {"contributes to": contributes, "holds": holds, "solves": solves}
    numbers["makes the update"] = rank in place.gradient_workers
    return numbers


def _definition(factor: FactorSpec) -> dict[str, Any]:
    return {
        "kind": str(factor.kind),
        "shape": list(factor.shape),
        "reads": factor.reads,
        "degree": factor.degree,
        "mean over": factor.mean_over,
    }


def _scale(block: Block, factor: FactorSpec, folded: Folded | None) -> dict[str, Any]:
    """Return the multiplier of this rank's sum, and the divisor of all ranks' sums."""
    if folded is None or folded.weights is None or not factor.captured:
        return {}
    multiplier = folded.contribution.multipliers[factor.degree]
    if factor.mean_over == "group rows":
        return {"multiplier": multiplier, "divisors": list(folded.weights.groups)}
    divisor = folded.weights.factors[block.captured.index(factor)]
    return {"multiplier": multiplier, "divisor": divisor}


def _kept(measured: Mapping[str, Any]) -> dict[str, Any]:
    spectrum = measured["spectrum"] or {}
    numbers = {key: value for key, value in spectrum.items() if not isinstance(value, list)}
    return {
        "weight in the average": measured["mass"],
        "age of statistics": measured["statistics_age"],
        "age of solve": measured["solve_age"],
        **numbers,
    }


def _reasons(block: Block, folded: Folded | None, measured: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences on the lacks of the block on this rank."""
    if block.captured:
        yield from _reasons_of_window(folded)
    for factor in block.factors:
        if failures := block.record.failures[factor.name]:
            yield f"Factor {factor.name} could not be solved {failures} time(s)."
    if block.tensors and not block.solved:
        yield "It has no second-order data yet: its gradient stays as it is."
    if block.record.missed:
        yield "It missed its last turn of statistics, and takes them when it is used again."
    if measured["gradient_norm"] is None:
        yield "Norms were not measured at the last step: call measure(norms=True) before it."


def _reasons_of_window(folded: Folded | None) -> Iterator[str]:
    """Yield the lacks of a block in its last window with statistics of calls."""
    if folded is None:
        yield "It has no statistics of calls: no window that takes them has ended."
    elif folded.weights is None:
        yield (
            f"In the window of step {folded.step} no rank called its layers in training, or their "
            f"gradients were gone before the step."
        )
    elif not folded.counts.calls:
        yield "This rank did not call its layers in that window; its samples count all the same."
