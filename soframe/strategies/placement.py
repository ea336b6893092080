"""A placement is data: who owns, preconditions and receives what.

It is computed from shapes and a number of ranks alone, so the same object is executed by the
preconditioner, priced for thousands of ranks on a laptop, printed, and tested. Ranks are numbers
within the process group that the preconditioner was given. Its digest is compared across ranks
before the first collective.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from soframe.factors import FactorSpec
from soframe.layers.base import BlockShape
from soframe.text import format_table


@dataclass(frozen=True)
class BlockWork:
    """What has to be placed for one block.

    Attributes:
        name: The block's name.
        shape: The shape of its gradient matrix.
        factors: Its factors.
    """

    name: str
    shape: BlockShape
    factors: tuple[FactorSpec, ...]


@dataclass(frozen=True)
class BlockPlacement:
    """Who does what for one block.

    Attributes:
        block: The block's name.
        owners: The rank that solves each factor, in the order of the block's factors.
        gradient_workers: The ranks that hold the second-order data and precondition.
        sources: For each rank the gradient worker that it has the preconditioned gradient from;
            a gradient worker's source is itself.
    """

    block: str
    owners: tuple[int, ...]
    gradient_workers: tuple[int, ...]
    sources: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Who does what, for every block.

    Attributes:
        strategy: The strategy's name, for people.
        world_size: The number of ranks.
        work: What was placed.
        blocks: Where it went, in the order of ``work``.
        notes: What the strategy chose where it could not do what was asked, and why.
    """

    strategy: str
    world_size: int
    work: tuple[BlockWork, ...]
    blocks: tuple[BlockPlacement, ...]
    notes: tuple[str, ...] = ()

    def validate(self) -> None:
        """Check that the placement can be executed.

        Raises:
            ValueError: If it cannot; the message names the strategy and the block.
        """

        def require(condition: bool, block: str, problem: str) -> None:
            if not condition:
                raise ValueError(f"strategy {self.strategy!r}, block {block!r}: {problem}")

        ranks = range(self.world_size)
        names = [work.name for work in self.work]
        require(
            names == [block.block for block in self.blocks],
            "*",
            "the placement's blocks are not those of the work, in its order",
        )
        for work, block in zip(self.work, self.blocks, strict=True):
            workers = block.gradient_workers
            require(len(block.owners) == len(work.factors), work.name, "one owner per factor")
            require(all(r in ranks for r in block.owners), work.name, "an owner is not a rank")
            require(bool(workers), work.name, "no gradient worker")
            require(all(r in ranks for r in workers), work.name, "a worker is not a rank")
            require(len(set(workers)) == len(workers), work.name, "a worker is named twice")
            require(len(block.sources) == self.world_size, work.name, "one source per rank")
            for rank, source in enumerate(block.sources):
                require(source in workers, work.name, f"source of rank {rank} is no worker")
                require(
                    source == rank or rank not in workers,
                    work.name,
                    f"gradient worker {rank} must be its own source, not {source}",
                )

    @property
    def digest(self) -> bytes:
        """The placement's SHA-256; equal on all ranks, or they must not start."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).digest()

    def groups(self) -> list[tuple[int, ...]]:
        """Return every set of ranks that communicates by itself, sorted, each once.

        Returns:
            The sets of two or more ranks.
        """
        found = set()
        for block in self.blocks:
            for owner in block.owners:
                found.add(share_group(owner, block.gradient_workers))
            for worker in block.gradient_workers:
                found.add(exchange_group(worker, block.sources))
        return sorted(group for group in found if len(group) > 1)

    def __str__(self) -> str:
        rows = [
            (
                work.name,
                "x".join(str(size) for size in work.shape),
                " ".join(
                    f"{factor.name}:{owner}"
                    for factor, owner in zip(work.factors, block.owners, strict=True)
                ),
                _ranks(block.gradient_workers),
                " ".join(
                    f"{worker}->{_ranks(receivers)}"
                    for worker in block.gradient_workers
                    if (
                        receivers := [
                            r for r in exchange_group(worker, block.sources) if r != worker
                        ]
                    )
                )
                or "-",
            )
            for work, block in zip(self.work, self.blocks, strict=True)
        ]
        header = ("block", "groups x out x in", "owners", "gradient workers", "exchange")
        title = (
            f"placement {self.strategy!r} on {self.world_size} rank(s), {self.digest.hex()[:12]}"
        )
        return "\n".join([title, format_table(header, rows), *(f"note: {n}" for n in self.notes)])


def share_group(owner: int, gradient_workers: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks among which an owner shares second-order data.

    Args:
        owner: The rank that solved the factor.
        gradient_workers: The ranks that need it.

    Returns:
        The sorted ranks, the owner among them.
    """
    return tuple(sorted({owner, *gradient_workers}))


def exchange_group(worker: int, sources: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks among which a gradient worker exchanges the preconditioned gradient.

    Args:
        worker: The gradient worker.
        sources: The source of each rank.

    Returns:
        The sorted ranks, the worker among them.
    """
    return tuple(sorted({worker, *(rank for rank, s in enumerate(sources) if s == worker)}))


def _ranks(ranks: Sequence[int]) -> str:
    """Format ranks as ranges: ``0-3,6``."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ",".join("-".join(map(str, part)) for part in parts)
