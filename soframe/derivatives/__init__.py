"""Derivatives of a closure along directions."""
