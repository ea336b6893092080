"""The seam to `soframe.parallel`: only what is in use is imported, and only there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import soframe


@pytest.mark.slow
def test_the_core_names_no_framework() -> None:
    package, found = Path(soframe.__file__).parent, set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(
                n.startswith(("torch.distributed.tensor", "torch.distributed.fsdp")) for n in names
            ):
                found.add(file.relative_to(package).parts[0])
    assert found == {"parallel"}
