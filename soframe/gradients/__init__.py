"""Gradients: as they come in, what becomes of them, and how long a step is."""
