"""How long the factors of a convolution take, by path, layout and shape."""

from __future__ import annotations

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from benchmarks.factors import FORMATS, Layer, tensors
from soframe.kernels.dispatch import PATHS
from soframe.kernels.gram import mirror, zeros
from soframe.layers import Conv2dHelper

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
    if path == "correlation" and layer.stride > 1:
        pytest.skip("shifts take strides")
    conv = layer.make()
    x, gradient = tensors(layer, conv, batch, layout)
    helper = type("Chosen", (Conv2dHelper,), {"path": path})(conv)
    rows = helper.output_rows(gradient)
    total = zeros(1, helper.shape.in_features, rows)
    benchmark.pedantic(helper.input_moment, ((x,), rows, total), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("name", LAYERS)
def bench_output_moment(benchmark: BenchmarkFixture, name: str, layout: str) -> None:
    batch, layer = LAYERS[name]
    conv = layer.make()
    helper = Conv2dHelper(conv)
    rows = helper.output_rows(tensors(layer, conv, batch, layout)[1])
    total = zeros(1, layer.out, rows)
    benchmark.pedantic(helper.output_moment, (rows, total), rounds=5, warmup_rounds=1)


@pytest.mark.parametrize("size", [144, 1152, 4608])
def bench_mirror(benchmark: BenchmarkFixture, size: int) -> None:
    benchmark.pedantic(mirror, (torch.randn(1, size, size),), rounds=5, warmup_rounds=1)
