"""KAISA's applications on several ranks over links of a limited rate, beside plans (Linux).

    sudo python -m benchmarks.links                        # 1 and 0.1 Gbit/s, 1, 2 and 4 hosts
    sudo python -m benchmarks.links --gbit 1 --ranks 2

Hosts and links are those of `benchmarks.thin_wire`. The networks are those of four recipes: a
ResNet-20, the U-Net, the detector and BERT. *Strong*: the hosts share a batch; *weak*: each has
one. The recipe's first-order optimizer and K-FAC in front of it (COMM-OPT, statistics every 10
steps, solves every 50) take turns of a few steps; a cycle is an interval of solves. A plan is of
what the same hosts measure before. Bytes are those that leave the first host's link in a step, with
gradients and TCP. One host has no link, and runs once. Finished numbers of hosts in ``--output``
are not measured again.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn.functional  # noqa: F401  see `benchmarks.thin_wire.work`
from torch import Tensor

from benchmarks.applications import in_turns, stepper
from benchmarks.recipes import cifar
from benchmarks.thin_wire import SENT, network, publish, remove_leftovers, run_on, say, why_not
from experiments import display
from experiments.launch import Worker
from experiments.recipes.common import Common
from experiments.records import write_json
from soframe.comm import TorchDistributed
from soframe.planning import measure
from soframe.planning.hardware import Hardware
from soframe.planning.planner import Option, plan
from soframe.planning.task import Task
from soframe.strategies import CommOpt

CPU = torch.device("cpu")
STATISTICS_EVERY, SOLVE_EVERY = 10, 50
IMAGES = (1, 32, 32)
FEW: Mapping[str, Any] = {"canvases": 256, "test_canvases": 1}
ALONE = 0.0
"""The rate of one host."""


@dataclass(frozen=True)
class Application:
    """A recipe whose steps are timed.

    Attributes:
        recipe: The recipe.
        baseline: Its first-order optimizer.
        inputs: Shape of an example.
        changes: Settings of all its runs.
    """

    recipe: str
    baseline: str
    inputs: tuple[int, ...]
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def module(self) -> Any:
        """The recipe."""
        return importlib.import_module(f"experiments.recipes.{self.recipe}")

    def settings(self, batch: int, folder: Path) -> list[Common]:
        """Return the settings of the first-order optimizer and of K-FAC in front of it."""
        changes = dict(self.changes)
        if self.recipe == "resnet32":
            changes |= cifar(folder)
        kfac = self.module.Settings(**changes)
        kfac = replace(
            kfac,
            batch_size=batch * kfac.batch_size,
            statistics_every=STATISTICS_EVERY,
            solve_every=SOLVE_EVERY,
            device="cpu",
        )
        return [replace(kfac, optimizer=self.baseline), kfac]

    def task(self, settings: Common, ranks: int) -> Task:
        """Return what is planned: the network with a rank's part of the batch."""
        shape = (settings.batch_size // ranks, *self.inputs)
        examples: Tensor = torch.rand(shape)
        if self.recipe == "bert_bytes":
            examples = torch.randint(256, shape)
        return Task.of(self.module.model(settings), (examples,), method="kfac")


APPLICATIONS: Mapping[str, Application] = {
    "ResNet-20": Application("resnet32", "sgd", (3, 32, 32), {"layers": 3, "batch_size": 16}),
    "U-Net": Application("unet", "adamw", IMAGES, FEW),
    "detector": Application("detector", "adamw", IMAGES, FEW),
    "BERT": Application("bert_bytes", "adamw", (32,)),
}


# -- a worker --------------------------------------------------------------------------------------


def work(options: argparse.Namespace) -> None:
    """Measure as one of the hosts."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results: dict[str, Any] = {}
    ranks = dist.get_world_size()
    batches = {"strong": 1, "weak": ranks} if ranks > 1 else {"strong": 1}
    tasks = {
        (name, scaling): application.task(application.settings(batch, options.output)[0], ranks)
        for name, application in APPLICATIONS.items()
        for scaling, batch in batches.items()
    }
    hardware = measured(list(tasks.values()), options.plan)
    for (name, scaling), task in tasks.items():
        application = APPLICATIONS[name]
        settings = application.settings(batches[scaling], options.output)
        row = {**timed(application, settings, options.cycles), **planned(task, ranks, hardware)}
        row["median_ms"], row["mean_ms"] = np.median(row["ms"][1]), np.mean(row["ms"][1])
        results[f"{name}, {scaling}"] = row
        if dist.get_rank() == 0:
            publish(results, Path(options.worker))
    dist.barrier()
    dist.destroy_process_group()
    gc.collect()  # models in cycles hold the group, too


def measured(tasks: list[Task], budget: float) -> Hardware:
    """Return a profile of these hosts, at the sides of all factors of the tasks."""
    sides: set[int] = set()
    for task in tasks:
        for work in task.work:
            sides.update(factor.size for factor in work.factors)
    return measure.measure(CPU, backend=TorchDistributed(), sides=sorted(sides), budget=budget)


def timed(application: Application, settings: list[Common], cycles: int) -> dict[str, Any]:
    """Return milliseconds and megabytes of a step, cycle by cycle, of both optimizers."""
    place = Worker(dist.get_rank(), dist.get_world_size(), send=lambda message: None)
    steps = [stepper(application.module, one, place) for one in settings]
    added = in_turns(steps, [time.perf_counter, sent], SOLVE_EVERY, cycles)
    return {"ms": (1e3 * added[:, :, 0].T).tolist(), "mb": (added[:, :, 1].T / 1e6).tolist()}


def sent() -> float:
    """Return the bytes that have left the link; none without one."""
    return float(SENT.read_text()) if SENT.exists() else 0.0


def planned(task: Task, ranks: int, hardware: Hardware) -> dict[str, list[float]]:
    """Return planned milliseconds of a step of both optimizers."""
    option = Option(CommOpt(), statistics_every=STATISTICS_EVERY, solve_every=SOLVE_EVERY)
    chosen = plan(task, ranks=ranks, hardware=hardware, options=[option])
    return {"planned_ms": [1e3 * chosen.plain, 1e3 * chosen.rows[0].timing.mean]}


# -- the answer ------------------------------------------------------------------------------------


def lines(results: Mapping[str, Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield a line of the table for each application, scaling, rate and number of hosts."""
    for place, rows in results.items():
        for name, row in rows.items():
            (base, kfac), megabytes = np.array(row["ms"]), np.median(row["mb"], axis=1)
            ratios = kfac / base
            plain, whole = row["planned_ms"]
            yield [
                f"{name}, {place}",
                f"{np.median(base):.0f}, {np.median(kfac):.0f}",
                f"{np.median(ratios):.2f} ({ratios.min():.2f} to {ratios.max():.2f})",
                f"{whole / plain:.2f}",
                f"{plain:.0f}, {whole:.0f}",
                f"{megabytes[0]:.2f}, {megabytes[1]:.2f}",
            ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 0.1])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], choices=(1, 2, 4))
    parser.add_argument("--cycles", type=int, default=3, help="intervals of solves")
    parser.add_argument("--plan", type=float, default=15, help="seconds in which hosts measure")
    parser.add_argument("--output", type=Path, default=Path("runs/links"))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return 0
    if reason := why_not():
        print(f"links: skipped, {reason}", file=sys.stderr)
        return 0
    # So that a terminated process removes its network.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    remove_leftovers()
    options.output = options.output.resolve()
    cifar(options.output)
    words = ["-m", "benchmarks.links", "--cycles", str(options.cycles), "--plan", str(options.plan)]
    words += ["--output", str(options.output)]
    places = [(ranks, gbit) for ranks in options.ranks if ranks > 1 for gbit in options.gbit]
    if 1 in options.ranks:
        places.insert(0, (1, ALONE))
    results = {}
    for ranks, gbit in places:
        path = options.output / f"{ranks}-{gbit:g}.json"
        where = f"{ranks} hosts, {gbit:g} Gbit/s" if ranks > 1 else "1 host"
        if not path.exists():
            with network(ranks, gbit or max(options.gbit)) as hosts:
                write_json(path, run_on(hosts, words, partial(say, where)))
        results[where] = json.loads(path.read_text(encoding="utf-8"))
    columns = ["", "ms a step:\nfirst-order, K-FAC", "ratio\n(cycles)", "planned\nratio"]
    columns += ["planned\nms", "MB sent"]
    display.console(width=120).print(display.table("", columns, list(lines(results))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
