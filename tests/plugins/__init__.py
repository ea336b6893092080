"""Tests of components in packages of their own."""
