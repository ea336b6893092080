"""What a method returns, held to what it says of itself.

A method is written by anybody. What it returns is saved, sent by its declared shape, scaled in
place by clips and averaged in place; so here shapes, dtypes and names are looked at, never values,
and what lies in the memory of something else is copied. Nobody waits for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from soframe.layers.layout import BlockShape
from soframe.methods.base import Direction, Given, Method
from soframe.specs import FactorSpec, SecondOrder


def direction_of(method: Method, given: Given) -> Direction:
    """Return what a method makes of a gradient, in memory that is nothing else's.

    Args:
        method: The method.
        given: What it is given.

    Returns:
        The direction and the new state: clips scale the one in place, gradients are overwritten.

    Raises:
        TypeError: If it returns no `Direction`.
        ValueError: If what it returns has another shape, dtype or name than it is to have.
        RuntimeError: If it has changed in place what it was given.
    """
    tensors = _tensors(given)
    before = [_version(tensor) for tensor in tensors]
    made = method.direct(given)
    if not isinstance(made, Direction):
        raise TypeError(
            f"{method!r}: direct() must return soframe.methods.Direction(matrix, state), not "
            f"{type(made).__name__}"
        )
    if before != [_version(tensor) for tensor in tensors]:
        raise RuntimeError(
            f"{method!r}: direct(), or a solver within it, has changed "
            f"{_changed(given, before)} in place, while the update may still be given up: return "
            f"a new tensor instead (x = x * y, not x.mul_(y))"
        )
    _require_like(method, "direct() returned a matrix", made.matrix, given.incoming)
    for name, tensor in made.state.items():
        if name not in given.state:
            raise ValueError(
                f"{method!r}: direct() returned a state {name!r}, and state() names "
                f"{sorted(given.state)}: add it there, with its shape, or leave it out"
            )
        _require_like(method, "direct() returned a state", tensor, given.state[name], name)
    read = {_memory(given.gradient), _memory(given.incoming)}
    state = {n: t.clone() if _memory(t) in read else t for n, t in made.state.items()}
    mine = _memory(made.matrix)
    shared = mine in read or any(mine == _memory(t) for t in (*state.values(), *tensors[2:]))
    return Direction(made.matrix.clone() if shared else made.matrix, state)


def observed_by(
    method: Method, factors: Sequence[FactorSpec], gradient: Tensor, data: SecondOrder
) -> Mapping[str, Tensor]:
    """Return a method's statistics of the averaged gradient, in memory that is not the gradient's.

    Args:
        method: The method.
        factors: The block's factors.
        gradient: ``[groups, out, in]``.
        data: The second-order data of the block.

    Raises:
        ValueError: If a factor has none, or has another shape than `Method.factors` says.
    """
    made = method.observe(gradient, data)
    for factor in factors:
        if not factor.captured:
            require_statistics(method, factor, made.get(factor.name), "observe()")
    own = {name: tensor.to(gradient.dtype) for name, tensor in made.items()}
    return {n: t.clone() if _memory(t) == _memory(gradient) else t for n, t in own.items()}


def rebased_by(
    method: Method, state: Mapping[str, Tensor], old: SecondOrder, new: SecondOrder
) -> Mapping[str, Tensor]:
    """Return what a method makes of its state in new second-order data.

    Args:
        method: The method.
        state: The state.
        old: The data that it was kept with.
        new: The data that take their place.

    Raises:
        ValueError: If it has another name, shape or dtype than it had.
    """
    rebased = method.rebase(state, old, new)
    for name, tensor in rebased.items():
        if name not in state:
            raise ValueError(f"{method!r}: rebase() returned {name!r}, of {sorted(state)}")
        _require_like(method, "rebase() returned a state", tensor, state[name], name)
    return rebased


def require_told(method: Method, name: str, told: frozenset[str], where: str) -> None:
    """Check that a method within another one has told a name, by which that one finds its tensors.

    Args:
        method: The method.
        name: A name that it has for a block.
        told: The names that it tells.
        where: The method that tells them.

    Raises:
        ValueError: If it has not.
    """
    if name not in told:
        raise ValueError(
            f"{method!r}: it has {name!r} for blocks of some shapes alone, and {where}() tells "
            f"{sorted(told)}: override {where}() to return the names for blocks of any shape"
        )


def require_declared(method: Method, factors: Sequence[FactorSpec], shape: BlockShape) -> None:
    """Check what a method says of a block: names of factors, and shapes of its state.

    Args:
        method: The method.
        factors: What it says of factors.
        shape: The shape of the block's gradient matrix.

    Raises:
        ValueError: If two factors have one name, or a state has no leading dimension.
    """
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
    """Check the statistics of one factor.

    Args:
        method: The method that made them.
        factor: The factor.
        statistics: A tensor, what is no tensor where there are none.
        source: What returned them.

    Raises:
        ValueError: If there are none, or they have another shape than the factor.
    """
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


def _require_like(method: Method, what: str, tensor: Tensor, like: Tensor, name: str = "") -> None:
    if tensor.shape != like.shape or tensor.dtype != like.dtype:
        raise ValueError(
            f"{method!r}: {what}{f' {name!r}' * bool(name)} of shape {tuple(tensor.shape)} and "
            f"{tensor.dtype}, and it must have {tuple(like.shape)} and {like.dtype}"
        )


def _tensors(given: Given) -> list[Tensor]:
    """Return all that a method is given."""
    data = [tensor for tensors in given.data.values() for tensor in tensors.values()]
    return [given.gradient, given.incoming, *given.state.values(), *data]


def _changed(given: Given, before: Sequence[int]) -> str:
    """Return what of it has changed since it had these versions."""
    names = ["the gradient", "what it was given", *(f"the state {name!r}" for name in given.state)]
    for factor, tensors in given.data.items():
        names += [f"the data of the factor {factor!r}"] * len(tensors)
    each = zip(names, _tensors(given), before, strict=True)
    return next(name for name, tensor, version in each if _version(tensor) != version)


def _version(tensor: Tensor) -> int:
    """Return how often a tensor was changed in place; tensors of inference mode do not count."""
    return 0 if tensor.is_inference() else tensor._version


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
