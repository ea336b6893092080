"""The gallery's methods against their formulas, on ranks, and under fully_shard."""

from __future__ import annotations

import ast
import importlib
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import nn

from experiments.config import RunConfig
from soframe.citations import cite, fields
from soframe.methods import Method
from soframe.registry import KINDS
from soframe.strategies import Strategy
from soframe.testing import check_method, compare
from soframe.testing.methods import ALL_CONTRIBUTE
from tests.compatibility.fully_sharded import Case, make_net, weights
from tests.compatibility.kit import assert_same
from tests.compatibility.test_fully_shard import alone, train_all
from tests.curvature import closing, randn
from tests.distributed.harness import run_ranks
from tests.experiments.gallery.references import CALLS, GRADIENTS
from tests.experiments.helpers import record
from tests.methods import stages

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "experiments" / "gallery"
FILES = sorted(path for path in FOLDER.glob("*.py") if not path.name.startswith("__"))
OF_LAYERS = sorted((*CALLS, *GRADIENTS))
NAMES = sorted((*OF_LAYERS, "lora-pro"))
SHAPES = ((4, 3), (3, 5), (4, 4))
# A factor of one gradient that is no square has a null space, whose basis is a convention.
CASES = [
    (name, shape)
    for name in GRADIENTS
    for shape in SHAPES
    if name != "splus" or shape[0] == shape[1]
]
ON_RANKS = ("ikfac", "mkor", "psgd-kron", "splus")
"""They differ in what they keep and have solved; `make test-all` runs all."""
FILE = """\
import soframe
from soframe.methods import SGD
from torch import nn
from torch.nn.functional import mse_loss

soframe.register("method", "of-mine")(type("OfMine", (SGD,), {"__module__": __name__}))


def model():
    return nn.Linear(2, 2)


def data():
    raise NotImplementedError


def loss(model, inputs, targets):
    return mse_loss(model(inputs), targets)
"""
"""A workload's file with a method of its own."""


def built(name: str) -> Method:
    method: Method = KINDS["method"].build(name, Method)
    return method


def few(names: tuple[str, ...]) -> list[Any]:
    """All methods, of which `make test` runs some."""
    return [
        pytest.param(name, marks=[] if name in names else [pytest.mark.thorough])
        for name in OF_LAYERS
    ]


@pytest.mark.parametrize(("name", "shape"), CASES, ids=str)
def test_updates_are_the_papers(name: str, shape: tuple[int, int]) -> None:
    reference, tolerance = GRADIENTS[name]
    out, into = shape
    # The last layer is the head, which some of them skip.
    model = nn.Sequential(nn.Linear(into, out, bias=False), nn.Linear(out, 2)).double()
    gradients = [randn(out, into, seed=step) for step in range(5)]
    expected = list(reference([gradient.numpy() for gradient in gradients]))
    with closing(stages.preconditioner(model, built(name), auxiliary="sgd")) as preconditioner:
        for step, gradient in enumerate(gradients):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            model[0].weight.grad = gradient.clone()
            preconditioner.step()
            update = torch.from_numpy(np.ascontiguousarray(expected[step]))
            compare(model[0].weight.grad, update, f"step {step}", rtol=tolerance)


@pytest.mark.parametrize("name", CALLS)
def test_updates_of_calls_are_the_papers(name: str) -> None:
    compare_of_calls(built(name), CALLS[name])


def test_a_root_of_blocks_is_a_part_of_a_root(gallery: ModuleType) -> None:
    compare_of_calls(gallery.IKFAC(size=2), lambda samples: CALLS["ikfac"](samples, size=2))


def compare_of_calls(method: Method, reference: Callable[[Any], Iterator[Any]]) -> None:
    model = nn.Sequential(nn.Linear(3, 4)).double()
    weight, bias = (parameter.detach().numpy() for parameter in model.parameters())
    batches = [(randn(6, 3, seed=step), randn(6, 4, seed=10 + step)) for step in range(5)]
    samples = []
    for inputs, targets in batches:
        rows = np.concatenate([inputs.numpy(), np.ones((6, 1))], axis=1)
        samples.append((rows, inputs.numpy() @ weight.T + bias - targets.numpy()))
    with closing(stages.preconditioner(model, method)) as preconditioner:
        for (inputs, targets), update in zip(batches, reference(samples), strict=True):
            model.zero_grad()
            (0.5 * (model(inputs) - targets).square().sum(1).mean()).backward()
            preconditioner.step()
            joint = torch.cat([model[0].weight.grad, model[0].bias.grad[:, None]], dim=1)
            compare(joint, torch.from_numpy(update), repr(method), rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_LAYERS)
def test_one_process(name: str) -> None:
    check_method(built(name), ranks=())


@pytest.mark.distributed
@pytest.mark.parametrize("name", few(ON_RANKS))
def test_two_ranks_are_one_process(name: str) -> None:
    strategies = ("comm-opt", "mem-opt")
    check_method(
        built(name), ranks=(2,), strategies=strategies, fishers=("empirical",), launch=run_ranks
    )


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks", "strategies"),
    [
        ("splus", (2, 4), ("mem-opt", "hybrid-opt")),
        *(
            pytest.param(name, (3, 4), ALL_CONTRIBUTE, marks=pytest.mark.thorough)
            for name in OF_LAYERS
        ),
    ],
)
def test_ranks_are_one_process(
    name: str, ranks: tuple[int, ...], strategies: Sequence[Strategy | str]
) -> None:
    """Saved on four and resumed on two, and in `make test-all` under every strategy."""
    check_method(
        built(name), ranks=ranks, strategies=strategies, fishers=("empirical",), launch=run_ranks
    )


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [ON_RANKS, pytest.param(tuple(set(OF_LAYERS) - {*ON_RANKS}), marks=pytest.mark.thorough)],
    ids=["few", "others"],
)
def test_fully_shard(names: tuple[str, ...]) -> None:
    cases = [
        Case(owner="own", method=built(name), options={"strategy": strategy}, end=3)
        for name in sorted(names)
        for strategy in ("comm-opt", "mem-opt")
    ]
    results = run_ranks(train_all, 2, cases)
    start = weights(make_net())
    for index, case in enumerate(cases):
        of_ranks = [result[index] for result in results]
        assert_same(of_ranks, alone(case), start, spoilt=False, what=repr(case), unused="unused")


def test_each_method_is_one_short_file(gallery: ModuleType) -> None:
    assert sorted(gallery.METHODS) == NAMES
    modules = {method.__module__.rpartition(".")[2] for method in gallery.METHODS.values()}
    assert modules == {path.stem for path in FILES}
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 100, path.name
        docstring = ast.get_docstring(ast.parse(text)) or ""
        assert "To reproduce:" in docstring, path.name


@pytest.mark.parametrize("name", NAMES)
def test_each_method_has_its_reference(name: str, gallery: ModuleType) -> None:
    """The docstring has the title and the preprint of the entry."""
    key, entry = next(iter(cite(name).items()))
    read = fields(entry)
    assert {"author", "title", "year"} <= set(read), key
    docstring = " ".join(sys.modules[gallery.METHODS[name].__module__].__doc__.split())
    assert re.sub("[{}]", "", read["title"]) in docstring
    assert read.get("eprint", "") in docstring


def test_the_race_tries_as_many_rates_of_each_method(gallery: ModuleType) -> None:
    race = importlib.import_module("experiments.gallery.__main__")
    for name in (*gallery.METHODS, *race.BASELINES):
        configs = race.configurations(name, "problem:norms", steps=5)
        assert len({config.lr for config in configs}) == len(race.FACTORS)
        assert {config.optimizer for config in configs} == {f"soframe:{name}"}
    assert {*race.RATES, *race.OPTIONS} <= {*gallery.METHODS, *race.BASELINES}


@pytest.mark.parametrize(
    ("losses", "mark"),
    [
        ((3.0, 1.0, 2.0), "lr 2"),
        ((3.0, 2.0, 1.0), "lr 3 (end)"),
        ((3.0, math.nan, 4.0), "lr 1 (end)"),
    ],
    ids=str,
)
def test_the_lowest_finite_loss_counts(losses: tuple[float, ...], mark: str) -> None:
    race = importlib.import_module("experiments.gallery.__main__")
    records = [
        SimpleNamespace(
            config=SimpleNamespace(lr=float(index)),
            last=SimpleNamespace(loss=loss),
            diverged=not math.isfinite(loss),
        )
        for index, loss in enumerate(losses, 1)
    ]
    assert race.best(records).tuning == mark


@pytest.mark.parametrize(
    ("at", "tried", "mark"),
    [
        (4.0, (1.0, 4.0, 16.0), "lr 4"),
        (70.0, (1.0, 4.0, 16.0, 64.0, 256.0), "lr 64"),
        (0.2, (1.0, 4.0, 16.0, 0.25, 0.0625), "lr 0.25"),
        (1e6, (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0), "lr 1024 (end)"),
    ],
)
def test_rates_go_on_while_the_best_is_at_an_end(
    at: float, tried: tuple[float, ...], mark: str
) -> None:
    race = importlib.import_module("experiments.gallery.__main__")
    taken = []

    def trained(configs: Sequence[RunConfig]) -> list[SimpleNamespace]:
        taken.extend(config.lr for config in configs)
        losses = [abs(math.log(config.lr / at)) for config in configs]
        return [
            SimpleNamespace(config=config, last=SimpleNamespace(loss=loss), diverged=False)
            for config, loss in zip(configs, losses, strict=True)
        ]

    first = [RunConfig("problem:norms", "soframe:muon", lr=lr, steps=5) for lr in tried[:3]]
    assert race.tuned(first, trained).tuning == mark
    assert tuple(taken) == tried


def test_the_methods_of_a_workload_s_file_are_raced(
    gallery: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    race = importlib.import_module("experiments.gallery.__main__")
    file = tmp_path / "mine.py"
    file.write_text(FILE, encoding="utf-8")
    monkeypatch.setattr(race.train, "train", lambda alone, config: record(config=config))
    with mock.patch.dict(KINDS["method"]._components):
        race.race(str(file), steps=5, output=tmp_path)
    table = (tmp_path / "gallery.tex").read_text(encoding="utf-8")
    rows = re.findall(r"^([\w-]+) & lr ", table, re.MULTILINE)
    assert sorted(rows) == sorted({*gallery.METHODS, *race.BASELINES, "of-mine"} - {"lora-pro"})


def test_methods_are_apart_where_their_seeds_do_not_mix() -> None:
    race = importlib.import_module("experiments.gallery.__main__")
    groups = [
        SimpleNamespace(records=[SimpleNamespace(last=SimpleNamespace(loss=x)) for x in losses])
        for losses in ((1.0, 3.0), (2.0, 4.0), (3.5, 5.0))
    ]
    assert race.apart(groups).startswith("Of 3 pairs of methods 1 have")


def test_methods_are_registered_once_the_package_is_imported() -> None:
    code = (
        "import soframe; assert 'splus' not in soframe.available('method');"
        "import experiments.gallery; assert 'splus' in soframe.available('method')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_page_lists_each_method_with_its_length() -> None:
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \|[^|]*\|([^|]*)\| (\d+) \|$", page, re.MULTILINE)
    assert [name for name, _, _ in rows] == NAMES
    for name, source, lines in rows:
        path = FOLDER / f"{name.replace('-', '_')}.py"
        assert int(lines) == len(path.read_text(encoding="utf-8").splitlines()), name
        read = fields(next(iter(cite(name).values())))
        assert read["author"].partition(",")[0] in source
        assert read["year"] in source
