"""Every registered method, on every number of ranks and under every strategy, is one process."""

from __future__ import annotations

import pytest

from soframe import available
from soframe.testing import check_method
from tests.distributed.harness import run_ranks


@pytest.mark.parametrize("name", sorted(available("method")))
def test_one_process(name: str) -> None:
    """In micro-batches, with an instance for each layer, and resumed in the middle."""
    check_method(name, ranks=())


@pytest.mark.parametrize("name", sorted(available("method")))
def test_ranks_are_one_process(name: str) -> None:
    """A new registration enters by itself."""
    check_method(name, launch=run_ranks)
