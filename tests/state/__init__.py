"""Tests of saving and loading."""
