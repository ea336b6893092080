"""How far a step may go: damping policies, the quadratic model, and the optimizer with both."""

from soframe.trust_region.adaptive import AdaptiveDamping
from soframe.trust_region.damping import (
    ConstantDamping,
    DampingPolicy,
    LevenbergMarquardt,
    RelativeDamping,
)
from soframe.trust_region.kl_clip import kl_clip_factor
from soframe.trust_region.norm_clip import norm_clip_factor
from soframe.trust_region.quadratic import Quadratic

__all__ = [
    "AdaptiveDamping",
    "ConstantDamping",
    "DampingPolicy",
    "LevenbergMarquardt",
    "Quadratic",
    "RelativeDamping",
    "kl_clip_factor",
    "norm_clip_factor",
]
