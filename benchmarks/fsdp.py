"""The cost of curvature for a model that fully_shard has sharded: memory, bytes and time per rank.

    python -m benchmarks.fsdp                      # the GPT on 1, 2 and 4 processes over Gloo
    python -m benchmarks.fsdp --ranks 4 --rounds 9 --strategies sharded

Every process trains copies of the byte GPT of the experiments: one with fully_shard and SGD with
momentum alone, and one for each strategy with K-FAC before it. They take turns, step by step, so
that other work on the machine meets all alike. Processes have a torch thread each.

- *memory*: MB (10^6 bytes) between steps, of the rank with most: parameters and gradients (the
  local parts), factors, and second-order data, by `memory_usage()`.
- *bytes*: MB that a rank gives to others and takes from them, the mean over ranks. FSDP's own are
  computed from shapes: each parameter is gathered for the forward and for the backward pass (once
  where it stays in between, which it does for the outermost module's own), and its gradient is
  reduced. soframe's are counted by `traffic()`: the parts of gradients that their workers lack, and
  the updates back, in every step; statistics, in a statistics step; second-order data, in a solve
  step.
- *ratio*: a step's time over the plain model's in the same round, the median over rounds: of a step
  without statistics, of one with, and of one that solves too; and the mean over 100 steps with
  statistics every 10 and solves every 100, which has 90, 9 and 1 of these. The slowest rank counts.
  *CPU at 10/100* is the same mean of processor time, over all threads of all ranks, which other
  programs on the machine change less.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import soframe
from experiments.launch import Worker, launch
from experiments.models import byte_gpt
from soframe.strategies import Sharded

STRATEGIES: dict[str, Any] = {
    "comm-opt": "comm-opt",
    "mem-opt": "mem-opt",
    "sharded": Sharded(group=None),
}
STEP_KINDS = {"plain": (90, 1), "statistics": (9, 2), "solve": (1, 0)}
"""Kinds of steps: how many of 100 are of a kind, and where in a round of four one is measured."""
MEGA = 10**6


def shard(model: nn.Module, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model.layers:  # type: ignore[union-attr]  # a GPT's
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def held(tensors: Sequence[Tensor | None]) -> int:
    """The bytes that this rank has of tensors."""
    own = [t.to_local() if isinstance(t, DTensor) else t for t in tensors if t is not None]
    return sum(tensor.numel() * tensor.element_size() for tensor in own)


def fsdp_bytes(model: nn.Module, ranks: int) -> float:
    """Return fully_shard's traffic in a step, for one rank in the mean."""
    inner = {id(p) for layer in model.layers for p in layer.parameters()}  # type: ignore[union-attr]
    whole = sum(p.numel() * p.itemsize * (3 if id(p) in inner else 2) for p in model.parameters())
    return 2 * whole * (ranks - 1) / ranks


class Trained:
    """A model with its optimizer, and perhaps a preconditioner."""

    def __init__(self, strategy: Any, worker: Worker) -> None:
        self.model = byte_gpt()
        shard(self.model, worker.world_size)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.own: soframe.Preconditioner | None = None
        if strategy is not None:
            # Statistics at every second step, solves at every fourth: all kinds in four steps.
            self.own = soframe.Preconditioner(
                self.model,
                strategy=strategy,
                optimizer=self.optimizer,
                statistics_every=2,
                solve_every=4,
                statistics=soframe.Statistics(samples="positions"),
                damping=0.1,
            )

    def step(self, text: Tensor) -> tuple[float, float, int]:
        """One step: seconds, seconds of processor time, bytes of soframe's collectives."""
        before = 0 if self.own is None else self.own.traffic()["total"]["bytes"]
        dist.barrier()
        begin, used = time.perf_counter(), time.process_time()
        F.cross_entropy(self.model(text[:, :-1]), text[:, 1:]).backward()
        if self.own is not None:
            self.own.step()
        self.optimizer.step()
        taken, used = time.perf_counter() - begin, time.process_time() - used
        sent = 0 if self.own is None else self.own.traffic()["total"]["bytes"] - before
        return taken, used, sent


def work(worker: Worker, options: argparse.Namespace) -> dict[str, Any]:
    """Measure on one rank."""
    if not dist.is_initialized():
        folder = Path(tempfile.mkdtemp()) / "store"
        dist.init_process_group("gloo", init_method=folder.as_uri(), rank=0, world_size=1)
    torch.set_num_threads(1)
    names = [None, *options.strategies]
    trained = {n: Trained(None if n is None else STRATEGIES[n], worker) for n in names}
    found: dict[str, Any] = {"fsdp": fsdp_bytes(trained[None].model, worker.world_size)}
    times: dict[str | None, list[list[float]]] = {name: [] for name in names}
    cpu: dict[str | None, list[list[float]]] = {name: [] for name in names}
    sent: dict[str | None, list[list[int]]] = {name: [] for name in names}
    for number in range(4 * (options.rounds + 1)):
        generator = torch.Generator().manual_seed(1000 * number + worker.rank)
        text = torch.randint(0, 256, (options.batch, options.length + 1), generator=generator)
        kind = number % 4
        if kind == 0:
            for name in names:
                times[name].append([])
                cpu[name].append([])
                sent[name].append([])
        turn = names if number % 2 else names[::-1]
        for name in turn:
            taken, used, carried = trained[name].step(text)
            times[name][-1].append(taken)
            cpu[name][-1].append(used)
            sent[name][-1].append(carried)
            if number < 4 * (options.rounds + 1) - 1:
                trained[name].optimizer.zero_grad()
        worker.send(f"{worker.world_size} ranks, step {number + 1} of {4 * (options.rounds + 1)}")
    for name in options.strategies:
        own, model = trained[name].own, trained[name].model
        assert own is not None
        usage = own.memory_usage()
        found[name] = {
            "parameters": held(list(model.parameters())),
            "gradients": held([p.grad for p in model.parameters()]),
            "factors": usage["factors"],
            "second-order": usage["second_order"],
        }
    # The first round warms up.
    found["times"] = {name: rounds[1:] for name, rounds in times.items()}
    found["cpu"] = {name: rounds[1:] for name, rounds in cpu.items()}
    found["sent"] = {name: rounds[1:] for name, rounds in sent.items()}
    return found


def ratio(
    by_rank: Sequence[dict[str, Any]],
    what: str,
    name: str,
    where: int,
    together: Callable[[Iterable[float]], float],
) -> float:
    """The median over rounds of a step's time over the plain model's."""
    rounds = range(len(by_rank[0][what][name]))
    own, plain = (
        [together(of[what][n][r][where] for of in by_rank) for r in rounds] for n in (name, None)
    )
    return statistics.median(a / b for a, b in zip(own, plain, strict=True))


def report(ranks: int, by_rank: Sequence[dict[str, Any]], strategies: Sequence[str]) -> list[str]:
    """The rows of the table for so many ranks."""
    rows = []
    for name in strategies:
        memory = {k: max(own[name][k] for own in by_rank) / MEGA for k in by_rank[0][name]}
        walls, cpus, carried = {}, {}, {}
        for kind, (_, where) in STEP_KINDS.items():
            walls[kind] = ratio(by_rank, "times", name, where, max)
            cpus[kind] = ratio(by_rank, "cpu", name, where, sum)
            carried[kind] = statistics.mean(own["sent"][name][0][where] for own in by_rank) / MEGA
        mean, cpu = (
            sum(count * ratios[kind] for kind, (count, _) in STEP_KINDS.items()) / 100
            for ratios in (walls, cpus)
        )
        plain = statistics.median(
            max(own["times"][None][r][w] for own in by_rank)
            for r in range(len(by_rank[0]["times"][name]))
            for w in range(4)
        )
        total = sum(memory.values())
        cells = [
            f"{ranks}",
            name,
            *(f"{value:.2f}" for value in memory.values()),
            f"{total:.2f}",
            f"{by_rank[0]['fsdp'] / MEGA:.2f}",
            *(f"{carried[kind]:.2f}" for kind in STEP_KINDS),
            f"{1000 * plain:.0f}",
            *(f"{walls[kind]:.2f}" for kind in STEP_KINDS),
            f"{mean:.2f}",
            f"{cpu:.2f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


HEADER = (
    "| ranks | strategy | parameters | gradients | factors | second-order | all MB | FSDP's MB "
    "| + step | + statistics | + solve | plain ms | step | statistics | solve | at 10/100 "
    "| CPU at 10/100 |"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="See the module's docstring.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=7, help="of four steps each")
    parser.add_argument("--batch", type=int, default=8, help="sequences on each rank")
    parser.add_argument("--length", type=int, default=128, help="bytes of each")
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=list(STRATEGIES))
    parser.add_argument("--timeout", type=float, default=3600.0)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    print(HEADER)
    print("|---:|---|" + "---:|" * 15)
    for ranks in options.ranks:
        by_rank = launch(work, ranks, timeout=options.timeout)(options)
        print("\n".join(report(ranks, by_rank, options.strategies)), flush=True)


if __name__ == "__main__":
    main()
