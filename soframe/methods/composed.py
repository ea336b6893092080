"""Methods made of others, whose factors and states they have under names of their own.

An inner method has a number, and the whole matrix or a part of it. It is called with its own
second-order data and states, as if it were alone; the method around it defines the update.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import TypeVar

from torch import Tensor, nn

from soframe.layers.layout import BlockShape, Layout
from soframe.methods.base import Addend, Call, Candidate, Given, Method
from soframe.methods.returned import require_named
from soframe.solvers.base import Solver
from soframe.specs import FactorSpec, SecondOrder, State, TensorSpec

T = TypeVar("T")


class Names:
    """Translates names between methods, by their numbers, and the method around them."""

    def __init__(
        self, by_method: Sequence[frozenset[str]], rename: Callable[[int, str], str]
    ) -> None:
        self._outer: list[dict[str, str]] = []  # by the names of each inner method
        self.inner: dict[str, tuple[int, str]] = {}
        """The number of the inner method and its own name, by the outer name."""
        for number, names in enumerate(by_method):
            outer = {name: rename(number, name) for name in sorted(names)}
            self._outer.append(outer)
            for name, outer_name in outer.items():
                self.inner[outer_name] = number, name

    @classmethod
    def apart(cls, by_method: Sequence[frozenset[str]]) -> Names:
        """Return names of which those that several methods use get a prefix."""
        uses = Counter(itertools.chain.from_iterable(by_method))
        return cls(by_method, lambda number, name: f"{number}.{name}" if uses[name] > 1 else name)

    def of_outer(self, number: int, entries: Mapping[str, T]) -> dict[str, T]:
        """Return the entries of an inner method under the outer names."""
        names = self._outer[number]
        return {names.get(name, name): entry for name, entry in entries.items()}

    def of_inner(self, number: int, entries: Mapping[str, T]) -> dict[str, T]:
        """Select the entries of an inner method, under its own names."""
        names = self._outer[number].items()
        return {name: entries[outer] for name, outer in names if outer in entries}

    def outer_factor(self, number: int, factor: FactorSpec) -> FactorSpec:
        """Return a factor of an inner method under the outer names."""
        names = self._outer[number]
        needs = tuple(names.get(need, need) for need in factor.needs)
        return replace(factor, name=names[factor.name], needs=needs)

    def inner_factor(self, factor: FactorSpec) -> tuple[int, FactorSpec]:
        """Return the number of the inner method of a factor, and the factor under its own names."""
        number, name = self.inner[factor.name]
        needs = tuple(self.inner[need][1] for need in factor.needs)
        return number, replace(factor, name=name, needs=needs)


class Composed(Method):
    """A method with the factors, states and demands of inner methods."""

    _factor_names: Names
    _state_names: Names

    @property
    @abstractmethod
    def _inner(self) -> Sequence[Method]:
        """The inner methods."""

    def _shapes(self, shape: BlockShape) -> Iterable[BlockShape]:
        """Return the shape for each inner method; the last ones may have no part of the matrix."""
        return itertools.repeat(shape, len(self._inner))

    def _cut(self, matrix: Tensor) -> Iterable[Tensor]:
        """Return a matrix ``[groups, out, in]``, or its part, for each inner method."""
        return itertools.repeat(matrix, len(self._inner))

    def _name(self, names: Callable[[Sequence[frozenset[str]]], Names] = Names.apart) -> None:
        """Name the factors and states; self is a frozen dataclass."""
        factors, states = list[frozenset[str]](), list[frozenset[str]]()
        for method in self._inner:
            factors.append(method.factor_names())
            states.append(method.state_names())
        object.__setattr__(self, "_factor_names", names(factors))
        object.__setattr__(self, "_state_names", names(states))

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        factors = []
        for number, (method, part) in enumerate(self._with_shapes(shape)):
            for factor in method.factors(part):
                require_named(method, factor.name, method.factor_names(), "factor_names")
                factors.append(self._factor_names.outer_factor(number, factor))
        return tuple(factors)

    def statistics(self, call: Call) -> Mapping[str, Tensor | Addend]:
        statistics: dict[str, Tensor | Addend] = {}
        for number, method in enumerate(self._inner):
            if method.captures:
                of_method = method.statistics(replace(call, data=self._data(number, call.data)))
                statistics |= self._factor_names.of_outer(number, of_method)
        return statistics

    def observe(self, gradient: Tensor, data: SecondOrder) -> Mapping[str, Tensor]:
        observed: dict[str, Tensor] = {}
        pairs = zip(self._inner, self._cut(gradient), strict=False)
        for number, (method, part) in enumerate(pairs):
            of_method = method.observe(part, self._data(number, data))
            observed |= self._factor_names.of_outer(number, of_method)
        return observed

    def solver(self, factor: FactorSpec, default: Solver) -> Solver | None:
        number, of_method = self._factor_names.inner_factor(factor)
        return self._inner[number].solver(of_method, default)

    def state(self, shape: BlockShape) -> Mapping[str, TensorSpec]:
        specs: dict[str, TensorSpec] = {}
        for number, (method, part) in enumerate(self._with_shapes(shape)):
            of_method = method.state(part)
            for name in of_method:
                require_named(method, name, method.state_names(), "state_names")
            specs |= self._state_names.of_outer(number, of_method)
        return specs

    def rebase(self, state: State, old: SecondOrder, new: SecondOrder) -> State:
        rebased: dict[str, Tensor] = {}
        for number, method in enumerate(self._inner):
            if of_method := self._state_names.of_inner(number, state):
                moved = method.rebase(of_method, self._data(number, old), self._data(number, new))
                rebased |= self._state_names.of_outer(number, moved)
        return rebased

    def unsuited(self, candidate: Candidate) -> str | None:
        for method, shape in self._with_shapes(candidate.shape):
            if shape != candidate.shape:  # as of a part of the matrix
                candidate = replace(candidate, shape=shape)
            if (reason := method.unsuited(candidate)) is not None:
                return reason
        return None

    def layouts(self, module: nn.Module) -> Sequence[Layout]:
        layouts: list[Layout] = []
        for method in self._inner:
            layouts += method.layouts(module)
        return layouts

    def effort(self, shape: BlockShape) -> float:
        return sum(method.effort(part) for method, part in self._with_shapes(shape))

    @property
    def rebases(self) -> bool:
        """Whether a state of any inner method is in the basis of its second-order data."""
        return any(map(attrgetter("rebases"), self._inner))

    def factor_names(self) -> frozenset[str]:
        return frozenset(self._factor_names.inner)

    def state_names(self) -> frozenset[str]:
        return frozenset(self._state_names.inner)

    def _with_shapes(self, shape: BlockShape) -> Iterator[tuple[Method, BlockShape]]:
        return zip(self._inner, self._shapes(shape), strict=False)

    def _data(self, number: int, data: SecondOrder) -> SecondOrder:
        return self._factor_names.of_inner(number, data)

    def _given(self, number: int, step: Given, gradient: Tensor, incoming: Tensor) -> Given:
        """Return the step of an inner method."""
        return replace(
            step,
            gradient=gradient,
            incoming=incoming,
            data=self._data(number, step.data),
            state=self._state_names.of_inner(number, step.state),
        )
