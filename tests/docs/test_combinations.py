"""The page of combinations is what trying them gives."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import soframe
from tests.methods.table import FISHERS, PAGE, STRATEGIES

ROOT = Path(__file__).resolve().parents[2]


def test_every_method_and_strategy_is_in_every_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for section in ("Layers", "Fishers", "Strategies"):
        body = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
        first = re.findall(r"^\| ((?:`[^`]+`(?:, )?)+) \|", body, flags=re.MULTILINE)
        listed = re.findall("`([^`]+)`", " ".join(first))
        if first or "Every method works" not in body:
            assert sorted(listed) == sorted(soframe.available("method"))
        names = FISHERS if section == "Fishers" else STRATEGIES if section == "Strategies" else ()
        assert all(name in body for name in names)


@pytest.mark.slow
@pytest.mark.thorough
def test_the_page_is_what_comes_out() -> None:
    """In a process of its own, where nothing else is registered."""
    command = [sys.executable, "-m", "tests.methods.table"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    page = PAGE.read_text(encoding="utf-8")
    assert done.stdout == page, "run python -m tests.methods.table --write"
