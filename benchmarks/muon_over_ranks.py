"""Steps of Muon over ranks, soframe's and its peers', on real processes: bytes and time.

    python -m benchmarks.muon_over_ranks --processes 2 --dion-path DIR
    python -m benchmarks.muon_over_ranks --processes 4 --json

All contenders live in the same processes and take turns, so that other work on the machine meets
them alike. Each trains a byte-level GPT over Gloo: the matrices within the model by Muon of five
Newton-Schulz steps, embeddings, vectors and the head by AdamW. Gradients are averaged by
DistributedDataParallel; in rows with `local` by soframe, a matrix's on its gradient worker alone.

- *sent*: MB (10^6 bytes) that a rank writes in a step, the mean over ranks, as the system counts
  them: gradients, updates and all other traffic of the library, through any interface.
- *ms*: median of a step (forward, backward, optimizer) on the slowest rank; *of the least*: over
  the fastest contender's, cycle by cycle, the median.
- *CPU*: ms of processor time per step, of all threads of all ranks.
- *made*: matrices that a rank makes orthogonal in a step, the mean over ranks: ``1 / ranks`` of
  them if a contender is documented to make each once for all ranks, else all. It is not counted.

``--dion-path`` names a folder with the package `dion` (https://github.com/microsoft/dion), which is
on no package index; without it that contender is left out. Its functions are compiled; here they
run as they are written, since compilation saves the same for every contender.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import soframe
from experiments import display, models
from experiments.launch import Worker, launch
from experiments.libraries import require
from experiments.muon import orthogonalise, split
from soframe.comm import TorchDistributed
from soframe.settings import grouped

LR, AUXILIARY_LR = 0.02, 3e-3
BATCH, CONTEXT = 8, 128
STEPS = 4
"""Steps of a turn."""


class Both(torch.optim.Optimizer):
    """An optimizer of the matrices, and AdamW for the rest.

    Args:
        matrices: The optimizer of the matrices.
        others: All other parameters.
    """

    def __init__(self, matrices: torch.optim.Optimizer, others: Sequence[nn.Parameter]) -> None:
        self.parts = (matrices, torch.optim.AdamW(others, lr=AUXILIARY_LR, fused=True))
        every = [p for part in self.parts for g in part.param_groups for p in g["params"]]
        super().__init__(every, {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        assert closure is None
        for part in self.parts:
            part.step()


def _own(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    return soframe.Optimizer(
        model, "muon", lr=LR, auxiliary_lr=AUXILIARY_LR, strategy="mem-opt", **grouped(settings)
    )


def own_local(model: nn.Module) -> torch.optim.Optimizer:
    """soframe's, which averages gradients itself."""
    return _own(model, gradients="local", backend=TorchDistributed(fused=True))


def own(model: nn.Module) -> torch.optim.Optimizer:
    """soframe's, after DistributedDataParallel."""
    return _own(model)


def torchs(model: nn.Module) -> torch.optim.Optimizer:
    """``torch.optim.Muon``: every rank makes every matrix orthogonal."""
    matrices, others = split(model)
    return Both(torch.optim.Muon(matrices, lr=LR, weight_decay=0.0), others)


def _package(name: str, model: nn.Module) -> torch.optim.Optimizer:
    package = require("pytorch_optimizer")
    matrices, others = split(model)
    # Its collectives are of tensors of one shape: a group for each.
    shapes = dict.fromkeys(matrix.shape for matrix in matrices)
    groups = [
        {"params": [m for m in matrices if m.shape == shape], "lr": LR, "use_muon": True}
        for shape in shapes
    ]
    outer = {"params": others, "lr": AUXILIARY_LR, "use_muon": False}
    made: torch.optim.Optimizer = getattr(package, name)([*groups, outer])
    return made


def packages(model: nn.Module) -> torch.optim.Optimizer:
    """pytorch_optimizer's: every rank makes every matrix orthogonal."""
    return _package("Muon", model)


def packages_distributed(model: nn.Module) -> torch.optim.Optimizer:
    """pytorch_optimizer's for ranks."""
    return _package("DistributedMuon", model)


def _dion(model: nn.Module, **settings: Any) -> torch.optim.Optimizer:
    from dion import Muon

    matrices, others = split(model)
    outer = {"params": others, "algorithm": "adamw", "lr": AUXILIARY_LR}
    made: torch.optim.Optimizer = Muon(
        [{"params": matrices}, outer],
        distributed_mesh=dist.group.WORLD,
        lr=LR,
        weight_decay=0.0,
        nesterov=True,
        use_polar_express=False,
        **settings,
    )
    return made


def dions(model: nn.Module) -> torch.optim.Optimizer:
    """dion's."""
    return _dion(model)


def dions_single(model: nn.Module) -> torch.optim.Optimizer:
    """dion's, with products in single precision, as soframe has them on a CPU."""

    def single(matrix: Tensor, epsilon: object = None) -> Tensor:
        del epsilon
        if matrix.ndim == 2:
            return orthogonalise(matrix.float()).to(matrix.dtype)
        return torch.stack([orthogonalise(one.float()) for one in matrix]).to(matrix.dtype)

    return _dion(model, newton_schulz_func=single)


@dataclass(frozen=True)
class Contender:
    """A row of the table.

    Attributes:
        make: Builds the optimizer.
        once: Whether each matrix is made orthogonal once for all ranks.
        averaged: Whether DistributedDataParallel averages the gradients.
        dion: Whether it needs dion.
    """

    make: Callable[[nn.Module], torch.optim.Optimizer]
    once: bool = True
    averaged: bool = True
    dion: bool = False


CONTENDERS = {
    "soframe, local": Contender(own_local, averaged=False),
    "soframe": Contender(own),
    "torch.optim.Muon": Contender(torchs, once=False),
    "pytorch_optimizer Muon": Contender(packages, once=False),
    "pytorch_optimizer DistributedMuon": Contender(packages_distributed),
    "dion Muon": Contender(dions, dion=True),
    "dion Muon, single precision": Contender(dions_single, dion=True),
}


@dataclass
class Measured:
    """The measurements of a contender on a rank.

    Attributes:
        seconds: Of each step.
        cpu: Seconds of processor time, of all of them.
        sent: Bytes written in all of them.
    """

    seconds: list[float] = field(default_factory=list)
    cpu: float = 0.0
    sent: int = 0


def written() -> int:
    """Return the bytes that this process has written so far, to sockets too (Linux)."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["wchar"])


def one_rank(
    worker: Worker, names: Sequence[str], cycles: int, dion: str | None
) -> dict[str, Measured]:
    """Let contenders take turns, and return their measurements.

    Args:
        worker: This rank.
        names: The contenders.
        cycles: The number of turns of each, after one that warms up.
        dion: The folder of dion.

    Returns:
        The measurements by contender.
    """
    if dion is not None:
        os.environ["TORCHDYNAMO_DISABLE"] = "1"
        sys.path.insert(0, dion)
    runs = {}
    for name in names:
        contender = CONTENDERS[name]
        torch.manual_seed(0)
        model = models.byte_gpt()
        optimizer = contender.make(model)
        wrapped = DistributedDataParallel(model) if contender.averaged else model
        runs[name] = (wrapped, optimizer)
    found = {name: Measured() for name in names}
    generator = torch.Generator().manual_seed(1 + worker.rank)
    part = BATCH // worker.world_size
    for cycle in range(cycles + 1):
        for name, (model, optimizer) in runs.items():
            dist.barrier()
            cpu, sent = time.process_time(), written()
            for _ in range(STEPS):
                batch = torch.randint(models.BYTES, (part, CONTEXT + 1), generator=generator)
                start = time.perf_counter()
                optimizer.zero_grad()
                logits = model(batch[:, :-1])
                nn.functional.cross_entropy(logits, batch[:, 1:]).backward()
                optimizer.step()
                if cycle:
                    found[name].seconds.append(time.perf_counter() - start)
            if cycle:
                found[name].cpu += time.process_time() - cpu
                found[name].sent += written() - sent
    return found


def rows(
    ranks: Sequence[dict[str, Measured]], names: Sequence[str]
) -> dict[str, dict[str, float | str]]:
    """Return the table.

    Args:
        ranks: Each rank's measurements.
        names: The contenders.

    Returns:
        Contender -> column -> value.
    """
    slowest = {
        name: [max(each) for each in zip(*(r[name].seconds for r in ranks), strict=True)]
        for name in names
    }
    matrices = len(split(models.byte_gpt())[0])
    turns = {
        name: [statistics.median(s[i : i + STEPS]) for i in range(0, len(s), STEPS)]
        for name, s in slowest.items()
    }
    best = min(names, key=lambda name: statistics.median(slowest[name]))
    found: dict[str, dict[str, float | str]] = {}
    for name in names:
        steps = len(slowest[name])
        ratios = [a / b for a, b in zip(turns[name], turns[best], strict=True)]
        made = matrices / (len(ranks) if CONTENDERS[name].once else 1)
        found[name] = {
            "made": made,
            "sent": sum(r[name].sent for r in ranks) / len(ranks) / steps / 1e6,
            "ms": 1e3 * statistics.median(slowest[name]),
            "of the least": statistics.median(ratios),
            "CPU": 1e3 * sum(r[name].cpu for r in ranks) / steps,
        }
    return found


def main() -> None:
    """Measure, and print the table."""
    assert __doc__ is not None
    parser = display.parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--cycles", type=int, default=10)
    parser.add_argument("--dion-path", type=Path, default=None)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not 2 <= options.processes <= BATCH or BATCH % options.processes:
        parser.error(f"--processes must divide {BATCH}, and be at least 2")
    if not Path("/proc/self/io").exists():
        parser.error("bytes are counted by /proc/self/io, which is Linux's")
    dion = None if options.dion_path is None else str(options.dion_path.resolve())
    names = [name for name, one in CONTENDERS.items() if dion or not one.dion]
    # A module of this name, so that processes can import it.
    from muon_over_ranks import one_rank as function

    ranks = launch(function, options.processes, timeout=3600.0)(names, options.cycles, dion)
    found = rows(ranks, names)
    size = 4e-6 * sum(p.numel() for p in models.byte_gpt().parameters())
    share = 2 * (options.processes - 1) / options.processes
    if options.json:
        print(json.dumps({"all-reduce": share * size, "rows": found}, indent=1))
        return
    print(f"{options.processes} ranks; all gradients {size:.2f} MB, an all-reduce of them sends")
    print(f"{share * size:.2f} MB a rank. torch {torch.__version__}\n")
    columns = ("made", "sent", "ms", "of the least", "CPU")
    print(f"{'':34}" + "".join(f"{column:>14}" for column in columns))
    for name, row in found.items():
        print(f"{name:34}" + "".join(f"{row[column]:14.2f}" for column in columns))


if __name__ == "__main__":
    main()
