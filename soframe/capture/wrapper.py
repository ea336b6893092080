"""DistributedDataParallel around a model: its state in and between forward passes.

Within torch's ``Join`` a rank that has run out of batches answers the wrapper's collectives, and no
others: the other ranks' next step would meet the wrong one, and Gloo ends a process at that.

A wrapper with a static graph learns it in its first backward pass: the first one that goes through
its output ends with a reduction of all gradients. Parameters that this pass did not reach count as
unused from then on, and their gradients are never averaged. A pass of soframe's own, which comes
before the loss's and reaches no parameter, must not be taken for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel


def running_wrapper() -> DistributedDataParallel | None:
    """Return the wrapper whose forward pass runs, or None."""
    # NOTE: no public attribute has it; torch.compile reads this one, too.
    wrapper: DistributedDataParallel | None = DistributedDataParallel._get_active_ddp_module()
    return wrapper


def alone_in_join() -> str | None:
    """Return the error of a forward pass within a ``Join`` that does not end with the first rank.

    None if the wrapper is not within one.
    """
    wrapper = running_wrapper()
    if wrapper is None:
        return None
    config = wrapper._join_config
    if not config.enable or config.throw_on_early_termination:
        return None
    return (
        "within join() a rank without further batches only joins DistributedDataParallel's "
        "collectives, and a step of soframe needs all ranks: give every rank as many "
        "batches, or end with the first one by join(throw_on_early_termination=True)"
    )


def unlearned_wrapper() -> DistributedDataParallel | None:
    """Return the wrapper whose forward pass runs, if its static graph is not learned yet."""
    wrapper = running_wrapper()
    if wrapper is None or not wrapper.static_graph or _is_learned(wrapper):
        return None
    return wrapper


@contextmanager
def unseen_by(wrapper: DistributedDataParallel | None) -> Iterator[None]:
    """A context whose backward passes the wrapper does not count."""
    if wrapper is None or _is_learned(wrapper):
        yield
        return
    wrapper._static_graph_delay_allreduce_enqueued = True
    try:
        yield
    finally:
        wrapper._static_graph_delay_allreduce_enqueued = False


def _is_learned(wrapper: Any) -> bool:
    return bool(wrapper._static_graph_delay_allreduce_enqueued)
