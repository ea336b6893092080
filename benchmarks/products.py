"""How much of a step is products, how fast they are, and what a step is made of products alone.

    python benchmarks/products.py gpt resnet20
    python benchmarks/products.py gpt --contenders "soframe, eigen" --threads 1

Products are those of matrices, convolutions and attention. For plain SGD and each contender the
mean over steps at statistics every F and solves every K steps: milliseconds, those within products
(torch's profiler), multiply-adds (torch's flop counter), their rate, and what is left for other
operators and for Python. The last columns hold the step against SGD's: as it was, and as it would
be if what it has besides SGD's step were its products alone, at SGD's rate. Faster than that a step
is only with fewer multiply-adds, or with products of better shapes than SGD's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness.contenders import TURNS, Contender, contender
from harness.networks import NETWORKS
from harness.peers import KFAC_PYTORCH_MISSING, import_kfac_pytorch
from harness.step_times import mean_step
from torch.autograd.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.steps import SOFRAME_OWN

PRODUCTS = {
    "aten::mm",
    "aten::addmm",
    "aten::addmm_",
    "aten::bmm",
    "aten::baddbmm",
    "aten::baddbmm_",
    "aten::mkldnn_convolution",
    "aten::convolution_backward",
    "aten::_slow_conv2d_forward",
    "aten::_slow_conv2d_backward",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    "mkldnn::_linear_pointwise",
}
"""What the profiler calls them."""

Shape = Sequence[int]
aten: Any = torch.ops.aten


def _product(left: Shape, right: Shape) -> int:
    *batch, rows, inner = left
    count = 1
    for size in batch:
        count *= size
    return 2 * count * rows * inner * right[-1]


def _added(total: Shape, left: Shape, right: Shape, **named: Any) -> int:
    return _product(left, right)


def _pointwise(x: Shape, weight: Shape, *rest: Any, **named: Any) -> int:
    return _product(x, weight[::-1])


def _attention(query: Shape, key: Shape, value: Shape, *rest: Any, **named: Any) -> int:
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[-2] * (width + value[-1])


def _attention_backward(
    gradient: Shape, query: Shape, key: Shape, value: Shape, *rest: Any, **named: Any
) -> int:
    # The scores again, and a product for each gradient: five for the forward pass's two.
    return 5 * _attention(query, key, value) // 2


def _uncounted() -> dict[Any, Any]:
    """What torch's counter does not know."""
    found = {
        aten.addmm_: _added,
        aten.baddbmm_: _added,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    }
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        found[torch.ops.mkldnn._linear_pointwise] = _pointwise
    return found


def multiply_adds(one: Contender) -> dict[str, float]:
    """Return the multiply-adds of a step of each kind; a cycle of steps is taken."""
    found: dict[str, float] = {}
    for kind, count in TURNS:
        with FlopCounterMode(display=False, custom_mapping=_uncounted()) as counter:
            one.turn(kind, count)
        found[kind] = counter.get_total_flops() / 2 / count
    return found


def in_products(one: Contender, rounds: int) -> dict[str, float]:
    """Return the seconds that products take in a step of each kind; as many cycles are taken."""
    found: dict[str, list[float]] = {kind: [] for kind, _ in TURNS}
    for _ in range(rounds):
        for kind, count in TURNS:
            with profile() as profiled:
                one.turn(kind, count)
            taken = [e for e in profiled.key_averages() if e.key in PRODUCTS]
            found[kind].append(sum(e.self_cpu_time_total for e in taken) / 1e6 / count)
    return {kind: statistics.median(each) for kind, each in found.items()}


def measure(contenders: Sequence[Contender], rounds: int) -> list[dict[str, Any]]:
    """Return for each contender the means of its steps of each kind, in seconds and numbers."""
    counted = []
    for one in contenders:
        one.warm_up()
        counted.append(multiply_adds(one))
        one.times = {kind: [] for kind in one.times}
    for _ in range(rounds):  # what is timed takes turns, and is not profiled
        for kind, count in TURNS:
            for one in contenders:
                one.turn(kind, count)
    rows = []
    for one, work in zip(contenders, counted, strict=True):
        steps = {kind: [t for turn in turns for t in turn] for kind, turns in one.times.items()}
        seconds = {kind: statistics.median(each) for kind, each in steps.items()}
        products = in_products(one, max(2, rounds // 2))
        rows.append({"name": one.name, "seconds": seconds, "products": products, "work": work})
    return rows


def summary(
    rows: Sequence[Mapping[str, Any]], every: int, solve_every: int
) -> list[dict[str, Any]]:
    """Return what is printed: means over an interval.

    Args:
        rows: What `measure` returned, plain SGD's first.
        every: Statistics' interval.
        solve_every: The solves'.
    """
    means = [
        {key: mean_step(row[key], every, solve_every) for key in ("seconds", "products", "work")}
        for row in rows
    ]
    plain = means[0]
    rate = plain["work"] / plain["products"]
    found = []
    for row, own in zip(rows, means, strict=True):
        least = plain["seconds"] + (own["work"] - plain["work"]) / rate
        found.append(
            {
                "name": row["name"],
                "ms": 1e3 * own["seconds"],
                "ms in products": 1e3 * own["products"],
                "other ms": 1e3 * (own["seconds"] - own["products"]),
                "G multiply-adds": own["work"] / 1e9,
                "G per second": own["work"] / own["products"] / 1e9,
                ": SGD": own["seconds"] / plain["seconds"],
                "at SGD's rate": least / plain["seconds"],
            }
        )
    return found


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in rows[0]:
        first = column == "name"
        justify = "left" if first else "right"
        table.add_column("" if first else column, justify=justify, no_wrap=first)
    for row in rows:
        name, *numbers = row.values()
        table.add_row(name, *(f"{number:.2f}" for number in numbers))
    Console(width=max(110, Console().width)).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("networks", nargs="+", choices=list(NETWORKS))
    parser.add_argument("--contenders", default="soframe, inverse", help="separated by ';'")
    parser.add_argument("--kfac-path", type=Path, help="a folder with the package kfac")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10, help="cycles of five steps")
    parser.add_argument("--intervals", default="1/10", help="of statistics and of solves")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    every, solve_every = map(int, options.intervals.split("/"))
    names = ["sgd", *(name.strip() for name in options.contenders.split(";"))]
    if any(name.startswith("kfac") for name in names):
        try:
            import_kfac_pytorch(options.kfac_path)
        except ImportError as error:
            parser.error(KFAC_PYTORCH_MISSING.format(error=error, script="benchmarks/products.py"))
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(options.threads)
    results: dict[str, Any] = {}
    for key in options.networks:
        network = NETWORKS[key]
        torch.manual_seed(0)
        model, device = network.model(), torch.device("cpu")
        each = [contender(name, network, model, device, SOFRAME_OWN[key]) for name in names]
        results[key] = summary(measure(each, options.rounds), every, solve_every)
        if not options.json:
            at = f"statistics and solves every {options.intervals} steps"
            show(f"{network.title}; {options.threads} thread(s), {at}", results[key])
    if options.json:
        print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
