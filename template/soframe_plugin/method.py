"""The sign of the momentum (Bernstein et al., 2018)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import soframe
from soframe.layers import BlockShape
from soframe.methods import Direction, Given, WithoutFactors


@dataclass(frozen=True)
class SignMomentum(WithoutFactors):
    """The sign of a running mean of gradients.

    Attributes:
        beta: The decay of the mean.
    """

    bibtex = """\
@inproceedings{bernstein2018signsgd,
  author = {Bernstein, Jeremy and Wang, Yu-Xiang and Azizzadenesheli, Kamyar and Anandkumar, Animashree},
  title = {{signSGD}: Compressed Optimisation for Non-Convex Problems},
  booktitle = {Proceedings of the 35th International Conference on Machine Learning},
  year = {2018},
}
"""  # noqa: E501
    joint = False  # a weight and its bias are one block each
    elementwise = True  # each entry by itself

    beta: float = 0.9

    def state(self, shape: BlockShape) -> Mapping[str, soframe.TensorSpec]:
        """Return the momentum's shape, ``[groups, out, in]``."""
        return {"momentum": soframe.TensorSpec(tuple(shape))}

    def direct(self, step: Given) -> Direction:
        """Return the update and the new momentum, in new tensors."""
        momentum = step.state["momentum"].lerp(step.incoming, 1 - self.beta)
        return Direction(momentum.sign(), {"momentum": momentum})
