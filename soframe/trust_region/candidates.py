"""Candidate directions: of any method, each with coefficients of its own in the quadratic model.

The first method is the preconditioner's of the trust region; each further one has a preconditioner
of its own on the same model (`Beside`), which is given the same gradient. What is a matter of one
gradient alone, as K-FAC's direction, `soframe.trust_region.proposals` makes and damps. All
others are made here, once in a step: those of further methods, and those of methods that remember
gradients (`Block.remembers`).

The model chooses lengths and signs, so the learning rate, the scale and the bias correction of a
method do not matter. A method that has no direction yet, as SOAP before its first basis, has that
of steepest descent.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from soframe import combinations
from soframe.blocks.block import Block
from soframe.layers.layout import BlockShape
from soframe.losses.base import Loss
from soframe.methods.base import Method
from soframe.preconditioner import Preconditioner
from soframe.registry import KINDS, describe
from soframe.settings import Curvature
from soframe.trust_region.directions import NamedDirections
from soframe.trust_region.groups import scaled
from soframe.trust_region.parts import split

AUXILIARY = "adamw"
"""Has the parameters that methods leave out, where one of these remembers gradients."""

_SHAPE = BlockShape(1, 2, 2)


@dataclass(frozen=True)
class Methods:
    """The methods of a trust region, as they were given.

    Attributes:
        first: That of the preconditioner, with damping of its own.
        others: Further ones, each beside it.
        auxiliary: That of parameters which the first leaves out; None to leave them out.
    """

    first: Any
    others: tuple[Any, ...] = ()
    auxiliary: Any = None

    def captures(self, which: int) -> bool:
        """Return whether a method, or one that a mapping names, reads calls.

        Args:
            which: 0 for the first, with its auxiliary, and so on.
        """
        methods = _built((self.first, *self.others)[which])
        methods += _built(self.auxiliary) if which == 0 else []
        return any(method.captures for method in methods)

    def fishers(self, fisher: str, loss: Loss, *, usual: str) -> list[dict[str, Any]]:
        """Return the settings of each method's preconditioner that say what Fisher it reads.

        A method that reads no calls has none. Where no method reads calls the first is given the
        Fisher that the user asked for, and refuses it.

        Args:
            fisher: What methods that read calls read.
            loss: What it is of.
            usual: The Fisher of those who ask for none.
        """
        reads = [self.captures(which) for which in range(len(self.others) + 1)]
        reads[0] = reads[0] or (not any(reads) and fisher != usual)
        plain: dict[str, Any] = {"fisher": "empirical"}
        return [{"fisher": fisher, "loss": loss} if captures else plain for captures in reads]

    @property
    def damped(self) -> bool:
        """Whether the first has directions that are made of one gradient alone."""
        methods = _built(self.first) + _built(self.auxiliary)
        return any(not _remembers(method) for method in methods)


def methods_of(settings: Mapping[str, Any]) -> Methods:
    """Return the methods that are chosen by settings of a preconditioner.

    Args:
        settings: ``method`` may be a list of methods; ``auxiliary`` may be missing.

    Returns:
        The methods. Where one of them remembers gradients, and nothing is said of what they leave
        out, that is `AUXILIARY`'s.

    Raises:
        ValueError: If the list is empty, or names a method twice.
        TypeError: If there is no such method.
    """
    method = settings.get("method", "kfac")
    every = tuple(method) if isinstance(method, list | tuple) else (method,)
    if not every:
        raise ValueError("method=[] names no method: pass one, or several such as ['kfac', 'soap']")
    seen: set[str] = set()
    for one in every:
        said = describe({k: _built(v) for k, v in _choices(one).items()})
        if said in seen:
            raise ValueError(
                f"method={list(every)!r} names {one!r} twice, and the second direction would be "
                f"the first: leave it out"
            )
        seen.add(said)
    remembers = any(_remembers(built) for one in every for built in _built(one))
    auxiliary = settings.get("auxiliary", AUXILIARY if remembers else None)
    return Methods(every[0], every[1:], auxiliary)


def _choices(choice: Any) -> Mapping[str, Any]:
    return choice if isinstance(choice, Mapping) else {"": choice}


def _built(choice: Any) -> list[Method]:
    """Return the methods that a choice may lead to."""
    if choice is None:
        return []
    return [
        KINDS["method"].build(one, Method) for one in _choices(choice).values() if one is not None
    ]


def _remembers(method: Method) -> bool:
    factors = method.factors(_SHAPE)
    return bool(method.state(_SHAPE)) or any(not factor.captured for factor in factors)


def require_recallable(blocks: Sequence[Block]) -> None:
    """Check that what methods remember can be put back with a step that is undone.

    Args:
        blocks: The blocks.

    Raises:
        ValueError: If a method that remembers gradients gathers statistics of calls in a basis,
            which would be put back while they are not.
    """
    for block in blocks:
        for factor in block.captured if block.remembers else ():
            if factor.needs:
                raise ValueError(
                    f"{block.name}: {block.method!r} gathers its factor {factor.name} in the basis "
                    f"of {' and '.join(factor.needs)}, and keeps a state, which TrustRegion puts "
                    f"back with a step that is undone, and the basis with it: pass the two as "
                    f"methods of their own, method=['ekfac', 'muon'] for example"
                )


class OneOfSeveral(Preconditioner):
    """A preconditioner of a trust region, which checks what all of its methods read together."""

    def _require_read(self) -> None:
        """See `require_read`."""


class Beside(OneOfSeveral):
    """A preconditioner beside another one of the same model.

    The other one has the modules still. This one is given the gradient as it was before, and what
    it writes is taken away.

    Args:
        other: The other one.
        **settings: Those of `soframe.Preconditioner`.
    """

    _beside = True

    def __init__(self, other: Preconditioner, **settings: Any) -> None:
        super().__init__(other._model, backend=other.backend, **settings)


def require_read(preconditioners: Sequence[OneOfSeveral], given: Collection[str]) -> None:
    """Check that some method of any preconditioner reads each setting that the user chose.

    Args:
        preconditioners: All preconditioners of a trust region.
        given: The names of the settings that the user gave for them.

    Raises:
        ValueError: If no block of theirs reads one.
    """
    names = {*given, *(Curvature.names.values() if "curvature" in given else ())}
    settings = preconditioners[0]._settings
    combinations.require_read(
        Preconditioner,
        {name: settings[name] for name in names.intersection(settings)},
        [block for one in preconditioners for block in one.blocks],
    )


class Candidates:
    """Makes candidate directions, once in a step.

    Args:
        first: The preconditioner of the trust region.
        others: Those beside it.

    Attributes:
        others: Those beside it.
        lost: Methods that made one which was not finite in that step, and was left out.
    """

    def __init__(self, first: Preconditioner, others: Sequence[Beside] = ()) -> None:
        self._first, self.others = first, tuple(others)
        self.lost: list[str] = []

    @property
    def every(self) -> tuple[Preconditioner, ...]:
        """All preconditioners."""
        return (self._first, *self.others)

    def covered(self) -> set[nn.Parameter]:
        """Return the parameters that any method has."""
        return set[nn.Parameter]().union(*(one.covered() for one in self.every))

    def propose(
        self,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        shares: Sequence[float],
        numbers: Mapping[nn.Parameter, int],
    ) -> NamedDirections:
        """Let every preconditioner but the first take its step, and return their directions.

        Args:
            parameters: The parameters, after the first one's step, whose gradients are what that
                has written, and are so afterwards.
            gradients: Their gradients as they were before.
            shares: What each of them is scaled by.
            numbers: The part of each parameter.

        Returns:
            For each method its negative direction, in parts, by the method's name; that of an
            auxiliary method whole.
        """
        self.lost = []
        directions = self._read(self._first, parameters, gradients, shares, numbers)
        if not self.others:
            return directions
        home = self._first.home
        written = [home.read(parameter) for parameter in parameters]
        for other in self.others:
            for parameter, gradient in zip(parameters, gradients, strict=True):
                home.put(parameter, gradient.clone())
            other.step()
            if other.updated:
                directions += self._read(other, parameters, gradients, shares, numbers)
        for parameter, direction in zip(parameters, written, strict=True):
            home.put(parameter, direction)
        return directions

    def _read(
        self,
        preconditioner: Preconditioner,
        parameters: Sequence[nn.Parameter],
        gradients: Sequence[Tensor],
        shares: Sequence[float],
        numbers: Mapping[nn.Parameter, int],
    ) -> NamedDirections:
        raw, read = dict(zip(parameters, gradients, strict=True)), preconditioner.home.read
        by_method: dict[tuple[bool, str], dict[nn.Parameter, Tensor]] = {}
        names: dict[tuple[bool, str], str] = {}
        for block in preconditioner.blocks:
            if preconditioner is self._first and not block.remembers:
                continue
            of_block = {p: g for p in block.parameters.values() if (g := read(p)) is not None}
            # The first update of some methods is none: it only begins their averages.
            if block.state.updates <= 1 and not any(
                bool(tensor.any()) for tensor in of_block.values()
            ):
                of_block = {p: raw[p] for p in of_block}
            key = (block.auxiliary, describe(block.method))
            by_method.setdefault(key, {}).update(of_block)
            names[key] = type(block.method).__name__
        directions = NamedDirections()
        for key, tensors in by_method.items():
            rows = [-tensors[p] if p in tensors else None for p in parameters]
            whole = scaled(rows, shares)
            auxiliary, _ = key
            if not all(bool(t.isfinite().all()) for t in whole if t is not None):
                self.lost.append(names[key])
                continue
            parts = [whole] if auxiliary else split(whole, [numbers[p] for p in parameters])
            name = f"auxiliary {names[key]}" if auxiliary else names[key]
            directions += NamedDirections(parts, [name] * len(parts))
        return directions
