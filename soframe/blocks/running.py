"""The running factors of a block on this rank, with what their averages have gathered.

How statistics of all ranks enter them is `soframe.statistics.running`. A rank holds those factors
that the placement gives it; what they weigh (`RunningFactors.masses`, `RunningFactors.pending`) is
the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from soframe.comm.packing import packed_diagonal, unpack_triangle
from soframe.comm.tasks import Task, finish
from soframe.kernels.devices import sent
from soframe.kernels.gram import mirror
from soframe.solvers.base import mean_of, mean_trace
from soframe.specs import FactorSpec


class RunningFactors(Mapping[str, Tensor]):
    """Running factors by name: in their shape, or packed as triangles where the placement says so.

    A look at a factor waits for the statistics that travel still, and fills its upper triangle.

    Attributes:
        arrived: The factors without what travels still, for those who must not wait for it.
        lower: Of these the ones of which the lower triangle counts, until somebody looks: most
            statistics steps are followed by another before the next solve.
        under_way: What will bring statistics that travel still into ``arrived``.
        masses: The weight that each factor's average has gathered, one number or one for each
            group: 1 without start-up bias. A factor without statistics has none.
        pending: The part of the mass that is in the ranks' accumulators still.
        accumulators: This rank's, by factor, ``[groups, n (n + 1) / 2]``; empty unless the
            placement defers the reduction of statistics to the solves.

    Args:
        factors: All factors of the block.
    """

    def __init__(self, factors: Sequence[FactorSpec]) -> None:
        self.arrived: dict[str, Tensor] = {}
        self.lower: set[str] = set()
        self.under_way: list[Task] = []
        self.masses: dict[str, tuple[float, ...]] = {}
        self.pending = 0.0
        self.accumulators: dict[str, Tensor] = {}
        self._empty = not factors
        # Factors whose statistics need second-order data come later, and do not count.
        self._first = next((f.name for f in factors if not f.needs), "")

    # -- looking ----------------------------------------------------------------------------------

    def __getitem__(self, name: str) -> Tensor:
        return self.whole()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.whole())

    def __len__(self) -> int:
        return len(self.whole())

    def whole(self) -> dict[str, Tensor]:
        """Return the factors once all statistics so far have arrived, with both triangles."""
        self.arrive()
        for name in self.lower:
            mirror(self.arrived[name])
        self.lower.clear()
        return self.arrived

    def arrive(self) -> None:
        """Wait for the statistics that are under way; every rank has sent its own already."""
        under_way, self.under_way = self.under_way, []
        for task in under_way:
            finish(task)

    @property
    def mass(self) -> float:
        """The weight of the first factor's statistics so far; 1 where there are no factors."""
        if self._empty:
            return 1.0
        masses = self.masses.get(self._first)
        if masses is None:
            return 0.0
        return masses[0] if len(masses) == 1 else max(masses)

    def matrix(self, factor: FactorSpec) -> Tensor:
        """Return a factor that this rank holds, as whole matrices.

        Args:
            factor: The factor.

        Returns:
            ``[groups, n, n]``, or the factor's own shape where it is no matrix; the running factor
            itself unless it is packed.
        """
        stored = self[factor.name]
        if factor.kind == "psd" and stored.dim() == 2:
            return unpack_triangle(stored, factor.size)
        return stored

    def mean_trace(self, factor: FactorSpec) -> Tensor:
        """Return the trace of a factor that this rank holds, over its size.

        Args:
            factor: The factor.

        Returns:
            ``[groups]``.
        """
        stored = self[factor.name]
        if factor.kind != "psd":
            return mean_of(stored.flatten(1))
        if stored.dim() == 3:
            return mean_trace(stored)
        return mean_of(packed_diagonal(stored, factor.size))

    # -- averaging --------------------------------------------------------------------------------

    def gain(
        self, factor: FactorSpec, keep: float, reached: Sequence[float] | None = None
    ) -> float | list[float]:
        """Let the mass of a factor grow by that of one statistic.

        Args:
            factor: The factor.
            keep: What its average keeps of its past.
            reached: How many rows reached each group, where each has an average of its own: those
                that none has reached keep theirs.

        Returns:
            How much of the statistic enters the average, of each group where they differ. Dividing
            by the gathered mass frees the average of its start (Adam's bias correction).
        """
        if factor.mean_over != "group rows":
            mass = keep * self.masses.get(factor.name, (0.0,))[0] + (1 - keep)
            self.masses[factor.name] = (mass,)
            return (1 - keep) / mass
        assert reached is not None
        before = self.masses.get(factor.name, (0.0,) * factor.groups)
        pairs = list(zip(before, reached, strict=True))
        after = tuple(keep * mass + (1 - keep) if rows > 0 else mass for mass, rows in pairs)
        self.masses[factor.name] = after
        return [
            (1 - keep) / mass if rows > 0 else 0.0
            for mass, rows in zip(after, reached, strict=True)
        ]

    def begin_at(self, name: str, value: Tensor | None) -> None:
        """Let a factor's average begin with a value that weighs as much as statistics do.

        Args:
            name: The factor.
            value: The value, as the placement stores it; None where this rank does not hold it.
        """
        self.masses[name] = (1.0,)
        if value is not None:
            self.put(name, value)

    def put(self, name: str, stored: Tensor, *, lower: bool = False) -> None:
        """Let a tensor be a factor.

        Args:
            name: The factor.
            stored: The tensor, as the placement stores it; it changes from now on.
            lower: Whether its lower triangle alone counts.
        """
        self.arrived[name] = stored
        (self.lower.add if lower else self.lower.discard)(name)

    def average(
        self, name: str, new: Tensor, rate: float | Sequence[float], *, lower: bool = False
    ) -> None:
        """Let a statistic enter an average that is there.

        Args:
            name: The factor.
            new: The statistic, as the placement stores it.
            rate: How much of it enters, of each group where they differ.
            lower: Whether its lower triangle alone counts.
        """
        if lower:
            self.lower.add(name)
        if isinstance(rate, float):
            self.arrived[name].lerp_(new, rate)
        else:
            weight = sent(rate, new).view(-1, *(1 for _ in new.shape[1:]))
            self.arrived[name].lerp_(new, weight)

    def expect(self, task: Task) -> None:
        """Wait for a task before anybody looks.

        Args:
            task: It brings statistics into ``arrived``.
        """
        self.under_way.append(task)

    def defer(self, keep: float) -> None:
        """Let the mass of what is pending grow by that of one statistic.

        Args:
            keep: What accumulators keep of their past.
        """
        self.pending = keep * self.pending + (1 - keep)

    def accumulate_in(self, name: str, zeros: Tensor) -> None:
        """Let a factor have an accumulator.

        Args:
            name: The factor.
            zeros: The accumulator, of the factor's packed shape.
        """
        self.accumulators[name] = zeros

    def accumulate(self, name: str, new: Tensor | None, keep: float) -> None:
        """Add a statistic to this rank's accumulator.

        Args:
            name: The factor.
            new: The statistic, packed; None for nothing.
            keep: What the accumulator keeps of its past.
        """
        local = self.accumulators[name].mul_(keep)
        if new is not None:
            local.add_(new, alpha=1 - keep)

    def settle(self) -> None:
        """Let nothing be pending, once the accumulators of all ranks are in the factors."""
        self.pending = 0.0
        for local in self.accumulators.values():
            local.zero_()

    # -- moving and forgetting --------------------------------------------------------------------

    def drop(self, name: str) -> None:
        """Forget a factor and its mass.

        Args:
            name: The factor.
        """
        self.masses.pop(name, None)
        self.arrived.pop(name, None)
        self.lower.discard(name)

    def take(self, name: str) -> Tensor | None:
        """Return a factor, which this rank holds no longer; None where it did not hold it.

        Args:
            name: The factor.
        """
        return self.whole().pop(name, None)

    def load(self, masses: Mapping[str, tuple[float, ...]], factors: Mapping[str, Tensor]) -> None:
        """Begin with what a state says, with nothing pending.

        Args:
            masses: The weight of each factor's average.
            factors: Those factors that this rank holds, as the placement stores them.
        """
        self.arrive()
        self.masses, self.arrived = dict(masses), dict(factors)
        self.lower.clear()
        self.pending, self.accumulators = 0.0, {}

    def continue_from(self, before: RunningFactors, keep: Callable[[str, Tensor], Tensor]) -> None:
        """Go on with the factors of a former block of the same parameters.

        Args:
            before: Its factors, with nothing pending; they are used up.
            keep: Returns what is left of a factor, given its name and value.
        """
        factors = {name: keep(name, factor) for name, factor in before.whole().items()}
        self.load(before.masses, factors)
