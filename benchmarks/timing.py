"""Whole training steps, timed: networks, contenders that take turns, and tables of the times."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import soframe
from benchmarks.peers import OPTIMIZERS, Interval
from experiments import models
from experiments.display import aligned
from experiments.libraries import import_kfac_pytorch
from soframe.planning.workloads import resnet

STEP_KINDS = ("precondition", "statistics", "solve")
INTERVALS = ((1, 10), (10, 100))
PHASES = ("apply", "factors", "solve")

TURNS = (("precondition", 2), ("statistics", 2), ("solve", 1))
CYCLE = tuple(kind for kind, count in TURNS for _ in range(count))
LR, DAMPING, DECAY, KL_CLIP = 0.01, 0.003, 0.95, 0.001
LANDS = 10  # steps after which a solve in the background is put to use
LIBRARIES = ("sgd", "soframe", "kfac-pytorch")
WORDS = frozenset(
    {
        *("eigen", "inverse", "own", "channels_last", "half", "compiled"),
        "a quarter of the rows",
        *("staggered", "background", "background ready"),
    }
)
"""The words in a contender's name after the library's, separated by commas."""

Times = Mapping[str, list[list[float]]]
"""For each of `STEP_KINDS`, for each round, the seconds of the steps."""


@dataclass(frozen=True)
class Network:
    """A network and one batch; nothing is learned with it.

    Attributes:
        title: Its name in tables.
        model: Makes it.
        batch: Makes inputs and targets.
        loss: From outputs and targets; None if every step has the same gradients, and no passes.
        images: Whether inputs are images, so that ``channels_last`` has a meaning.
    """

    title: str
    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] | None = F.cross_entropy
    images: bool = False


def images(batch: int, side: int, classes: int) -> tuple[Tensor, Tensor]:
    """Return random images and classes."""
    return torch.randn(batch, 3, side, side), torch.randint(classes, (batch,))


def gpt(width: int, depth: int, windows: int, context: int = 128) -> Network:
    """Return a GPT over bytes, and a batch of windows."""
    sizes = models.Sizes(models.BYTES, context, width, depth, heads=4)
    shape = (windows, context)
    return Network(
        f"GPT, d = {width}, {depth} layers, {windows} x {context} tokens",
        lambda: models.GPT(sizes),
        lambda: (torch.randint(models.BYTES, shape), torch.randint(models.BYTES, shape)),
    )


def mlp(width: int, depth: int = 30) -> Network:
    """Return an autoencoder of narrow layers, and 64 rows."""
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.Tanh())]

    def rows() -> tuple[Tensor, Tensor]:
        return torch.randn(64, width), torch.randn(64, width)

    return Network(f"MLP, {depth} x {width}", lambda: nn.Sequential(*layers[:-1]), rows, F.mse_loss)


NARROW = models.Sizes(vocabulary=32, context=8, width=16, heads=2)
NETWORKS = {
    "resnet20": Network(
        "ResNet-20, 64 x 32 x 32", models.resnet20, lambda: images(64, 32, 10), images=True
    ),
    "resnet18": Network(
        "ResNet-18, 128 x 32 x 32", models.resnet18, lambda: images(128, 32, 10), images=True
    ),
    "resnet50": Network(
        "ResNet-50, 4 x 224 x 224", resnet, lambda: images(4, 224, 1000), images=True
    ),
    "gpt": gpt(256, 4, 16),
    "bert-large-layer": Network(
        "one layer of BERT-Large, 64 tokens",
        models.bert_large_layer,
        lambda: (torch.randn(64, 1024), torch.randn(64, 1024)),
        F.mse_loss,
    ),
    "byte-gpt": gpt(128, 4, 8),
    "vit": Network(
        "ViT of 0.2 million, 64 x 32 x 32",
        lambda: models.vit(0, torch.float32),
        lambda: (torch.randint(256, (64, 3, 32, 32), dtype=torch.uint8), torch.randint(10, (64,))),
    ),
    "mlp-128": mlp(128),
    "mlp-16": mlp(16),
    "host": Network(
        "the parameters of GPT-2, of width 16, no passes",
        lambda: models.GPT(NARROW),
        lambda: (torch.empty(0), torch.empty(0)),
        None,
    ),
}


@dataclass
class Contender:
    """A network in training, with an optimizer and perhaps a preconditioner.

    Attributes:
        name: Its name.
        model: Its copy of the network.
        step: Takes a step.
        clock: Returns seconds, once the device has nothing more to do.
        preconditioner: A library's preconditioner, or None.
        taken: Completed steps.
        times: The seconds of the steps of each kind in each round.
    """

    name: str
    model: nn.Module
    step: Callable[[], None]
    clock: Callable[[], float]
    preconditioner: Any = None
    taken: int = 0
    times: dict[str, list[list[float]]] = field(default_factory=lambda: {k: [] for k in STEP_KINDS})

    @property
    def beside(self) -> bool:
        """Whether it computes beside its steps."""
        return "background" in self.name

    def turn(self, kind: str, count: int) -> None:
        """Time the next steps, which are of one kind."""
        found = []
        for _ in range(count):
            assert kind_of(self.taken) == kind
            start = self.clock()
            self.step()
            found.append(self.clock() - start)
            self.taken += 1
        self.times[kind].append(found)

    def warm_up(self) -> None:
        """Take the first step and a cycle, and forget their times."""
        for kind, count in (("solve", 1), *TURNS):
            self.turn(kind, count)
        self.times = {kind: [] for kind in STEP_KINDS}

    def cycle(self) -> None:
        """Time a cycle of all kinds of steps."""
        for kind, count in TURNS:
            self.turn(kind, count)


def kind_of(step: int) -> str:
    """Return the kind of a step, for libraries that need it before and after the step."""
    return "solve" if step == 0 else CYCLE[(step - 1) % len(CYCLE)]


def interval(*kinds: str) -> Callable[[int], int]:
    """Return a schedule under which something is due at steps of some kinds."""
    return lambda step: 1 if kind_of(step) in kinds else step + 1


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a clock of seconds that waits for the device.

    With one thread on a CPU it counts the process's time, which other processes hardly disturb.
    """
    if device.type != "cuda":
        return time.process_time if torch.get_num_threads() == 1 else time.perf_counter

    def synchronised() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return synchronised


def words_of(name: str) -> tuple[str, list[str]]:
    """Return the library that a contender's name begins with, and the words after it.

    Raises:
        ValueError: If the library or a word is unknown.
    """
    library, *words = name.split(", ")
    if name in OPTIMIZERS:
        return name, []
    unknown = [word for word in words if word not in WORDS]
    if library not in LIBRARIES or unknown:
        raise ValueError(
            f"{name!r}: there is no {(unknown if library in LIBRARIES else [library])[0]!r}; a "
            f"contender is one of {', '.join(OPTIMIZERS)}, or of {', '.join(LIBRARIES)} and after "
            f"commas any of {', '.join(sorted(WORDS))}"
        )
    return library, words


def contender(
    name: str,
    network: Network,
    model: nn.Module,
    device: torch.device,
    own: dict[str, Any],
    every: tuple[Interval, Interval] | None = None,
    wrap: Callable[[nn.Module], nn.Module] = lambda model: model,
) -> Contender:
    """Return a contender that has taken no step yet.

    Args:
        name: ``"sgd"``, or another of `LIBRARIES`, and some of `WORDS`; or one of `OPTIMIZERS`.
        network: The network.
        model: Its weights, which are copied.
        device: The device.
        own: The settings of ``"soframe, own"``.
        every: Intervals of statistics and solves; None for `kind_of`'s.
        wrap: Wraps the model.
    """
    library, said = words_of(name)
    model = copy.deepcopy(model).to(device)
    settings = dict(own) if "own" in said else {}
    last = settings.pop("channels_last", False) or "channels_last" in said
    compiled = settings.pop("compile", False) or "compiled" in said
    torch.manual_seed(1)
    inputs, targets = (tensor.to(device) for tensor in network.batch())
    if last and network.images:
        # torch's stubs leave out a call with a memory format alone.
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        inputs = inputs.contiguous(memory_format=torch.channels_last)
    whole = wrap(model)
    fast = torch.compile(whole) if compiled else whole
    every = every or (interval("statistics", "solve"), interval("solve"))
    if name in OPTIMIZERS:
        preconditioner, optimizers = None, OPTIMIZERS[name](whole, every[1])
    else:
        sgd = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
        preconditioner, optimizers = (
            _preconditioner(library, said, whole, sgd, settings, every),
            [sgd],
        )
    given: list[Tensor] = []
    for parameter in model.parameters() if network.loss is None else ():
        given.append(torch.randn_like(parameter))
        parameter.grad = torch.empty_like(parameter)

    def step() -> None:
        if network.loss is not None:
            model.zero_grad()
            eager = getattr(preconditioner, "takes_statistics", False)
            with torch.autocast(device.type, torch.bfloat16, enabled="half" in said):
                loss = network.loss((whole if eager else fast)(inputs), targets)
            loss.backward()
        else:  # steps may write updates where gradients are
            torch._foreach_copy_([p.grad for p in model.parameters() if p.grad is not None], given)
        if preconditioner is not None:
            preconditioner.step()
        for optimizer in optimizers:
            optimizer.step()

    return Contender(name, model, step, clock_of(device), preconditioner)


def _preconditioner(
    library: str,
    said: list[str],
    model: nn.Module,
    sgd: torch.optim.Optimizer,
    settings: dict[str, Any],
    every: tuple[Interval, Interval],
) -> Any:
    if library == "sgd":
        return None
    statistics_every, solve_every = every
    common: dict[str, Any] = {"damping": DAMPING, "kl_clip": KL_CLIP}
    if "staggered" in said:
        common["stagger"] = True
    if "background" in said or "background ready" in said:
        common["background"] = LANDS if "background" in said else "ready"
    if "a quarter of the rows" in said:
        common["rows"] = 0.25
    solver = "eigen" if "eigen" in said else "inverse"
    if library == "soframe":
        return soframe.Preconditioner(
            model,
            optimizer=sgd,
            decay=DECAY,
            statistics_every=statistics_every,
            solve_every=solve_every,
            **{"solver": solver, **common, **settings},
        )
    return import_kfac_pytorch().KFACPreconditioner(
        model,
        lr=LR,
        factor_decay=DECAY,
        factor_update_steps=statistics_every,
        inv_update_steps=solve_every,
        compute_method=solver,
        skip_layers=["NonDynamicallyQuantizableLinear"],  # attention does not call its output layer
        **common,
    )


def race(contenders: list[Contender], seconds: float, least: int = 3) -> int:
    """Let contenders take turns until time is up, and return the number of rounds."""
    for one in contenders:
        one.warm_up()
    end, rounds = time.perf_counter() + seconds, 0
    while rounds < least or time.perf_counter() < end:
        for kind, count in TURNS:
            for one in contenders:
                one.turn(kind, count)
        rounds += 1
    return rounds


def mean_step(times: Mapping[str, float], every: int, solve_every: int) -> float:
    """Return the mean over an interval; `solve_every` is a multiple of the statistics' interval."""
    taken = solve_every // every
    total = (solve_every - taken) * times["precondition"] + (taken - 1) * times["statistics"]
    return (total + times["solve"]) / solve_every


def phases(times: Mapping[str, float], plain: float) -> dict[str, float]:
    """Return the time that each part of a preconditioner adds to a plain step."""
    steps = [plain, *(times[kind] for kind in STEP_KINDS)]
    return {phase: b - a for phase, (a, b) in zip(PHASES, pairwise(steps), strict=True)}


def rounds_of(times: Times) -> Iterator[dict[str, float]]:
    """Yield for each round the median of each kind."""
    for parts in zip(*(times[kind] for kind in STEP_KINDS), strict=True):
        yield {kind: statistics.median(part) for kind, part in zip(STEP_KINDS, parts, strict=True)}


def figures(found: Mapping[str, Times]) -> list[dict[str, Any]]:
    """Return a row of figures for each contender, for `table` and `phase_table`.

    Args:
        found: The seconds of each contender's steps; plain SGD's first. ``"soframe, ..."`` has
            ``"kfac-pytorch, ..."`` for a peer.
    """
    rounds = {name: list(rounds_of(times)) for name, times in found.items()}
    first = next(iter(rounds))
    plain = [times["precondition"] for times in rounds[first]]
    rows = []
    for name, own in rounds.items():
        row: dict[str, Any] = {"name": name}
        for kind in STEP_KINDS:
            row[kind] = 1e3 * statistics.median(times[kind] for times in own)
        for every, solve_every in INTERVALS:
            # Divide by plain steps at the same places of the round, which surround them.
            ratios = [
                mean_step(times, every, solve_every) / mean_step(base, every, solve_every)
                for times, base in zip(own, rounds[first], strict=True)
            ]
            row[f"{every}/{solve_every}"] = quartiles(ratios)
        row["worst"] = quartiles([times["solve"] / times["precondition"] for times in own])
        if not name.startswith(first) and name not in OPTIMIZERS:
            added = [phases(times, base) for times, base in zip(own, plain, strict=True)]
            row["phases"] = {key: 1e3 * statistics.median(a[key] for a in added) for key in PHASES}
            peer = rounds.get(name.replace("soframe", "kfac-pytorch"), own)
            if peer is not own:
                theirs = [phases(times, base) for times, base in zip(peer, plain, strict=True)]
                pairs = list(zip(added, theirs, strict=True))
                row["of peer"] = {
                    key: quartiles([a[key] / b[key] for a, b in pairs]) for key in PHASES
                }
        rows.append(row)
    return rows


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Return three numbers, ascending."""
    if len(values) == 1:
        return (values[0],) * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def spread(values: tuple[float, float, float], digits: int = 2) -> str:
    """Return quartiles as text."""
    low, middle, high = values
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def table(title: str, rows: list[dict[str, Any]]) -> str:
    """Return the `figures` of steps as text, with ``"memory"`` where rows have it."""
    head = ["", *(f"{kind} ms" for kind in STEP_KINDS)]
    head += [f"mean {f}/{k} : SGD" for f, k in INTERVALS] + ["solve : usual step"]
    lines = [head]
    for row in rows:
        cells = [row["name"], *(f"{row[kind]:.2f}" for kind in STEP_KINDS)]
        cells += [spread(row[key]) for key in [*(f"{f}/{k}" for f, k in INTERVALS), "worst"]]
        if "memory" in row:
            cells.append(f"{row['memory']:.0f}")
        lines.append(cells)
    if "memory" in rows[0]:
        head.append("peak MB")
    return aligned(title, lines)


def phase_table(title: str, rows: list[dict[str, Any]]) -> str:
    """Return the times of preconditioners' parts as text, also over kfac-pytorch's."""
    heads = [f"{name} ms" for name in PHASES] + [f"{name} : kfac-pytorch" for name in PHASES]
    lines = [["", *heads]]
    for row in (row for row in rows if "phases" in row):
        peer = row.get("of peer", {})
        cells = [row["name"], *(f"{row['phases'][name]:.1f}" for name in PHASES)]
        cells += [spread(peer[name]) if name in peer else "" for name in PHASES]
        lines.append(cells)
    return aligned(title, lines)
