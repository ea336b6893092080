"""Traffic and memory of each strategy, counted by its placement: nothing is trained, nothing runs.

    python -m benchmarks.distribution                     # BERT-Large and ResNet-50 on 64 ranks
    python -m benchmarks.distribution --ranks 256 --solve-every 500
    python -m benchmarks.distribution --json

Bytes count the tensors that a rank gives to or receives from a collective, as
`Preconditioner.traffic` does; memory is held between steps, as `Preconditioner.memory_usage` counts
it. Float32, K-FAC, the eigen solver.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import nn

from experiments import display
from soframe.layers import BlockShape
from soframe.methods import KFAC
from soframe.planning.workloads import WORKLOADS
from soframe.solvers import Eigen
from soframe.strategies import (
    BlockWork,
    CommOpt,
    HybridOpt,
    MemOpt,
    OwnerLocal,
    Placement,
    Sharded,
    Strategy,
)

STRATEGIES: dict[str, Strategy] = {
    "comm-opt": CommOpt(),
    "hybrid-opt": HybridOpt(),
    "mem-opt": MemOpt(),
    "sharded": Sharded(),
    "sharded, wire bf16": Sharded(wire="bfloat16"),
    "sharded, group 8": Sharded(group=8),
    "sharded, group 8, wire bf16": Sharded(group=8, wire="bfloat16"),
    "sharded, group 8, deferred": Sharded(group=8, deferred=True),
    "sharded, all ranks": Sharded(group=None),
    "sharded, all ranks, deferred": Sharded(group=None, deferred=True),
    "owner-local": OwnerLocal(),
}
BASELINE = "mem-opt"


def block(name: str, out: int, into: int) -> BlockWork:
    shape = BlockShape(1, out, into)
    factors = KFAC().factors(shape)
    second_order = tuple(tuple(Eigen().tensors(factor).values()) for factor in factors)
    return BlockWork(name, shape, factors, second_order)


def blocks(workload: str, within: str = "") -> list[BlockWork]:
    """The linear and convolutional layers of a workload whose names begin so."""
    layers = WORKLOADS[workload].model().named_modules()
    return [
        block(name, len(layer.weight), layer.weight[0].numel() + (layer.bias is not None))
        for name, layer in layers
        if isinstance(layer, nn.Linear | nn.Conv2d) and name.startswith(within)
    ]


MODELS = {"BERT-Large": blocks("bert-large", "layers."), "ResNet-50": blocks("resnet50")}


@dataclass(frozen=True)
class Cost:
    """Bytes of one rank; of traffic the mean over steps."""

    statistics: float  # to the holders of running factors, and agreements
    second_order: float  # to the gradient workers
    exchange: float  # preconditioned gradients
    memory: float  # between steps
    window: float  # in addition, while a backward pass gathers statistics

    @property
    def curvature(self) -> float:
        return self.statistics + self.second_order


def cost(placement: Placement, rank: int, statistics_every: int, solve_every: int) -> Cost:
    # The first step of each kind; the intervals divide one another.
    plain = placement.traffic(rank)
    kinds = {
        statistics_every: placement.traffic(rank, statistics=True),
        solve_every: placement.traffic(rank, solve=True),
    }

    def mean(*phases: str) -> float:
        def size(traffic: Mapping[str, Mapping[str, int]]) -> int:
            return sum(traffic.get(phase, {"bytes": 0})["bytes"] for phase in phases)

        extra = {every: size(traffic) - size(plain) for every, traffic in kinds.items()}
        return size(plain) + sum(more / every for every, more in extra.items())

    return Cost(
        mean("agree", "reduce"),
        mean("share"),
        mean("exchange"),
        placement.memory(rank)["total"],
        placement.window(rank),
    )


def compare(
    work: Sequence[BlockWork],
    ranks: int,
    statistics_every: int,
    solve_every: int,
    names: Sequence[str] = tuple(STRATEGIES),
) -> dict[str, dict[str, Any]]:
    """Strategy -> the costs of the mean rank and the most that any rank has."""
    found = {}
    for name, strategy in STRATEGIES.items():
        if name not in names:
            continue
        placement = strategy.place(work, ranks)
        placement.validate()
        costs = [cost(placement, rank, statistics_every, solve_every) for rank in range(ranks)]
        keys = [*(field.name for field in fields(Cost)), "curvature"]
        values = {key: [getattr(one, key) for one in costs] for key in keys}
        found[name] = {
            "mean": {key: sum(column) / ranks for key, column in values.items()},
            "most": {key: max(column) for key, column in values.items()},
        }
    base = found[BASELINE]["mean"]
    whole = base["curvature"] + base["exchange"]
    held = max(as_published(STRATEGIES[BASELINE].place(work, ranks), rank) for rank in range(ranks))
    for one in found.values():
        sent = one["mean"]["curvature"]
        one["less_sent"] = (whole / sent) if sent else None
        one["less_held"] = held / one["most"]["memory"]
    return found


def as_published(placement: Placement, rank: int) -> int:
    """The bytes that a rank would hold with running factors in squares, as KAISA has them."""
    blocks = tuple(replace(block, packed=False) for block in placement.blocks)
    return replace(placement, blocks=blocks).memory(rank)["total"]


def show(title: str, costs: Mapping[str, Mapping[str, Any]]) -> None:
    columns = ["strategy", "statistics", "second\norder", "exchange", "busiest\nrank", "less\nsent"]
    columns += ["memory,\nmost", "memory,\nmean", "less\nheld", "window,\nmost"]
    rows = []
    for name, one in costs.items():
        mean, most = one["mean"], one["most"]
        sizes = (mean["statistics"], mean["second_order"], mean["exchange"], most["curvature"])
        less = one["less_sent"]
        rows.append(
            [
                name,
                *(f"{size / 1e6:.2f}" for size in sizes),
                "all" if less is None or less > 1e4 else f"{less:.1f}x",
                f"{most['memory'] / 1e6:.0f}",
                f"{mean['memory'] / 1e6:.0f}",
                f"{one['less_held']:.1f}x",
                f"{most['window'] / 1e6:.0f}",
            ]
        )
    display.console(width=120).print(display.table(title, columns, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="What each strategy sends and holds.")
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--statistics-every", type=int, default=10)
    parser.add_argument("--solve-every", type=int, default=100)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    every = (options.statistics_every, options.solve_every)
    found = {model: compare(work, options.ranks, *every) for model, work in MODELS.items()}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for model, costs in found.items():
        show(f"{model}, {options.ranks} ranks, MB per rank; traffic per step", costs)
    print(
        f"less sent: statistics and second-order data of the mean rank against all that\n"
        f"{BASELINE} sends, exchange included. less held: what the rank with most holds between\n"
        f"steps, against {BASELINE}'s with running factors in squares, as published. window: sums\n"
        f"besides, during the backward passes of statistics steps."
    )


if __name__ == "__main__":
    main()
