"""Notebooks run from top to bottom, and are kept without outputs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
from pathlib import Path

import pytest

from tests.distributed.harness import run_ranks

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def cells(notebook: Path) -> list[str]:
    read = json.loads(notebook.read_text(encoding="utf-8"))
    assert read["nbformat"] == 4
    assert len({cell["id"] for cell in read["cells"]}) == len(read["cells"])
    code = [cell for cell in read["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    return ["".join(cell["source"]) for cell in code]


def run(rank: int, ranks: int, script: Path) -> str:
    """Run a script in this process, and return what it prints."""
    os.environ["MPLBACKEND"] = "Agg"
    os.chdir(script.parent)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(script), run_name="__main__")
    return printed.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_cells_run(notebook: Path, tmp_path: Path) -> None:
    script = tmp_path / "cells.py"
    script.write_text("\n\n".join(cells(notebook)), encoding="utf-8")
    [printed] = run_ranks(run, 1, script, backend=None, fresh=True)
    assert "K-FAC" in printed or "kfac" in printed


def test_there_is_a_notebook() -> None:
    assert NOTEBOOKS
