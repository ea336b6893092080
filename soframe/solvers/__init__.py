"""Solvers: compute second-order data from factors, and precondition gradients with them.

Constructors raise a ValueError for a setting that is out of range.
"""

from soframe.kernels.precision import multiply
from soframe.solvers.around import Around
from soframe.solvers.base import Problem, Solver, retry, solve_stack, solve_stacks
from soframe.solvers.basis import Basis
from soframe.solvers.eigen import Eigen
from soframe.solvers.inverse import Inverse
from soframe.solvers.lazy import Lazy
from soframe.solvers.newton_schulz import NewtonSchulz
from soframe.solvers.orthogonal_iteration import OrthogonalIteration
from soframe.solvers.root import Root
from soframe.solvers.scaled import Relative

__all__ = [
    "Around",
    "Basis",
    "Eigen",
    "Inverse",
    "Lazy",
    "NewtonSchulz",
    "OrthogonalIteration",
    "Problem",
    "Relative",
    "Root",
    "Solver",
    "multiply",
    "retry",
    "solve_stack",
    "solve_stacks",
]
