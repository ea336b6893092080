"""AdaFisher: momentum over the diagonal of K-FAC's factors (Martins Gomes et al., 2025).

"AdaFisher: Adaptive Second Order Optimization via Fisher Information", arXiv 2405.16397. With
running averages h of the squares of a layer's inputs and s of its output gradients, both brought to
``[0, 1]`` by their least and largest entries::

    m <- b m + (1 - b) G        update = m / (1 - b^t) / (s h^T + floor),  [out, in]

without a root. The normalisation makes the scales of h and s, and so the convention of the paper's
two decays, immaterial.

To reproduce: accuracy of image classifiers, and perplexity of a language model, against epochs and
time, beside Adam, K-FAC, AdaHessian and Shampoo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

import soframe
from soframe.layers import BlockShape
from soframe.methods import Call, Direction, Given, Method
from soframe.methods.base import Addend
from soframe.specs import VALUE, FactorSpec


@soframe.register("method", "adafisher")
@dataclass(frozen=True)
class AdaFisher(Method):
    """Momentum, divided by a normalised diagonal of K-FAC's curvature.

    Attributes:
        beta: The decay of the momentum.
        factor_beta: The decay of h and s.
        floor: Added to their product.
    """

    bibtex = """\
@inproceedings{martinsgomes2025adafisher,
  author = {Martins Gomes, Damien and Zhang, Yanlei and Belilovsky, Eugene and Wolf, Guy and Hosseini, Mahdi S.},
  title = {{AdaFisher}: Adaptive Second Order Optimization via {F}isher Information},
  booktitle = {International Conference on Learning Representations},
  year = {2025},
  eprint = {2405.16397},
  archiveprefix = {arXiv},
}
"""  # noqa: E501
    clipped = damped = False

    beta: float = 0.9
    factor_beta: float = 0.92
    floor: float = 1e-3

    def factors(self, shape: BlockShape) -> tuple[FactorSpec, ...]:
        groups, out, into = shape
        settings: Any = {"kind": "diagonal", "decay": self.factor_beta}
        inputs = FactorSpec("h", "right", groups, into, **settings)
        outputs = FactorSpec("s", "left", groups, out, **settings)
        return inputs, outputs

    def statistics(self, call: Call) -> Mapping[str, Addend]:
        diagonal = call.up_to(0)  # moments of sides that are longer are their diagonals
        moments: dict[str, Addend] = {"s": diagonal.output_moment}
        if call.inputs is not None:
            moments["h"] = diagonal.input_moment
        return moments

    def solver(self, factor: FactorSpec, default: soframe.Solver) -> None:
        return None

    def state(self, shape: BlockShape) -> Mapping[str, soframe.TensorSpec]:
        return {"momentum": soframe.TensorSpec(tuple(shape))}

    def direct(self, step: Given) -> Direction:
        momentum = step.state["momentum"].lerp(step.incoming, 1 - self.beta)
        state = {"momentum": momentum}
        if not {"h", "s"} <= step.data.keys():
            return Direction(step.incoming.clone(), state)
        columns = normalised(step.data["h"][VALUE]).unsqueeze(1)  # [groups, 1, in]
        rows = normalised(step.data["s"][VALUE]).unsqueeze(2)  # [groups, out, 1]
        correction = 1 - self.beta ** (step.updates + 1)
        return Direction(momentum / correction / (rows * columns + self.floor), state)


def normalised(values: Tensor) -> Tensor:
    """Bring ``[groups, n]`` to ``[0, 1]``; equal entries are one."""
    least, largest = values.aminmax(dim=1, keepdim=True)
    width = largest - least
    return ((values - least) / width.where(width > 0, 1.0)).where(width > 0, 1.0)
