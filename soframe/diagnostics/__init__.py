"""Diagnostics of a run: metrics as plain data, spectra of factors, scalars for loggers."""

from soframe.diagnostics.logger import ScalarLogger, Writer
from soframe.diagnostics.metrics import scalars

__all__ = ["ScalarLogger", "Writer", "scalars"]
