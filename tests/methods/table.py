"""What each method takes: layers, Fishers, strategies, found out by trying.

    python -m tests.methods.table            # print the page
    python -m tests.methods.table --write    # write docs/combinations.md

Every registered method is built on every registered layer, under every Fisher and every registered
strategy, and takes two steps; what is refused is refused in the words of the error or of the
report. A new registration enters by itself; a new kind of layer needs a line in `CASES`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import soframe
from soframe.blocks.report import ReportRow
from soframe.comm import Recording
from soframe.registry import KINDS
from soframe.settings import grouped
from soframe.strategies import Sharded

PAGE = Path(__file__).resolve().parents[2] / "docs" / "combinations.md"
FISHERS = ("empirical", "monte-carlo", "type-2", "forward-only")
SAMPLES, RANKS = 4, 4
YES, PART, NO = "yes", "weight", "no"
STEPPED = "comm-opt"
"""Under this strategy steps are taken of all combinations; under the others of pairs."""

Make = Callable[[], nn.Module]


class RMS(nn.Module):
    """The RMS norm of transformers, under any of its names."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(6)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


class Transposed(nn.Module):
    """GPT-2's linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Raw(nn.Module):
    """A parameter that nobody knows a layer of."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix


class Itself(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x, x, x, need_weights=False)


def _rows(*shape: int) -> Tensor:
    return torch.randn(SAMPLES, *shape)


def _indices() -> Tensor:
    return torch.randint(5, (SAMPLES, 3))


CASES: dict[str, tuple[str, Make, Callable[[], Tensor]]] = {
    "Linear": ("Linear", lambda: nn.Linear(6, 4), lambda: _rows(3, 6)),
    "Conv1d": ("Conv", lambda: nn.Conv1d(2, 4, 3), lambda: _rows(2, 5)),
    "Conv2d": ("Conv", lambda: nn.Conv2d(2, 4, 3), lambda: _rows(2, 5, 5)),
    "Conv3d": ("Conv", lambda: nn.Conv3d(2, 4, 2), lambda: _rows(2, 3, 3, 3)),
    "ConvTranspose1d": ("Conv", lambda: nn.ConvTranspose1d(2, 4, 3), lambda: _rows(2, 5)),
    "ConvTranspose2d": ("Conv", lambda: nn.ConvTranspose2d(2, 4, 2), lambda: _rows(2, 3, 3)),
    "ConvTranspose3d": ("Conv", lambda: nn.ConvTranspose3d(2, 4, 2), lambda: _rows(2, 2, 2, 2)),
    "Conv1D": ("Conv1D", Transposed, lambda: _rows(3, 6)),
    "Embedding": ("Embedding", lambda: nn.Embedding(5, 4), _indices),
    "EmbeddingBag": ("Embedding", lambda: nn.EmbeddingBag(5, 4), _indices),
    "LayerNorm": ("norms", lambda: nn.LayerNorm(6), lambda: _rows(3, 6)),
    "RMSNorm": ("norms", lambda: nn.RMSNorm(6), lambda: _rows(3, 6)),
    "GroupNorm": ("norms", lambda: nn.GroupNorm(2, 6), lambda: _rows(6, 3)),
    "BatchNorm1d": ("norms", lambda: nn.BatchNorm1d(6), lambda: _rows(6, 3)),
    "BatchNorm2d": ("norms", lambda: nn.BatchNorm2d(6), lambda: _rows(6, 3, 3)),
    "BatchNorm3d": ("norms", lambda: nn.BatchNorm3d(6), lambda: _rows(6, 2, 2, 2)),
    "InstanceNorm1d": ("norms", lambda: nn.InstanceNorm1d(6, affine=True), lambda: _rows(6, 3)),
    "InstanceNorm2d": ("norms", lambda: nn.InstanceNorm2d(6, affine=True), lambda: _rows(6, 3, 3)),
    "InstanceNorm3d": (
        "norms",
        lambda: nn.InstanceNorm3d(6, affine=True),
        lambda: _rows(6, 2, 2, 2),
    ),
    "MultiheadAttention": ("attention", Itself, lambda: _rows(3, 6)),
    "LSTMCell": ("cells", lambda: nn.LSTMCell(6, 4), lambda: _rows(6)),
    "GRUCell": ("cells", lambda: nn.GRUCell(6, 4), lambda: _rows(6)),
    "RNNCell": ("cells", lambda: nn.RNNCell(6, 4), lambda: _rows(6)),
    "LSTM": ("LSTM", lambda: nn.LSTM(6, 4, batch_first=True), lambda: _rows(3, 6)),
    "a raw matrix": ("raw", Raw, lambda: _rows(3, 6)),
}
"""By the name of a layer's class: its column, a module, and what that is called with."""

UNREGISTERED = ("LSTM", "a raw matrix")


class Model(nn.Module):
    """A layer and a head, whose outputs are one number for each sample."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(1, 1)

    def forward(self, x: Tensor) -> Tensor:
        made = self.layer(x)
        first: Tensor = made[0] if isinstance(made, tuple) else made
        # No sum: that of normalised numbers does not depend on them.
        return self.head(first.square().flatten(1).mean(1, keepdim=True))  # type: ignore[no-any-return]


def layers() -> dict[str, tuple[str, Make, Callable[[], Tensor]]]:
    """Every registered kind of layer, by its name, and those of `UNREGISTERED`.

    Raises:
        KeyError: If there is no case of one.
    """
    found = {}
    for key, helper in {**KINDS["layer"].available(), **KINDS["layer"]._optional}.items():
        if not helper.__module__.startswith("soframe."):
            continue
        module, name = (
            key.rpartition(".")[::2] if isinstance(key, str) else (key.__module__, key.__name__)
        )
        if name in CASES:
            column, make, inputs = CASES[name]
            # A class of that name, in place of the real one.
            if isinstance(key, str) and make is Transposed:
                known = type(name, (Transposed,), {"__module__": module})
                make = known
            found[name] = (column, make, inputs)
        elif isinstance(key, str) and name.endswith("Norm"):
            known = type(name, (RMS,), {"__module__": module})
            found[name] = ("norms", known, lambda: _rows(3, 6))
        else:
            raise KeyError(f"tests/methods/table.py has no case of the layer {key!r}: write one")
    found |= {name: CASES[name] for name in UNREGISTERED}
    order = list(dict.fromkeys(column for column, _, _ in CASES.values()))
    return dict(sorted(found.items(), key=lambda item: order.index(item[1][0])))


@dataclass
class Found:
    """What was found out of a method.

    Attributes:
        layers: For each column what becomes of such layers.
        fishers: For each Fisher.
        strategies: For each strategy.
    """

    layers: dict[str, str] = field(default_factory=dict)
    fishers: dict[str, str] = field(default_factory=dict)
    strategies: dict[str, str] = field(default_factory=dict)


def settings(fisher: str = "empirical") -> dict[str, Any]:
    """Settings under which all methods make directions in two steps."""
    observed = {"loss": "squared-error"} if fisher in ("monte-carlo", "type-2") else {}
    return {
        "fisher": fisher,
        "layers": "all",
        "kl_clip": None,
        "statistics_every": 1,
        "solve_every": 2,
        **observed,
    }


def steps(own: soframe.Preconditioner, model: nn.Module, x: Tensor, fisher: str) -> None:
    """Take two steps, whose gradients must be finite.

    Raises:
        ArithmeticError: If they are not.
    """
    for _ in range(2):
        model.zero_grad()
        outputs = model(x)
        if fisher in ("monte-carlo", "type-2"):
            own.observe(outputs)
        outputs.square().sum(1).mean().backward()
        own.step()
        finite = [p.grad.isfinite().all() for p in model.parameters() if p.grad is not None]
        if not all(finite) or own.counters["skipped_updates"]:
            raise ArithmeticError("a direction is not finite")
    own.close()


def of_layer(method: str, make: Make, inputs: Callable[[], Tensor]) -> tuple[str, str]:
    """Return which parameters of a layer a method takes, and why not the others."""
    torch.manual_seed(0)
    model = Model(make())
    own = soframe.Preconditioner(model, method, auxiliary="sgd", **grouped(settings()))
    rows = [row for row in own.report() if row.parameter.startswith("layer.")]
    auxiliary = {block.name for block in own.blocks if block.auxiliary}
    steps(own, model, inputs(), "empirical")
    left = [row for row in rows if row.block is None or row.block in auxiliary]
    if not left:
        return YES, ""
    matrices = [row for row in rows if sum(n > 1 for n in row.shape) > 1]
    if matrices and not any(row in left for row in matrices):
        return PART, ""
    return NO, _reason(left[0])


def _reason(row: ReportRow) -> str:
    text = row.reason or row.note
    head, _, rest = text.partition(": ")
    return rest if head and head[0].isupper() and " " not in head else text


def of_fisher(method: str, fisher: str) -> tuple[str, str]:
    """Return whether a method is built and works under a Fisher, and else why not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    try:
        own = soframe.Preconditioner(model, method, **grouped(settings(fisher)))
    except ValueError as error:
        return NO, _plain(error)
    steps(own, model, torch.randn(SAMPLES, 3), fisher)
    return YES, ""


def of_strategy(method: str, strategy: str) -> tuple[str, str]:
    """Return whether a method is built and works under a strategy, on paper."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))
    chosen: Any = Sharded(group=2) if strategy == "sharded" else strategy
    backend = Recording(rank=0, world_size=RANKS)
    try:
        own = soframe.Preconditioner(
            model, method, strategy=chosen, **grouped({"backend": backend, **settings()})
        )
    except ValueError as error:
        return NO, _plain(error)
    steps(own, model, torch.randn(SAMPLES, 3), "empirical")
    return YES, ""


def of_all(method: str, case: tuple[Make, Callable[[], Tensor]], fisher: str, strategy: str) -> str:
    """Return why a combination is refused whose pairs are not; nothing if it is not."""
    torch.manual_seed(0)
    make, inputs = case
    model = Model(make())
    chosen: Any = Sharded(group=2) if strategy == "sharded" else strategy
    alone = strategy == STEPPED
    backend = None if alone else Recording(rank=0, world_size=RANKS)
    try:
        own = soframe.Preconditioner(
            model,
            method,
            strategy=chosen,
            auxiliary="sgd",
            **grouped({"backend": backend, **settings(fisher)}),
        )
    except ValueError as error:
        return _plain(error)
    if alone:
        steps(own, model, inputs(), fisher)
    own.close()
    return ""


def _plain(error: ValueError) -> str:
    """Return an error without the layer's name before it and the method's settings in it."""
    text = str(error).splitlines()[0]
    head, _, rest = text.partition(": ")
    text = rest if head.isdigit() else text
    if "()" in text.partition(" ")[0]:
        text = "it " + text.partition(" ")[2]
    return text


@dataclass
class Table:
    """What was found out.

    Attributes:
        methods: By name.
        reasons: What is refused, and its number.
        others: Combinations that are refused though none of their pairs is.
    """

    methods: dict[str, Found] = field(default_factory=dict)
    reasons: dict[str, int] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)

    def cell(self, kind: str, why: str) -> str:
        """Return what stands in a cell; reasons are numbered as they come."""
        if kind != NO:
            return kind
        return f"[{self.reasons.setdefault(why, len(self.reasons) + 1)}]"


def find() -> Table:
    """Try everything.

    Raises:
        ValueError: If layers of one column differ.
    """
    table = Table()
    every = layers()
    for method in sorted(soframe.available("method")):
        if not soframe.available("method")[method].__module__.startswith("soframe."):
            continue  # of another package, or of a test
        found = table.methods[method] = Found()
        for name, (column, make, inputs) in every.items():
            cell = table.cell(*of_layer(method, make, inputs))
            if found.layers.setdefault(column, cell) != cell:
                raise ValueError(
                    f"{method} takes {name} otherwise than others of the column {column!r} "
                    f"({cell} and {found.layers[column]}: {table.reasons}): give it its own"
                )
        for fisher in FISHERS:
            found.fishers[fisher] = table.cell(*of_fisher(method, fisher))
        for strategy in STRATEGIES:
            found.strategies[strategy] = table.cell(*of_strategy(method, strategy))
        first = {column: (make, inputs) for column, make, inputs in reversed(every.values())}
        for column, fisher, strategy in product(first, FISHERS, found.strategies):
            cells = (found.layers[column], found.fishers[fisher], found.strategies[strategy])
            if any(cell.startswith("[") for cell in cells):
                continue
            if why := of_all(method, first[column], fisher, strategy):
                table.others.append(f"`{method}`, {column}, {fisher}, {strategy}: {why}")
    return table


STRATEGIES = sorted({*soframe.available("strategy")} - {"auto"})

HEAD = """\
# Combinations

These tables list which [method](methods.md) takes which [layer](layers.md), under which Fisher and
strategy. Numbers in brackets are [reasons](#reasons): a refused combination raises when it is
built, or has this reason in `report()`.

`python -m tests.methods.table --write` writes this page: it builds each combination and takes two
steps.
"""


def _lines(table: Table, title: str, text: str, part: str, names: Sequence[str]) -> list[str]:
    """Return a section: one row for all methods that are alike, one column for all names."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        cells = tuple(getattr(found, part)[name] for found in table.methods.values())
        columns.setdefault(cells, []).append(name)
    rows: dict[tuple[str, ...], list[str]] = {}
    for method, cells in zip(table.methods, zip(*columns, strict=True), strict=True):
        rows.setdefault(cells, []).append(f"`{method}`")
    lines = [f"## {title}", "", text, ""]
    if list(rows) == [(YES,)]:
        return [*lines, f"Every method works under each: {', '.join(f'`{n}`' for n in names)}.", ""]
    heads = [", ".join(alike) for alike in columns.values()]
    lines += ["| methods | " + " | ".join(heads) + " |", "|" + "---|" * (len(heads) + 1)]
    lines += [f"| {', '.join(ms)} | " + " | ".join(cells) + " |" for cells, ms in rows.items()]
    return [*lines, ""]


def render(table: Table) -> str:
    """Return the page."""
    every = layers()
    members: dict[str, list[str]] = {}
    for name, (column, _, _) in every.items():
        members.setdefault(column, []).append(name)
    lines = [HEAD]
    lines += _lines(
        table,
        "Layers",
        f'The models have `layers="all"`. *{YES}* means all parameters; *{PART}* means each matrix '
        "separately, and vectors go to the auxiliary method. The columns cover all classes of [the "
        "table of layers](layers.md): *Conv* includes transposed convolutions, *Embedding* bags, "
        "and *raw* is a raw matrix.",
        "layers",
        list(members),
    )
    lines += _lines(
        table, "Fishers", "These are for a network of linear layers.", "fishers", list(FISHERS)
    )
    lines += _lines(
        table,
        "Strategies",
        f'These ran on {RANKS} ranks. `"auto"` takes one of these.',
        "strategies",
        STRATEGIES,
    )
    if table.others:
        lines += ["## All together", ""]
        lines += ["Combinations that are refused though none of their pairs is:", ""]
        lines += [*(f"- {_escaped(one)}" for one in table.others), ""]
    lines += ["## Reasons", ""]
    lines += [f"{number}. {_escaped(why)}" for why, number in table.reasons.items()]
    return "\n".join(lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("<", r"\<").replace("*", r"\*").replace("_", r"\_")


def main() -> None:
    """Print the page, or write it."""
    page = render(find())
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page, encoding="utf-8")
    else:
        sys.stdout.write(page)


if __name__ == "__main__":
    main()
