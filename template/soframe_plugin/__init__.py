"""A layer helper, a method and a strategy for soframe."""

from soframe_plugin.layer import Scale, ScaleHelper
from soframe_plugin.method import SignMomentum
from soframe_plugin.strategy import FirstRank

__all__ = ["FirstRank", "Scale", "ScaleHelper", "SignMomentum"]
