"""Trust regions: optimizers whose step minimises an exact quadratic model of the loss.

An extension: frozen, and not imported by the core. From the core it uses, beside the base class
`soframe.losses.Loss` and `soframe.damping`:

- of `soframe.Preconditioner` the constructor, ``step``, ``observe(outputs, weight=)``, ``damp``,
  ``propose``, ``snapshot``, ``restore``, ``reset_batch``, ``takes_statistics``, ``updated``,
  ``blocks`` (of each block ``name`` and ``parameters``), ``backend``, ``state_dict``,
  ``load_state_dict`` and ``close``;
- of a backend ``world_size`` and ``on_paper``, and `soframe.comm.agreement` (``add_over_ranks``,
  ``mean_over_ranks``, ``fingerprint``, ``require_common``, ``require_no_failure``);
- `soframe.blocks.registration.unwrap`, `soframe.blocks.sharding.require_whole`,
  `soframe.capture.untraced.untraced`, `soframe.setup.building` (``choose_backend``, ``starting``),
  `soframe.state.saving.agree`, `soframe.registry.KINDS`, `soframe.settings`,
  `soframe.schedules.WarmInterval`, `soframe.diagnostics.Writer`, and of a method ``factors`` and
  ``state``.
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
