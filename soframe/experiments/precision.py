"""What is drawn and drawn upon in single precision, whatever torch's default dtype is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def single_precision() -> Iterator[None]:
    """Within it tensors are made in single precision where nobody says in which.

    Other dtypes draw other numbers from a generator.

    Yields:
        Nothing.
    """
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(default)
