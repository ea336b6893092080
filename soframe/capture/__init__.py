"""Capture: the inputs and output gradients of layer calls, and the samples that they count."""
