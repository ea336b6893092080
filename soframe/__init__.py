"""soframe: second-order optimisation in PyTorch, distributed, every part pluggable.

Two lines precondition the gradients of a model for any optimizer::

    preconditioner = soframe.Preconditioner(model, optimizer=optimizer)
    ...
    loss.backward()
    preconditioner.step()
    optimizer.step()
"""

import importlib
from typing import TYPE_CHECKING, Any

from soframe import (
    clips,
    comm,
    layers,
    losses,
    methods,
    schedules,
    solvers,
    strategies,
)
from soframe.auto import Auto
from soframe.blocks.home import GradientHome, PlainGrad
from soframe.blocks.report import Report
from soframe.clips import Clip
from soframe.comm import Backend
from soframe.curvature import Curvature
from soframe.layers import LayerHelper
from soframe.losses import Loss
from soframe.methods import Method
from soframe.optimizer import Optimizer
from soframe.preconditioner import Preconditioner
from soframe.registry import Registry, available, register
from soframe.settings import Clips, Distribution, Statistics
from soframe.solvers import Solver
from soframe.specs import Cut, FactorSpec, Shards, TensorSpec
from soframe.strategies import Placement, Strategy

__version__ = "0.1.0"

# Type checkers see plain imports; at run time these modules load on first access.
if TYPE_CHECKING:
    from soframe import checkpoint as checkpoint
    from soframe import continual as continual
    from soframe import factors as factors
    from soframe import influence as influence
    from soframe import laplace as laplace
    from soframe import merging as merging
    from soframe import testing as testing
    from soframe import trust_region as trust_region
    from soframe.planning.recommendation import Recommendation as Recommendation
    from soframe.planning.recommendation import recommend as recommend
    from soframe.trust_region import StochasticTrustRegion as StochasticTrustRegion
    from soframe.trust_region import TrustRegion as TrustRegion
else:
    _MODULES = (
        *("checkpoint", "continual", "factors", "influence"),
        *("laplace", "merging", "testing", "trust_region"),
    )
    _MEMBERS = {
        "Recommendation": "soframe.planning.recommendation",
        "StochasticTrustRegion": "soframe.trust_region",
        "TrustRegion": "soframe.trust_region",
        "recommend": "soframe.planning.recommendation",
    }

    def __getattr__(name: str) -> Any:
        """Import rarely used modules on first access: DCP, component checks, advice, extensions."""
        if name in _MODULES:
            return importlib.import_module(f"soframe.{name}")
        if name in _MEMBERS:
            return getattr(importlib.import_module(_MEMBERS[name]), name)
        raise AttributeError(f"module 'soframe' has no attribute {name!r}")

    def __dir__() -> list[str]:
        """List the names that are imported on first access with the others."""
        return sorted({*globals(), *_MODULES, *_MEMBERS})


__all__ = [
    "Auto",
    "Backend",
    "Clip",
    "Clips",
    "Curvature",
    "Cut",
    "Distribution",
    "FactorSpec",
    "GradientHome",
    "LayerHelper",
    "Loss",
    "Method",
    "Optimizer",
    "Placement",
    "PlainGrad",
    "Preconditioner",
    "Recommendation",
    "Registry",
    "Report",
    "Shards",
    "Solver",
    "Statistics",
    "StochasticTrustRegion",
    "Strategy",
    "TensorSpec",
    "TrustRegion",
    "available",
    "clips",
    "comm",
    "continual",
    "factors",
    "influence",
    "laplace",
    "layers",
    "losses",
    "merging",
    "methods",
    "recommend",
    "register",
    "schedules",
    "solvers",
    "strategies",
    "trust_region",
]
