"""Metrics over ranks: what one rank knows, what all know together, and who must call."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from soframe.strategies import Sharded
from tests.distributed.harness import run_ranks
from tests.distributed.training import Case, Run, mean_over

pytestmark = pytest.mark.distributed

STRATEGIES: dict[str, Any] = {
    "comm-opt": {"strategy": "comm-opt"},
    "mem-opt": {"strategy": "mem-opt"},
    "sharded": {"strategy": "sharded"},
    "local": {"strategy": "mem-opt", "gradients": "local"},
    "deferred": {"strategy": Sharded(deferred=True)},
}
STEPS = 4  # the last one takes statistics and does not solve


def run_of(options: dict[str, Any], rank: int = 0, ranks: int = 1) -> Run:
    case = Case({"solve_every": 3, "statistics_every": 1, **options})
    local = options.get("gradients") == "local"
    run = Run(case, rank, ranks, None, mean_over() if ranks > 1 and not local else None)
    run.preconditioner.measure(norms=True)
    run.train(range(STEPS + 1))
    return run


def collected(rank: int, ranks: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Return what a rank knows alone, and what it is told."""
    own = run_of(options, rank, ranks).preconditioner
    alone = own.metrics(spectra=True)
    return [alone, own.metrics(spectra=True, all_ranks=True)]


def numbers(found: dict[str, Any]) -> dict[str, Any]:
    """Everything that does not depend on the rank or the strategy, by its path."""
    flat: dict[str, Any] = {}

    def add(path: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, own in value.items():
                add(f"{path}/{key}", own)
        else:
            flat[path] = value

    for key in ("step", "damping", "clip_factor", "kl_clip_factor", "norms", "blocks", "counters"):
        add(key, found[key])
    return flat


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *((name, 2) for name in ("comm-opt", "mem-opt", "deferred")),
        ("sharded", 3),
        ("local", 4),
        *(pytest.param(name, 2, marks=pytest.mark.thorough) for name in ("sharded", "local")),
    ],
)
def test_ranks_together_know_what_one_process_knows(name: str, ranks: int) -> None:
    wanted = numbers(run_of({}).preconditioner.metrics(spectra=True))
    for alone, told in run_ranks(collected, ranks, STRATEGIES[name]):
        found, own = numbers(told), numbers(alone)
        assert found.keys() == wanted.keys()
        for path, value in wanted.items():
            if isinstance(value, float):
                assert found[path] == pytest.approx(value, rel=1e-6, abs=1e-12), path
            else:
                assert found[path] == value, path
            # Alone, a rank says what is right, or nothing.
            if path not in own:
                assert "spectrum" in path, path
            elif own[path] is not None and isinstance(value, float):
                assert own[path] == pytest.approx(value, rel=1e-6, abs=1e-12), path
        assert_partial(name, own)
        assert len(told["phases_of_ranks"]) == ranks
        assert told["phases_of_ranks"][told["rank"]] == told["phases"]
        json.dumps(told, allow_nan=False)


def assert_partial(name: str, own: dict[str, Any]) -> None:
    """A rank alone does not know everything."""
    spectra = [v for path, v in own.items() if path.endswith("spectrum")]
    if name == "local":
        assert own["norms/gradient_norm"] is None
    elif name in ("sharded", "deferred"):
        assert None in spectra
    if name == "deferred":  # statistics since the last solve are on all ranks
        assert all("spectrum/" not in path for path in own)


def alone(rank: int, ranks: int) -> float:
    """One rank asks for its own, while the other goes on: nobody waits."""
    run = Run(Case({"strategy": "sharded"}), rank, ranks, None, mean_over())
    run.step(0)
    if rank == 0:
        found = run.preconditioner.metrics(spectra=True)
        assert found["rank"] == 0
    run.step(1)
    return float(torch.stack([p.norm() for p in run.model.parameters()]).norm())


def test_metrics_of_one_rank_are_no_collective() -> None:
    first, second = run_ranks(alone, 2, timeout=30)
    assert math.isfinite(first)
    assert first == pytest.approx(second)
