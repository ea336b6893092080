"""Solving: when factors become second-order data, and how these reach gradient workers."""

from soframe.solving.solution import Solution

__all__ = ["Solution"]
