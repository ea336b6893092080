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
from soframe.specs import FactorSpec, SecondOrder, State, TensorSpec


def direction_of(method: Method, step: Given) -> Direction:
    """Compute a method's update ``[groups, out, in]`` and state, in memory of their own."""
    update = method.direct(step)
    # At each step: on one rank alone a tensor of another shape would let the others wait for it.
    check_direction(method, step, update)
    gradients = {memory_of(step.gradient), memory_of(step.incoming)}
    state: dict[str, Tensor] = {}
    for name, tensor in update.state.items():
        state[name] = tensor.clone() if memory_of(tensor) in gradients else tensor
    kept = [*state.values(), *step.state.values()]
    for data in step.data.values():
        kept += data.values()
    matrix = update.matrix
    if memory_of(matrix) in gradients.union(map(memory_of, kept)):
        matrix = matrix.clone()
    return Direction(matrix, state, update.parcel)


def check_direction(method: Method, step: Given, update: object) -> None:
    """Check the type of a result, and raise if a name, shape or dtype differs from the declared."""
    if not isinstance(update, Direction):
        raise TypeError(
            f"{method!r}: direct() must return soframe.methods.Direction(matrix, state), not "
            f"{type(update).__name__}"
        )
    require_like(method, "direct() returned a matrix", update.matrix, step.incoming)
    check_state(method, "direct()", update.state, step.state)


def check_state(method: Method, source: str, state: State, before: State) -> None:
    """Raise a ValueError if a name, shape or dtype differs from `Method.state`."""
    for name, tensor in state.items():
        if name not in before:
            raise ValueError(
                f"{method!r}: {source} returned a state {name!r}, and state() names "
                f"{sorted(before)}: add it there, with its shape, or leave it out"
            )
        require_like(method, f"{source} returned a state {name!r}", tensor, before[name])


def parcel_of(
    method: Method, update: Direction, declared: Mapping[str, TensorSpec], blocks: int
) -> dict[str, Tensor]:
    """Return the tensors to send in place of an update; raise if they are not as declared."""
    for name, spec in declared.items():
        shape = (blocks * spec.shape[0], *spec.shape[1:])
        if name not in update.parcel or update.parcel[name].shape != shape:
            raise ValueError(
                f"{method!r}: direct() must return Direction(parcel={{{name!r}: ...}}) of the "
                f"shape {shape}, as parcel() declares"
            )
    return {name: update.parcel[name] for name in declared}


def observed_by(
    method: Method, factors: Sequence[FactorSpec], gradient: Tensor, data: SecondOrder
) -> Mapping[str, Tensor]:
    """Compute a method's statistics of the gradient ``[groups, out, in]``, in new memory."""
    observed = method.observe(gradient, data)
    for factor in factors:
        if not factor.captured:
            require_statistics(method, factor, observed.get(factor.name), "observe()")
    statistics: dict[str, Tensor] = {}
    for name, tensor in observed.items():
        moment = tensor.to(gradient.dtype)
        if memory_of(moment) == memory_of(gradient):
            moment = moment.clone()
        statistics[name] = moment
    return statistics


def require_named(method: Method, name: str, declared: frozenset[str], where: str) -> None:
    """Raise a ValueError if `factor_names` or `state_names` of an inner method lacks a name."""
    if name not in declared:
        raise ValueError(
            f"{method!r}: it has {name!r} only for blocks of some shapes, and {where}() names "
            f"{sorted(declared)}: override {where}() to return the names for blocks of any shape"
        )


def require_declared(method: Method, factors: Sequence[FactorSpec], shape: BlockShape) -> None:
    """Raise a ValueError if two factors have one name, or a state is no `TensorSpec` by group."""
    names = [factor.name for factor in factors]
    if len(set(names)) < len(names):
        raise ValueError(f"{method!r}: factors() has a name twice: {names}")
    for name, spec in method.state(shape).items():
        if not getattr(spec, "shape", ()):
            raise ValueError(
                f"{method!r}: state() gives {spec!r} for {name!r}; it must be a TensorSpec whose "
                f"first dimension is that of groups, such as TensorSpec(({shape.groups},))"
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
