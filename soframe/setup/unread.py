"""Settings that were chosen, and that nothing in the model reads: they would change nothing.

Two kinds of settings are none of these. What says when work is done, such as ``solve_every``,
``stagger`` or ``background``, bounds work, and the bound is kept where there is none. What says
what is true of the loss, ``loss``, ``samples`` and ``loss_average``, stays true.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from soframe.blocks.block import Block
from soframe.comm.agreement import add_over_ranks
from soframe.comm.stages import Stages
from soframe.methods.base import Method
from soframe.registry import describe
from soframe.solvers import Eigen, Inverse, Solver
from soframe.specs import FactorSpec


def _takes_calls(block: Block) -> bool:
    return bool(block.captured)


def _reads_outputs(block: Block) -> bool:
    return any(factor.reads in {"outputs", "both"} for factor in block.captured)


def _averages(block: Block) -> bool:
    """Whether a running average has no decay of its own."""
    return any(factor.decay is None for factor in block.factors)


def _is_solved(block: Block) -> bool:
    """Whether the solver that the user chose solves a factor, or one that the method makes of it.

    Args:
        block: The block.

    Returns:
        Whether it does. The latter is another one where the user's is another.
    """
    other: Solver = Eigen() if isinstance(block.solver, Inverse) else Inverse()
    return any(
        solver is block.solver or _makes_another(block.method, factor, solver, other)
        for _, factor, solver in block.solved_here
    )


def _makes_another(method: Method, factor: FactorSpec, solver: Solver, default: Solver) -> bool:
    try:
        return describe(method.solver(factor, default)) != describe(solver)
    except ValueError:  # it cannot do with that one, so it reads which one it is
        return True


def _is_damped(block: Block) -> bool:
    return block.method.damped or _is_solved(block)


def _is_clipped(block: Block) -> bool:
    return block.method.clipped


READ_BY: Mapping[str, Callable[[Block], bool]] = {
    "solver": _is_solved,
    "damping": _is_damped,
    "decay": _averages,
    "kl_clip": _is_clipped,
    "norm_clip": _is_clipped,
    "scaling": _takes_calls,
    "rows": _takes_calls,
    "fisher": _reads_outputs,
}
"""Which blocks read a setting, of those that some methods do not read."""


def require_read(
    constructor: Callable[..., Any],
    given: Mapping[str, Any],
    blocks: Sequence[Block],
    *,
    stages: Stages | None = None,
) -> None:
    """Check that each setting that was chosen changes something.

    A setting that is None, or its default, has not been chosen.

    Args:
        constructor: What has the defaults.
        given: Settings, by name.
        blocks: All blocks of this rank's part of the model.
        stages: The other parts, whose blocks count as well; None for no others.

    Raises:
        ValueError: If no block reads one of them.
    """
    read_by = dict(READ_BY)
    if given.get("fisher") == "forward-only":  # what read outputs does so no longer
        read_by["fisher"] = _takes_calls
    readers = [float(sum(map(reads, blocks))) for reads in read_by.values()]
    if stages is not None and stages.backend is not None:
        readers = add_over_ranks(stages.backend, readers)
    parameters = inspect.signature(constructor).parameters
    unread = [
        name
        for name, count in zip(read_by, readers, strict=True)
        if count == 0 and _chosen(given.get(name), parameters[name].default)
    ]
    if unread:
        they = "it" if len(unread) == 1 else "them"
        raise ValueError(
            f"{', '.join(f'{name}={given[name]!r}' for name in unread)} would change nothing: no "
            f"method of this model reads {they}. Leave {they} out, or choose a method that does, "
            f"such as 'kfac'"
        )


def _chosen(value: object, default: object) -> bool:
    """Whether a setting was chosen; what cannot be compared with the default was."""
    return value is not None and (type(value) is not type(default) or value != default)
