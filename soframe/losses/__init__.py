"""Losses: Hessians and predictive distributions, for Fisher matrices."""

from soframe.losses.base import Loss
from soframe.losses.classification import BinaryCrossEntropy, CrossEntropy
from soframe.losses.gaussian import Gaussian
from soframe.losses.squared import MeanSquaredError, SquaredError
from soframe.losses.sum import SumLoss, Term

__all__ = [
    "BinaryCrossEntropy",
    "CrossEntropy",
    "Gaussian",
    "Loss",
    "MeanSquaredError",
    "SquaredError",
    "SumLoss",
    "Term",
]
