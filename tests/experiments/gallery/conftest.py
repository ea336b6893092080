"""All tests of this folder have the gallery's methods."""

from types import ModuleType

import pytest


@pytest.fixture(scope="module", autouse=True)
def registered(gallery: ModuleType) -> None:
    """Register them."""
