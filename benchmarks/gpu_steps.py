"""Times whole training steps on one GPU: contenders side by side in one process, in turns.

    python -m benchmarks.gpu_steps --path peers --minutes 8 --json steps.json
    python -m benchmarks.gpu_steps gpt2 --only "soframe-muon; torch-muon" --batch 32
    python -m benchmarks.gpu_steps gpt2 --profile soframe-soap --profile pytorch-optimizer-soap

``gpt2`` is GPT-2 of 124 million parameters in bfloat16 by autocast. A turn of a contender is one
interval of its solves, between two waits for the device, so that all periodic work is in it.
``resnet50`` is ResNet-50 in single precision, ``resnet50-half`` in bfloat16 by autocast with
channels last. There three kinds of steps are timed, as `benchmarks/steps.py` does, and the means at
two settings are computed from them. Ratios are to the first contender of the workload in the same
round; their median over rounds is printed, with the quartiles. Tokens and images are random and
fixed by a seed, and learning rates are tiny: only time counts, not learning.

soframe multiplies in TensorFloat-32 by default, and so do the others with ``--precision high``,
the default here. Peak memory is a contender's own while no other computes: the most that is
allocated while it is built and warmed up, over the allocation before.

With ``--profile`` nothing is compared: an interval of each contender that is named runs under
torch.profiler. A contender that fails is dropped, and the exit status is then 1. After
``--minutes`` no further contender is set up, and races end. Needs torch and the repository; peers
that cannot be found are left out.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity

import soframe
from benchmarks.peers import OPTIMIZERS, Optimizers, missing, soframe_method
from benchmarks.timing import (
    DAMPING,
    NETWORKS,
    Contender,
    Network,
    clock_of,
    contender,
    figures,
    images,
    phase_table,
    quartiles,
    spread,
    table,
)
from experiments import display
from experiments.display import aligned
from experiments.libraries import import_kfac_pytorch
from experiments.models import GPT, Sizes, next_token_loss
from soframe.planning.workloads import Residual, convolution

SOLVE_EVERY = 10  # steps of GPT-2
MEGABYTE = 2**20


class Trainee(Protocol):
    """A contender of a workload, set up and in training."""

    def warm_up(self) -> None:
        """Take steps that are not timed, until periodic work has been done twice."""

    def turn(self) -> None:
        """Take the steps of an interval, and note their times."""

    def close(self) -> None:
        """End background work."""


class Training:
    """GPT-2 in training; a turn is an interval of solves.

    Args:
        model: Its own, on the device.
        optimizers: All take a step after each backward pass.
        batches: One for each step of an interval: windows of a token more than the context.

    Attributes:
        ms: Of a step, in each turn.
        host_ms: The part of it until Python only waits for the device.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], batches: Tensor
    ) -> None:
        self.model, self.optimizers, self.batches = model, optimizers, batches
        self.clock = clock_of(batches.device)
        self.ms: list[float] = []
        self.host_ms: list[float] = []
        self._taken = 0

    def step(self) -> None:
        """Take a step on the next batch."""
        self.zero_grad()
        windows = self.batches[self._taken % len(self.batches)]
        device = windows.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = next_token_loss(self.model, windows[:, :-1], windows[:, 1:])
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        self._taken += 1

    def zero_grad(self) -> None:
        """Give the memory of gradients back."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def warm_up(self) -> None:
        """Take two intervals: a turn begins with a solve, which in the background lands in it."""
        for _ in range(2 * len(self.batches)):
            self.step()
        self.zero_grad()

    def turn(self) -> None:
        start, begun = self.clock(), time.perf_counter()
        for _ in self.batches:
            self.step()
        host = time.perf_counter() - begun
        whole = self.clock() - start
        self.zero_grad()
        self.ms.append(1e3 * whole / len(self.batches))
        self.host_ms.append(1e3 * host / len(self.batches))

    def close(self) -> None:
        """Do nothing: no work is in the background."""
        for optimizer in self.optimizers:
            if isinstance(optimizer, soframe.Optimizer):
                optimizer.close()


class Cycle:
    """A network whose kinds of steps are timed; a turn is one cycle of them.

    Args:
        contender: The network in training.
    """

    def __init__(self, contender: Contender) -> None:
        self.contender = contender

    def warm_up(self) -> None:
        self.contender.warm_up()

    def turn(self) -> None:
        self.contender.cycle()

    def close(self) -> None:
        if isinstance(self.contender.preconditioner, soframe.Optimizer | soframe.Preconditioner):
            self.contender.preconditioner.close()


@dataclass(frozen=True)
class Workload:
    """A training problem with its contenders.

    Attributes:
        title: The title of its table.
        contenders: Functions that set one up each; the first is the reference of ratios.
        rows: Makes a row of each contender that took part, by its name.
        text: Makes tables of a title and rows.
    """

    title: str
    contenders: dict[str, Callable[[], Trainee]]
    rows: Callable[[dict[str, Any]], list[dict[str, Any]]]
    text: Callable[[str, list[dict[str, Any]]], str]


@dataclass(frozen=True)
class Preset:
    """How large the workloads are.

    Attributes:
        sizes: Of GPT-2.
        windows: Of a batch.
        network: The other workload's.
    """

    sizes: Sizes
    windows: int
    network: Network


def tiny_resnet() -> nn.Module:
    """Return a network of the layers that ResNet-50 has."""
    layers = [convolution(3, 4, 3, 1), nn.ReLU(), Residual(4, [(8, 3, 2), (8, 1, 1)])]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


PRESETS = {
    "real": Preset(
        Sizes(),
        16,
        replace(
            NETWORKS["resnet50"],
            title="ResNet-50, 64 x 224 x 224",
            batch=partial(images, 64, 224, 1000),
        ),
    ),
    "tiny": Preset(
        Sizes(vocabulary=64, context=8, width=16, layers=1, heads=2),
        2,
        replace(
            NETWORKS["resnet50"],
            title="a tiny ResNet, 2 x 8 x 8",
            model=tiny_resnet,
            batch=partial(images, 2, 8, 10),
        ),
    ),
}


# -- GPT-2 ------------------------------------------------------------------------------------

POSITIONS = soframe.Statistics(samples="positions")
GPT2_CONTENDERS: dict[str, Optimizers] = {
    **{name: OPTIMIZERS[name] for name in OPTIMIZERS if name != "adamw-foreach"},
    "soframe-soap-background": partial(soframe_method, "soap", background=SOLVE_EVERY - 1),
    "soframe-soap-muon-background": partial(
        soframe_method, "soap-muon", background=SOLVE_EVERY - 1
    ),
    "soframe-kfac": partial(soframe_method, "kfac", statistics=POSITIONS),
}
for _name in (
    "dion-muon",
    "heavyball-muon",
    "heavyball-soap",
):  # they compile: last, in case time is up
    GPT2_CONTENDERS[_name] = GPT2_CONTENDERS.pop(_name)


def gpt2(preset: Preset, windows: int | None, device: torch.device) -> Workload:
    """Return the workload.

    Args:
        preset: Of the model.
        windows: Of a batch; None for the preset's.
        device: The device.
    """
    sizes, windows = preset.sizes, windows or preset.windows
    generator = torch.Generator(device).manual_seed(0)
    shape = (SOLVE_EVERY, windows, sizes.context + 1)
    batches = torch.randint(sizes.vocabulary, shape, generator=generator, device=device)
    prototype = GPT(sizes, fused=True)

    def set_up(optimizers: Optimizers) -> Training:
        model = copy.deepcopy(prototype).to(device)
        return Training(model, optimizers(model, SOLVE_EVERY), batches)

    parameters = sum(p.numel() for p in prototype.parameters())
    precision = "bfloat16 autocast" if device.type == "cuda" else "float32"
    title = f"GPT-2 of {parameters / 1e6:.3g} million, {windows} x {sizes.context}, {precision}"
    contenders: dict[str, Callable[[], Trainee]] = {
        name: partial(set_up, optimizers) for name, optimizers in GPT2_CONTENDERS.items()
    }
    return Workload(f"{title}, solves every {SOLVE_EVERY}", contenders, gpt2_rows, gpt2_text)


def gpt2_rows(trained: dict[str, Training]) -> list[dict[str, Any]]:
    """Return `Workload.rows`."""
    reference = trained.get("adamw")
    rows = []
    for name, one in trained.items():
        row: dict[str, Any] = {"name": name, "ms": quartiles(one.ms), "turns": one.ms}
        row["host ms"] = quartiles(one.host_ms)[1]
        if reference is not None:
            pairs = list(zip(one.ms, reference.ms, strict=True))
            row["ratio"] = quartiles([own / base for own, base in pairs])
        rows.append(row)
    return rows


def gpt2_text(title: str, rows: list[dict[str, Any]]) -> str:
    """See `Workload.text`."""
    head = ["", "ms a step", "host ms", ": adamw", "peak MB", "held MB"]
    lines = [head]
    for row in rows:
        cells = [row["name"], spread(row["ms"], 1), f"{row['host ms']:.1f}"]
        cells.append(spread(row["ratio"], 2) if "ratio" in row else "")
        cells += [f"{row[key]:.0f}" if key in row else "" for key in ("memory", "held")]
        lines.append(cells)
    return aligned(title, lines)


# -- ResNet-50 --------------------------------------------------------------------------------

RESNET_NAMES = {
    "sgd": "sgd",
    "kfac-pytorch-inverse": "kfac-pytorch, inverse",
    "kfac-pytorch-eigen": "kfac-pytorch, eigen",
    "soframe-kfac-inverse": "soframe, inverse",
    "soframe-kfac-eigen": "soframe, eigen",
}
"""Their names in `benchmarks.timing`."""


def resnet50(preset: Preset, device: torch.device, half: bool) -> Workload:
    """Return the workload.

    Args:
        preset: Of the network.
        device: The device.
        half: Whether in bfloat16 and channels last.
    """
    network = preset.network
    torch.manual_seed(0)
    prototype = network.model()

    def set_up(name: str) -> Cycle:
        own = name + ", half" if half else name
        if name.startswith("kfac-pytorch"):
            import_kfac_pytorch()
        elif half:  # kfac-pytorch takes views that channels last does not have
            own += ", channels_last"
        return Cycle(contender(own, network, prototype, device, {}))

    contenders: dict[str, Callable[[], Trainee]] = {
        name: partial(set_up, inner) for name, inner in RESNET_NAMES.items()
    }
    precision = "bfloat16 autocast, channels last" if half else "float32"
    title = f"{network.title}, {precision}, damping {DAMPING}"
    return Workload(title, contenders, resnet_rows, resnet_text)


def resnet_rows(trained: dict[str, Cycle]) -> list[dict[str, Any]]:
    """See `Workload.rows`; bare times without SGD, which everything is held to."""
    if "sgd" not in trained:
        return [{"name": name, "turns": one.contender.times} for name, one in trained.items()]
    names = {inner: name for name, inner in RESNET_NAMES.items()}
    rows = figures({RESNET_NAMES[name]: one.contender.times for name, one in trained.items()})
    for row in rows:
        row["name"] = names[row["name"]]
        row["turns"] = trained[row["name"]].contender.times
    return rows


def resnet_text(title: str, rows: list[dict[str, Any]]) -> str:
    """See `Workload.text`."""
    if not rows or rows[0]["name"] != "sgd":
        return f"\n{title}: nothing to compare with"
    lines = [["", "peak MB", "held MB"]]
    measured = [row for row in rows if "memory" in row]
    lines += [[row["name"], f"{row['memory']:.0f}", f"{row['held']:.0f}"] for row in measured]
    bare = [{key: value for key, value in row.items() if key != "memory"} for row in rows]
    parts = [table(title, bare), phase_table("What a part adds", rows)]
    return "\n".join([*parts, aligned("Memory", lines)] if len(lines) > 1 else parts)


KNOWN = {
    "gpt2": list(GPT2_CONTENDERS),
    "resnet50-half": list(RESNET_NAMES),
    "resnet50": list(RESNET_NAMES),
}
"""The names of the contenders of each workload, the reference first."""


@dataclass
class Outcome:
    """The results on a workload, as the file contains them.

    Attributes:
        workload: The workload.
        device: The device.
        errors: The error of each contender that failed.
        trained: The contenders that take part, by name.
        memory: Of each of them, in MB.
        profiles: The profiler's results, by name.
        rounds: That all have taken.
    """

    workload: Workload
    device: torch.device
    errors: dict[str, str] = field(default_factory=dict)
    trained: dict[str, Trainee] = field(default_factory=dict)
    memory: dict[str, dict[str, float]] = field(default_factory=dict)
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)
    rounds: int = 0

    def attempt(self, name: str, action: Callable[[], None]) -> bool:
        """Run an action of a contender, and drop the contender if it fails.

        Args:
            name: The contender's.
            action: The action.

        Returns:
            Whether it succeeded.
        """
        try:
            action()
        except Exception as error:
            self.errors[name] = "".join(traceback.format_exception_only(error)).strip()
            print(f"{name} failed:\n{traceback.format_exc(limit=-6)}", file=sys.stderr, flush=True)
        if name not in self.errors:
            return True
        self.trained.pop(name, None)
        self.memory.pop(name, None)
        self.free()  # only now that the error, whose frames hold tensors, is gone
        return False

    def free(self) -> None:
        """Free the memory of dropped contenders."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def begin(self, name: str) -> None:
        """Set a contender up and warm it up, and measure its memory."""
        on_gpu = self.device.type == "cuda"
        self.free()
        start = clock_of(self.device)()
        before = 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
        one = self.trained[name] = self.workload.contenders[name]()
        one.warm_up()
        seconds = clock_of(self.device)() - start
        if on_gpu:
            peak = torch.cuda.max_memory_allocated(self.device)
            held = torch.cuda.memory_allocated(self.device)
            self.memory[name] = {
                "memory": (peak - before) / MEGABYTE,
                "held": (held - before) / MEGABYTE,
            }
        say(f"{name}: set up and warmed up in {seconds:.1f} s")

    def turn(self, name: str) -> None:
        """Let a contender take a turn."""
        self.trained[name].turn()

    def race(self, seconds: float, least: int, save: Callable[[], None]) -> None:
        """Let all contenders take turns until time is up.

        Args:
            seconds: For all of them together, once they are warm.
            least: The fewest rounds.
            save: Writes the results so far, after each round.
        """
        end = time.perf_counter() + seconds
        while self.trained and (self.rounds < least or time.perf_counter() < end):
            taken = []
            for name in list(self.trained):
                start = time.perf_counter()
                if self.attempt(name, partial(self.turn, name)):
                    taken.append(f"{name} {time.perf_counter() - start:.2f}")
            self.rounds += 1
            save()
            say(f"round {self.rounds}, seconds of a turn: {', '.join(taken)}")

    def profile(self, name: str) -> None:
        """Run an interval of a contender under the profiler, after one without it."""
        one = self.trained[name]
        clock = clock_of(self.device)
        start = clock()
        one.turn()
        plain = clock() - start
        activities = [ProfilerActivity.CPU]
        if on_gpu := self.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=activities) as profiler:
            start = clock()
            one.turn()
            wall = clock() - start
        averages = profiler.key_averages()
        sort_by = "cuda_time_total" if on_gpu else "cpu_time_total"
        print(f"\n{name}\n{averages.table(sort_by=sort_by, row_limit=25)}", flush=True)
        # As torch's table adds them up: kernels and copies, and no annotations of theirs.
        there = [
            event
            for event in averages
            if event.device_type.name == "CUDA" and not getattr(event, "is_user_annotation", False)
        ]
        waits = {
            event.key: {"count": event.count, "ms": event.cpu_time_total / 1e3}
            for event in averages
            if event.key.startswith("cuda") and "Synchronize" in event.key
        }
        found = self.profiles[name] = {
            "cuda_ms": sum(event.self_device_time_total for event in there) / 1e3,
            "cuda_events": sum(event.count for event in there),
            "wall_ms": 1e3 * plain,
            "wall_ms_under_profiler": 1e3 * wall,
            "waits": waits,
        }
        print(
            f"{name}: {found['cuda_ms']:.1f} ms on the device in {found['cuda_events']} kernels "
            f"and copies; the interval takes {found['wall_ms']:.1f} ms, and under the profiler "
            f"{found['wall_ms_under_profiler']:.1f} ms"
        )
        for key, wait in waits.items():
            print(f"  {key}: {wait['count']} times, {wait['ms']:.1f} ms")
        sys.stdout.flush()

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of timed contenders."""
        timed = self.trained if self.rounds else {}
        return [row | self.memory.get(row["name"], {}) for row in self.workload.rows(timed)]

    def written(self) -> dict[str, Any]:
        """Return the content of the file."""
        found: dict[str, Any] = {"title": self.workload.title, "rounds": self.rounds}
        found |= {"reference": next(iter(self.workload.contenders)), "rows": self.rows()}
        return found | {"profiles": self.profiles, "errors": self.errors}

    def close(self) -> None:
        """End all contenders, and give their memory back."""
        for one in self.trained.values():
            one.close()
        self.trained.clear()
        self.free()


def say(text: str) -> None:
    """Print progress on the error output."""
    print(text, file=sys.stderr, flush=True)


def settings_of(device: torch.device) -> dict[str, Any]:
    """Return the settings that results depend on."""
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": cudnn.version(),
        "python": platform.python_version(),
        "cudnn.allow_tf32": cudnn.allow_tf32,
        "cudnn.conv.fp32_precision": cudnn.conv.fp32_precision,
        "cuda.matmul.allow_tf32": matmul.allow_tf32,
        "cuda.matmul.fp32_precision": matmul.fp32_precision,
    }


def run(
    workload: Workload,
    names: Sequence[str],
    options: argparse.Namespace,
    save: Callable[[Outcome], None],
) -> Outcome:
    """Compare contenders on a workload, or profile some.

    Args:
        workload: The workload.
        names: The contenders that take part, in order.
        options: The command's.
        save: Writes the results so far.

    Returns:
        The results.
    """
    outcome = Outcome(workload, torch.device(options.device))
    if options.profile:
        for name in names:
            if outcome.attempt(name, partial(outcome.begin, name)):
                outcome.attempt(name, partial(outcome.profile, name))
            save(outcome)
            outcome.close()  # one at a time
        return outcome
    for name in names:
        if time.perf_counter() < options.end:
            outcome.attempt(name, partial(outcome.begin, name))
        else:
            outcome.errors[name] = "time is up"
    left = min(options.seconds, options.end - time.perf_counter())
    outcome.race(left, options.rounds if left > 0 else 1, partial(save, outcome))
    print(workload.text(f"{workload.title}; {outcome.rounds} rounds", outcome.rows()), flush=True)
    for name, error in outcome.errors.items():
        print(f"{name} failed: {error}", flush=True)
    save(outcome)
    outcome.close()
    return outcome


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command."""
    parser = display.parser(__doc__)
    parser.add_argument("workloads", nargs="*", help=f"from: {', '.join(KNOWN)}")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="real")
    parser.add_argument("--only", help="names separated by ';'; the reference is always there")
    parser.add_argument("--profile", action="append", default=[], metavar="NAME")
    parser.add_argument("--batch", type=int, help="windows of a step of gpt2")
    precisions = ("highest", "high")
    parser.add_argument("--precision", choices=precisions, default="high", help="of peers")
    parser.add_argument("--seconds", type=float, default=40.0, help="for each workload")
    parser.add_argument("--rounds", type=int, default=3, help="at least, whatever the seconds")
    parser.add_argument("--minutes", type=float, default=60.0, help="for everything")
    parser.add_argument("--path", type=Path, action="append", default=[], help="of peers' packages")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    torch.set_float32_matmul_precision(options.precision)
    options.end = time.perf_counter() + 60 * options.minutes
    options.workloads = options.workloads or list(KNOWN)
    if unknown := set(options.workloads) - set(KNOWN):
        parser.error(f"no workload {sorted(unknown)[0]!r}; there are: {', '.join(KNOWN)}")
    options.only = [name.strip() for name in options.only.split(";")] if options.only else None
    there = [name for key in options.workloads for name in KNOWN[key]]
    if unknown := {*options.profile, *(options.only or ())} - set(there):
        parser.error(f"no contender {sorted(unknown)[0]!r}; there are: {', '.join(there)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit status."""
    options = parsed(arguments)
    sys.path[:0] = map(str, options.path)
    warnings.filterwarnings("ignore", category=UserWarning)
    device, preset = torch.device(options.device), PRESETS[options.preset]
    settings = settings_of(device)
    print("; ".join(f"{key} {value}" for key, value in settings.items()), flush=True)
    results: dict[str, Any] = {**settings, "left_out": {}, "workloads": {}}
    absent, failed = missing({name for names in KNOWN.values() for name in names}), False
    for key in dict.fromkeys(options.workloads):
        first, *_ = names = KNOWN[key]
        if asked := options.profile or options.only:
            names = [name for name in names if name in asked]
            if not names:
                continue
            if not options.profile and first not in names:
                names = [first, *names]
        if key == "gpt2":
            workload = gpt2(preset, options.batch, device)
        else:
            workload = resnet50(preset, device, key == "resnet50-half")
        for name in (name for name in names if name in absent):
            results["left_out"][name] = absent[name]
            say(f"{name} is left out: there is no package {absent[name]}")

        def save(outcome: Outcome, key: str = key) -> None:
            results["workloads"][key] = outcome.written()
            if options.json:
                options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")

        outcome = run(workload, [name for name in names if name not in absent], options, save)
        failed = failed or bool(outcome.errors)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
