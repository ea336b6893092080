"""The seam to `soframe.parallel`: only what is in use is imported, and only there."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import soframe

IMPORT = """\
import sys
import soframe
heavy = ("torch.distributed.tensor", "torch.distributed.fsdp", "deepspeed", "soframe.parallel")
print([name for name in sys.modules if name.startswith(heavy)])
"""


@pytest.mark.slow
def test_soframe_imports_no_dtensors() -> None:
    command = [sys.executable, "-c", IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
