"""DistributedDataParallel with a static graph, which learns it in its first backward pass.

The first pass that goes through the wrapper's output ends with a reduction of all gradients.
Parameters that this pass did not reach count as unused from then on, and their gradients are never
averaged. A pass of soframe's own, which comes before the loss's and reaches no parameter, must not
be taken for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.nn.parallel import DistributedDataParallel


def unlearned_wrapper() -> DistributedDataParallel | None:
    """Return the wrapper whose forward pass runs, if its static graph is not learned yet."""
    # NOTE: no public attribute has it; torch.compile reads this one, too.
    wrapper: Any = DistributedDataParallel._get_active_ddp_module()
    if wrapper is None or not wrapper.static_graph or _is_learned(wrapper):
        return None
    found: DistributedDataParallel = wrapper
    return found


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
