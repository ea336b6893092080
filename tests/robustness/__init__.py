"""Tests of what goes wrong in training."""
