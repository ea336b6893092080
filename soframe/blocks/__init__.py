"""Blocks: parameters that are preconditioned together, and the report on all parameters."""

from soframe.blocks.block import Block

__all__ = ["Block"]
