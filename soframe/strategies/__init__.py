"""Strategies: assign solves, preconditioning and receivers to ranks, as plain data."""

from soframe.strategies.balance import assign, compute_cost, memory_cost, turns
from soframe.strategies.base import Circumstances, Strategy
from soframe.strategies.kaisa import CommOpt, HybridOpt, MemOpt
from soframe.strategies.placement import Placement
from soframe.strategies.plan import LocalPlan
from soframe.strategies.sharded import OwnerLocal, Sharded
from soframe.strategies.work import BlockPlacement, BlockWork, Reduction

__all__ = [
    "BlockPlacement",
    "BlockWork",
    "Circumstances",
    "CommOpt",
    "HybridOpt",
    "LocalPlan",
    "MemOpt",
    "OwnerLocal",
    "Placement",
    "Reduction",
    "Sharded",
    "Strategy",
    "assign",
    "compute_cost",
    "memory_cost",
    "turns",
]
