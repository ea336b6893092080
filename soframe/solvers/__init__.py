"""Solvers: from a factor to the second-order data that preconditions with it."""

from soframe.solvers.base import SolveFailedError, Solver, solve_safely
from soframe.solvers.eigen import Eigen
from soframe.solvers.inverse import Inverse
from soframe.solvers.relative import Relative

__all__ = ["Eigen", "Inverse", "Relative", "SolveFailedError", "Solver", "solve_safely"]
