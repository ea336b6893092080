"""Statistics: from calls to sums, from sums to running factors."""

from soframe.statistics.window import Statistics

__all__ = ["Statistics"]
