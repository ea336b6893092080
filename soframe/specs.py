"""Shapes of factors and second-order data, without tensors."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple, get_args

from torch import Tensor

VALUE = "value"
"""Under this name a factor without a solver is part of a block's second-order data."""

State = Mapping[str, Tensor]
"""The state of a method for a block, by name: tensors ``[groups, ...]``."""

Data = Mapping[str, Tensor]
"""Second-order data of a factor: tensor name -> tensor."""

SecondOrder = Mapping[str, Data]
"""Second-order data of a block, by the names of its factors."""


class FactorKind(ABC):
    """The base class of kinds of factors with shapes and an average of their own.

    Statistics are linear: `average` gets their mean over the samples of all ranks. It runs on every
    holder, so it must be deterministic. An instance has settings alone, in its ``repr``, as of a
    frozen dataclass. Factors of such kinds are not solved, and their statistics never deferred.
    """

    @abstractmethod
    def shape(self, factor: FactorSpec) -> tuple[int, ...]:
        """Return the shape ``[groups, ...]`` of statistics, as they are summed and sent."""

    def running_shape(self, factor: FactorSpec) -> tuple[int, ...]:
        """Return the shape ``[groups, ...]`` of the running factor, as it is held and saved."""
        return self.shape(factor)

    def start(self, factor: FactorSpec) -> Tensor | None:
        """Return the running factor before its first statistics, with the weight of a whole past.

        Returns:
            A tensor of `running_shape`. None, the default, for zeros without weight: the first
            statistics have the rate 1.
        """
        del factor
        return None

    def average(self, running: Tensor, statistics: Tensor, rate: Tensor) -> Tensor:
        """Return the running factor after new statistics.

        Args:
            running: The running factors of several blocks, ``[groups, ...]``.
            statistics: Their statistics, ``[groups, ...]``.
            rate: The weights of the statistics in a running mean, ``[groups, 1, ...]`` with the
                dimensions of ``running``.

        Returns:
            A new tensor like ``running``; by default the running mean.
        """
        return running.lerp(statistics, rate)


Kind = Literal["psd", "diagonal", "vector", "elementwise"]
"""The kinds of factors that soframe averages and solves itself."""

Side = Literal["left", "right", "both"]

Reads = Literal["inputs", "outputs", "both", "gradient"]
"""The source of statistics: a call's inputs, its output gradients, both together; or the averaged
gradient, at the step."""

MeanOver = Literal["samples", "rows", "group rows"]
"""A statistic is a mean over the samples of the loss, the rows of all groups of a layer, or the
rows that reach each group (experts)."""


@dataclass(frozen=True)
class FactorSpec:
    """One statistic of a block that is averaged over time.

    Attributes:
        name: For K-FAC ``"A"`` or ``"G"``.
        side: Which side of the gradient matrix ``[groups, out, in]`` it acts on: ``"left"``
            (outputs), ``"right"`` (inputs), or ``"both"``.
        groups: The leading dimension of the factor.
        size: The number of rows of the factor; an elementwise one has as many as the gradient.
        kind: Its kind, which determines its shape: ``"psd"``, positive semi-definite matrices;
            ``"diagonal"``, their diagonals alone; ``"vector"``, a mean that may have any sign;
            ``"elementwise"``, one for each entry of the gradient's matrix; or a `FactorKind`.
        reads: The source of its statistics; by default inputs on the right side, output gradients
            on the left, and both on both.
        degree: Its degree in the gradient, by which it scales with the loss; by default 0 if it
            reads inputs, else 2.
        mean_over: The elements of its mean; by default rows if it reads output gradients, else
            samples.
        columns: The number of columns of an elementwise factor.
        needs: The factors whose second-order data its statistics are computed with: statistics wait
            for these data, and are dropped when new data replace them. Not for statistics of the
            averaged gradient that outlive the data (`soframe.methods.Method.observes_with_data`).
        decay: The decay of its running average; None for the preconditioner's.
        start: The multiple of the identity, or of ones where it is no matrix, that its running
            average starts from with the weight of a whole past; None to start with the first
            statistics. For factors of the averaged gradient.
    """

    name: str
    side: Side
    groups: int
    size: int
    _: KW_ONLY
    kind: Kind | FactorKind = "psd"
    reads: Reads = None  # type: ignore[assignment]  # by the side
    degree: int = None  # type: ignore[assignment]  # by `reads`
    mean_over: MeanOver = None  # type: ignore[assignment]  # by `reads`
    columns: int = 0
    needs: tuple[str, ...] = ()
    decay: float | None = None
    start: float | None = None

    def __post_init__(self) -> None:
        by_side = {"right": "inputs", "left": "outputs", "both": "both"}
        reads = getattr(self, "reads", None) or by_side.get(str(self.side), "both")
        by_reads = {"inputs": (0, "samples"), "outputs": (2, "rows")}
        degree, mean_over = by_reads.get(reads, (2, "samples"))
        defaults = {"reads": reads, "degree": degree, "mean_over": mean_over}
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        object.__setattr__(self, "needs", tuple(self.needs))
        self._compare_words()
        if self.degree not in (0, 1, 2):
            raise ValueError(f"factor {self.name!r}: degree must be 0, 1 or 2, not {self.degree}")
        if (self.kind == "elementwise") != (self.columns > 0):
            raise ValueError(
                f"factor {self.name!r}: columns= belongs to kind='elementwise', and to it alone"
            )
        if self.start is not None and reads != "gradient":
            raise ValueError(
                f"factor {self.name!r}: start= belongs to reads='gradient'; averages of calls "
                f"start from the identity under scaling='kaisa'"
            )

    def _compare_words(self) -> None:
        """Raise a ValueError if a field is none of its words."""
        fields = {"side": Side, "kind": Kind, "reads": Reads, "mean_over": MeanOver}
        for name, words in fields.items():
            value, known = getattr(self, name), get_args(words)
            if value not in known and not isinstance(value, FactorKind):
                raise ValueError(
                    f"factor {self.name!r}: {name} must be one of {', '.join(known)}, not {value!r}"
                )

    def up_to(self, max_size: float) -> FactorSpec:
        """Return this factor, or its diagonal alone if it is a matrix of more rows."""
        if not max_size >= 1:
            raise ValueError(f"max_size must be positive, not {max_size!r}")
        if self.kind == "psd" and self.size > max_size:
            return replace(self, kind="diagonal")
        return self

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of its statistics, of matrices ``[groups, n, n]``."""
        if isinstance(self.kind, FactorKind):
            return self.kind.shape(self)
        if self.kind == "psd":
            return (self.groups, self.size, self.size)
        if self.kind == "elementwise":
            return (self.groups, self.size, self.columns)
        return (self.groups, self.size)

    @property
    def running_shape(self) -> tuple[int, ...]:
        """The shape of the running factor."""
        if isinstance(self.kind, FactorKind):
            return self.kind.running_shape(self)
        return self.shape

    def kept_shape(self, *, packed: bool = True) -> tuple[int, ...]:
        """Return the shape of the running factor as it is kept or saved, perhaps as triangles."""
        if packed and self.kind == "psd":
            return self.packed_shape
        return self.running_shape

    @cached_property
    def starts(self) -> bool:
        """Whether its running average starts before its first statistics."""
        if isinstance(self.kind, FactorKind):
            return self.kind.start(self) is not None
        return self.start is not None

    def by_group(self) -> FactorSpec:
        """Return the factor with means over the rows that reach each group, if over rows."""
        if self.mean_over != "rows":
            return self
        return replace(self, mean_over="group rows")

    @property
    def packed_shape(self) -> tuple[int, ...]:
        """The shape of its statistics as they are sent, with matrices as triangles."""
        if self.kind == "psd":
            return (self.groups, self.size * (self.size + 1) // 2)
        return self.shape

    @property
    def packed_numel(self) -> int:
        """The number of its elements that are sent."""
        return prod(self.packed_shape)

    @cached_property
    def captured(self) -> bool:
        """Whether its statistics come from calls rather than from the averaged gradient."""
        return self.reads != "gradient"

    @property
    def reads_inputs(self) -> bool:
        """Whether its statistics need the inputs of calls."""
        return self.reads in ("inputs", "both")


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of second-order data.

    Attributes:
        shape: Its shape.
        symmetric: Whether its last two dimensions form symmetric matrices; only their lower
            triangles are sent and saved.
    """

    shape: tuple[int, ...]
    symmetric: bool = False

    @property
    def packed_numel(self) -> int:
        """The number of elements that are sent."""
        if not self.symmetric:
            return prod(self.shape)
        *leading, size, _ = self.shape
        return prod(leading) * size * (size + 1) // 2


def numel(specs: Iterable[TensorSpec], *, packed: bool = False) -> int:
    """Return the number of elements of tensors, or of those that are sent."""
    if packed:
        return sum(spec.packed_numel for spec in specs)
    return sum(prod(spec.shape) for spec in specs)


@dataclass(frozen=True)
class Cut:
    """The indices along a dimension that each rank holds, from a first to before a last one."""

    dim: int
    ranges: tuple[tuple[int, int], ...]


class Move(NamedTuple):
    """The part of a tensor that one rank holds, on its way from a rank to another."""

    owner: int  # who holds the part between steps
    sender: int
    receiver: int


@dataclass(frozen=True)
class Shards:
    """How a parameter, and its gradient with it, is cut up over ranks.

    Most often along one dimension; along others too where two plans cut it, such as ``fully_shard``
    the rows and a tensor-parallel plan the columns. If several ranks hold the same part (hybrid
    sharding), the tensor has several copies: the ranks with one number in ``copies`` together hold
    the whole tensor.
    """

    shape: tuple[int, ...]  # in which the tensor is cut: the parameter's own, or a flat one
    dim: int
    ranges: tuple[tuple[int, int], ...]  # as of a `Cut`
    copies: tuple[int, ...]  # for each rank the number of the copy that it belongs to
    dtype: str  # of the gradient, by its name
    also: tuple[Cut, ...] = ()  # along other dimensions: a rank holds the intersection

    @property
    def whole(self) -> int:
        """The elements of the whole tensor."""
        return prod(self.shape)

    def numel(self, rank: int) -> int:
        """Return how many elements a rank holds."""
        return prod(self.part_shape(rank))

    def holds_all(self, rank: int) -> bool:
        """Return whether a rank holds the whole tensor."""
        return self.numel(rank) == self.whole

    def moves(self, rank: int, workers: Sequence[int], back: Sequence[int] = ()) -> list[Move]:
        """Return the parts that a rank sends or receives on their way to workers, or back.

        There, each worker gets the parts of its copy that it lacks. ``back`` has for each rank the
        worker that sends it its part; it is empty on the way there.
        """
        moves = [Move(r, source, r) for r, source in enumerate(back) if rank in (r, source)]
        if not back:
            moves = list(self._moves_there(rank, workers))
        return [move for move in moves if move.sender != move.receiver and self.numel(move.owner)]

    def _moves_there(self, rank: int, workers: Sequence[int]) -> Iterator[Move]:
        for worker in workers:
            if self.holds_all(worker):
                continue
            owners = range(len(self.copies)) if worker == rank else (rank,)
            for owner in owners:
                if self.copies[owner] == self.copies[worker]:
                    yield Move(owner, owner, worker)

    def travels(self, workers: Sequence[int], back: Sequence[int] = ()) -> bool:
        """Return whether any rank sends anything; for the arguments see `moves`."""
        if back:
            return any(source != r and self.numel(r) for r, source in enumerate(back))
        return not all(map(self.holds_all, workers))

    def part_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the part that a rank holds."""
        sizes = list(self.shape)
        for cut in self._cuts:
            start, stop = cut.ranges[rank]
            sizes[cut.dim] = stop - start
        return tuple(sizes)

    def part(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the part of a whole tensor, of as many elements as ``shape``, of a rank."""
        part = tensor.reshape(self.shape)
        for cut in self._cuts:
            start, stop = cut.ranges[rank]
            part = part.narrow(cut.dim, start, stop - start)
        return part

    @property
    def _cuts(self) -> tuple[Cut, ...]:
        return (Cut(self.dim, self.ranges), *self.also) if self.shape else ()

    @classmethod
    def none(cls, shape: tuple[int, ...], ranks: int, dtype: str) -> Shards:
        """Return the shards of a tensor that each of several ranks holds whole."""
        size = prod(shape[:1])
        ranges = tuple(itertools.repeat((0, size), ranks))
        return cls(shape, 0, ranges, tuple(range(ranks)), dtype)
