"""A published breakdown of K-FAC's step, predicted from a profile of its hardware.

    python -m benchmarks.published

Shi, Zhang and Li (SPD-KFAC, ICDCS 2021) train ResNet-50 on 64 RTX 2080 Ti, 32 images each, with
statistics and inverses at every step, each inverse on one rank. Two breakdowns of this are in the
authors' code (`scripts/time_breakdown.py`): of December 2020 (github.com/lzhangbv/kfac_pytorch),
when it sent squares and gave a factor to the rank with least, and of July 2021
(github.com/shyhuai/kfac_pytorch), when it sent triangles and ranks took factors in turn.

The profile `rtx2080ti-ib100` has rates and latencies from other measurements of theirs, and of
others where they have none; nothing is fitted to the breakdowns. Published phases are differences
between runs with and without a phase, so that they lack what is hidden behind another one; here
nothing is. The published model of the inverse is for large sides: it has 3.6 ms for the smallest,
and 0.65 s for all 108 factors, which take 0.29 s on one GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from soframe.planning.costs import Costs
from soframe.planning.hardware import Hardware
from soframe.planning.task import Task
from soframe.planning.workloads import WORKLOADS

RANKS = range(64)
BUFFER = 2**26  # bytes: Horovod's fusion buffer
NUMBER = 4  # bytes of float32
# Elements read and written for each of patches, output gradients and factors: by the authors' code,
# patches are copied and divided twice, gradients copied and multiplied three times, and running
# averages scaled, added to and scaled.
PATCHES, GRADIENTS, AVERAGES = 6, 8, 7

PHASES = ("passes", "gradients", "factors", "factors, sent", "inverses", "inverses, sent")
PUBLISHED = {
    "December 2020": (0.132, 0.067, 0.205, 0.300, 0.032, 0.146),
    "July 2021": (0.132, 0.0648, 0.2115, 0.1700, 0.0512, 0.1340),
}


@dataclass(frozen=True)
class Layer:
    """The sides of a layer's factors, and the rows of its statistics on one rank."""

    into: int
    out: int
    rows: int


def layers(task: Task) -> list[Layer]:
    """Return the layers of a task in the order of their calls."""
    found = []
    for call in task.calls:
        weight, bias = call.helper.module.weight, call.helper.module.bias
        into = weight[0].numel() + (bias is not None)
        found.append(Layer(into, len(weight), call.output.numel() // len(weight)))
    return found


def buffers(sizes: Sequence[int], most: int = BUFFER) -> list[int]:
    """Return the bytes of buffers that are filled with tensors in their order."""
    filled = [0]
    for size in sizes:
        if filled[-1] and filled[-1] + size > most:
            filled.append(0)
        filled[-1] += size
    return filled


def square(side: int) -> int:
    return side * side


def triangle(side: int) -> int:
    return side * (side + 1) // 2


def least(sides: Sequence[int]) -> list[int]:
    """Return the rank of each factor: that with the least sides so far."""
    loads, ranks = [0] * len(RANKS), []
    for side in sides:
        ranks.append(loads.index(min(loads)))
        loads[ranks[-1]] += side
    return ranks


def turns(sides: Sequence[int]) -> list[int]:
    """Return the rank of each factor: one after another."""
    return [index % len(RANKS) for index in range(len(sides))]


def predict(
    hardware: Hardware, sent: Callable[[int], int], place: Callable[[Sequence[int]], list[int]]
) -> tuple[float, ...]:
    """Return the seconds of each phase."""
    workload = WORKLOADS["resnet50"]
    task = Task.of(workload.model(), workload.inputs(workload.batch))
    own = layers(task)
    sides = [side for layer in own for side in (layer.into, layer.out)]

    def product(flops: float) -> float:
        return hardware.product(flops, 1, "float32")

    def reduced(numbers: Sequence[int]) -> float:
        sizes = buffers([NUMBER * number for number in numbers])
        return sum(hardware.collective("all_reduce", size, RANKS) for size in sizes)

    def inverse(side: int) -> float:
        parts = ("cholesky", "inverse")
        return sum(hardware.factorisation(part, side, 1, "float32") for part in parts)

    moved = sum(layer.rows * (PATCHES * layer.into + GRADIENTS * layer.out) for layer in own)
    moved += AVERAGES * sum(map(square, sides))
    seconds = [0.0] * len(RANKS)
    for rank, side in zip(place(sides), sides, strict=True):
        seconds[rank] += inverse(side)
    return (
        Costs(task, hardware).passes.seconds,
        reduced([parameter.numel() for parameter in reversed(task.parameters)]),
        sum(product(2 * layer.rows * side**2) for layer in own for side in (layer.into, layer.out))
        + NUMBER * moved / hardware.bandwidth,
        reduced(list(map(sent, sides))),
        max(seconds),
        sum(hardware.collective("broadcast", NUMBER * sent(side), RANKS) for side in sides),
    )


def main() -> None:
    hardware = Hardware.load("rtx2080ti-ib100")
    ways: dict[str, tuple[Callable[[int], int], Callable[[Sequence[int]], list[int]]]] = {
        "December 2020": (square, least),
        "July 2021": (triangle, turns),
    }
    for name, way in ways.items():
        print(f"\nResNet-50 on 64 RTX 2080 Ti, {name}: seconds of a step\n")
        print(f"{'':16}{'published':>10}{'predicted':>10}{'off by':>9}")
        predicted, published = predict(hardware, *way), PUBLISHED[name]
        rows = [*zip(PHASES, published, predicted, strict=True)]
        for phase, theirs, own in [*rows, ("all", sum(published), sum(predicted))]:
            off = own / theirs - 1
            print(f"{phase:16}{theirs:10.4f}{own:10.4f}{off:+9.1%}{' *' if abs(off) > 0.1 else ''}")
    print("\n* not within 10 %")


if __name__ == "__main__":
    main()
