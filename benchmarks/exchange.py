"""How gradients travel to their owners and back on Gloo: a call per owner, or one for all (fused).

    python -m benchmarks.exchange                  # on 2 and on 4 processes
    python -m benchmarks.exchange --ranks 4 --json

`exchange` is the averaging of a net's gradients on their owners and the sending of as much back, as
`mem-opt` with `gradients="local"` does at every step; `step` is a whole `step()` between statistics
steps and solves, preconditioning by inverses included. Both forms take turns, repeat by repeat, in
the same processes. A repeat takes as long as its slowest rank; ms are medians over repeats, the
ratio is fused / by owner within a repeat: its median, and the quartiles.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor, nn

import soframe
from soframe.comm import TorchDistributed
from soframe.comm.fused import Parcel, deliver
from soframe.estimate.gradients import _Addend, _average
from soframe.settings import grouped
from soframe.specs import TensorSpec

NETS = {
    "64 layers of 64": (64,) * 65,
    "8 layers of 256": (256,) * 9,
    "8 of 128, one of 1024": (128,) * 9 + (1024, 1024),
    "4 layers of 1024": (1024,) * 5,
}
FORMS = {"by owner": False, "fused": True}


def exchange(own: soframe.Preconditioner) -> Callable[[], None]:
    """The traffic of a step, without its computation."""
    owners = [place.gradient_workers[0] for place in own.placement.blocks]
    tensors = [torch.ones(tuple(work.shape)) for work in own.placement.work]
    everyone = tuple(range(own.backend.world_size))

    def both() -> None:
        _average(own.backend, list(map(_Addend, owners, tensors)))
        parcels = [
            Parcel(owner, everyone, (TensorSpec(tuple(t.shape)),), t.dtype, t.device, [t])
            for owner, t in zip(owners, tensors, strict=True)
        ]
        deliver(own.backend, parcels, "exchange", fused=own.backend.fused)

    return both


def prepare(widths: Sequence[int], fused: bool) -> dict[str, Callable[[], None]]:
    torch.manual_seed(0)
    layers = [nn.Linear(a, b, bias=False) for a, b in zip(widths, widths[1:], strict=False)]  # noqa: RUF007
    model = nn.Sequential(*layers)
    backend = TorchDistributed(fused=fused)
    options: dict[str, Any] = {"strategy": "mem-opt", "solver": "inverse", "gradients": "local"}
    never: dict[str, Any] = {"statistics_every": 10**9, "solve_every": 10**9}
    own = soframe.Preconditioner(
        model, kl_clip=None, **grouped({"backend": backend, **options, **never})
    )
    model(torch.randn(8, widths[0])).square().mean().backward()
    own.step()  # takes statistics and solves, the only one that does

    def step() -> None:
        for parameter in model.parameters():  # else it would be a second step on one gradient
            assert parameter.grad is not None
            parameter.grad = parameter.grad.detach()
        own.step()

    return {"exchange": exchange(own), "step": step}


def work(rank: int, ranks: int, folder: str, repeats: int) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    found: dict[str, Any] = {}
    for net, widths in NETS.items():
        calls = {form: prepare(widths, fused) for form, fused in FORMS.items()}
        for what in ("exchange", "step"):
            seconds: dict[str, list[float]] = {form: [] for form in FORMS}
            for repeat in range(3 + repeats):
                forms = list(FORMS)[:: 1 if repeat % 2 else -1]
                for form in forms:
                    dist.barrier()
                    start = time.perf_counter()
                    calls[form][what]()
                    seconds[form].append(time.perf_counter() - start)
            found[f"{net}, {what}"] = {form: slowest(own[3:]) for form, own in seconds.items()}
    if rank == 0:
        Path(folder, "answer.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def slowest(seconds: Sequence[float]) -> list[float]:
    """Each repeat's time on the rank that needed most, in ms."""
    times: Tensor = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    found: list[float] = (1e3 * times).tolist()
    return found


def measure(ranks: int, repeats: int) -> dict[str, dict[str, Any]]:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="exchange-") as folder:
        arguments = (ranks, folder, repeats)
        torch.multiprocessing.spawn(work, arguments, ranks)  # type: ignore[attr-defined,no-untyped-call]
        found = json.loads(Path(folder, "answer.json").read_text())
    return {name: compare(times) for name, times in found.items()}


def compare(times: dict[str, list[float]]) -> dict[str, Any]:
    plain, fused = times["by owner"], times["fused"]
    ratios = [one / other for one, other in zip(fused, plain, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    medians = {f"{form}_ms": statistics.median(own) for form, own in times.items()}
    return {**medians, "ratio": middle, "quartiles": [low, high]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Gradients by owner and fused, on Gloo.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = {str(ranks): measure(ranks, options.repeats) for ranks in options.ranks}
    if options.json:
        print(json.dumps(found, indent=2))
        return 0
    print("| ranks | net, what | by owner ms | fused ms | fused / by owner (quartiles) |")
    print("|---:|---|---:|---:|---:|")
    for ranks, rows in found.items():
        for name, row in rows.items():
            low, high = row["quartiles"]
            print(
                f"| {ranks} | {name} | {row['by owner_ms']:.2f} | {row['fused_ms']:.2f} "
                f"| {row['ratio']:.2f} ({low:.2f}-{high:.2f}) |"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
