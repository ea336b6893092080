"""Capture: the inputs and output gradients of layer calls, and the samples that they count."""

from soframe.capture.hooks import Capture, LayerCall, Probe

__all__ = ["Capture", "LayerCall", "Probe"]
