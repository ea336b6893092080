"""A release: its wheel, built from the source distribution and installed alone, and its extras."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

# Prints the files of the installed soframe, and what its metadata declare. The packages of the
# extra are made impossible to import, since those of the test environment are on the path.
INSTALLED = """\
import importlib.metadata, json, sys
from pathlib import Path
sys.modules.update(dict.fromkeys(sys.argv[1:]))
import soframe
from soframe.citations import cite
from soframe.planning.hardware import Hardware, names
cite("kfac")
for name in names():
    Hardware.load(name)
root = Path(soframe.__file__).parent
files = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
metadata = importlib.metadata.metadata("soframe")
extras = metadata.get_all("Provides-Extra")
print(json.dumps([str(root), soframe.__version__, metadata["Version"], extras, files]))
"""


def run(*command: object, cwd: Path) -> str:
    # With the checkout on the path pip would find soframe installed, and leave it at that.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments = [str(part) for part in command]
    done = subprocess.run(
        arguments, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, into: Path) -> Path:
    """Build a wheel or an sdist with the backend alone: isolation would download it."""
    code = f"import setuptools.build_meta as b, sys; b.build_{kind}(sys.argv[1])"
    run(sys.executable, "-c", code, into, cwd=source)
    (built,) = into.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


@pytest.mark.slow
def test_the_source_distribution_is_the_checkout(tmp_path: Path) -> None:
    """With its tests, which run there, and what they read; hidden files aside."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    source = tmp_path / "source"
    tracked = run("git", "ls-files", cwd=ROOT).splitlines()
    visible = {name for name in tracked if not name.startswith(".")}
    for name in visible:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    with tarfile.open(build("sdist", source, tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"tests/conftest.py", "CHANGELOG.md", "CITATION.cff", "Makefile"} <= visible
    assert visible <= names


@pytest.mark.slow
def test_a_wheel_of_the_source_distribution_is_whole(tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(ROOT / "soframe", source / "soframe", ignore=shutil.ignore_patterns("*.pyc"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    with tarfile.open(build("sdist", source, tmp_path)) as archive:
        archive.extractall(tmp_path, filter="data")
    wheel = build("wheel", tmp_path / f"soframe-{PROJECT['version']}", tmp_path)

    clean = tmp_path / "clean"
    venv.create(clean, with_pip=False, symlinks=True)
    python = clean / "bin" / "python"
    install = ("--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", wheel)
    run(sys.executable, "-m", "pip", "--python", python, "install", *install, cwd=tmp_path)
    # torch is too large to install twice. Editable packages are found by files that this ignores.
    (packages,) = (clean / "lib").glob("python*/site-packages")
    (packages / "test.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")

    blocked = [Requirement(r).name for r in PROJECT["optional-dependencies"]["cli"]]
    root, version, declared, extras, files = json.loads(
        run(python, "-IB", "-c", INSTALLED, *blocked, cwd=tmp_path)
    )
    assert Path(root) == packages / "soframe"
    assert version == declared == PROJECT["version"]
    assert set(extras) == set(PROJECT["optional-dependencies"])
    packaged = (path for path in (source / "soframe").rglob("*") if path.is_file())
    assert set(files) == {str(path.relative_to(source / "soframe")) for path in packaged}
    assert {"py.typed", "references.bib", "planning/profiles/h100-ib.json"} <= set(files)
    assert (clean / "bin" / "soframe").is_file()


def test_extras_name_requirements_and_extras_that_exist() -> None:
    extras = PROJECT["optional-dependencies"]
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pinned = {canonicalize_name(name) for name in re.findall(r"^([\w.-]+)==", pins, re.MULTILINE)}
    for extra, lines in extras.items():
        for requirement in map(Requirement, lines):
            if requirement.name == PROJECT["name"]:
                assert requirement.extras, extra
                assert requirement.extras <= set(extras) - {extra}, extra
            else:
                assert canonicalize_name(requirement.name) in pinned, requirement
