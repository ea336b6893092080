"""Times whole training steps: SGD, soframe and other libraries, side by side in one process.

    python -m benchmarks.steps --kfac-path kfac-pytorch
    python -m benchmarks.steps resnet20 gpt --contenders "soframe, inverse; soframe, eigen"

Every contender trains its own copy of the network on the same batch, and all take turns. Three
kinds of steps are timed for each: one that preconditions only, one that takes statistics too, and
one that also solves. The cost of a setting is their mean over an interval: at statistics every F
and solves every K steps, ``(K - K/F) preconditioning + (K/F - 1) statistics + 1 solve``. Ratios are
to SGD at the same places of the same round; their median over rounds is printed, with the
quartiles. With ``--whole`` every contender takes all steps of an interval of 100 instead, one after
the other, for the mean and the slowest steps, with and without staggered and background solves.
``host`` has the parameters of GPT-2 at a width of 16 and no passes: the time of
Python and dispatch in the step of an optimizer. Libraries that are not installed are left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import OPTIMIZERS, missing
from benchmarks.timing import (
    INTERVALS,
    NETWORKS,
    Contender,
    Network,
    contender,
    figures,
    phase_table,
    race,
    table,
    words_of,
)
from experiments import display
from experiments.display import aligned
from experiments.libraries import import_kfac_pytorch

SOFRAME_OWN: dict[str, dict[str, Any]] = {
    "resnet20": {"solver": "inverse", "channels_last": True},
    "resnet18": {"solver": "inverse"},
    "resnet50": {"solver": "inverse", "channels_last": True},
    "gpt": {"solver": "inverse"},
    "bert-large-layer": {"solver": "inverse"},
}
"""soframe's own best for each network, as far as it is exact."""
USUAL = ("resnet20", "byte-gpt", "vit", "mlp-128", "mlp-16", "host")
CONTENDERS = (
    *("sgd", "adamw-foreach", "adamw", "soframe-adamw"),
    *("torch-muon", "pytorch-optimizer-muon", "soframe-muon"),
    *("pytorch-optimizer-soap", "soframe-soap", "soframe-soap-muon"),
    *("kfac-pytorch, inverse", "soframe, inverse"),
)


def entered(
    names: Sequence[str], network: Network, make: Callable[[str], Contender]
) -> list[Contender]:
    """Return the contenders that can train a network."""
    found = []
    for name in names:
        if network.loss is None and name not in {"sgd", *OPTIMIZERS}:
            continue  # statistics need passes
        try:
            found.append(make(name))
        except ValueError as error:
            print(f"{network.title}: {name} is left out: {error}", file=sys.stderr)
    return found


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
    one = contender(name, network, network.model(), where, SOFRAME_OWN.get(key, {}))
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
    parser = display.parser(__doc__)
    parser.add_argument(
        "networks", nargs="*", help=f"from: {', '.join(NETWORKS)}; by default {', '.join(USUAL)}"
    )
    asked = "names separated by ';'; sgd is always there"
    parser.add_argument("--contenders", type=contenders_named, help=asked)
    parser.add_argument("--kfac-path", type=Path, help="a folder with the package kfac")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0, help="for each network")
    parser.add_argument("--rounds", type=int, default=3, help="at least, whatever the seconds")
    parser.add_argument("--memory", action="store_true", help="peak memory, in fresh processes")
    parser.add_argument("--whole", action="store_true", help="all steps of an interval of 100")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if unknown := set(options.networks) - set(NETWORKS):
        parser.error(f"no network {sorted(unknown)[0]!r}; there are: {', '.join(NETWORKS)}")
    names = ["sgd", *(options.contenders or CONTENDERS[1:])]
    if options.whole and not options.contenders:
        names = ["sgd", "kfac-pytorch, inverse", "soframe, inverse", "soframe, inverse, staggered"]
        names += ["soframe, inverse, background", "soframe, inverse, background, staggered"]
    if options.kfac_path is not None:
        sys.path.insert(0, str(options.kfac_path))
    absent = missing(names)
    for name, package in absent.items():
        print(f"{name} is left out: there is no package {package}", file=sys.stderr)
    names = [name for name in names if name not in absent]
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
        own = SOFRAME_OWN.get(key, {})
        contenders = entered(
            names,
            network,
            partial(contender, network=network, model=model, device=device, own=own, every=every),
        )
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
