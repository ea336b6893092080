"""Hardware as data: the seconds of operators and collectives, measured or published.

A profile is a JSON file. It has curves of measured points, or an alpha and a beta where a source
gives these, so that a placement for 4,096 ranks is priced on a laptop. All times are seconds, all
sizes bytes or matrix sides, all work multiply-adds times two.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from soframe.state import disk

PROFILES = Path(__file__).with_name("profiles")

Points = tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Curve:
    """Seconds as a function of a size: measured points, or ``alpha + beta size``.

    Between points it is a power law, and below the first one constant. Above the last one it is the
    power law of the last two, or where the power is known, an overhead and that power of the size.

    Attributes:
        points: Pairs of a size and its seconds, by size; empty for a line.
        alpha: The seconds of a line at size 0.
        beta: The seconds of a line per unit of size.
    """

    points: Points = ()
    alpha: float = 0.0
    beta: float = 0.0

    def __call__(self, size: float, power: float = math.inf) -> float:
        """Return the seconds of a size; above the last point they grow by its ``power``."""
        if size <= 0:
            return self.alpha
        points = self.points
        if not points:
            return self.alpha + self.beta * size
        if len(points) == 1 or size <= points[0][0]:
            first, seconds = points[0]
            return seconds * max(1.0, size / first)
        after = min(bisect.bisect_left(points, (size, 0.0)), len(points) - 1)
        (low, start), (high, end) = points[after - 1], points[after]
        slope = math.log(end / start) / math.log(high / low)
        if size <= high or power == math.inf:
            return start * math.exp(slope * math.log(size / low))
        # The last two points may be noisy: time does not fall, nor grow by more than its power.
        rise = (end - start) / (1 - math.pow(low / high, power))
        return end + min(max(0.0, rise), end) * (math.pow(size / high, power) - 1)


@dataclass(frozen=True)
class Collective:
    """The seconds of one collective among some ranks, by its bytes.

    Attributes:
        operation: ``"all_reduce"``, ``"reduce"``, ``"broadcast"``, ``"reduce_scatter"``,
            ``"all_gather_shares"`` or ``"all_to_all"``, as in `soframe.Backend`.
        ranks: The ranks of the group.
        seconds: Against the bytes of the tensor that a rank gives or gets.
    """

    operation: str
    ranks: int
    seconds: Curve


@dataclass(frozen=True)
class Link:
    """A tier of the network, for groups without a measured collective.

    Attributes:
        latency: Seconds of a message.
        bandwidth: Bytes per second of a rank, in each direction.
    """

    latency: float
    bandwidth: float


@dataclass(frozen=True)
class Hardware:
    """One kind of device and network.

    Attributes:
        name: Its name.
        device: ``"cpu"`` or ``"cuda"``: the paths that soframe's kernels take.
        source: Who measured or published the numbers.
        launch: Seconds that an operator takes at least.
        bandwidth: Bytes per second of the device's memory.
        operators: Seconds by ``"<operator>:<dtype>"``: of products and convolutions by FLOPs, of
            factorisations (``"cholesky"``, ``"eigh"``, ``"qr"``, ``"inverse"``, ``"triangular"``)
            by the matrix side.
        batched: Seconds of a batch of factorisations by ``"<operator>:<dtype>"``, as rows of side,
            batch and seconds; others take their number times one.
        collectives: Collectives by operation and size of the group.
        node: The number of ranks that share a node; None for all.
        within: The link within a node.
        across: The link between nodes; None if all ranks share one.
        memory: Bytes of a device; None if unknown.
        slots: The ranks of a node that can compute at the same time, where ranks share processors,
            with solves in the background and collectives; None if each has a device of its own.
        hooks: Seconds of the host for an operator of statistics of calls; a GPU works meanwhile.
        calls: The same for all operators of a call, by the name of the layer's helper; helpers
            without an entry have ``hooks`` for each operator.
        host: The same for a block in the rest of the step; 0 if it is hidden behind the passes.
    """

    name: str
    device: str
    source: str
    launch: float
    bandwidth: float
    operators: Mapping[str, Curve]
    batched: Mapping[str, tuple[tuple[int, int, float], ...]] = field(default_factory=dict)
    collectives: tuple[Collective, ...] = ()
    node: int | None = None
    within: Link = Link(1e-5, 1e10)
    across: Link | None = None
    memory: int | None = None
    slots: float | None = None
    hooks: float = 0.0
    calls: Mapping[str, float] = field(default_factory=dict)
    host: float = 0.0

    def hooked(self, helper: type, operators: int) -> float:
        """Return the seconds of the host for the statistics of a call, of so many operators."""
        for kind in helper.__mro__:
            if kind.__name__ in self.calls:
                return self.calls[kind.__name__]
        return self.hooks * operators

    def crowd(self, ranks: int) -> float:
        """Return the ranks for each slot of a node, of so many ranks; 0 if all have their own."""
        return 0.0 if self.slots is None else min(ranks, self.node or ranks) / self.slots

    def product(self, flops: float, batch: int, dtype: str, operator: str = "product") -> float:
        """Return the seconds of a batch of products or convolutions, of so many FLOPs each."""
        # A batch takes as long as one product of its work, on processors within a third or so;
        # many times a small one, each with a launch, would be ten times too long.
        return self._curve(operator, dtype)(batch * flops, 1)

    def factorisation(self, operator: str, side: int, batch: int, dtype: str) -> float:
        """Return the seconds of a batch of factorisations of one side."""
        key = f"{operator}:{dtype}"
        if key not in self.operators and key not in self.batched:
            key = f"{operator}:float32"
        if key not in self.batched:
            return batch * self._curve(operator, dtype)(side, 3)
        points: dict[int, list[tuple[float, float]]] = {}  # sides and seconds, by batch
        for length, size, seconds in sorted(self.batched[key]):
            points.setdefault(size, []).append((float(length), seconds))
        times: list[tuple[float, float]] = []  # batches, and the seconds of this side
        for size in sorted(points):
            times.append((float(size), Curve(tuple(points[size]))(side, 3)))
        along, largest = Curve(tuple(times)), max(points)
        if batch <= largest:
            return along(batch)
        return along(largest) * batch / largest

    def _curve(self, operator: str, dtype: str) -> Curve:
        # A device without a rate of its own for a dtype has float32's.
        for key in (f"{operator}:{dtype}", f"{operator}:float32"):
            if key in self.operators:
                return self.operators[key]
        if operator == "convolution":
            return self._curve("product", dtype)
        raise ValueError(
            f"the hardware profile {self.name!r} has no curve of {operator!r}, which this plan "
            f"needs: add it, or measure one by `soframe plan --measure`"
        )

    def collective(self, operation: str, size: float, group: Sequence[int]) -> float:
        """Return the seconds of a `Collective` by its bytes, among some ranks."""
        ranks = len(group)
        if ranks < 2:
            return 0.0
        measured = self._measured.get(operation, {})
        if ranks in measured:
            return measured[ranks](size, 1)
        by_links = self._by_links(operation, size, ranks, group)
        if not measured:
            return by_links
        # The nearest group, by the ratio that the links' formula gives.
        near = min(measured, key=lambda other: abs(math.log(other / ranks)))
        ratio = by_links / self._by_links(operation, size, near, group)
        return measured[near](size, 1) * ratio

    @cached_property
    def _measured(self) -> dict[str, dict[int, Curve]]:
        curves: dict[str, dict[int, Curve]] = {}
        for collective in self.collectives:
            curves.setdefault(collective.operation, {})[collective.ranks] = collective.seconds
        return curves

    def _by_links(self, operation: str, size: float, ranks: int, group: Sequence[int]) -> float:
        """Price a collective by a ring for its bytes and a tree for its latency."""
        node = self.node or max(group) + 1
        link = self.within
        if self.across is not None and min(group) // node != max(group) // node:
            link = self.across
        rounds, volume = math.ceil(math.log2(ranks)), (ranks - 1) / ranks
        if operation == "all_reduce":
            rounds, volume = 2 * rounds, 2 * volume
        elif operation in ("reduce", "broadcast"):
            volume = 1.0
        return rounds * link.latency + volume * size / link.bandwidth

    def save(self, path: Path) -> None:
        """Write the profile as JSON."""
        plain = dataclasses.asdict(self)
        for collective in plain["collectives"]:
            collective.update(collective.pop("seconds"))
        text = json.dumps(plain, indent=1) + "\n"
        disk.replace(path, lambda file: file.write(text.encode()))

    @classmethod
    def load(cls, name: str | Path) -> Hardware:
        """Return a profile by the name of one that soframe has, or by the path of a file.

        Raises:
            ValueError: If there is no such profile, or the file holds no profile.
        """
        path = PROFILES / f"{name}.json" if f"{name}" in names() else Path(name)
        if not path.is_file():
            raise ValueError(
                f"there is no hardware profile {str(name)!r}: choose one of {', '.join(names())}, "
                f"or the path of a file that `soframe plan --measure` wrote"
            )
        try:
            return cls._from(json.loads(path.read_text()))
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is not a hardware profile: {error}") from error

    @classmethod
    def _from(cls, plain: dict[str, Any]) -> Hardware:
        plain["operators"] = {name: _curve(curve) for name, curve in plain["operators"].items()}
        for name, rows in plain.get("batched", {}).items():
            plain["batched"][name] = tuple((int(n), int(b), float(time)) for n, b, time in rows)
        collectives: list[Collective] = []
        for row in plain.get("collectives", ()):
            collectives.append(Collective(row["operation"], row["ranks"], _curve(row)))
        plain["collectives"] = tuple(collectives)
        plain["within"] = Link(**plain["within"])
        if plain.get("across") is not None:
            plain["across"] = Link(**plain["across"])
        return cls(**plain)


def names() -> list[str]:
    """Return the names of the profiles that soframe has."""
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def _curve(plain: Mapping[str, Any]) -> Curve:
    points = tuple((float(x), float(y)) for x, y in plain.get("points", ()))
    return Curve(points, plain.get("alpha", 0.0), plain.get("beta", 0.0))
