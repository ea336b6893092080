"""How long `import soframe` takes in a fresh process, beside `import torch` alone."""

import subprocess
import sys

import pytest
from pytest_benchmark.fixture import BenchmarkFixture


@pytest.mark.parametrize("module", ["torch", "soframe"])
def bench_import(benchmark: BenchmarkFixture, module: str) -> None:
    command = [sys.executable, "-c", f"import {module}"]
    benchmark.pedantic(subprocess.run, (command,), {"check": True}, rounds=3, warmup_rounds=1)
