"""Blocks: what is preconditioned together, and what every parameter ends in."""

from soframe.blocks.block import Block

__all__ = ["Block"]
