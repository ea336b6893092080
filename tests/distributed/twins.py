"""Two runs that must not differ in a bit, nor in what they send."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from soframe.comm.recording import Event
from tests.distributed.test_equivalence import assert_same_traces
from tests.distributed.training import same


@dataclass
class Trace:
    """What one rank did and has in the end."""

    weights: Tensor
    state: dict[str, Tensor]
    counters: dict[str, int]
    events: list[Event]
    under_way: list[int] = field(default_factory=list)


def assert_twins(results: Sequence[Sequence[tuple[Trace, Trace]]], cases: Iterable[object]) -> None:
    """Of every rank a pair for each case: the same bits, and the same calls on all ranks."""
    for index, case in enumerate(cases):
        pairs = [own[index] for own in results]
        for rank, (one, other) in enumerate(pairs):
            where = (case, rank)
            assert torch.equal(one.weights, other.weights), where
            assert same(one.state, other.state), where
            assert one.counters == other.counters, where
            assert one.events == other.events, where
        assert_same_traces([one.events for one, _ in pairs])
