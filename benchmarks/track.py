"""The public optimization track's methods on a small GPT: does it order them as the track does?

    python -m benchmarks.track               # train, rank, and correlate the two orders
    python -m benchmarks.track --figures experiments/tuned/learning-rates/small-gpt.json
    python -m benchmarks.track --steps 300 --decay 0 --seeds 0,1,2   # another protocol
    python -m benchmarks.track --gallery     # with the gallery's other methods, two hours

The public track (modded-nanogpt, "optimization") counts the steps of a GPT-2 on FineWeb to a
held-out loss of 3.28; an entry may choose method, settings and initial weights. Here a `SmallGPT`
is trained for one number of steps, and the least held-out loss is first. Every entry trains the
hidden matrices; AdamW of one rate trains embeddings, gains and the head. Rates grow in the first
part of a run and fall along a line to zero. Entries with "H" keep the norms of their matrices
(hyperball), and have the initial weights of such public entries; the matrices of others decay.

Each method is tuned alike: three rates, `RATIO` apart, on a seed of its own, and further ones while
the best is at an end. The best rate then trains on the seeds of the report. `HELD_OUT` were chosen
before any run, as a check on a protocol that was chosen on the others. Methods of the gallery that
the public track lacks have a place here alone, and no part in the correlations.

Losses are kept in `--tuned`, runs in `--runs`: an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from rich.table import Table

import experiments.gallery  # noqa: F401  # registers its methods
from experiments import display, runs
from experiments.config import RunConfig
from experiments.display import console, print_json, run_command
from experiments.records import jsonable, write_json
from experiments.tuning import FOLDER, TUNING_SEED, TriedRates

STORED = FOLDER / "learning-rates" / "small-gpt.json"
HIDDEN = r"\.(q|k|v|out|widen|narrow)$"
"""The modules of hidden matrices."""
AUXILIARY_LR = 0.008
RATIO = 1.5
MOST = 14
"""The largest number of rates that are tried."""
APART = 0.05
"""Public entries whose steps differ by less are not compared by `pairs`."""


@dataclass(frozen=True)
class Entry:
    """A method, and its place on the public track.

    Attributes:
        optimizer: See `RunConfig`.
        lr: The middle one of the first learning rates.
        public: Its name on the track, and the number of the entry; empty if it has none.
        steps: Its number of steps there (autumn 2026); 0 if it has none.
        method: Arguments of the method.
        solve_every: Steps between bases, roots or inverses.
        kept: Whether the norms of matrices are kept.
    """

    optimizer: str
    lr: float
    public: str = ""
    steps: int = 0
    method: Mapping[str, Any] = field(default_factory=dict)
    solve_every: int = 1
    kept: bool = False


@dataclass(frozen=True)
class Protocol:
    """What runs have in common.

    Attributes:
        steps: The length of a run.
        warmup: The part of it in which rates grow.
        batch_size: The examples of a step.
        decay: Hidden matrices whose norms are not kept decay by ``exp(-decay)`` over a run.
    """

    steps: int = 450
    warmup: float = 0.1
    batch_size: int = 32
    decay: float = 2.0

    def setting(self, seed: int) -> str:
        """Return the name under which losses of a seed are kept."""
        shared = f"{self.steps} steps, warm-up {self.warmup:g}, batches of {self.batch_size}"
        return f"{shared}, decay {self.decay:g}, seed {seed}"


USUAL = Protocol()
_SOAP: Mapping[str, Any] = {"betas": (0.95, 0.9), "shampoo_beta": 0.9}
_ADAM: Mapping[str, Any] = {"betas": (0.9, 0.95)}
_PMUON: Mapping[str, Any] = {
    "momentum": {"beta": 0.95, "nesterov": True},
    "shampoo": {"decay": 0.95, "power": -0.3, "graft": None},
}
_SHAMPOO: Mapping[str, Any] = {"momentum": {"beta": 0.9}, "shampoo": {"decay": 0.95}}
# Bases of all sides, and as many iterations as Muon.
_SOAP_MUON: Mapping[str, Any] = {"momentum": 0.95, "steps": 5, "max_ratio": 1e9}
_SQUARED: Mapping[str, Any] = {"steps": 5, "eps": 1e-20}
_PSGD: Mapping[str, Any] = {"beta": 0.95, "rate": 1.0}
ENTRIES: Mapping[str, Entry] = {
    "soap-muon": Entry("soframe:soap-muon", 0.068, "SOAP-Muon (44)", 2750, _SOAP_MUON),
    "soap-h": Entry("soframe:soap", 0.045, "SOAP-H (27)", 3125, _SOAP, kept=True),
    "kl-soap-h": Entry("soframe:kl-soap", 0.068, "KL-SOAP-H (19)", 3125, _SOAP, kept=True),
    "pmuon": Entry(
        "soframe:momentum+shampoo+orthogonalise+match-rms", 0.045, "PMuon (18)", 3225, _PMUON
    ),
    "normuon": Entry("soframe:normuon", 0.068, "NorMuon (10)", 3250),
    "normuon-h": Entry("soframe:normuon", 0.068, "NorMuon-H (8)", 3250, kept=True),
    "muon": Entry("soframe:muon", 0.068, "Muon (36)", 3250),
    "muon-h": Entry("soframe:muon", 0.068, "Muon-H (37)", 3250, kept=True),
    "newton-muon": Entry("soframe:newton-muon", 0.03, "Newton-Muon (15)", 3275, solve_every=10),
    "muon-squared": Entry("soframe:muon-squared", 0.068, "Muon² (7)", 3325, _SQUARED),
    "psgd-h": Entry("soframe:psgd-kron", 0.03, "PSGD-H (33)", 3375, _PSGD, kept=True),
    "shampoo": Entry(
        "soframe:momentum+shampoo", 0.002, "Shampoo, power -1/4 (21)", 4100, _SHAMPOO, 5
    ),
    "adam-h": Entry("soframe:adamw", 0.02, "Adam-H (4)", 4875, _ADAM, kept=True),
    "adamw": Entry("soframe:adamw", 0.003, "AdamW (2)", 5625, _ADAM),
    "spectral-descent": Entry(
        "soframe:muon", 0.15, "Muon without momentum (22)", 8225, {"momentum": 0.0}
    ),
}
HELD_OUT = ("pmuon", "psgd-h", "adam-h")
# Rates to begin with.
_RATES = {
    "sophia-g": 0.003,
    **dict.fromkeys(("caspr", "conda", "cosmos", "mousse", "sinkgd", "swan"), 0.01),
    **dict.fromkeys(("adamuon", "mars-muon", "muon-eq", "racs"), 0.03),
    **dict.fromkeys(("dion", "muon-vs"), 0.068),
    "adafisher": 0.1,
    "polargrad": 0.3,
    "splus": 0.3,
    **dict.fromkeys(("jorge", "mkor"), 0.75),
    "ikfac": 2.5,
}
GALLERY: Mapping[str, Entry] = {name: Entry(f"soframe:{name}", lr) for name, lr in _RATES.items()}
METHODS: Mapping[str, Entry] = {**ENTRIES, **GALLERY}


def configuration(name: str, lr: float, seed: int, protocol: Protocol = USUAL) -> RunConfig:
    """Return a run, which is evaluated at its end.

    Args:
        name: Of the entry.
        lr: Its highest learning rate.
        seed: Of weights and order.
        protocol: Of the run.
    """
    entry = METHODS[name]
    options: dict[str, Any] = {"auxiliary_lr": AUXILIARY_LR, "statistics_every": 1}
    options["solve_every"] = entry.solve_every
    weight_decay = 0.0
    if entry.kept:
        options["constraint"] = "hyperball"
    elif protocol.decay:
        options["auxiliary_weight_decay"] = 0.0
        # Rates are half of the highest in the mean.
        weight_decay = 2 * protocol.decay / (lr * protocol.steps)
    return RunConfig(
        "small-gpt-kept" if entry.kept else "small-gpt",
        entry.optimizer,
        lr=lr,
        weight_decay=weight_decay,
        method=entry.method,
        options=options,
        modules=HIDDEN,
        schedule="linear",
        warmup=protocol.warmup,
        batch_size=protocol.batch_size,
        steps=protocol.steps,
        stop_at_target=False,
        evaluate_every=protocol.steps,
        seed=seed,
        clock="cpu",
    )


Losses = Callable[[Sequence[RunConfig]], list[float]]
"""Trains runs, and returns the last held-out loss of each."""


def rounded(lr: float) -> float:
    """Return a rate with two digits, as it is kept."""
    return float(f"{lr:.2g}")


def untried(name: str, tried: Mapping[str, float | None]) -> list[float]:
    """Return the rates to try next: the first three, then one beyond the best at an end."""
    middle = METHODS[name].lr
    first = [rounded(middle * RATIO**power) for power in (-1, 0, 1)]
    if missing := [lr for lr in first if f"{lr:g}" not in tried]:
        return missing
    losses = {float(lr): math.inf if loss is None else loss for lr, loss in tried.items()}
    best = min(losses, key=losses.__getitem__)
    if len(losses) >= MOST:
        return []
    if best == min(losses):
        return [rounded(best / RATIO)]
    if best == max(losses):
        return [rounded(best * RATIO)]
    return []


def train(
    names: Sequence[str],
    seeds: Sequence[int],
    rates: TriedRates,
    losses: Losses,
    protocol: Protocol = USUAL,
) -> None:
    """Tune every method, train it on the seeds at its best rate, and keep the losses."""
    for name in names:
        setting = protocol.setting(TUNING_SEED)
        while lrs := untried(name, rates.scores(setting).get(name, {})):
            configs = [configuration(name, lr, TUNING_SEED, protocol) for lr in lrs]
            rates.keep(setting, [(name, *pair) for pair in zip(lrs, losses(configs), strict=True)])
        lr = rates.best({name: []}, setting)[name]
        configs = [configuration(name, lr, seed, protocol) for seed in seeds]
        for seed, loss in zip(seeds, losses(configs), strict=True):
            rates.keep(protocol.setting(seed), [(name, lr, loss)])


def report(
    names: Sequence[str], seeds: Sequence[int], rates: TriedRates, protocol: Protocol = USUAL
) -> dict[str, Any]:
    """Rank methods here and on the public track, from the losses that are kept.

    Args:
        names: Of the entries.
        seeds: Whose losses are averaged.
        rates: The losses.
        protocol: Of the runs.

    Returns:
        The agreement of the two orders without `HELD_OUT` and with them, the `pairs` of these and
        of all, and for each method its rate, losses and places; methods of one number share one,
        and a method without a number has no public place.

    Raises:
        ValueError: If a method was not trained.
    """
    tuned = rates.scores(protocol.setting(TUNING_SEED))
    lrs = rates.best({name: [] for name in names if name in tuned}, protocol.setting(TUNING_SEED))
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        kept = [rates.scores(protocol.setting(seed)).get(name, {}) for seed in seeds]
        if name not in lrs or any(f"{lrs[name]:g}" not in scores for scores in kept):
            raise ValueError(f"{name!r} was not trained for {protocol.setting(seeds[0])}")
        finals = [scores[f"{lrs[name]:g}"] for scores in kept]
        means = [math.inf if loss is None else loss for loss in finals]
        rows[name] = {"lr": lrs[name], "losses": finals, "loss": statistics.mean(means)}
    here = {name: row["loss"] for name, row in rows.items()}
    there = {name: float(METHODS[name].steps) for name in rows if METHODS[name].steps}
    for name, row in rows.items():
        row["place"] = 1 + sum(loss < here[name] for loss in here.values())
        row["public_place"] = None
        if name in there:
            row["public_place"] = 1 + sum(steps < there[name] for steps in there.values())
    judged = [name for name in there if name not in HELD_OUT]
    agreements = []
    for part in (judged, list(there)):
        scores = [[order[name] for name in part] for order in (here, there)]
        agreements.append(asdict(Agreement.of(*scores)) if len(part) > 2 else None)
    return {
        "seeds": list(seeds),
        "agreement": agreements[0],
        "agreement_of_all": agreements[1],
        "pairs": pairs(here, there, HELD_OUT),
        "pairs_of_all": pairs(here, there, there),
        "rows": rows,
    }


def pairs(
    here: Mapping[str, float], there: Mapping[str, float], of: Collection[str]
) -> tuple[int, int]:
    """Count pairs with one of some methods that both orders have alike, and all such pairs.

    Pairs whose public steps differ by less than `APART` are left out.
    """
    alike = count = 0
    for first, second in itertools.combinations(there, 2):
        is_apart = abs(there[first] / there[second] - 1) >= APART
        if is_apart and (first in of or second in of):
            count += 1
            alike += (here[first] < here[second]) == (there[first] < there[second])
    return alike, count


Array = npt.NDArray[np.float64]
RESAMPLES = 10_000
PERMUTED = 9
"""The largest number of methods all of whose orders are tried."""


@dataclass(frozen=True)
class Agreement:
    """The rank correlations of two orders of the same methods.

    Attributes:
        methods: The number of methods.
        spearman: Spearman's rho, ties at their mean rank.
        spearman_interval: Its 95 % interval of a bootstrap over the methods (percentiles).
        kendall: Kendall's tau-b.
        kendall_interval: Its interval.
        chance: The part of all orders, or of 10,000 drawn ones, whose rho is as large or larger.
    """

    methods: int
    spearman: float
    spearman_interval: tuple[float, float]
    kendall: float
    kendall_interval: tuple[float, float]
    chance: float

    @classmethod
    def of(cls, here: Sequence[float], there: Sequence[float]) -> Agreement:
        """Compare two scores of the same methods, the better the less; infinite ones tie."""
        from scipy.stats import rankdata  # takes a second to import

        own, public = rankdata(here), rankdata(there)
        count, random = len(own), np.random.default_rng(0)
        drawn = random.integers(count, size=(RESAMPLES, count))
        # A method that is drawn twice ties with itself in both orders.
        ranks = rankdata(own[drawn], axis=1), rankdata(public[drawn], axis=1)
        if count <= PERMUTED:
            orders = np.array(list(itertools.permutations(own)))
        else:
            orders = np.array([random.permutation(own) for _ in range(RESAMPLES)])
        rho = _spearman(own, public)
        return cls(
            methods=count,
            spearman=float(rho),
            spearman_interval=_middle(_spearman(*ranks)),
            kendall=float(_kendall(own, public)),
            kendall_interval=_middle(_kendall(*ranks)),
            chance=float((_spearman(orders, public) >= rho - 1e-9).mean()),
        )


def _spearman(first: Array, second: Array) -> Array:
    """Return the correlation of ranks `(..., methods)`; NaN where all of an order tie."""
    first = first - first.mean(axis=-1, keepdims=True)
    second = second - second.mean(axis=-1, keepdims=True)
    return _cosine(first, second)


def _kendall(first: Array, second: Array) -> Array:
    """Return tau-b of ranks `(..., methods)`: the correlation of the signs of all pairs."""
    signs = []
    for ranks in (first, second):
        pairs = np.sign(ranks[..., :, None] - ranks[..., None, :])
        signs.append(pairs.reshape(*ranks.shape[:-1], -1))
    return _cosine(*signs)


def _cosine(first: Array, second: Array) -> Array:
    lengths = (first**2).sum(axis=-1) * (second**2).sum(axis=-1)
    with np.errstate(invalid="ignore"):
        cosine: Array = (first * second).sum(axis=-1) / np.sqrt(lengths)
    return cosine


def _middle(values: Array) -> tuple[float, float]:
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return float(low), float(high)


def sentence(agreement: Mapping[str, Any]) -> str:
    """Return the correlations of two orders in words."""
    parts = []
    for name, symbol in (("spearman", "Spearman's rho"), ("kendall", "Kendall's tau")):
        low, high = agreement[f"{name}_interval"]
        parts.append(f"{symbol} {agreement[name]:.2f} (95 % interval {low:.2f} to {high:.2f})")
    chance = f"{agreement['chance']:.0%}" if agreement["chance"] >= 0.005 else "under 1%"
    return (
        f"Of {agreement['methods']} methods the order here and the public one have "
        f"{' and '.join(parts)}; {chance} of all orders have as large a rho."
    )


def sentence_of_pairs(found: Mapping[str, Any]) -> str:
    """Return in words how many pairs both orders have alike."""
    (alike, count), (alike_of_all, count_of_all) = found["pairs"], found["pairs_of_all"]
    return (
        f"Of {count_of_all} pairs whose public steps differ by {APART:.0%} or more "
        f"{alike_of_all} are alike; of the {count} with a held-out method {alike}."
    )


def table(found: Mapping[str, Any]) -> Table:
    """Return the report as a table: the least loss first."""
    columns = ["place", "method", "lr", "held-out\nloss", "of the seeds"]
    columns += ["public entry", "place", "steps"]
    cells = []
    for name, row in sorted(found["rows"].items(), key=lambda item: item[1]["place"]):
        entry = METHODS[name]
        losses = ["diverged" if loss is None else f"{loss:.3f}" for loss in row["losses"]]
        cells.append(
            [
                str(row["place"]),
                f"{name} (held out)" if name in HELD_OUT else name,
                f"{row['lr']:g}",
                f"{row['loss']:.3f}",
                ", ".join(losses),
                entry.public,
                str(row["public_place"] or ""),
                str(entry.steps or ""),
            ]
        )
    return display.table("Small GPT, after as many steps", columns, cells, left=2)


def main(
    only: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "",
    gallery: Annotated[bool, typer.Option("--gallery", help="All of the gallery, too.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Of a run.")] = USUAL.steps,
    warmup: Annotated[float, typer.Option(help="Part of a run in which rates grow.")] = (
        USUAL.warmup
    ),
    batch_size: Annotated[int, typer.Option(min=1, help="Examples of a step.")] = USUAL.batch_size,
    decay: Annotated[float, typer.Option(help="Of weights over a run, as -log.")] = USUAL.decay,
    seeds: Annotated[str, typer.Option(help="Of the report, separated by commas.")] = "0,1",
    at_once: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    kept: Annotated[Path, typer.Option("--runs", help="Where runs are kept.")] = Path(
        "runs/track/runs"
    ),
    tuned: Annotated[Path, typer.Option(help="Where losses are kept.")] = Path(
        "runs/track/losses.json"
    ),
    figures: Annotated[
        Path | None, typer.Option(help="Losses that were kept, to rank without training.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Of the figures.")] = Path("runs/track/track.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Figures alone.")] = False,
) -> None:
    """Train the methods of the public track, and print both orders."""
    names = list(METHODS if gallery else ENTRIES)
    if only:
        names = [name.strip() for name in only.split(",")]
    if unknown := [name for name in names if name not in METHODS]:
        raise typer.BadParameter(f"no method {unknown[0]!r}; there are: {', '.join(METHODS)}")
    numbers = [int(seed) for seed in seeds.split(",")]
    protocol, rates = Protocol(steps, warmup, batch_size, decay), TriedRates(figures or tuned)

    def losses(configs: Sequence[RunConfig]) -> list[float]:
        # The text is the interpreter's own standard library.
        found = runs.kept(configs, kept, at_once=at_once, word=sys.version, tell=runs.tell)
        return [one.last.loss for one in found]

    if figures is None:
        train(names, numbers, rates, losses, protocol)
    found = jsonable(report(names, numbers, rates, protocol))
    write_json(output, found)
    if as_json:
        print_json(found)
        return
    screen = console(width=120)
    screen.print(table(found))
    for agreement in (found["agreement"], found["agreement_of_all"]):
        if agreement is not None:
            screen.print(sentence(agreement), highlight=False)
    screen.print(sentence_of_pairs(found), highlight=False)


if __name__ == "__main__":
    run_command(main)
