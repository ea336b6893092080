"""Mutation testing: break the code by operators over its syntax tree, each must make a test fail.

    python -m tests.mutants --file soframe/methods/eva.py --sample 10 --seed 1

`mutants.toml` maps each source file that holds mathematics or agreement between ranks to the tests
that must notice, and lists the accepted survivors with their reasons. Each mutant is applied,
alone, to a copy of the project, where its tests run until the first failure. The test that fails
then runs without the mutant, where it has to pass.

Neither mutmut nor cosmic-ray does this: mutmut replaces each method by a trampoline, which breaks
code that asks whether a subclass overrides a method, and needs a recorded run of the whole suite;
cosmic-ray has one test command for all files and imports torch anew for each mutant.
"""

import argparse
import ast
import bisect
import importlib
import importlib.util
import itertools
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Imported once, before the forks; a child imports the project itself anew.
LIBRARIES = ("torch", "torch.distributed", "torch._dynamo", "scipy.linalg")
NOT_COPIED = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "_build", "build", "runs")
PASSED, FAILED, ENDLESS, NO_VERDICT = 0, 1, -1, 9  # of pytest, and two of ours
LIMIT = 1800  # seconds of a run; a test that hangs fails before, by pytest's own limit

SWAPPED: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Lt: ("<", ">="),
    ast.LtE: ("<=", ">"),
    ast.Gt: (">", "<="),
    ast.GtE: (">=", "<"),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
PAIRS = "add/sub add_/sub_ mul/div mul_/div_ max/min maximum/minimum amax/amin any/all sum/mean"
SWAPPED_NAMES = {
    name: other
    for pair in PAIRS.split()
    for name, other in (pair.split("/"), reversed(pair.split("/")))
}
# Annotations, decorators, assertions (`strict` of a zip is one) and the texts of errors are not
# behaviour.
SKIPPED_NODES = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom)
SKIPPED_FIELDS = {"annotation", "returns", "decorator_list", "type_params"}


@dataclass(frozen=True)
class Mutant:
    """One broken file: the bytes from `start` to `end` of `file` become `new`."""

    file: str
    line: int
    start: int
    end: int
    old: str
    new: str
    source: str
    """The line in which the mutant begins, without indentation."""

    @property
    def change(self) -> str:
        """The change on one line: `old -> new`."""
        return f"{' '.join(self.old.split())} -> {' '.join(self.new.split())}"

    def apply(self, text: str) -> str:
        """Return the text of the file with the change."""
        data = text.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()


Change = tuple[int, int, str]  # the bytes from start to end become this text


def generate(file: str, text: str) -> list[Mutant]:
    """Return the mutants of a file that compile, in the order of the text."""
    mutants = []
    for mutant in candidates(file, text):
        with suppress(SyntaxError):
            compile(mutant.apply(text), file, "exec", ast.PyCF_ONLY_AST)
            mutants.append(mutant)
    return mutants


def candidates(file: str, text: str) -> Iterator[Mutant]:
    """Yield the mutants of a file, some of which may not compile, in the order of the text."""
    data = text.encode()
    lines = data.splitlines(keepends=True)
    starts = list(itertools.accumulate(map(len, lines), initial=0))
    for start, end, new in sorted(set(_changes(ast.parse(text), data, starts))):
        line = bisect.bisect(starts, start)
        source = lines[line - 1].decode().strip()
        mutant = Mutant(file, line, start, end, data[start:end].decode(), new, source)
        if mutant.old != new:  # not an empty list or dict
            yield mutant


def _changes(node: ast.AST, data: bytes, starts: list[int]) -> Iterator[Change]:
    """Yield the changes of all nodes below one."""
    is_zip = isinstance(node, ast.Call) and ast.unparse(node.func) == "zip"
    for field, value in ast.iter_fields(node):
        if field in SKIPPED_FIELDS or (is_zip and field == "keywords"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, SKIPPED_NODES):
                continue
            if not (isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"):
                yield from _own_changes(child, data, starts)
                yield from _changes(child, data, starts)


def _own_changes(  # noqa: C901  one case for each operator
    node: ast.AST, data: bytes, starts: list[int]
) -> Iterator[Change]:
    """Yield the changes of one node; the lines of the text start at the bytes `starts`."""

    def span(part: Any) -> tuple[int, int]:
        first, last = starts[part.lineno - 1], starts[part.end_lineno - 1]
        return first + part.col_offset, last + part.end_col_offset

    def source(part: ast.AST) -> str:
        start, end = span(part)
        return data[start:end].decode()

    def between(left: ast.AST, op: ast.AST, right: ast.AST, suffix: str = "") -> Iterator[Change]:
        old, new = SWAPPED.get(type(op), ("", ""))
        start = data.find(old.encode(), span(left)[1], span(right)[0])
        if old and start >= 0:
            yield start, start + len(old + suffix), new + suffix

    match node:
        case ast.BinOp(left, ast.MatMult(), right):
            yield *span(node), f"(({source(right)}) @ ({source(left)}))"
        case ast.BinOp(left, op, right):
            yield from between(left, op, right)
        case ast.AugAssign(target, op, value):
            yield from between(target, op, value, "=")
        case ast.BoolOp(op, values):
            for left, right in itertools.pairwise(values):
                yield from between(left, op, right)
        case ast.Compare(left, operators, values):
            for a, op, b in zip([left, *values], operators, values, strict=False):
                yield from between(a, op, b)
        case ast.UnaryOp(ast.Not() | ast.USub(), operand):
            yield *span(node), f"({source(operand)})"
        case ast.Constant(value=bool(value)):
            yield *span(node), str(not value)
        case ast.Constant(value=int(value)):
            yield *span(node), str(value + 1)
        case ast.Constant(value=float(value)):
            yield *span(node), str(2 * value or 1.0)
        case ast.Expr(ast.Call()):
            yield *span(node), "pass"
        case ast.Return(ast.List() | ast.ListComp() as value):
            yield *span(value), "[]"
        case ast.Return(ast.Dict() | ast.DictComp() as value):
            yield *span(value), "{}"
        case ast.Attribute(value, "mT" | "T"):
            yield *span(node), source(value)
        case ast.Attribute(value, name) if name in SWAPPED_NAMES:
            yield *span(node), f"{source(value)}.{SWAPPED_NAMES[name]}"
        case ast.Name(name) if name in SWAPPED_NAMES:
            yield *span(node), SWAPPED_NAMES[name]
        case _:
            pass


def load() -> tuple[dict[str, list[str]], list[dict[str, str]]]:
    """Read `mutants.toml`: the tests of each file, and the accepted survivors."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    return table["tests"], table.get("accepted", [])


class Noticed:
    """A plugin of pytest that writes the name of a test that fails beside the project."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.path.write_text(report.nodeid, encoding="utf-8")


def arguments_of(tests: Sequence[str]) -> list[str]:
    """Return pytest's arguments for tests: those that start processes only of folders for them."""
    processes = any("distributed" in test for test in tests)
    return ["-m", "not thorough" if processes else "not thorough and not distributed", *tests]


def run(root: Path, module: str, arguments: Sequence[str], timeout: float = LIMIT) -> int:
    """Run tests of the project at `root` in a forked process, and return pytest's exit code."""
    sys.stdout.flush()
    (root.parent / "noticed").unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        try:
            os._exit(_pytest(root, module, arguments))
        except BaseException:
            traceback.print_exc()
        os._exit(NO_VERDICT)
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)  # and the ranks that it started
    os.waitpid(child, 0)
    return ENDLESS


def _pytest(root: Path, module: str, arguments: Sequence[str]) -> int:
    """Run pytest in this process, its output in the file `output` beside the project."""
    os.setsid()
    output = os.open(root.parent / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.chdir(root)
    # A file that is broken twice within a second would be taken from the cache of its first form.
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_PROFILE": "verdict"}
    os.environ["PYTHONPATH"] = str(root)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(root))
    for name in [n for n in sys.modules if n.partition(".")[0] in {"tests", module}]:
        del sys.modules[name]
    spec = importlib.util.find_spec(module)
    if spec is None or root not in Path(str(spec.origin)).parents:
        raise ImportError(f"{module} would be imported from {spec}, not from {root}")
    import pytest

    plugins = [Noticed(root.parent / "noticed")]
    return int(pytest.main(["-xq", "-p", "no:cacheprovider", "-n0", *arguments], plugins=plugins))


def try_all(
    mutants: Sequence[Mutant],
    tests: dict[str, list[str]],
    accepted: Sequence[dict[str, str]] = (),
    root: Path = ROOT,
) -> list[Mutant]:
    """Try each mutant on a copy of the project, print the verdicts, return those not accepted."""
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copy = Path(scratch).resolve() / "project"
        shutil.copytree(root, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        for mutant in mutants:
            file, module = mutant.file, Path(mutant.file).with_suffix("").parts[0]
            original = (copy / file).read_text(encoding="utf-8")
            (copy / file).write_text(mutant.apply(original), encoding="utf-8")
            start = time.monotonic()
            arguments = arguments_of(tests[file])
            code = run(copy, module, arguments)
            (copy / file).write_text(original, encoding="utf-8")
            if code != PASSED:
                _require_health(copy, module, arguments, code)
            verdict = {PASSED: "SURVIVED", FAILED: "killed", ENDLESS: "killed (endless)"}.get(
                code, "killed (at import)"
            )
            if code == PASSED and any(matches(entry, mutant) for entry in accepted):
                verdict = "accepted"
            elif code == PASSED:
                survivors.append(mutant)
            seconds = time.monotonic() - start
            print(f"{verdict:<9} {seconds:4.0f} s  {file}:{mutant.line}  {mutant.change}")
            print(f"{'':<18}{mutant.source}", flush=True)
    killed = len(mutants) - len(survivors)
    rate = killed / max(len(mutants), 1)
    print(f"{killed} of {len(mutants)} mutants killed or accepted: {rate:.0%}")
    return survivors


def _require_health(copy: Path, module: str, arguments: Sequence[str], code: int) -> None:
    """Leave with an error if what fails with a mutant fails without it, too."""
    noticed = copy.parent / "noticed"
    if noticed.exists():
        arguments = [noticed.read_text(encoding="utf-8")]
    elif code not in (FAILED, ENDLESS):
        arguments = ["--collect-only", *arguments]
    if run(copy, module, arguments) != PASSED:
        print((copy.parent / "output").read_text(encoding="utf-8"))
        raise SystemExit(f"the tests fail without a mutant: {arguments}")


def matches(entry: dict[str, str], mutant: Mutant) -> bool:
    """Whether an accepted survivor is this mutant, on whichever line it stands now."""
    return all(entry[key] == getattr(mutant, key) for key in ("file", "source", "change"))


def chosen(files: Iterable[str], paths: Sequence[str]) -> list[str]:
    """Return the files of the table that are among these paths, or in one of them.

    Raises:
        SystemExit: If a path has none.
    """
    found = []
    for path in map(Path, paths):
        within = [file for file in files if path in (Path(file), *Path(file).parents)]
        if not within:
            raise SystemExit(f"mutants.toml has no tests for {path}")
        found += within
    return list(dict.fromkeys(found))


def main() -> None:
    """Try the mutants of the command line, and exit with 1 if one survives unaccepted."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--file", action="append", help="source files or folders; by default all")
    parser.add_argument("--sample", type=int, default=100, help="mutants to draw; 0 for all")
    parser.add_argument("--each", type=int, help="mutants to draw from each file, instead")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--list", action="store_true", help="list the mutants without trying them")
    options = parser.parse_args()
    tests, accepted = load()
    draws = random.Random(options.seed)
    mutants = []
    for file in chosen(tests, options.file or ["soframe"]):
        of_file = generate(file, (ROOT / file).read_text(encoding="utf-8"))
        if options.each is not None:
            of_file = draws.sample(of_file, min(options.each, len(of_file)))
        mutants += of_file
    if options.each is None and 0 < options.sample < len(mutants):
        mutants = draws.sample(mutants, options.sample)
    mutants.sort(key=lambda m: (m.file, m.start))
    if options.list:
        for mutant in mutants:
            print(f"{mutant.file}:{mutant.line}  {mutant.change}\n    {mutant.source}")
        return
    for name in LIBRARIES:
        importlib.import_module(name)
    sys.exit(bool(try_all(mutants, tests, accepted)))


if __name__ == "__main__":
    main()
