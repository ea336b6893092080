"""Steps of soframe and kfac-pytorch side by side on real processes: bytes, memory, time.

    python -m benchmarks.distributed_step --kfac-path DIR       # 4 processes over Gloo
    python -m benchmarks.distributed_step --solver inverse --statistics-every 10 --json

All variants live in the same processes and take turns, cycle by cycle, so that other work on the
machine meets them alike. They have the same model, data, intervals, damping, decay, clip and
solver; soframe takes the constants of kfac-pytorch (``scaling="kaisa"``), so that both compute the
same updates: after the first cycle the weights must agree to rounding, or the exit status is 1.
Gradients are averaged by DistributedDataParallel, in rows with `local` by soframe.

- *sent*: MB (10^6 bytes) that a rank sends in a step, the mean over ranks and a cycle, counted at
  ``torch.distributed`` for both and converted to a ring's traffic: an all-reduce of n bytes over m
  ranks 2 (m - 1) / m n per rank, a reduction or a broadcast (m - 1) / m n, an all-gather (m - 1) n.
- *all*: with DistributedDataParallel's own all-reduce of the gradients, if it averages them.
- *calls*: collectives that a rank enters in a step, without DistributedDataParallel's.
- *memory*: MB that the library reports between steps (`memory_usage()`): factors and second-order
  data. *held*: MB of all tensors that building and running it left in the process beside the model
  and its gradients. Both between steps with nothing under way, of the rank with most.
- *median*, *p99*: ms of a step (forward, backward, preconditioner, SGD) on the slowest rank.
- *CPU*: ms of processor time per step, all threads of all ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import soframe
from experiments import display
from experiments.launch import Worker, launch
from experiments.libraries import KFAC_PYTORCH_MISSING, import_kfac_pytorch
from soframe.solvers import Eigen, Inverse

LR = 1e-3
LOOKS = 3
"""Repetitions of counting held memory."""
PAUSE = 0.1
"""Seconds between two of them, in which other threads run."""
SHARED = {"damping": 0.01, "kl_clip": 1e-3, "lr": LR}
PEER, OWN = "kfac-pytorch", "soframe"
MODES = ("comm-opt", "hybrid-opt", "mem-opt")


@dataclass(frozen=True)
class Variant:
    """A row of the table.

    Attributes:
        library: `PEER` or `OWN`.
        strategy: Its strategy.
        how: ``"triangles"`` (kfac-pytorch's ``symmetry_aware``), ``"local"`` or nothing.
        against: The strategy of kfac-pytorch that it is compared with.
    """

    library: str
    strategy: str
    how: str = ""
    against: str = ""

    @property
    def name(self) -> str:
        return ", ".join(filter(None, (f"{self.library} {self.strategy}", self.how)))


VARIANTS = (
    *(Variant(PEER, mode) for mode in MODES),
    *(Variant(PEER, mode, "triangles") for mode in MODES),
    *(Variant(OWN, mode, against=mode) for mode in MODES),
    Variant(OWN, "sharded", against="mem-opt"),
    Variant(OWN, "owner-local", against="mem-opt"),
    Variant(OWN, "mem-opt", "local", "mem-opt"),
    Variant(OWN, "sharded", "local", "mem-opt"),
)


# -- counting ----------------------------------------------------------------------------------


class Wire:
    """Counts all calls of ``torch.distributed``."""

    SHARE: Mapping[str, Callable[[int], float]] = {
        "all_reduce": lambda m: 2 * (m - 1) / m,
        "reduce": lambda m: (m - 1) / m,
        "broadcast": lambda m: (m - 1) / m,
        "all_gather": lambda m: m - 1,
    }

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        for name in self.SHARE:
            setattr(dist, name, self._counted(name, getattr(dist, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        position = {"all_reduce": 2, "reduce": 3, "broadcast": 2, "all_gather": 2}[name]
        payload = 1 if name == "all_gather" else 0

        def counted(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group", args[position] if len(args) > position else None)
            tensor: Tensor = args[payload]
            size = tensor.numel() * tensor.element_size()
            self.count["sent"] += self.SHARE[name](dist.get_world_size(group)) * size
            self.count["calls"] += 1
            return call(*args, **kwargs)

        return counted


def storages() -> dict[int, int]:
    """Return address -> bytes of every tensor storage that Python has in the process."""
    gc.collect()
    kinds = (Tensor, nn.Parameter)
    own = [o.untyped_storage() for o in gc.get_objects() if type(o) in kinds]
    return {storage.data_ptr(): storage.nbytes() for storage in own}


def lasting_storages() -> dict[int, int]:
    """Return address -> bytes of the storages that are in all of several counts.

    A thread of Gloo releases the buffer of a collective after it has signalled completion: as late
    as the scheduler lets it run. Such a buffer is not held.
    """
    found = storages()
    for _ in range(LOOKS):
        time.sleep(PAUSE)
        now = storages()
        found = {where: size for where, size in found.items() if now.get(where) == size}
    return found


# -- variants ----------------------------------------------------------------------------------


def make_model(width: int) -> nn.Sequential:
    """Five convolutions and three linear layers; 1.2 million parameters at a width of 640."""
    torch.manual_seed(0)
    convolutions = ((3, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 64, 1))
    layers: list[nn.Module] = []
    for into, out, stride in convolutions:
        layers += [nn.Conv2d(into, out, 3, stride=stride, padding=1), nn.ReLU()]
    layers += [nn.Flatten(), nn.Linear(1024, width), nn.ReLU(), nn.Linear(width, width)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(width, 10))


def attach(variant: Variant, model: nn.Module, options: argparse.Namespace) -> Any:
    every = (options.statistics_every, options.solve_every)
    if variant.library == PEER:
        from kfac.enums import DistributedStrategy
        from kfac.preconditioner import KFACPreconditioner

        strategy = DistributedStrategy[variant.strategy.upper().replace("-", "_")]
        return KFACPreconditioner(
            model,
            factor_update_steps=every[0],
            inv_update_steps=every[1],
            compute_method=options.solver,
            grad_worker_fraction=strategy,
            symmetry_aware=variant.how == "triangles",
            **SHARED,
        )
    return soframe.Preconditioner(
        model,
        solver=Eigen() if options.solver == "eigen" else Inverse(split="full"),
        strategy=variant.strategy,
        statistics=soframe.Statistics(scaling="kaisa"),
        distribution=soframe.Distribution(
            gradients="local" if variant.how == "local" else "averaged"
        ),
        statistics_every=every[0],
        solve_every=every[1],
        **SHARED,
    )


class Runner:
    """One variant under way on one rank."""

    def __init__(self, variant: Variant, options: argparse.Namespace, wire: Wire) -> None:
        self.variant, self.options, self.wire = variant, options, wire
        model = make_model(options.width)
        local = variant.how == "local"
        # Build all alike, so that no variant reuses another's buckets.
        self.model: nn.Module = model if local else DistributedDataParallel(model)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        self.preconditioner = attach(variant, self.model, options)
        self.random = torch.Generator().manual_seed(dist.get_rank())
        self.apart = 0.0
        self.wall: list[list[float]] = []
        self.cpu: list[list[float]] = []
        size = sum(p.numel() * p.element_size() for p in model.parameters())
        ranks = dist.get_world_size()
        self.ddp = 0.0 if local else size * Wire.SHARE["all_reduce"](ranks)

    def run(self, cycles: int) -> None:
        """Run whole cycles of solves, one repeat."""
        options, wall, cpu = self.options, [], []
        self.wire.count.clear()
        for _ in range(cycles * options.solve_every):
            x = torch.randn(options.batch, 3, 16, 16, generator=self.random)
            y = torch.randint(10, (options.batch,), generator=self.random)
            dist.barrier()
            began = (time.perf_counter(), time.process_time())
            self.optimizer.zero_grad(set_to_none=False)
            nn.functional.cross_entropy(self.model(x), y).backward()
            self.preconditioner.step()
            self.optimizer.step()
            wall.append(time.perf_counter() - began[0])
            cpu.append(time.process_time() - began[1])
        self.wall.append(wall)
        self.cpu.append(cpu)
        steps = cycles * options.solve_every
        self.sent = self.wire.count["sent"] / steps
        self.calls = self.wire.count["calls"] / steps

    def gone(self) -> Tensor:
        """The way that the weights have gone."""
        start = make_model(self.options.width).parameters()
        vectors = (nn.utils.parameters_to_vector(p) for p in (self.model.parameters(), start))
        now, then = (vector.detach() for vector in vectors)
        return now - then

    def figures(self) -> dict[str, Any]:
        return {
            "sent": self.sent / 1e6,
            "all": (self.sent + self.ddp) / 1e6,
            "calls": self.calls,
            "memory": self.memory / 1e6,
            "held": self.held / 1e6,
            "wall": [[1e3 * t for t in repeat] for repeat in self.wall],
            "cpu": [[1e3 * t for t in repeat] for repeat in self.cpu],
            "apart": self.apart,
        }

    def measure_held(self, before: Iterable[int]) -> None:
        self.preconditioner.memory_usage()  # waits for sums and futures under way
        self.memory = self.preconditioner.memory_usage()["total"]
        self.model.zero_grad(set_to_none=False)
        parameters = [t for p in self.model.parameters() for t in (p.data, p.grad)]
        known = {*before, *(t.untyped_storage().data_ptr() for t in parameters if t is not None)}
        self.held = sum(size for where, size in lasting_storages().items() if where not in known)


def work(
    worker: Worker, names: Sequence[str], options: argparse.Namespace
) -> dict[str, dict[str, Any]]:
    """Measure on one rank."""
    if any(name.startswith(PEER) for name in names):
        import_kfac_pytorch(options.kfac_path)
    wire = Wire()
    runners: list[Runner] = []
    reference: Tensor | None = None
    for variant in VARIANTS:
        if variant.name not in names:
            continue
        before = lasting_storages()
        runner = Runner(variant, options, wire)
        runner.run(1)  # warms up
        runner.measure_held(before)
        if variant.strategy != "owner-local":  # its statistics come from other data
            gone = runner.gone()
            reference = gone if reference is None else reference
            runner.apart = float((gone - reference).norm() / reference.norm())
        runner.wall.clear()
        runner.cpu.clear()
        runners.append(runner)
    for repeat in range(options.repeats):
        start = repeat % len(runners)
        for runner in (*runners[start:], *runners[:start]):
            runner.run(options.cycles)
    return {runner.variant.name: runner.figures() for runner in runners}


def measure(names: Sequence[str], options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Variant -> its figures, over all ranks together."""
    by_rank = launch(work, options.ranks, timeout=options.timeout)(list(names), options)
    found: dict[str, dict[str, Any]] = {}
    for variant in VARIANTS:
        if variant.name not in by_rank[0]:
            continue
        own = [figures[variant.name] for figures in by_rank]
        repeats = range(len(own[0]["wall"]))
        wall = [list(map(max, *(o["wall"][i] for o in own))) for i in repeats]
        cpu = [list(map(sum, zip(*(o["cpu"][i] for o in own), strict=True))) for i in repeats]
        found[variant.name] = {
            **{key: statistics.mean(o[key] for o in own) for key in ("sent", "all", "calls")},
            **{key: max(o[key] for o in own) for key in ("memory", "held")},
            "median": [statistics.median(steps) for steps in wall],
            "p99": [quantile(steps, 0.99) for steps in wall],
            "cpu": [statistics.mean(steps) for steps in cpu],
            "mean": [statistics.mean(steps) for steps in wall],
            "apart": max(o["apart"] for o in own),
        }
    return found


def quantile(values: Sequence[float], q: float) -> float:
    return float(torch.tensor(values).quantile(q))


# -- the answer ------------------------------------------------------------------------------

ONCE = ("sent", "all", "calls", "memory", "held")
TIMED = ("median", "p99", "mean", "cpu")


def ratios(found: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Variant of soframe -> column -> kfac-pytorch's number over it.

    Returns:
        Ratios; for times the median over repeats, the least and the most.
    """
    result: dict[str, dict[str, Any]] = {}
    for variant in VARIANTS:
        other = found.get(f"{PEER} {variant.against}")
        own = found.get(variant.name)
        if other is None or own is None:
            continue
        result[variant.name] = {
            **{key: own[key] / other[key] if other[key] else None for key in ONCE},
            **{key: _spread(own[key], other[key]) for key in TIMED},
        }
    return result


def _spread(own: Sequence[float], other: Sequence[float]) -> list[float]:
    each = [a / b for a, b in zip(own, other, strict=True)]
    return [statistics.median(each), min(each), max(each)]


def show(found: Mapping[str, Mapping[str, Any]], title: str) -> None:
    screen, rows = display.console(width=130), []
    for name, own in found.items():
        once = [f"{own[key]:.2f}" for key in ONCE]
        rows.append([name, *once, *(f"{statistics.median(own[key]):.0f}" for key in TIMED)])
    columns = ["variant", "sent\nMB", "all\nMB", "calls", "memory\nMB", "held\nMB"]
    columns += ["median\nms", "p99\nms", "mean\nms", "CPU\nms"]
    screen.print(display.table(title, columns, rows))
    shares = ratios(found)
    if not shares:
        return
    against = {variant.name: variant.against for variant in VARIANTS}
    rows = []
    for name, own in shares.items():
        once = ["-" if own[key] is None else f"{own[key]:.2f}" for key in ONCE]
        timed = ["{:.2f}\n{:.2f}-{:.2f}".format(*own[key]) for key in TIMED]
        rows.append([name, against[name], *once, *timed])
    title = f"as a share of what {PEER}'s mode needs (below 1: soframe needs less)"
    columns = ["variant", "against", "sent", "all", "calls", "memory", "held", *TIMED]
    screen.print(display.table(title, columns, rows, left=2))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kfac-path", type=Path, help="a folder with the package kfac")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--solver", choices=("eigen", "inverse"), default="eigen")
    parser.add_argument("--statistics-every", type=int, default=1)
    parser.add_argument("--solve-every", type=int, default=10)
    parser.add_argument("--cycles", type=int, default=1, help="of solves, in a repeat")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--timeout", type=float, default=1200.0)
    names = [variant.name for variant in VARIANTS]
    parser.add_argument("--variants", nargs="+", choices=names, default=names)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    if any(name.startswith(PEER) for name in options.variants):
        try:
            import_kfac_pytorch(options.kfac_path)
        except ImportError as error:
            script = "benchmarks.distributed_step"
            print(KFAC_PYTORCH_MISSING.format(error=error, script=script), file=sys.stderr)
            return 2
    found = measure(options.variants, options)
    apart = max(own["apart"] for own in found.values())
    if options.json:
        print(json.dumps({"variants": found, "shares": ratios(found), "apart": apart}, indent=2))
    else:
        show(
            found,
            f"{options.ranks} processes, batch {options.batch} each, {options.solver}, statistics "
            f"every {options.statistics_every}, solves every {options.solve_every}",
        )
        print(f"after one cycle the weights differ by {apart:.1e} of the way that they have gone")
    # Written so that a NaN fails.
    return 0 if apart <= 0.01 else 1


if __name__ == "__main__":
    sys.exit(main())
