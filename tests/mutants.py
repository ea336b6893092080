"""Mutation testing: break the code by operators over its syntax tree, each must make a test fail.

    python -m tests.mutants --file soframe/methods/eva.py --sample 10 --seed 1

`mutants.toml` maps each source file that holds mathematics or agreement between ranks to the tests
that must notice, and lists the accepted survivors with their reasons. The tests of all mutants are
collected once, in a copy of the project. For each mutant the process forks, exchanges the code of
the function that is broken, and runs the file's tests until the first failure, those first that
share most words with its name. What is broken outside of functions, or survives in one that ran
before the tests did, is tried by a new process. The test that fails then runs without the mutant,
where it has to pass.

Neither mutmut nor cosmic-ray does this: mutmut replaces each method by a trampoline, which breaks
code that asks whether a subclass overrides a method, and needs a recorded run of the whole suite;
cosmic-ray has one test command for all files and imports torch anew for each mutant.
"""

import argparse
import ast
import bisect
import gc
import inspect
import itertools
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

NOT_COPIED = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "_build", "build", "runs")
PASSED, FAILED, ENDLESS = 0, 1, -1  # of pytest, and one of ours
CACHE = Path(".pytest_cache")
FAILURES = CACHE / "v/cache/lastfailed"
OPTIONS = ["-xq", "-n0", "-m", "not thorough"]
FOLDERS_OF_RANKS = ("tests/distributed", "tests/compatibility")
LIMIT = 1800  # seconds of a run without a verdict; a test that hangs fails by pytest's own limit
SIGNS = (
    "Add:+:-, Sub:-:+, Mult:*:/, Div:/:*, FloorDiv://:*, Mod:%://, Pow:**:*, BitAnd:&:|, "
    "BitOr:|:&, And:and:or, Or:or:and, Eq:==:!=, NotEq:!=:==, Lt:<:>=, LtE:<=:>, Gt:>:<=, "
    "GtE:>=:<, Is:is:is not, IsNot:is not:is, In:in:not in, NotIn:not in:in"
)
SWAPPED = {kind: signs for kind, *signs in (one.split(":") for one in SIGNS.split(", "))}
PAIRS = "add/sub add_/sub_ mul/div mul_/div_ max/min maximum/minimum amax/amin any/all sum/mean"
SWAPPED_NAMES = {
    name: other for pair in PAIRS.split() for name, other in itertools.permutations(pair.split("/"))
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
    text: str
    """The file without the change."""

    @property
    def change(self) -> str:
        """The change on one line: `old -> new`."""
        return f"{' '.join(self.old.split())} -> {' '.join(self.new.split())}"

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.change}\n{'':<18}{self.source}"

    @property
    def broken(self) -> str:
        """The text of the file with the change."""
        data = self.text.encode()
        return (data[: self.start] + self.new.encode() + data[self.end :]).decode()

    def function(self, path: Path) -> tuple[CodeType, CodeType] | None:
        """The function of the file at `path` that is broken, without and with the change.

        None if something else is, too, such as a default.
        """
        old, new = (compile(text, path, "exec") for text in (self.text, self.broken))
        while not new.co_flags & inspect.CO_OPTIMIZED:  # the body of a module or class
            pairs = itertools.zip_longest(old.co_consts, new.co_consts)
            unequal = [pair for pair in pairs if pair[0] != pair[1]]
            if old.co_code != new.co_code or [type(pair[1]) for pair in unequal] != [CodeType]:
                return None
            [(old, new)] = unequal
        return (old, new) if old.co_freevars == new.co_freevars else None


Change = tuple[int, int, str]  # the bytes from start to end become this text


def candidates(file: str, text: str) -> Iterator[Mutant]:
    """Yield the mutants of a file, of which a few do not compile, in the order of the text."""
    data = text.encode()
    lines = data.splitlines(keepends=True)
    starts = list(itertools.accumulate(map(len, lines), initial=0))
    for start, end, new in sorted(set(_changes(ast.parse(text), data, starts))):
        line = bisect.bisect(starts, start)
        source = lines[line - 1].decode().strip()
        mutant = Mutant(file, line, start, end, data[start:end].decode(), new, source, text)
        if mutant.old != new:  # not an empty list or dict
            yield mutant


def _changes(node: ast.AST, data: bytes, starts: list[int]) -> Iterator[Change]:
    """Yield the changes of all nodes below one."""
    is_zip = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "zip"
    for field, value in ast.iter_fields(node):
        if field in SKIPPED_FIELDS or (is_zip and field == "keywords"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if not isinstance(child, ast.AST) or isinstance(child, SKIPPED_NODES):
                continue
            if not (isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING"):
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
        old, new = SWAPPED.get(type(op).__name__, ("", ""))
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
    """Read `tests/mutants.toml`: the tests of each file, and the accepted survivors."""
    table = tomllib.loads(Path("tests/mutants.toml").read_text(encoding="utf-8"))
    return table["tests"], table.get("accepted", [])


class Trials:
    """A plugin of pytest that tries each mutant on the collected tests, in a fork."""

    def __init__(self, copy: Path, mutants: Sequence[Mutant], tests: dict[str, list[str]]) -> None:
        self.copy, self.mutants, self.tests = copy, mutants, tests
        self.printed = sys.stdout  # which pytest replaces
        self.ran: set[CodeType] = set()  # before the tests
        self.survivors: list[Mutant] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        sys.settrace(None)
        collected = list(session.items)
        for mutant in self.mutants:
            path, start = self.copy / mutant.file, time.monotonic()
            function = mutant.function(path)
            name = function[0].co_qualname if function else ""
            items = chosen_items(collected, self.tests[mutant.file], f"{mutant.file} {name}")
            path.write_text(mutant.broken, encoding="utf-8")
            shutil.rmtree(CACHE, ignore_errors=True)
            code = forked(session, items) if function else PASSED
            if code is None:
                exchange(*function)
                return None  # and pytest runs the items
            ran = function is None or function[0] in self.ran
            if ran and code == PASSED and (code := forked(session, items)) is None:
                tests = dict.fromkeys(item.nodeid.partition("[")[0] for item in items)
                os.dup2(sys.stdout.fileno(), 1)
                os.execv(sys.executable, [sys.executable, "-m", "pytest", *OPTIONS, *tests])
            path.write_text(mutant.text, encoding="utf-8")
            if code == FAILED:
                names = json.loads(FAILURES.read_text())
                healthy = forked(session, [item for item in items if item.nodeid in names])
                if healthy is None:
                    return None
                if healthy != PASSED:
                    pytest.exit(f"tests fail without a mutant: {[*names]}", 3)
            verdict = {PASSED: "SURVIVED", ENDLESS: "UNDECIDED"}.get(code, "killed")
            if verdict != "killed":
                self.survivors.append(mutant)
            seconds = time.monotonic() - start
            print(f"{verdict:<9} {seconds:4.0f} s  {mutant}", file=self.printed, flush=True)
        return True


def chosen_items(items: list[pytest.Item], tests: list[str], broken: str) -> list[pytest.Item]:
    """Return the items of these tests, first those that share most words with what is broken.

    Those that start processes come last: the ones that are named with ``::``, or all if a folder
    for them is among the tests.
    """
    found = {}
    starts = any(test.startswith(FOLDERS_OF_RANKS) for test in tests)
    words = set(re.findall("[a-z]+", broken.lower()))
    for test, item in itertools.product(tests, items):
        distributed = item.get_closest_marker("distributed") is not None
        within = f"{item.nodeid}::".startswith((f"{test}/", f"{test}::", f"{test}["))
        if within and (starts or "::" in test or not distributed):
            shared = words.intersection(re.findall("[a-z]+", item.nodeid.lower()))
            found[item] = distributed, -len(shared)
    return sorted(found, key=found.__getitem__)


def exchange(old: CodeType, new: CodeType) -> None:
    """Give the new code to all functions that have the old one."""
    gc.unfreeze()
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__ == old:
            one.__code__ = new
    gc.freeze()


def forked(session: pytest.Session, items: Sequence[pytest.Item]) -> int | None:
    """Fork, and return the exit code of the process that runs these items; in that itself, None."""
    session.items[:] = items
    child, deadline = os.fork(), time.monotonic() + LIMIT
    if child == 0:
        os.setsid()
        return None
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)  # and the ranks that it started
    os.waitpid(child, 0)
    return ENDLESS


def try_all(copy: Path, mutants: Sequence[Mutant], tests: dict[str, list[str]]) -> list[Mutant]:
    """Try each mutant on a copy of the project, print the verdicts, and return the survivors."""
    own, trials = os.getpid(), Trials(copy, mutants, tests)
    os.chdir(copy)
    # A file that is broken twice within a second would be taken from the cache of its first form.
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_PROFILE": "verdict"}
    os.environ["PYTHONPATH"] = str(copy)
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(copy))
    sys.modules.pop("tests", None)  # that of the project itself
    files = {test.partition("::")[0]: None for m in mutants for test in tests[m.file]}
    output = (copy.parent / "output").open("w+", buffering=1)
    with output, redirect_stdout(output), redirect_stderr(output):
        sys.settrace(lambda frame, *_: trials.ran.add(frame.f_code))
        code = int(pytest.main([*OPTIONS, *files], plugins=[trials]))
        if os.getpid() != own:
            os._exit(code)
    if code != PASSED:
        raise SystemExit((copy.parent / "output").read_text(encoding="utf-8"))
    return trials.survivors


def matches(entry: dict[str, str], mutant: Mutant) -> bool:
    """Whether an accepted survivor is this mutant, on whichever line it stands now."""
    return all(entry[key] == getattr(mutant, key) for key in ("file", "source", "change"))


def chosen(files: Iterable[str], paths: Sequence[str]) -> list[str]:
    """Return the files of the table that are among these paths, or in one of them."""
    found = []
    for path in map(Path, paths):
        within = [file for file in files if path in (Path(file), *Path(file).parents)]
        if not within:
            raise SystemExit(f"mutants.toml has no tests for {path}")
        found += within
    return list(dict.fromkeys(found))


def draw(found: Sequence[Mutant], count: int, draws: random.Random) -> list[Mutant]:
    """Draw so many of the mutants that compile, or all for a count of 0."""
    drawn = []
    for mutant in draws.sample(found, len(found)):
        with suppress(SyntaxError):
            mutant.function(Path(mutant.file))
            drawn.append(mutant)
        if len(drawn) == count:
            break
    return sorted(drawn, key=lambda m: (m.file, m.start))


def main() -> None:
    """Try the mutants of the command line, and exit with 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--file", action="append", help="source files or folders; by default all")
    parser.add_argument("--sample", type=int, default=100, help="mutants to draw; 0 for all")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--list", action="store_true", help="list the mutants without trying them")
    options = parser.parse_args()
    tests, accepted = load()
    pool = []
    for file in chosen(tests, options.file or ["soframe"]):
        pool += candidates(file, Path(file).read_text(encoding="utf-8"))
    drawn = draw(pool, options.sample, random.Random(options.seed))
    if options.list:
        print(*drawn, sep="\n")
        return
    new = [m for m in drawn if not any(matches(entry, m) for entry in accepted)]
    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copy = Path(scratch).resolve() / "project"
        shutil.copytree(Path.cwd(), copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        survivors = try_all(copy, new, tests)
    died, rest = len(drawn) - len(survivors), len(drawn) - len(new)
    print(f"{died} of {len(drawn)} killed or accepted ({rest}): {died / len(drawn):.0%}")
    sys.exit(bool(survivors))


if __name__ == "__main__":
    main()
