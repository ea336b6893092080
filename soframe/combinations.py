"""Refused combinations of methods, solvers and strategies, as one table.

Each row has a predicate and a message, and applies once blocks are placed; a setting that no block
reads is refused last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from soframe.blocks.block import Block
from soframe.schedules import Interval
from soframe.solvers.around import Around
from soframe.strategies.placement import Placement
from soframe.strategies.work import BlockPlacement

# -- blocks and their places -------------------------------------------------------------------


@dataclass(frozen=True)
class Placed:
    """A block with its place, and the settings for predicates of rows."""

    block: Block
    place: BlockPlacement
    strategy: str
    solve_every: int  # the interval of solves; 0 for a callable


def _dropped(of: Placed) -> object:
    if of.solve_every != 1:
        return None
    for factor in of.block.captured:
        if factor.needs:
            needs = " and ".join(factor.needs)
            return f"{factor.name} of {of.block.method!r}: it is gathered with the data of {needs}"
    return None


def _lacking(of: Placed) -> object:
    if not of.block.follows:
        return None
    for index, factor, _ in of.block.solved_factors:
        ranks = [w for w in of.place.gradient_workers if not of.place.holds(w, index)]
        if ranks:
            factors = f"its factor {factor.name}"
            return f"rank(s) {ranks} precondition the block, and do not hold {factors}"
    return None


_FOLLOW = (
    "{block.name}: the data of {block.solver!r} follow the factors between solves, which they "
    "cannot do under the strategy {strategy!r}, since "
)

BLOCKS: tuple[tuple[Callable[[Placed], object], str], ...] = (
    (
        _dropped,
        (
            "{block.name}: solve_every=1 never uses the factor {found}, and every solve drops it "
            "before the update is made; pass a larger solve_every, such as 10, or a method without "
            "it, such as method='kfac'"
        ),
    ),
    (
        lambda of: of.block.follows and of.place.deferred,
        _FOLLOW + "the strategy reduces statistics at the solves only: pass one that reduces them "
        "at once (deferred=False); or a solver that does not follow",
    ),
    (
        _lacking,
        _FOLLOW + "{found}: pass a strategy that holds factors where gradients are preconditioned, "
        "such as Sharded(colocate=True) or 'mem-opt'; or a solver that does not follow",
    ),
    (
        # An accumulator decays all groups alike, also groups without rows.
        lambda of: of.block.unequal and of.place.deferred,
        (
            "{block.name}: its groups have rows of their own, and averages over these cannot be "
            "deferred to the solves, as the strategy {strategy!r} does: pass one that reduces "
            "statistics at once (deferred=False), or skip the module"
        ),
    ),
)
"""A message contains the result of its predicate as ``{found}``."""


def refused(blocks: Sequence[Block], placement: Placement, *, solve_every: Interval) -> str | None:
    """Return the message of the first row of `BLOCKS` that applies to a block, or None."""
    every = 0 if callable(solve_every) else int(solve_every)
    for first, *_ in placement.kinds:
        block, place = blocks[first], placement.blocks[first]
        of = Placed(block, place, placement.strategy, every)
        for find, message in BLOCKS:
            if value := find(of):
                return message.format(block=block, strategy=placement.strategy, found=value)
    return None


# -- settings that no block reads --------------------------------------------------------------


def _reads_solver(block: Block) -> bool:
    """Whether a factor is solved by the user's solver, or by one of its class."""
    # A method may put another solver around the user's.
    solvers = [solver for _, _, solver in block.solved_factors]
    solvers += [solver.solver for solver in solvers if isinstance(solver, Around)]
    return any(type(solver) is type(block.solver) for solver in solvers)


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
        if count == 0 and _chosen(settings.get(name), defaults[name]):
            unread.append(name)
    if unread:
        they = "it" if len(unread) == 1 else "them"
        values = ", ".join(f"{name}={settings[name]!r}" for name in unread)
        raise ValueError(
            f"{values} would change nothing: no method of this model reads {they}. Leave {they} "
            f"out, or choose a method that does, such as 'kfac'"
        )


def _chosen(value: object, default: object) -> bool:
    return value is not None and (type(value), value) != (type(default), default)
