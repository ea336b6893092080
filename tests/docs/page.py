"""Run the code of one page of the documentation: `python page.py PAGE`.

Every fence of a page that opens with ```python runs, in order, in one namespace. One that opens
with ```python raises=ValueError has to raise this error, and one with ```python notest is shown to
the reader only. Tracebacks name the page and its lines.
"""

import re
import sys
import traceback
import types
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^(?P<indent>[ >]*)(?P<marks>`{3,}|~{3,})[ \t]*(?P<info>[^`]*)$")
RAISES = re.compile(r"python raises=(?P<error>\w+)")
# Other ways to show Python, which would not be run.
DISGUISES = ("py", "python3", "{code-block} python", "{code} python", "{sourcecode} python")


@dataclass(frozen=True)
class Block:
    """The code of one fence, the page's line that it starts on, from 1, and its error if any."""

    code: str
    line: int
    raises: str | None = None


def blocks(text: str, first_line: int = 1) -> list[Block]:
    """The blocks of a page that are to be run; also those inside directives like {note}."""
    lines = text.splitlines()
    found: list[Block] = []
    at = 0
    while at < len(lines):
        fence = FENCE.match(lines[at])
        at += 1
        if fence is None:
            continue
        start, indent, marks = at, fence["indent"], fence["marks"]
        close = re.compile(rf"^[ >]*{marks[0]}{{{len(marks)},}}\s*$")
        while at < len(lines) and not close.match(lines[at]):
            at += 1
        if at == len(lines):
            raise ValueError(f"line {first_line + start - 1}: this fence is never closed")
        body = "\n".join(unindent(line, indent) for line in lines[start:at])
        at += 1
        words, line = fence["info"].split(), first_line + start
        if " ".join(words[:2]) in DISGUISES or " ".join(words[:1]) in DISGUISES:
            raise ValueError(f"line {line - 1}: write ```python, so that the code is run")
        option = RAISES.fullmatch(" ".join(words))
        if words[:1] == ["python"] and words[1:] not in ([], ["notest"]) and not option:
            raise ValueError(
                f"line {line - 1}: after ```python only 'notest' or 'raises=SomeError' may stand"
            )
        if words == ["python"]:
            found.append(Block(body, line))
        elif option:
            found.append(Block(body, line, option["error"]))
        elif words and words[0].startswith("{"):
            found += blocks(body, line)
    return found


def unindent(line: str, indent: str) -> str:
    """Take off what stands before a fence, from a line inside it; an empty line may lack it."""
    return line[len(indent) :] if line.startswith(indent) else line.lstrip(" >")


def run(page: Path) -> None:
    """Run a page in this process, as the module `__main__`."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # where pickle, dataclasses and typing look names up
    for block in blocks(page.read_text(encoding="utf-8")):
        # Empty lines before the code make Python count lines as the page does.
        code = "\n" * (block.line - 1) + block.code + "\n"
        try:
            exec(compile(code, str(page), "exec"), module.__dict__)
        except Exception as error:
            if type(error).__name__ != block.raises:
                raise
        else:
            if block.raises:
                # Raised from the fence's first line, which the failure then names.
                missing = f"raise AssertionError('this code raised no {block.raises}')"
                exec(compile("\n" * (block.line - 1) + missing, str(page), "exec"))


def main(page: Path) -> int:
    """Run a page; on failure print the traceback and, last, page, line and error."""
    try:
        run(page)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        # The outermost line of the page: where the reader's code, from top to bottom, stopped.
        line = next((f.lineno or 0 for f in frames if f.filename == str(page)), 0)
        if isinstance(error, SyntaxError) and error.filename == str(page):
            line = error.lineno or 0
        traceback.print_exc()
        print(f"{page}:{line}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
