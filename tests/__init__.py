"""Tests of soframe; the folders mirror the package."""
