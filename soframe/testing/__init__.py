"""The public test kit: exact curvature as a reference for approximations, and checks of parts."""

from soframe.testing.backends import check_backend, compare_weights
from soframe.testing.checks import check_layer_helper, check_solver, check_strategy
from soframe.testing.clips import check_clip
from soframe.testing.compare import compare, dense_preconditioned
from soframe.testing.damping import check_damping
from soframe.testing.dense import dense_fisher, sample_gradients
from soframe.testing.exactness import (
    BlockError,
    Cosines,
    block_errors,
    implied_curvature,
    natural_gradient_cosines,
)
from soframe.testing.layer_blocks import (
    layer_fisher,
    layer_matrix_basis,
    layer_parameters,
)
from soframe.testing.losses import check_loss
from soframe.testing.methods import check_method
from soframe.testing.oracle import GaussNewton, Oracle

__all__ = [
    "BlockError",
    "Cosines",
    "GaussNewton",
    "Oracle",
    "block_errors",
    "check_backend",
    "check_clip",
    "check_damping",
    "check_layer_helper",
    "check_loss",
    "check_method",
    "check_solver",
    "check_strategy",
    "compare",
    "compare_weights",
    "dense_fisher",
    "dense_preconditioned",
    "implied_curvature",
    "layer_fisher",
    "layer_matrix_basis",
    "layer_parameters",
    "natural_gradient_cosines",
    "sample_gradients",
]
