"""Capture: which tensors belong to which call, and what they count."""

from soframe.capture.hooks import Capture, Probe

__all__ = ["Capture", "Probe"]
