"""The template of a plugin, copied, installed without a network and tested as its reader does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_template_installs_and_its_tests_pass(tmp_path: Path) -> None:
    sources = shutil.copytree(ROOT / "template", tmp_path / "plugin")
    target = tmp_path / "site"
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    install = [sys.executable, "-m", "pip", "install", "-q", *options, "--target", target, sources]
    subprocess.run(install, check=True, capture_output=True)
    # The package is found where pip has put it, not in the folder of its sources.
    shutil.rmtree(sources / "soframe_plugin")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=sources,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, target)))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 passed" in done.stdout
