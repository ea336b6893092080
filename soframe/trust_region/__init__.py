"""Trust regions: optimizers whose step minimises an exact quadratic model of the loss.

An extension: frozen, and not imported by the core. Of `soframe.Preconditioner` it uses, beside the
methods of every training loop, ``damp``, ``propose``, ``snapshot``, ``restore``, ``reset_batch``,
``takes_statistics``, ``updated`` and ``blocks``.
"""

from soframe.damping.policies import (
    ConstantDamping,
    DampingPolicy,
    LevenbergMarquardt,
    RelativeDamping,
)
from soframe.trust_region.adaptive import AdaptiveDamping
from soframe.trust_region.optimizer import TrustRegion
from soframe.trust_region.quadratic import Quadratic
from soframe.trust_region.readout import History, Readout, Scalars
from soframe.trust_region.stochastic import StochasticTrustRegion

__all__ = [
    "AdaptiveDamping",
    "ConstantDamping",
    "DampingPolicy",
    "History",
    "LevenbergMarquardt",
    "Quadratic",
    "Readout",
    "RelativeDamping",
    "Scalars",
    "StochasticTrustRegion",
    "TrustRegion",
]
