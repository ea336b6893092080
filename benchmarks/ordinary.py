"""What the first lines that people copy do on ordinary problems, beside the optimizers behind them.

    python -m benchmarks.ordinary                  # 23 problems, seeds 0, 1, 2
    python -m benchmarks.ordinary --short          # a minute: four problems, two rates, one seed
    python -m benchmarks.ordinary --set unseen     # the eight on which nothing was chosen
    python -m benchmarks.ordinary --set later      # eleven, written down after all was chosen
    python -m benchmarks.ordinary --bases          # K-FAC before other optimizers than this SGD
    python -m benchmarks.ordinary --kfac-path DIR  # with kfac-pytorch, a folder with its package

Each contender trains at three learning rates, a factor of ten apart in all, and three schedules
(constant; a warm-up of 15 steps and a line to zero; a cosine), 300 steps of 64 examples. Nothing is
tuned. ``recommend`` is the call that `soframe.recommend` prints, word for word, at its own rate.
The held-out loss is looked at 20 times in a run. Counted by contender:

- *diverged*: cells that end above 1.5 times the loss at the start, where the base's does not;
- *behind*: cells whose lowest held-out loss is above the base's in the same cell by more than 5 %
  of the base's gain, so that small data, which are overfitted sooner by whoever fits faster, count
  by what early stopping keeps;
- *gain*: the base's best gain over all rates and schedules of a problem, over the contender's;
- *steps*, *time*: to the loss of the base's best rate and schedule, over the base's own, at the
  rate and schedule that are there first.

The base is SGD, or AdamW for optimizers that own their step. Runs are kept in ``--runs``: an
interrupted benchmark goes on where it was. Time is processor time of the steps.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import soframe
from benchmarks.ordinary_problems import LATER, OPEN, UNSEEN, Problem
from experiments.display import aligned
from experiments.libraries import import_kfac_pytorch
from experiments.muon import Muon, Together

STEPS, LOOKS, HELD_OUT = 300, 20, 600
WARM_UP = 15
DIVERGED = 1.5  # times the loss at the start
SHORT = ("friedman1", "digits-mlp", "breast-cancer", "autoencoder")

SETS = {"open": OPEN, "unseen": UNSEEN, "later": LATER}
PROBLEMS = {**OPEN, **UNSEEN, **LATER}

SCHEDULES: dict[str, Callable[[int, int], float]] = {
    "constant": lambda step, steps: 1.0,
    "warm-up, line": lambda step, steps: min(1.0, (step + 1) / WARM_UP) * (1 - step / steps),
    "cosine": lambda step, steps: 0.5 * (1 + math.cos(math.pi * step / steps)),
}


@dataclass(frozen=True)
class Training:
    """What a contender steps with: an optimizer, and a preconditioner before it or None."""

    optimizer: torch.optim.Optimizer
    preconditioner: Any = None

    def step(self, loss: Callable[[], Tensor]) -> None:
        """Take a step on a batch."""
        self.optimizer.zero_grad()
        loss().backward()
        if self.preconditioner is not None:
            self.preconditioner.step()
        self.optimizer.step()


def sgd(model: nn.Module, lr: float) -> Training:
    """Return SGD with momentum."""
    return Training(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9))


def kfac(model: nn.Module, lr: float, loss: str = "") -> Training:
    """Return the README's first snippet, which observes the outputs if it is told the loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    if not loss:
        return Training(optimizer, soframe.Preconditioner(model, optimizer=optimizer))
    statistics = soframe.Statistics(loss=loss)
    preconditioner = soframe.Preconditioner(model, optimizer=optimizer, statistics=statistics)

    def observe(module: nn.Module, inputs: Any, outputs: Tensor) -> None:
        if module.training:  # not where the held-out loss is looked at
            preconditioner.observe(outputs)

    model.register_forward_hook(observe)
    return Training(optimizer, preconditioner)


def kfac_pytorch(model: nn.Module, lr: float) -> Training:
    """Return kfac-pytorch at its own settings, with statistics and solves every ten steps."""
    from kfac.preconditioner import KFACPreconditioner

    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    preconditioner = KFACPreconditioner(
        model,
        factor_update_steps=10,
        inv_update_steps=10,
        lr=lambda step: optimizer.param_groups[0]["lr"],
    )
    return Training(optimizer, preconditioner)


def recommended(model: nn.Module, lr: float) -> Training:
    """Return what the recommended call makes, at its own rate."""
    names: dict[str, Any] = {"model": model, "soframe": soframe, "torch": torch}
    exec(soframe.recommend(model).call, names)
    return Training(names["optimizer"], names.get("preconditioner"))


def muon(model: nn.Module, lr: float) -> Training:
    """Return Muon on hidden weights, and AdamW on embeddings, vectors and the last layer."""
    linear = [module for module in model.modules() if isinstance(module, nn.Linear)]
    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    # A net of convolutions alone has no last layer of this kind.
    excluded = {id(module.weight) for module in (*tables, *linear[-1:])}
    hidden, others = [], []
    for parameter in model.parameters():
        is_hidden = parameter.dim() >= 2 and id(parameter) not in excluded
        (hidden if is_hidden else others).append(parameter)
    adamw = torch.optim.AdamW(others, lr=lr / 5, betas=(0.9, 0.95))
    return Training(Together(Muon(hidden, lr, momentum=0.9, weight_decay=0.0), adamw))


@dataclass(frozen=True)
class Contender:
    """An optimizer of the comparison.

    Attributes:
        make: From a model and a learning rate to what steps.
        lrs: The learning rates; None in place of a rate for the contender's own.
        base: The contender that it is compared with.
        names_loss: Whether it is told the loss, where soframe has one of the problem's.
    """

    make: Callable[..., Training]
    lrs: tuple[float | None, ...]
    base: str = "sgd"
    names_loss: bool = False


@dataclass(frozen=True)
class Base:
    """An optimizer that a preconditioner is put in front of, and its learning rates."""

    make: Callable[..., torch.optim.Optimizer]
    lrs: tuple[float, ...]


def alone(base: Base) -> Contender:
    """Return an optimizer without a preconditioner."""
    return Contender(lambda model, lr: Training(base.make(model.parameters(), lr=lr)), base.lrs)


def behind_kfac(base: Base, name: str) -> Contender:
    """Return the README's first snippet in front of an optimizer, to be compared with it alone."""

    def make(model: nn.Module, lr: float) -> Training:
        optimizer = base.make(model.parameters(), lr=lr)
        return Training(optimizer, soframe.Preconditioner(model, optimizer=optimizer))

    return Contender(make, base.lrs, base=name)


RATES = (0.1, 0.03, 0.01)
SGD, AdamW, RMSprop = torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop
BASES: dict[str, Base] = {
    "adamw": Base(AdamW, (0.01, 0.003, 0.001)),
    "rmsprop": Base(RMSprop, (0.01, 0.003, 0.001)),
    "sgd without momentum": Base(SGD, (1.0, 0.3, 0.1)),
    "sgd with nesterov and decay": Base(
        partial(SGD, momentum=0.9, nesterov=True, weight_decay=5e-4), RATES
    ),
    "sgd with momentum 0.95": Base(partial(SGD, momentum=0.95), (0.05, 0.015, 0.005)),
    "sgd with momentum 0.99": Base(partial(SGD, momentum=0.99), (0.01, 0.003, 0.001)),
}
CONTENDERS: dict[str, Contender] = {
    "sgd": Contender(sgd, RATES),
    "adamw": alone(BASES["adamw"]),
    "muon": Contender(muon, (0.06, 0.02, 0.006), base="adamw"),
    "kfac-pytorch": Contender(kfac_pytorch, RATES),
    "soframe: Preconditioner": Contender(kfac, RATES),
    "soframe: Preconditioner with loss": Contender(kfac, RATES, names_loss=True),
    "soframe: recommend": Contender(recommended, (None,)),
    "soframe: Optimizer": Contender(
        lambda model, lr: Training(soframe.Optimizer(model, lr=lr)),
        (0.12, 0.04, 0.012),
        base="adamw",
    ),
}


USUAL = list(CONTENDERS)
# Vectors and the head, which have a fifth of these, then have the rates of AdamW alone.
CONTENDERS["soframe: Optimizer at AdamW's rates"] = replace(
    CONTENDERS["soframe: Optimizer"], lrs=(0.05, 0.015, 0.005)
)
for name, base in BASES.items():
    CONTENDERS[name] = alone(base)
    CONTENDERS[f"K-FAC before {name}"] = behind_kfac(base, name)


@dataclass(frozen=True)
class Cell:
    """A run of the comparison."""

    problem: str
    contender: str
    lr: float | None
    schedule: str
    seed: int
    batch: int = 64
    steps: int = STEPS


@dataclass(frozen=True)
class Record:
    """The outcome of a run.

    Attributes:
        cell: The run.
        start: Held-out loss before the first step.
        held_out: Held-out losses, `LOOKS` of them in a run; NaN from where a run broke off.
        train: Mean training losses over the same steps.
        seconds: Processor time of all steps until then.
        error: Why a run broke off, or empty.
    """

    cell: Cell
    start: float
    held_out: list[float]
    train: list[float]
    seconds: list[float]
    error: str = ""

    @property
    def lowest(self) -> float:
        """The lowest held-out loss."""
        return min(filter(math.isfinite, self.held_out), default=math.inf)

    @property
    def diverged(self) -> bool:
        """Whether the last held-out loss is far above the first."""
        # Losses may be negative: the log-likelihood of counts.
        limit = self.start + (DIVERGED - 1) * abs(self.start)
        return not self.held_out[-1] <= limit

    def reached(self, loss: float) -> int | None:
        """Return the index of the first look at a loss that is not above, or None."""
        return next((i for i, held_out in enumerate(self.held_out) if held_out <= loss), None)


def _loss(problem: Problem, model: nn.Module, rows: Tensor) -> Tensor:
    return problem.loss(model, problem.inputs[rows], problem.targets[rows])


def run(
    cell: Cell, contenders: dict[str, Contender] = CONTENDERS, *, steps: int | None = None
) -> Record:
    """Train once, for ``steps`` of the schedule; None for all."""
    torch.set_num_threads(1)
    problem = PROBLEMS[cell.problem]()
    torch.manual_seed(1000 + cell.seed)
    count = len(problem.inputs)
    order = torch.randperm(count)
    cut = int(0.85 * count)
    train, test = order[:cut], order[cut:][:HELD_OUT]
    model = problem.model()

    def look() -> float:
        model.eval()
        with torch.no_grad():
            held_out = float(_loss(problem, model, test))
        model.train()
        return held_out

    record = Record(cell, look(), [], [], [])
    steps, look_every = steps or cell.steps, cell.steps // LOOKS
    seconds, total = 0.0, 0.0
    try:
        contender = contenders[cell.contender]
        told = {"loss": problem.fisher_loss} if contender.names_loss else {}
        training = contender.make(model, cell.lr, **told)
        schedule = partial(SCHEDULES[cell.schedule], steps=cell.steps)
        scheduler = torch.optim.lr_scheduler.LambdaLR(training.optimizer, schedule)
        for step in range(steps):
            rows = train[torch.randint(len(train), (cell.batch,))]
            losses: list[Tensor] = []

            def loss(rows: Tensor = rows, losses: list[Tensor] = losses) -> Tensor:
                losses.append(_loss(problem, model, rows))
                return losses[-1]

            begin = time.process_time()
            training.step(loss)
            scheduler.step()
            seconds += time.process_time() - begin
            total += float(losses[0].detach())
            if step % look_every == look_every - 1:
                record.held_out.append(look())
                record.train.append(total / look_every)
                record.seconds.append(seconds)
                total = 0.0
        return record
    except (ArithmeticError, RuntimeError, ValueError) as error:
        left = steps // look_every - len(record.held_out)
        nothing = [math.nan] * left
        return Record(
            cell,
            record.start,
            record.held_out + nothing,
            record.train + nothing,
            record.seconds + [seconds] * left,
            f"{type(error).__name__}: {error}"[:300],
        )


def _quiet(cell: Cell) -> Record:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(cell)


def kept(cells: Sequence[Cell], file: Path, processes: int) -> list[Record]:
    """Return the records of cells, run unless a file has them; each is added to it at its end."""
    known = {record.cell: record for record in load(file)}
    missing = [cell for cell in cells if cell not in known]
    file.parent.mkdir(parents=True, exist_ok=True)
    with get_context("fork").Pool(processes) as pool, file.open("a", encoding="utf-8") as out:
        for number, record in enumerate(pool.imap_unordered(_quiet, missing), 1):
            known[record.cell] = record
            out.write(json.dumps(asdict(record)) + "\n")
            out.flush()
            if number % 50 == 0:
                print(f"{number} of {len(missing)} runs", file=sys.stderr, flush=True)
        # At its end the context terminates workers, which hangs if one has only just been started.
        pool.close()
        pool.join()
    return [known[cell] for cell in cells]


def load(file: Path) -> list[Record]:
    """Return the records of a file; none if there is no file."""
    if not file.exists():
        return []
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return [Record(**{**row, "cell": Cell(**row["cell"])}) for row in rows]


@dataclass(frozen=True)
class Score:
    """A contender on a problem, beside its base.

    Attributes:
        cells: Its runs.
        diverged: Runs that diverged where the base's did not.
        behind: Runs whose lowest loss is above the base's by more than 5 % of the base's gain.
        best: Its lowest held-out loss, of the seeds' mean over the cells.
        base: The base's.
        gain: The base's best gain over its own.
        steps: Its steps to the base's best loss over the base's; infinite if it is never there.
        time: Likewise in processor time.
        end: The held-out loss at the end of its best cell.
        train: The training loss there.
    """

    cells: int
    diverged: int
    behind: int
    best: float
    base: float
    gain: float
    steps: float
    time: float
    end: float
    train: float


def _groups(records: Iterable[Record]) -> list[list[Record]]:
    """Return the seeds of each rate and schedule."""
    groups: dict[tuple[float | None, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record.cell.lr, record.cell.schedule), []).append(record)
    return list(groups.values())


def _lowest(group: Sequence[Record]) -> float:
    return statistics.mean(record.lowest for record in group)


def _paired(records: Sequence[Record], base: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Return runs with the base's of the same seed, schedule and rank of the learning rate.

    The partner of a run without a rate is the base's best rate of that seed and schedule.
    """
    lrs = sorted({record.cell.lr for record in records if record.cell.lr is not None})
    base_lrs = sorted({record.cell.lr for record in base if record.cell.lr is not None})
    base_lr_of = dict(zip(lrs, base_lrs, strict=False))
    pairs = []
    for record in records:
        cell = record.cell
        partners = [r for r in base if (r.cell.seed, r.cell.schedule) == (cell.seed, cell.schedule)]
        if cell.lr is not None:
            partners = [r for r in partners if r.cell.lr == base_lr_of[cell.lr]]
        pairs.append((record, min(partners, key=lambda partner: partner.lowest)))
    return pairs


def score(records: Sequence[Record], base: Sequence[Record]) -> Score:
    """Compare the runs of a contender on a problem with those of its base."""
    diverged = behind = 0
    for record, partner in _paired(records, base):
        diverged += record.diverged and not partner.diverged
        gained = record.start - partner.lowest
        behind += record.lowest > partner.lowest + 0.05 * max(gained, 0.0)
    best = min(_groups(records), key=_lowest)
    base_best = min(_groups(base), key=_lowest)
    start = statistics.mean(record.start for record in base_best)
    gained, base_gained = start - _lowest(best), start - _lowest(base_best)
    steps, seconds = min(_reached(group, base_best) for group in _groups(records))
    return Score(
        cells=len(records),
        diverged=diverged,
        behind=behind,
        best=_lowest(best),
        base=_lowest(base_best),
        gain=base_gained / gained if gained > 0 else math.inf,
        steps=steps,
        time=seconds,
        end=statistics.mean(record.held_out[-1] for record in best),
        train=statistics.mean(record.train[-1] for record in best),
    )


def _reached(records: Sequence[Record], base: Sequence[Record]) -> tuple[float, float]:
    """Return the steps and the time of a cell to the base's best loss, over the base's; medians."""
    steps, times = [], []
    base_of = {record.cell.seed: record for record in base}
    for record in records:
        partner = base_of[record.cell.seed]
        look, base_look = record.reached(partner.lowest), partner.reached(partner.lowest)
        if look is None or base_look is None:
            steps.append(math.inf)
            times.append(math.inf)
        else:
            steps.append((look + 1) / (base_look + 1))
            times.append(record.seconds[look] / partner.seconds[base_look])
    return statistics.median(steps), statistics.median(times)


def tables(records: Sequence[Record]) -> tuple[str, dict[str, dict[str, Score]]]:
    """Return a table by problem, one of all contenders, and the scores."""
    of: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        of.setdefault((record.cell.contender, record.cell.problem), []).append(record)
    names = list(dict.fromkeys(record.cell.contender for record in records))
    problems = list(dict.fromkeys(record.cell.problem for record in records))
    scores: dict[str, dict[str, Score]] = {}
    for name in names:
        base = CONTENDERS[name].base
        if name != base and base in names:
            scores[name] = {
                problem: score(of[name, problem], of[base, problem]) for problem in problems
            }
    texts = []
    for name, by_problem in scores.items():
        rows = [_row(*item) for item in by_problem.items()]
        head = ["problem", "diverged", "behind", "best", "base", "gain", "steps", "time", "end"]
        title = f"{name}, beside {CONTENDERS[name].base}"
        texts.append(aligned(title, [[*head, "train"], *rows]))
    head = ["contender", "base", "cells", "diverged", "behind", "gain: median, worst"]
    rows = [_total(name, list(by_problem.values())) for name, by_problem in scores.items()]
    texts.append(aligned("all problems", [[*head, "steps", "time"], *rows]))
    return "\n\n".join(texts), scores


def _row(problem: str, score: Score) -> list[str]:
    counts = [str(score.diverged), str(score.behind)]
    losses = (score.end, score.train)
    numbers = (score.best, score.base, score.gain, score.steps, score.time, *losses)
    return [problem, *counts, *(f"{number:.3g}" for number in numbers)]


def _total(name: str, scores: Sequence[Score]) -> list[str]:
    gains = [score.gain for score in scores]
    return [
        name,
        CONTENDERS[name].base,
        str(sum(score.cells for score in scores)),
        str(sum(score.diverged for score in scores)),
        str(sum(score.behind for score in scores)),
        f"{statistics.median(gains):.3f}, {max(gains):.3g}",
        f"{statistics.median(score.steps for score in scores):.2f}",
        f"{statistics.median(score.time for score in scores):.2f}",
    ]


def cells_of(
    problems: Iterable[str],
    contenders: Iterable[str],
    seeds: Iterable[int],
    *,
    rates: int = 3,
    batch: int = 64,
    steps: int = STEPS,
) -> list[Cell]:
    """Return the runs of a comparison, seed by seed; so many of the rates, from the highest on."""
    return [
        Cell(problem, name, lr, schedule, seed, batch, steps)
        for seed in seeds
        for problem in problems
        for name in contenders
        for lr in CONTENDERS[name].lrs[:rates]
        for schedule in SCHEDULES
    ]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--set", default="open", choices=SETS, help="the problems")
    parser.add_argument("--problems", help="separated by commas; all of the set by default")
    parser.add_argument("--contenders", help="separated by commas; all by default")
    parser.add_argument("--bases", action="store_true", help="K-FAC before other optimizers")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a run")
    parser.add_argument("--batch", type=int, default=64, help="examples of a step")
    parser.add_argument("--short", action="store_true", help="four problems, two rates, one seed")
    parser.add_argument("--kfac-path", type=Path, help="a folder with the package kfac")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--runs", type=Path, default=Path("runs/ordinary.jsonl"))
    parser.add_argument("--json", action="store_true", help="scores instead of tables")
    return parser.parse_args()


def main() -> int:
    """Run the comparison and print its tables; 1 if K-FAC's default diverges anywhere."""
    options = _arguments()
    if options.kfac_path:
        import_kfac_pytorch(options.kfac_path)
    names = [name for name in USUAL if options.kfac_path or name != "kfac-pytorch"]
    if options.bases:
        names = [name for base in BASES for name in (base, f"K-FAC before {base}")]
    if options.contenders:
        names = options.contenders.split(",")
    problems = list(SETS[options.set])
    seeds, rates = [int(seed) for seed in options.seeds.split(",")], 3
    if options.short:
        problems, seeds, rates = list(SHORT), [0], 2
        names = ["sgd", "soframe: Preconditioner"]
    if options.problems:
        problems = options.problems.split(",")
    if unknown := sorted({*names} - {*CONTENDERS} | {*problems} - {*PROBLEMS}):
        print(f"error: unknown: {', '.join(unknown)}", file=sys.stderr)
        return 2
    cells = cells_of(problems, names, seeds, rates=rates, batch=options.batch, steps=options.steps)
    text, scores = tables(kept(cells, options.runs, options.processes))
    if options.json:
        print(json.dumps({name: _plain(by_problem) for name, by_problem in scores.items()}))
    else:
        print(text)
    by_problem = scores.get("soframe: Preconditioner", {})
    return int(any(score.diverged for score in by_problem.values()))


def _plain(by_problem: dict[str, Score]) -> dict[str, dict[str, float]]:
    return {problem: asdict(score) for problem, score in by_problem.items()}


if __name__ == "__main__":
    sys.exit(main())
