"""Times whole training steps on one GPU: contenders side by side in one process, in turns.

    python benchmarks/gpu_steps.py --json steps.json
    python benchmarks/gpu_steps.py gpt2 --only "soframe-muon; torch-muon" --batch 32
    python benchmarks/gpu_steps.py gpt2 --profile soframe-soap --profile pytorch-optimizer-soap

``gpt2`` is GPT-2 of 124 million parameters in bfloat16 by autocast. A turn of a contender is one
interval of its solves, between two waits for the device, so that all periodic work is in it.
``resnet50`` is ResNet-50 in single precision. There three kinds of steps are timed, as
`benchmarks/steps.py` does, and the means at two settings are computed from them. Ratios are to the
first contender of the workload in the same round; their median over rounds is printed, with the
quartiles. Tokens and images are random and fixed by a seed, and learning rates are tiny: nothing is
learned, only time counts.

Peak memory is what a contender adds while nobody else computes: the most that is allocated while it
is built and warmed up, over what was allocated before.

With ``--profile`` nothing is compared: an interval of each contender that is named runs under
torch.profiler. A contender that fails is dropped, and the exit status is then 1. Needs torch and
the repository; peers that cannot be found are left out.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import platform
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness.contenders import (
    clock_of,
)
from harness.gpu_workloads import (
    KNOWN,
    MEGABYTE,
    PRESETS,
    Trainee,
    Workload,
    gpt2,
    resnet50,
)
from torch.profiler import ProfilerActivity


@dataclass
class Outcome:
    """What is found on a workload, and said of it in the file.

    Attributes:
        workload: The workload.
        device: The device.
        errors: The error of each contender that failed.
        trained: Those that take part, by name.
        memory: Of each of them, in MB.
        profiles: What the profiler found, by name.
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
        """Do something of a contender, and drop the contender where it fails.

        Args:
            name: The contender's.
            action: What is done.

        Returns:
            Whether it was done.
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
        """Give back the memory of what is no more."""
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
            least: Rounds, whatever the seconds.
            save: Writes down what there is, after each round.
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
        """Return the rows of what was timed."""
        timed = self.trained if self.rounds else {}
        return [row | self.memory.get(row["name"], {}) for row in self.workload.rows(timed)]

    def written(self) -> dict[str, Any]:
        """Return what the file says."""
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
    """Say how far it is, where results are not."""
    print(text, file=sys.stderr, flush=True)


def missing() -> dict[str, str]:
    """Return those that cannot take part, and what is not there."""
    absent = {}
    if not hasattr(torch.optim, "Muon"):
        absent["torch-muon"] = "torch.optim.Muon"
    for name, package in (
        ("pytorch-optimizer-soap", "pytorch_optimizer"),
        ("distributed-shampoo", "distributed_shampoo"),
        ("kfac-pytorch-inverse", "kfac"),
        ("kfac-pytorch-eigen", "kfac"),
    ):
        if importlib.util.find_spec(package) is None:
            absent[name] = f"the package {package}"
    return absent


def settings_of(device: torch.device) -> dict[str, Any]:
    """Return what results depend on, besides the code."""
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
        names: Of those that take part, in order.
        options: The command's.
        save: Writes down what there is.

    Returns:
        What came of it.
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
        outcome.attempt(name, partial(outcome.begin, name))
    outcome.race(options.seconds, options.rounds, partial(save, outcome))
    print(workload.text(f"{workload.title}; {outcome.rounds} rounds", outcome.rows()), flush=True)
    for name, error in outcome.errors.items():
        print(f"{name} failed: {error}", flush=True)
    save(outcome)
    outcome.close()
    return outcome


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("workloads", nargs="*", help="gpt2, resnet50; by default both")
    parser.add_argument("--preset", choices=tuple(PRESETS), default="real")
    parser.add_argument("--only", help="names separated by ';'; the reference is always there")
    parser.add_argument("--profile", action="append", default=[], metavar="NAME")
    parser.add_argument("--batch", type=int, help="windows of a step of gpt2")
    precisions = ("highest", "high")
    parser.add_argument("--precision", choices=precisions, default="highest", help="of products")
    parser.add_argument("--seconds", type=float, default=40.0, help="for each workload")
    parser.add_argument("--rounds", type=int, default=3, help="at least, whatever the seconds")
    parser.add_argument("--kfac-path", type=Path, help="a folder with the package kfac")
    parser.add_argument("--shampoo-path", type=Path, help="one with distributed_shampoo")
    parser.add_argument("--json", type=Path, help="a file for the results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    torch.set_float32_matmul_precision(options.precision)
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
    sys.path[:0] = [str(path) for path in (options.kfac_path, options.shampoo_path) if path]
    warnings.filterwarnings("ignore", category=UserWarning)
    device, preset = torch.device(options.device), PRESETS[options.preset]
    settings = settings_of(device)
    print("; ".join(f"{key} {value}" for key, value in settings.items()), flush=True)
    results: dict[str, Any] = {**settings, "left_out": {}, "workloads": {}}
    absent, failed = missing(), False
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
            workload = resnet50(preset, device, options.kfac_path)
        for name in (name for name in names if name in absent):
            results["left_out"][name] = absent[name]
            say(f"{name} is left out: there is no {absent[name].removeprefix('the ')}")

        def save(outcome: Outcome, key: str = key) -> None:
            results["workloads"][key] = outcome.written()
            if options.json:
                options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")

        outcome = run(workload, [name for name in names if name not in absent], options, save)
        failed = failed or bool(outcome.errors)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
