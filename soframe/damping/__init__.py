"""Damping policies."""
