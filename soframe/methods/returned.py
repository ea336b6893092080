"""Calls of a method, with copies of shared memory and a check of names, shapes and dtypes.

The step scales updates, overwrites gradients and averages factors in place, so a returned tensor
that shares memory with another one is copied. `soframe.testing.check_method` checks the rest of the
contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from soframe.kernels.devices import memory_of
from soframe.layers.layout import BlockShape
from soframe.methods.base import Direction, Given, Method
from soframe.specs import FactorSpec, SecondOrder


def direction_of(method: Method, given: Given) -> Direction:
    """Compute a method's update ``[groups, out, in]`` and state, in memory of their own."""
    made = method.direct(given)
    # At each step: on one rank alone a tensor of another shape would let the others wait for it.
    check_direction(method, given, made)
    read = {memory_of(given.gradient), memory_of(given.incoming)}
    state = {n: t.clone() if memory_of(t) in read else t for n, t in made.state.items()}
    data = (tensor for tensors in given.data.values() for tensor in tensors.values())
    kept = {memory_of(t) for t in (*state.values(), *given.state.values(), *data)}
    shared = memory_of(made.matrix) in read | kept
    return Direction(made.matrix.clone() if shared else made.matrix, state)


def check_direction(method: Method, given: Given, made: object) -> None:
    """Check the type of a result, and raise if a name, shape or dtype differs from the declared."""
    if not isinstance(made, Direction):
        raise TypeError(
            f"{method!r}: direct() must return soframe.methods.Direction(matrix, state), not "
            f"{type(made).__name__}"
        )
    require_like(method, "direct() returned a matrix", made.matrix, given.incoming)
    check_state(method, "direct()", made.state, given.state)


def check_state(
    method: Method, source: str, state: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> None:
    """Raise a ValueError if a name, shape or dtype differs from `Method.state`."""
    for name, tensor in state.items():
        if name not in before:
            raise ValueError(
                f"{method!r}: {source} returned a state {name!r}, and state() names "
                f"{sorted(before)}: add it there, with its shape, or leave it out"
            )
        require_like(method, f"{source} returned a state {name!r}", tensor, before[name])


def observed_by(
    method: Method,
    factors: Sequence[FactorSpec],
    gradient: Tensor,
    data: SecondOrder,
) -> Mapping[str, Tensor]:
    """Compute a method's statistics of the gradient ``[groups, out, in]``, in new memory."""
    made = method.observe(gradient, data)
    for factor in factors:
        if not factor.captured:
            require_statistics(method, factor, made.get(factor.name), "observe()")
    own = {name: tensor.to(gradient.dtype) for name, tensor in made.items()}
    return {n: t.clone() if memory_of(t) == memory_of(gradient) else t for n, t in own.items()}


def require_told(method: Method, name: str, told: frozenset[str], where: str) -> None:
    """Raise a ValueError if `factor_names` or `state_names` of an inner method lacks a name."""
    if name not in told:
        raise ValueError(
            f"{method!r}: it has {name!r} for blocks of some shapes alone, and {where}() tells "
            f"{sorted(told)}: override {where}() to return the names for blocks of any shape"
        )


def require_declared(method: Method, factors: Sequence[FactorSpec], shape: BlockShape) -> None:
    """Raise a ValueError if two factors have one name, or a state lacks the group dimension."""
    names = [factor.name for factor in factors]
    if len(set(names)) < len(names):
        raise ValueError(f"{method!r}: factors() has a name twice: {names}")
    for name, spec in method.state(shape).items():
        if not spec.shape:
            raise ValueError(
                f"{method!r}: the state {name!r} has the shape (), and the first dimension of each "
                f"is that of groups: let state() say ({shape.groups},)"
            )


def require_statistics(method: Method, factor: FactorSpec, statistics: object, source: str) -> None:
    """Raise a ValueError if statistics of a factor are missing or not of the declared shape."""
    if not isinstance(statistics, Tensor):
        raise ValueError(
            f"{method!r}: {source} returned no statistics of the factor {factor.name!r}, which "
            f"factors() names: return a tensor of shape {factor.shape} under that name"
        )
    if statistics.shape != factor.shape:
        raise ValueError(
            f"{method!r}: {source} returned statistics of the factor {factor.name!r} of shape "
            f"{tuple(statistics.shape)}, and factors() says {factor.shape}"
        )


def require_like(method: Method, what: str, tensor: Tensor, like: Tensor) -> None:
    """Raise a ValueError if a tensor differs in shape or dtype from the one that it replaces."""
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise ValueError(
            f"{method!r}: {what} of shape {tuple(tensor.shape)} and {tensor.dtype}, and it must "
            f"have {tuple(like.shape)} and {like.dtype}"
        )
