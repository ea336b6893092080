"""Measures how large and how entangled soframe is: a step traced, its functions, imports and lines.

    python -m tests.house [--json]

- A step of K-FAC with statistics and a solve (`soframe.Preconditioner`), one of SOAP and one of
  Muon (`soframe.Optimizer`) on a Conv2d and a Linear, batch 16, one process, the second of its
  kind: files and functions of soframe that are entered ("inner": lambdas and comprehensions), most
  frames of soframe on the stack, calls; of passes and `step()`, and of the next `step()` alone.
- Functions by cyclomatic complexity (ruff's C901), classes by methods and by attributes,
  constructors by parameters.
- Circles of imports, annotations included, among modules and among rooms (folders and files below
  `soframe/`), and imports of the extensions by the core.
- Lines of each room.

`BOUNDS` holds the largest values that tests/test_house.py accepts, and `TARGETS` where they go.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import soframe

ROOT = Path(soframe.__file__).parent
EXTENSIONS = ("parallel", "trust_region", "testing", "experiments")
ENTRANCES = ("__init__", "__main__", "cli")  # import everything, for users
HANDING_ON = ("preconditioner.Preconditioner", "curvature.Curvature")  # hand every call on
FACADES = (*HANDING_ON, "optimizer.Optimizer", "trust_region.optimizer.TrustRegion")  # of users

BOUNDS: dict[str, int] = {
    "kfac: files": 43,
    "kfac: functions": 272,
    "kfac: depth": 11,
    "kfac: calls": 755,
    "kfac: functions of step()": 190,
    "kfac: calls of step()": 540,
    "soap: files": 39,
    "soap: functions": 182,
    "soap: depth": 12,
    "soap: calls": 788,
    "soap: functions of step()": 182,
    "soap: calls of step()": 788,
    "muon: files": 36,
    "muon: functions": 136,
    "muon: depth": 13,
    "muon: calls": 245,
    "functions that check, require, refuse, ensure or forbid": 130,
    "functions above complexity 15": 0,
    "classes above 30 methods": 0,
    "classes above 25 methods": 5,
    "classes above 20 attributes": 3,
    "most parameters of a constructor": 19,
    "lines": 46184,
    "modules in circles": 0,
    "rooms in circles": 0,
    "imports of extensions by the core": 1,
}
TARGETS: dict[str, int] = {
    "kfac: files": 40,
    "kfac: functions": 190,
    "kfac: depth": 10,
    "soap: files": 36,
    "soap: functions": 130,
    "soap: depth": 10,
    "muon: files": 30,
    "muon: functions": 85,
    "muon: depth": 9,
    "functions above complexity 15": 0,
    "classes above 25 methods": 0,
    "classes above 20 attributes": 0,
    "lines": 35000,
    "modules in circles": 0,
    "rooms in circles": 0,
}


def trace(step: Callable[[], object]) -> dict[str, int]:
    """Call `step` and count what it enters of soframe, in this thread."""
    codes: set[CodeType] = set()
    calls = depth = deepest = 0
    root = f"{ROOT}/"

    def profile(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls, depth, deepest
        if event in ("call", "return") and frame.f_code.co_filename.startswith(root):
            entered = event == "call"  # a generator that goes on, too
            depth += 1 if entered else -1
            calls += entered
            deepest = max(deepest, depth)
            codes.add(frame.f_code)

    sys.setprofile(profile)
    try:
        step()
    finally:
        sys.setprofile(None)
    # Comprehensions, lambdas and generator expressions are named in angle brackets.
    inner = {code for code in codes if code.co_name.startswith("<")}
    return {
        "files": len({code.co_filename for code in codes}),
        "functions": len(codes - inner),
        "inner": len(inner),
        "depth": deepest,
        "calls": calls,
    }


def steps() -> dict[str, int]:
    """Trace a step of K-FAC, one of SOAP and one of Muon: `step()` alone, and with its passes."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(16, 3, 8, 8), torch.randint(10, (16,))
    found = {}
    for name in ("kfac", "soap", "muon"):
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(144, 10))
        often: dict[str, Any] = {"statistics_every": 1, "solve_every": 1}
        own: Any
        if name == "kfac":
            own = soframe.Preconditioner(model, lr=0.01, **often)
        else:
            own = soframe.Optimizer(model, method=name, lr=0.01, **often)

        def passes(model: nn.Module = model) -> None:
            model.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()

        def whole(passes: Callable[[], None] = passes, own: Any = own) -> None:
            passes()
            own.step()

        whole()
        found |= {f"{name}: {key}": value for key, value in trace(whole).items()}
        passes()
        found |= {f"{name}: {key} of step()": value for key, value in trace(own.step).items()}
    return found


def sources() -> dict[str, str]:
    """Return the text of each module by its dotted name below soframe; packages as `x.__init__`."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
        for path in sorted(ROOT.rglob("*.py"))
    }


@cache
def _tree(text: str) -> ast.Module:
    return ast.parse(text)


def shapes(files: dict[str, str]) -> tuple[dict[str, int], dict[str, Any]]:
    """Count functions and classes that are too large, and name the largest."""
    functions = Counter[str]()
    methods = Counter[str]()
    attributes = Counter[str]()
    parameters = Counter[str]()
    for file, text in files.items():
        for node in ast.walk(_tree(text)):
            if isinstance(node, ast.FunctionDef):
                functions[node.name] += 1
            if isinstance(node, ast.ClassDef):
                own = [one for one in node.body if isinstance(one, ast.FunctionDef)]
                methods[f"{file}.{node.name}"] = len({one.name for one in own})
                attributes[f"{file}.{node.name}"] = len(attributes_of(node))
                for one in own:
                    if one.name == "__init__":
                        count = len(one.args.posonlyargs + one.args.args + one.args.kwonlyargs)
                        parameters[f"{file}.{node.name}"] = count - 1
    config = "lint.mccabe.max-complexity=15"
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--ignore-noqa", "--select"]
    command += ["C901", "--config", config, "--output-format", "json", "--exit-zero", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    complex_ones = Counter[str]()
    for finding in json.loads(done.stdout):
        match = re.match(r"`(\w+)` is too complex \((\d+) ", finding["message"])
        assert match is not None
        place = Path(finding["filename"]).relative_to(ROOT).with_suffix("")
        complex_ones[".".join([*place.parts, match[1]])] = int(match[2])
    above_30 = {name for name, count in methods.items() if count > 30}
    for facade in FACADES:
        del methods[facade], attributes[facade]
    guards = re.compile(r"_*(check|require|refuse|ensure|forbid)")
    return {
        "functions": functions.total(),
        "functions that check, require, refuse, ensure or forbid": sum(
            count for name, count in functions.items() if guards.match(name)
        ),
        "functions above complexity 15": len(complex_ones),
        "classes above 30 methods": len(above_30.difference(HANDING_ON)),
        "classes above 25 methods": sum(count > 25 for count in methods.values()),
        "classes above 20 attributes": sum(count > 20 for count in attributes.values()),
        "most parameters of a constructor": max(parameters.values()),
    }, {
        "complexity": dict(complex_ones.most_common()),
        "methods": dict(methods.most_common(5)),
        "attributes": dict(attributes.most_common(5)),
        "parameters": dict(parameters.most_common(5)),
    }


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Return the names that a class declares or assigns, and that its methods set on `self`."""
    names: set[str] = set()
    for part in ast.walk(node):
        match part:
            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                names.add(name)
            case _:
                pass
    for statement in node.body:
        match statement:
            case ast.AnnAssign(ast.Name(name)) | ast.Assign([ast.Name(name)]):
                names.add(name)
            case _:
                pass
    return names


def _import_statements(body: list[ast.stmt], lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif lazy or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for field in ("body", "orelse", "handlers", "finalbody"):
                yield from _import_statements(getattr(node, field, []), lazy)


def imports(files: dict[str, str], lazy: bool = False) -> dict[str, set[str]]:
    """Return the modules of soframe that each imports, for annotations too.

    With `lazy`, imports inside functions count too.
    """
    names = {file.removesuffix(".__init__") for file in files}
    graph: dict[str, set[str]] = {}
    for file, text in files.items():
        package = ["soframe", *file.split(".")[:-1]]
        found = graph.setdefault(file.removesuffix(".__init__"), set())
        for node in _import_statements(_tree(text).body, lazy):
            base = ""
            if isinstance(node, ast.ImportFrom):
                start = package[: len(package) - node.level + 1] if node.level else []
                base = "".join(f"{part}." for part in [*start, *filter(None, [node.module])])
            for alias in node.names:
                top, _, inner = f"{base}{alias.name}".partition(".")
                while inner and inner not in names:  # a name that the module defines
                    inner = inner.rpartition(".")[0]
                if top == "soframe" and inner:
                    found.add(inner)
        found.discard(file.removesuffix(".__init__"))
    return graph


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the sets of nodes that reach each other, the largest first."""
    reached: dict[str, set[str]] = {}
    for node in graph:
        found: set[str] = set()
        front = {node}
        while front:
            front = {other for one in front for other in graph.get(one, ())} - found
            found |= front
        reached[node] = found
    groups = {frozenset(b for b in reached[a] if a in reached.get(b, ())) for a in graph}
    return sorted((sorted(group) for group in groups if len(group) > 1), key=lambda g: -len(g))


def arrows(files: dict[str, str]) -> tuple[dict[str, int], dict[str, Any]]:
    """Count circles of imports, and imports of the extensions by the core."""
    graph = {a: to for a, to in imports(files).items() if a not in ENTRANCES}
    rooms: dict[str, set[str]] = {}
    for module, to in graph.items():
        room = module.partition(".")[0]
        others = {name.partition(".")[0] for name in to} - {room, *ENTRANCES}
        rooms.setdefault(room, set()).update(others)
    outward = sorted(
        f"{module} -> {name}"
        for module, to in imports(files, lazy=True).items()
        if module.partition(".")[0] not in (*EXTENSIONS, *ENTRANCES)
        for name in to
        if name.partition(".")[0] in EXTENSIONS
    )
    modules, between = circles(graph), circles(rooms)
    return {
        "modules in circles": sum(map(len, modules)),
        "rooms in circles": sum(map(len, between)),
        "imports of extensions by the core": len(outward),
    }, {"circles": modules, "circles of rooms": between, "outward": outward}


def lines(files: dict[str, str]) -> dict[str, dict[str, int]]:
    """Count the lines of each room: code, docstrings, comments that stand alone, all."""
    rooms: dict[str, Counter[str]] = {}
    for file, text in files.items():
        room = rooms.setdefault(file.partition(".")[0], Counter())
        documented = set()
        for node in ast.walk(_tree(text)):
            match node:
                case ast.Expr(ast.Constant(str()), lineno=first, end_lineno=int(last)):
                    documented |= set(range(first, last + 1))  # also below an attribute
                case _:
                    pass
        comments = {
            token.start[0]
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#")
        }
        written = {n for n, line in enumerate(text.splitlines(), 1) if line.strip()}
        room["code"] += len(written - documented - comments)
        room["docstring"] += len(documented)
        room["comment"] += len(comments)
        room["all"] += text.count("\n")
    total = sum(rooms.values(), Counter[str]())
    return {name: dict(room) for name, room in [*sorted(rooms.items()), ("total", total)]}


def measure() -> tuple[dict[str, int], dict[str, Any]]:
    """Return the numbers that have bounds, and the details behind them."""
    files = sources()
    sizes, largest = shapes(files)
    graph, edges = arrows(files)
    sizes["lines"] = sum(text.count("\n") for text in files.values())
    return {**steps(), **sizes, **graph}, {**largest, **edges}


def main() -> None:
    """Print the measures as a table, or as JSON."""
    parser = argparse.ArgumentParser(description="measure the size and entanglement of soframe")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    numbers, details = measure()
    details["lines"] = lines(sources())
    if options.json:
        print(json.dumps({"numbers": numbers, **details}, indent=1))
        return
    print(f"{'':<58}{'now':>7}{'bound':>7}{'target':>8}")
    for name, value in numbers.items():
        print(f"{name:<58}{value:>7}{BOUNDS.get(name, ''):>7}{TARGETS.get(name, ''):>8}")
    for name in ("complexity", "methods", "attributes", "parameters"):
        print(f"\n{name}: " + ", ".join(f"{key} {value}" for key, value in details[name].items()))
    for name in ("circles", "circles of rooms", "outward"):
        print(f"\n{name}:", *details[name], sep="\n  ")
    kinds = ("all", "code", "docstring", "comment")
    print("\n" + f"{'room':<18}" + "".join(f"{kind:>11}" for kind in kinds))
    for name, room in details["lines"].items():
        print(f"{name:<18}" + "".join(f"{room.get(kind, 0):>11}" for kind in kinds))


if __name__ == "__main__":
    main()
