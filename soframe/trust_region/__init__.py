"""How far a step may go: damping policies, the quadratic model, and the optimizer with both."""

from soframe.damping.adaptive import AdaptiveDamping
from soframe.damping.policies import (
    ConstantDamping,
    DampingPolicy,
    LevenbergMarquardt,
    RelativeDamping,
)
from soframe.step.kl_clip import kl_clip_factor
from soframe.step.norm_clip import norm_clip_factor
from soframe.trust_region.quadratic import Quadratic
from soframe.trust_region.readout import History, Readout, Scalars

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
    "kl_clip_factor",
    "norm_clip_factor",
]
