"""Refused combinations of methods, solvers and strategies, as conditions of one function.

They are checked once blocks are placed; a setting that no block reads is refused last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from soframe.blocks.block import Block
from soframe.schedules import Interval
from soframe.solvers.around import Around
from soframe.strategies.placement import Placement
from soframe.strategies.work import BlockPlacement


def refused(blocks: Sequence[Block], placement: Placement, *, solve_every: Interval) -> str | None:
    """Return the first reason why a block does not go with its place, or None."""
    for kind in placement.kinds:
        block, place = blocks[kind[0]], placement.blocks[kind[0]]
        reason = next(_reasons(block, place, placement.strategy, solve_every), None)
        if reason is not None:
            return reason
    return None


def _reasons(
    block: Block, place: BlockPlacement, strategy: str, solve_every: Interval
) -> Iterator[str]:
    """Yield the reasons why a block does not go with its place and the interval of solves."""
    for factor in block.captured:
        if factor.needs and solve_every == 1:
            needs = " and ".join(factor.needs)
            yield (
                f"{block.name}: solve_every=1 never uses the factor {factor.name} of "
                f"{block.method!r}: it is gathered with the data of {needs}, and every solve drops "
                f"it before the update is made; pass a larger solve_every, such as 10, or a method "
                f"without it, such as method='kfac'"
            )
    if block.follows:
        follow = (
            f"{block.name}: the data of {block.solver!r} follow the factors between solves, which "
            f"they cannot do under the strategy {strategy!r}, since "
        )
        if place.deferred:
            yield (
                f"{follow}the strategy reduces statistics at the solves only: pass one that "
                f"reduces them at once (deferred=False); or a solver that does not follow"
            )
        for index, factor, _ in block.solved_factors:
            lacking = sorted(set(place.gradient_workers).difference(place.holding(index)))
            if lacking:
                yield (
                    f"{follow}rank(s) {lacking} precondition the block, and do not hold its factor "
                    f"{factor.name}: pass a strategy that holds factors where gradients are "
                    f"preconditioned, such as Sharded(colocate=True) or 'mem-opt'; or a solver "
                    f"that does not follow"
                )
    # An accumulator decays all groups alike, also groups without rows.
    if block.has_rows_by_group and place.deferred:
        yield (
            f"{block.name}: its groups have rows of their own, and averages over these cannot be "
            f"deferred to the solves, as the strategy {strategy!r} does: pass one that reduces "
            f"statistics at once (deferred=False), or skip the module"
        )


def _reads_solver(block: Block) -> bool:
    """Whether a factor is solved by the user's solver, or by one of its class."""
    for _, _, solver in block.solved_factors:
        if type(solver) is type(block.solver):
            return True
        # A method may put another solver around the user's.
        if isinstance(solver, Around) and type(solver.solver) is type(block.solver):
            return True
    return False


READ_BY: Mapping[str, Callable[[Block], bool]] = {
    "solver": _reads_solver,
    "damping": lambda block: block.method.damped or _reads_solver(block),
    "decay": lambda block: any(factor.decay is None for factor in block.factors),
    "kl_clip": lambda block: block.method.clipped,
    "norm_clip": lambda block: block.method.clipped,
    "scaling": lambda block: bool(block.captured),
    "rows": lambda block: bool(block.captured),
    "fisher": lambda block: any(f.reads in {"outputs", "both"} for f in block.captured),
}
"""Which blocks read a setting, of those that some methods do not read."""


def require_read(
    settings: Mapping[str, Any],
    defaults: Mapping[str, Any],
    blocks: Sequence[Block],
    total: Callable[[Sequence[float]], Sequence[float]] = lambda counts: counts,
) -> None:
    """Raise a ValueError unless some block reads each setting that was chosen."""
    # None and defaults are not chosen. `total` sums numbers of readers over other parts of a model.
    read_by = dict(READ_BY)
    if settings.get("fisher") == "forward-only":  # the forward-only Fisher does not read outputs
        read_by["fisher"] = read_by["rows"]
    readers = total([float(sum(map(reads, blocks))) for reads in read_by.values()])
    unread: list[str] = []
    for name, count in zip(read_by, readers, strict=True):
        value, default = settings.get(name), defaults[name]
        if value is None or count > 0:
            continue
        if (type(value), value) != (type(default), default):
            unread.append(name)
    if unread:
        they = "it" if len(unread) == 1 else "them"
        values = ", ".join(f"{name}={settings[name]!r}" for name in unread)
        raise ValueError(
            f"{values} would change nothing: no method of this model reads {they}. Leave {they} "
            f"out, or choose a method that does, such as 'kfac'"
        )
