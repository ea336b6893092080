"""Solvers: from a factor to the second-order data that preconditions with it."""

from soframe.solvers.base import SolveFailedError, Solver, solve_safely
from soframe.solvers.eigen import Eigen
from soframe.solvers.inverse import Inverse

__all__ = ["Eigen", "Inverse", "SolveFailedError", "Solver", "solve_safely"]
