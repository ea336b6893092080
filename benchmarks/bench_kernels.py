"""How long kernels take: factors by path, layout and shape, products by way and threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.factors import FORMATS, Layer, tensors
from soframe.kernels.dispatch import PATHS
from soframe.kernels.gram import add_rows, mirror, new_sum
from soframe.layers import Conv2dHelper
from soframe.solvers import Inverse, inverse

LAYERS = {
    "stem": (8, Layer(1, 3, 64, 7, 2, 224)),
    "few channels": (64, Layer(1, 16, 16, 3, 1, 32)),
    "middle": (8, Layer(1, 128, 128, 3, 1, 28)),
    "strided": (8, Layer(1, 256, 256, 3, 2, 28)),
    "small maps": (8, Layer(1, 512, 512, 3, 1, 7)),
    "pointwise": (8, Layer(1, 256, 64, 1, 1, 56)),
}


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", LAYERS)
def bench_input_moment(benchmark: BenchmarkFixture, name: str, path: str, layout: str) -> None:
    batch, layer = LAYERS[name]
    if path == "pointwise" and layer.kernel > 1:
        pytest.skip("a kernel of several positions")
    conv = layer.make()
    x, gradient = tensors(layer, conv, batch, layout)
    helper = type("Chosen", (Conv2dHelper,), {"path": path})(conv)
    rows = helper.output_rows(gradient)
    total = new_sum(1, helper.shape.in_features, rows, zero=True)
    benchmark.pedantic(helper.input_moment, ((x,), rows, total), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("name", LAYERS)
def bench_output_moment(benchmark: BenchmarkFixture, name: str, layout: str) -> None:
    batch, layer = LAYERS[name]
    conv = layer.make()
    helper = Conv2dHelper(conv)
    rows = helper.output_rows(tensors(layer, conv, batch, layout)[1])
    total = new_sum(1, layer.out, rows, zero=True)
    benchmark.pedantic(helper.output_moment, (rows, total), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("size", [144, 1152, 4608])
def bench_mirror(benchmark: BenchmarkFixture, size: int) -> None:
    benchmark.pedantic(mirror, (torch.randn(1, size, size),), rounds=5, warmup_rounds=1)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", [256, 512, 768, 1024, 2048])
def bench_rows(benchmark: BenchmarkFixture, size: int, threads: int) -> None:
    """2048 rows."""
    rows, total = torch.randn(2048, size), torch.zeros(size, size)
    benchmark.pedantic(add_rows, (total, rows), rounds=15, warmup_rounds=2)


@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
@pytest.mark.parametrize("blocks", [(6, 16, 144), (5, 64, 576), (24, 256, 256)], ids=str)
def bench_apply(
    benchmark: BenchmarkFixture, blocks: tuple[int, int, int], together: bool, threads: int
) -> None:
    """Blocks of one shape: what batching gains, see `soframe.strategies.work.SMALL`."""
    number, out, into = blocks
    solver = Inverse()
    groups = number if together else 1
    data = [
        (
            torch.randn(groups, out, into),
            {"inverse": torch.randn(groups, out, out)},
            {"inverse": torch.randn(groups, into, into)},
        )
        for _ in range(number // groups)
    ]

    def apply() -> None:
        for gradient, left, right in data:
            solver.apply(gradient, left=left, right=right, damping=0.0)

    benchmark.pedantic(apply, rounds=15, warmup_rounds=2)


@pytest.mark.parametrize("framed", [False, True], ids=["as it is", "enlarged"])
@pytest.mark.parametrize("size", [512, 1024, 1025, 2048])
def bench_frame(
    benchmark: BenchmarkFixture,
    size: int,
    framed: bool,
    threads: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The figures of `soframe.solvers.inverse.frame`."""
    monkeypatch.setattr(inverse, "FRAMED", 1 if framed else 2**30)
    matrix, damping = torch.eye(size).unsqueeze(0), torch.ones(1)
    benchmark.pedantic(Inverse().solve, (matrix, damping), rounds=7, warmup_rounds=1)
