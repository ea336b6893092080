"""Times whole training steps: SGD, kfac-pytorch and soframe, side by side in one process.

    python -m benchmarks.steps resnet20 gpt --kfac-path kfac-pytorch
    python -m benchmarks.steps --device cuda --networks all --seconds 100

Every contender trains its own copy of the network on the same batch, and all take turns. Three
kinds of steps are timed for each: one that preconditions only, one that takes statistics too, and
one that also solves. The cost of a setting is their mean over an interval: at statistics every F
and solves every K steps, ``(K - K/F) preconditioning + (K/F - 1) statistics + 1 solve``. Ratios are
to SGD at the same places of the same round; their median over rounds is printed, with the
quartiles. With ``--whole`` every contender takes all steps of an interval of 100 instead, one after
the other, for the mean and the slowest steps, with and without staggered and background solves.
Needs torch and the repository only; kfac-pytorch if it is found.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import (
    INTERVALS,
    NETWORKS,
    Contender,
    contender,
    figures,
    phase_table,
    race,
    table,
    words_of,
)
from experiments.display import aligned
from experiments.libraries import KFAC_PYTORCH_MISSING, import_kfac_pytorch

SOFRAME_OWN: dict[str, dict[str, Any]] = {
    "resnet20": {"solver": "inverse", "channels_last": True},
    "resnet18": {"solver": "inverse"},
    "resnet50": {"solver": "inverse", "channels_last": True},
    "gpt": {"solver": "inverse"},
    "bert-large-layer": {"solver": "inverse"},
}
"""soframe's own best for each network, as far as it is exact."""
USUAL = tuple(name for name in NETWORKS if name != "resnet18")  # whose steps take seconds


def whole(contenders: list[Contender], steps: int) -> list[dict[str, Any]]:
    """Take all steps of an interval, in turns, and return a row for each contender.

    Contenders with background solves take their steps in a row, after the others: their threads
    would slow the others down, and finish while they wait for their turns.

    Args:
        contenders: SGD first.
        steps: The interval of the solves.
    """
    taken: dict[str, list[float]] = {one.name: [] for one in contenders}
    in_turns = [one for one in contenders if not one.beside]
    for together in (in_turns, *([one] for one in contenders if one.beside)):
        for number in range(-1, steps):  # the first solve, of everything, is not the interval's
            for one in together:
                start = one.clock()
                one.step()
                if number >= 0:
                    taken[one.name].append(1e3 * (one.clock() - start))
        for one in together:
            if one.beside:
                one.preconditioner.close()
    unit = statistics.fmean(taken[contenders[0].name])
    rows = []
    for name, times in taken.items():
        *_, p99 = statistics.quantiles(times, n=100, method="inclusive")
        middle = statistics.median(times)
        rows.append({"name": name, "mean": statistics.fmean(times), "median": middle, "p99": p99})
        rows[-1] |= {"mean : SGD": rows[-1]["mean"] / unit, "p99 : median": p99 / middle}
        rows[-1]["max : median"] = max(times) / middle
    return rows


def peak(name: str, key: str, device: str, threads: int, path: Path | None) -> float:
    """Return the peak memory of a contender in MB: resident, or on the device.

    Args:
        name: Of the contender.
        key: Of the network.
        device: Of the contender.
        threads: Of torch.
        path: Of kfac-pytorch.
    """
    torch.set_num_threads(threads)
    if name.startswith("kfac"):
        import_kfac_pytorch(path)
    network, where = NETWORKS[key], torch.device(device)
    one = contender(name, network, network.model(), where, SOFRAME_OWN[key])
    one.warm_up()
    if where.type == "cuda":
        return torch.cuda.max_memory_allocated(where) / 2**20
    # Not getrusage's, which a child inherits from its parent.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 2**10


def contenders_named(text: str) -> list[str]:
    """Return the names that a text gives, separated by semicolons."""
    names = [name.strip() for name in text.split(";")]
    try:
        for name in names:
            words_of(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return names


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "networks", nargs="*", help=f"from: {', '.join(NETWORKS)}; by default {', '.join(USUAL)}"
    )
    asked = "names separated by ';'; sgd is always there"
    parser.add_argument("--contenders", type=contenders_named, help=asked)
    parser.add_argument("--kfac-path", type=Path, help="a folder with the package kfac")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each network")
    parser.add_argument("--rounds", type=int, default=3, help="at least, whatever the seconds")
    parser.add_argument("--memory", action="store_true", help="peak memory, in fresh processes")
    parser.add_argument("--whole", action="store_true", help="all steps of an interval of 100")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.networks) - set(NETWORKS):
        parser.error(f"no network {sorted(unknown)[0]!r}; there are: {', '.join(NETWORKS)}")
    names = ["sgd", "soframe, eigen", "soframe, inverse", "soframe, own"]
    try:
        import_kfac_pytorch(options.kfac_path)
        names[1:1] = ["kfac-pytorch, eigen", "kfac-pytorch, inverse"]
    except ImportError as error:
        script = "benchmarks.steps"
        print(KFAC_PYTORCH_MISSING.format(error=error, script=script), file=sys.stderr)
    if options.whole:
        names += ["soframe, inverse, staggered solves", "soframe, inverse, staggered"]
        names += ["soframe, inverse, background", "soframe, inverse, background, staggered"]
    if options.contenders:
        names = ["sgd", *options.contenders]
    warnings.filterwarnings("ignore", category=UserWarning)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    results: dict[str, Any] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": where,
        "threads": options.threads,
        "networks": {},
    }
    for key in options.networks or USUAL:
        network = NETWORKS[key]
        torch.manual_seed(0)
        model = network.model()
        every = INTERVALS[-1] if options.whole else None
        own = SOFRAME_OWN[key]
        contenders = [contender(name, network, model, device, own, every) for name in names]
        if options.whole:
            rows = whole(contenders, INTERVALS[-1][-1])
            results["networks"][key] = {"title": network.title, "rows": rows}
            if not options.json:
                title = f"{network.title}; {where}, {options.threads} threads"
                head = list(rows[0])
                cells = [[row["name"], *(f"{row[key]:.2f}" for key in head[1:])] for row in rows]
                print(aligned(title, [["", *head[1:]], *cells]), flush=True)
            continue
        rounds = race(contenders, options.seconds, options.rounds)
        rows = figures({one.name: one.times for one in contenders})
        del contenders
        if options.memory:
            context = multiprocessing.get_context("spawn")
            for row in rows:
                with context.Pool(1) as pool:
                    asked = (row["name"], key, options.device, options.threads, options.kfac_path)
                    row["memory"] = pool.apply(peak, asked)
        results["networks"][key] = {"title": network.title, "rounds": rounds, "rows": rows}
        if not options.json:
            title = f"{network.title}; {where}, {options.threads} threads, {rounds} rounds"
            print(table(title, rows), phase_table("What a part adds", rows), sep="\n", flush=True)
    if options.json:
        print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
