"""How long it takes to register a model of 2,000 linear layers, in processor time."""

import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture
from torch import nn

import soframe

KINDS: dict[str, Callable[[nn.Module], Any]] = {
    "Preconditioner": lambda model: soframe.Preconditioner(model, lr=0.1),
    "Optimizer": lambda model: soframe.Optimizer(model, lr=0.1),
    "Curvature": soframe.Curvature,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.benchmark(timer=time.process_time)
def bench_construction(benchmark: BenchmarkFixture, kind: str) -> None:
    def model() -> tuple[tuple[nn.Module], dict[str, Any]]:
        gc.collect()
        return (nn.Sequential(*[nn.Linear(4, 4) for _ in range(2000)]),), {}

    benchmark.pedantic(KINDS[kind], setup=model, rounds=5, warmup_rounds=1)
