"""Counts turns of phrase that a reader has to translate, in docstrings, comments and documentation.

    python -m tests.prose [--show PATTERN]

Per 1,000 words, by file, the worst first: noun clauses in place of a noun ("what is reduced" for
"the sum"), verbs of people for machines, "that of" and its kin, "there is", "nobody". Code between
backticks and in fences does not count, and questions are no noun clauses.

`BOUNDS` holds the highest rates that tests/test_prose.py accepts, `TARGETS` where they go. In
comparable libraries (curvlinops, optax, kfac-pytorch) they are 0 to 0.5, and 5 to 22 comments stand
in 100 lines of code.
"""

import argparse
import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_SAY = "say|says|said|saying|tell|tells|told|telling|know|knows|knew|knowing|hear|hears|heard"
PATTERNS = {
    name: re.compile(pattern, re.IGNORECASE)
    for name, pattern in {
        "noun clause": r"\b(what|whatever)\b(?!\s+(to|if)\b)(?=\s+\w)(?![^.:;]*\?)",
        "say, tell": rf"\b({_SAY}|hearing|ask|asks|asked|asking)\b",
        "that of": r"\b(that\s+of|those\s+of|of\s+which|of\s+whom|besides|likewise)\b",
        "there is": r"\bthere\s+(is|are|was|were)\b",
        "nobody": r"\b(nobody|somebody|everybody|no\s+one|someone|everyone)\b",
    }.items()
}
TARGETS = {"noun clause": 0.4, "say, tell": 0.4, "that of": 0.4, "there is": 1.0, "nobody": 0.0}
COMMENTS_TARGET = 5.0
"""Comments per 100 lines of code."""

BOUNDS: dict[str, dict[str, float]] = {
    "code": {"noun clause": 0.2, "say, tell": 0.2, "that of": 0.2, "there is": 0.2, "nobody": 0.1},
    "docs": {"noun clause": 0.8, "say, tell": 0.2, "that of": 0.2, "there is": 0.2, "nobody": 0.1},
}
COMMENTS_BOUND = 3.7
"""The fewest comments per 100 lines of code."""


@dataclass(frozen=True)
class Prose:
    """The prose of one file, in pieces that begin on a line."""

    file: str
    pieces: Sequence[tuple[int, str]]

    @property
    def words(self) -> int:
        """Return the number of words."""
        return sum(len(re.findall(r"[^\W\d][\w'-]*", text)) for _, text in self.pieces)

    def found(self, pattern: str) -> Iterator[tuple[int, str]]:
        """Yield the line and the words around each match of a pattern."""
        for line, text in self.pieces:
            for match in PATTERNS[pattern].finditer(text):
                around = text[max(match.start() - 40, 0) : match.end() + 50]
                yield line + text.count("\n", 0, match.start()), " ".join(around.split())


def of_python(file: str, text: str) -> Prose:
    """Return the docstrings and comments of a Python file."""
    pieces = []
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(ast.Constant(str(value)), lineno=line):
                pieces.append((line, _without_code(value)))
            case _:
                pass
    previous = -1
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT:
            continue
        line, words = token.start[0], _without_code(token.string.lstrip("# "))
        if line == previous + 1:
            first, before = pieces.pop()
            pieces.append((first, f"{before}\n{words}"))
        else:
            pieces.append((line, words))
        previous = line
    return Prose(file, pieces)


def of_markdown(file: str, text: str) -> Prose:
    """Return the text of a page without its code and comments."""
    plain = re.sub(r"^( *)(```+|~~~+).*?^\1\2 *$", _blank, text, flags=re.MULTILINE | re.DOTALL)
    plain = re.sub(r"<!--.*?-->", _blank, plain)
    return Prose(file, [(1, _without_code(plain))])


def _without_code(text: str) -> str:
    return re.sub(r"(`+)[^`]+\1", _blank, text)


def _blank(match: re.Match[str]) -> str:
    return "\n" * match[0].count("\n")


def comments(text: str) -> tuple[int, int]:
    """Return the number of comments in a Python file that are for readers, and of lines of code."""
    tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    machines = re.compile(r"# *(noqa|type:|pragma|fmt:|!)")
    found = [t for t in tokens if t.type == tokenize.COMMENT and not machines.match(t.string)]
    code = {t.start[0] for t in tokens if t.type in (tokenize.OP, tokenize.NAME, tokenize.NUMBER)}
    return len(found), len(code)


def read() -> dict[str, list[Prose]]:
    """Return the prose of the package and that of the documentation."""

    def texts(*patterns: str) -> Iterator[tuple[str, str]]:
        for pattern in patterns:
            for path in sorted(ROOT.glob(pattern)):
                if "_build" not in path.parts and "generated" not in path.parts:
                    yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")

    return {
        "code": [of_python(*one) for one in texts("soframe/**/*.py")],
        "docs": [of_markdown(*one) for one in texts("README.md", "docs/**/*.md")],
    }


def rates(files: Sequence[Prose]) -> dict[str, float]:
    """Return the matches of each pattern per 1,000 words."""
    words = max(sum(file.words for file in files), 1)
    return {
        name: 1000 * sum(len(list(file.found(name))) for file in files) / words for name in PATTERNS
    }


def comment_rate() -> float:
    """Return the comments per 100 lines of code of the package."""
    found = Counter[str]()
    for path in ROOT.glob("soframe/**/*.py"):
        number, code = comments(path.read_text(encoding="utf-8"))
        found.update(comments=number, code=code)
    return 100 * found["comments"] / found["code"]


def main() -> None:
    """Print the rates of all files, or the places of one pattern."""
    parser = argparse.ArgumentParser(description="count turns of phrase to be translated")
    parser.add_argument("--show", choices=PATTERNS, help="list the places of one pattern")
    options = parser.parse_args()
    everything = read()
    if options.show:
        for file in everything["code"] + everything["docs"]:
            for line, words in file.found(options.show):
                print(f"{file.file}:{line}: {words}")
        return
    print(f"{'words':>7}" + "".join(f"{name:>13}" for name in PATTERNS))
    rows = []
    for kind, files in everything.items():
        rows.append((kind, files))
        # A turn in a docstring of ten words is no worse than thirty on a page.
        worst = sorted(files, key=lambda f: -sum(rates([f]).values()) * min(1, f.words / 300))
        rows += [(f"  {file.file}", [file]) for file in worst]
    for name, files in rows:
        numbers = "".join(f"{rate:>13.1f}" for rate in rates(files).values())
        print(f"{sum(file.words for file in files):>7}{numbers}  {name}")
    print(f"{'target':>7}" + "".join(f"{target:>13.1f}" for target in TARGETS.values()))
    print(f"comments per 100 lines of code: {comment_rate():.1f}, target {COMMENTS_TARGET}")


if __name__ == "__main__":
    main()
