"""The weights of a block's sums: numbers that ranks reduce before they reduce the sums."""

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
        """Return the weights of a rank's sums; ``mine`` are the factors that it contributes to."""
        by_group = any(factor.mean_over == "group rows" for factor in mine)
        zeros = (0.0,) * block.shape.groups
        return cls(
            factors=tuple([contribution.weight(f) if f in mine else 0.0 for f in block.captured]),
            # Samples of ranks that contribute to no factor are part of N; their rows do not count.
            inputs=contribution.input_weight,
            outputs=contribution.output_weight if mine else 0.0,
            groups=((contribution.group_weights or zeros) if by_group else zeros)
            if block.unequal
            else (),
        )

    def numbers(self, *, some_contribute: bool) -> list[float]:
        """Return the numbers for the all-reduce: divisors (see below), inputs, outputs, groups."""
        # If every rank contributes to all factors, their divisors follow from the other weights.
        factors = self.factors if some_contribute else ()
        return [*factors, self.inputs, self.outputs, *self.groups]

    @classmethod
    def read(cls, numbers: Iterator[float], block: Block, *, some_contribute: bool) -> BlockWeights:
        """Take a block's weights from the reduced numbers; the inverse of `numbers`."""
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
