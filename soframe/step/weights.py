"""What a block's sums weigh: the numbers that ranks add up before they add up the sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from soframe.blocks.block import Block
from soframe.methods.scaling import Contribution
from soframe.specs import FactorSpec


@dataclass(frozen=True)
class BlockWeights:
    """The weights of one block's sums, on one rank or added up over ranks.

    Attributes:
        factors: The divisor of each factor that calls make, in order.
        inputs: The weight of means over samples, of all ranks.
        outputs: The weight of means over rows, of the ranks that contribute.
        groups: The weights of means over the rows of each group; empty where all rows reach all.
    """

    factors: tuple[float, ...]
    inputs: float
    outputs: float
    groups: tuple[float, ...] = ()

    @classmethod
    def of_rank(
        cls, block: Block, contribution: Contribution, mine: Sequence[FactorSpec]
    ) -> BlockWeights:
        """Return what a rank's sums weigh.

        Args:
            block: The block.
            contribution: What the rank would contribute to all factors.
            mine: The factors that it contributes to.

        Returns:
            Its weights: zero in each factor that it does not contribute to, and in rows if it
            contributes to none. Its samples count all the same, as N is made of those of all ranks.
        """
        by_group = any(factor.mean_over == "group rows" for factor in mine)
        zeros = (0.0,) * block.shape.groups
        return cls(
            factors=tuple([contribution.weight(f) if f in mine else 0.0 for f in block.captured]),
            inputs=contribution.input_weight,
            outputs=contribution.output_weight if mine else 0.0,
            groups=((contribution.group_weights or zeros) if by_group else zeros)
            if block.unequal
            else (),
        )

    def numbers(self, *, some_contribute: bool) -> list[float]:
        """Return the weights as the numbers that travel.

        Args:
            some_contribute: Whether some ranks stay away from some factors. If not, the divisors
                follow from the other weights and do not travel.

        Returns:
            Those of each factor, if they travel; of inputs, of outputs and of each group.
        """
        factors = self.factors if some_contribute else ()
        return [*factors, self.inputs, self.outputs, *self.groups]

    @classmethod
    def read(cls, numbers: Iterator[float], block: Block, *, some_contribute: bool) -> BlockWeights:
        """Return a block's weights from numbers that have travelled.

        Args:
            numbers: The numbers, those of the block first; they are taken from it.
            block: The block.
            some_contribute: Whether some ranks stay away from some factors.

        Returns:
            The weights.
        """
        travelled = [next(numbers) for _ in block.captured] if some_contribute else None
        inputs, outputs = next(numbers), next(numbers)
        if travelled is None:
            both = Contribution(input_weight=inputs, output_weight=outputs)
            travelled = [both.weight(factor) for factor in block.captured]
        groups = range(block.shape.groups if block.unequal else 0)
        return cls(tuple(travelled), inputs, outputs, tuple(next(numbers) for _ in groups))

    @property
    def used(self) -> bool:
        """Whether any rank used the block. If not, it keeps its factors."""
        return self.outputs > 0 and all(divisor > 0 for divisor in self.factors)
