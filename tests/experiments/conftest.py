"""The gallery, whose methods are registered for the tests that ask for it alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import pytest

from soframe.registry import KINDS

METHODS = KINDS["method"]._components
BEFORE = dict(METHODS)
GALLERY = importlib.import_module("experiments.gallery")
for name in METHODS.keys() - BEFORE.keys():
    del METHODS[name]


@pytest.fixture(scope="module")
def gallery() -> Iterator[ModuleType]:
    """The package."""
    with mock.patch.dict(METHODS, GALLERY.METHODS):
        yield GALLERY
