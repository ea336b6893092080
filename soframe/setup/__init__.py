"""Checks and choices before the first collective."""
