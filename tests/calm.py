"""Counts constructions that a reader has to unfold, in the code of soframe and of its experiments.

    python -m tests.calm [--files | --functions | --show KIND]

Per 1,000 lines of code, without docstrings, comments and blank lines, by room:

- comprehensions; "nested" those with two `for`, or inside another;
- conditional expressions; booleans (each `and` and `or`); starred arguments and elements;
- pronouns as names of variables and parameters, at each use (`PRONOUNS`; "left" beside a "right"
  is a side);
- "repeated": a list or text times anything but a number, other than `[0] * length` and its like,
  and products with a comparison.

Functions are counted above 10 and 15 branches: statements, booleans, conditional expressions,
comprehensions and their conditions, with those of functions and lambdas inside.

`BOUNDS` holds the highest values that tests/test_calm.py accepts, and `TARGETS` where they go. In
comparable libraries (curvlinops, optax, kfac-jax) comprehensions are 7 to 30, nested ones 0.1 to
0.7, conditional expressions 6 to 13, booleans 5 to 17, starred 3 to 11, pronouns 0.2 to 4.
"""

import argparse
import ast
import io
import tokenize
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PRONOUNS = {
    *("one", "own", "each", "given", "made", "found", "left", "whole"),
    *("told", "said", "wanted", "some", "mine", "beside", "others"),
}
KINDS = (
    "comprehensions",
    "nested",
    "conditional",
    "booleans",
    "starred",
    "pronouns",
    "repeated",
)
TARGETS = {
    "comprehensions": 35.0,
    "nested": 1.0,
    "conditional": 14.0,
    "booleans": 25.0,
    "starred": 10.0,
    "pronouns": 4.0,
    "repeated": 0.3,
    "functions above 15": 0,
    "functions above 10": 60,
}

BOUNDS: dict[str, dict[str, float]] = {
    "soframe": {
        "comprehensions": 34.4,
        "nested": 0.0,
        "conditional": 12.2,
        "booleans": 30.4,
        "starred": 7.6,
        "pronouns": 0.2,
        "repeated": 0.1,
        "functions above 15": 0,
        "functions above 10": 30,
    },
    "experiments": {
        "comprehensions": 30.1,
        "nested": 0.0,
        "conditional": 11.9,
        "booleans": 17.6,
        "starred": 9.8,
        "pronouns": 0.2,
        "repeated": 0.0,
        "functions above 15": 0,
        "functions above 10": 8,
    },
}

COMPREHENSION = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Code:
    """The text of one Python file, by its path below the repository."""

    file: str
    text: str

    @property
    def room(self) -> str:
        """Return the folder below `soframe`, the file in its root, or `experiments`."""
        top, name, *_ = Path(self.file).parts
        return f"{top}/{name}" if top == "soframe" else top

    @cached_property
    def tree(self) -> ast.Module:
        """Return the syntax tree."""
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> int:
        """Return the number of lines without docstrings, comments and blank lines."""
        skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT}
        skipped |= {tokenize.DEDENT, tokenize.ENDMARKER}
        code: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in skipped:
                code.update(range(token.start[0], token.end[0] + 1))
        for node in ast.walk(self.tree):
            match node:
                case ast.Expr(ast.Constant(str()), lineno=first, end_lineno=int(last)):
                    code.difference_update(range(first, last + 1))  # also below an attribute
                case _:
                    pass
        return len(code)

    @cached_property
    def places(self) -> list[tuple[str, int]]:
        """Return the kind and the line of each construction."""
        places = []
        inside: set[int] = set()  # nodes inside of comprehensions
        names = {getattr(node, "id", getattr(node, "arg", None)) for node in ast.walk(self.tree)}
        for node in ast.walk(self.tree):  # a comprehension before the nodes inside
            if isinstance(node, ast.Name | ast.arg) and _is_side(node, names):
                continue
            places += [(kind, getattr(node, "lineno", 0)) for kind in _kinds(node)]
            if isinstance(node, COMPREHENSION):
                if len(node.generators) > 1 or id(node) in inside:
                    places.append(("nested", node.lineno))
                inside.update(map(id, ast.walk(node)))
        return places

    @cached_property
    def functions(self) -> list[tuple[str, int, int]]:
        """Return the name, the line and the branches of each function outside of functions."""
        return list(_functions(self.tree, ()))


def _is_side(node: ast.Name | ast.arg, names: Collection[str | None]) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.arg
    return name == "left" and "right" in names


def _kinds(node: ast.AST) -> Iterator[str]:
    """Yield the kinds of constructions that a node is, but "nested"."""
    match node:
        case ast.ListComp() | ast.SetComp() | ast.DictComp() | ast.GeneratorExp():
            yield "comprehensions"
        case ast.IfExp():
            yield "conditional"
        case ast.BoolOp():
            yield from ["booleans"] * (len(node.values) - 1)
        case ast.Starred():
            yield "starred"
        case ast.Name(id=name) | ast.arg(arg=name):
            if name in PRONOUNS:
                yield "pronouns"
        case ast.BinOp(left, ast.Mult(), right):
            if _repeats(left, right) or _repeats(right, left):
                yield "repeated"
        case _:
            pass


def _repeats(factor: ast.expr, by: ast.expr) -> bool:
    """Return whether a list or text is repeated, or a truth value is used as a number."""
    match factor:
        case ast.List([ast.Constant(int() | float() | None) | ast.UnaryOp(ast.USub())]):
            return False  # the usual way to fill a list
        case ast.List() | ast.Tuple() | ast.ListComp() | ast.JoinedStr() | ast.Constant(str()):
            return not isinstance(by, ast.Constant)
        case ast.Compare() | ast.BoolOp() | ast.UnaryOp(ast.Not()):
            return True
        case _:
            return False


def _functions(node: ast.AST, names: Sequence[str]) -> Iterator[tuple[str, int, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, FUNCTION):
            name = ".".join([*names, child.name])
            yield name, child.lineno, 1 + sum(map(_branches, ast.walk(child)))
        elif isinstance(child, ast.ClassDef):
            yield from _functions(child, [*names, child.name])
        else:
            yield from _functions(child, names)


def _branches(node: ast.AST) -> int:
    """Return by how many paths a node alone makes a function longer."""
    match node:
        case (
            ast.If() | ast.For() | ast.While() | ast.AsyncFor() | ast.IfExp() | ast.ExceptHandler()
        ):
            return 1
        case ast.BoolOp():
            return len(node.values) - 1
        case ast.comprehension():
            return 1 + len(node.ifs)
        case ast.match_case(pattern=ast.MatchAs(pattern=None), guard=None):
            return 0  # the rest
        case ast.match_case():
            return 1
        case _:
            return 0


def read() -> dict[str, list[Code]]:
    """Return the files of the package and of the experiments."""
    return {
        top: [
            Code(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))
            for path in sorted(ROOT.glob(f"{top}/**/*.py"))
        ]
        for top in ("soframe", "experiments")
    }


def rates(files: Sequence[Code]) -> dict[str, float]:
    """Return the constructions per 1,000 lines, and the functions with many branches."""
    lines = max(sum(file.lines for file in files), 1)
    counts = Counter(kind for file in files for kind, _ in file.places)
    branches = [number for file in files for _, _, number in file.functions]
    return {
        **{kind: 1000 * counts[kind] / lines for kind in KINDS},
        "functions above 15": sum(number > 15 for number in branches),
        "functions above 10": sum(number > 10 for number in branches),
    }


def _print_table(groups: dict[str, list[Code]]) -> None:
    """Print the rates of groups of files, those with the most constructions first."""
    heads = [kind.replace("functions above ", "> ") for kind in TARGETS]
    print(f"{'lines':>7}" + "".join(f"{head:>15}" for head in heads))
    for name in sorted(groups, key=lambda name: -sum(len(file.places) for file in groups[name])):
        values = "".join(f"{value:>15.4g}" for value in rates(groups[name]).values())
        print(f"{sum(file.lines for file in groups[name]):>7}{values}  {name}")


def main() -> None:
    """Print the rates by room or by file, the functions, or the places of one kind."""
    parser = argparse.ArgumentParser(description="count constructions to be unfolded")
    parser.add_argument("--files", action="store_true", help="print the rates by file")
    parser.add_argument("--functions", action="store_true", help="list those above 10 branches")
    parser.add_argument("--show", choices=KINDS, help="list the places of one kind")
    options = parser.parse_args()
    everything = read()
    files = everything["soframe"] + everything["experiments"]
    if options.show:
        for file in files:
            text = file.text.splitlines()
            for kind, line in sorted(file.places, key=lambda place: place[1]):
                if kind == options.show:
                    print(f"{file.file}:{line}: {text[line - 1].strip()}")
        return
    if options.functions:
        functions = [
            (n, f"{file.file}:{at}: {name}") for file in files for name, at, n in file.functions
        ]
        for number, place in sorted(functions, reverse=True):
            if number > 10:
                print(f"{number:>4}  {place}")
        return
    groups: dict[str, list[Code]] = {}
    for file in files:
        groups.setdefault(file.file if options.files else file.room, []).append(file)
    _print_table(groups)
    print()
    _print_table(everything)
    print(f"{'target':>7}" + "".join(f"{target:>15.4g}" for target in TARGETS.values()))


if __name__ == "__main__":
    main()
