"""The gallery's methods, registered for the tests of a module that asks for them."""

from collections.abc import Iterator
from types import ModuleType
from unittest import mock

import pytest

from tests.gallery import GALLERY, METHODS


@pytest.fixture(scope="module")
def gallery() -> Iterator[ModuleType]:
    """The package."""
    with mock.patch.dict(METHODS, GALLERY.METHODS):
        yield GALLERY
