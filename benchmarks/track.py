"""The public optimization track's setting on the byte-level GPT: steps to a held-out loss.

    python -m benchmarks.track                        # report, one seed
    python -m benchmarks.track --tune --seeds 0,1,2   # tune all alike first
    python -m benchmarks.track --target 2.1           # a loss of your own
    python -m benchmarks.track --figures runs/methods.json   # rank a report of methods.py
    python -m benchmarks.track --figures experiments/tuned/learning-rates/byte-gpt.json
    python -m benchmarks.track --tune --warmup 0.1 --batch-size 32   # a protocol of your own

Model, data, batch and architecture are fixed, and the method is free, with one forward and backward
pass a step. Fewest steps to the held-out loss is first. The public track (modded-nanogpt,
"optimization") has a GPT-2 on FineWeb, and its loss is 3.28; here the target is Muon's final loss
after `--steps`. Each method is trained for lengths of a grid, each time with learning rates that
fall along a line of that length, and two neighbours with the target between them are searched for
by bisection. The public ranking of the same methods is printed beside.

`--figures` ranks without training: the steps of a report of `methods.py`, or, of its trials of
tuning, which all have one length, the losses after it. The two orders are correlated (`Agreement`).
Two public entries keep the norm of the weights besides (hyperball), which the runs here do not.

Runs are kept in `--runs`: an interrupted benchmark goes on where it was.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from rich.table import Table

from experiments import display, runs
from experiments.config import RunConfig
from experiments.display import console, print_json, run_command
from experiments.records import jsonable, write_json
from experiments.runs import steps_to
from experiments.tuning import FOLDER, TUNING_SEED, TriedRates

MUON = "muon"
TUNED = FOLDER / "learning-rates" / "byte-gpt-track.json"
AUXILIARY_LR = 0.008
PARTS = (0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0)
"""Lengths that are tried, of Muon's."""


@dataclass(frozen=True)
class Entry:
    """A method, and its place on the public track.

    Attributes:
        optimizer: See `RunConfig`.
        public: Its name on the track.
        public_steps: Its number of steps there (autumn 2026).
        lrs: The learning rates of tuning.
        options: Arguments of the optimizer.
        modules: See `RunConfig`.
    """

    optimizer: str
    public: str
    public_steps: int
    lrs: tuple[float, float, float]
    options: Mapping[str, Any] = field(default_factory=dict)
    modules: str | None = None


@dataclass(frozen=True)
class Protocol:
    """Part of a run in which the learning rate grows, and examples of a step; the usual if None."""

    warmup: float = 0.0
    batch_size: int | None = None

    def setting(self, steps: int) -> str:
        """Return the name of the setting, under which tried learning rates are kept."""
        words = [f"{steps} steps"]
        if self.warmup:
            words.append(f"warm-up {self.warmup:g}")
        if self.batch_size:
            words.append(f"batches of {self.batch_size}")
        return ", ".join(words)


_ORTHOGONAL = (0.02, 0.03, 0.04)
_OF_ADAM = (0.002, 0.004, 0.008)
_BASES: Mapping[str, Any] = {"statistics_every": 1, "solve_every": 10}
WITHIN = r"^layers\."
"""The modules within the model, for methods that would take embeddings and the head, too."""
ENTRIES: Mapping[str, Entry] = {
    "soap-muon": Entry(
        "soframe:soap-muon",
        "SOAP-Muon, basis every step",
        2750,
        _ORTHOGONAL,
        {"statistics_every": 1, "solve_every": 5},
    ),
    "normuon": Entry("soframe:normuon", "NorMuon", 3250, _ORTHOGONAL),
    MUON: Entry("soframe:muon", "Muon, tuned", 3250, _ORTHOGONAL),
    "newton-muon": Entry(
        "soframe:newton-muon",
        "Newton-Muon, inverse every 64 steps",
        3275,
        _ORTHOGONAL,
        {"statistics_every": 1, "solve_every": 10},
    ),
    "adamw": Entry("adamw", "AdamW", 5625, (0.002, 0.004, 0.008)),
    "soap": Entry("soframe:soap", "SOAP, hyperball", 3125, _OF_ADAM, _BASES, WITHIN),
    "kl-soap": Entry("soframe:kl-soap", "KL-SOAP, hyperball", 3125, _OF_ADAM, _BASES, WITHIN),
    "shampoo": Entry(
        "soframe:momentum+shampoo",
        "Shampoo, power -1/4, basis every 5 steps",
        4100,
        (0.001, 0.002, 0.004),
        {"statistics_every": 1, "solve_every": 5},
        WITHIN,
    ),
}


USUAL = Protocol()
_NAMES = {"adamw, all parameters": "adamw", "shampoo, at Adam's length": "shampoo"}
"""Entries with another name in `methods.py`."""


def configuration(
    name: str, lr: float, steps: int, seed: int, protocol: Protocol = USUAL
) -> RunConfig:
    """Return a run, which is evaluated at its end.

    Args:
        name: Of the entry.
        lr: Its learning rate at the first step.
        steps: How many.
        seed: Of weights and order.
        protocol: Of the run.
    """
    entry = ENTRIES[name]
    options = dict(entry.options)
    if entry.optimizer.startswith("soframe:"):
        options["auxiliary_lr"] = AUXILIARY_LR
    return RunConfig(
        "byte-gpt",
        entry.optimizer,
        lr=lr,
        betas=(0.9, 0.95),
        options=options,
        modules=entry.modules,
        schedule="linear",
        warmup=protocol.warmup,
        batch_size=protocol.batch_size,
        steps=steps,
        stop_at_target=False,
        evaluate_every=steps,
        seed=seed,
    )


def bracket(reaches: Callable[[int], bool], count: int, first: int) -> None:
    """Bisect an ascending grid for the least index that reaches, with its neighbour.

    Args:
        reaches: Whether the length of an index reaches.
        count: The number of lengths.
        first: The index to try first.
    """
    low, high = -1, count  # `low` does not reach, as far as is tested; `high` does
    index = first
    while True:
        if reaches(index):
            high = index
        else:
            low = index
        if high - low <= 1:
            return
        # The last index decides whether any reaches.
        index = count - 1 if high == count else (low + high) // 2


def tune(
    names: Sequence[str],
    steps: int,
    rates: TriedRates,
    losses: Losses,
    protocol: Protocol = USUAL,
) -> None:
    """Try every learning rate of every method once, and keep the losses."""
    pairs = [(name, lr) for name in names for lr in ENTRIES[name].lrs]
    each = losses([configuration(name, lr, steps, TUNING_SEED, protocol) for name, lr in pairs])
    scores = [(name, lr, loss) for (name, lr), loss in zip(pairs, each, strict=True)]
    rates.keep(protocol.setting(steps), scores)


Losses = Callable[[Sequence[RunConfig]], list[float]]
"""Trains runs, and returns the last held-out loss of each."""


def report(
    names: Sequence[str],
    *,
    lrs: Mapping[str, float],
    steps: int,
    seeds: Sequence[int],
    target: float | None,
    losses: Losses,
    protocol: Protocol = USUAL,
) -> dict[str, Any]:
    """Train until every method's steps to the target are known.

    Args:
        names: Methods; Muon is always one.
        lrs: Their learning rates.
        steps: Muon's, after which its mean loss is the target.
        seeds: Of the runs.
        target: Another one; None for that.
        losses: Trains.
        protocol: Of the runs.

    Returns:
        The target, the losses of each method by length, and its `ranking`.
    """
    names = list(dict.fromkeys((MUON, *names)))
    lengths = [max(1, round(part * steps)) for part in PARTS]
    found: dict[str, dict[int, list[float]]] = {name: {} for name in names}

    def mean(name: str, length: int) -> float:
        if length not in found[name]:
            found[name][length] = losses(
                [configuration(name, lrs[name], length, seed, protocol) for seed in seeds]
            )
        return statistics.mean(found[name][length])

    wanted = mean(MUON, steps) if target is None else target
    reached: dict[str, float | None] = {}
    for name in names:
        if name == MUON and target is None:
            reached[name] = float(steps)
            continue

        def reaches(index: int, name: str = name) -> bool:
            return mean(name, lengths[index]) <= wanted

        bracket(reaches, len(lengths), lengths.index(steps))
        reached[name] = steps_to(wanted, {n: mean(name, n) for n in found[name]})
    return {
        "target": wanted,
        "steps": steps,
        "longest": lengths[-1],
        "seeds": list(seeds),
        "torch": torch.__version__,
        "losses": found,
        **ranking(reached, lrs),
    }


def ranking(reached: Mapping[str, float | None], lrs: Mapping[str, float]) -> dict[str, Any]:
    """Rank methods here and on the public track.

    Args:
        reached: The steps of each to the target, or another number that is better if less; None if
            it is not reached.
        lrs: Their learning rates.

    Returns:
        The agreement of the two orders, of three methods or more, and for each method its steps,
        their ratio to Muon's, and its place, here and there; methods of one number of steps share a
        place.
    """

    def places(steps: Mapping[str, float]) -> dict[str, int]:
        return {name: 1 + sum(x < own for x in steps.values()) for name, own in steps.items()}

    here = {name: float("inf") if n is None else n for name, n in reached.items()}
    there = {name: float(ENTRIES[name].public_steps) for name in reached}
    own, public = places(here), places(there)
    muon = here.get(MUON, float("inf"))
    rows = {
        name: {
            "lr": lrs[name],
            "steps": steps,
            "of_muon": None if steps is None or muon == float("inf") else steps / muon,
            "place": own[name],
            "public": ENTRIES[name].public,
            "public_steps": ENTRIES[name].public_steps,
            "public_of_muon": ENTRIES[name].public_steps / ENTRIES[MUON].public_steps,
            "public_place": public[name],
        }
        for name, steps in reached.items()
    }
    agreement = None
    if len(rows) > 2:
        agreement = asdict(Agreement.of(list(here.values()), list(there.values())))
    return {"agreement": agreement, "rows": rows}


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
    return (
        f"Of {agreement['methods']} methods the order here and the public one have "
        f"{' and '.join(parts)}; {agreement['chance']:.0%} of all orders have as large a rho."
    )


def of_trials(found: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Rank the methods that `methods.py` has tuned by their losses after its steps.

    Args:
        found: By method and learning rate the held-out loss.

    Returns:
        The agreement, and for each method its loss and its places.

    Raises:
        ValueError: If none of them is on the public track.
    """
    names = {_NAMES.get(name, name): name for name in found}
    losses = {name: min(found[names[name]].values()) for name in ENTRIES if name in names}
    if not losses:
        raise ValueError("the figures have no method of the public track")
    lrs = {
        name: float(min(found[names[name]], key=found[names[name]].__getitem__)) for name in losses
    }
    ranked = ranking(losses, lrs)
    for name, row in ranked["rows"].items():
        row.update(loss=losses[name], steps=None, of_muon=None)
    return {"target": None, "longest": None, "seeds": [TUNING_SEED], **ranked}


def of_methods(found: Mapping[str, Any]) -> dict[str, Any]:
    """Rank the methods of a report of `methods.py` that are on the public track.

    Args:
        found: The report.

    Returns:
        The result of `report` without the losses.

    Raises:
        ValueError: If Muon is not there.
    """
    names = {_NAMES.get(name, name): name for name in found["rows"]}
    known_here = {name: found["rows"][names[name]] for name in ENTRIES if name in names}
    if MUON not in known_here:
        raise ValueError("the figures have no row of muon, which the others refer to")
    longest = max(int(n) for row in known_here.values() for n in row["losses"])
    return {
        "target": found["target"],
        "steps": known_here[MUON]["steps"],
        "longest": longest,
        "seeds": found["seeds"],
        "torch": found["torch"],
        **ranking(
            {name: row["steps"] for name, row in known_here.items()},
            {name: row["lr"] for name, row in known_here.items()},
        ),
    }


def table(found: Mapping[str, Any]) -> Table:
    """Return the report as a table: the fewest steps first."""
    by_loss = found["target"] is None
    what = "after as many steps" if by_loss else f"to the held-out loss {found['target']:.3f}"
    columns = ["place", "method", "lr", "held-out\nloss" if by_loss else "steps", "of\nMuon's"]
    columns += ["public track", "place", "steps", "of\nMuon's"]
    rows = []
    for name, row in sorted(found["rows"].items(), key=lambda item: item[1]["place"]):
        own = f"> {found['longest']}" if row["steps"] is None else f"{row['steps']:.0f}"
        rows.append(
            [
                str(row["place"]),
                name,
                f"{row['lr']:g}",
                f"{row['loss']:.3f}" if by_loss else own,
                f"{row['of_muon']:.2f}" if row["of_muon"] is not None else "-",
                row["public"],
                str(row["public_place"]),
                str(row["public_steps"]),
                f"{row['public_of_muon']:.2f}",
            ]
        )
    return display.table(f"Byte-level GPT, {what}", columns, rows, left=2)


def main(
    only: Annotated[str, typer.Option(help="Methods, separated by commas.")] = "",
    tune_first: Annotated[bool, typer.Option("--tune", help="Tune them first.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Of Muon.")] = 300,
    target: Annotated[float | None, typer.Option(help="A held-out loss; Muon's if none.")] = None,
    warmup: Annotated[float, typer.Option(help="Part of a run in which rates grow.")] = 0.0,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Examples of a step.")] = None,
    seeds: Annotated[str, typer.Option(help="Of the report, separated by commas.")] = "0",
    at_once: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 1,
    kept: Annotated[Path, typer.Option("--runs", help="Where runs are kept.")] = Path(
        "runs/track/runs"
    ),
    tuned: Annotated[Path, typer.Option(help="Where learning rates are kept.")] = TUNED,
    figures: Annotated[
        Path | None, typer.Option(help="Those of methods.py, to rank without training.")
    ] = None,
    output: Annotated[Path, typer.Option(help="Of the figures.")] = Path("runs/track/track.json"),
    as_json: Annotated[bool, typer.Option("--json", help="Figures alone.")] = False,
) -> None:
    """Train to a held-out loss, and print the ranking beside the public one."""
    if figures is not None:
        content = json.loads(figures.read_text(encoding="utf-8"))
        # The trials of `methods.py` are all of runs of one length.
        found = of_methods(content) if "rows" in content else of_trials(*content.values())
    else:
        names = [name.strip() for name in only.split(",")] if only else list(ENTRIES)
        if unknown := [name for name in names if name not in ENTRIES]:
            raise typer.BadParameter(f"no method {unknown[0]!r}; there are: {', '.join(ENTRIES)}")
        names = list(dict.fromkeys((MUON, *names)))

        def losses(configs: Sequence[RunConfig]) -> list[float]:
            # The text is the interpreter's own standard library.
            found = runs.kept(configs, kept, at_once=at_once, word=sys.version, tell=runs.tell)
            return [one.last.loss for one in found]

        rates, protocol = TriedRates(tuned), Protocol(warmup, batch_size)
        if tune_first:
            tune(names, steps, rates, losses, protocol)
        found = report(
            names,
            lrs=rates.best({name: ENTRIES[name].lrs for name in names}, protocol.setting(steps)),
            steps=steps,
            seeds=[int(seed) for seed in seeds.split(",")],
            target=target,
            losses=losses,
            protocol=protocol,
        )
    found = jsonable(found)
    write_json(output, found)
    if as_json:
        print_json(found)
        return
    screen = console(width=120)
    screen.print(table(found))
    if found["agreement"] is not None:
        screen.print(sentence(found["agreement"]), highlight=False)


if __name__ == "__main__":
    run_command(main)
