"""KAISA's claim of fixed memory at this size: SGD and K-FAC with the batches that one cap allows.

    python -m benchmarks.fixed_memory                     # one process and four: about an hour
    python -m benchmarks.fixed_memory --count             # bytes and batches, nothing is trained
    python -m benchmarks.fixed_memory --cap 120e6 --processes 1

Pauloski et al. (SC 2021) give each optimizer the largest batch that fits the same memory: matrices
of K-FAC take the place of images. Here the memory of a rank is counted from tensors: weights,
gradients, optimizer state, the buckets of DistributedDataParallel, the planned bytes of the
preconditioner, and the activations that autograd saves, which grow with the batch. The model, the
images, the settings and the tuned learning rates are those of `benchmarks.kaisa`; rates grow
linearly with the batch of all ranks, up to the highest that was tried in tuning.

SGD trains for all epochs with its largest batch, and its accuracy is the target. The others, and
SGD with K-FAC's batch, train for ever longer parts (`--lengths`) until they reach it; steps to the
target are read off between the last two. SGD has the better of two rates, the scaled and the tuned
one. Images a second are from steps in turns, by the processor's time in one process and by the
clock in several. Runs and times are kept in `--runs`: an interrupted benchmark goes on where it
was.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks import kaisa
from benchmarks.kaisa import CONTENDERS, SGD, TUNED, Machinery, Size, configuration, numbers
from benchmarks.simulation import largest_batch
from experiments import display, runs
from experiments.config import ClockName, RunConfig
from experiments.display import console, print_json, processor, run_command
from experiments.launch import launch
from experiments.models import resnet20_of_bytes
from experiments.optimizers import build_optimizer, build_preconditioner
from experiments.records import write_json
from experiments.tasks import cross_entropy
from experiments.tuning import TUNING_SEED, TriedRates
from soframe import Preconditioner
from soframe.planning import inspection

KFAC = "K-FAC 10/100"
STRATEGIES = ("comm-opt", "hybrid-opt", "mem-opt", "sharded", "owner-local")
SMALL = "comm-opt"
SMALL_SGD = f"SGD, batch of {SMALL}"
CAP = 82_000_000  # the fewest MB that leave K-FAC 32 images in one process
BATCHES = (2, 3, 6)


@dataclass(frozen=True)
class Memory:
    """The bytes of one rank in training.

    Attributes:
        weights: Parameters and buffers.
        gradients: Their gradients.
        state: The optimizer's.
        buckets: Copies of gradients that DistributedDataParallel averages.
        curvature: Factors and second-order data, between steps.
        window: Sums of a statistics step.
        saved: Activations saved for backward that do not depend on the batch.
        per_sample: Activations saved for each sample.
    """

    weights: int
    gradients: int
    state: int
    buckets: int
    curvature: int
    window: int
    saved: int
    per_sample: int

    @property
    def fixed(self) -> int:
        """The bytes that do not depend on the batch."""
        held = (self.weights, self.gradients, self.state, self.buckets, self.curvature)
        return sum(held) + self.window + self.saved

    def at(self, batch: int) -> int:
        """Return the bytes with so many samples."""
        return self.fixed + self.per_sample * batch


def nbytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def saved(model: nn.Module, loss: Callable[[], Tensor]) -> int:
    """Return the bytes that autograd saves for a backward pass, without the model's own tensors."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    found: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(tensor)  # a tensor that is kept keeps its address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        graph = loss()
    size = nbytes(t for t in found if t.untyped_storage().data_ptr() not in own)
    del graph
    return size


def per_sample(count: Callable[[int], int], batches: tuple[int, int, int]) -> tuple[int, int]:
    """Return the bytes for each sample, and the others, of bytes that are linear in the batch.

    Raises:
        ValueError: If the third batch is not on the line through the others.
    """
    first, second, third = (count(batch) for batch in batches)
    slope, rest = divmod(second - first, batches[1] - batches[0])
    constant = first - slope * batches[0]
    if rest or third != constant + slope * batches[2]:
        raise ValueError(f"batches of {batches} save {first}, {second} and {third} bytes: no line")
    return slope, constant


def planned(model: nn.Module, ranks: int, strategy: str, **plan: Any) -> tuple[int, int]:
    """Return the bytes of curvature and of its sums on the fullest rank.

    Args:
        model: The model; on the meta device, too.
        ranks: Their number; no process is started.
        strategy: The strategy.
        plan: The method and the solver, see `soframe.Preconditioner`.
    """
    _, placement = inspection.inspect(model, ranks=ranks, strategy=strategy, **plan)
    each = [(placement.memory(r)["total"], placement.window(r)) for r in range(ranks)]
    return max(each, key=sum)


def count(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[int], Tensor],
    *,
    ranks: int = 1,
    curvature: tuple[int, int] = (0, 0),
) -> Memory:
    """Count the memory of a rank. The optimizer takes a step.

    Args:
        model: The model.
        optimizer: Its optimizer.
        loss: From a number of samples to their loss.
        ranks: The number of ranks, each with all weights.
        curvature: See `planned`.
    """
    each, constant = per_sample(lambda batch: saved(model, lambda: loss(batch)), BATCHES)
    loss(BATCHES[0]).backward()
    optimizer.step()
    gradients = nbytes(p.grad for p in model.parameters() if p.grad is not None)
    state = [v for one in optimizer.state.values() for v in one.values() if torch.is_tensor(v)]
    return Memory(
        weights=nbytes((*model.parameters(), *model.buffers())),
        gradients=gradients,
        state=nbytes(state),
        buckets=gradients if ranks > 1 else 0,
        curvature=curvature[0],
        window=curvature[1],
        saved=constant,
        per_sample=each,
    )


class Live(TorchDispatchMode):
    """Follows the bytes of the tensors that are made within: `peak` is their most."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if isinstance(made, Tensor):
                storage = made.untyped_storage()
                self.sizes[StorageWeakRef(storage)] = storage.nbytes()  # type: ignore[no-untyped-call]
        self.sizes = {ref: size for ref, size in self.sizes.items() if not ref.expired()}
        self.peak = max(self.peak, sum(self.sizes.values()))
        return result


def loss_of(model: nn.Module, batch: int) -> Tensor:
    """Return the loss of random images."""
    images = torch.randint(256, (batch, 3, 32, 32), dtype=torch.uint8)
    return cross_entropy(model, images, torch.randint(10, (batch,)))


def build(config: RunConfig) -> tuple[nn.Module, torch.optim.Optimizer, Preconditioner | None]:
    """Return a ResNet-20, its optimizer, and its preconditioner."""
    model = resnet20_of_bytes(config.seed, torch.float32)
    optimizer = build_optimizer(model, config, "cross-entropy", full_batch=False)
    return model, optimizer, build_preconditioner(model, optimizer, config)


def peak(config: RunConfig, batch: int) -> int:
    """Return the most bytes of tensors in steps of one process that all gather and solve."""
    if config.optimizer == "kfac":
        every = {"statistics_every": 1, "solve_every": 1}
        config = config.but(preconditioner={**config.preconditioner, **every})
    with Live() as live:
        model, optimizer, preconditioner = build(config)
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            if preconditioner is not None:
                preconditioner.step()
            optimizer.step()
    if preconditioner is not None:
        preconditioner.close()
    return live.peak


@dataclass(frozen=True)
class Race:
    """Settings of a report.

    Attributes:
        cap: The most bytes of a rank.
        size: The images, the batch that learning rates were tuned with, SGD's epochs, and lengths.
        lrs: The tuned learning rates.
        strategies: The strategies that K-FAC trains with; the batches of all are counted.
        seeds: Of the runs.
        how: How runs are trained.
    """

    cap: int
    size: Size
    lrs: Mapping[str, float]
    strategies: Sequence[str]
    seeds: Sequence[int]
    how: Machinery

    def with_batch(self, batch: int) -> Size:
        """Return the size of runs with a batch of all ranks."""
        return replace(self.size, batch=batch)

    def config(
        self, label: str, batch: int, part: float = 1.0, seed: int = 0, *, linear: bool = True
    ) -> RunConfig:
        """Return a run.

        Args:
            label: `SGD`, `SMALL_SGD` or a strategy of K-FAC.
            batch: Of all ranks.
            part: Of SGD's epochs.
            seed: Of weights and of the order of images.
            linear: Whether the tuned learning rate grows with the batch, within the grid of tuning.
        """
        name = KFAC if label in STRATEGIES else SGD
        scaled = min(self.lrs[name] * batch / self.size.batch, max(CONTENDERS[name].lrs))
        lr = scaled if linear else self.lrs[name]
        config = configuration(name, lr, self.with_batch(batch), part, seed)
        return config.but(strategy=label) if name == KFAC else config

    def memory(self, label: str, ranks: int) -> Memory:
        """Return the memory of a rank."""
        config = self.config(label, self.size.batch)
        model, optimizer, preconditioner = build(config)
        curvature = (0, 0)
        if preconditioner is not None:
            plan = {"method": "kfac", "solver": config.preconditioner["solver"]}
            curvature = planned(model, ranks, label, **plan)
        try:
            loss = partial(loss_of, model)
            return count(model, optimizer, loss, ranks=ranks, curvature=curvature)
        finally:
            if preconditioner is not None:
                preconditioner.close()

    def ends(
        self, label: str, batch: int, ranks: int, target: float | None, *, linear: bool
    ) -> dict[int, list[float]]:
        """Train for ever longer parts until the mean accuracy is the target.

        Returns:
            Steps -> the accuracy of each seed; of all epochs alone without a target.
        """
        found: dict[int, list[float]] = {}
        for part in (1.0,) if target is None else sorted({*self.size.lengths, 1.0}):
            configs = [self.config(label, batch, part, seed, linear=linear) for seed in self.seeds]
            each = self.how.accuracies(configs, ranks)
            found[self.with_batch(batch).steps(part)] = each
            if target is not None and statistics.mean(each) >= target:
                break
        return found

    def trained(
        self, label: str, batch: int, ranks: int, target: float | None
    ) -> tuple[dict[str, Any], float]:
        """Train with K-FAC's learning rate, or with the two of SGD.

        Returns:
            The rate that reaches the target first, or comes nearest, with its accuracies and steps;
            and the target, by default the highest accuracy.
        """
        tried = {}
        for linear in (True,) if label in STRATEGIES else (True, False):
            lr = self.config(label, batch, linear=linear).lr
            tried[lr] = self.ends(label, batch, ranks, target, linear=linear)
        errors = {
            lr: {steps: 1 - statistics.mean(each) for steps, each in ends.items()}
            for lr, ends in tried.items()
        }
        least = {lr: min(each.values()) for lr, each in errors.items()}
        error = min(least.values()) if target is None else 1 - target
        steps = {lr: runs.steps_to(error, each) for lr, each in errors.items()}
        lr = min(tried, key=lambda lr: (steps[lr] or math.inf, least[lr]))
        found = {"lr": lr, "accuracies": tried[lr], "steps": steps[lr], "tried": tried}
        return found, 1 - error

    def times(self, batches: Mapping[str, int], ranks: int) -> list[list[float]]:
        """Return the mean seconds of a step for each label and period of steps."""
        # Where processes wait for each other, processor time leaves that out.
        clock: ClockName = "cpu" if ranks == 1 else "wall"
        configs = [
            self.config(label, batch, seed=TUNING_SEED).but(clock=clock)
            for label, batch in batches.items()
        ]
        cycles = self.how.cycles
        names = "-".join(runs.digest(one, ranks, f"{cycles} cycles")[:8] for one in configs)
        path = self.how.folder / f"times-{names}.json"
        if not path.exists():
            call = launch(runs.turns, ranks, timeout=24 * 3600.0, threads=configs[0].threads)
            write_json(path, call(configs, cycles, kaisa.PERIOD, kaisa.TURN)[0])
        found: list[list[float]] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def counted(self, ranks: int) -> dict[str, Any]:
        """Return the memory and the largest batch of a rank, for SGD and all strategies."""
        found: dict[str, dict[str, Any]] = {}
        for label in (SGD, *STRATEGIES):
            memory = self.memory(label, ranks)
            batch = largest_batch(self.cap, memory.fixed, memory.per_sample)
            if not batch:
                raise ValueError(f"no sample of {label} fits {self.cap:,} bytes: {memory}")
            found[label] = {
                "memory": asdict(memory),
                "fixed": memory.fixed,
                "batch": batch,
                "bytes": memory.at(batch),
            }
            if ranks == 1:
                found[label]["peak"] = peak(self.config(label, batch), batch)
        return {"cap": self.cap, "processes": ranks, "counted": found}

    def report(self, ranks: int) -> dict[str, Any]:
        """Train with the largest batches, and time steps.

        Returns:
            The counted memory of all strategies, the target, and for each that was trained its
            batch, learning rate, accuracies by steps, epochs to the target, images a second, and
            ratios to SGD's.
        """
        found = self.counted(ranks)
        counted = found["counted"]
        batches = {label: counted[label]["batch"] * ranks for label in (SGD, *self.strategies)}
        batches[SMALL_SGD] = counted[SMALL]["batch"] * ranks
        times = dict(zip(batches, self.times(batches, ranks), strict=True))
        rows: dict[str, dict[str, Any]] = {}
        target: float | None = None
        for label, batch in batches.items():
            row, target = self.trained(label, batch, ranks, target)
            steps = row["steps"]
            rates = [
                batch * sgd / (batches[SGD] * own)
                for own, sgd in zip(times[label], times[SGD], strict=True)
            ]
            rate = statistics.median(rates)
            epochs = None if steps is None else steps * batch / self.size.images
            rows[label] = {
                **row,
                "batch": batch // ranks,
                "at_most": label != SGD and steps == min(row["accuracies"]),
                "epochs": epochs,
                "images_per_second": batch / statistics.median(times[label]),
                "rate_ratio": rate,
                "rate_ratio_spread": (min(rates), max(rates)),
            }
            base = rows[SGD]["epochs"]
            rows[label]["seconds_ratio"] = None if epochs is None else epochs / base / rate
        return {
            **found,
            "size": self.size.key,
            "seeds": self.seeds,
            "target": target,
            "torch": torch.__version__,
            "processor": processor(),
            "rows": rows,
        }


def megabytes(size: float) -> str:
    return f"{size / 1e6:.2f}"


def memory_table(found: Mapping[str, Any]) -> Table:
    """Return the bytes and the largest batches as a table."""
    title = f"MB of a rank, at most {megabytes(found['cap'])}, {found['processes']} process(es)"
    parts = ("weights", "gradients", "state", "buckets", "curvature", "window", "per_sample")
    rows = []
    for label, row in found["counted"].items():
        peak_bytes = row.get("peak")
        rows.append(
            [
                label,
                *(megabytes(row["memory"][part]) for part in parts),
                str(row["batch"]),
                megabytes(row["bytes"]),
                "-" if peak_bytes is None else megabytes(peak_bytes),
            ]
        )
    return display.table(title, ["", *parts, "batch", "all", "peak"], rows)


def table(found: Mapping[str, Any]) -> Table:
    """Return a report as a table."""
    title = (
        f"To {100 * found['target']:.2f} % of held-out images, {found['processes']} process(es), "
        f"{found['size']}"
    )
    columns = ["", "batch\nof a rank", "lr", "images/s", "of SGD's", "accuracies, % (steps)"]
    columns += ["epochs\nto it", "time,\nof SGD's"]
    rows = []
    for label, row in found["rows"].items():
        ends = [
            f"{100 * statistics.mean(each):.2f} ({steps})"
            for steps, each in row["accuracies"].items()
        ]
        reached, at_most = row["steps"] is not None, "<= " * row["at_most"]
        low, high = row["rate_ratio_spread"]
        rows.append(
            [
                label,
                str(row["batch"]),
                f"{row['lr']:.3g}",
                f"{row['images_per_second']:.0f}",
                f"{row['rate_ratio']:.2f} ({low:.2f} to {high:.2f})",
                ", ".join(ends),
                f"{at_most}{row['epochs']:.2f}" if reached else "not reached",
                f"{at_most}{row['seconds_ratio']:.2f}" if reached else "-",
            ]
        )
    return display.table(title, columns, rows)


def main(
    cap: Annotated[float, typer.Option(min=1, help="Bytes of a rank.")] = CAP,
    images: Annotated[int, typer.Option(min=10, help="Training images.")] = 10_000,
    batch: Annotated[int, typer.Option(min=1, help="That rates were tuned with.")] = 64,
    epochs: Annotated[float, typer.Option(help="Of SGD.")] = 3.0,
    lengths: Annotated[str, typer.Option(help="Parts of SGD's epochs.")] = "0.5,0.75",
    seeds: Annotated[str, typer.Option(help="Separated by commas.")] = "0",
    processes: Annotated[str, typer.Option(help="One report for each, by commas.")] = "1,4",
    strategies: Annotated[str, typer.Option(help="That K-FAC trains with.")] = "comm-opt,sharded",
    cycles: Annotated[int, typer.Option(min=1, help="Of a hundred steps, timed.")] = 2,
    count_only: Annotated[bool, typer.Option("--count", help="Train nothing.")] = False,
    kept: Annotated[Path, typer.Option("--runs", help="Where runs are kept.")] = Path(
        "runs/fixed-memory/runs"
    ),
    tuned: Annotated[Path, typer.Option(help="Where learning rates are kept.")] = TUNED,
    output: Annotated[Path, typer.Option(help="Of the figures.")] = Path("runs/fixed-memory"),
    as_json: Annotated[bool, typer.Option("--json", help="Figures alone.")] = False,
) -> None:
    """Count the largest batches under a cap, train with them, and print tables."""
    torch.set_num_threads(1)
    chosen = strategies.split(",")
    if unknown := [name for name in chosen if name not in STRATEGIES]:
        raise typer.BadParameter(f"no strategy {unknown[0]!r}; there are: {', '.join(STRATEGIES)}")
    size = Size(images=images, batch=batch, epochs=epochs, lengths=numbers(lengths))
    if wrong := [part for part in size.lengths if not 0 < part <= 1]:
        raise typer.BadParameter(f"a length is a part of SGD's epochs, not {wrong[0]:g}")
    rates = TriedRates(tuned, highest=True)
    lrs = rates.best({name: CONTENDERS[name].lrs for name in (SGD, KFAC)}, size.key)
    how = Machinery(folder=kept, at_once=1, cycles=cycles)
    race = Race(int(cap), size, lrs, chosen, [int(seed) for seed in numbers(seeds)], how)
    screen = console(width=140)
    reports: list[dict[str, Any]] = []
    for number in numbers(processes):
        ranks = int(number)
        found = race.counted(ranks) if count_only else race.report(ranks)
        reports.append(found)
        if not count_only:
            write_json(output / f"fixed-memory-{ranks}.json", found)
        if not as_json:
            screen.print(memory_table(found))
            if not count_only:
                screen.print(table(found))
    if as_json:
        print_json(reports)


if __name__ == "__main__":
    run_command(main)
