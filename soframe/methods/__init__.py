"""Curvature methods: which factors a block has, and what they do to a gradient."""

from soframe.methods.base import Call, Candidate, Direction, Given, Method
from soframe.methods.foof import FOOF
from soframe.methods.kfac import KFAC, KFACReduce

__all__ = [
    "FOOF",
    "KFAC",
    "Call",
    "Candidate",
    "Direction",
    "Given",
    "KFACReduce",
    "Method",
]
