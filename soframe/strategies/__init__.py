"""Strategies: who solves, preconditions and receives what, as plain data."""

from soframe.strategies.base import Strategy
from soframe.strategies.kaisa import CommOpt, HybridOpt, MemOpt
from soframe.strategies.placement import BlockPlacement, BlockWork, Placement

__all__ = [
    "BlockPlacement",
    "BlockWork",
    "CommOpt",
    "HybridOpt",
    "MemOpt",
    "Placement",
    "Strategy",
]
