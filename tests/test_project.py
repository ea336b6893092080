"""What holds for the project as a whole: its imports and its version."""

import ast
import contextlib
import graphlib
import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
import tomllib
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._device import _device_constructors

import soframe
from soframe.checks.warning import warn

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
RUNTIME = {"torch", "numpy", "scipy"}

# What the files of soframe import themselves; and all modules that are there in the end. The first
# says what soframe needs: numpy, scipy and torch try some packages of others and do without.
IMPORTED = """\
import builtins, json, sys
direct, plain = set(), builtins.__import__
def spy(name, globals=None, locals=None, fromlist=(), level=0):
    if level == 0 and str((globals or {}).get("__name__")).partition(".")[0] == "soframe":
        direct.add(name.partition(".")[0])
    return plain(name, globals, locals, fromlist, level)
builtins.__import__ = spy
import soframe
print(json.dumps([sorted(direct), sorted(sys.modules)]))
"""


def name_of(requirement: str) -> str:
    """The distribution that a requirement names, in the spelling of the packaging standard."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found[0]).lower()


def test_runtime_dependencies_are_few() -> None:
    assert {name_of(r) for r in PROJECT["project"]["dependencies"]} == RUNTIME


@pytest.mark.slow
def test_import_needs_the_runtime_dependencies_only() -> None:
    command = [sys.executable, "-c", IMPORTED]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    direct, modules = (set(names) for names in json.loads(done.stdout))
    # The seam to `soframe.parallel`: only what is in use is imported.
    heavy = ("torch.distributed.tensor", "torch.distributed.fsdp", "deepspeed", "soframe.parallel")
    assert not [name for name in modules if name.startswith(heavy)]
    loaded = {name.partition(".")[0] for name in modules}
    assert direct <= RUNTIME | {"soframe"} | sys.stdlib_module_names
    owners = importlib.metadata.packages_distributions()
    extra = {name_of(r) for r in PROJECT["project"]["optional-dependencies"]["cli"]}
    assert not {m for m in loaded if extra & {name_of(owner) for owner in owners.get(m, [])}}


def test_types_are_packaged() -> None:
    assert Path(soframe.__file__).with_name("py.typed").is_file()
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["soframe"]


def test_hardware_profiles_are_packaged() -> None:
    folder = Path(soframe.__file__).parent
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["soframe"]
    packaged = {path for pattern in patterns for path in folder.glob(pattern)}
    assert packaged >= set((folder / "planning" / "profiles").iterdir())


def test_version_is_the_same_everywhere() -> None:
    version = PROJECT["project"]["version"]
    assert importlib.metadata.version("soframe") == version
    assert getattr(soframe, "__version__", version) == version
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)[0] == version
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [version]


def test_constraints_pin_every_dependency_exactly() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    extras = PROJECT["project"]["optional-dependencies"].values()
    needed = {name_of(r) for r in PROJECT["project"]["dependencies"]}
    needed |= {name_of(requirement) for extra in extras for requirement in extra}
    pinned = {name_of(pin) for pin in pins}
    assert needed - {"soframe"} <= pinned
    assert not {name for name in pinned if re.search("nvidia|cuda|triton|torchvision", name)}


def test_public_names_exist_once_and_are_documented() -> None:
    names = soframe.__all__
    assert len(set(names)) == len(names)
    undocumented = []
    for name in names:
        value = getattr(soframe, name)
        if inspect.ismodule(value) or inspect.isclass(value) or callable(value):
            text = value.__doc__ or ""
            # A dataclass without a docstring is given its signature.
            if not text.strip() or text.startswith(f"{name}("):
                undocumented.append(name)
    assert not undocumented


@pytest.mark.parametrize("name", ["checkpoint", "testing"])
def test_modules_that_are_imported_once_they_are_asked_for(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(soframe, name, raising=False)  # as if nobody had imported it
    assert getattr(soframe, name) is sys.modules[f"soframe.{name}"]


def test_dir_lists_names_that_are_not_imported_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {*soframe.__all__, "checkpoint", "testing"}
    for name in (*soframe._MODULES, *soframe._MEMBERS):
        monkeypatch.delitem(vars(soframe), name, raising=False)
    assert not names <= set(vars(soframe))
    assert names <= set(dir(soframe))


def rooms() -> dict[str, set[str]]:
    """Which folders, and files of the root, each of them imports."""
    package = ROOT / "soframe"
    found: dict[str, set[str]] = {}
    for file in package.rglob("*.py"):
        parts = file.relative_to(package).with_suffix("").parts
        if parts[0] in ("__init__", "__main__"):
            continue  # what users meet: it has everything
        imports = found.setdefault(parts[0], set())
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith(
                "soframe"
            ):
                continue
            inner = (node.module or "").split(".")[1:2] or [alias.name for alias in node.names]
            imports.update(name for name in inner if name != parts[0])
    return found


@pytest.mark.slow
def test_no_room_imports_one_that_imports_it() -> None:
    """Lazy imports count too."""
    graph = rooms()
    assert len(graph) > 15
    order = list(graphlib.TopologicalSorter(graph).static_order())
    assert order.index("layers") < order.index("methods") < order.index("preconditioner")


def attributes(tree: ast.AST) -> set[str]:
    """The attributes that the classes of a file give their instances."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
            found.update(ast.unparse(one.target) for one in fields)
        stored = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if stored and ast.unparse(node.value) == "self":
            found.add(node.attr)
    return found


@pytest.mark.slow
def test_no_file_writes_attributes_of_another_files_classes() -> None:
    """What an object remembers changes by its own methods."""
    package = ROOT / "soframe"
    trees = {file: ast.parse(file.read_text("utf-8")) for file in package.rglob("*.py")}
    of_file = {file: attributes(tree) for file, tree in trees.items()}
    allowed = {
        # torch's own: a switch of its libraries, the memory of a parameter.
        ("twice.py", "library.enabled"),
        ("forward.py", "parameter.data"),
        ("deepspeed.py", "parameter.data"),
        # DeepSpeed's optimizers have no hooks before their steps.
        ("transformers.py", "optimizer.step"),
        # A parcel is filled by its sender.
        ("updates.py", "parcel.tensors"),
        ("solves.py", "job.tensors"),
    }
    written = []
    for file, tree in trees.items():
        elsewhere = set().union(*(of_file[other] for other in trees if other != file))
        for node in ast.walk(tree):
            if not (isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)):
                continue
            foreign = node.attr in elsewhere and node.attr not in of_file[file]
            plain = "record." in ast.unparse(node)  # the state of a block, which the step writes
            if foreign and not plain and (file.name, ast.unparse(node)) not in allowed:
                written.append(f"{file.relative_to(ROOT)}:{node.lineno}: {ast.unparse(node)}")
    assert not written


MAKERS = {maker.__name__.removeprefix("fft_") for maker in _device_constructors()}
"""What makes a tensor on the default device unless it is told another one."""


def without_a_device(tree: ast.AST) -> list[tuple[int, str]]:
    """Where a file makes tensors, or generators of random numbers, and names no device."""
    found, told = [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            text = ast.unparse(node.func)
            if {"device", None} & {keyword.arg for keyword in node.keywords}:  # None: ``**options``
                told.add(node.func)
            elif text == "torch.Generator":
                found.append((node.lineno, text))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            # By their bare names they would not be found.
            bare = [alias.name for alias in node.names if alias.name in MAKERS]
            found += [(node.lineno, f"from {node.module} import {name}") for name in bare]
        elif isinstance(node, ast.Attribute) and node not in told:  # a call comes before its name
            text = ast.unparse(node)
            if text.startswith("torch.") and node.attr in MAKERS:
                found.append((node.lineno, text))
    return found


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.zeros(3, device='cpu') + torch.eye(3, device=x.device)", 0),
        ("torch.zeros(3, **options) + x.new_zeros(3) + torch.zeros_like(x)", 0),
        ("def f(generator: torch.Generator): ...", 0),
        ("torch.Generator()", 1),
        ("torch.tensor([1.0])", 1),
        ("map(torch.tensor, rows)", 1),
        ("x + torch.zeros(torch.tensor(3), device='cpu')", 1),
        ("torch.fft.rfftfreq(3)", 1),
        ("from torch import Tensor, zeros", 1),
    ],
)
def test_tensors_without_a_device_are_found(source: str, found: int) -> None:
    assert len(without_a_device(ast.parse(source))) == found


@pytest.mark.slow
def test_every_tensor_is_made_on_a_device_that_is_named() -> None:
    """Whatever the user's default device is: see tests/test_default_device.py."""
    package = ROOT / "soframe"
    found = []
    for file in sorted(package.rglob("*.py")):
        if file.relative_to(package).parts[0] == "testing":
            continue  # chooses devices itself
        for line, made in without_a_device(ast.parse(file.read_text(encoding="utf-8"))):
            found.append(f"{file.relative_to(ROOT)}:{line}: {made}")
    assert not found, "name the device, that of what it works with or device='cpu'"


# -- warnings --------------------------------------------------------------------------------------


def test_warnings_name_the_line_of_the_user() -> None:
    """Also where a hook or a context of torch or Python is between it and soframe."""
    of_soframe: dict[str, Any] = {"__name__": "soframe.example", "warn": warn}
    exec("def hook(text, *_):\n    warn(text)", of_soframe)
    model = nn.Linear(2, 2)
    model.register_forward_hook(partial(of_soframe["hook"], "a call"))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        warn("a line")
        model(torch.zeros(1, 2))
        with contextlib.ExitStack() as stack:
            stack.callback(of_soframe["hook"], "an end")
    told = [(str(warning.message), warning.filename) for warning in warned]
    assert told == [(f"soframe: {name}", __file__) for name in ("a line", "a call", "an end")]
    lines = [warning.lineno - warned[0].lineno for warning in warned]
    assert lines == [0, 1, 2]


def test_no_other_file_warns_by_itself() -> None:
    """It would have to count the functions between it and the user's line."""
    files = [
        file
        for file in (ROOT / "soframe").rglob("*.py")
        if "warnings.warn(" in file.read_text("utf-8")
    ]
    assert files == [ROOT / "soframe/checks/warning.py"]
