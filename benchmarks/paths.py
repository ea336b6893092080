"""The paths of a convolution's factor: the time that each takes, and the one that was predicted.

    python benchmarks/paths.py --threads 1
    python benchmarks/paths.py --threads 2 --channels-last
    python benchmarks/paths.py --device cuda

That is where the figures of `soframe.kernels.dispatch` are from. Paths take turns, with caches that
something else has filled in between, as in training. The path that soframe chooses is marked.
On a GPU every call is waited for, and predictions are those of a processor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from soframe.kernels import correlation, fourier
from soframe.kernels.dispatch import PATHS, Path, Processor, candidates, choose, seconds
from soframe.kernels.geometry import Axis, Geometry
from soframe.kernels.products import are_exact, has_primitives

ELSEWHERE = 12_000_000  # numbers, more than caches hold
SHOWN: tuple[Path, ...] = ("correlation", "fourier", "shifts", "rows", "unfold")
SERVE = {"correlation": correlation.serves, "fourier": fourier.serves}
MAY = {"correlation": has_primitives, "fourier": are_exact}  # on a GPU
WARM_UP, ROUNDS = {"cpu": 1, "cuda": 2}, {"cpu": 9, "cuda": 5}  # by the kind of device
# batch, groups, channels of a group, size of the map, kernel, stride
CASES = [
    (64, 1, 3, 32, 3, 1),
    (64, 1, 16, 32, 3, 1),
    (64, 1, 32, 16, 3, 1),
    (64, 1, 64, 8, 3, 1),
    (64, 1, 16, 32, 3, 2),
    (8, 1, 3, 224, 7, 2),
    (8, 1, 64, 56, 3, 1),
    (8, 1, 128, 28, 3, 1),
    (8, 1, 256, 14, 3, 1),
    (8, 1, 512, 7, 3, 1),
    (8, 1, 128, 56, 3, 2),
    (8, 32, 4, 28, 3, 1),
    (8, 96, 1, 28, 3, 1),
    (128, 1, 64, 32, 3, 1),
    (128, 1, 128, 16, 3, 1),
    (128, 1, 256, 8, 3, 1),
    (32, 1, 64, 56, 3, 1),
    (32, 1, 128, 28, 3, 1),
    (32, 1, 256, 14, 3, 1),
]


def measure(geometry: Geometry, x: Tensor, rounds: int) -> dict[Path, float]:
    """Path -> median seconds."""
    on_gpu, warm_up = x.device.type == "cuda", WARM_UP[x.device.type]
    total = torch.zeros(geometry.groups, geometry.features, geometry.features, device=x.device)
    elsewhere = torch.ones(ELSEWHERE, device=x.device)
    taken: dict[Path, list[float]] = {
        path: []
        for path in SHOWN
        if (path not in SERVE or SERVE[path](geometry))
        and (not on_gpu or path not in MAY or MAY[path](x))
    }

    def clock() -> float:
        if on_gpu:
            torch.cuda.synchronize(x.device)
        return time.perf_counter()

    for _ in range(rounds + warm_up):
        for path, own in taken.items():
            elsewhere.mul_(1.0)
            start = clock()
            PATHS[path](total, x, geometry, 1.0)
            own.append(clock() - start)
    return {path: statistics.median(own[warm_up:]) for path, own in taken.items()}


def show(rows: list[dict[str, object]], threads: int, where: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = f"ms, and predicted ms; {where}, {threads} thread(s)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    table.add_column("batch, groups x channels, map, kernel / stride", no_wrap=True)
    for path in SHOWN:
        table.add_column(path, justify="right")
    digits = 1 if where == "CPU" else 3
    for row in rows:
        batch, groups, channels, size, kernel, stride = row["case"]  # type: ignore[misc]
        measured, predicted = row["measured"], row["predicted"]
        assert isinstance(measured, dict)
        assert isinstance(predicted, dict)
        cells = [
            f"{'*' if path == row['chosen'] else ''}{1e3 * measured[path]:.{digits}f} "
            f"({1e3 * predicted[path]:.1f})"
            if path in predicted
            else f"{1e3 * measured[path]:.{digits}f}"
            if path in measured
            else ""
            for path in SHOWN
        ]
        table.add_row(f"{batch}, {groups} x {channels}, {size}, {kernel} / {stride}", *cells)
    Console(width=140).print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time of the paths of a convolution's factor.")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, help=f"by default {ROUNDS}")
    parser.add_argument("--cases", type=int, default=len(CASES), help="the first so many")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    if device.type not in ROUNDS:
        parser.error(f"no device {options.device!r}; there are: {', '.join(ROUNDS)}")
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    rounds = options.rounds or ROUNDS[device.type]
    torch.set_num_threads(options.threads)
    form = torch.channels_last if options.channels_last else torch.contiguous_format
    rows: list[dict[str, object]] = []
    for batch, groups, channels, size, kernel, stride in CASES[: options.cases]:
        axis = Axis(size, kernel, stride, 1, kernel // 2, kernel // 2)
        geometry = Geometry(batch, groups, channels, axis, axis)
        x = torch.randn(batch, groups * channels, size, size, device=device)
        x = x.contiguous(memory_format=form)
        own = {"processor": Processor.of(x), "planes": x.is_contiguous()}
        measured = measure(geometry, x, rounds)
        rows.append(
            {
                "case": (batch, groups, channels, size, kernel, stride),
                "chosen": choose(geometry, **own),
                "measured": measured,
                "predicted": {
                    path: seconds(path, geometry, **own)
                    for path in candidates(geometry, own["processor"])
                },
            }
        )
    if options.json:
        print(json.dumps({"device": where, "threads": options.threads, "rows": rows}, indent=1))
    else:
        show(rows, options.threads, where)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
