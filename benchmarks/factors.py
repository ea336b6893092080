"""The factors of all convolutions of a network: soframe's fast and plain paths and kfac-pytorch.

    python -m benchmarks.factors --kfac-path kfac-pytorch
    python -m benchmarks.factors --rounds 3 --threads 1 --networks ResNet-20 --json

Inputs and output gradients are random, of each layer's shapes; nothing is trained. In every round
each way computes each distinct layer once, one after another, so that other work on the machine
meets all of them; a round's total counts a layer as often as the network has it. Ratios are taken
round by round. Peak memory is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experiments.libraries import KFAC_PYTORCH_MISSING, import_kfac_pytorch
from soframe.kernels.gram import mirror
from soframe.layers import Conv2dHelper
from soframe.layers.base import moment

PEER = "kfac-pytorch"
FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last}


@dataclass(frozen=True)
class Layer:
    """A convolution without bias, and how many of it the network has."""

    number: int
    channels: int
    out: int
    kernel: int
    stride: int
    size: int  # of the input; maps are square

    def make(self) -> nn.Conv2d:
        padding = self.kernel // 2
        return nn.Conv2d(self.channels, self.out, self.kernel, self.stride, padding, bias=False)


def resnet20() -> list[Layer]:
    """19 convolutions; shortcuts have no parameters."""
    layers = [Layer(1, 3, 16, 3, 1, 32), Layer(6, 16, 16, 3, 1, 32)]
    for width, size in ((32, 16), (64, 8)):
        layers += [
            Layer(1, width // 2, width, 3, 2, 2 * size),
            Layer(5, width, width, 3, 1, size),
        ]
    return layers


def resnet50() -> list[Layer]:
    """53 convolutions."""
    layers = [Layer(1, 3, 64, 7, 2, 224)]
    channels, size = 64, 56
    for width, number in ((64, 3), (128, 4), (256, 6), (512, 3)):
        stride = 1 if width == 64 else 2
        layers += [
            Layer(1, channels, width, 1, 1, size),
            Layer(1, width, width, 3, stride, size),
            Layer(1, channels, 4 * width, 1, stride, size),  # the shortcut
        ]
        channels, size = 4 * width, size // stride
        layers += [
            Layer(number, width, channels, 1, 1, size),
            Layer(number - 1, channels, width, 1, 1, size),
            Layer(number - 1, width, width, 3, 1, size),
        ]
    return layers


NETWORKS: dict[str, tuple[int, list[Layer]]] = {
    "ResNet-20": (64, resnet20()),
    "ResNet-50": (8, resnet50()),
}
# The processor's clock leaves out other processes. It counts waiting threads as busy, so it is for
# one thread.
CLOCKS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.process_time}
Way = Callable[[nn.Conv2d, Tensor, Tensor], object]


def fast(conv: nn.Conv2d, x: Tensor, gradient: Tensor) -> list[Tensor]:
    helper = Conv2dHelper(conv)
    rows = helper.output_rows(gradient)
    return [mirror(helper.input_moment((x,), rows)), mirror(helper.output_moment(rows))]


def plain(conv: nn.Conv2d, x: Tensor, gradient: Tensor) -> list[Tensor]:
    helper = Conv2dHelper(conv)
    rows = helper.output_rows(gradient)
    return [moment(helper.block_rows((x,), rows)), moment(rows)]


def kfac_pytorch(conv: nn.Conv2d, x: Tensor, gradient: Tensor) -> list[Tensor]:
    from kfac.layers.modules import Conv2dModuleHelper

    helper = Conv2dModuleHelper(conv)
    return [helper.get_a_factor(x), helper.get_g_factor(gradient)]


WAYS: dict[str, Way] = {"soframe": fast, "soframe, plain": plain, PEER: kfac_pytorch}


def tensors(layer: Layer, conv: nn.Conv2d, batch: int, layout: str) -> tuple[Tensor, Tensor]:
    size = (layer.size - 1) // layer.stride + 1
    shapes = [(batch, layer.channels, *[layer.size] * 2), (batch, layer.out, size, size)]
    x, gradient = (torch.randn(s).contiguous(memory_format=FORMATS[layout]) for s in shapes)
    assert conv.weight.shape[:2] == (layer.out, layer.channels)
    return x, gradient


def measure(
    network: str, layout: str, ways: Sequence[str], rounds: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Way -> seconds of all layers, per round; the first round, of warming up, is left out."""
    batch, layers = NETWORKS[network]
    totals = {way: [0.0] * (rounds + 1) for way in ways}
    for layer in layers:
        conv = layer.make()
        x, gradient = tensors(layer, conv, batch, layout)
        for index in range(rounds + 1):
            for way in ways:
                start = clock()
                WAYS[way](conv, x, gradient)
                totals[way][index] += layer.number * (clock() - start)
    return {way: own[1:] for way, own in totals.items()}


def most_resident() -> int:
    """Bytes that were resident at most in this process so far."""
    status = Path("/proc/self/status")
    if status.exists():  # on Linux getrusage's value begins with the parent's
        (line,) = [x for x in status.read_text().splitlines() if x.startswith("VmHWM")]
        return 1024 * int(line.split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def resident(network: str, layout: str, way: str) -> dict[str, int]:
    """Bytes resident before, and at most while a way computes every layer."""
    before = most_resident()
    batch, layers = NETWORKS[network]
    for layer in layers:
        conv = layer.make()
        WAYS[way](conv, *tensors(layer, conv, batch, layout))
    return {"before": before, "peak": most_resident()}


def spread(values: Sequence[float]) -> dict[str, float]:
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "low": low, "high": high}


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for way, own in seconds.items():
        found[way] = {"seconds": spread(own)}
        if PEER in seconds:
            ratios = [a / b for a, b in zip(own, seconds[PEER], strict=True)]
            found[way]["ratio"] = spread(ratios)
    return found


def memory_of(network: str, layout: str, way: str, options: argparse.Namespace) -> dict[str, int]:
    """`resident`, in a process of its own."""
    command = [sys.executable, __file__, "--resident", network, layout, way]
    command += ["--threads", str(options.threads)]
    if options.kfac_path:
        command += ["--kfac-path", str(options.kfac_path)]
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, int] = json.loads(run.stdout)
    return found


def show(results: dict[str, Any]) -> None:
    from experiments import display  # not where memory is measured

    for title, found in results.items():
        rows = []
        for way, own in found.items():
            ratio = own.get("ratio")
            memory = own.get("memory")
            rows.append(
                [
                    way,
                    f"{1e3 * own['seconds']['median']:.0f}",
                    f"{ratio['median']:.3f}" if ratio else "",
                    f"{ratio['low']:.3f} to {ratio['high']:.3f}" if ratio else "",
                    f"{memory['peak'] / 1e6:.0f}" if memory else "",
                ]
            )
        columns = ("", "ms", f"of {PEER}", "quartiles", "peak MB")
        display.console().print(display.table(title, columns, rows))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Time and memory of convolutions' factors.")
    parser.add_argument("--kfac-path", type=Path, help="a folder with the package kfac")
    parser.add_argument("--without-kfac-pytorch", action="store_true")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--layouts", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--resident", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    ways = [way for way in WAYS if not (options.without_kfac_pytorch and way == PEER)]
    if options.rounds < 2:
        parser.error("--rounds must be at least 2: ratios have quartiles")
    try:
        if PEER in (options.resident or ways):
            import_kfac_pytorch(options.kfac_path)
    except ImportError as error:
        print(
            KFAC_PYTORCH_MISSING.format(error=error, script="benchmarks.factors"), file=sys.stderr
        )
        return 2
    if options.resident:
        print(json.dumps(resident(*options.resident)))
        return 0
    results, clock = {}, CLOCKS[options.clock]
    for network in options.networks:
        for layout in options.layouts:
            found = summary(measure(network, layout, ways, options.rounds, clock))
            for way, own in found.items():
                own["memory"] = memory_of(network, layout, way, options)
            results[f"{network}, {layout}, {options.threads} threads, {options.clock} clock"] = (
                found
            )
    print(json.dumps(results, indent=2)) if options.json else show(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
